"""Where the bytes of parameters and state live, and how results get back into them.

jax cannot donate a buffer that it imported, so the buffers here are jax's own and torch looks into them: a tensor over
`unsafe_buffer_pointer()` sees each new value at the same address once the buffer has been donated to the call that
computes it. The view is made through the array interface, never through DLPack: a DLPack export pins the buffer, and
XLA then copies instead of reusing it. `Memory` is what both sides hold on to.

Small tensors may lie side by side in the rows of one memory, a pack, so that one loop updates all of them. Each still
has a torch storage of its own, over its own bytes alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ._compat.jax import uncached_numpy
from ._compat.torch import foreach_copy_, is_only_view, is_view, storage_holders
from ._interop.dlpack import ALIGNMENT, cpu, dense_order, device_of, to_jax
from ._interop.dtypes import numpy_dtype
from ._interop.tensor_storage import shortage
from ._process import default_settings
from .dlpack import operands, results
from .ownership import is_owned
from .windows import Window

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
        self.hold: Any = None

    @property
    def rows(self) -> range:
        """The rows of a pack; none where it is one tensor's memory."""
        return range(0 if self.lengths is None else len(self.lengths))

    @property
    def kept(self) -> Any:
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


class Placement(NamedTuple):
    """How one tensor takes part: `memory` None means that results are copied into the tensor's own storage.

    `order` permutes the tensor's dimensions to the order of its memory (None: as they are); `why` is for the report;
    `row` is the tensor's in a pack.
    """

    memory: Memory | None
    order: tuple[int, ...] | None
    why: str
    row: int | None = None


_array = attrgetter("array")
_MAY_OWN = torch.Tensor, torch.nn.Parameter
IN_PLACE = "in jax-owned memory"
FOREIGN, SHARED = "in memory of another library", "another tensor shares its storage"
_SMALL = 1 << 20  # bytes up to which a second copy costs less than compiling


def place(
    tensor: torch.Tensor,
    writeback: str = "inplace",
    *,
    alone: bool = False,
    back: tuple[Memory, int] | None = None,
    ahead: Ahead | None = None,
) -> Placement:
    """Move a parameter's bytes into jax-owned memory that it then looks into, where it owns its storage alone.

    The tensor keeps shape, strides, dtype, device, values and identity; its `data_ptr` changes once. A tensor that is
    in such memory already is left there. A tensor that shares its storage (a view, an alias, shared memory, a slice of
    a flat buffer) or is not dense is left alone: replacing it would cut it off from the other holders.

    Args:
      tensor: a dense CPU or CUDA tensor; a leaf, or detached.
      writeback: "inplace", or "copy" to leave every tensor where it is.
      alone: whether a tensor that lies in a pack must have a memory of its own.
      back: the row of a pack that is the tensor's; it returns there if it fits and no tensor looks into that row.
      ahead: where the tensor's copy may have been begun.
    """
    order = dense_order(tensor)
    dims = None if order is None or order == tuple(range(tensor.ndim)) else order
    known, row = located(tensor)
    if known is not None and (row is None or not alone or writeback == "copy"):
        if row is not None:
            known.holders[row] = weakref.ref(tensor)  # another may have looked there
        return Placement(known, dims, IN_PLACE, row) if writeback == "inplace" else Placement(None, dims, "asked for")
    copy = None if ahead is None else ahead.take(tensor)
    why = "asked for" if writeback == "copy" else cannot_own(tensor) if copy is None else ""
    if why:
        return Placement(None, dims, why)
    if copy is None and back is not None and not alone and fits(tensor, *back):
        memory, row = back
    else:
        memory, row = own(tensor, like=tensor) if copy is None else register(copy), None
    window = memory.tensor(tensor.device, like=tensor, row=row)
    tensor.data = window if row is None else window.copy_(tensor.detach())
    if row is not None:
        memory.holders[row] = weakref.ref(tensor)
    return Placement(memory, dims, IN_PLACE, row)


