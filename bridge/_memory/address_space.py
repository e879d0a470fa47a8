"""The process's memory as one array, from which a program reads gradients by their addresses, without copying them.

The array must never be read as a whole, and each address in it must belong to memory that is alive until the program has ended.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax
import numpy as np
import torch

from bridge._interop.dlpack import ALIGNMENT
from bridge._interop.dtypes import numpy_dtype

# The range of user addresses with four-level page tables. The first bytes belong to nobody.
_ADDRESS_END = 1 << 47
BASE_ADDRESS = ALIGNMENT
CAN_READ_BY_ADDRESS = sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8

_address, _is_contiguous, _is_neg = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.is_neg


class AddressedRows:
    """Rows of one length at any addresses, as a traced program sees them.

    memory: The traced `process_memory`.
    row_starts: The index in `memory` where each row begins; see `bridge._compiler.passes.gather_rows`.
    """

    __slots__ = ("dtype", "memory", "row_starts", "shape")

    def __init__(self, memory: jax.Array, row_starts: jax.Array, count: int, length: int) -> None:
        self.memory, self.row_starts, self.shape, self.dtype = memory, row_starts, (count, length), memory.dtype


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
    size = (_ADDRESS_END - BASE_ADDRESS) // dtype.itemsize
    space: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(BASE_ADDRESS)
    return _ProcessMemory((size,), dtype, space)


class RowAddresses:
    """Turns gradients of a bucket's rows into the arguments of `gather_rows`: all memory, and the row starts in it.

    A gradient is read at its address if it is dense in the dimension order of its parameter's memory; otherwise it is copied. `copies`
    holds the copies until the caller clears it, after the program has ended. For a row without a gradient, another row's gradient is
    read.

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
        self.copies: list[torch.Tensor] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        starts = np.array(list(map(_address, tensors))) - BASE_ADDRESS
        size = self._memory.itemsize
        if self._dim_orders or not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)) or (starts % size).any():
            dims = self._dim_orders or [None] * len(tensors)
            readable = [as_dense(tensor, own, size) for tensor, own in zip(tensors, dims, strict=True)]
            self.copies += [copy for copy, tensor in zip(readable, tensors, strict=True) if copy.data_ptr() != tensor.data_ptr()]
            starts = np.array(list(map(_address, readable))) - BASE_ADDRESS
        row_starts = self._row_starts.copy()
        row_starts[: len(self._gradient_of_row)] = (starts // size)[self._gradient_of_row]
        return [self._memory, row_starts]


class BucketAddresses:
    """The `RowAddresses` of several buckets, for one program: turns the gradients of all of them into arguments."""

    def __init__(self, row_addresses: Sequence[RowAddresses]) -> None:
        self._row_addresses = row_addresses
        self.copies: list[torch.Tensor] = []
        for each in row_addresses:
            each.copies = self.copies

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        given = iter(tensors)
        return [x for each in self._row_addresses for x in each(list(islice(given, len(each.rows))))]


def as_dense(tensor: torch.Tensor, dim_order: tuple[int, ...] | None, itemsize: int) -> torch.Tensor:
    """Return the tensor itself if it is dense in this order of dimensions and aligned to its item size; else a copy."""
    tensor = (tensor if dim_order is None else tensor.permute(dim_order)).detach().resolve_neg().contiguous()
    return (
        tensor if tensor.data_ptr() % itemsize == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    )
