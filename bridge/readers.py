"""A traced program in which what a product reads is stored for all of its readers.

A matrix product or a convolution reads its sides from memory. Other readers of the same values (a sum beside it, a mask, the
gradient of a weight) XLA's CPU compiler gives what they were computed from, as long as that is cheap operations: in a chain
of layers each then computes those before it again, from the first layer on. With a barrier behind them all read what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from .products import bodies, replaced, throughout
from .whole import ELEMENTWISE

FEWEST = 2**10  # elements of a value that is worth storing
_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = frozenset({"dot_general", _CONVOLUTION})
_MADE_AGAIN = ELEMENTWISE | {"concatenate"}
_VIEWS = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})
_Readers = dict[Any, list[Any]]


def stored_for_products(jaxpr: Any) -> Any:
    """The program with a barrier behind each such value; itself where there is none."""
    return throughout(jaxpr, _own)


def _own(jaxpr: Any) -> Any:
    readers, found = _readers(jaxpr.eqns), []
    for eqn in jaxpr.eqns:
        wanted = [v for v in eqn.outvars if _cheap(eqn) and v.aval.size >= FEWEST and _shared(v, readers)]
        calls = {v: _stored(v, readers[v]) for v in wanted}
        own = eqn.replace(outvars=[calls[v].invars[0] if v in calls else v for v in eqn.outvars]) if calls else eqn
        found += [own, *calls.values()]
    return replaced(jaxpr, found)


def _readers(eqns: Iterable[Any]) -> _Readers:
    readers: _Readers = {}
    for eqn in eqns:
        for v in dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)):
            readers.setdefault(v, []).append(eqn)
    return readers


def _cheap(eqn: Any) -> bool:
    """Whether a value is computed element by element, or joined of parts, so that XLA would make it again for each reader."""
    inner = [e for _, body in bodies(eqn) for e in body.eqns]
    plain = _VIEWS | {"broadcast_in_dim"}
    return eqn.primitive.name in _MADE_AGAIN or (bool(inner) and all(_cheap(e) or e.primitive.name in plain for e in inner))


def _shared(v: Any, readers: _Readers) -> bool:
    """Whether a product reads a value, and something else does."""
    own = list(_ends(v, readers))
    return len(own) > 1 and any(_multiplies(eqn, given) for eqn, given in own)


def _ends(v: Any, readers: _Readers) -> Iterator[tuple[Any, Any]]:
    """The readers of a value, as it is or turned, each with what it reads."""
    seen = [v]
    for given in seen:
        for eqn in readers.get(given, ()):
            if eqn.primitive.name in _VIEWS:
                seen += eqn.outvars
            else:
                yield eqn, given


def _multiplies(eqn: Any, v: Any) -> bool:
    """Whether a reader is a product or calls a function that hands the value to one."""
    for _, body in bodies(eqn):
        within = _readers(body.eqns)
        own = [inner for inner, given in zip(body.invars, eqn.invars, strict=True) if given is v]
        if any(_multiplies(*end) for inner in own for end in _ends(inner, within)):
            return True
    return eqn.primitive.name in _PRODUCTS


def _stored(v: Any, readers: Iterable[Any]) -> Any:
    """A call of a function that stores a value, with channels last where a convolution reads it so."""
    convolved = [eqn.params["dimension_numbers"].lhs_spec for eqn in readers if eqn.primitive.name == _CONVOLUTION and eqn.invars[0] is v]
    order = [convolved[0][0], *convolved[0][2:], convolved[0][1]] if convolved else list(range(v.aval.ndim))
    back = sorted(range(len(order)), key=order.__getitem__)

    def stored(x: Any) -> Any:
        return lax.transpose(lax.optimization_barrier(lax.transpose(x, order)), back)

    (call,) = jax.make_jaxpr(jax.jit(stored))(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)).jaxpr.eqns
    return call.replace(outvars=[v])
