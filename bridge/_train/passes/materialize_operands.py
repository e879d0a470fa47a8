"""A pass that materializes the operands of matrix products and convolutions for all of their readers.

A product reads its operands from memory. For other readers of the same value (a sum, a mask, the gradient of a weight) XLA's CPU
compiler recomputes the value if its operations are cheap. In a chain of layers, each layer then recomputes all layers before it.
With a barrier behind the value, all readers read the materialized array.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TypeAlias, cast

import jax
from jax import lax

from bridge._ir.classify import ELEMENTWISE
from bridge._ir.jaxpr import jaxpr_params, rewrite_bottom_up, with_eqns
from bridge._ir.types import Eqn, Jaxpr, Literal, Var, aval_of

MIN_MATERIALIZED_ELEMENTS = 2**10  # elements from which a value is worth materializing
_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = frozenset({"dot_general", _CONVOLUTION})
_RECOMPUTED = ELEMENTWISE | {"concatenate"}
_VIEWS = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})
_LAYOUT_CHANGES = _VIEWS | {"broadcast_in_dim"}
_Readers: TypeAlias = dict[Var, list[Eqn]]


def materialize_operands(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with a barrier behind each such value; the same object if there is none."""
    return rewrite_bottom_up(jaxpr, functools.partial(_rewrite, _CalleeInfo()))


def _rewrite(known: _CalleeInfo, jaxpr: Jaxpr) -> Jaxpr:
    readers, found = _readers_by_var(jaxpr.eqns), []
    for eqn in jaxpr.eqns:
        wanted = [
            v
            for v in eqn.outvars
            if aval_of(v).size >= MIN_MATERIALIZED_ELEMENTS
            and known.is_recomputed(eqn)
            and _has_product_and_other_reader(v, readers, known)
        ]
        calls = {v: _barrier_call(v, readers[v]) for v in wanted}
        own = eqn.replace(outvars=[cast(Var, calls[v].invars[0]) if v in calls else v for v in eqn.outvars]) if calls else eqn
        found += [own, *calls.values()]
    return with_eqns(jaxpr, found)


def _readers_by_var(eqns: Iterable[Eqn]) -> _Readers:
    readers: _Readers = {}
    for eqn in eqns:
        for v in dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)):
            readers.setdefault(v, []).append(eqn)
    return readers


def _has_product_and_other_reader(v: Var, readers: _Readers, known: _CalleeInfo) -> bool:
    """Return whether a value has several readers, one of which is a product."""
    own = list(readers_of(v, readers))
    return len(own) > 1 and any(known.feeds_product(eqn, given) for eqn, given in own)


def readers_of(v: Var, readers: _Readers) -> Iterator[tuple[Eqn, Var]]:
    """Yield the equations that read a value or a view of it, each with the variable that it reads."""
    seen = [v]
    for given in seen:
        for eqn in readers.get(given, ()):
            if eqn.primitive.name in _VIEWS:
                seen += eqn.outvars
            else:
                yield eqn, given


class _CalleeInfo:
    """Cached answers about the functions that a program calls."""

    def __init__(self) -> None:
        self._cheap: dict[int, tuple[Jaxpr, bool]] = {}
        self._multiplied: dict[int, tuple[Jaxpr, list[bool]]] = {}

    def is_recomputed(self, eqn: Eqn) -> bool:
        """Return whether XLA would recompute an equation for each reader: elementwise operations and concatenations."""
        inner = [body for _, body in jaxpr_params(eqn)]
        return eqn.primitive.name in _RECOMPUTED or (bool(inner) and all(map(self._is_body_recomputed, inner)))

    def feeds_product(self, eqn: Eqn, v: Var) -> bool:
        """Return whether an equation is a product of a value, or calls a function that passes the value to a product."""
        taken = (zip(eqn.invars, self._inputs_of_products(body), strict=True) for _, body in jaxpr_params(eqn))
        return eqn.primitive.name in _PRODUCTS or any(given is v and multiplied for own in taken for given, multiplied in own)

    def _is_body_recomputed(self, body: Jaxpr) -> bool:
        if id(body) not in self._cheap:
            self._cheap[id(body)] = (
                body,
                bool(body.eqns) and all(e.primitive.name in _LAYOUT_CHANGES or self.is_recomputed(e) for e in body.eqns),
            )
        return self._cheap[id(body)][1]

    def _inputs_of_products(self, body: Jaxpr) -> list[bool]:
        """Return for each argument of a function whether a product reads it."""
        if id(body) not in self._multiplied:
            within = _readers_by_var(body.eqns)
            found = [any(self.feeds_product(*end) for end in readers_of(v, within)) for v in body.invars]
            self._multiplied[id(body)] = body, found
        return self._multiplied[id(body)][1]


def _barrier_call(v: Var, readers: Iterable[Eqn]) -> Eqn:
    """Return a call that materializes a value, with channels last if a convolution reads it."""
    aval = aval_of(v)
    convolved = [eqn.params["dimension_numbers"].lhs_spec for eqn in readers if eqn.primitive.name == _CONVOLUTION and eqn.invars[0] is v]
    order = [convolved[0][0], *convolved[0][2:], convolved[0][1]] if convolved else list(range(aval.ndim))
    back = sorted(range(len(order)), key=order.__getitem__)

    def stored(x: jax.Array) -> jax.Array:
        return lax.transpose(lax.optimization_barrier(lax.transpose(x, order)), back)

    (call,) = jax.make_jaxpr(jax.jit(stored))(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr.eqns
    return call.replace(outvars=[v])
