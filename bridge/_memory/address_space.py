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
_END = 1 << 47
BASE = ALIGNMENT
SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8

_address, _is_contiguous, _is_neg = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.is_neg


class Scattered:
    """Rows of one length at any addresses, as a traced program sees them.

    memory: The traced `process_memory`.
    row_starts: The index in `memory` where each row begins; see `bridge._compiler.passes.gather_rows`.
    """

    __slots__ = ("dtype", "memory", "order", "shape")

    def __init__(self, memory: jax.Array, order: jax.Array, count: int, length: int) -> None:
        self.memory, self.order, self.shape, self.dtype = memory, order, (count, length), memory.dtype


class _Everything(np.ndarray):
    """An array that does not print its elements. A traceback that shows variables would otherwise crash the process."""

    def __repr__(self) -> str:
        return f"<all memory as {self.dtype}>"

    __str__ = __repr__

    def __deepcopy__(self, memo: Any, /) -> _Everything:
        return self


@functools.cache
def everything(dtype: np.dtype) -> np.ndarray:
    """Return all memory of this process as one array of this dtype. Nobody may read it as a whole."""
    size = (_END - BASE) // dtype.itemsize
    space: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(BASE)
    return _Everything((size,), dtype, space)


class Places:
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

    def __init__(self, count: int, rows: Sequence[int], dtype: torch.dtype, order: Sequence[tuple[int, ...] | None], zeros: int) -> None:
        self.rows, self._dims = rows, list(order) if any(order) else []
        self._order, self._nth = np.zeros(count + zeros, np.int64), np.zeros(count, np.int64)
        self._nth[rows] = np.arange(len(rows))
        self._memory = everything(np.dtype(numpy_dtype(dtype)))
        self.copies: list[torch.Tensor] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        starts = np.array(list(map(_address, tensors))) - BASE
        size = self._memory.itemsize
        if self._dims or not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)) or (starts % size).any():
            dims = self._dims or [None] * len(tensors)
            readable = [dense(tensor, own, size) for tensor, own in zip(tensors, dims, strict=True)]
            self.copies += [copy for copy, tensor in zip(readable, tensors, strict=True) if copy.data_ptr() != tensor.data_ptr()]
            starts = np.array(list(map(_address, readable))) - BASE
        order = self._order.copy()
        order[: len(self._nth)] = (starts // size)[self._nth]
        return [self._memory, order]


class AllPlaces:
    """The `RowAddresses` of several buckets, for one program: turns the gradients of all of them into arguments."""

    def __init__(self, places: Sequence[Places]) -> None:
        self._places = places
        self.copies: list[torch.Tensor] = []
        for each in places:
            each.copies = self.copies

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        given = iter(tensors)
        return [x for each in self._places for x in each(list(islice(given, len(each.rows))))]


def dense(tensor: torch.Tensor, dims: tuple[int, ...] | None, size: int) -> torch.Tensor:
    """Return the tensor itself if it is dense in this order of dimensions and aligned to its item size; else a copy."""
    tensor = (tensor if dims is None else tensor.permute(dims)).detach().resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % size == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
