"""A pass that evaluates the scalar arithmetic of many leaves once, as one batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from bridge._ir.fingerprint import aval_text, params_text
from bridge._ir.types import Atom, ClosedJaxpr, Eqn, Literal, Var

from .kernel_class import KernelClass, jit_if_repeated

# Numbers that one loop may read each by itself: with many more values to read, XLA writes no more results from it.
_APART = 8
_ROWS = 64  # of a table from which parts read their numbers, at least


class _Numbers:
    """Operations on numbers, each of them once: the evaluations of one rule repeat most of their arithmetic of scalars."""

    def __init__(self, given: Sequence[Var]) -> None:
        self.eqns: list[Eqn] = []
        self._first: dict[Var, Var] = {}
        self._names = {var: f"a{i}:{aval_text(var.aval)}" for i, var in enumerate(given)}
        self._lines: dict[str, list[Var]] = {}

    @property
    def made(self) -> Iterable[Var]:
        """All results."""
        return self._first

    def add(self, eqn: Eqn) -> None:
        """Take an operation, unless one that was taken does the same."""
        eqn = eqn.replace(invars=list(map(self.first, eqn.invars)))
        operands, kinds = [self._name(v) for v in eqn.invars], [aval_text(v.aval) for v in eqn.outvars]
        line = f"{eqn.primitive.name}[{params_text(eqn.params)}] {operands} -> {kinds}"
        if line not in self._lines:
            self._names |= {var: f"%{len(self._lines)}.{i}" for i, var in enumerate(eqn.outvars)}
            self._lines[line] = eqn.outvars
            self.eqns.append(eqn)
        self._first |= zip(eqn.outvars, self._lines[line], strict=True)

    def first(self, var: Atom) -> Atom:
        """The same number as it was first computed."""
        return var if isinstance(var, Literal) else self._first.get(var, var)

    def text(self, eqns: Sequence[Eqn], results: Sequence[Atom]) -> Hashable:
        """Equal for the same arithmetic: operations that were taken, and results."""
        lines = {outvars[0]: line for line, outvars in self._lines.items()}
        return tuple(lines[eqn.outvars[0]] for eqn in eqns), tuple(map(self._name, results))

    def _name(self, var: Atom) -> str:
        return f"{np.asarray(var.val).tobytes()!r}:{aval_text(var.aval)}" if isinstance(var, Literal) else self._names[var]


def _column(values: list[jax.Array], rows: Sequence[int | None], count: int) -> jax.Array:
    """One scalar of all leaves, of each row of a pack one; that which all leaves have is written once."""
    if all(x is values[0] for x in values) and not any(rows):
        return jnp.broadcast_to(values[0], (count, *values[0].shape))
    return jnp.concatenate([jnp.expand_dims(x, 0) if each is None else x for x, each in zip(values, rows, strict=True)])


def _known(
    of_scalars: ClosedJaxpr, handed: int, kinds: Sequence[KernelClass], shared: Sequence[jax.Array], apart: bool
) -> Iterator[tuple[list[jax.Array | np.int32], Callable[..., list[jax.Array]] | None, list[jax.Array]]]:
    """For one leaf of these kinds after the other what the scalars give: so many values to be handed on, and the results.

    Of a leaf that is a part, its row and tables instead of the values, and the function that takes those from these.
    """
    function: Callable[..., list[jax.Array]] = jaxpr_as_fun(of_scalars)
    leaves = [(kind.rows, kind.table_rows, jax.tree.leaves(each)) for kind in kinds for each in kind.scalars]
    if len(leaves) == 1 and leaves[0][:2] == (None, None) and (handed <= _APART or not apart):
        found = function(*leaves[0][2], *shared)
        yield found[:handed], None, found[handed:]
        return
    heights = [rows if at is None else len(columns[0]) if columns else max(at) + 1 for rows, at, columns in leaves]
    count = sum(height or 1 for height in heights)
    stacked = [_column(list(column), heights, count) for column in zip(*(x for *_, x in leaves), strict=True)]
    found = jax.vmap(function, in_axes=(*(0 for _ in stacked), *(None for _ in shared)))(*stacked, *shared)
    # What is true or false is a number among others where there are such: a table more is two loops more for each height of pack.
    floats = [x.dtype for x in found[:handed] if jnp.issubdtype(x.dtype, jnp.floating)]

    def home_of(dtype: np.dtype) -> np.dtype:
        return floats[0] if floats and dtype == np.bool_ else dtype

    tables: dict[np.dtype, list[jax.Array]] = {}
    for x in found[:handed]:
        tables.setdefault(home_of(x.dtype), []).append(jax.lax.reshape(x.astype(home_of(x.dtype)), (len(x), math.prod(x.shape[1:]))))
    joined = {dtype: jnp.concatenate(columns, 1) for dtype, columns in tables.items()}
    if any(at is not None for _, at, _ in leaves):  # of as many rows in most programs, for the sake of which parts are the same
        rows = max(_ROWS, 1 << (count - 1).bit_length())
        joined = {dtype: jnp.pad(x, ((0, rows - count), (0, 0))) for dtype, x in joined.items()}
    ends = {dtype: [0, *accumulate(x.shape[1] for x in columns)] for dtype, columns in tables.items()}
    kinds_of = [(x.dtype, x.shape[1:]) for x in found[:handed]]

    def cells(own: dict[np.dtype, jax.Array], *, height: tuple[int, ...]) -> list[jax.Array]:
        """One row, or the rows of a pack, as the numbers that are handed on."""
        left = {dtype: pairwise(at) for dtype, at in ends.items()}
        columns = [jax.lax.slice_in_dim(own[home_of(dtype)], *next(left[home_of(dtype)]), axis=1) for dtype, _ in kinds_of]
        numbers = [x if x.dtype == dtype else x != 0 for x, (dtype, _) in zip(columns, kinds_of, strict=True)]
        return [jax.lax.reshape(x, (*height, *shape)) for x, (_, shape) in zip(numbers, kinds_of, strict=True)]

    def taken(row: jax.Array, *matrices: jax.Array) -> list[jax.Array]:
        own = {dtype: jax.lax.dynamic_slice_in_dim(x, row, 1) for dtype, x in zip(ends, matrices, strict=True)}
        return cells(jax.lax.optimization_barrier(own), height=())

    if not apart:  # a loop of a GPU reads its numbers where they lie; to cut them out is a kernel for each leaf
        joined = jax.lax.optimization_barrier(joined)
    times = Counter(() if height is None else (height,) for height in heights)
    taken_apart = {height: jit_if_repeated(partial(cells, height=height), n) for height, n in times.items()}
    start = 0
    for (_, at, _), rows in zip(leaves, heights, strict=True):
        stop, height = start + (rows or 1), () if rows is None else (rows,)
        for row in at or ():
            numbers = [np.int32(start + row), *joined.values()]
            results = [jax.lax.reshape(jax.lax.slice_in_dim(x, start + row, start + row + 1), x.shape[1:]) for x in found[handed:]]
            yield numbers, taken, results
        if at is None:
            # The rows of a leaf are one value of their own: else XLA reads each number in a loop of its own, or joins the loops over
            # leaves that read one matrix, which are then slower by a fifth.
            own = {dtype: jax.lax.slice_in_dim(x, start, stop) for dtype, x in joined.items()}
            own = jax.lax.optimization_barrier(own) if apart else own
            results = [jax.lax.reshape(jax.lax.slice_in_dim(x, start, stop), (*height, *x.shape[1:])) for x in found[handed:]]
            yield taken_apart[height](own), None, results
        start = stop
