"""Memory that jax owns and torch tensors look into: which there is, who looks there, and what becomes of it."""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false
# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar, cast

import jax
import numpy as np
import torch

from bridge._compat.jax import uncached_numpy
from bridge._compat.torch import foreach_copy_
from bridge._compat.types import Device
from bridge._interop.dlpack import cpu, dense_order
from bridge._interop.dtypes import numpy_dtype
from bridge._process import default_settings

from .allocation import _fresh
from .array_interface import Window
from .call_arguments import results

_T = TypeVar("_T")
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


class Memory:
    """One jax-owned buffer that torch tensors look into.

    `array` is the jax array that owns the bytes now; each donated call ends by putting its result here. The torch
    storages hold this object, so that parameters outlive the optimizer, and the object holds the array.

    `lengths`: of a pack, how many elements of each row are a tensor's, the rest being padding; None for one tensor's
    memory. `windows`: by row, through what a torch storage looks into it; `holders`: the tensor that is to look there.
    `all_windows`: every window that looks into the bytes where they are now. `hold`: where `jax.live_arrays()` has handed
    out the array since the last step, that array and a reference to its bytes.
    """

    __slots__ = ("__weakref__", "address", "all_windows", "array", "hold", "holders", "lengths", "windows")

    def __init__(self, array: jax.Array, lengths: Sequence[int] | None = None) -> None:
        self.array, self.lengths = array, lengths
        self.address = array.unsafe_buffer_pointer()
        self.windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()
        self.holders: dict[int, weakref.ref[torch.Tensor]] = {}
        self.all_windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self.hold: tuple[jax.Array, object] | None = None

    @property
    def rows(self) -> range:
        """The rows of a pack; none where it is one tensor's memory."""
        return range(0 if self.lengths is None else len(self.lengths))

    @property
    def kept(self) -> object:
        """The reference to the bytes of the array; None where there is none, or it is to an earlier array."""
        return self.hold[1] if self.hold is not None and self.hold[0] is self.array else None

    @property
    def is_gone(self) -> bool:
        """Whether nothing keeps the bytes: the array was deleted or donated, and no result has come."""
        return self.array.is_deleted() and self.kept is None

    @property
    def row_bytes(self) -> int:
        return math.prod(self.array.shape[1:]) * self.array.dtype.itemsize

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that look into the rows of a pack."""
        return [tensor for tensor in (holder() for holder in self.holders.values()) if tensor is not None]

    def tensor(self, device: torch.device, like: torch.Tensor | None = None, row: int | None = None) -> torch.Tensor:
        """A torch tensor over this memory or one row of it, which it keeps alive; of the shape there, or shape and strides of `like`.

        Where `like` is not dense, the tensor is contiguous.
        """
        shape = self.array.shape if row is None else self.array.shape[1:]
        view = self._view(row * self.row_bytes if row else 0, shape if like is None else (like.numel(),), device, row)
        if like is None:
            return view
        return view.view(like.shape) if dense_order(like) is None else view.as_strided(like.shape, like.stride())

    def _view(self, start: int, shape: tuple[int, ...], device: torch.device, row: int | None) -> torch.Tensor:
        window = Window(self, self.address + start, shape, self.array.dtype, device)
        self.all_windows.add(window)
        if row is not None:
            self.windows[row] = window
        return window.tensor()


_array = attrgetter("array")


def register(array: jax.Array, lengths: Sequence[int] | None = None) -> Memory:
    """The memory of an array that nobody else holds, known by the address of each row from now on."""
    memory = Memory(array, lengths)
    _know(memory)
    return memory


_held: weakref.WeakSet[Memory] = weakref.WeakSet()  # those with a `hold`
_left: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()  # by id: those of an array that is no memory's any more
_live_arrays = cast(Callable[[str | None], list[jax.Array]], jax.live_arrays)


@functools.wraps(_live_arrays)
def _holding_live_arrays(platform: str | None = None) -> list[jax.Array]:
    """Return what `jax.live_arrays` returns, and hold the bytes that torch tensors look at: whoever has the arrays may delete them.

    A reference to each array after each step would do the same, and costs some hundredths of a step's time. Another thread may step
    meanwhile. What it donates or replaces needs no reference: no array of the list is over those bytes any more, or jax copies them.
    """
    arrays = _live_arrays(platform)
    for memory in _alive(_memories):
        array = memory.array
        with suppress(RuntimeError, ValueError, BufferError):
            memory.hold = (array, _holder(array.dtype)(array)) if _is_on_cpu(array) else None
            _held.add(memory)
    for window in _alive(_left):
        owner = window.owner
        if isinstance(owner, jax.Array) and _is_on_cpu(owner):
            with suppress(RuntimeError, ValueError, BufferError):
                window.owner = _holder(owner.dtype)(owner)
    return arrays


def _alive(known: weakref.WeakValueDictionary[int, _T]) -> Iterator[_T]:
    """The values now, whatever other threads add."""
    return (x for x in (ref() for ref in known.valuerefs()) if x is not None)


jax.live_arrays = _holding_live_arrays


def _is_on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


@functools.cache
def _holder(dtype: np.dtype) -> Callable[[jax.Array], object]:
    """What makes a reference to the bytes of an array on the CPU: Python's buffer protocol, or for types that it has not, numpy.

    Never DLPack: jaxlib aborts the process where an array is deleted that was exported so. What numpy takes is private, because the
    public way keeps it in the array, which can then not be donated: the next step copies it.
    """
    with default_settings(), jax.default_device(cpu()):
        probe = jax.device_put(np.zeros(1, dtype))
    makers: tuple[Callable[..., object], ...] = (memoryview, uncached_numpy)
    for each in makers:
        try:
            found = each(probe)
            if np.asarray(found[0] if isinstance(found, tuple) else found).ctypes.data == probe.unsafe_buffer_pointer():
                return each
        except (AttributeError, BufferError, TypeError, ValueError, RuntimeError):
            pass
    return np.asarray


def taken(memories: Sequence[Memory]) -> list[jax.Array]:
    """The arrays of memories, to be donated to a call, which puts its results there: nothing here holds their bytes any more.

    Of an array that somebody has deleted since the last step, a copy of its bytes. The results then lie elsewhere, and tensors that
    still look at the old place keep its bytes.
    """
    if _held:
        for memory in _held.intersection(memories):
            if memory.array.is_deleted() and memory.kept is not None:
                leave(memory, memory.kept)
                memory.array = _kept(memory)
            memory.hold = None
            _held.discard(memory)
    return list(map(_array, memories))


def readable(memory: Memory) -> jax.Array:
    """The array of a memory, to be read alone; a copy of its bytes where somebody has deleted the array."""
    return _kept(memory) if memory.array.is_deleted() and memory.kept is not None else memory.array


def _kept(memory: Memory) -> jax.Array:
    array = memory.array
    (device,) = cast(set[Device], array.sharding.device_set)
    space: Any = (ctypes.c_char * array.nbytes).from_address(memory.address)
    values = np.frombuffer(space, np.uint8).view(array.dtype).reshape(array.shape)
    return _fresh(values, device).block_until_ready()


def leave(memory: Memory, owner: object) -> None:
    """The memory is about to be elsewhere: `owner` keeps the bytes where it was for whoever still looks there."""
    for window in list(memory.all_windows):
        window.owner = owner
        _left[id(window)] = window
    memory.all_windows.clear()
    memory.windows.clear()


def leave_held(memories: Sequence[Memory], arrays: Sequence[jax.Array]) -> None:
    """`leave` each memory whose array a call has not taken over, because somebody else looks at its bytes (a numpy view, DLPack).

    XLA has written the results elsewhere. The array is then all that keeps the bytes when the others let go.
    """
    for memory, array in zip(memories, arrays, strict=True):
        if array.size and not array.is_deleted():
            leave(memory, array)


def _know(memory: Memory) -> None:
    if memory.array.size:
        _memories[memory.address] = memory
        for row in memory.rows:
            _memories[memory.address + row * memory.row_bytes] = memory


def located(tensor: torch.Tensor) -> tuple[Memory | None, int | None]:
    """The memory that a dense tensor looks into, whole, or of a pack a whole row's; None if its bytes are torch's own."""
    memory = _memories.get(tensor.data_ptr())
    if memory is None or not _covers(memory, tensor):
        return None, None
    return memory, (tensor.data_ptr() - memory.address) // memory.row_bytes if memory.lengths is not None else None


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """The memory that a dense tensor looks into and shares with no other, or None."""
    memory, row = located(tensor)
    return memory if row is None else None


def shares_memory(x: torch.Tensor | jax.Array | np.ndarray) -> bool:
    """Whether a tensor, a numpy or a jax array is, or looks into, one whose bytes are jax's and are donated."""
    if isinstance(x, torch.Tensor):
        return x.untyped_storage().data_ptr() in _memories
    if isinstance(x, jax.Array):
        return len(x.devices()) == 1 and x.is_fully_addressable and x.unsafe_buffer_pointer() in _memories
    root = x
    while isinstance(root.base, np.ndarray):  # a slice begins somewhere inside
        root = root.base
    return root.__array_interface__["data"][0] in _memories


