"""The residuals of a backward: where each comes from, and which are rematerialized.

A residual that is an input or an output is not saved a second time. A residual that a few elementwise operations compute from the inputs
is not saved either, because it takes longer to return and save one more array than to compute it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bridge._interop.dtypes import exists_in_torch
from bridge._ir.classify import ELEMENTWISE
from bridge._ir.types import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, aval_of

_SLOW = {"bessel_i0e", "bessel_i1e", "digamma", "erf_inv", "igamma", "lgamma"}
_QUICK = (ELEMENTWISE - _SLOW) | {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose"}
_CALLS = {"jit", "pjit"}
MAX_REMATERIALIZED = 4096  # how many elements a backward may compute a second time


class ResidualSources(NamedTuple):
    """Where the residuals of a backward come from.

    by_residual: for each residual (kind, which), where kind is "input", "output", "constant" or the name of one of the other fields;
    `transferable`: variables that torch must save; `untransferable`: variables of a dtype that torch does not have; `rematerialized`:
    variables that the backward computes again.
    """

    by_residual: list[tuple[str, Any]]
    transferable: list[Var]
    untransferable: list[Var]
    rematerialized: list[Var]


def residual_sources(closed: ClosedJaxpr, width: int) -> ResidualSources:
    """Return where the residuals come from. They are the outputs of a jaxpr after the first `width`."""
    outvars: Sequence[Atom] = closed.jaxpr.outvars
    outputs = reversed([(i, v) for i, v in enumerate(outvars[:width]) if exists_in_torch(aval_of(v))])
    known: dict[int, tuple[str, Any]] = {id(v): ("output", i) for i, v in outputs}
    known |= {id(v): ("input", i) for i, v in enumerate(closed.jaxpr.invars)}
    known |= {id(v): ("constant", value) for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    anew = {
        id(v)
        for v in _cheap_to_rematerialize(closed.jaxpr, [v for v in outvars[width:] if not isinstance(v, Literal) and id(v) not in known])
    }
    found = ResidualSources([], [], [], [])
    for v in outvars[width:]:
        if isinstance(v, Literal):
            found.by_residual.append(("constant", np.asarray(v.val, aval_of(v).dtype)))
            continue
        if id(v) not in known:
            kind = "rematerialized" if id(v) in anew else "transferable" if exists_in_torch(aval_of(v)) else "untransferable"
            variables: list[Var] = getattr(found, kind)
            known[id(v)] = (kind, len(variables))
            variables.append(v)
        found.by_residual.append(known[id(v)])
    return found


def input_dependencies(jaxpr: Jaxpr, targets: Iterable[Atom]) -> list[int]:
    """Return the positions of the inputs on which the targets depend."""
    live = {id(v) for v in targets}
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in live for v in eqn.outvars):
            live.update(map(id, eqn.invars))
    return [i for i, v in enumerate(jaxpr.invars) if id(v) in live]


def _cheap_to_rematerialize(jaxpr: Jaxpr, variables: Sequence[Var]) -> list[Var]:
    """Return the variables that are cheaper to compute again than to save, up to `MAX_REMATERIALIZED` elements in total."""
    makers = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    done: dict[int, Eqn] = {}
    found = []
    for variable in variables:
        chain = _producer_chain(variable, makers, done)
        if chain is not None:
            done |= chain
            found.append(variable)
    return found


def _producer_chain(variable: Var, producers: Mapping[int, Eqn], rematerialized: Mapping[int, Eqn]) -> dict[int, Eqn] | None:
    """Return the equations that compute a variable from the inputs and from the equations in `rematerialized`, by id.

    None if they compute too many elements, or if one of them is expensive.
    """
    chain: dict[int, Eqn] = {}
    left: list[Atom] = [variable]
    budget = MAX_REMATERIALIZED - sum(map(_element_count, rematerialized.values()))
    while left:
        v = left.pop()
        eqn = None if isinstance(v, Literal) else producers.get(id(v))
        if eqn is None or id(eqn) in rematerialized or id(eqn) in chain:
            continue
        budget -= _element_count(eqn)
        if budget < 0 or not _is_quick(eqn):
            return None
        chain[id(eqn)] = eqn
        left += eqn.invars
    return chain


def _is_quick(eqn: Eqn) -> bool:
    return all(map(_is_quick, _inner_eqns(eqn))) if eqn.primitive.name in _CALLS else eqn.primitive.name in _QUICK


def _element_count(eqn: Eqn) -> int:
    return sum(map(_element_count, _inner_eqns(eqn))) if eqn.primitive.name in _CALLS else sum(aval_of(v).size for v in eqn.outvars)


def _inner_eqns(eqn: Eqn) -> list[Eqn]:
    return eqn.params["jaxpr"].jaxpr.eqns
