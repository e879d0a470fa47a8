"""Rows that lie anywhere in memory, and a loop over those of a pack that are updated.

An array is an argument of its own, which costs a call some microseconds: with a thousand equal parameters more than their
arithmetic. So a program is given one array that stands for all memory of the process, and where in it each gradient begins. A row
without a gradient takes no turn of the loop: none of its bytes is moved, and no set of live rows needs a program of its own.
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .calm import default_promotion, default_settings
from .dlpack import ALIGNMENT, Operands, cpu, numpy_dtype
from .fusion import compiled

# The addresses that a process can have where pages have four levels; the first ones are nobody's.
_END = 1 << 47
BASE = ALIGNMENT
SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8

# Elements of one turn of the loop: what it stores between its operations is then still in the second cache. With a quarter or four times
# as many it takes 1.1 to 1.2 times as long. Below the second number the turns themselves take too long.
_PART, _LEAST_PART = 1 << 14, 1 << 12

_address, _is_contiguous, _is_neg = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.is_neg


def part(size: int) -> int | None:
    """How many of so many elements one turn updates, a divisor; None where there is no good one."""
    return next((n for n in range(_PART, _LEAST_PART - 1, -1) if size % n == 0), None)


@functools.cache
def in_place() -> bool:
    """Whether XLA's CPU compiler updates rows in place; asked once, of a small program: one that copies them has room for that.

    jaxlib does with several results from one loop; else it copies all rows at each turn.
    """
    if not SUPPORTED:
        return False
    rows = jax.ShapeDtypeStruct((16, _LEAST_PART), np.float32)
    far = [jax.ShapeDtypeStruct(*each) for each in signature(rows.shape[0], "float32")]

    def adam(_: Any, parts: Sequence[Any]) -> list[Any]:
        p, m, v, g = parts
        m, v = m + g, v + g * g
        return [p - m / jnp.sqrt(v), m, v]

    def program(arrays: list[Any], memory: Any, order: Any) -> list[Any]:
        return over_live_rows(adam, _LEAST_PART, range(3))([], [*arrays, Scattered(memory, order, *rows.shape)])

    with default_settings(), default_promotion(), jax.default_device(cpu()):
        needed = compiled(jax.jit(program, donate_argnums=0).lower([rows] * 3, *far), fused=True).memory_analysis()
    return needed is not None and needed.temp_size_in_bytes < math.prod(rows.shape) * 4


class Scattered:
    """Traced rows of one length, of which those that are live lie anywhere in memory.

    memory: as of `everything`. order: int64 (1 + 2 * count,): how many are live, then which, then where each begins in `memory`; or as of
    `bridge.at_once`.
    """

    __slots__ = ("at_once", "dtype", "memory", "order", "shape")

    def __init__(self, memory: Any, order: Any, count: int, length: int, at_once: bool = False) -> None:
        self.memory, self.order, self.shape, self.dtype, self.at_once = memory, order, (count, length), memory.dtype, at_once


def signature(count: int, dtype: str) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of `memory` and `order` for rows of a dtype."""
    return [(((_END - BASE) // jnp.dtype(dtype).itemsize,), dtype), ((1 + 2 * count,), np.int64)]


class _Everything(np.ndarray):
    """An array that must not be read where nobody asked: a traceback that shows variables would end the process."""

    def __repr__(self) -> str:
        return f"<all memory as {self.dtype}>"

    __str__ = __repr__

    def __deepcopy__(self, memo: Any) -> _Everything:
        return self


@functools.cache
def everything(dtype: Any) -> np.ndarray[Any, Any]:
    """All memory of this process as one array, which nobody may read as a whole."""
    size = (_END - BASE) // dtype.itemsize
    space: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(BASE)
    return _Everything((size,), dtype, space)


class PaddedOperands(Operands):
    """As `Operands`, those at some positions copied to rows of more elements, `longer`, with zeros behind the elements of the tensor."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        order: Sequence[tuple[int, ...] | None],
        longer: Mapping[int, int],
    ) -> None:
        with torch.inference_mode(False):  # else no later step could write to them
            self._rows = {at: (torch.zeros(length, dtype=dtypes[at]), order[at]) for at, length in longer.items()}
        super().__init__(
            [(longer[at],) if at in longer else shape for at, shape in enumerate(shapes)],
            dtypes,
            [None if at in longer else dims for at, dims in enumerate(order)],
        )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        given = list(tensors)
        for at, (row, dims) in self._rows.items():
            tensor = given[at].detach()
            row[: tensor.numel()].copy_((tensor if dims is None else tensor.permute(dims)).reshape(-1))
            given[at] = row
        return super().__call__(given)


class Places:
    """From the gradients of live rows to the arguments of `signature`.

    Each is read where it lies, if it is dense in the order of its parameter's memory; else it is copied. `copies` holds those that were
    made, until whoever called has seen the program to its end and clears it.

    Args:
      count: of all rows.
      rows: those that the gradients belong to.
      dtype: torch's.
      order: of the dimensions of each gradient; None as they are.
      at_once: for `bridge.at_once`: so many zeros, behind where each row begins, one that is not live where some live one does. None: for
        a loop.
    """

    def __init__(
        self, count: int, rows: Sequence[int], dtype: torch.dtype, order: Sequence[tuple[int, ...] | None], at_once: int | None = None
    ) -> None:
        self.rows, self._dims = rows, list(order) if any(order) else []
        if at_once is None:
            self._order, self._starts = np.zeros(1 + 2 * count, np.int64), slice(1 + count, 1 + count + len(rows))
            self._order[0], self._order[1 : 1 + len(rows)] = len(rows), rows
            self._nth = np.arange(len(rows))
        else:
            self._order, self._starts = np.zeros(count + at_once, np.int64), slice(count)
            self._nth = np.zeros(count, np.int64)
            self._nth[rows] = np.arange(len(rows))
        self._memory = everything(np.dtype(numpy_dtype(dtype)))
        self.copies: list[torch.Tensor] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        starts = np.array(list(map(_address, tensors))) - BASE
        size = self._memory.itemsize
        if self._dims or not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)) or (starts % size).any():
            dims = self._dims or [None] * len(tensors)
            readable = [dense(tensor, own, size) for tensor, own in zip(tensors, dims, strict=True)]
            self.copies += [copy for copy, tensor in zip(readable, tensors, strict=True) if copy.data_ptr() != tensor.data_ptr()]
            starts = np.array(list(map(_address, readable))) - BASE
        order = self._order.copy()
        order[self._starts] = (starts // size)[self._nth]
        return [self._memory, order]


class AllPlaces:
    """`Places` of several packs, for one program: their arguments from the gradients of all of them."""

    def __init__(self, places: Sequence[Places]) -> None:
        self._places = places
        self.copies: list[torch.Tensor] = []
        for each in places:
            each.copies = self.copies

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        given = iter(tensors)
        return [x for each in self._places for x in each(list(islice(given, len(each.rows))))]


def dense(tensor: torch.Tensor, dims: tuple[int, ...] | None, size: int) -> torch.Tensor:
    """The tensor itself if it is dense and where arrays may be, its dimensions in this order; else a copy."""
    tensor = (tensor if dims is None else tensor.permute(dims)).detach().resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % size == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def over_live_rows(function: Callable[..., Sequence[Any]], width: int, targets: Sequence[int]) -> Callable[..., list[Any]]:
    """A function of the rows of arrays, for those rows alone that are live, and within each for so many elements at a time.

    Args:
      function: of (numbers, parts of arrays), each of `width` elements, to new parts.
      width: divides the length of a row.
      targets: the positions among the arrays that its results take.

    Returns:
      A function of (numbers by row, arrays in rows, one of which is `Scattered`), to the arrays at `targets`: in place where those are
      donated.
    """

    def looped(numbers: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        far = next(x for x in arrays if isinstance(x, Scattered))
        count, length = far.shape
        as_index = np.uint64  # of a signed one lax asks first whether it is negative
        turns = as_index(length // width)

        def cut(x: Any, start: Any, size: int) -> Any:
            return jax.lax.dynamic_slice(x, (start,), (size,))

        def turn(carry: Any) -> Any:
            i, new = carry
            nth, start = jax.lax.div(i, turns), jax.lax.rem(i, turns) * as_index(width)
            row, place = (cut(far.order, nth + as_index(skipped), 1).reshape(()).astype(as_index) for skipped in (1, 1 + count))
            place, at = place + start, row * as_index(length) + start
            known = dict(zip(targets, new, strict=True))
            parts = [
                cut(far.memory, place, width) if isinstance(x, Scattered) else cut(known.get(j, flat[j]), at, width)
                for j, x in enumerate(arrays)
            ]
            own = [
                jax.lax.dynamic_slice(x, (row, *(as_index(0) for _ in x.shape[1:])), (1, *x.shape[1:])).reshape(x.shape[1:])
                for x in numbers
            ]
            results = function(own, parts)
            return i + as_index(1), [jax.lax.dynamic_update_slice(x, y, (at,)) for x, y in zip(new, results, strict=True)]

        flat = [x if isinstance(x, Scattered) else x.reshape(-1) for x in arrays]
        last = far.order[0].astype(as_index) * turns
        first = as_index(0), [flat[j] for j in targets]
        _, new = jax.lax.while_loop(lambda carry: carry[0] < last, turn, first)
        return [x.reshape(arrays[j].shape) for j, x in zip(targets, new, strict=True)]

    return looped
