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

from bridge._compat.lookup import SAFE_MODE
from bridge._compat.torch import foreach_copy_, is_only_view, is_view, storage_use_count
from bridge._interop.dlpack import ALIGNMENT, dense_order, device_of, to_jax
from bridge._interop.dtypes import numpy_dtype
from bridge._interop.tensor_storage import why_unreadable

from .allocation import copy_to_device, full_many
from .call_arguments import as_call_arguments
from .jax_buffers import JaxBuffer, find_buffer, register
from .ownership import FileMappings, is_owned


class AdoptionResult(NamedTuple):
    """The memory of a tensor after `adopt`.

    jax_buffer: The buffer that the tensor aliases; None if results are copied into the tensor's own storage.
    dim_order: The permutation of the tensor's dimensions to their order in memory; None if they are in order.
    reason: Why the tensor is where it is, for `report()`.
    bucket_row: The row of the bucket that the tensor aliases; None if the tensor has a buffer of its own.
    """

    jax_buffer: JaxBuffer | None
    dim_order: tuple[int, ...] | None
    reason: str
    bucket_row: int | None = None


_ADOPTABLE_TYPES = torch.Tensor, torch.nn.Parameter
IN_PLACE = "in jax-owned memory"
FOREIGN, SHARED = "in memory of another library", "another tensor shares its storage"


def adopt(
    tensor: torch.Tensor,
    writeback: str,
    *,
    needs_own_buffer: bool = False,
    previous_row: tuple[JaxBuffer, int] | None = None,
    prefetcher: CopyPrefetcher | None = None,
) -> AdoptionResult:
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
    known, row = find_buffer(tensor)
    if known is not None and (row is None or not needs_own_buffer or writeback == "copy"):
        if row is not None:
            known.tensor_refs[row] = weakref.ref(tensor)  # another tensor may have been there
        return AdoptionResult(known, dims, IN_PLACE, row) if writeback == "inplace" else AdoptionResult(None, dims, "asked for")
    copy = None if prefetcher is None else prefetcher.take(tensor)
    mappings = None if prefetcher is None else prefetcher.mappings
    why = "asked for" if writeback == "copy" else why_not_adoptable(tensor, mappings) if copy is None else ""
    if why:
        return AdoptionResult(None, dims, why)
    if copy is None and previous_row is not None and not needs_own_buffer and fits_row(tensor, *previous_row):
        memory, row = previous_row
    else:
        memory, row = copy_to_buffer(tensor, like=tensor) if copy is None else register(copy), None
    window = memory.alias_tensor(tensor.device, like=tensor, row=row)
    tensor.data = window if row is None else window.copy_(tensor.detach())
    if row is not None:
        memory.tensor_refs[row] = weakref.ref(tensor)
    return AdoptionResult(memory, dims, IN_PLACE, row)


def fits_row(tensor: torch.Tensor, memory: JaxBuffer, row: int) -> bool:
    """Return whether a row has the tensor's length, dtype and device, and no tensor aliases it."""
    if memory.row_lengths is None or memory.array.is_deleted() or row in memory.aliases:
        return False
    same = np.dtype(memory.array.dtype) == numpy_dtype(tensor.dtype) and memory.array.devices() == {device_of(tensor)}
    return same and memory.row_lengths[row] == tensor.numel()


def adopt_into_bucket(buckets: Sequence[Sequence[torch.Tensor]]) -> list[JaxBuffer]:
    """Move small tensors into the rows of new buckets.

    Each tensor is the only one over its storage. Tensors of a bucket have one dtype and device. Each row is aligned to 64 bytes, and each
    tensor gets a torch storage of exactly its own bytes, so that saving one tensor does not save the others. Shape, strides, dtype, device,
    values and identity stay. All buckets are allocated at once, because XLA then writes their pages in several threads.
    """
    fills = [
        ((len(group), bucket_row_length(group[0].dtype, max(tensor.numel() for tensor in group))), numpy_dtype(group[0].dtype), 0)
        for group in buckets
    ]
    arrays = cast(list[jax.Array], jax.block_until_ready(full_many(fills, device_of(buckets[0][0]))))
    return [_adopt_rows(group, array) for group, array in zip(buckets, arrays, strict=True)]


def _adopt_rows(tensors: Sequence[torch.Tensor], array: jax.Array) -> JaxBuffer:
    memory = register(array, [tensor.numel() for tensor in tensors])
    windows = [memory.alias_tensor(tensor.device, like=tensor, row=row) for row, tensor in enumerate(tensors)]
    foreach_copy_(windows, [tensor.detach() for tensor in tensors])
    for row, (tensor, window) in enumerate(zip(tensors, windows, strict=True)):
        tensor.data = window
        memory.tensor_refs[row] = weakref.ref(tensor)
    return memory


