"""Where the bytes of parameters and state live, and how results get back into them.

jax cannot donate a buffer that it imported, so the buffers here are jax's own and torch looks into them: a tensor over
`unsafe_buffer_pointer()` sees each new value at the same address once the buffer has been donated to the call that
computes it. The view is made through the array interface, never through DLPack: a DLPack export pins the buffer, and
XLA then copies instead of reusing it. `Memory` is what both sides hold on to.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .dlpack import EXTENSION_DTYPES, dense_order, device_of, numpy_dtype, to_torch, x64

# The array interfaces of numpy and CUDA know no bfloat16 or float8: their bits travel as integers of the same width.
_BITS = {np.dtype(dtype): (numpy_dtype(bits), extension) for extension, (bits, dtype) in EXTENSION_DTYPES.items()}

_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


class Memory:
    """One jax-owned buffer that a torch tensor looks into.

    `array` is the jax array that owns the bytes now; each donated call ends by putting its result here. The torch
    storage holds this object, so that parameters outlive the optimizer, and the object holds the array.
    """

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "__weakref__", "address", "array")

    def __init__(self, array: jax.Array) -> None:
        self.array = array
        self.address = array.unsafe_buffer_pointer()
        bits, _ = _BITS.get(np.dtype(array.dtype), (array.dtype, None))
        interface = {"data": (self.address, False), "shape": array.shape, "typestr": np.dtype(bits).str, "version": 3}
        if next(iter(array.devices())).platform == "cpu":
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface

    def tensor(self, device: torch.device, like: torch.Tensor | None = None) -> torch.Tensor:
        """A torch tensor over this memory, which it keeps alive; of the buffer's shape, or shape and strides of `like`.

        Where `like` is not dense, the tensor is contiguous.
        """
        view = self._flat_view(device)
        if like is None:
            return view
        return view.view(like.shape) if dense_order(like) is None else view.as_strided(like.shape, like.stride())

    def _flat_view(self, device: torch.device) -> torch.Tensor:
        bits, dtype = _BITS.get(np.dtype(self.array.dtype), (self.array.dtype, None))
        if not self.array.size:  # no bytes, nothing to look into
            view = torch.from_numpy(np.asarray(self.array).astype(bits)).to(device)
        else:
            view = torch.from_numpy(np.asarray(self)) if device.type == "cpu" else torch.as_tensor(self, device=device)
        return view if dtype is None else view.view(dtype)


class Placement(NamedTuple):
    """How one tensor takes part: `memory` None means that results are copied into the tensor's own storage.

    `order` permutes the tensor's dimensions to the order of its memory (None: as they are); `why` is for the report.
    """

    memory: Memory | None
    order: tuple[int, ...] | None
    why: str


def place(tensor: torch.Tensor, writeback: str = "inplace") -> Placement:
    """Move a parameter's bytes into jax-owned memory that it then looks into, where it owns its storage alone.

    The tensor keeps shape, strides, dtype, device, values and identity; its `data_ptr` changes once. A tensor that is
    in such memory already is left there. A tensor that shares its storage (a view, an alias, shared memory, a slice of
    a flat buffer) or is not dense is left alone: replacing it would cut it off from the other holders.

    Args:
      tensor: a dense CPU or CUDA tensor; a leaf, or detached.
      writeback: "inplace", or "copy" to leave every tensor where it is.
    """
    order = dense_order(tensor)
    dims = None if order is None or order == tuple(range(tensor.ndim)) else order
    known = _memories.get(tensor.data_ptr())
    if known is not None and _covers(known, tensor, order):
        return Placement(known, dims, "in jax-owned memory") if writeback == "inplace" else Placement(None, dims, "asked for")
    why = "asked for" if writeback == "copy" else _cannot_own(tensor, order)
    if why:
        return Placement(None, dims, why)
    memory = own(tensor, like=tensor)
    tensor.data = memory.tensor(tensor.device, like=tensor)
    return Placement(memory, dims, "in jax-owned memory")


def own(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Memory:
    """A copy of the tensor's values in new jax-owned memory: its dtype and device, elements in the memory order of `like`.

    The buffer is flat: XLA's loops run over the innermost dimension, and a convolution's is 3 or 1 (57 ms
    a step on ResNet-50 shapes where flat buffers take 31).
    A 0-d tensor that is not `like` a parameter stays 0-d.
    """
    shape = () if like is None and not tensor.ndim else (tensor.numel(),)
    with x64(), jax.transfer_guard("allow"), jax.default_device(device_of(tensor)):
        # Ready before torch writes into it: the fill runs asynchronously.
        memory = register(jnp.zeros(shape, numpy_dtype(tensor.dtype)).block_until_ready())
    memory.tensor(tensor.device, tensor if like is None else like).copy_(tensor.detach())
    return memory


def register(array: jax.Array) -> Memory:
    """The memory of an array that nobody else holds, known by address from now on."""
    memory = Memory(array)
    if array.size:
        _memories[memory.address] = memory
    return memory


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """The memory that a dense tensor looks into, whole, or None if its bytes are torch's own."""
    known = _memories.get(tensor.data_ptr())
    return known if known is not None and _covers(known, tensor, dense_order(tensor)) else None


