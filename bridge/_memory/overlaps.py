"""Find tensors that share elements in memory, with each other or with themselves, by their addresses and strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from bridge._interop.tensor_storage import why_unreadable


def first_overlap(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that share a byte; None if no two do.

    A tensor that overlaps itself gives its position twice. Interleaved tensors (columns of one matrix) share no byte.
    """
    readable = [(i, t) for i, t in enumerate(tensors) if t.numel() and not why_unreadable(t)]
    extents = [(str(t.device), t.data_ptr(), t.data_ptr() + _span(t) * t.element_size(), i) for i, t in readable]
    open_: list[tuple[str, int, int, int]] = []  # extents that reach beyond the start of the next one
    for device, start, end, i in sorted(each for each in extents if each[1]):
        if overlaps_itself(tensors[i]):
            return i, i
        open_ = [other for other in open_ if other[0] == device and other[2] > start]
        for *_, j in open_:
            if _share_bytes(tensors[j], tensors[i]):
                return min(i, j), max(i, j)
        open_.append((device, start, end, i))
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor are at the same address."""
    if not tensor.numel() or tensor.is_contiguous():
        return False
    reach, sure = 1, True
    sizes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in sizes:
        sure &= stride >= reach  # each step passes all elements of the dimensions before
        reach += stride * (size - 1)
    if sure or sizes[0][0] == 0:
        return not sure
    places = reduce(np.add.outer, (np.arange(size) * stride for stride, size in sizes))
    return len(np.unique(places)) < places.size


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements between the first and the last address, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Elements:
    """The addresses of a tensor's elements as numpy's array interface. Nobody reads the elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        self.__array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides, "typestr": f"|V{size}", "version": 3,
        }  # fmt: skip


def _share_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping extents share a byte. If the search takes too long, the answer is yes."""
    if _span(first) == first.numel() and _span(second) == second.numel():  # no gaps
        return True
    try:
        return np.shares_memory(np.asarray(_Elements(first)), np.asarray(_Elements(second)), max_work=10**6)  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True
