"""How the loops of an update are written for XLA's CPU compiler, where its own way is slow.

Loops for results of several types take barriers that stay until XLA has fused. XLA takes barriers out before that, unless the pass which
does so is left out (`compile_options.of_barriers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from . import _process
from ._ir.jaxpr import apply, at_start, in_turn, inlined, literal, slice_of, traced
from ._ir.rounding import bfloat16_bits, of_bits

LARGE = 1 << 14  # elements of the smallest array whose loops matter: smaller ones are on one core, and in its cache


# ------------------------------------------------------------------ loops of an odd length


def is_ragged(size: int) -> bool:
    """Whether a loop over so many elements is written badly for want of one more.

    jaxlib 0.10.2 cuts a loop in parts: in two for two to four cores. Where the second is shorter it asks at each element whether it is
    past the end, and LLVM writes no vectors: AdamW took 5.4 to 6.2 times as long as torch's. Of three parts it does not.
    """
    return 2 <= _process.CORES <= 4 and size % 2 == 1 and size >= LARGE


# ------------------------------------------------------------------ results of several types


def one_type_each(function: Callable[..., Any], count: int, otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The function, its results as large as the first input in loops one behind the other, those of one type in each.

    XLA writes results of one type alone from one loop. Of loops that follow in no order one reads what another has replaced, so it copies
    that before: with state in bfloat16 AdamW moved 36 bytes a float32 parameter, the copies on one core, and took 3.6 times as long.

    Args:
      function: of pytrees of arrays. Of the inputs, flat, the first are replaced by the first results, flat, each by its own.
      count: how many.
      otherwise: a function of the same results, which is taken where a loop would read what another has replaced, whatever their order.
    """

    def ordered(*inputs: Any) -> Any:
        closed, result = traced(function, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), inputs))
        closed = inlined(closed.jaxpr, closed.consts)
        jaxpr = closed.jaxpr
        known = at_start(jaxpr, closed.consts, jax.tree.leaves(inputs))
        size = jaxpr.invars[0].aval.size
        pairs = zip(jaxpr.outvars[:count], jaxpr.invars, strict=False)
        replaced = {new: old for new, old in pairs if not isinstance(new, Literal) and new.aval.size == size}
        found = _found(jaxpr, [v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in replaced], known)
        done: dict[Any, Any] = {}
        loops, is_cyclic = _loops(jaxpr, replaced)
        if is_cyclic and otherwise is not None:
            return otherwise(*inputs)
        for nth, loop in enumerate(loops):
            if done:  # what is read no more must not be held: XLA would copy it
                later = set().union(*(_read(jaxpr, each, done) for each in loops[nth:]))
                read = [v for v in known if v in later and v.aval.size == size]
                kept, stored = jax.lax.optimization_barrier(([known[v] for v in read], list(done.values())))
                known, done = known | dict(zip(read, kept, strict=True)), dict(zip(done, stored, strict=True))
            done |= _found(jaxpr, loop, known | done)
        found |= done
        return jax.tree.unflatten(jax.tree.structure(result), [literal(v) if isinstance(v, Literal) else found[v] for v in jaxpr.outvars])

    return ordered


def _loops(jaxpr: Any, replaced: Mapping[Any, Any]) -> tuple[list[list[Any]], bool]:
    """Results by their types, in the order in which the fewest bytes move; and whether one reads what another has replaced: a copy."""
    kinds: dict[Any, list[Any]] = {}
    for new in replaced:
        kinds.setdefault(new.aval.dtype, []).append(new)

    def moved(order: Sequence[list[Any]]) -> tuple[int, bool]:
        total, done, is_cyclic = 0, {}, False
        for loop in order:
            read, gone = _read(jaxpr, loop, done), {replaced[new] for new in done}
            total += sum(v.aval.size * v.aval.dtype.itemsize * (3 if v in gone else 1) for v in read if v in done or v in jaxpr.invars)
            is_cyclic = is_cyclic or not read.isdisjoint(gone)
            done |= dict.fromkeys(loop)
        return total, is_cyclic

    order = min(permutations(kinds.values()), key=moved)
    return list(order), moved(order)[1]


def _read(jaxpr: Any, wanted: Sequence[Any], done: Iterable[Any]) -> set[Any]:
    """What the operations for some results read, where others are `done`."""
    eqns = slice_of(jaxpr.eqns, wanted, done)
    return {v for v in (*wanted, *(v for eqn in eqns for v in eqn.invars)) if not isinstance(v, Literal)}


