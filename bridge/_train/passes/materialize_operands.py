"""A traced program in which what a product reads is stored for all of its readers.

A matrix product or a convolution reads its sides from memory. Other readers of the same values (a sum beside it, a mask, the
gradient of a weight) XLA's CPU compiler gives what they were computed from, as long as that is cheap operations: in a chain
of layers each then computes those before it again, from the first layer on. With a barrier behind them all read what is stored.
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

FEWEST = 2**10  # elements of a value that is worth storing
_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = frozenset({"dot_general", _CONVOLUTION})
_MADE_AGAIN = ELEMENTWISE | {"concatenate"}
_VIEWS = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})
_PASSED_ON = _VIEWS | {"broadcast_in_dim"}
_Readers: TypeAlias = dict[Var, list[Eqn]]


def stored_for_products(jaxpr: Jaxpr) -> Jaxpr:
    """The program with a barrier behind each such value; itself where there is none."""
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
    """Whether a product reads a value, and something else does."""
    own = list(_ends(v, readers))
    return len(own) > 1 and any(known.multiplies(eqn, given) for eqn, given in own)


def _ends(v: Var, readers: _Readers) -> Iterator[tuple[Eqn, Var]]:
    """The readers of a value, as it is or turned, each with what it reads."""
    seen = [v]
    for given in seen:
        for eqn in readers.get(given, ()):
            if eqn.primitive.name in _VIEWS:
                seen += eqn.outvars
            else:
                yield eqn, given


class _Known:
    """What functions do that a program calls, each looked into once, however often it is called."""

    def __init__(self) -> None:
        self._cheap: dict[int, tuple[Jaxpr, bool]] = {}
        self._multiplied: dict[int, tuple[Jaxpr, list[bool]]] = {}

    def cheap(self, eqn: Eqn) -> bool:
        """Whether a value is computed element by element, or joined of parts, so that XLA would make it again for each reader."""
        inner = [body for _, body in bodies(eqn)]
        return eqn.primitive.name in _MADE_AGAIN or (bool(inner) and all(map(self._all_cheap, inner)))

    def multiplies(self, eqn: Eqn, v: Var) -> bool:
        """Whether a reader is a product or calls a function that hands the value to one."""
        taken = (zip(eqn.invars, self._to_products(body), strict=True) for _, body in bodies(eqn))
        return eqn.primitive.name in _PRODUCTS or any(given is v and multiplied for own in taken for given, multiplied in own)

    def _all_cheap(self, body: Jaxpr) -> bool:
        if id(body) not in self._cheap:
            self._cheap[id(body)] = body, bool(body.eqns) and all(e.primitive.name in _PASSED_ON or self.cheap(e) for e in body.eqns)
        return self._cheap[id(body)][1]

    def _to_products(self, body: Jaxpr) -> list[bool]:
        """Which arguments of a function a product reads."""
        if id(body) not in self._multiplied:
            within = _readers(body.eqns)
            found = [any(self.multiplies(*end) for end in _ends(v, within)) for v in body.invars]
            self._multiplied[id(body)] = body, found
        return self._multiplied[id(body)][1]


def _stored(v: Var, readers: Iterable[Eqn]) -> Eqn:
    """A call of a function that stores a value, with channels last where a convolution reads it so."""
    aval = aval_of(v)
    convolved = [eqn.params["dimension_numbers"].lhs_spec for eqn in readers if eqn.primitive.name == _CONVOLUTION and eqn.invars[0] is v]
    order = [convolved[0][0], *convolved[0][2:], convolved[0][1]] if convolved else list(range(aval.ndim))
    back = sorted(range(len(order)), key=order.__getitem__)

    def stored(x: jax.Array) -> jax.Array:
        return lax.transpose(lax.optimization_barrier(lax.transpose(x, order)), back)

    (call,) = jax.make_jaxpr(jax.jit(stored))(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr.eqns
    return call.replace(outvars=[v])