def renewed(memory: Memory) -> Memory:
    """The memory, known by the address where its array lies now; of a pack all tensors look there, whoever has them."""
    if memory.array.size and memory.array.unsafe_buffer_pointer() != memory.address:
        before, memory.address = memory.address, memory.array.unsafe_buffer_pointer()
        _know(memory)
        for row, holder in memory.holders.items():
            tensor = holder()
            if tensor is not None and tensor.data_ptr() == before + row * memory.row_bytes:
                tensor.data = memory.tensor(tensor.device, like=tensor, row=row)
    return memory


def write_back(
    tensors: Sequence[torch.Tensor],
    order: Sequence[tuple[int, ...] | None],
    arrays: Sequence[jax.Array],
    mirrored: Sequence[torch.Tensor],
    mirrors: Sequence[torch.Tensor],
    on_cpu: bool,
) -> None:
    """Copy flat results into tensors whose storage is not ours alone, and `mirrors` into `mirrored`, all in one fused call."""
    into = list(map(torch.Tensor.detach, tensors))
    for i, dims in enumerate(order):
        into[i] = into[i] if dims is None else into[i].permute(dims)
    foreach_copy_([*into, *mirrored], [*map(torch.Tensor.view_as, results(arrays, on_cpu), into), *mirrors])


def _covers(memory: Memory, tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and the whole of the memory, or of a row: a slice at the same start is not."""
    if memory.is_gone or dense_order(tensor) is None or np.dtype(memory.array.dtype) != numpy_dtype(tensor.dtype):
        return False
    if memory.lengths is None:
        return memory.address == tensor.data_ptr() and memory.array.size == tensor.numel()
    row, rest = divmod(tensor.data_ptr() - memory.address, memory.row_bytes)
    return row in memory.rows and not rest and tensor.numel() == memory.lengths[row]


def lost_like(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds whose values are lost: NaN, and 0 where there is none."""
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() or tensor.is_complex() else torch.zeros_like(tensor)
