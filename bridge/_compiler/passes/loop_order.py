"""Results of several dtypes in loops one behind the other.

The loops take barriers that stay until XLA has fused. XLA takes barriers out before that, unless the pass which does so is left
out (`compile_options.of_barriers`)."""

# jax declares many of its functions in part only, and modules of ours share names that begin with an underscore.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import TypeVar, cast

import jax
import numpy as np

from bridge._compat.types import PyTreeDef
from bridge._ir.jaxpr import apply, at_start, in_turn, inlined, literal, slice_of, traced
from bridge._ir.types import Array, Jaxpr, Literal, PyTree, Var, aval_of

from .kernel_class import _shape

T = TypeVar("T")

# ------------------------------------------------------------------ results of several types


def one_type_each(function: Callable[..., T], count: int, otherwise: Callable[..., T] | None = None) -> Callable[..., T]:
    """The function, its results as large as the first input in loops one behind the other, those of one type in each.

    XLA writes results of one type alone from one loop. Of loops that follow in no order one reads what another has replaced, so it copies
    that before: with state in bfloat16 AdamW moved 36 bytes a float32 parameter, the copies on one core, and took 3.6 times as long.

    Args:
      function: of pytrees of arrays. Of the inputs, flat, the first are replaced by the first results, flat, each by its own.
      count: how many.
      otherwise: a function of the same results, which is taken where a loop would read what another has replaced, whatever their order.
    """

    def ordered(*inputs: PyTree) -> T:
        closed, result = traced(function, *jax.tree.map(_shape, inputs))
        closed = inlined(closed.jaxpr, closed.consts)
        jaxpr: Jaxpr = closed.jaxpr
        known: dict[Var, Array] = at_start(jaxpr, closed.consts, jax.tree.leaves(inputs))
        size = aval_of(jaxpr.invars[0]).size
        pairs = zip(jaxpr.outvars[:count], jaxpr.invars, strict=False)
        replaced = {new: old for new, old in pairs if not isinstance(new, Literal) and aval_of(new).size == size}
        found = _found(jaxpr, [v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in replaced], known)
        done: dict[Var, Array] = {}
        loops, is_cyclic = _loops(jaxpr, replaced)
        if is_cyclic and otherwise is not None:
            return otherwise(*inputs)
        for nth, loop in enumerate(loops):
            if done:  # what is read no more must not be held: XLA would copy it
                later = set[Var]().union(*(_read(jaxpr, each, done) for each in loops[nth:]))
                read = [v for v in known if v in later and aval_of(v).size == size]
                kept, stored = jax.lax.optimization_barrier(([known[v] for v in read], list(done.values())))
                known, done = known | dict(zip(read, kept, strict=True)), dict(zip(done, stored, strict=True))
            done |= _found(jaxpr, loop, known | done)
        found |= done
        structure = cast(PyTreeDef, jax.tree.structure(result))
        return structure.unflatten([literal(v) if isinstance(v, Literal) else found[v] for v in jaxpr.outvars])

    return ordered


def _loops(jaxpr: Jaxpr, replaced: Mapping[Var, Var]) -> tuple[list[list[Var]], bool]:
    """Results by their types, in the order in which the fewest bytes move; and whether one reads what another has replaced: a copy."""
    kinds: dict[np.dtype, list[Var]] = {}
    for new in replaced:
        kinds.setdefault(aval_of(new).dtype, []).append(new)

    def moved(order: Sequence[list[Var]]) -> tuple[int, bool]:
        total, is_cyclic = 0, False
        done: dict[Var, None] = {}
        for loop in order:
            read, gone = _read(jaxpr, loop, done), {replaced[new] for new in done}
            total += sum(_bytes(v) * (3 if v in gone else 1) for v in read if v in done or v in jaxpr.invars)
            is_cyclic = is_cyclic or not read.isdisjoint(gone)
            done |= dict.fromkeys(loop)
        return total, is_cyclic

    order = min(permutations(kinds.values()), key=moved)
    return list(order), moved(order)[1]


def _bytes(v: Var) -> int:
    return aval_of(v).size * aval_of(v).dtype.itemsize


def _read(jaxpr: Jaxpr, wanted: Sequence[Var], done: Iterable[Var]) -> set[Var]:
    """What the operations for some results read, where others are `done`."""
    eqns = slice_of(jaxpr.eqns, wanted, done)
    return {v for v in (*wanted, *(v for eqn in eqns for v in eqn.invars)) if not isinstance(v, Literal)}


def _found(jaxpr: Jaxpr, wanted: Sequence[Var], known: Mapping[Var, Array]) -> dict[Var, Array]:
    """Some variables of a program, from those that are known."""
    read = in_turn(slice_of(jaxpr.eqns, wanted, known), dict(known), lambda eqn, operands: apply(jaxpr, eqn, operands))
    return {v: read(v) for v in wanted}
