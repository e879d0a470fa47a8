"""Buffers that jax owns and torch tensors alias: which exist, which tensors alias them, and where they are after a donation."""

# jax and torch annotate some of these functions only in part.
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
from typing import Any, TypeVar, cast

import jax
import numpy as np
import torch

from bridge._compat.jax import uncached_numpy
from bridge._compat.lookup import SAFE_MODE
from bridge._compat.torch import foreach_copy_
from bridge._compat.types import Device
from bridge._interop.dlpack import cpu_device, dense_order
from bridge._interop.dtypes import numpy_dtype
from bridge._process import default_settings

from .allocation import copy_to_device
from .array_interface import ArrayInterface
from .call_arguments import as_call_arguments, results_as_tensors

_T = TypeVar("_T")
_buffers_by_address: weakref.WeakValueDictionary[int, JaxBuffer] = weakref.WeakValueDictionary()


class JaxBuffer:
    """One jax-owned buffer that torch tensors alias.

    The torch storages hold this object, and it holds the array, so parameters outlive their optimizer. A program is called with the donated
    `array`, and its result becomes the new `array`.

    array: The jax array that owns the bytes.
    row_lengths: In a bucket, the number of elements of each row that a tensor has; the others are padding. None for one tensor's buffer.
    aliases: The `ArrayInterface` by which a torch storage aliases each row.
    tensor_refs: A weak reference to the tensor that belongs to each row.
    all_aliases: Every `ArrayInterface` over the bytes at their current address.
    pin: The array and a reference to its bytes, if `jax.live_arrays()` has returned the array since the last step.
    """

    __slots__ = ("__weakref__", "address", "aliases", "all_aliases", "array", "pin", "row_lengths", "tensor_refs")

    def __init__(self, array: jax.Array, row_lengths: Sequence[int] | None = None) -> None:
        self.array, self.row_lengths = array, row_lengths
        self.address = array.unsafe_buffer_pointer()
        self.aliases: weakref.WeakValueDictionary[int, ArrayInterface] = weakref.WeakValueDictionary()
        self.tensor_refs: dict[int, weakref.ref[torch.Tensor]] = {}
        self.all_aliases: weakref.WeakSet[ArrayInterface] = weakref.WeakSet()
        self.pin: tuple[jax.Array, object] | None = None

    @property
    def rows(self) -> range:
        """The rows of a bucket; an empty range for one tensor's buffer."""
        return range(0 if self.row_lengths is None else len(self.row_lengths))

    @property
    def pinned_bytes(self) -> object:
        """The reference to the bytes of the current array; None if there is none."""
        return self.pin[1] if self.pin is not None and self.pin[0] is self.array else None

    @property
    def is_lost(self) -> bool:
        """Whether the bytes are lost: the array was deleted or donated, no result has replaced it, and nothing pins the bytes."""
        return self.array.is_deleted() and self.pinned_bytes is None

    @property
    def row_bytes(self) -> int:
        return math.prod(self.array.shape[1:]) * self.array.dtype.itemsize

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of a bucket's rows that are alive."""
        return [alive for alive in (holder() for holder in self.tensor_refs.values()) if alive is not None]

    def alias_tensor(self, device: torch.device, like: torch.Tensor | None = None, row: int | None = None) -> torch.Tensor:
        """Return a torch tensor over this buffer or one row of it, which keeps the buffer alive.

        Args:
          device: torch's device.
          like: A tensor whose shape and strides the new one gets; contiguous if `like` is not dense. None for the shape of the array.
          row: The row of a bucket; None for the whole buffer.
        """
        shape = self.array.shape if row is None else self.array.shape[1:]
        view = self._alias(row * self.row_bytes if row else 0, shape if like is None else (like.numel(),), device, row)
        if like is None:
            return view
        return view.view(like.shape) if dense_order(like) is None else view.as_strided(like.shape, like.stride())

    def _alias(self, start: int, shape: tuple[int, ...], device: torch.device, row: int | None) -> torch.Tensor:
        window = ArrayInterface(self, self.address + start, shape, self.array.dtype, device)
        self.all_aliases.add(window)
        if row is not None:
            self.aliases[row] = window
        return window.as_tensor()


class CopiedBuffer(JaxBuffer):
    """A buffer of the safe mode. Its bytes belong to a torch tensor, and programs get copies of them.

    array: The result of the last call. Only its shape, dtype and device are used.
    values: The torch tensor.
    """

    __slots__ = ("values",)

    def __init__(self, array: jax.Array, row_lengths: Sequence[int] | None = None) -> None:
        super().__init__(array.block_until_ready(), row_lengths)
        self.values = results_as_tensors([array], _is_on_cpu(array))[0].clone()
        self.address = self.values.data_ptr()

    @property
    def is_lost(self) -> bool:
        """Always False: a call donates only copies."""
        return False

    def _alias(self, start: int, shape: tuple[int, ...], device: torch.device, row: int | None) -> torch.Tensor:
        first = start // self.values.element_size()
        return self.values.view(-1)[first : first + math.prod(shape)].view(shape)


