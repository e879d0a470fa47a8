"""The process's memory as one array, from which a program reads gradients by their addresses, without copying them.

The array must never be read as a whole, and each address in it must belong to memory that is alive until the program has ended.
`first_elements` checks the storages, and hands them to the caller, who holds them until then.
"""

# jax annotates some of these functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import torch

from bridge._compat.lookup import SAFE_MODE
from bridge._interop.dlpack import ALIGNMENT, with_dense_storage
from bridge._interop.dtypes import numpy_dtype
from bridge._interop.tensor_storage import first_unreadable, storage_of

# The range of user addresses with four-level page tables. The first bytes belong to nobody.
_ADDRESS_END = 1 << 47
_BASE_ADDRESS = ALIGNMENT
CAN_READ_BY_ADDRESS = not SAFE_MODE and sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8

_address, _is_contiguous, _is_neg = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.is_neg
_bytes_of = attrgetter("nbytes")


class AddressedRows:
    """Rows of one length at any addresses, as a traced program sees them.

    memory: The traced `process_memory`.
    row_starts: The index in `memory` where each row begins; see `bridge._compiler.passes.gather_rows`.
    """

    __slots__ = ("dtype", "memory", "row_starts", "shape")

    def __init__(self, memory: jax.Array, row_starts: jax.Array, count: int, length: int) -> None:
        self.memory, self.row_starts, self.shape, self.dtype = memory, row_starts, (count, length), memory.dtype

    def gather(self, nth_zero: int) -> jax.Array:
        """Return the elements of all rows. A zero that follows the row starts is added to them, so that no two gathers are equal."""
        count, length = self.shape
        starts = (self.row_starts[:count] + self.row_starts[count + nth_zero]).reshape(count, 1)
        rows = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
        return jax.lax.gather(self.memory, starts, rows, (length,), mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def read_slice(memory: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Return elements of the traced `process_memory`, from the index `start` on."""
    return jax.lax.dynamic_slice(memory, (start,), (length,))


class _ProcessMemory(np.ndarray):
    """An array that does not print its elements. A traceback that shows variables would otherwise crash the process."""

    def __repr__(self) -> str:
        return f"<all memory as {self.dtype}>"

    __str__ = __repr__

    def __deepcopy__(self, memo: Any, /) -> _ProcessMemory:
        return self


@functools.cache
def process_memory(dtype: np.dtype) -> np.ndarray:
    """Return all memory of this process as one array of this dtype. Nobody may read it as a whole."""
    size = (_ADDRESS_END - _BASE_ADDRESS) // dtype.itemsize
    space: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(_BASE_ADDRESS)
    return _ProcessMemory((size,), dtype, space)


def first_element(array: np.ndarray) -> int:
    """Return the index in `process_memory` where an aligned array begins. The caller holds the array until no program reads it."""
    return (array.ctypes.data - _BASE_ADDRESS) // array.itemsize


def first_elements(
    tensors: Sequence[torch.Tensor], dim_orders: Sequence[tuple[int, ...] | None], itemsize: int, held: list[object]
) -> np.ndarray:
    """Return the index in `process_memory` where each tensor begins.

    A tensor is read where it is if it is dense in its order of dimensions, aligned to its item size and not negated lazily; otherwise it
    is copied.

    Args:
      tensors: CPU tensors of one dtype.
      dim_orders: The order of each tensor's dimensions in memory; None for the order that they have. Empty if all are None.
      itemsize: The bytes of an element.
      held: Receives what the caller holds until the program has ended: the storages, or the copies.

    Raises:
      ValueError: The storage of a tensor was freed or is too small.
    """
    starts, storages = np.array(list(map(_address, tensors))) - _BASE_ADDRESS, list(map(storage_of, tensors))
    are_dense = not any(dim_orders) and all(map(_is_contiguous, tensors)) and not any(map(_is_neg, tensors))
    are_whole = list(map(len, storages)) == list(map(_bytes_of, tensors)) or first_unreadable(tensors) is None
    if not are_dense or not are_whole or (starts % itemsize).any():
        tensors = [_as_dense(*each, itemsize) for each in zip(tensors, dim_orders or [None] * len(tensors), strict=True)]
        starts, storages = np.array(list(map(_address, tensors))) - _BASE_ADDRESS, list(map(storage_of, tensors))
    held += storages
    return starts // itemsize


def _as_dense(tensor: torch.Tensor, dim_order: tuple[int, ...] | None, itemsize: int) -> torch.Tensor:
    """Return the tensor itself if it is dense in this order of dimensions and aligned to its item size; else a copy."""
    tensor = with_dense_storage(tensor)
    tensor = (tensor if dim_order is None else tensor.permute(dim_order)).detach().resolve_neg().contiguous()
    return (
        tensor if tensor.data_ptr() % itemsize == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    )


class RowAddresses:
    """Turns gradients of a bucket's rows into the arguments of `gather_rows`: all memory, and the row starts in it.

    For a row without a gradient, another row's gradient is read.

    Args:
      row_count: The number of rows of the bucket.
      rows: The row of each gradient.
      dtype: torch's dtype of the gradients.
      dim_orders: The order of dimensions of each gradient in its parameter's memory; None for the order that it has.
      trailing_zeros: How many zeros follow the row starts.
    """

    def __init__(
        self, row_count: int, rows: Sequence[int], dtype: torch.dtype, dim_orders: Sequence[tuple[int, ...] | None], trailing_zeros: int
    ) -> None:
        self.rows, self._dim_orders = rows, list(dim_orders) if any(dim_orders) else []
        self._row_starts, self._gradient_of_row = np.zeros(row_count + trailing_zeros, np.int64), np.zeros(row_count, np.int64)
        self._gradient_of_row[rows] = np.arange(len(rows))
        self._memory = process_memory(np.dtype(numpy_dtype(dtype)))

    def __call__(self, tensors: Sequence[torch.Tensor], held: list[object]) -> list[np.ndarray]:
        row_starts = self._row_starts.copy()
        starts = first_elements(tensors, self._dim_orders, self._memory.itemsize, held)
        row_starts[: len(self._gradient_of_row)] = starts[self._gradient_of_row]
        return [self._memory, row_starts]


class BucketAddresses:
    """The `RowAddresses` of several buckets, for one program: turns the gradients of all of them into arguments."""

    def __init__(self, row_addresses: Sequence[RowAddresses]) -> None:
        self._row_addresses = row_addresses

    def __call__(self, tensors: Sequence[torch.Tensor], held: list[object]) -> list[np.ndarray]:
        given = iter(tensors)
        return [x for each in self._row_addresses for x in each(list(islice(given, len(each.rows))), held)]