def bucket_row_length(dtype: torch.dtype, elements: int) -> int:
    """Return the least number of elements, at least as many as asked for, with which the next row of a bucket is aligned."""
    unit = max(ALIGNMENT // dtype.itemsize, 1)
    return -(-elements // unit) * unit


def copy_to_buffer(tensor: torch.Tensor, like: torch.Tensor | None = None) -> JaxBuffer:
    """Return a new jax-owned buffer with the tensor's values, dtype and device; elements are in the memory order of `like`.

    The array is flat, because XLA's loops run over the innermost dimension, which is only a few elements long in a convolution's weight.
    A 0-d tensor stays 0-d unless `like` is given.
    """
    return register(_start_copy(tensor, like).block_until_ready())


def _start_copy(tensor: torch.Tensor, like: torch.Tensor | None) -> jax.Array:
    """Return the array of `copy_to_buffer`, which may still be being written."""
    (flat,) = as_call_arguments([tensor], [None if like is None else dense_order(like)])
    return copy_to_device(flat.reshape(()) if like is None and not tensor.ndim else flat, device_of(tensor))


class CopyPrefetcher:
    """Starts copies of parameters before each parameter moves into its copy. XLA makes one copy in one thread, and several in several.

    The values of a parameter must not change until it has moved.

    Args:
      max_bytes: The most bytes of copies that exist before their parameters have moved.

    Attributes:
      mappings: The file mappings at the time when the parameters move, for `why_not_adoptable`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.mappings = FileMappings()
        self._max_bytes, self._bytes = max_bytes, 0
        self._pending: deque[torch.Tensor] = deque()
        self._copies: dict[int, jax.Array] = {}

    def prefetch(self, tensor: torch.Tensor) -> None:
        """Start the copy of a parameter that alone uses its storage, now or when other copies have been taken."""
        self._pending.append(tensor)
        self._start_copies()

    def take(self, tensor: torch.Tensor) -> jax.Array | None:
        """Return the finished copy; None if it was not started. The next call starts further copies: by then this parameter has moved."""
        self._start_copies()
        copy = self._copies.pop(id(tensor), None)
        if copy is None:
            return None
        self._bytes -= copy.nbytes
        return copy.block_until_ready()

    def _start_copies(self) -> None:
        while self._pending and self._bytes + self._pending[0].nbytes <= self._max_bytes:
            tensor = self._pending.popleft()
            # Checked here, because the copy reads the tensor through a second one, which then counts as sharing its storage.
            if find_buffer(tensor)[0] is None and not why_not_adoptable(tensor, self.mappings):
                self._copies[id(tensor)] = _start_copy(tensor, tensor)
                self._bytes += tensor.nbytes


# The address of the storage; then address, number of elements, dtype and dimension order of the tensor.
_ImportKey = tuple[int, int, int, torch.dtype, tuple[int, ...] | None]
_read_only_imports: weakref.WeakValueDictionary[_ImportKey, jax.Array] = weakref.WeakValueDictionary()


def import_read_only(tensor: torch.Tensor, dim_order: tuple[int, ...] | None) -> jax.Array:
    """Return a flat array over a CPU tensor that programs only read. It keeps the storage alive until `delete_imports` deletes it.

    Args:
      tensor: The tensor.
      dim_order: The order of its dimensions in the array; None for the order that they have.

    Raises:
      ValueError: jax would copy the tensor; see `to_jax`.
    """
    key = tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.numel(), tensor.dtype, dim_order
    known = _read_only_imports.get(key)
    if known is None or known.is_deleted():
        known = _read_only_imports[key] = to_jax((tensor if dim_order is None else tensor.permute(dim_order)).detach().reshape(-1))
    return known


def delete_imports(tensors: Iterable[torch.Tensor]) -> None:
    """Delete the arrays of `import_read_only` over these tensors' storages, so that the tensors alone use them and can be adopted."""
    addresses: set[int] = (
        {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) in _ADOPTABLE_TYPES} if _read_only_imports else set()
    )
    for (address, *_), array in list(_read_only_imports.items()):
        if address in addresses:
            array.delete()


# By address: tensors that `align_storage` cannot move.
_unmovable: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def align_storage(tensor: torch.Tensor) -> bool:
    """Move a CPU tensor that is only read to an address aligned to 64 bytes, if it alone uses its storage. Return whether it moved.

    jax copies an unaligned argument at each call, and weights in a file may begin anywhere. If another tensor shares the storage, a later
    call tries again.
    """
    address = tensor.data_ptr()
    if not address % ALIGNMENT or _unmovable.get(address) is tensor:
        return False
    why = why_not_adoptable(tensor)
    if not why:
        with torch.inference_mode(False), torch.no_grad():
            tensor.data = tensor.detach().clone()
        address = tensor.data_ptr()
    if address % ALIGNMENT and why != SHARED:
        _unmovable[address] = tensor
    return not why


def why_not_adoptable(tensor: torch.Tensor, mappings: FileMappings | None = None) -> str:
    """Return why the tensor must keep its storage, or '' if it can move into jax-owned memory.

    Args:
      tensor: The tensor.
      mappings: The file mappings, if they have been read; the tensor existed then.
    """
    if SAFE_MODE:
        return "MASKBRIDGE_SAFE is set"
    if type(tensor) not in _ADOPTABLE_TYPES:
        return f"a {type(tensor).__name__}"
    if not tensor.numel():
        return "no elements"
    if dense_order(tensor) is None:
        return "not dense"
    if why_unreadable(tensor):
        return "its memory was freed"
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return "a view into a larger storage"
    if is_view(tensor) and not is_only_view(tensor):
        return "a view of another tensor"
    if tensor.is_shared() and tensor.device.type == "cpu":
        return "in shared memory"
    if tensor.is_pinned():
        return "in pinned memory"
    if storage_use_count(tensor) != (2 if is_view(tensor) else 1):
        return SHARED
    if not tensor.untyped_storage().resizable() and find_buffer(tensor)[0] is None and not is_owned(tensor, mappings or FileMappings()):
        return FOREIGN
    return ""
