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
from bridge._compiler.apply_transform import UpdateArrays, init_state, to_buffers
from bridge._compiler.spec import LeafSpec, StateField, UpdateSpec, buffer_shape, unflatten
from bridge._compiler.state_layout import state_layout
from bridge._ir.jaxpr import backward_slice, inline_calls, uniform_values
from bridge._memory import allocation
from bridge._process import default_settings, x64

# State fields, their initial values, and the leaf that they belong to (None for shared state).
_StateColumn: TypeAlias = tuple[Sequence[StateField], Sequence[np.generic], LeafSpec | None]


def init_buffers(
    problem: UpdateSpec, values: Sequence[float], params: Sequence[jax.Array], initial_values: UpdateArrays[np.generic] | None = None
) -> UpdateArrays[jax.Array]:
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
    if initial_values is not None:
        plan = state_layout(problem)
        columns: list[_StateColumn] = [
            *zip(plan.leaf_fields, initial_values.leaf_state, problem.specs, strict=True),
            (plan.shared_fields, initial_values.shared_state, None),
        ]
        kept = [([f for f in fields if f.state_index is not None], column, spec) for fields, column, spec in columns]
        kinds = [(buffer_shape(f, spec), x) for fields, column, spec in kept for f, x in zip(fields, column, strict=True)]
        full = cast(list[jax.Array], jax.block_until_ready(_filled_arrays(kinds, device)))
        return jax.tree.unflatten(cast(PyTreeDef, jax.tree.structure(initial_values)), full)
    with default_settings(), jax.default_device(device):
        closed, result = _trace_init(problem, tuple(values))
        number_of = uniform_values(closed.jaxpr)
        outvars = closed.jaxpr.outvars
        numbers = [number_of(var) for var in outvars]
        others = [var for var, number in zip(outvars, numbers, strict=True) if number is None]
        rest = closed.jaxpr.replace(outvars=others, eqns=backward_slice(closed.jaxpr.eqns, others))
        computed = cast(list[jax.Array], jaxpr_as_fun(ClosedJaxpr(rest, closed.consts))(*params))
        computed.reverse()
        kinds = [(var.aval.shape, number) for var, number in zip(outvars, numbers, strict=True) if number is not None]
        filled = iter(_filled_arrays(kinds, device))
        found = [jnp.array(computed.pop(), copy=True) if number is None else next(filled) for number in numbers]
    return cast(UpdateArrays[jax.Array], jax.block_until_ready(jax.tree.unflatten(cast(PyTreeDef, jax.tree.structure(result)), found)))


def _filled_arrays(kinds: Sequence[tuple[tuple[int, ...], np.ndarray | np.generic]], device: Device) -> list[jax.Array]:
    """Make arrays of these shapes, each filled with a scalar in its dtype."""
    return allocation.full_many([(shape, number.dtype, number.item()) for shape, number in kinds], device)


@functools.lru_cache(1024)
def uniform_initial_values(problem: UpdateSpec, values: tuple[float, ...]) -> tuple[float | complex | None, ...]:
    """Return for each state field of a separate leaf the initial value of all its elements, or None where elements differ."""
    with x64():
        closed, _ = _trace_init(problem, values)
    number_of, outvars = uniform_values(closed.jaxpr), iter(closed.jaxpr.outvars)
    begun = [(field, None if field.state_index is None else number_of(next(outvars))) for field in state_layout(problem).leaf_fields[0]]
    return tuple(value.item() if value is not None and field.key_impl is None else None for field, value in begun)


def _trace_init(problem: UpdateSpec, values: tuple[float, ...]) -> tuple[ClosedJaxpr, UpdateArrays[jax.ShapeDtypeStruct]]:
    """Trace `init` on flat leaves, without calls. Return the jaxpr and the structure of its result, flat state buffers."""
    numbers = [float(v) if problem.transform.is_optax else np.float64(v) for v in values]
    plan, specs = state_layout(problem), problem.specs

    def init(leaves: Sequence[jax.Array]) -> UpdateArrays[jax.Array]:
        shaped = [unflatten(p, spec) for p, spec in zip(leaves, specs, strict=True)]
        return to_buffers(problem, plan, init_state(problem, numbers, shaped))

    flat = [jax.ShapeDtypeStruct((int(np.prod(spec.shape)),), spec.dtype) for spec in specs]
    closed, result = jax.make_jaxpr(init, return_shape=True)(flat)
    return inline_calls(closed.jaxpr, closed.consts), result