def fits(tensor: torch.Tensor, memory: Memory, row: int) -> bool:
    """Whether the row is as long as the tensor, of its dtype and device, and no tensor looks into it."""
    if memory.lengths is None or memory.array.is_deleted() or row in memory.windows:
        return False
    same = np.dtype(memory.array.dtype) == numpy_dtype(tensor.dtype) and memory.array.devices() == {device_of(tensor)}
    return same and memory.lengths[row] == tensor.numel()


def pack(groups: Sequence[Sequence[torch.Tensor]]) -> list[Memory]:
    """Move small tensors, each the only holder of its storage, side by side into the rows of new memories: those of a group into one.

    Tensors of a group have one dtype and device. Each row begins at a multiple of 64 bytes, and each tensor gets a torch storage of
    exactly its own bytes: saving one saves no other. Shape, strides, dtype, device, values and identity stay. The memories are there
    at once: the system gives their pages while they are first written, which XLA does in several threads.
    """
    kinds = [
        ((len(group), pack_width(group[0].dtype, max(tensor.numel() for tensor in group))), numpy_dtype(group[0].dtype), 0)
        for group in groups
    ]
    arrays = jax.block_until_ready(filled(kinds, device_of(groups[0][0])))
    return [_packed(group, array) for group, array in zip(groups, arrays, strict=True)]


def _packed(tensors: Sequence[torch.Tensor], array: jax.Array) -> Memory:
    memory = register(array, [tensor.numel() for tensor in tensors])
    windows = [memory.tensor(tensor.device, like=tensor, row=row) for row, tensor in enumerate(tensors)]
    foreach_copy_(windows, [tensor.detach() for tensor in tensors])
    for row, (tensor, window) in enumerate(zip(tensors, windows, strict=True)):
        tensor.data = window
        memory.holders[row] = weakref.ref(tensor)
    return memory