def copies_to_donate(buffers: Sequence[JaxBuffer]) -> list[jax.Array]:
    """Return arrays with the values of buffers of the safe mode, which only the caller holds."""
    copied = [buffer for buffer in buffers if isinstance(buffer, CopiedBuffer)]
    if not copied:
        return []
    arguments = as_call_arguments([buffer.values for buffer in copied], [None] * len(copied))
    shaped = [values.reshape(buffer.array.shape) for values, buffer in zip(arguments, copied, strict=True)]
    (device,) = cast(set[Device], copied[0].array.sharding.device_set)
    with default_settings():
        arrays = jax.device_put(jax.device_put(shaped, device), device, may_alias=False)
    return cast(list[jax.Array], jax.block_until_ready(arrays))


def copy_results(buffers: Sequence[JaxBuffer]) -> None:
    """In the safe mode, copy the results of a call that has ended from the arrays to the bytes that tensors alias."""
    copied = [buffer for buffer in buffers if isinstance(buffer, CopiedBuffer)]
    if copied:
        arrays = [buffer.array for buffer in copied]
        foreach_copy_([buffer.values for buffer in copied], results_as_tensors(arrays, _is_on_cpu(arrays[0])))


def register(array: jax.Array, row_lengths: Sequence[int] | None = None) -> JaxBuffer:
    """Return the buffer of an array that nobody else holds. `find_buffer` finds it by the address of each row from now on."""
    memory = (CopiedBuffer if SAFE_MODE else JaxBuffer)(array, row_lengths)
    _register_rows(memory)
    return memory


pinned_buffers: weakref.WeakSet[JaxBuffer] = weakref.WeakSet()  # buffers with a `pin`
# By id: aliases of arrays that no `JaxBuffer` has any more.
_left_aliases: weakref.WeakValueDictionary[int, ArrayInterface] = weakref.WeakValueDictionary()
_live_arrays = cast(Callable[[str | None], list[jax.Array]], jax.live_arrays)


@functools.wraps(_live_arrays)
def _pinning_live_arrays(platform: str | None = None) -> list[jax.Array]:
    """Return what `jax.live_arrays` returns, and pin the bytes that torch tensors alias, because the caller may delete the arrays.

    Pinning each array after each step would have the same effect, but slows every step. Another thread may step at the same time. Bytes
    that it donates or replaces need no pin: no array of the list is over them any more, or jax copies them.
    """
    arrays = _live_arrays(platform)
    for memory in _live_values(_buffers_by_address):
        array = memory.array
        with suppress(RuntimeError, ValueError, BufferError):
            memory.pin = (array, _reference_maker(array.dtype)(array)) if _is_on_cpu(array) else None
            pinned_buffers.add(memory)
    for window in _live_values(_left_aliases):
        owner = window.owner
        if isinstance(owner, jax.Array) and _is_on_cpu(owner):
            with suppress(RuntimeError, ValueError, BufferError):
                window.owner = _reference_maker(owner.dtype)(owner)
    return arrays


def _live_values(known: weakref.WeakValueDictionary[int, _T]) -> Iterator[_T]:
    """Return an iterator over the current values. Other threads may add values."""
    return (x for x in (ref() for ref in known.valuerefs()) if x is not None)


if not SAFE_MODE:
    jax.live_arrays = _pinning_live_arrays


def _is_on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


@functools.cache
def _reference_maker(dtype: np.dtype) -> Callable[[jax.Array], object]:
    """Return the function that makes a reference to the bytes of a CPU array: by Python's buffer protocol if the dtype has it, else numpy.

    DLPack does not serve: jaxlib aborts the process if an array is deleted after such an export. numpy's array comes from a private call,
    because the public one caches it in the jax array, which can then not be donated, and the next step copies it.
    """
    with default_settings(), jax.default_device(cpu_device()):
        probe = jax.device_put(np.zeros(1, dtype))
    makers: tuple[Callable[..., object], ...] = (memoryview, uncached_numpy)
    for each in makers:
        try:
            reference = each(probe)
            if np.asarray(reference[0] if isinstance(reference, tuple) else reference).ctypes.data == probe.unsafe_buffer_pointer():
                return each
        except (AttributeError, BufferError, TypeError, ValueError, RuntimeError):
            pass
    return np.asarray


def release_pins(memories: Sequence[JaxBuffer]) -> None:
    """Make the arrays of buffers ready to be donated to a call whose results replace them.

    An array that somebody has deleted since the last step is replaced by a copy of the bytes. The result then is at another address, and
    tensors that still alias the old one keep the old bytes.
    """
    for memory in pinned_buffers.intersection(memories):
        if memory.array.is_deleted() and memory.pinned_bytes is not None:
            detach_aliases(memory, memory.pinned_bytes)
            memory.array = _copy_pinned(memory)
        memory.pin = None
        pinned_buffers.discard(memory)


