"""All rows of a pack in one loop, their gradients read where they lie.

One loop over all rows is on all cores and moves the bytes of one update, but XLA must be led to write it: it writes several results from
one loop only where none of them shares what another computes from large arrays, and what a gather reads it stores before it would read it
twice. So each operation that needs the gradient has a gather of its own, and what depends on it is computed for each that needs it. Of the
places that these read from, each has a zero of its own added, which the program is given, so that XLA cannot see that they are the same.
"""

# jax declares many of its functions in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.jaxpr import apply, at_start, literal
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from bridge._memory.address_space import Scattered, everything

if TYPE_CHECKING:
    from jax.typing import DTypeLike

READS = 64  # gathers with places of their own; of more some are stored


def signature(count: int, dtype: str, length: int | None = None) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """Shape and dtype of all memory, and of where each of so many rows begins in it, with zeros for the reads.

    length: of each row, for a program that is only counted: the compiler takes a gather to read all that it may.
    """
    memory = everything(jnp.dtype(dtype)).shape if length is None else (count * length,)
    return [(memory, dtype), ((count + READS,), np.int64)]


def over_rows(closed: ClosedJaxpr, at: int, mapped: Sequence[bool]) -> Callable[..., list[Array]]:
    """A program of one row, of which the input `at` is `Scattered`, for all rows; `mapped`: which inputs are one for each row."""
    jaxpr: Jaxpr = closed.jaxpr
    depends = _dependent(jaxpr, jaxpr.invars[at])
    times = _times(jaxpr, depends)
    reads = times.get(jaxpr.invars[at], 0)
    if reads > READS:  # one gather, which XLA stores: as many evaluations as reads would take ever longer to trace
        times, reads = Counter[Var](), 1

    def one_row(others: list[jax.Array], copies: list[jax.Array]) -> list[Array]:
        # Without copies nothing reads the input.
        inputs = cast(list[Array], [*others[:at], copies[0] if copies else None, *others[at:]])
        values = at_start(jaxpr, closed.consts, inputs)
        made: dict[Var, list[Array]] = {jaxpr.invars[at]: [*copies]} if times else {}

        def read(v: Atom) -> Array:
            return literal(v) if isinstance(v, Literal) else made[v].pop() if v in made else values[v]

        for eqn in jaxpr.eqns:
            several = bool(times) and not depends.isdisjoint(eqn.outvars)
            for _ in range(sum(times.get(v, 0) for v in eqn.outvars) if several else 1):
                given = {v: read(v) for v in _variables(eqn)}
                found = apply(jaxpr, eqn, [literal(v) if isinstance(v, Literal) else given[v] for v in eqn.invars])
                for v, x in zip(eqn.outvars, found, strict=True):
                    if several:
                        made.setdefault(v, []).append(x)
                    else:
                        values[v] = x
        return list(map(read, jaxpr.outvars))

    def all_rows(*inputs: jax.Array | Scattered) -> list[Array]:
        others = cast(list[jax.Array], [x for i, x in enumerate(inputs) if i != at])
        axes = [0 if each else None for i, each in enumerate(mapped) if i != at]
        return jax.vmap(one_row, in_axes=(axes, 0))(others, [_read(cast(Scattered, inputs[at]), nth) for nth in range(reads)])

    return all_rows


def _read(far: Scattered, nth: int) -> jax.Array:
    count, length = far.shape
    starts = (far.order[:count] + far.order[count + nth]).reshape(count, 1)
    rows = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    return jax.lax.gather(far.memory, starts, rows, (length,), mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _dependent(jaxpr: Jaxpr, given: Var) -> set[Var]:
    """An input, and what is computed from it."""
    depends = {given}
    for eqn in jaxpr.eqns:
        if not depends.isdisjoint(_variables(eqn)):
            depends.update(eqn.outvars)
    return depends


def _times(jaxpr: Jaxpr, depends: set[Var]) -> Counter[Var]:
    """How often each of these must be there for each operation, and each result, to have one of its own."""
    times = Counter(v for v in jaxpr.outvars if not isinstance(v, Literal) and v in depends)
    for eqn in reversed(jaxpr.eqns):
        own = sum(times[v] for v in eqn.outvars)
        times.update({v: own for v in _variables(eqn) if v in depends and own})
    return times


def _variables(eqn: Eqn) -> list[Var]:
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