def pack_width(dtype: torch.dtype, elements: int) -> int:
    """The elements of the shortest row that holds so many and leaves the next one aligned."""
    unit = max(ALIGNMENT // dtype.itemsize, 1)
    return -(-elements // unit) * unit


def own(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Memory:
    """A copy of the tensor's values in new jax-owned memory: its dtype and device, elements in the memory order of `like`.

    The buffer is flat: XLA's loops run over the innermost dimension, and a convolution's is 3 or 1 (57 ms
    a step on ResNet-50 shapes where flat buffers take 31).
    A 0-d tensor that is not `like` a parameter stays 0-d.
    """
    return register(_copy(tensor, like).block_until_ready())


def _copy(tensor: torch.Tensor, like: torch.Tensor | None) -> jax.Array:
    """What `own` holds, still being written."""
    (flat,) = operands([tensor], [None if like is None else dense_order(like)])
    return _fresh(flat.reshape(()) if like is None and not tensor.ndim else flat, device_of(tensor))


class Ahead:
    """Copies of parameters, begun before each parameter is to move into its own: XLA makes a copy in one thread, several in several.

    `most`: bytes of copies that are there before their parameters have moved. The values must not change until then.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._coming: deque[torch.Tensor] = deque()
        self._begun: dict[int, jax.Array] = {}

    def begin(self, tensor: torch.Tensor) -> None:
        """Begin the copy of a parameter that owns its storage alone: now, or when others have been taken."""
        self._coming.append(tensor)
        self._go_on()

    def take(self, tensor: torch.Tensor) -> jax.Array | None:
        """The copy, written; None where it was not begun. Others are begun when the next is taken: then this parameter has moved."""
        self._go_on()
        copy = self._begun.pop(id(tensor), None)
        if copy is None:
            return None
        self._bytes -= copy.nbytes
        return copy.block_until_ready()

    def _go_on(self) -> None:
        while self._coming and self._bytes + self._coming[0].nbytes <= self._most:
            tensor = self._coming.popleft()
            if located(tensor)[0] is None and not cannot_own(tensor):  # a tensor that reads it for the copy counts as a holder from then on
                self._begun[id(tensor)] = _copy(tensor, tensor)
                self._bytes += tensor.nbytes


_lent: weakref.WeakValueDictionary[Any, jax.Array] = weakref.WeakValueDictionary()  # by the address of the storage, and what is in it


def lend(tensor: torch.Tensor, order: tuple[int, ...] | None) -> jax.Array:
    """A flat array over a tensor on the CPU that is only read, dimensions in this order. It holds the storage until `recall` deletes it.

    Raises:
      ValueError: jax would copy it; see `to_jax`.
    """
    key = tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.numel(), tensor.dtype, order
    known = _lent.get(key)
    if known is None or known.is_deleted():
        known = _lent[key] = to_jax((tensor if order is None else tensor.permute(order)).detach().reshape(-1))
    return known


def recall(tensors: Iterable[torch.Tensor]) -> None:
    """Delete the arrays of `lend` over the storages of these tensors, which are to own them alone. Who reads them lends them anew."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) in _MAY_OWN} if _lent else set()
    for (address, *_), array in list(_lent.items()):
        if address in addresses:
            array.delete()


_fixed: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by address: those that `align` may not move


def align(tensor: torch.Tensor) -> bool:
    """Move a CPU tensor that is only read to a multiple of 64 bytes, where it owns its storage alone; whether it moved.

    jax copies an argument that begins elsewhere, at each call. Weights in a file begin anywhere. While another tensor shares the storage,
    the next call may ask again.
    """
    address = tensor.data_ptr()
    if not address % ALIGNMENT or _fixed.get(address) is tensor:
        return False
    why = cannot_own(tensor)
    if not why:
        with torch.inference_mode(False), torch.no_grad():
            tensor.data = tensor.detach().clone()
        address = tensor.data_ptr()
    if address % ALIGNMENT and why != SHARED:
        _fixed[address] = tensor
    return not why


def full(shape: tuple[int, ...], dtype: Any, value: Any, device: Any) -> jax.Array:
    """A new array of one value that only jax holds; ready."""
    return filled([(shape, dtype, value)], device)[0].block_until_ready()


def filled(kinds: Sequence[tuple[tuple[int, ...], Any, Any]], device: Any) -> list[jax.Array]:
    """New arrays that only jax holds, each of one value, asked for at once: one by one two thousand took 0.5 to 1.1 s. To be waited for.

    Args:
      kinds: of each array the shape, the dtype and the value.
      device: where they shall be.
    """
    keys = [
        (tuple(shape), np.dtype(dtype), np.asarray(value, dtype).tobytes()) for shape, dtype, value in kinds
    ]  # -0.0 is another than 0.0
    values = dict(zip(keys, (value for *_, value in kinds), strict=True))
    # The largest first: XLA writes each in one thread, and the last one has the others wait.
    in_turn = sorted(range(len(keys)), key=lambda i: -math.prod(keys[i][0]) * keys[i][1].itemsize)
    with default_settings(), jax.default_device(device):
        copied = {key: jax.device_put(x, device) for key in values if (x := _copied(key, values[key], device)) is not None}
        copies = iter(jax.device_put([copied[keys[i]] for i in in_turn if keys[i] in copied], device, may_alias=False))
        made = {i: next(copies) if keys[i] in copied else jnp.full(keys[i][0], values[keys[i]], keys[i][1]) for i in in_turn}
    return [made[i] for i in range(len(keys))]


def _copied(key: tuple[tuple[int, ...], Any, bytes], value: Any, device: Any) -> np.ndarray | None:
    """What an array of one value is to be copied from, with no program: on a CPU zeros, and few of another; None where one must fill it."""
    shape, dtype, of_one = key
    size = math.prod(shape) * dtype.itemsize
    if device.platform != "cpu":
        return None
    if not any(of_one):
        return _zeros(size).view(dtype).reshape(shape)
    return np.full(shape, value, dtype) if size <= _SMALL else None


_zero_pages = np.zeros(0, np.uint8)


def _zeros(size: int) -> np.ndarray:
    """So many zero bytes, aligned, to be read alone: their pages are then the system's one page of zeros."""
    global _zero_pages
    zeros = _zero_pages
    if len(zeros) < size:
        space = np.zeros(size + ALIGNMENT, np.uint8)
        _zero_pages = zeros = space[-space.ctypes.data % ALIGNMENT :][:size]
        zeros.flags.writeable = False
    return zeros[:size]


def constant(values: np.ndarray, device: Any) -> Any:
    """An argument that stays the same from call to call: on a device that has memory of its own, there."""
    return values if device.platform == "cpu" else _fresh(values, device).block_until_ready()


def _fresh(values: Any, device: Any) -> jax.Array:
    """A copy of an array that only jax holds. To be waited for, because torch may write into it.

    jnp.array would compile a program for each shape, which takes the new pages in one thread; here XLA copies in several.
    """
    with default_settings():
        return jax.device_put(jax.device_put(values, device), device, may_alias=False)


def register(array: Any, lengths: Sequence[int] | None = None) -> Memory:
    """The memory of an array that nobody else holds, known by the address of each row from now on."""
    memory = Memory(array, lengths)
    _know(memory)
    return memory


_held: weakref.WeakSet[Memory] = weakref.WeakSet()  # those with a `hold`
_left: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()  # by id: those of an array that is no memory's any more
_live_arrays = jax.live_arrays


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


def _alive(known: weakref.WeakValueDictionary[int, Any]) -> Iterator[Any]:
    """The values now, whatever other threads add."""
    return (x for x in (ref() for ref in known.valuerefs()) if x is not None)


jax.live_arrays = _holding_live_arrays


def _is_on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


@functools.cache
def _holder(dtype: np.dtype[Any]) -> Callable[[jax.Array], Any]:
    """What makes a reference to the bytes of an array on the CPU: Python's buffer protocol, or for types that it has not, numpy.

    Never DLPack: jaxlib aborts the process where an array is deleted that was exported so. What numpy takes is private, because the
    public way keeps it in the array, which can then not be donated: the next step copies it.
    """
    with default_settings(), jax.default_device(cpu()):
        probe = jax.device_put(np.zeros(1, dtype))
    for each in (memoryview, uncached_numpy):
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


def readable(memory: Memory) -> Any:
    """The array of a memory, to be read alone; a copy of its bytes where somebody has deleted the array."""
    return _kept(memory) if memory.array.is_deleted() and memory.kept is not None else memory.array


def _kept(memory: Memory) -> jax.Array:
    array = memory.array
    (device,) = array.sharding.device_set
    space: Any = (ctypes.c_char * array.nbytes).from_address(memory.address)
    values = np.frombuffer(space, np.uint8).view(array.dtype).reshape(array.shape)
    return _fresh(values, device).block_until_ready()


def leave(memory: Memory, owner: Any) -> None:
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


def shares_memory(x: Any) -> bool:
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


def return_freed() -> None:
    """Give the pages of freed torch buffers back to the system, where the C library can, and to the GPU.

    Adoption frees each parameter's old buffer, and compiling frees a lot: glibc keeps those pages in its arenas, and the
    state that is allocated next would come on top of them (2140 MiB at the peak for GPT-2 small, 1986 without).
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what torch's allocator keeps jax's cannot have
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _covers(memory: Memory, tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and the whole of the memory, or of a row: a slice at the same start is not."""
    if memory.is_gone or dense_order(tensor) is None or np.dtype(memory.array.dtype) != numpy_dtype(tensor.dtype):
        return False
    if memory.lengths is None:
        return memory.address == tensor.data_ptr() and memory.array.size == tensor.numel()
    row, rest = divmod(tensor.data_ptr() - memory.address, memory.row_bytes)
    return row in memory.rows and not rest and tensor.numel() == memory.lengths[row]


def cannot_own(tensor: torch.Tensor) -> str:
    """Why the tensor must keep the storage that it has, or ''."""
    if type(tensor) not in _MAY_OWN:
        return f"a {type(tensor).__name__}"
    if not tensor.numel():
        return "no elements"
    if dense_order(tensor) is None:
        return "not dense"
    if shortage(tensor):
        return "its memory was freed"
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return "a view into a larger storage"
    if is_view(tensor) and not is_only_view(tensor):
        return "a view of another tensor"
    if tensor.is_shared() and tensor.device.type == "cpu":
        return "in shared memory"
    if tensor.is_pinned():
        return "in pinned memory"
    if storage_holders(tensor) != (2 if is_view(tensor) else 1):
        return SHARED
    if not tensor.untyped_storage().resizable() and located(tensor)[0] is None and not is_owned(tensor):
        return FOREIGN
    return ""
