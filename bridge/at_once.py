"""All rows of a pack in one loop, their gradients read where they lie.

A loop over rows one after the other has some of its own to do at each turn, and one core. One loop over all rows is on all cores and moves
the bytes of one update, but XLA must be led to write it: it writes several results from one loop only where none of them shares what
another computes from large arrays, and what a gather reads it stores before it would read it twice. So each operation that needs the
gradient has a gather of its own, and what depends on it is computed for each that needs it. Of the places that these read from, each has a
zero of its own added, which the program is given, so that XLA cannot see that they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .scattered import Scattered, everything
from .whole import apply, at_start, in_turn, literal

READS = 64  # gathers with places of their own; of more some are stored


def signature(count: int, dtype: str, length: int | None = None) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of all memory, and of where each of so many rows begins in it, with zeros for the reads.

    length: of each row, for a program that is only counted: the compiler takes a gather to read all that it may.
    """
    memory = everything(jnp.dtype(dtype)).shape if length is None else (count * length,)
    return [(memory, dtype), ((count + READS,), np.int64)]


def over_rows(closed: Any, at: int, mapped: Sequence[bool]) -> Callable[..., list[Any]]:
    """A program of one row, of which the input `at` is `Scattered`, for all rows; `mapped`: which inputs are one for each row."""
    function, reads = _apart(closed, at)

    def all_rows(*inputs: Any) -> list[Any]:
        far = inputs[at]
        copies = [_read(far, nth) for nth in range(min(reads, READS))]
        others = [x for i, x in enumerate(inputs) if i != at]
        axes = [0 if each else None for i, each in enumerate(mapped) if i != at]
        return jax.vmap(function, in_axes=(axes, 0))(others, copies)

    return all_rows


def _read(far: Scattered, nth: int) -> Any:
    count, length = far.shape
    starts = (far.order[:count] + far.order[count + nth]).reshape(count, 1)
    rows = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    return jax.lax.gather(far.memory, starts, rows, (length,), mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _apart(closed: Any, at: int) -> tuple[Callable[[list[Any], list[Any]], list[Any]], int]:
    """The program as a function of its inputs but the one `at`, and of as many copies of that as are read; and how many those are."""
    jaxpr = closed.jaxpr
    given, made = jaxpr.invars[at], {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    depends = {given}
    for eqn in jaxpr.eqns:
        if not depends.isdisjoint(_variables(eqn)):
            depends.update(eqn.outvars)

    def reads(v: Any) -> int:
        if isinstance(v, Literal) or v not in depends:
            return 0
        return 1 if v is given else sum(map(reads, _variables(made[v])))

    def function(others: list[Any], copies: list[Any]) -> list[Any]:
        values = at_start(jaxpr, closed.consts, [*others[:at], None, *others[at:]])
        in_turn((eqn for eqn in jaxpr.eqns if depends.isdisjoint(eqn.outvars)), values, lambda eqn, operands: apply(jaxpr, eqn, operands))
        own = cycle(copies)

        def found(v: Any) -> Any:
            if isinstance(v, Literal) or v not in depends:
                return literal(v) if isinstance(v, Literal) else values[v]
            if v is given:
                return next(own)
            known = {u: found(u) for u in _variables(made[v])}
            operands = [literal(u) if isinstance(u, Literal) else known[u] for u in made[v].invars]
            return dict(zip(made[v].outvars, apply(jaxpr, made[v], operands), strict=True))[v]

        return list(map(found, jaxpr.outvars))

    return function, sum(map(reads, jaxpr.outvars))


def _variables(eqn: Any) -> list[Any]:
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
