"""All memory of the process as one array, from which a program reads gradients where they lie."""

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

# The addresses that a process can have where pages have four levels; the first ones are nobody's.
_END = 1 << 47
BASE = ALIGNMENT
SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8

_address, _is_contiguous, _is_neg = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.is_neg


class Scattered:
    """Traced rows of one length that lie anywhere in memory.

    memory: as of `everything`. order: where each begins in `memory`, as of `bridge._compiler.passes.gather_rows`.
    """

    __slots__ = ("dtype", "memory", "order", "shape")

    def __init__(self, memory: jax.Array, order: jax.Array, count: int, length: int) -> None:
        self.memory, self.order, self.shape, self.dtype = memory, order, (count, length), memory.dtype


class _Everything(np.ndarray):
    """An array that must not be read where nobody asked: a traceback that shows variables would end the process."""

    def __repr__(self) -> str:
        return f"<all memory as {self.dtype}>"

    __str__ = __repr__

    def __deepcopy__(self, memo: Any, /) -> _Everything:
        return self


@functools.cache
def everything(dtype: np.dtype) -> np.ndarray:
    """All memory of this process as one array, which nobody may read as a whole."""
    size = (_END - BASE) // dtype.itemsize
    space: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(BASE)
    return _Everything((size,), dtype, space)


class Places:
    """From the gradients of the rows that have one to the arguments of `bridge._compiler.passes.gather_rows`: all memory, and where each
    row begins in it.

    Each is read where it lies, if it is dense in the order of its parameter's memory; else it is copied. `copies` holds those that were
    made, until whoever called has seen the program to its end and clears it. Of a row without a gradient another's is read.

    Args:
      count: of all rows.
      rows: those that the gradients belong to.
      dtype: torch's.
      order: of the dimensions of each gradient; None as they are.
      zeros: how many stand behind where the rows begin.
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
    """`Places` of several packs, for one program: their arguments from the gradients of all of them."""

    def __init__(self, places: Sequence[Places]) -> None:
        self._places = places
        self.copies: list[torch.Tensor] = []
        for each in places:
            each.copies = self.copies

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        given = iter(tensors)
        return [x for each in self._places for x in each(list(islice(given, len(each.rows))))]


def dense(tensor: torch.Tensor, dims: tuple[int, ...] | None, size: int) -> torch.Tensor:
    """The tensor itself if it is dense and where arrays may be, its dimensions in this order; else a copy."""
    tensor = (tensor if dims is None else tensor.permute(dims)).detach().resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % size == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
