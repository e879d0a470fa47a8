"""A traced update written for flat leaves: a result of a loop over a leaf's own shape cannot lie where its argument did."""

# jax declares many of its functions in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bridge._compat.types import PyTreeDef
from bridge._ir.classify import body_of, elementwise, keeps_elements, spreads
from bridge._ir.jaxpr import apply, at_start, bound, chosen, literal
from bridge._ir.numerics import finfo
from bridge._ir.queries import branches_to_select
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, PyTree, aval_of, open_jaxpr

from .hoist import sums_up

if TYPE_CHECKING:
    from .batch_rows import Slot


class Flat(NamedTuple):
    """A traced function of flat arrays and numbers that gives the same, and the structure of what it gives."""

    closed: ClosedJaxpr
    structure: PyTreeDef

    @staticmethod
    def of(function: Callable[[PyTree], PyTree], inputs: PyTree) -> Flat | None:
        """That of a function of such `inputs`, a pytree of which shapes and dtypes are looked at; None where it calls back into Python."""
        shapes = jax.tree.map(_abstract, inputs)
        closed, result = jax.make_jaxpr(function, return_shape=True)(shapes)
        return None if closed.effects else Flat.written(closed, shapes, result)

    @staticmethod
    def written(closed: ClosedJaxpr, inputs: PyTree, results: PyTree) -> Flat:
        """That of a traced function, whatever the shapes of its leaves, for inputs and with results as large in these shapes."""
        shapes = [x.shape for x in jax.tree.leaves(results)]

        def flat(*given: jax.Array) -> list[Array]:
            found = _results(closed.jaxpr, closed.consts, given)
            return [x if x.shape == shape else x.reshape(shape) for x, shape in zip(found, shapes, strict=True)]

        return Flat(jax.make_jaxpr(flat)(*jax.tree.leaves(inputs)), jax.tree.structure(results))

    def takes(self, inputs: Sequence[Array | Slot]) -> bool:
        """Whether it is for inputs of these shapes and dtypes."""
        kinds = [(tuple(aval_of(v).shape), aval_of(v).dtype) for v in self.closed.jaxpr.invars]
        return kinds == [(tuple(x.shape), x.dtype) for x in inputs]


def _abstract(x: Array | Slot) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _results(jaxpr: Jaxpr, consts: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    """The results of a program, those of more than one element flat, with all that takes each element by itself written for flat arrays.

    The bodies of the functions that it calls stand in place of the calls.
    """
    values = at_start(jaxpr, consts, arguments)

    def read(v: Atom) -> Array:
        return literal(v) if isinstance(v, Literal) else values[v]

    def shaped(v: Atom) -> Array:
        x, shape = read(v), aval_of(v).shape
        return x if x.shape == shape else x.reshape(shape)

    def flat(v: Atom) -> Array:
        large, x = aval_of(v).size != 1, read(v)
        return x if x.ndim == large else x.reshape(-1 if large else ())

    for eqn in jaxpr.eqns:
        out = aval_of(eqn.outvars[0]) if eqn.outvars else None
        body, branches = body_of(eqn), branches_to_select(eqn)
        if branches is not None:
            index, *others = map(read, eqn.invars)
            found = chosen(index, [_results(each.jaxpr, each.consts, others) for each in branches])
        elif body is not None:
            found = _results(open_jaxpr(body), getattr(body, "consts", ()), list(map(read, eqn.invars)))
        elif out is None or out.size < 2:
            found = _number(jaxpr, eqn, flat, shaped)
        elif keeps_elements(eqn):
            found = [read(eqn.invars[0])]
        elif spreads(eqn, out.size):
            found = [jnp.broadcast_to(flat(eqn.invars[0]), (out.size,))]
        elif elementwise(eqn, out.size):
            found = bound(eqn, *map(flat, eqn.invars))
        else:
            found = apply(jaxpr, eqn, list(map(shaped, eqn.invars)))
        values |= zip(eqn.outvars, found, strict=True)
    return [flat(v) if aval_of(v).size > 1 else shaped(v) for v in jaxpr.outvars]


def _number(jaxpr: Jaxpr, eqn: Eqn, flat: Callable[[Atom], Array], shaped: Callable[[Atom], Array]) -> list[Array]:
    """The results of an operation that gives a number, or nothing: of a sum over all elements from the flat array."""
    if eqn.outvars and sums_up(eqn):
        (found,) = apply(jaxpr, eqn.replace(params=eqn.params | {"axes": (0,)}), [flat(eqn.invars[0])])
        return [found.reshape(aval_of(eqn.outvars[0]).shape)]
    if _sums_products(eqn):  # a loop, as other sums are, and no call of a library that reads its arrays from memory
        products = jax.lax.mul(*map(flat, eqn.invars))
        return [jax.lax.reduce(products, np.zeros((), products.dtype), jax.lax.add, (0,)).reshape(aval_of(eqn.outvars[0]).shape)]
    return apply(jaxpr, eqn, list(map(shaped, eqn.invars)))


def _sums_products(eqn: Eqn) -> bool:
    """Whether it is the sum of the products of all elements of two arrays, each with that in the same place, in types that sum well."""
    if eqn.primitive.name != "dot_general":
        return False
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    one, other, total = (aval_of(v) for v in (*eqn.invars, *eqn.outvars))
    in_place = one.shape == other.shape and one.size > 1 and tuple(left) == tuple(right) and len(left) == one.ndim and not batch
    kinds = {one.dtype, other.dtype, total.dtype}
    return in_place and len(kinds) == 1 and jnp.issubdtype(one.dtype, jnp.inexact) and finfo(one.dtype).bits >= 32
