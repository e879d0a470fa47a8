"""The elementwise remainder of a traced update: the equations of one leaf that are left once every cross-element value is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bridge._ir.classify import REDUCTIONS, is_broadcast, is_elementwise, is_reshape
from bridge._ir.fingerprint import aval_text, params_text
from bridge._ir.jaxpr import Slicer, backward_slice, literal_value, producer
from bridge._ir.numerics import scale_floating
from bridge._ir.types import Array, Atom, Eqn, Jaxpr, Literal, Var, aval_of


class Rest(NamedTuple):
    """The operations that give some results of one size, each element by itself, from arrays of that size and from numbers.

    places: of the results that they give, among all.
    """

    places: list[int]
    results: list[Var]
    eqns: list[Eqn]
    arrays: list[Var]
    numbers: list[Var]

    @staticmethod
    def of(behind: Slicer, known: AbstractSet[Var], outputs: Sequence[tuple[int, Atom]], size: int) -> Rest | None:
        """Those of these results that are not known; None where there are none, they need arrays of another size, or other operations.

        Args:
          behind: as `make_slicer` gives it, of the program.
          known: the variables that are there.
          outputs: of each result its place and its variable.
          size: of a leaf.
        """
        eqns = behind([v for _, v in outputs], known)
        made = {v for eqn in eqns for v in eqn.outvars}
        new = [(at, v) for at, v in outputs if not isinstance(v, Literal) and v in made]
        given = [v for v in read_by(eqns) if v not in made]
        arrays, numbers = ([v for v in given if (aval_of(v).size > 1) is large] for large in (True, False))
        if {aval_of(v).size for v in (*made, *arrays)} != {size} or not all(map(by_element, eqns)):
            return None
        return Rest([at for at, _ in new], [v for _, v in new], eqns, arrays, numbers)

    def text(self, like: tuple[int, ...]) -> tuple[str, ...]:
        """Equal for the same arithmetic; the shape `like` as L, arrays and numbers in the order in which they are read."""
        names = {v: f"{kind}{i}" for kind, column in (("a", self.arrays), ("n", self.numbers)) for i, v in enumerate(column)}
        lines = [aval_text(v.aval, like) for v in (*self.arrays, *self.numbers)]
        for n, eqn in enumerate(self.eqns):
            operands = [f"{v.val}:{aval_text(v.aval, like)}" if isinstance(v, Literal) else names[v] for v in eqn.invars]
            lines.append(f"{eqn.primitive.name}[{params_text(eqn.params, like)}] {operands} -> {aval_text(eqn.outvars[0].aval, like)}")
            names |= {v: f"%{n}.{i}" for i, v in enumerate(eqn.outvars)}
        return *lines, *(names[v] for v in self.results)


def known(jaxpr: Jaxpr) -> list[Var]:
    """What is evaluated once: numbers, what looks across elements, and what that is taken of, where results need it again."""
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    hard = [v for eqn in jaxpr.eqns if not by_element(eqn) for v in eqn.outvars]
    rest = backward_slice(jaxpr.eqns, results, hard)
    needed = {*results, *read_by(rest)}
    own = {v for eqn in rest for v in eqn.outvars}

    def is_array(v: Var) -> bool:
        return aval_of(v).size > 1 and not (v in made and is_broadcast(made[v], aval_of(v).size))

    roots = [producer(eqn.invars[0], made, by_element, is_array) for eqn in jaxpr.eqns if sums_up(eqn)]
    stored = [root for root in roots if isinstance(root, Var) and root in own and root not in results]
    others = [eqn for eqn in jaxpr.eqns if not by_element(eqn) and eqn.primitive.name not in REDUCTIONS]
    stored += [v for v in read_by(others) if v in own]  # an operation that is no loop over elements has its arrays stored anyway
    return list(dict.fromkeys([*(v for v in hard if v in needed), *stored]))


def by_element(eqn: Eqn) -> bool:
    """Whether an array is computed, each element from that element of arrays as large, and from single numbers."""
    size = aval_of(eqn.outvars[0]).size if eqn.outvars else 1
    return size > 1 and (is_elementwise(eqn, size) or is_broadcast(eqn, size) or is_reshape(eqn))


def sums_up(eqn: Eqn) -> bool:
    """Whether an array is summed over, whatever is left of it."""
    return eqn.primitive.name in REDUCTIONS and aval_of(eqn.invars[0]).size > 1


def read_by(eqns: Iterable[Eqn]) -> list[Var]:
    """What operations read, each once."""
    return list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)))


def run(
    eqns: Sequence[Eqn], arrays: Mapping[Var, jax.Array], numbers: Mapping[Var, Array], factor: jax.Array | None
) -> dict[Var, jax.Array]:
    """All that these operations give, from arrays times a factor, so that nothing is shared with another evaluation: see `leaf_update`.

    But a choice hands on the bits of an array as they are, and a half type is multiplied once it is wide: the product of a number
    too small to be normal may be 0.
    """
    values: dict[Var, jax.Array] = {}
    half = [v for v in arrays if jnp.issubdtype(aval_of(v).dtype, jnp.floating) and jnp.finfo(aval_of(v).dtype).bits < 32]

    def read(v: Atom, as_it_is: bool) -> Array:
        if isinstance(v, Literal):
            return literal_value(v)
        if v in arrays:
            return arrays[v] if as_it_is or v in half else scale_floating(arrays[v], factor)
        return numbers[v] if v in numbers else values[v]

    for eqn in eqns:
        chooses = eqn.primitive.name == "select_n"
        found: jax.Array = eqn.primitive.bind(*(read(v, chooses) for v in eqn.invars), **eqn.params)
        widens = eqn.primitive.name == "convert_element_type" and eqn.invars[0] in half
        values[eqn.outvars[0]] = scale_floating(found, factor) if widens else found
    return values
