"""Functions of many leaves, their arithmetic of scalars done once for all leaves.

An update computes bias corrections, schedules and the like from a step count and a few hyperparameters before it touches
an array. Leaf by leaf XLA would run each such operation by itself: 30 us a leaf on a CPU core, as much as updating 20,000
elements, and compile each of them. So each traced function is cut in two: what depends on scalars alone is evaluated as
vectors over all leaves for which it is the same arithmetic, whatever their shapes.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ._ir.classify import spreads
from ._ir.fingerprint import kind_text, params_text
from ._ir.jaxpr import apply, at_start, in_turn, inlined, part, slice_of, traced
from ._ir.numerics import is_key
from ._memory.address_space import Scattered
from .at_once import over_rows
from .loops import by_bits
from .operands import fewer

# Numbers that one loop may read each by itself: with many more values to read, XLA writes no more results from it.
_APART = 8
_ROWS = 64  # of a table from which parts read their numbers, at least
_FEW = 64  # elements up to which a value that depends on scalars alone is one of them


class Alike(NamedTuple):
    """Leaves with one function of (arrays, scalars, common), which jax can trace.

    arrays, scalars: for each leaf a pytree; equal structures, shapes and dtypes.
    rows: of a leaf that stands for so many, one in each row of its arrays and scalars, their number; the function is of one row.
    family: kinds of one family have one function but for the size of their arrays: it is traced for the largest, if those are flat.
      None for a kind by itself.
    at: where the scalars of all leaves are given once, as columns, the row of each leaf in those. Each is then a `part` of the program.
    """

    function: Callable[..., Any]
    arrays: Sequence[Any]
    scalars: Sequence[Any]
    rows: int | None = None
    family: Any = None
    at: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """The elements of one row of an array."""
        return math.prod(jax.tree.leaves(self.arrays[0])[0].shape[-1:])


def for_each(kinds: Sequence[Alike], common: Any, apart: bool = True) -> list[list[Any]]:
    """For each kind [function(a, s, common) for a, s in zip(arrays, scalars)], traced once, mapped over rows.

    common: a pytree that all calls get. apart: whether the numbers of each leaf are cut out before its loop, as is best on a CPU.
    """
    shared = jax.tree.leaves(common)
    cuts = _cuts(kinds, common, apart)
    alike: dict[Any, list[int]] = {}
    for position, cut in enumerate(cuts):
        alike.setdefault(cut.key, []).append(position)
    results: list[list[Any]] = [[] for _ in kinds]
    for positions in alike.values():
        known = _known(cuts[positions[0]].of_scalars, cuts[positions[0]].handed, [kinds[i] for i in positions], shared, apart)
        for i in positions:
            kind, cut = kinds[i], cuts[i]
            function = _of_arrays(cut, kind, shared, apart)
            called = None
            for arrays in kind.arrays:
                numbers, taken, done = next(known)
                if called is None:
                    called = function if taken is None else part(_at_row(function, taken, len(numbers)))
                results[i].append(cut.results(done, called(*numbers, *jax.tree.leaves(arrays), *shared)))
    return results


def _of_arrays(cut: _Cut, kind: Alike, shared: Sequence[Any], apart: bool) -> Callable[..., Any]:
    """The second part of a function, for the arrays of a kind."""
    given = jax.tree.leaves(kind.arrays[0])
    far = next((i for i, x in enumerate(given) if isinstance(x, Scattered)), None)
    if far is not None:
        return cut.all_rows(far, len(shared))
    function = cut.of_arrays
    if kind.rows is not None:
        function = jax.vmap(function, in_axes=(*(0 for _ in range(cut.handed + len(given))), *(None for _ in shared)))
    return _repeated(function, len(kind.arrays) if kind.at is None else 1)


def _at_row(function: Callable[..., Any], taken: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function, with its first operands taken from others, so many."""
    return lambda *given: function(*taken(*given[:count]), *given[count:])


_families: dict[Any, _Cut] = {}
_FAMILIES_KEPT = 256


