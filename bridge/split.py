"""Functions of many leaves, their arithmetic of scalars done once for all leaves.

An update computes bias corrections, schedules and the like from a step count and a few hyperparameters before it touches
an array. Leaf by leaf XLA would run each such operation by itself: 30 us a leaf on a CPU core, as much as updating 20,000
elements, and compile each of them. So each traced function is cut in two: what depends on scalars alone is evaluated as
vectors over all leaves for which it is the same arithmetic, whatever their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        known = _known(cuts[positions[0]].of_scalars, [kinds[i] for i in positions], shared)
        for i in positions:
            kind, cut = kinds[i], cuts[i]
            function = jaxpr_as_fun(cut.of_arrays)
            if kind.rows is not None:
                axes = [0] * (len(cut.of_arrays.in_avals) - len(shared))
                function = jax.vmap(function, in_axes=(*axes, *(None for _ in shared)))
            results[i] = [cut.structure.unflatten(function(*next(known), *jax.tree.leaves(each), *shared)) for each in kind.arrays]
    return results


class _Cut:
    """A traced function of (arrays, scalars, common) as two: of (scalars, common), and of (what that gives, arrays, common)."""

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
        used = (v for v in (*(v for eqn in second for v in eqn.invars), *jaxpr.outvars) if not isinstance(v, Literal))
        handed = [v for v in dict.fromkeys(used) if v in made]
        self.of_scalars = ClosedJaxpr(jaxpr.replace(invars=[*each, *rest], outvars=handed, eqns=first), closed.consts)
        self.of_arrays = ClosedJaxpr(jaxpr.replace(invars=[*handed, *own, *rest], outvars=jaxpr.outvars, eqns=second), closed.consts)

    @property
    def key(self) -> Any:
        """Equal for the same arithmetic of scalars."""
        return str(self.of_scalars), tuple(map(id, self.of_scalars.consts))


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _known(of_scalars: ClosedJaxpr, kinds: Sequence[Alike], shared: Sequence[Any]) -> Any:
    """What the scalars give, for one leaf of these kinds after the other.

    Values of one dtype stand side by side in one matrix, a row for each leaf: each loop over a leaf then reads one more array.
    """
    function = jaxpr_as_fun(of_scalars)
    leaves = [(kind.rows, jax.tree.leaves(each)) for kind in kinds for each in kind.scalars]
    if len(leaves) == 1 and leaves[0][0] is None:
        yield function(*leaves[0][1], *shared)
        return
    columns = zip(*(x if rows is not None else [jnp.expand_dims(v, 0) for v in x] for rows, x in leaves), strict=True)
    stacked = [jnp.concatenate(column) for column in columns]
    found = jax.vmap(function, in_axes=(*(0 for _ in stacked), *(None for _ in shared)))(*stacked, *shared)
    tables: dict[Any, list[Any]] = {}
    for x in found:
        tables.setdefault(x.dtype, []).append(x.reshape(len(x), -1))
    joined = jax.lax.optimization_barrier({dtype: jnp.concatenate(columns, 1) for dtype, columns in tables.items()})
    ends = {dtype: [0, *accumulate(x.shape[1] for x in columns)] for dtype, columns in tables.items()}
    counts = [rows or 1 for rows, _ in leaves]
    for start, (rows, _) in zip(accumulate(counts, initial=0), leaves, strict=False):
        left = {dtype: pairwise(at) for dtype, at in ends.items()}
        height = () if rows is None else (rows,)
        cells = [(joined[x.dtype], next(left[x.dtype]), (*height, *x.shape[1:])) for x in found]
        yield [jax.lax.slice(x, (start, a), (start + (rows or 1), z)).reshape(shape) for x, (a, z), shape in cells]
