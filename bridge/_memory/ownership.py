"""Find out whether memory that a torch storage cannot resize belongs to that storage alone.

Files are loaded into such memory. torch.load gives each storage its own allocation; mapped files (safetensors, torch.load with mmap=True)
give it a part of a private mapping. Arrays of NumPy and capsules of DLPack look the same, but their memory has another owner.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from functools import cached_property
from operator import itemgetter

import torch

from bridge._compat.torch import lazy_clone

# Whether an array over a tensor holds the storage by a tensor of its own, which torch then counts as a user of the storage.
_ARRAYS_HOLD_STORAGE = (lambda tensor: tensor.numpy().base is not tensor)(torch.zeros(1))
_Ranges = list[tuple[int, int]]


class FileMappings:
    """The process's private file mappings that no Python object made, as they are when a tensor is first looked up.

    A loader of weights makes such mappings. Writes to one reach neither the file nor another process. A mapping made by an `mmap`
    (numpy.memmap) may have views.
    """

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in such a mapping. It must have existed at the first lookup."""
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        nth = bisect_right(self._ranges, first, key=itemgetter(0)) - 1
        return nth >= 0 and last <= self._ranges[nth][1]

    @cached_property
    def _ranges(self) -> _Ranges:
        return _private_file_ranges()


def is_owned(tensor: torch.Tensor, mappings: FileMappings) -> bool:
    """Return whether only the tensor's storage, which cannot be resized, holds its memory."""
    return tensor.device.type == "cpu" and (_is_allocation(tensor) or tensor in mappings)


def _is_allocation(tensor: torch.Tensor) -> bool:
    """Return whether the memory is one allocation that nothing else keeps alive.

    torch makes a lazy clone of a storage only if it could free the memory without another object. The clone is deleted at once, and
    `data_ptr` makes the storage an ordinary one again.
    """
    if not _ARRAYS_HOLD_STORAGE or lazy_clone is None:
        return False
    try:
        with torch.no_grad():
            lazy_clone(tensor.detach())
    except RuntimeError:
        return False
    return bool(tensor.data_ptr())


def _private_file_ranges() -> _Ranges:
    """Return the sorted address ranges of private, writable mappings of files that are not open; [] if the system does not list them."""
    try:
        with open("/proc/self/maps") as file:
            lines = [line.split(maxsplit=5) for line in file]
    except OSError:
        return []
    files = [line for line in lines if len(line) == 6 and line[4] != "0"]
    programs = {(line[3], line[4]) for line in files if "x" in line[1]}  # such a mapping may also hold a library's variables
    inodes, paths = _open_files()
    return sorted(
        _parse_range(line[0])
        for line in files
        if line[1] == "rw-p" and (line[3], line[4]) not in programs and line[4] not in inodes and line[5].strip() not in paths
    )


def _parse_range(text: str) -> tuple[int, int]:
    first, last = text.split("-")
    return int(first, 16), int(last, 16)


def _open_files() -> tuple[set[str], set[str]]:
    """Return the inodes and paths of this process's open files. Python's mmap, and so numpy.memmap, keeps its file open.

    Devices are left out: the kernel's list and `fstat` may name different ones for the same file.
    """
    inodes: set[str] = set()
    paths: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISREG(status.st_mode):  # the inode of a pipe or socket may be that of another file
                inodes.add(str(status.st_ino))
            paths.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor of the listing is closed by now
            continue
    return inodes, paths