def _cuts(kinds: Sequence[Alike], common: Any, apart: bool) -> list[_Cut]:
    """The function of each kind, cut in two; that of a family is traced once in a process."""
    found: list[Any] = [None] * len(kinds)
    like = jax.tree.structure(common), tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(common))
    for i in sorted(range(len(kinds)), key=lambda i: -kinds[i].size):
        kind, key = kinds[i], (kinds[i].family, like, apart)
        known = None if kind.family is None else _families.get(key)
        found[i] = None if known is None else known.resized(kind.size)
        if found[i] is None:
            found[i] = _Cut(kind, common, apart)
            if kind.family is not None and (known is None or found[i].is_flat):  # one of few elements serves none of another size
                while len(_families) >= _FAMILIES_KEPT:
                    del _families[next(iter(_families))]
                _families[key] = found[i]
    return found


def _repeated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """The function, traced and lowered once, and called from then on, if that is asked for more than once: XLA writes out each call."""
    return jax.jit(function) if times > 1 else function


class _Cut:
    """A traced function of (arrays, scalars, common) as two: of (scalars, common), and of (what that gives, arrays, common).

    The first gives what is handed to the second, then the results that need no array. Its `key` is equal for the same arithmetic.
    """

    def __init__(self, kind: Alike, common: Any, apart: bool) -> None:
        columns = kind.rows is not None, kind.rows is not None or kind.at is not None
        one = [
            jax.tree.map(lambda x, column=column: jax.ShapeDtypeStruct(x.shape[column:], x.dtype), x[0])
            for column, x in zip(columns, kind[1:3], strict=True)
        ]
        closed, result = traced(kind.function, *one, jax.tree.map(_shape, common))
        self.structure, self._size, self._now = jax.tree.structure(result), kind.size, kind.size
        closed = fewer(closed, jax.tree.leaves(one[0])[0].size) if apart else closed
        arrays, scalars = (len(jax.tree.leaves(x)) for x in one)
        jaxpr = closed.jaxpr
        own, each, rest = jaxpr.invars[:arrays], jaxpr.invars[arrays : arrays + scalars], jaxpr.invars[arrays + scalars :]
        given = [*each, *rest, *jaxpr.constvars]
        small = {v for v in given if v.aval.size <= _FEW}
        numbers, second = _Numbers(given), []
        for eqn in jaxpr.eqns:
            if not eqn.outvars and not eqn.effects:  # a call of which nothing was left
                continue
            # A number in all elements of a leaf of few is none: the cut would depend on whether that was traced, or a larger one before it.
            depends = all(isinstance(v, Literal) or v in small for v in eqn.invars) and not spreads(eqn, kind.size)
            # A random key fits in no table of numbers: it is made anew where it is read.
            if depends and all(v.aval.size <= _FEW and not is_key(v.aval) for v in eqn.outvars) and not eqn.effects:
                numbers.add(eqn)
                small.update(eqn.outvars)
            else:
                second.append(eqn)
        made = {*each, *numbers.made}
        of_scalars = lambda v: not isinstance(v, Literal) and v in made  # noqa: E731
        self.is_scalar = list(map(of_scalars, jaxpr.outvars))
        done, others = ([v for v in jaxpr.outvars if of_scalars(v) is scalar] for scalar in (True, False))
        second = second if any(eqn.effects for eqn in second) else slice_of(second, others)
        # What two evaluations read is handed on to each: a number that is read twice would be cut out of its row in a loop of its own.
        handed = [v for v in dict.fromkeys(v for eqn in second for v in eqn.invars if not isinstance(v, Literal)) if v in made]
        arrays = ClosedJaxpr(jaxpr.replace(invars=[*handed, *own, *rest], outvars=others, eqns=second), closed.consts)
        arrays = by_bits(arrays) if apart else arrays
        self._own, self.handed, results = len(own), len(handed), [numbers.first(v) for v in (*handed, *done)]
        first = slice_of(numbers.eqns, results)
        self.key = self.handed, numbers.text(first, results), tuple(map(id, closed.consts))
        self.of_scalars = ClosedJaxpr(jaxpr.replace(invars=[*each, *rest], outvars=results, eqns=first), closed.consts)
        self._arrays, self.of_arrays = arrays, jaxpr_as_fun(arrays)

    def resized(self, size: int) -> _Cut | None:
        """The same for arrays of another size; None where not all arrays are flat and of the size that this is for."""
        if size == self._now:
            return self
        if not self.is_flat:
            return None
        other = copy.copy(self)
        other._now, other.of_arrays = size, lambda *inputs: _in_shape(self._plain, inputs, (self._size,), (size,))
        return other

    def all_rows(self, far: int, shared: int) -> Callable[..., Any]:
        """The second part of all rows, in one loop, of which the array `far` lies anywhere; of its inputs, so many are common to all."""
        mapped = [True] * (self.handed + self._own) + [False] * shared
        return over_rows(self._plain if self._now == self._size else self._resized, self.handed + far, mapped)

    @property
    def _resized(self) -> Any:
        """The second part as traced for the size that this is for now."""
        sizes = [(self._now,) if v.aval.shape == (self._size,) else v.aval.shape for v in self._plain.jaxpr.invars]
        inputs = [jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in zip(sizes, self._plain.jaxpr.invars, strict=True)]
        return jax.make_jaxpr(lambda *inputs: _in_shape(self._plain, inputs, (self._size,), (self._now,)))(*inputs)

    @cached_property
    def is_flat(self) -> bool:
        """Whether it can be had for arrays of other sizes."""
        seen = [v.aval for eqn in self._plain.jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
        return self._size > _FEW and all(aval.shape == (self._size,) or aval.size <= _FEW for aval in seen)

    @cached_property
    def _plain(self) -> Any:
        """The second part, with the bodies of what it calls in place of the calls."""
        return inlined(self._arrays.jaxpr, self._arrays.consts)

    def results(self, done: Sequence[Any], others: Sequence[Any]) -> Any:
        """What the function gives, from the results that scalars gave and those that arrays did."""
        parts = {True: iter(done), False: iter(others)}
        return self.structure.unflatten([next(parts[scalar]) for scalar in self.is_scalar])


def _in_shape(closed: Any, inputs: Sequence[Any], old: tuple[int, ...], new: tuple[int, ...]) -> list[Any]:
    """The results of a program as of `inlined` for inputs of the shape `new`, where it was traced for `old`."""
    jaxpr = closed.jaxpr

    def reshaped(eqn: Any, operands: list[Any]) -> list[Any]:
        params = {name: new if isinstance(value, tuple) and value == old else value for name, value in eqn.params.items()}
        return apply(jaxpr, eqn.replace(params=params), operands)

    return list(map(in_turn(jaxpr.eqns, at_start(jaxpr, closed.consts, inputs), reshaped), jaxpr.outvars))


class _Numbers:
    """Operations on numbers, each of them once: the evaluations of one rule repeat most of their arithmetic of scalars."""

    def __init__(self, given: Sequence[Any]) -> None:
        self.eqns: list[Any] = []
        self._first: dict[Any, Any] = {}
        self._names = {var: f"a{i}:{kind_text(var.aval)}" for i, var in enumerate(given)}
        self._lines: dict[str, list[Any]] = {}

    @property
    def made(self) -> Iterable[Any]:
        """All results."""
        return self._first

    def add(self, eqn: Any) -> None:
        """Take an operation, unless one that was taken does the same."""
        eqn = eqn.replace(invars=list(map(self.first, eqn.invars)))
        operands, kinds = [self._name(v) for v in eqn.invars], [kind_text(v.aval) for v in eqn.outvars]
        line = f"{eqn.primitive.name}[{params_text(eqn.params)}] {operands} -> {kinds}"
        if line not in self._lines:
            self._names |= {var: f"%{len(self._lines)}.{i}" for i, var in enumerate(eqn.outvars)}
            self._lines[line] = eqn.outvars
            self.eqns.append(eqn)
        self._first |= zip(eqn.outvars, self._lines[line], strict=True)

    def first(self, var: Any) -> Any:
        """The same number as it was first computed."""
        return var if isinstance(var, Literal) else self._first.get(var, var)

    def text(self, eqns: Sequence[Any], results: Sequence[Any]) -> Any:
        """Equal for the same arithmetic: operations that were taken, and results."""
        lines = {outvars[0]: line for line, outvars in self._lines.items()}
        return tuple(lines[eqn.outvars[0]] for eqn in eqns), tuple(map(self._name, results))

    def _name(self, var: Any) -> str:
        return f"{np.asarray(var.val).tobytes()!r}:{kind_text(var.aval)}" if isinstance(var, Literal) else self._names[var]


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _column(values: list[Any], rows: Sequence[int | None], count: int) -> Any:
    """One scalar of all leaves, of each row of a pack one; that which all leaves have is written once."""
    if all(x is values[0] for x in values) and not any(rows):
        return jnp.broadcast_to(values[0], (count, *values[0].shape))
    return jnp.concatenate([jnp.expand_dims(x, 0) if each is None else x for x, each in zip(values, rows, strict=True)])


def _known(
    of_scalars: ClosedJaxpr, handed: int, kinds: Sequence[Alike], shared: Sequence[Any], apart: bool
) -> Iterator[tuple[list[Any], Callable[..., Any] | None, list[Any]]]:
    """For one leaf of these kinds after the other what the scalars give: so many values to be handed on, and the results.

    Of a leaf that is a part, its row and tables instead of the values, and the function that takes those from these.
    """
    function = jaxpr_as_fun(of_scalars)
    leaves = [(kind.rows, kind.at, jax.tree.leaves(each)) for kind in kinds for each in kind.scalars]
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
    home_of = lambda dtype: floats[0] if floats and dtype == np.bool_ else dtype  # noqa: E731
    tables: dict[Any, list[Any]] = {}
    for x in found[:handed]:
        tables.setdefault(home_of(x.dtype), []).append(jax.lax.reshape(x.astype(home_of(x.dtype)), (len(x), math.prod(x.shape[1:]))))
    joined = {dtype: jnp.concatenate(columns, 1) for dtype, columns in tables.items()}
    if any(at is not None for _, at, _ in leaves):  # of as many rows in most programs, for the sake of which parts are the same
        rows = max(_ROWS, 1 << (count - 1).bit_length())
        joined = {dtype: jnp.pad(x, ((0, rows - count), (0, 0))) for dtype, x in joined.items()}
    ends = {dtype: [0, *accumulate(x.shape[1] for x in columns)] for dtype, columns in tables.items()}
    kinds_of = [(x.dtype, x.shape[1:]) for x in found[:handed]]

    def cells(own: Any, *, height: tuple[int, ...]) -> list[Any]:
        """One row, or the rows of a pack, as the numbers that are handed on."""
        left = {dtype: pairwise(at) for dtype, at in ends.items()}
        columns = [jax.lax.slice_in_dim(own[home_of(dtype)], *next(left[home_of(dtype)]), axis=1) for dtype, _ in kinds_of]
        numbers = [x if x.dtype == dtype else x != 0 for x, (dtype, _) in zip(columns, kinds_of, strict=True)]
        return [jax.lax.reshape(x, (*height, *shape)) for x, (_, shape) in zip(numbers, kinds_of, strict=True)]

    def taken(row: Any, *matrices: Any) -> list[Any]:
        own = {dtype: jax.lax.dynamic_slice_in_dim(x, row, 1) for dtype, x in zip(ends, matrices, strict=True)}
        return cells(jax.lax.optimization_barrier(own), height=())

    if not apart:  # a loop of a GPU reads its numbers where they lie; to cut them out is a kernel for each leaf
        joined = jax.lax.optimization_barrier(joined)
    times = Counter(() if height is None else (height,) for height in heights)
    taken_apart = {height: _repeated(partial(cells, height=height), n) for height, n in times.items()}
    start = 0
    for (_, at, _), rows in zip(leaves, heights, strict=True):
        stop, height = start + (rows or 1), () if rows is None else (rows,)
        cut = lambda x, start, stop: jax.lax.slice_in_dim(x, start, stop)  # noqa: E731
        for row in at or ():
            numbers = np.int32(start + row), *joined.values()
            yield [*numbers], taken, [jax.lax.reshape(cut(x, start + row, start + row + 1), x.shape[1:]) for x in found[handed:]]
        if at is None:
            # The rows of a leaf are one value of their own: else XLA reads each number in a loop of its own, or joins the loops over
            # leaves that read one matrix, which are then slower by a fifth.
            own = {dtype: cut(x, start, stop) for dtype, x in joined.items()}
            own = jax.lax.optimization_barrier(own) if apart else own
            yield taken_apart[height](own), None, [jax.lax.reshape(cut(x, start, stop), (*height, *x.shape[1:])) for x in found[handed:]]
        start = stop
