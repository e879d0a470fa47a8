"""Updates of many operands, written with few.

XLA's CPU compiler writes several results from one loop only where each of the loops that it joins has fewer than 20 operands
(kMaxOperands in https://github.com/openxla/xla/blob/9fb60eabf312a15fe96f387616b210d77859887f/xla/service/cpu/cpu_multi_output_fusion.cc),
and counts each constant, which two parameters have in common, and each number that is read twice or that arrays are divided by: it computes
the reciprocal in a loop of its own. Of the numbers of a row that are read once each it counts the row. optax.contrib.ademamix moved 36
bytes a float32 parameter with one parameter, 76 with two.
"""

# jax declares many of its functions in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.classify import elementwise, spreads
from bridge._ir.jaxpr import apply, at_start, bound, in_turn, inlined, literal
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, aval_of

_OPERANDS = 13  # of those that are counted here; XLA adds some of its own
_NUMBERS = 128  # more make a loop wait for them: of 15 constants in turn, thrice, it took twice as long, for half the bytes
_KNOWN = 0.0, 1.0, -1.0  # with these XLA does less than it is asked for


def fewer(closed: ClosedJaxpr, size: int) -> ClosedJaxpr:
    """A program over arrays of this size in which each operation reads numbers of its own, computed for it, and nothing is divided by them.

    As it is where its loops have few operands, or would read very many numbers.
    """
    program = inlined(closed.jaxpr, closed.consts)
    if sum(1 for _ in _operands(program.jaxpr, size)) < _OPERANDS or _numbers_read(program.jaxpr, size) > _NUMBERS:
        return closed
    inputs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in program.jaxpr.invars]
    copy = cast(Callable[[Array], Array], jax.lax.copy_p.bind)

    def written(*given: jax.Array) -> list[Array]:
        return apart(program, given, copy, reciprocals=True)

    return jax.make_jaxpr(written)(*inputs)


def apart(program: ClosedJaxpr, inputs: Sequence[Array], own: Callable[[Array], Array], reciprocals: bool = False) -> list[Array]:
    """The results of a program as of `inlined`, in which each operation on arrays reads numbers of its own.

    Args:
      inputs: what it takes.
      own: a number as another that XLA does not know to be the same.
      reciprocals: whether arrays are multiplied by the reciprocal of a number instead of being divided by it.
    """
    jaxpr: Jaxpr = program.jaxpr
    spread: dict[Var, Array] = {}  # the number that all elements of an array are

    def number(v: Atom, x: Array) -> Array | None:
        """What all elements of an operand are, computed or a constant that XLA should not know; else None."""
        x = x if isinstance(v, Literal) else spread.get(v, x)
        is_known = isinstance(x, np.ndarray) and x.size == 1 and x.item() in _KNOWN
        return x if np.size(x) == 1 and jnp.issubdtype(x.dtype, jnp.floating) and not is_known else None

    def found(eqn: Eqn, operands: list[Array]) -> list[Array]:
        size, shape = (aval_of(eqn.outvars[0]).size, aval_of(eqn.outvars[0]).shape) if eqn.outvars else (0, ())
        if size > 1 and spreads(eqn, size):
            spread[eqn.outvars[0]] = operands[0]
        takes = size > 1 and elementwise(eqn, size) and eqn.primitive.name != "bitcast_convert_type"  # of one number it may make an array
        numbers = list(map(number, eqn.invars, operands)) if takes else []
        if all(x is None for x in numbers):
            return apply(jaxpr, eqn, operands)
        divisor = numbers[1] if reciprocals and eqn.primitive.name == "div" else None
        if divisor is not None:
            numbers[1] = jax.lax.div(np.ones((), divisor.dtype), divisor)
        operands = [x if y is None else jnp.broadcast_to(own(y), shape) for x, y in zip(operands, numbers, strict=True)]
        return [operands[0] * operands[1]] if divisor is not None else bound(eqn, *operands)

    return list(map(in_turn(jaxpr.eqns, at_start(jaxpr, program.consts, inputs), found), jaxpr.outvars))


def _operands(jaxpr: Jaxpr, size: int) -> Iterator[Hashable]:
    """The arrays that a program reads, and the constants of its operations on arrays, each once."""
    eqns = [eqn for eqn in jaxpr.eqns if elementwise(eqn, size) or spreads(eqn, size)]
    yield from {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}.intersection(jaxpr.invars)
    constants = [literal(v) for eqn in eqns for v in eqn.invars if isinstance(v, Literal)]
    yield from {(x.dtype, x.tobytes()) for x in constants if x.size == 1}


def _numbers_read(jaxpr: Jaxpr, size: int) -> int:
    """How often operations on arrays read a number, or an array of one."""
    spread = {eqn.outvars[0] for eqn in jaxpr.eqns if spreads(eqn, size)}
    read = [v for eqn in jaxpr.eqns if elementwise(eqn, size) and aval_of(eqn.outvars[0]).size == size for v in eqn.invars]
    return sum(aval_of(v).size == 1 or (not isinstance(v, Literal) and v in spread) for v in read)
