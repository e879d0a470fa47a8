"""A pass that updates all rows of a bucket in one loop and reads their gradients by address.

One loop over all rows runs on all cores and moves the bytes of one update. XLA writes several results from one loop only if they
share no value that is computed from large arrays. It also materializes a gather that is read twice. So each operation that reads
the gradient has a gather of its own, and each reader of a value that depends on the gradient has its own copy. Each gather adds
its own zero, an input of the program, to the addresses, so that XLA does not recognize equal gathers.
"""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.jaxpr import eval_eqn, initial_env, literal_value
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from bridge._memory.address_space import AddressedRows, process_memory

if TYPE_CHECKING:
    from jax.typing import DTypeLike

MAX_GATHERS = 64  # gathers with addresses of their own, at most


def gather_signatures(count: int, dtype: str, length: int | None = None) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """Return shape and dtype of the array over all memory, and of the addresses of the rows with the zeros of the gathers.

    length: the length of each row, for a program that is only compiled to count its bytes: XLA counts the whole operand of a gather.
    """
    memory = process_memory(jnp.dtype(dtype)).shape if length is None else (count * length,)
    return [(memory, dtype), ((count + MAX_GATHERS,), np.int64)]


def map_rows(closed: ClosedJaxpr, at: int, mapped: Sequence[bool]) -> Callable[..., list[Array]]:
    """Return a function that evaluates a program of one row for all rows.

    Args:
      closed: the program.
      at: the position of the input that is an `AddressedRows`.
      mapped: which inputs have a row for each parameter.
    """
    jaxpr: Jaxpr = closed.jaxpr
    depends = _dependents(jaxpr, jaxpr.invars[at])
    times = _count_copies(jaxpr, depends)
    reads = times.get(jaxpr.invars[at], 0)
    if reads > MAX_GATHERS:  # one gather, which XLA materializes: an evaluation for each read would take too long to trace
        times, reads = Counter[Var](), 1

    def one_row(others: list[jax.Array], copies: list[jax.Array]) -> list[Array]:
        # Without copies nothing reads the input.
        inputs = cast(list[Array], [*others[:at], copies[0] if copies else None, *others[at:]])
        values = initial_env(jaxpr, closed.consts, inputs)
        made: dict[Var, list[Array]] = {jaxpr.invars[at]: [*copies]} if times else {}

        def read(v: Atom) -> Array:
            return literal_value(v) if isinstance(v, Literal) else made[v].pop() if v in made else values[v]

        for eqn in jaxpr.eqns:
            several = bool(times) and not depends.isdisjoint(eqn.outvars)
            for _ in range(sum(times.get(v, 0) for v in eqn.outvars) if several else 1):
                given = {v: read(v) for v in _variables(eqn)}
                found = eval_eqn(jaxpr, eqn, [literal_value(v) if isinstance(v, Literal) else given[v] for v in eqn.invars])
                for v, x in zip(eqn.outvars, found, strict=True):
                    if several:
                        made.setdefault(v, []).append(x)
                    else:
                        values[v] = x
        return list(map(read, jaxpr.outvars))

    def all_rows(*inputs: jax.Array | AddressedRows) -> list[Array]:
        others = cast(list[jax.Array], [x for i, x in enumerate(inputs) if i != at])
        axes = [0 if each else None for i, each in enumerate(mapped) if i != at]
        return jax.vmap(one_row, in_axes=(axes, 0))(others, [cast(AddressedRows, inputs[at]).gather(nth) for nth in range(reads)])

    return all_rows


def _dependents(jaxpr: Jaxpr, given: Var) -> set[Var]:
    """Return an input and the variables that depend on it."""
    depends = {given}
    for eqn in jaxpr.eqns:
        if not depends.isdisjoint(_variables(eqn)):
            depends.update(eqn.outvars)
    return depends


def _count_copies(jaxpr: Jaxpr, depends: set[Var]) -> Counter[Var]:
    """Return how many copies of each dependent variable there must be, so that each equation and each result reads its own."""
    times = Counter(v for v in jaxpr.outvars if not isinstance(v, Literal) and v in depends)
    for eqn in reversed(jaxpr.eqns):
        own = sum(times[v] for v in eqn.outvars)
        times.update({v: own for v in _variables(eqn) if v in depends and own})
    return times


def _variables(eqn: Eqn) -> list[Var]:
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
