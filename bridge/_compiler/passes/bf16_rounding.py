"""A pass that rounds bfloat16 results by operations on bits, which XLA's CPU compiler vectorizes better."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.jaxpr import eval_eqn, initial_env, inline_calls, literal_value
from bridge._ir.rounding import bfloat16_bits, bfloat16_from_bits
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, aval_of

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def round_bf16_by_bits(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with its bfloat16 results rounded by operations on bits.

    XLA's own conversion selects between the rounded value and a NaN, for which LLVM uses narrower vectors. The program is unchanged if
    rounding is not the last operation of a result: XLA may leave out a rounding whose result is read again.
    """
    if not any(aval_of(v).dtype == jnp.bfloat16 for v in closed.jaxpr.outvars):
        return closed
    plain = inline_calls(closed.jaxpr, closed.consts)
    last = _final_roundings(plain.jaxpr)
    if last is None:
        return closed

    def written(*inputs: jax.Array) -> list[Array]:
        values = initial_env(plain.jaxpr, plain.consts, inputs)
        bits: dict[Var, jax.Array] = {}
        made = {v: eqn for eqn in plain.jaxpr.eqns for v in eqn.outvars}

        def read(v: Atom) -> Array:
            return literal_value(v) if isinstance(v, Literal) else bfloat16_from_bits(bits[v]) if v in bits else values[v]

        def bits_of(v: Atom) -> jax.Array:
            return bits[v] if not isinstance(v, Literal) and v in bits else jax.lax.bitcast_convert_type(read(v), np.uint16)

        for eqn in plain.jaxpr.eqns:
            out = eqn.outvars[0] if eqn.outvars else None
            if out is None or out not in last:
                values |= zip(eqn.outvars, eval_eqn(plain.jaxpr, eqn, list(map(read, eqn.invars))), strict=True)
            elif eqn.primitive.name == "select_n":
                bits[out] = jax.lax.select_n(read(eqn.invars[0]), *map(bits_of, eqn.invars[1:]))
            else:
                bits[out] = bfloat16_bits(read(eqn.invars[0]), _comes_from_arithmetic(eqn.invars[0], made))
        return list(map(read, plain.jaxpr.outvars))

    return jax.make_jaxpr(written)(*(jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in plain.jaxpr.invars))


_ARITHMETIC = frozenset({"add", "add_any", "div", "mul", "sqrt", "sub"})  # these return quiet NaNs, which have a high bit set


def _comes_from_arithmetic(var: Atom, made: Mapping[Var, Eqn]) -> bool:
    """Return whether all elements come from arithmetic, also through selects; otherwise some may be elements of an input."""
    eqn = None if isinstance(var, Literal) else made.get(var)
    if eqn is None or eqn.primitive.name != "select_n":
        return isinstance(var, Literal) or (eqn is not None and eqn.primitive.name in _ARITHMETIC)
    return all(_comes_from_arithmetic(v, made) for v in eqn.invars[1:])


def _final_roundings(jaxpr: Jaxpr) -> set[Var] | None:
    """Return the variables in which bfloat16 results are rounded, and the selects between them.

    Return None if a bfloat16 result is neither rounded, nor an input, nor a bitcast, or if another equation reads such a variable.
    """
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    todo = [v for v in jaxpr.outvars if aval_of(v).dtype == jnp.bfloat16]
    last, choices = set[Var](), set[Var]()
    while todo:
        v = todo.pop()
        if isinstance(v, Literal) or v in choices:
            continue
        eqn = made.get(v)
        if eqn is not None and eqn.primitive.name == "select_n":
            choices.add(v)
            todo += eqn.invars[1:]
        elif eqn is not None and _rounds(eqn):
            widened = None if isinstance(eqn.invars[0], Literal) else made.get(eqn.invars[0])
            if widened is None or not _widens(widened):  # otherwise XLA removes both conversions
                last.add(v)
        elif eqn is not None and eqn.primitive.name != "bitcast_convert_type":
            return None
    last |= choices
    others = (eqn for eqn in jaxpr.eqns if choices.isdisjoint(eqn.outvars))
    return None if any(v in last for eqn in others for v in eqn.invars if not isinstance(v, Literal)) else last


def _rounds(eqn: Eqn) -> bool:
    return _converts(eqn, jnp.float32, jnp.bfloat16)


def _widens(eqn: Eqn) -> bool:
    return _converts(eqn, jnp.bfloat16, jnp.float32)


def _converts(eqn: Eqn, old: DTypeLike, new: DTypeLike) -> bool:
    """Return whether an equation converts arrays from one dtype to another."""
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    return (aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype) == (old, new)
