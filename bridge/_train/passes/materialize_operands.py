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
from bridge._ir.jaxpr import bodies, replaced, throughout
from bridge._ir.types import Eqn, Jaxpr, Literal, Var, aval_of

FEWEST = 2**10  # elements from which a value is worth materializing
_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = frozenset({"dot_general", _CONVOLUTION})
_MADE_AGAIN = ELEMENTWISE | {"concatenate"}
_VIEWS = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})
_PASSED_ON = _VIEWS | {"broadcast_in_dim"}
_Readers: TypeAlias = dict[Var, list[Eqn]]


def stored_for_products(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with a barrier behind each such value; the same object if there is none."""
    return throughout(jaxpr, functools.partial(_own, _Known()))


def _own(known: _Known, jaxpr: Jaxpr) -> Jaxpr:
    readers, found = _readers(jaxpr.eqns), []
    for eqn in jaxpr.eqns:
        wanted = [v for v in eqn.outvars if aval_of(v).size >= FEWEST and known.cheap(eqn) and _shared(v, readers, known)]
        calls = {v: _stored(v, readers[v]) for v in wanted}
        own = eqn.replace(outvars=[cast(Var, calls[v].invars[0]) if v in calls else v for v in eqn.outvars]) if calls else eqn
        found += [own, *calls.values()]
    return replaced(jaxpr, found)


def _readers(eqns: Iterable[Eqn]) -> _Readers:
    readers: _Readers = {}
    for eqn in eqns:
        for v in dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)):
            readers.setdefault(v, []).append(eqn)
    return readers


def _shared(v: Var, readers: _Readers, known: _Known) -> bool:
    """Return whether a value has several readers, one of which is a product."""
    own = list(_ends(v, readers))
    return len(own) > 1 and any(known.multiplies(eqn, given) for eqn, given in own)


def _ends(v: Var, readers: _Readers) -> Iterator[tuple[Eqn, Var]]:
    """Yield the equations that read a value or a view of it, each with the variable that it reads."""
    seen = [v]
    for given in seen:
        for eqn in readers.get(given, ()):
            if eqn.primitive.name in _VIEWS:
                seen += eqn.outvars
            else:
                yield eqn, given


class _Known:
    """Cached answers about the functions that a program calls."""

    def __init__(self) -> None:
        self._cheap: dict[int, tuple[Jaxpr, bool]] = {}
        self._multiplied: dict[int, tuple[Jaxpr, list[bool]]] = {}

    def cheap(self, eqn: Eqn) -> bool:
        """Return whether XLA would recompute an equation for each reader: elementwise operations and concatenations."""
        inner = [body for _, body in bodies(eqn)]
        return eqn.primitive.name in _MADE_AGAIN or (bool(inner) and all(map(self._all_cheap, inner)))

    def multiplies(self, eqn: Eqn, v: Var) -> bool:
        """Return whether an equation is a product of a value, or calls a function that passes the value to a product."""
        taken = (zip(eqn.invars, self._to_products(body), strict=True) for _, body in bodies(eqn))
        return eqn.primitive.name in _PRODUCTS or any(given is v and multiplied for own in taken for given, multiplied in own)

    def _all_cheap(self, body: Jaxpr) -> bool:
        if id(body) not in self._cheap:
            self._cheap[id(body)] = body, bool(body.eqns) and all(e.primitive.name in _PASSED_ON or self.cheap(e) for e in body.eqns)
        return self._cheap[id(body)][1]

    def _to_products(self, body: Jaxpr) -> list[bool]:
        """Return for each argument of a function whether a product reads it."""
        if id(body) not in self._multiplied:
            within = _readers(body.eqns)
            found = [any(self.multiplies(*end) for end in _ends(v, within)) for v in body.invars]
            self._multiplied[id(body)] = body, found
        return self._multiplied[id(body)][1]


def _stored(v: Var, readers: Iterable[Eqn]) -> Eqn:
    """Return a call that materializes a value, with channels last if a convolution reads it."""
    aval = aval_of(v)
    convolved = [eqn.params["dimension_numbers"].lhs_spec for eqn in readers if eqn.primitive.name == _CONVOLUTION and eqn.invars[0] is v]
    order = [convolved[0][0], *convolved[0][2:], convolved[0][1]] if convolved else list(range(aval.ndim))
    back = sorted(range(len(order)), key=order.__getitem__)

    def stored(x: jax.Array) -> jax.Array:
        return lax.transpose(lax.optimization_barrier(lax.transpose(x, order)), back)

    (call,) = jax.make_jaxpr(jax.jit(stored))(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr.eqns
    return call.replace(outvars=[v])
