"""A pass that splits the update of a flat leaf at its reductions: operands of the reductions, then the reductions, then the results.

Without the split, XLA would evaluate the update again for each reduction and each result, or materialize all values in between. A
scalar predicate that selects an array for all elements selects between reductions instead, which are then computed once. (optax
compares a norm with 0 and computes it again from ones.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.classify import is_broadcast, is_elementwise, is_full_reduction, is_reshape
from bridge._ir.jaxpr import backward_slice, eval_eqn, eval_eqns, initial_env, inline_calls, producer
from bridge._ir.numerics import scale_floating
from bridge._ir.types import Array, Atom, Eqn, Jaxpr, Literal, PyTree, Var, aval_of


class _Spread(NamedTuple):
    """One number for all elements."""

    number: Array


class _Choice(NamedTuple):
    """One number that chooses between arrays."""

    which: Array
    cases: tuple[_Value, ...]


_Value: TypeAlias = Array | _Spread | _Choice


class Stages:
    """A traced function of flat arrays of one size, and what lies between its sums.

    Args:
      function: of one pytree of arrays; gives another.
      inputs: what it takes, of which only shapes and dtypes are looked at.
      size: of a leaf.
    """

    def __init__(self, function: Callable[[PyTree], PyTree], inputs: PyTree, size: int) -> None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        closed, result = jax.make_jaxpr(function, return_shape=True)(shapes)
        closed = inline_calls(closed.jaxpr, closed.consts)
        self._size, self._structure = size, jax.tree.structure(result)
        self._jaxpr: Jaxpr = closed.jaxpr
        self._consts = closed.consts
        self._made = {var: eqn for eqn in self._jaxpr.eqns for var in eqn.outvars}
        self._sums = [eqn.outvars[0] for eqn in self._jaxpr.eqns if is_full_reduction(eqn, size)]
        self._equal = self._found(lambda eqn, equal: is_broadcast(eqn, size) or self._all_equal(eqn, equal))
        summed = self._found(
            lambda eqn, found: is_full_reduction(eqn, size) or any(not isinstance(v, Literal) and v in found for v in eqn.invars)
        )
        roots = dict.fromkeys(self._root(self._made[var].invars[0]) for var in self._sums)
        self._roots = [var for var in roots if isinstance(var, Var) and var in self._made and var not in summed]
        results = [v for v in dict.fromkeys(v for v in self._jaxpr.outvars if not isinstance(v, Literal)) if v in self._made]
        self._ready = [v for v in results if aval_of(v).size == size and v not in summed and v not in self._equal]

    def _found(self, holds: Callable[[Eqn, set[Var]], bool]) -> set[Var]:
        """The results of all operations for which something holds, given those found before."""
        found: set[Var] = set()
        for eqn in self._jaxpr.eqns:
            if holds(eqn, found):
                found.update(eqn.outvars)
        return found

    def _all_equal(self, eqn: Eqn, equal: set[Var]) -> bool:
        known = all(isinstance(v, Literal) or aval_of(v).size == 1 or v in equal for v in eqn.invars)
        return known and aval_of(eqn.outvars[0]).size == self._size and (is_elementwise(eqn, self._size) or is_reshape(eqn))

    def _root(self, var: Atom) -> Atom:
        def by_element(eqn: Eqn) -> bool:
            return is_elementwise(eqn, self._size) or is_reshape(eqn)

        return producer(var, self._made, by_element, lambda v: aval_of(v).size == self._size and v not in self._equal)

    def begin(self, inputs: PyTree, one: jax.Array | None) -> Callable[[jax.Array | None], PyTree]:
        """The sums of these inputs; gives a function from a traced 1.0 or None, as of `evaluate`, to the results.

        What is summed up, and the results that are known by then, are stored before: evaluated apart, so that XLA writes all of them from
        one loop.

        Args:
          inputs: what the function takes.
          one: a traced 1.0, for that; None where nothing is to be stored.
        """
        flat = jax.tree.leaves(inputs)
        known: dict[Var, Array] = {}
        if one is not None and self._roots:
            apart = [v for v in self._roots if v not in self._ready]
            first = [*self._run(self._ready, flat, {}, None), *self._run(apart, flat, {}, one)]
            known = dict(zip((*self._ready, *apart), jax.lax.optimization_barrier(first), strict=True))
        known |= zip(self._sums, self._run(self._sums, flat, known, None), strict=True)
        return lambda factor: self._structure.unflatten(self._run(self._jaxpr.outvars, flat, known, factor))

    def _run(self, wanted: Sequence[Atom], flat: Sequence[jax.Array], known: Mapping[Var, Array], factor: jax.Array | None) -> list[Array]:
        """The wanted variables, from the inputs and what is known; all arrays times the factor."""

        def scaled(x: Array) -> Array:
            return scale_floating(x, factor) if x.size == self._size else x

        values: dict[Var, _Value] = initial_env(self._jaxpr, self._consts, list(map(scaled, flat)))
        values |= {var: scaled(x) for var, x in known.items()}
        read = eval_eqns(backward_slice(self._jaxpr.eqns, wanted, known), values, self._apply)
        return [known[v] if not isinstance(v, Literal) and v in known else _array(read(v), _shape(v)) for v in wanted]

    def _apply(self, eqn: Eqn, operands: list[_Value]) -> Sequence[_Value]:
        """The results of one operation, as numbers or choices of numbers where all elements are."""
        size = self._size
        if is_broadcast(eqn, size) and not isinstance(operands[0], _Spread | _Choice):
            return [_Spread(operands[0].reshape(()))]
        if is_reshape(eqn) and isinstance(operands[0], _Spread | _Choice):
            return operands
        if is_full_reduction(eqn, size) and isinstance(operands[0], _Spread | _Choice) and eqn.primitive.name != "reduce_prod":
            return [self._reduced(eqn, operands[0]).reshape(aval_of(eqn.outvars[0]).shape)]
        if is_elementwise(eqn, size) and aval_of(eqn.outvars[0]).size == size:
            found = self._elementwise(eqn, operands)
            if found is not None:
                return [found]
        return eval_eqn(self._jaxpr, eqn, [_array(x, _shape(v)) for x, v in zip(operands, eqn.invars, strict=True)])

    def _elementwise(self, eqn: Eqn, operands: list[_Value]) -> _Spread | _Choice | None:
        numbers = [x.number if isinstance(x, _Spread) else x for x in operands]
        arrays = {id(x): x for x in numbers if isinstance(x, _Choice) or x.size > 1}
        if not arrays:
            return _Spread(eval_eqn(self._jaxpr, eqn, [x.reshape(()) for x in numbers if not isinstance(x, _Choice)])[0])
        which = numbers[0]
        is_choice = eqn.primitive.name == "select_n" and any(isinstance(x, _Spread) for x in operands[1:])
        if is_choice and not isinstance(which, _Choice) and which.size == 1:
            return _Choice(which.reshape(()), tuple(operands[1:]))
        only = next(iter(arrays.values()))
        if len(arrays) > 1 or not isinstance(only, _Choice):
            return None
        return _Choice(only.which, tuple(self._apply(eqn, [case if x is only else x for x in operands])[0] for case in only.cases))

    def _reduced(self, eqn: Eqn, value: _Value) -> Array:
        """The sum, maximum, ... of a choice of arrays, as a 0-d array."""
        if isinstance(value, _Choice):
            return jax.lax.select_n(value.which, *(self._reduced(eqn, case) for case in value.cases))
        if isinstance(value, _Spread):
            return value.number * np.asarray(self._size).astype(value.number.dtype) if eqn.primitive.name == "reduce_sum" else value.number
        return eval_eqn(self._jaxpr, eqn, [value.reshape(_shape(eqn.invars[0]))])[0].reshape(())


def _array(value: _Value, shape: tuple[int, ...]) -> Array:
    if isinstance(value, _Spread):
        return jnp.broadcast_to(value.number, shape)
    if isinstance(value, _Choice):
        return jax.lax.select_n(value.which, *(_array(case, shape) for case in value.cases))
    return value if value.shape == shape else value.reshape(shape)


def _shape(var: Atom) -> tuple[int, ...]:
    return aval_of(var).shape
