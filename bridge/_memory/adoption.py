"""Move parameters and state into memory that jax owns, so that a program can donate it, or say why a tensor cannot move."""

# jax and torch annotate some of these functions only in part.
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
    """The memory of a tensor after `adopt`.

    jax_buffer: The buffer that the tensor aliases; None if results are copied into the tensor's own storage.
    dim_order: The permutation of the tensor's dimensions to their order in memory; None if they are in order.
    reason: Why the tensor is where it is, for `report()`.
    bucket_row: The row of the bucket that the tensor aliases; None if the tensor has a buffer of its own.
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
    """Move a parameter's bytes into jax-owned memory that the parameter then aliases.

    The tensor keeps shape, strides, dtype, device, values and identity; its `data_ptr` changes once. A tensor that aliases jax-owned memory
    already stays there. A tensor that is not dense or shares its storage (a view, an alias, shared memory, a slice of a flat buffer) stays
    as it is: moving it would separate it from the tensors that share its storage.

    Args:
      tensor: A dense CPU or CUDA tensor, a leaf or detached.
      writeback: "inplace", or "copy" to leave every tensor where it is.
      needs_own_buffer: Whether a tensor in a row of a bucket must move to a buffer of its own.
      previous_row: A bucket and the tensor's row in it. The tensor returns there if it fits and no tensor aliases that row.
      prefetcher: The `CopyPrefetcher` that may have started a copy of the tensor.
    """
    order = dense_order(tensor)
    dims = None if order is None or order == tuple(range(tensor.ndim)) else order
    known, row = located(tensor)
    if known is not None and (row is None or not alone or writeback == "copy"):
        if row is not None:
            known.holders[row] = weakref.ref(tensor)  # another tensor may have been there
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
    """Return whether a row has the tensor's length, dtype and device, and no tensor aliases it."""
    if memory.lengths is None or memory.array.is_deleted() or row in memory.windows:
        return False
    same = np.dtype(memory.array.dtype) == numpy_dtype(tensor.dtype) and memory.array.devices() == {device_of(tensor)}
    return same and memory.lengths[row] == tensor.numel()


def pack(groups: Sequence[Sequence[torch.Tensor]]) -> list[Memory]:
    """Move small tensors into the rows of new buckets.

    Each tensor is the only one over its storage. Tensors of a bucket have one dtype and device. Each row is aligned to 64 bytes, and each
    tensor gets a torch storage of exactly its own bytes, so that saving one tensor does not save the others. Shape, strides, dtype, device,
    values and identity stay. All buckets are allocated at once, because XLA then writes their pages in several threads.
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
    """Return the least number of elements, at least as many as asked for, with which the next row of a bucket is aligned."""
    unit = max(ALIGNMENT // dtype.itemsize, 1)
    return -(-elements // unit) * unit


def own(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Memory:
    """Return a new jax-owned buffer with the tensor's values, dtype and device; elements are in the memory order of `like`.

    The array is flat, because XLA's loops run over the innermost dimension, which is only a few elements long in a convolution's weight.
    A 0-d tensor stays 0-d unless `like` is given.
    """
    return register(_copy(tensor, like).block_until_ready())


def _copy(tensor: torch.Tensor, like: torch.Tensor | None) -> jax.Array:
    """Return the array of `copy_to_buffer`, which may still be being written."""
    (flat,) = operands([tensor], [None if like is None else dense_order(like)])
    return _fresh(flat.reshape(()) if like is None and not tensor.ndim else flat, device_of(tensor))


class Ahead:
    """Starts copies of parameters before each parameter moves into its copy. XLA makes one copy in one thread, and several in several.

    The values of a parameter must not change until it has moved.

    Args:
      max_bytes: The most bytes of copies that exist before their parameters have moved.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._coming: deque[torch.Tensor] = deque()
        self._begun: dict[int, jax.Array] = {}

    def begin(self, tensor: torch.Tensor) -> None:
        """Start the copy of a parameter that alone uses its storage, now or when other copies have been taken."""
        self._coming.append(tensor)
        self._go_on()

    def take(self, tensor: torch.Tensor) -> jax.Array | None:
        """Return the finished copy; None if it was not started. The next call starts further copies: by then this parameter has moved."""
        self._go_on()
        copy = self._begun.pop(id(tensor), None)
        if copy is None:
            return None
        self._bytes -= copy.nbytes
        return copy.block_until_ready()

    def _go_on(self) -> None:
        while self._coming and self._bytes + self._coming[0].nbytes <= self._most:
            tensor = self._coming.popleft()
            # Checked here, because the copy reads the tensor through a second one, which then counts as sharing its storage.
            if located(tensor)[0] is None and not cannot_own(tensor):
                self._begun[id(tensor)] = _copy(tensor, tensor)
                self._bytes += tensor.nbytes


# The address of the storage; then address, number of elements, dtype and dimension order of the tensor.
_Lent = tuple[int, int, int, torch.dtype, tuple[int, ...] | None]
_lent: weakref.WeakValueDictionary[_Lent, jax.Array] = weakref.WeakValueDictionary()


def lend(tensor: torch.Tensor, order: tuple[int, ...] | None) -> jax.Array:
    """Return a flat array over a CPU tensor that programs only read. It keeps the storage alive until `delete_imports` deletes it.

    Args:
      tensor: The tensor.
      dim_order: The order of its dimensions in the array; None for the order that they have.

    Raises:
      ValueError: jax would copy the tensor; see `to_jax`.
    """
    key = tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.numel(), tensor.dtype, order
    known = _lent.get(key)
    if known is None or known.is_deleted():
        known = _lent[key] = to_jax((tensor if order is None else tensor.permute(order)).detach().reshape(-1))
    return known


def recall(tensors: Iterable[torch.Tensor]) -> None:
    """Delete the arrays of `import_read_only` over these tensors' storages, so that the tensors alone use them and can be adopted."""
    addresses: set[int] = {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) in _MAY_OWN} if _lent else set()
    for (address, *_), array in list(_lent.items()):
        if address in addresses:
            array.delete()


# By address: tensors that `align_storage` cannot move.
_fixed: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def align(tensor: torch.Tensor) -> bool:
    """Move a CPU tensor that is only read to an address aligned to 64 bytes, if it alone uses its storage. Return whether it moved.

    jax copies an unaligned argument at each call, and weights in a file may begin anywhere. If another tensor shares the storage, a later
    call tries again.
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
    """Return why the tensor must keep its storage, or '' if it can move into jax-owned memory."""
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
