"""A pass that rewrites a traced update for flat arrays, because XLA cannot reuse a flat buffer for a result of another shape."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bridge._compat.types import PyTreeDef
from bridge._ir.classify import called_jaxpr, is_broadcast, is_elementwise, is_reshape
from bridge._ir.jaxpr import bind, eval_eqn, initial_env, literal_value, select_branch
from bridge._ir.numerics import finfo
from bridge._ir.queries import branches_to_select
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, PyTree, aval_of, open_jaxpr

from .hoist import sums_up

if TYPE_CHECKING:
    from .batch_rows import Slot


class FlatProgram(NamedTuple):
    """A traced function rewritten for flat arrays and scalars, and the structure of its results."""

    closed: ClosedJaxpr
    out_tree: PyTreeDef

    @staticmethod
    def trace(function: Callable[[PyTree], PyTree], inputs: PyTree) -> FlatProgram | None:
        """Trace a function for a pytree of inputs, of which only shapes and dtypes are read; None if it calls back into Python."""
        shapes = jax.tree.map(_abstract, inputs)
        closed, result = jax.make_jaxpr(function, return_shape=True)(shapes)
        return None if closed.effects else FlatProgram.from_jaxpr(closed, shapes, result)

    @staticmethod
    def from_jaxpr(closed: ClosedJaxpr, inputs: PyTree, results: PyTree) -> FlatProgram:
        """Rewrite a traced function for inputs and results of the same sizes, but in these shapes."""
        shapes = [x.shape for x in jax.tree.leaves(results)]

        def flat(*given: jax.Array) -> list[Array]:
            found = _eval_flat(closed.jaxpr, closed.consts, given)
            return [x if x.shape == shape else x.reshape(shape) for x, shape in zip(found, shapes, strict=True)]

        return FlatProgram(jax.make_jaxpr(flat)(*jax.tree.leaves(inputs)), jax.tree.structure(results))

    def accepts(self, inputs: Sequence[Array | Slot]) -> bool:
        """Return whether the function was traced for inputs of these shapes and dtypes."""
        kinds = [(tuple(aval_of(v).shape), aval_of(v).dtype) for v in self.closed.jaxpr.invars]
        return kinds == [(tuple(x.shape), x.dtype) for x in inputs]


def _abstract(x: Array | Slot) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _eval_flat(jaxpr: Jaxpr, consts: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    """Evaluate a program with calls inlined and elementwise operations on flat arrays. Results of more than one element are flat."""
    values = initial_env(jaxpr, consts, arguments)

    def read(v: Atom) -> Array:
        return literal_value(v) if isinstance(v, Literal) else values[v]

    def shaped(v: Atom) -> Array:
        x, shape = read(v), aval_of(v).shape
        return x if x.shape == shape else x.reshape(shape)

    def flat(v: Atom) -> Array:
        large, x = aval_of(v).size != 1, read(v)
        return x if x.ndim == large else x.reshape(-1 if large else ())

    for eqn in jaxpr.eqns:
        out = aval_of(eqn.outvars[0]) if eqn.outvars else None
        body, branches = called_jaxpr(eqn), branches_to_select(eqn)
        if branches is not None:
            index, *others = map(read, eqn.invars)
            found = select_branch(index, [_eval_flat(each.jaxpr, each.consts, others) for each in branches])
        elif body is not None:
            found = _eval_flat(open_jaxpr(body), getattr(body, "consts", ()), list(map(read, eqn.invars)))
        elif out is None or out.size < 2:
            found = _eval_scalar_eqn(jaxpr, eqn, flat, shaped)
        elif is_reshape(eqn):
            found = [read(eqn.invars[0])]
        elif is_broadcast(eqn, out.size):
            found = [jnp.broadcast_to(flat(eqn.invars[0]), (out.size,))]
        elif is_elementwise(eqn, out.size):
            found = bind(eqn, *map(flat, eqn.invars))
        else:
            found = eval_eqn(jaxpr, eqn, list(map(shaped, eqn.invars)))
        values |= zip(eqn.outvars, found, strict=True)
    return [flat(v) if aval_of(v).size > 1 else shaped(v) for v in jaxpr.outvars]


def _eval_scalar_eqn(jaxpr: Jaxpr, eqn: Eqn, flat: Callable[[Atom], Array], shaped: Callable[[Atom], Array]) -> list[Array]:
    """Evaluate an equation whose result is a scalar, or that has none. A full reduction reads the flat array."""
    if eqn.outvars and sums_up(eqn):
        (found,) = eval_eqn(jaxpr, eqn.replace(params=eqn.params | {"axes": (0,)}), [flat(eqn.invars[0])])
        return [found.reshape(aval_of(eqn.outvars[0]).shape)]
    if _is_inner_product(eqn):  # a loop, as other sums are, instead of a library call that reads its operands from memory
        products = jax.lax.mul(*map(flat, eqn.invars))
        return [jax.lax.reduce(products, np.zeros((), products.dtype), jax.lax.add, (0,)).reshape(aval_of(eqn.outvars[0]).shape)]
    return eval_eqn(jaxpr, eqn, list(map(shaped, eqn.invars)))


def _is_inner_product(eqn: Eqn) -> bool:
    """Return whether an equation is the inner product of two arrays of one shape, in one dtype of at least 32 bits."""
    if eqn.primitive.name != "dot_general":
        return False
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    one, other, total = (aval_of(v) for v in (*eqn.invars, *eqn.outvars))
    in_place = one.shape == other.shape and one.size > 1 and tuple(left) == tuple(right) and len(left) == one.ndim and not batch
    kinds = {one.dtype, other.dtype, total.dtype}
    return in_place and len(kinds) == 1 and jnp.issubdtype(one.dtype, jnp.inexact) and finfo(one.dtype).bits >= 32
