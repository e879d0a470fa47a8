"""Functions of many leaves, their arithmetic of scalars done once for all leaves.

An update computes bias corrections, schedules and the like from a step count and a few hyperparameters before it touches
an array. Leaf by leaf XLA would run each such operation by itself: 30 us a leaf on a CPU core, as much as updating 20,000
elements, and compile each of them. So each traced function is cut in two: what depends on scalars alone is evaluated as
vectors over all leaves for which it is the same arithmetic, whatever their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

_FEW = 64  # elements up to which a value that depends on scalars alone is one of them


class Alike(NamedTuple):
    """Leaves with one function of (arrays, scalars, common), which jax can trace.

    arrays, scalars: for each leaf a pytree; equal structures, shapes and dtypes.
    rows: of a leaf that stands for so many, one in each row of its arrays and scalars, their number; the function is of one row.
    """

    function: Callable[..., Any]
    arrays: Sequence[Any]
    scalars: Sequence[Any]
    rows: int | None = None


def for_each(kinds: Sequence[Alike], common: Any) -> list[list[Any]]:
    """For each kind [function(a, s, common) for a, s in zip(arrays, scalars)], traced once, mapped over rows.

    `common`: a pytree that all calls get.
    """
    shared = jax.tree.leaves(common)
    cuts = [_Cut(kind, common) for kind in kinds]
    alike: dict[Any, list[int]] = {}
    for position, cut in enumerate(cuts):
        alike.setdefault(cut.key, []).append(position)
    results: list[list[Any]] = [[] for _ in kinds]
    for positions in alike.values():
        known = _known(cuts[positions[0]].of_scalars, cuts[positions[0]].handed, [kinds[i] for i in positions], shared)
        for i in positions:
            kind, cut = kinds[i], cuts[i]
            function = jaxpr_as_fun(cut.of_arrays)
            if kind.rows is not None:
                axes = [0] * (len(cut.of_arrays.in_avals) - len(shared))
                function = jax.vmap(function, in_axes=(*axes, *(None for _ in shared)))
            for arrays in kind.arrays:
                handed, done = next(known)
                results[i].append(cut.results(done, function(*handed, *jax.tree.leaves(arrays), *shared)))
    return results


class _Cut:
    """A traced function of (arrays, scalars, common) as two: of (scalars, common), and of (what that gives, arrays, common).

    The first gives what is handed to the second, then the results that need no array.
    """

    def __init__(self, kind: Alike, common: Any) -> None:
        one = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[kind.rows is not None :], x.dtype), x[0]) for x in kind[1:3]]
        closed, result = jax.make_jaxpr(kind.function, return_shape=True)(*one, jax.tree.map(_shape, common))
        self.structure = jax.tree.structure(result)
        arrays, scalars = (len(jax.tree.leaves(x)) for x in one)
        jaxpr = closed.jaxpr
        own, each, rest = jaxpr.invars[:arrays], jaxpr.invars[arrays : arrays + scalars], jaxpr.invars[arrays + scalars :]
        small = {v for v in (*each, *rest, *jaxpr.constvars) if v.aval.size <= _FEW}
        first, second = [], []
        for eqn in jaxpr.eqns:
            depends = all(isinstance(v, Literal) or v in small for v in eqn.invars)
            if depends and all(v.aval.size <= _FEW for v in eqn.outvars) and not eqn.effects:
                first.append(eqn)
                small.update(eqn.outvars)
            else:
                second.append(eqn)
        made = {*each, *(v for eqn in first for v in eqn.outvars)}
        of_scalars = lambda v: not isinstance(v, Literal) and v in made  # noqa: E731
        handed = [v for v in dict.fromkeys(v for eqn in second for v in eqn.invars if not isinstance(v, Literal)) if v in made]
        self.handed, self.is_scalar = len(handed), [of_scalars(v) for v in jaxpr.outvars]
        done, others = ([v for v in jaxpr.outvars if of_scalars(v) is scalar] for scalar in (True, False))
        self.of_scalars = ClosedJaxpr(jaxpr.replace(invars=[*each, *rest], outvars=[*handed, *done], eqns=first), closed.consts)
        self.of_arrays = ClosedJaxpr(jaxpr.replace(invars=[*handed, *own, *rest], outvars=others, eqns=second), closed.consts)

    @property
    def key(self) -> Any:
        """Equal for the same arithmetic of scalars."""
        return self.handed, str(self.of_scalars), tuple(map(id, self.of_scalars.consts))

    def results(self, done: Sequence[Any], others: Sequence[Any]) -> Any:
        """What the function gives, from the results that scalars gave and those that arrays did."""
        parts = {True: iter(done), False: iter(others)}
        return self.structure.unflatten([next(parts[scalar]) for scalar in self.is_scalar])


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _known(of_scalars: ClosedJaxpr, handed: int, kinds: Sequence[Alike], shared: Sequence[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """For one leaf of these kinds after the other what the scalars give: so many values to be handed on, and the results."""
    function = jaxpr_as_fun(of_scalars)
    leaves = [(kind.rows, jax.tree.leaves(each)) for kind in kinds for each in kind.scalars]
    if len(leaves) == 1 and leaves[0][0] is None:
        found = function(*leaves[0][1], *shared)
        yield found[:handed], found[handed:]
        return
    columns = zip(*(x if rows is not None else [jnp.expand_dims(v, 0) for v in x] for rows, x in leaves), strict=True)
    stacked = [jnp.concatenate(column) for column in columns]
    found = jax.vmap(function, in_axes=(*(0 for _ in stacked), *(None for _ in shared)))(*stacked, *shared)
    tables: dict[Any, list[Any]] = {}
    for x in found[:handed]:
        tables.setdefault(x.dtype, []).append(x.reshape(len(x), -1))
    joined = {dtype: jnp.concatenate(columns, 1) for dtype, columns in tables.items()}
    ends = {dtype: [0, *accumulate(x.shape[1] for x in columns)] for dtype, columns in tables.items()}
    start = 0
    for rows, _ in leaves:
        stop = start + (rows or 1)
        cut = lambda x, start=start, stop=stop: jax.lax.slice_in_dim(x, start, stop)  # noqa: E731
        # The rows of a leaf are one value of their own: else XLA reads each number in a loop of its own, or joins the loops over
        # leaves that read one matrix, which are then slower by a fifth.
        own = jax.lax.optimization_barrier(jax.tree.map(cut, joined))
        left = {dtype: pairwise(at) for dtype, at in ends.items()}
        cells = [(jax.lax.slice_in_dim(own[x.dtype], *next(left[x.dtype]), axis=1), x.shape[1:]) for x in found[:handed]]
        height = () if rows is None else (rows,)
        yield [x.reshape(*height, *shape) for x, shape in cells], [cut(x).reshape(*height, *x.shape[1:]) for x in found[handed:]]
        start = stop
