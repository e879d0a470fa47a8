"""A pass that traces one function for each kernel class and splits it into scalar arithmetic and array operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from bridge._ir.classify import is_broadcast
from bridge._ir.jaxpr import backward_slice, eval_eqn, eval_eqns, initial_env, inline_calls, outlined, trace_to_jaxpr
from bridge._ir.numerics import is_prng_key
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, PyTree, aval_of
from bridge._memory.address_space import AddressedRows

from .batch_scalars import _known, _Numbers
from .bf16_rounding import round_bf16_by_bits
from .gather_rows import map_rows
from .kernel_class import MAX_SCALAR_ELEMENTS, KernelClass, abstract_value, jit_if_repeated
from .operand_limit import limit_operands

_Function: TypeAlias = Callable[..., Sequence[Array]]


def for_each(kinds: Sequence[KernelClass], common: PyTree, apart: bool = True) -> list[list[PyTree]]:
    """For each kind [function(a, s, common) for a, s in zip(arrays, scalars)], traced once, mapped over rows.

    common: a pytree that all calls get. apart: whether the numbers of each leaf are cut out before its loop, as is best on a CPU.
    """
    shared = jax.tree.leaves(common)
    cuts = _cuts(kinds, common, apart)
    alike: dict[Hashable, list[int]] = {}
    for position, cut in enumerate(cuts):
        alike.setdefault(cut.key, []).append(position)
    results: list[list[PyTree]] = [[] for _ in kinds]
    for positions in alike.values():
        known = _known(cuts[positions[0]].of_scalars, cuts[positions[0]].handed, [kinds[i] for i in positions], shared, apart)
        for i in positions:
            kind, cut = kinds[i], cuts[i]
            function = _of_arrays(cut, kind, shared, apart)
            called = None
            for arrays in kind.arrays:
                numbers, taken, done = next(known)
                if called is None:
                    called = function if taken is None else outlined(_at_row(function, taken, len(numbers)))
                results[i].append(cut.results(done, called(*numbers, *jax.tree.leaves(arrays), *shared)))
    return results


def _of_arrays(cut: _Cut, kind: KernelClass, shared: Sequence[jax.Array], apart: bool) -> _Function:
    """The second part of a function, for the arrays of a kind."""
    given = jax.tree.leaves(kind.arrays[0])
    far = next((i for i, x in enumerate(given) if isinstance(x, AddressedRows)), None)
    if far is not None:
        return cut.all_rows(far, len(shared))
    function = cut.of_arrays
    if kind.rows is not None:
        function = jax.vmap(function, in_axes=(*(0 for _ in range(cut.handed + len(given))), *(None for _ in shared)))
    return jit_if_repeated(function, len(kind.arrays) if kind.table_rows is None else 1)


def _at_row(function: _Function, taken: _Function, count: int) -> _Function:
    """The function, with its first operands taken from others, so many."""
    return lambda *given: function(*taken(*given[:count]), *given[count:])


_families: dict[Hashable, _Cut] = {}
_FAMILIES_KEPT = 256


def _cuts(kinds: Sequence[KernelClass], common: PyTree, apart: bool) -> list[_Cut]:
    """The function of each kind, cut in two; that of a family is traced once in a process."""
    found: dict[int, _Cut] = {}
    like = jax.tree.structure(common), tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(common))
    for i in sorted(range(len(kinds)), key=lambda i: -kinds[i].size):
        kind, key = kinds[i], (kinds[i].size_class, like, apart)
        known = None if kind.size_class is None else _families.get(key)
        cut = None if known is None else known.resized(kind.size)
        if cut is None:
            cut = _Cut(kind, common, apart)
            if kind.size_class is not None and (known is None or cut.is_flat):  # one of few elements serves none of another size
                while len(_families) >= _FAMILIES_KEPT:
                    del _families[next(iter(_families))]
                _families[key] = cut
        found[i] = cut
    return [found[i] for i in range(len(kinds))]


class _Cut:
    """A traced function of (arrays, scalars, common) as two: of (scalars, common), and of (what that gives, arrays, common).

    The first gives what is handed to the second, then the results that need no array. Its `key` is equal for the same arithmetic.
    """

    def __init__(self, kind: KernelClass, common: PyTree, apart: bool) -> None:
        columns = kind.rows is not None, kind.rows is not None or kind.table_rows is not None
        one = [
            jax.tree.map(lambda x, column=column: jax.ShapeDtypeStruct(x.shape[column:], x.dtype), x[0])
            for column, x in zip(columns, kind[1:3], strict=True)
        ]
        closed, result = trace_to_jaxpr(kind.function, *one, jax.tree.map(abstract_value, common))
        self.structure, self._size, self._now = jax.tree.structure(result), kind.size, kind.size
        closed = limit_operands(closed, jax.tree.leaves(one[0])[0].size) if apart else closed
        arrays, scalars = (len(jax.tree.leaves(x)) for x in one)
        jaxpr: Jaxpr = closed.jaxpr
        own, each, rest = jaxpr.invars[:arrays], jaxpr.invars[arrays : arrays + scalars], jaxpr.invars[arrays + scalars :]
        given = [*each, *rest, *jaxpr.constvars]
        small = {v for v in given if aval_of(v).size <= MAX_SCALAR_ELEMENTS}
        numbers = _Numbers(given)
        second: list[Eqn] = []
        for eqn in jaxpr.eqns:
            if not eqn.outvars and not eqn.effects:  # a call of which nothing was left
                continue
            # A number in all elements of a leaf of few is none: the cut would depend on whether that was traced, or a larger one before it.
            depends = all(isinstance(v, Literal) or v in small for v in eqn.invars) and not is_broadcast(eqn, kind.size)
            # A random key fits in no table of numbers: it is made anew where it is read.
            if depends and all(aval_of(v).size <= MAX_SCALAR_ELEMENTS and not is_prng_key(v.aval) for v in eqn.outvars) and not eqn.effects:
                numbers.add(eqn)
                small.update(eqn.outvars)
            else:
                second.append(eqn)
        made = {*each, *numbers.made}

        def of_scalars(v: Atom) -> bool:
            return not isinstance(v, Literal) and v in made

        self.is_scalar = list(map(of_scalars, jaxpr.outvars))
        done, others = ([v for v in jaxpr.outvars if of_scalars(v) is scalar] for scalar in (True, False))
        second = second if any(eqn.effects for eqn in second) else backward_slice(second, others)
        # What two evaluations read is handed on to each: a number that is read twice would be cut out of its row in a loop of its own.
        handed = [v for v in dict.fromkeys(v for eqn in second for v in eqn.invars if not isinstance(v, Literal)) if v in made]
        of_arrays = ClosedJaxpr(jaxpr.replace(invars=[*handed, *own, *rest], outvars=others, eqns=second), closed.consts)
        of_arrays = round_bf16_by_bits(of_arrays) if apart else of_arrays
        self._own, self.handed, results = len(own), len(handed), [numbers.first(v) for v in (*handed, *done)]
        first = backward_slice(numbers.eqns, results)
        self.key: Hashable = self.handed, numbers.text(first, results), tuple(map(id, closed.consts))
        self.of_scalars = ClosedJaxpr(jaxpr.replace(invars=[*each, *rest], outvars=results, eqns=first), closed.consts)
        self._arrays = of_arrays
        self.of_arrays: _Function = jaxpr_as_fun(of_arrays)

    def resized(self, size: int) -> _Cut | None:
        """The same for arrays of another size; None where not all arrays are flat and of the size that this is for."""
        if size == self._now:
            return self
        if not self.is_flat:
            return None
        other = copy.copy(self)
        other._now, other.of_arrays = size, lambda *inputs: _in_shape(self._plain, inputs, (self._size,), (size,))
        return other

    def all_rows(self, far: int, shared: int) -> _Function:
        """The second part of all rows, in one loop, of which the array `far` lies anywhere; of its inputs, so many are common to all."""
        mapped = [True] * (self.handed + self._own) + [False] * shared
        return map_rows(self._plain if self._now == self._size else self._resized, self.handed + far, mapped)

    @property
    def _resized(self) -> ClosedJaxpr:
        """The second part as traced for the size that this is for now."""
        sizes = [(self._now,) if aval_of(v).shape == (self._size,) else aval_of(v).shape for v in self._plain.jaxpr.invars]
        inputs = [jax.ShapeDtypeStruct(shape, aval_of(v).dtype) for shape, v in zip(sizes, self._plain.jaxpr.invars, strict=True)]
        return jax.make_jaxpr(lambda *inputs: _in_shape(self._plain, inputs, (self._size,), (self._now,)))(*inputs)

    @cached_property
    def is_flat(self) -> bool:
        """Whether it can be had for arrays of other sizes."""
        seen = [aval_of(v) for eqn in self._plain.jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
        return self._size > MAX_SCALAR_ELEMENTS and all(aval.shape == (self._size,) or aval.size <= MAX_SCALAR_ELEMENTS for aval in seen)

    @cached_property
    def _plain(self) -> ClosedJaxpr:
        """The second part, with the bodies of what it calls in place of the calls."""
        return inline_calls(self._arrays.jaxpr, self._arrays.consts)

    def results(self, done: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """What the function gives, from the results that scalars gave and those that arrays did."""
        parts = {True: iter(done), False: iter(others)}
        return self.structure.unflatten([next(parts[scalar]) for scalar in self.is_scalar])


def _in_shape(closed: ClosedJaxpr, inputs: Sequence[Array], old: tuple[int, ...], new: tuple[int, ...]) -> list[Array]:
    """The results of a program as of `inline_calls` for inputs of the shape `new`, where it was traced for `old`."""
    jaxpr: Jaxpr = closed.jaxpr

    def reshaped(eqn: Eqn, operands: list[Array]) -> list[Array]:
        params = {name: new if isinstance(value, tuple) and value == old else value for name, value in eqn.params.items()}
        return eval_eqn(jaxpr, eqn.replace(params=params), operands)

    return list(map(eval_eqns(jaxpr.eqns, initial_env(jaxpr, closed.consts, inputs), reshaped), jaxpr.outvars))