def _found(jaxpr: Any, wanted: Sequence[Any], known: Mapping[Any, Any]) -> dict[Any, Any]:
    """Some variables of a program, from those that are known."""
    read = in_turn(slice_of(jaxpr.eqns, wanted, known), dict(known), lambda eqn, operands: apply(jaxpr, eqn, operands))
    return {v: read(v) for v in wanted}


# ------------------------------------------------------------------ results in bfloat16


def by_bits(closed: Any) -> Any:
    """A program of arrays that rounds its results in bfloat16 by operations on bits; as it is if some are not rounded last.

    XLA's own conversion chooses between a rounded number and a NaN, for which LLVM takes vectors of 8 numbers where it takes 32 without:
    SGD with momentum took 1.6 times as long, AdamW 1.8 times. Where a result is read to compute another, XLA may leave that rounding out.
    """
    if not any(v.aval.dtype == jnp.bfloat16 for v in closed.jaxpr.outvars):
        return closed
    plain = inlined(closed.jaxpr, closed.consts)
    last = _rounded_last(plain.jaxpr)
    if last is None:
        return closed

    def written(*inputs: Any) -> list[Any]:
        values = at_start(plain.jaxpr, plain.consts, inputs)
        bits: dict[Any, Any] = {}
        made = {v: eqn for eqn in plain.jaxpr.eqns for v in eqn.outvars}
        read = lambda v: literal(v) if isinstance(v, Literal) else of_bits(bits[v]) if v in bits else values[v]  # noqa: E731
        bits_of = lambda v: bits[v] if not isinstance(v, Literal) and v in bits else jax.lax.bitcast_convert_type(read(v), np.uint16)  # noqa: E731
        for eqn in plain.jaxpr.eqns:
            out = eqn.outvars[0] if eqn.outvars else None
            if out not in last:
                values |= zip(eqn.outvars, apply(plain.jaxpr, eqn, list(map(read, eqn.invars))), strict=True)
            elif eqn.primitive.name == "select_n":
                bits[out] = jax.lax.select_n(read(eqn.invars[0]), *map(bits_of, eqn.invars[1:]))
            else:
                bits[out] = bfloat16_bits(read(eqn.invars[0]), _is_computed(eqn.invars[0], made))
        return list(map(read, plain.jaxpr.outvars))

    return jax.make_jaxpr(written)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in plain.jaxpr.invars))


_ARITHMETIC = frozenset({"add", "add_any", "div", "mul", "sqrt", "sub"})  # of these a NaN comes out quiet: with a high bit set


def _is_computed(var: Any, made: Mapping[Any, Any]) -> bool:
    """Whether all elements come from arithmetic, maybe by a choice; else some may be as they were given."""
    eqn = None if isinstance(var, Literal) else made.get(var)
    if eqn is None or eqn.primitive.name != "select_n":
        return isinstance(var, Literal) or (eqn is not None and eqn.primitive.name in _ARITHMETIC)
    return all(_is_computed(v, made) for v in eqn.invars[1:])


def _rounded_last(jaxpr: Any) -> set[Any] | None:
    """Of the results of a program that are bfloat16 those that it rounds, and what they are chosen from; no others read these.

    None where a result is anything else, but what it was or bits already, or is read to compute another.
    """
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    todo = [v for v in jaxpr.outvars if v.aval.dtype == jnp.bfloat16]
    last, choices = set(), set()
    while todo:
        v = todo.pop()
        eqn = None if isinstance(v, Literal) or v in choices else made.get(v)
        if eqn is not None and eqn.primitive.name == "select_n":
            choices.add(v)
            todo += eqn.invars[1:]
        elif eqn is not None and _rounds(eqn):
            widened = made.get(eqn.invars[0])
            if widened is None or not _widens(widened):  # else XLA leaves both out
                last.add(v)
        elif eqn is not None and eqn.primitive.name != "bitcast_convert_type":
            return None
    last |= choices
    others = (eqn for eqn in jaxpr.eqns if choices.isdisjoint(eqn.outvars))
    return None if any(v in last for eqn in others for v in eqn.invars if not isinstance(v, Literal)) else last


def _rounds(eqn: Any) -> bool:
    return _converts(eqn, jnp.float32, jnp.bfloat16)


def _widens(eqn: Any) -> bool:
    return _converts(eqn, jnp.bfloat16, jnp.float32)


def _converts(eqn: Any, old: Any, new: Any) -> bool:
    """Whether it makes arrays of one type of such of another."""
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    return (eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) == (old, new)
