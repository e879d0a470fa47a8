"""What a traced program holds that decides how it is compiled or called, anywhere in the functions, loops and branches within it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.extend.core import Literal

from .problem import is_key
from .whole import body_of, fuses

SMALL = 2**16  # elements of the smallest of the three sides of a product
_LOOPS = frozenset({"scan", "while"})
_REDUCTIONS = "reduce", "scatter", "select_and"
_BARRIERS = frozenset({"optimization_barrier", "checkpoint", "remat2"})  # jax.checkpoint writes one before what is computed again


def operations(jaxpr: Any) -> Iterator[Any]:
    """All operations, those of a function that is called more than once but once."""
    programs, seen = [jaxpr], {id(jaxpr)}
    for program in programs:
        for eqn in program.eqns:
            yield eqn
            new = [body for body in _within(eqn) if id(body) not in seen]
            seen.update(map(id, new))
            programs += new


def calls_back(jaxpr: Any) -> bool:
    """Whether there is one of jax's callbacks, or a print of its own."""
    return any("callback" in eqn.primitive.name or eqn.primitive.name == "debug_print" for eqn in operations(jaxpr))


def draws_otherwise_in_batches(jaxpr: Any) -> bool:
    """Whether random numbers come from a generator that gives other numbers under `jax.vmap`: from any but jax's default one."""
    keys = {str(v.aval.dtype) for eqn in operations(jaxpr) for v in (*eqn.invars, *eqn.outvars) if is_key(v.aval)}
    return not keys <= {"key<fry>"} or any(eqn.primitive.name == "rng_bit_generator" for eqn in operations(jaxpr))


def work(jaxpr: Any) -> float:
    """How many elements all operations give, in a function as often as it is called; no bound where there is a loop."""

    def own(program: Any) -> float:
        looped = any(eqn.primitive.name in _LOOPS for eqn in program.eqns)
        return math.inf if looped else sum(max((v.aval.size for v in eqn.outvars), default=0) for eqn in program.eqns)

    return _summed(jaxpr, own, _within)


def between(jaxpr: Any) -> float:
    """How many elements may be stored between the loops of a program: those of all arrays that operations other than elementwise ones
    read or give, in a function as often as it is called; no bound where there is a loop or a branch."""

    def own(program: Any) -> float:
        alone = [eqn for eqn in program.eqns if body_of(eqn) is None and not fuses(eqn)]
        stored = {v for eqn in alone for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)}
        return math.inf if any(map(_within, alone)) else sum(v.aval.size for v in stored)

    return _summed(jaxpr, own, _called)


def _summed(jaxpr: Any, own: Callable[[Any], float], within: Callable[[Any], list[Any]]) -> float:
    """What is `own` to a program and to the programs `within` its operations, of each as often as it is there."""
    counted: dict[int, float] = {}

    def of(program: Any) -> float:
        if id(program) not in counted:
            counted[id(program)] = own(program) + sum(of(body) for eqn in program.eqns for body in within(eqn))
        return counted[id(program)]

    return of(jaxpr)


def convolves_in_groups(jaxpr: Any) -> bool:
    """Whether there is a convolution of more than one group."""
    kinds = "feature_group_count", "batch_group_count"
    return any(eqn.params.get(kind, 1) > 1 for eqn in operations(jaxpr) for kind in kinds)


def small(jaxpr: Any) -> bool:
    """Whether no matrix product has more than `SMALL` elements in each of its sides and its result; batches count one by one."""
    return all(map(_is_small, (eqn for eqn in operations(jaxpr) if eqn.primitive.name == "dot_general")))


def stores_in_loops(jaxpr: Any) -> bool:
    """Whether there is a barrier in a loop, jax's own of `jax.checkpoint` among them."""
    loops = (eqn for eqn in operations(jaxpr) if eqn.primitive.name in _LOOPS)
    return any(eqn.primitive.name in _BARRIERS for loop in loops for body in _within(loop) for eqn in operations(body))


def stores_in_reductions(jaxpr: Any) -> bool:
    """Whether there is a barrier in what a reduction or a scatter does with two numbers."""
    found = (eqn for eqn in operations(jaxpr) if eqn.primitive.name.startswith(_REDUCTIONS))
    return any(eqn.primitive.name in _BARRIERS for outer in found for body in _within(outer) for eqn in operations(body))


class Contents(NamedTuple):
    """What decides the options that a training step is compiled with: what the functions of these names say."""

    convolves_in_groups: bool = False
    small: bool = False
    stores_in_loops: bool = False
    stores_in_reductions: bool = False


def contents_of(jaxpr: Any) -> Contents:
    """What a program holds."""
    return Contents(convolves_in_groups(jaxpr), small(jaxpr), stores_in_loops(jaxpr), stores_in_reductions(jaxpr))


def _within(eqn: Any) -> list[Any]:
    """The programs within an operation."""
    values = (x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,)))
    return [body for x in values if hasattr(body := getattr(x, "jaxpr", x), "eqns")]


def _called(eqn: Any) -> list[Any]:
    """The program that an operation is but a call of."""
    body = body_of(eqn)
    return [] if body is None else [getattr(body, "jaxpr", body)]


def _is_small(eqn: Any) -> bool:
    _, (batch, _) = eqn.params["dimension_numbers"]
    each = math.prod(eqn.invars[0].aval.shape[i] for i in batch) or 1
    return min(v.aval.size for v in (*eqn.invars, *eqn.outvars)) <= SMALL * each
