"""A pass that reduces the operands of loops, so that XLA fuses several results into one loop.

XLA's CPU compiler fuses loops only if each has fewer than 20 operands
(kMaxOperands in https://github.com/openxla/xla/blob/9fb60eabf312a15fe96f387616b210d77859887f/xla/service/cpu/cpu_multi_output_fusion.cc).
It counts each constant that two parameters share, each scalar that is read twice, and each scalar divisor, because it computes the
reciprocal in a loop of its own. Scalars of one row that are read once each count as one operand, the row.
"""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.classify import is_broadcast, is_elementwise
from bridge._ir.jaxpr import bind, eval_eqn, eval_eqns, initial_env, inline_calls, literal_value
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, aval_of

_MAX_OPERANDS = 13  # operands that are counted here; XLA adds some of its own
_MAX_SCALAR_READS = 128  # scalar reads, at most: more of them take longer than the saved bytes
_SIMPLIFIED_CONSTANTS = 0.0, 1.0, -1.0  # XLA simplifies operations with these constants


def limit_operands(closed: ClosedJaxpr, size: int) -> ClosedJaxpr:
    """Return the program with a distinct scalar for each operation on arrays, and with reciprocals instead of divisions by scalars.

    Return it unchanged if its loops over arrays of this size have few operands, or would read too many scalars.
    """
    program = inline_calls(closed.jaxpr, closed.consts)
    if sum(1 for _ in _operands(program.jaxpr, size)) < _MAX_OPERANDS or _count_scalar_reads(program.jaxpr, size) > _MAX_SCALAR_READS:
        return closed
    inputs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in program.jaxpr.invars]
    copy = cast(Callable[[Array], Array], jax.lax.copy_p.bind)

    def written(*given: jax.Array) -> list[Array]:
        return distinct_scalars(program, given, copy, reciprocals=True)

    return jax.make_jaxpr(written)(*inputs)


def distinct_scalars(
    program: ClosedJaxpr, inputs: Sequence[Array], make_distinct: Callable[[Array], Array], reciprocals: bool = False
) -> list[Array]:
    """Evaluate a program with a distinct scalar for each operation on arrays.

    Args:
      program: a program from `inline_calls`.
      inputs: its inputs.
      make_distinct: returns a scalar of the same value that XLA does not recognize as the same.
      reciprocals: whether arrays are multiplied by the reciprocal of a scalar instead of being divided by it.
    """
    jaxpr: Jaxpr = program.jaxpr
    spread: dict[Var, Array] = {}  # the scalar that an array repeats

    def number(v: Atom, x: Array) -> Array | None:
        """Return the scalar that an operand repeats; None if it has none, or a constant that XLA simplifies."""
        x = x if isinstance(v, Literal) else spread.get(v, x)
        is_known = isinstance(x, np.ndarray) and x.size == 1 and x.item() in _SIMPLIFIED_CONSTANTS
        return x if np.size(x) == 1 and jnp.issubdtype(x.dtype, jnp.floating) and not is_known else None

    def found(eqn: Eqn, operands: list[Array]) -> list[Array]:
        size, shape = (aval_of(eqn.outvars[0]).size, aval_of(eqn.outvars[0]).shape) if eqn.outvars else (0, ())
        if size > 1 and is_broadcast(eqn, size):
            spread[eqn.outvars[0]] = operands[0]
        takes = size > 1 and is_elementwise(eqn, size) and eqn.primitive.name != "bitcast_convert_type"  # a bitcast may split a scalar
        numbers = list(map(number, eqn.invars, operands)) if takes else []
        if all(x is None for x in numbers):
            return eval_eqn(jaxpr, eqn, operands)
        divisor = numbers[1] if reciprocals and eqn.primitive.name == "div" else None
        if divisor is not None:
            numbers[1] = jax.lax.div(np.ones((), divisor.dtype), divisor)
        operands = [x if y is None else jnp.broadcast_to(make_distinct(y), shape) for x, y in zip(operands, numbers, strict=True)]
        return [operands[0] * operands[1]] if divisor is not None else bind(eqn, *operands)

    return list(map(eval_eqns(jaxpr.eqns, initial_env(jaxpr, program.consts, inputs), found), jaxpr.outvars))


def _operands(jaxpr: Jaxpr, size: int) -> Iterator[Hashable]:
    """Yield the arrays that a program reads and the constants of its operations on arrays, each once."""
    eqns = [eqn for eqn in jaxpr.eqns if is_elementwise(eqn, size) or is_broadcast(eqn, size)]
    yield from {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}.intersection(jaxpr.invars)
    constants = [literal_value(v) for eqn in eqns for v in eqn.invars if isinstance(v, Literal)]
    yield from {(x.dtype, x.tobytes()) for x in constants if x.size == 1}


def _count_scalar_reads(jaxpr: Jaxpr, size: int) -> int:
    """Return how often operations on arrays read a scalar, or an array that repeats one."""
    spread = {eqn.outvars[0] for eqn in jaxpr.eqns if is_broadcast(eqn, size)}
    read = [v for eqn in jaxpr.eqns if is_elementwise(eqn, size) and aval_of(eqn.outvars[0]).size == size for v in eqn.invars]
    return sum(aval_of(v).size == 1 or (not isinstance(v, Literal) and v in spread) for v in read)