def settle(memories: Iterable[Memory], arrays: Iterable[jax.Array]) -> bool:
    """Hand the results of a donated call to the memories that they were computed in.

    Returns:
      Whether a result lies elsewhere, because something outside held a buffer (a numpy view of one of
      `jax.live_arrays()`, say) and XLA copied it. Tensors over that memory must then look again: see `renewed`.
    """
    moved = False
    for memory, array in zip(memories, arrays, strict=True):
        memory.array = array
        moved |= array.unsafe_buffer_pointer() != memory.address and bool(array.size)
    return moved


def renewed(memory: Memory) -> Memory:
    """The memory itself, or if its array came to lie elsewhere a new one over it."""
    if not memory.array.size or memory.array.unsafe_buffer_pointer() == memory.address:
        return memory
    return register(memory.array)


def write_back(tensors: Sequence[torch.Tensor], arrays: Sequence[jax.Array], order: Sequence[tuple[int, ...] | None]) -> None:
    """Copy flat results into storage that is not ours alone, all tensors in one fused call."""
    new = []
    for tensor, flat, dims in zip(tensors, to_torch(list(arrays)), order, strict=True):
        dims = tuple(range(tensor.ndim)) if dims is None else dims
        new.append(flat.view([tensor.shape[d] for d in dims]).permute(tuple(np.argsort(dims))))
    torch._foreach_copy_([t.detach() for t in tensors], new)


def return_freed() -> None:
    """Give the pages of freed torch buffers back to the system, where the C library can.

    Adoption frees each parameter's old buffer, and compiling frees a lot: glibc keeps those pages in its arenas, and the
    state that is allocated next would come on top of them (2140 MiB at the peak for GPT-2 small, 1986 without).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _covers(memory: Memory, tensor: torch.Tensor, order: tuple[int, ...] | None) -> bool:
    """Whether the tensor is dense and the whole of the memory: a slice at the same start is not."""
    if order is None or memory.array.is_deleted():
        return False
    return memory.array.size == tensor.numel() and np.dtype(memory.array.dtype) == numpy_dtype(tensor.dtype)


def _cannot_own(tensor: torch.Tensor, order: tuple[int, ...] | None) -> str:
    """Why the tensor must keep the storage that it has, or ''."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if not tensor.numel():
        return "no elements"
    if order is None:
        return "not dense"
    if tensor._is_view() or tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return "a view into a larger storage"
    if not tensor.untyped_storage().resizable():
        return "in memory of another library"
    if tensor.is_shared() and tensor.device.type == "cpu":
        return "in shared memory"
    if tensor.is_pinned():
        return "in pinned memory"
    return "" if _use_count(tensor) == 1 else "another tensor shares its storage"


def _use_count(tensor: torch.Tensor) -> int:
    """How many tensors hold the storage; 0, which nobody takes for sole ownership, where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return 0
    storage = tensor.untyped_storage()
    return count(storage._cdata) - 1  # `storage` itself is one holder
