"""Parameters and state move into memory that jax owns, or stay where they must."""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false
# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
import torch

from bridge._compat.torch import foreach_copy_, is_only_view, is_view, storage_holders
from bridge._interop.dlpack import ALIGNMENT, dense_order, device_of, to_jax
from bridge._interop.dtypes import numpy_dtype
from bridge._interop.tensor_storage import shortage

from .allocation import _fresh, filled
from .call_arguments import operands
from .jax_buffers import Memory, located, register
from .ownership import is_owned


class Placement(NamedTuple):
    """How one tensor takes part: `memory` None means that results are copied into the tensor's own storage.

    `order` permutes the tensor's dimensions to the order of its memory (None: as they are); `why` is for the report;
    `row` is the tensor's in a pack.
    """

    memory: Memory | None
    order: tuple[int, ...] | None
    why: str
    row: int | None = None


_MAY_OWN = torch.Tensor, torch.nn.Parameter
IN_PLACE = "in jax-owned memory"
FOREIGN, SHARED = "in memory of another library", "another tensor shares its storage"


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
    arrays = cast(list[jax.Array], jax.block_until_ready(filled(kinds, device_of(groups[0][0]))))
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


# The address of the storage, and what is in it: address, elements, dtype and order of the dimensions.
_Lent = tuple[int, int, int, torch.dtype, tuple[int, ...] | None]
_lent: weakref.WeakValueDictionary[_Lent, jax.Array] = weakref.WeakValueDictionary()


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
    addresses: set[int] = {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) in _MAY_OWN} if _lent else set()
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
