"""What the state of a transformation begins with: read from its traced `init`, so that state of one number needs no program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from . import storage
from .dlpack import x64
from .evaluate import Arrays, begin, buffered
from .problem import Problem, layout, unflatten
from .whole import inlined, literal, slice_of

_KEEPS_THE_NUMBER = ("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape")


def begin_buffers(problem: Problem, values: Sequence[float], params: Sequence[jax.Array]) -> Arrays:
    """`begin` for buffers, with buffers as result that nothing else has, because all are donated.

    An `init` may hand out the parameters, one array twice, or a constant of its own (Muon's coefficients): what is no single number
    is copied, each original let go before the next is.
    """
    device = next(iter(params[0].devices()))
    with x64(), jax.transfer_guard("allow"), jax.default_device(device):
        closed, result = _traced(problem, tuple(values))
        number_of = _numbers(closed.jaxpr)
        outvars = closed.jaxpr.outvars
        numbers = [number_of(var) for var in outvars]
        others = [var for var, number in zip(outvars, numbers, strict=True) if number is None]
        rest = closed.jaxpr.replace(outvars=others, eqns=slice_of(closed.jaxpr.eqns, others))
        computed = jaxpr_as_fun(ClosedJaxpr(rest, closed.consts))(*params)
        computed.reverse()
        found = [
            jnp.array(computed.pop(), copy=True)
            if number is None
            else storage.full(var.aval.shape, var.aval.dtype, number.item(), device, wait=False)
            for var, number in zip(outvars, numbers, strict=True)
        ]
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(result), found))


@functools.lru_cache(1024)
def constants(problem: Problem, values: tuple[float, ...]) -> tuple[Any, ...]:
    """For each field of a leaf that is updated by itself the number that all its elements begin with; None if there is no such number."""
    with x64():
        closed, _ = _traced(problem, values)
    number_of, outvars = _numbers(closed.jaxpr), iter(closed.jaxpr.outvars)
    begun = [(field, None if field.position is None else number_of(next(outvars))) for field in layout(problem).own[0]]
    return tuple(value.item() if value is not None and field.key is None else None for field, value in begun)


def _traced(problem: Problem, values: tuple[float, ...]) -> tuple[Any, Any]:
    """The program from flat leaves to the buffers of the state, without calls, and what it gives as an `Arrays`."""
    numbers = [float(v) if problem.row.scaled else np.float64(v) for v in values]
    plan, specs = layout(problem), problem.specs

    def init(leaves: Sequence[Any]) -> Arrays:
        shaped = [unflatten(p, spec) for p, spec in zip(leaves, specs, strict=True)]
        return buffered(problem, plan, begin(problem, numbers, shaped))

    flat = [jax.ShapeDtypeStruct((int(np.prod(spec.shape)),), spec.dtype) for spec in specs]
    closed, result = jax.make_jaxpr(init, return_shape=True)(flat)
    return inlined(closed.jaxpr, closed.consts), result


def _numbers(jaxpr: Any) -> Callable[[Any], Any]:
    """For a variable the one number that all its elements are, in its type; None where there is no such number."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def number(var: Any) -> Any:
        if isinstance(var, Literal):
            return literal(var)[()] if np.ndim(var.val) == 0 else None
        eqn = made.get(var)
        source = number(eqn.invars[0]) if eqn is not None and eqn.primitive.name in _KEEPS_THE_NUMBER else None
        aval: Any = var.aval
        return None if source is None else np.asarray(source).astype(aval.dtype)[()]

    return number