def readable_array(memory: JaxBuffer) -> jax.Array:
    """Return the array of a buffer for reading only; a copy of its bytes if somebody has deleted the array."""
    if isinstance(memory, CopiedBuffer):
        return copies_to_donate([memory])[0]
    return _copy_pinned(memory) if memory.array.is_deleted() and memory.pinned_bytes is not None else memory.array


def _copy_pinned(memory: JaxBuffer) -> jax.Array:
    array = memory.array
    (device,) = cast(set[Device], array.sharding.device_set)
    space: Any = (ctypes.c_char * array.nbytes).from_address(memory.address)
    values = np.frombuffer(space, np.uint8).view(array.dtype).reshape(array.shape)
    return copy_to_device(values, device).block_until_ready()


def detach_aliases(memory: JaxBuffer, owner: object) -> None:
    """Prepare a buffer for another address: `owner` keeps the bytes at the old address alive for tensors that still alias them."""
    for window in list(memory.all_aliases):
        window.owner = owner
        _left_aliases[id(window)] = window
    memory.all_aliases.clear()
    memory.aliases.clear()


def detach_undonated(memories: Sequence[JaxBuffer], arrays: Sequence[jax.Array]) -> None:
    """Detach the aliases of each buffer whose array a call could not donate, because somebody else refers to it (a numpy view, DLPack).

    XLA has written the result to another address. The old array keeps the old bytes alive for the aliases that remain.
    """
    for memory, array in zip(memories, arrays, strict=True):
        if array.size and not array.is_deleted():
            detach_aliases(memory, array)


def _register_rows(memory: JaxBuffer) -> None:
    if memory.array.size:
        _buffers_by_address[memory.address] = memory
        for row in memory.rows:
            _buffers_by_address[memory.address + row * memory.row_bytes] = memory


def find_buffer(tensor: torch.Tensor) -> tuple[JaxBuffer | None, int | None]:
    """Return the buffer that a dense tensor aliases, and its row in a bucket (else None); (None, None) if torch owns the bytes."""
    memory = _buffers_by_address.get(tensor.data_ptr())
    if memory is None or not _is_whole_buffer_or_row(memory, tensor):
        return None, None
    return memory, (tensor.data_ptr() - memory.address) // memory.row_bytes if memory.row_lengths is not None else None


def find_unshared_buffer(tensor: torch.Tensor) -> JaxBuffer | None:
    """Return the buffer that a dense tensor alone aliases; None if it is in a bucket or torch owns its bytes."""
    memory, row = find_buffer(tensor)
    return memory if row is None else None


def is_over_jax_buffer(x: torch.Tensor | jax.Array | np.ndarray) -> bool:
    """Return whether a tensor, a numpy or a jax array is over a buffer of jax's that steps donate."""
    if isinstance(x, torch.Tensor):
        return x.untyped_storage().data_ptr() in _buffers_by_address
    if isinstance(x, jax.Array):
        return len(x.devices()) == 1 and x.is_fully_addressable and x.unsafe_buffer_pointer() in _buffers_by_address
    root = x
    while isinstance(root.base, np.ndarray):  # a slice may begin inside the buffer
        root = root.base
    return root.__array_interface__["data"][0] in _buffers_by_address


def rebind_moved(memory: JaxBuffer) -> JaxBuffer:
    """Return the buffer after registering it at its array's current address. The tensors of a bucket's rows move there."""
    if not SAFE_MODE and memory.array.size and memory.array.unsafe_buffer_pointer() != memory.address:
        old_address, memory.address = memory.address, memory.array.unsafe_buffer_pointer()
        _register_rows(memory)
        for row, holder in memory.tensor_refs.items():
            tensor = holder()
            if tensor is not None and tensor.data_ptr() == old_address + row * memory.row_bytes:
                tensor.data = memory.alias_tensor(tensor.device, like=tensor, row=row)
    return memory


def _is_whole_buffer_or_row(memory: JaxBuffer, tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor is the whole buffer or a whole row. A slice that begins at the same address is not."""
    if memory.is_lost or dense_order(tensor) is None or np.dtype(memory.array.dtype) != numpy_dtype(tensor.dtype):
        return False
    if memory.row_lengths is None:
        return memory.address == tensor.data_ptr() and memory.array.size == tensor.numel()
    row, rest = divmod(tensor.data_ptr() - memory.address, memory.row_bytes)
    return row in memory.rows and not rest and tensor.numel() == memory.row_lengths[row]


def lost_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one for values that were lost: NaN, or 0 for a dtype without NaN."""
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() or tensor.is_complex() else torch.zeros_like(tensor)
