"""A pass that computes the results of each dtype in a loop of its own, one loop after the other.

Optimization barriers order the loops. They must survive until XLA has fused, so XLA's pass that removes barriers must be disabled
(`keep_barriers` of `bridge._xla.compile_options`).
"""

# jax annotates many of its functions only partially, and modules of this project share names that begin with an underscore.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import TypeVar, cast

import jax
import numpy as np

from bridge._compat.types import PyTreeDef
from bridge._ir.jaxpr import backward_slice, eval_eqn, eval_eqns, initial_env, inline_calls, literal_value, trace_to_jaxpr
from bridge._ir.types import Array, Jaxpr, Literal, PyTree, Var, aval_of

from .kernel_class import abstract_value

T = TypeVar("T")


def order_loops_by_dtype(function: Callable[..., T], num_replaced: int, fallback: Callable[..., T] | None = None) -> Callable[..., T]:
    """Return the function with its large results computed in consecutive loops, one for each dtype.

    A result is large if it has the size of the first input. XLA writes only results of one dtype from one loop. If the loops have no
    order, one may read an input that another has replaced, and XLA copies that input first.

    Args:
      function: a function of pytrees of arrays. Its first flat results replace its first flat inputs, each the input at its position.
      num_replaced: how many inputs are replaced.
      fallback: a function with the same results, used if in every order a loop would read a replaced input.
    """

    def ordered(*inputs: PyTree) -> T:
        closed, result = trace_to_jaxpr(function, *jax.tree.map(abstract_value, inputs))
        closed = inline_calls(closed.jaxpr, closed.consts)
        jaxpr: Jaxpr = closed.jaxpr
        known: dict[Var, Array] = initial_env(jaxpr, closed.consts, jax.tree.leaves(inputs))
        size = aval_of(jaxpr.invars[0]).size
        pairs = zip(jaxpr.outvars[:num_replaced], jaxpr.invars, strict=False)
        replaced = {new: old for new, old in pairs if not isinstance(new, Literal) and aval_of(new).size == size}
        found = _evaluate(jaxpr, [v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in replaced], known)
        done: dict[Var, Array] = {}
        loops, is_cyclic = _cheapest_order(jaxpr, replaced)
        if is_cyclic and fallback is not None:
            return fallback(*inputs)
        for nth, loop in enumerate(loops):
            if done:  # only arrays that are still read pass the barrier: XLA would copy the others
                later = set[Var]().union(*(_variables_read(jaxpr, each, done) for each in loops[nth:]))
                read = [v for v in known if v in later and aval_of(v).size == size]
                kept, stored = jax.lax.optimization_barrier(([known[v] for v in read], list(done.values())))
                known, done = known | dict(zip(read, kept, strict=True)), dict(zip(done, stored, strict=True))
            done |= _evaluate(jaxpr, loop, known | done)
        found |= done
        structure = cast(PyTreeDef, jax.tree.structure(result))
        return structure.unflatten([literal_value(v) if isinstance(v, Literal) else found[v] for v in jaxpr.outvars])

    return ordered


def _cheapest_order(jaxpr: Jaxpr, replaced: Mapping[Var, Var]) -> tuple[list[list[Var]], bool]:
    """Return the results of each dtype in the order that moves the fewest bytes, and whether a loop still reads a replaced input."""
    kinds: dict[np.dtype, list[Var]] = {}
    for new in replaced:
        kinds.setdefault(aval_of(new).dtype, []).append(new)

    def moved(order: Sequence[list[Var]]) -> tuple[int, bool]:
        total, is_cyclic = 0, False
        done: dict[Var, None] = {}
        for loop in order:
            read, gone = _variables_read(jaxpr, loop, done), {replaced[new] for new in done}
            total += sum(_bytes(v) * (3 if v in gone else 1) for v in read if v in done or v in jaxpr.invars)
            is_cyclic = is_cyclic or not read.isdisjoint(gone)
            done |= dict.fromkeys(loop)
        return total, is_cyclic

    order = min(permutations(kinds.values()), key=moved)
    return list(order), moved(order)[1]


def _bytes(v: Var) -> int:
    return aval_of(v).size * aval_of(v).dtype.itemsize


def _variables_read(jaxpr: Jaxpr, wanted: Sequence[Var], done: Iterable[Var]) -> set[Var]:
    """Return the variables that the equations of some results read, if others are `done`."""
    eqns = backward_slice(jaxpr.eqns, wanted, done)
    return {v for v in (*wanted, *(v for eqn in eqns for v in eqn.invars)) if not isinstance(v, Literal)}


def _evaluate(jaxpr: Jaxpr, wanted: Sequence[Var], known: Mapping[Var, Array]) -> dict[Var, Array]:
    """Evaluate some variables of a jaxpr from known ones."""
    read = eval_eqns(backward_slice(jaxpr.eqns, wanted, known), dict(known), lambda eqn, operands: eval_eqn(jaxpr, eqn, operands))
    return {v: read(v) for v in wanted}
