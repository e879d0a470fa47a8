"""One function of many leaves, its arithmetic of scalars done once for all of them.

An update computes bias corrections, schedules and the like from a step count and a few hyperparameters before it touches
an array. Leaf by leaf XLA would run each such operation by itself: 30 us a leaf on a CPU core, as much as updating 20,000
elements. So the traced function is cut in two: what depends on scalars alone is evaluated as vectors over the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

_FEW = 64  # elements up to which a value that depends on scalars alone is one of them


def for_each(function: Callable[..., Any], arrays: Sequence[Any], scalars: Sequence[Any], common: Any) -> list[Any]:
    """[function(a, s, common) for a, s in zip(arrays, scalars)], traced once.

    Args:
      function: a function that jax can trace.
      arrays, scalars: for each leaf a pytree; equal structures, shapes and dtypes.
      common: a pytree that all calls get.
    """
    if len(arrays) == 1:
        return [function(arrays[0], scalars[0], common)]
    columns = [[jax.tree.leaves(each) for each in column] for column in (arrays, scalars)]
    shared = jax.tree.leaves(common)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays[0], scalars[0], common))
    closed, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    structure = jax.tree.structure(result)
    first, second = _cut(closed, len(columns[0][0]), len(columns[1][0]))
    stacked = [jnp.stack(field) for field in zip(*columns[1], strict=True)]
    known = jax.vmap(first, in_axes=(*(0 for _ in stacked), *(None for _ in shared)))(*stacked, *shared)
    return [structure.unflatten(second(*(x[i] for x in known), *each, *shared)) for i, each in enumerate(columns[0])]


def _cut(closed: Any, arrays: int, scalars: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A traced function of (arrays, scalars, common) as two: of (scalars, common), and of (what that gives, arrays, common)."""
    jaxpr = closed.jaxpr
    own, each, common = jaxpr.invars[:arrays], jaxpr.invars[arrays : arrays + scalars], jaxpr.invars[arrays + scalars :]
    small = {v for v in (*each, *common, *jaxpr.constvars) if v.aval.size <= _FEW}
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
    of_scalars = jaxpr.replace(invars=[*each, *common], outvars=handed, eqns=first)
    of_arrays = jaxpr.replace(invars=[*handed, *own, *common], eqns=second)
    return jaxpr_as_fun(ClosedJaxpr(of_scalars, closed.consts)), jaxpr_as_fun(ClosedJaxpr(of_arrays, closed.consts))
