"""Make the initial state of a transformation. `init` is traced, so that state with equal elements needs no executable."""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from bridge._compat.types import Device, PyTreeDef
from bridge._compiler.apply_transform import Arrays, begin, buffered
from bridge._compiler.spec import Field, Problem, Spec, buffer_shape, unflatten
from bridge._compiler.state_layout import layout
from bridge._ir.jaxpr import inlined, numbers_of, slice_of
from bridge._memory import allocation
from bridge._process import default_settings, x64

# State fields, their initial values, and the leaf that they belong to (None for shared state).
_Column: TypeAlias = tuple[Sequence[Field], Sequence[np.generic], Spec | None]


def begin_buffers(
    problem: Problem, values: Sequence[float], params: Sequence[jax.Array], known: Arrays[np.generic] | None = None
) -> Arrays[jax.Array]:
    """Make initial state in buffers that nothing else references, because a step donates all of them.

    An `init` may return a parameter, one array twice, or a constant of its own (Muon's coefficients). So each array whose elements are
    not all equal is copied, and each original is freed before the next copy.

    Args:
      problem: the transformation and its leaves.
      values: the hyperparameters.
      params: the parameters, flat.
      initial_values: the initial scalar of each field, where all are known (`separability.initial_scalars`). `init` is not traced then.

    Returns:
      The buffers, in the structure of `init`'s result.
    """
    device = next(iter(params[0].devices()))
    if known is not None:
        plan = layout(problem)
        columns: list[_Column] = [*zip(plan.own, known.own, problem.specs, strict=True), (plan.shared, known.shared, None)]
        kept = [([f for f in fields if f.position is not None], column, spec) for fields, column, spec in columns]
        kinds = [(buffer_shape(f, spec), x) for fields, column, spec in kept for f, x in zip(fields, column, strict=True)]
        full = cast(list[jax.Array], jax.block_until_ready(_full(kinds, device)))
        return jax.tree.unflatten(cast(PyTreeDef, jax.tree.structure(known)), full)
    with default_settings(), jax.default_device(device):
        closed, result = _traced(problem, tuple(values))
        number_of = numbers_of(closed.jaxpr)
        outvars = closed.jaxpr.outvars
        numbers = [number_of(var) for var in outvars]
        others = [var for var, number in zip(outvars, numbers, strict=True) if number is None]
        rest = closed.jaxpr.replace(outvars=others, eqns=slice_of(closed.jaxpr.eqns, others))
        computed = cast(list[jax.Array], jaxpr_as_fun(ClosedJaxpr(rest, closed.consts))(*params))
        computed.reverse()
        kinds = [(var.aval.shape, number) for var, number in zip(outvars, numbers, strict=True) if number is not None]
        filled = iter(_full(kinds, device))
        found = [jnp.array(computed.pop(), copy=True) if number is None else next(filled) for number in numbers]
    return cast(Arrays[jax.Array], jax.block_until_ready(jax.tree.unflatten(cast(PyTreeDef, jax.tree.structure(result)), found)))


def _full(kinds: Sequence[tuple[tuple[int, ...], np.ndarray | np.generic]], device: Device) -> list[jax.Array]:
    """Make arrays of these shapes, each filled with a scalar in its dtype."""
    return allocation.filled([(shape, number.dtype, number.item()) for shape, number in kinds], device)


@functools.lru_cache(1024)
def constants(problem: Problem, values: tuple[float, ...]) -> tuple[float | complex | None, ...]:
    """Return for each state field of a separate leaf the initial value of all its elements, or None where elements differ."""
    with x64():
        closed, _ = _traced(problem, values)
    number_of, outvars = numbers_of(closed.jaxpr), iter(closed.jaxpr.outvars)
    begun = [(field, None if field.position is None else number_of(next(outvars))) for field in layout(problem).own[0]]
    return tuple(value.item() if value is not None and field.key is None else None for field, value in begun)


def _traced(problem: Problem, values: tuple[float, ...]) -> tuple[ClosedJaxpr, Arrays[jax.ShapeDtypeStruct]]:
    """Trace `init` on flat leaves, without calls. Return the jaxpr and the structure of its result, flat state buffers."""
    numbers = [float(v) if problem.row.scaled else np.float64(v) for v in values]
    plan, specs = layout(problem), problem.specs

    def init(leaves: Sequence[jax.Array]) -> Arrays[jax.Array]:
        shaped = [unflatten(p, spec) for p, spec in zip(leaves, specs, strict=True)]
        return buffered(problem, plan, begin(problem, numbers, shaped))

    flat = [jax.ShapeDtypeStruct((int(np.prod(spec.shape)),), spec.dtype) for spec in specs]
    closed, result = jax.make_jaxpr(init, return_shape=True)(flat)
    return inlined(closed.jaxpr, closed.consts), result
