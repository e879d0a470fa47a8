"""Texts that identify jaxprs: equal jaxprs have equal texts. `ShapeFreeText` leaves the size of a leaf out."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .classify import elementwise, keeps_elements, reduces, spreads
from .jaxpr import _ADDRESS, slice_of
from .types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Var, aval_of


class Shapeless:
    """The text of what a jaxpr computes for one leaf, without the leaf's shape.

    Args:
      closed: a jaxpr without calls, as `inline_calls` returns it.
      size: the number of elements of the leaf, more than 1.
      inputs: for each input variable its name, and whether it has one element for each element of the leaf.
    """

    def __init__(self, closed: ClosedJaxpr, size: int, inputs: Mapping[Var, tuple[str, bool]]) -> None:
        self._size = size
        jaxpr: Jaxpr = closed.jaxpr
        constants = zip(jaxpr.constvars, closed.consts, strict=True)
        self._eqns = jaxpr.eqns
        self._names = {var: (constant_text(value) + kind_text(var.aval), False) for var, value in constants} | dict(inputs)

    def text(self, results: Sequence[tuple[str, Atom]]) -> str | None:
        """Return one line for each equation, then one for each result. Return None where an equation depends on the leaf's shape."""
        names = dict(self._names)
        lines: list[str] = []

        def read(v: Atom) -> tuple[str, bool]:
            if isinstance(v, Literal):
                return f"{v.val if np.ndim(v.val) == 0 else constant_text(v.val)}:{kind_text(v.aval)}", False
            return names[v]

        for eqn in slice_of(self._eqns, [var for _, var in results]):
            operands = [read(v) for v in eqn.invars]
            line, of_leaf = self._line(eqn, operands)
            if line is None:
                return None
            if keeps_elements(eqn) and (of_leaf or aval_of(eqn.outvars[0]).size == 1):
                names[eqn.outvars[0]] = operands[0]
                continue
            for position, out in enumerate(eqn.outvars):
                names[out] = f"%{len(lines)}.{position}", of_leaf
            lines.append(line)
        return "\n".join([*lines, *(f"{name} = {read(var)[0]}" for name, var in results)])

    def _line(self, eqn: Eqn, operands: Sequence[tuple[str, bool]]) -> tuple[str | None, bool]:
        """Return the line of an equation, None where the line depends on the leaf's shape, and whether the results are of leaf size."""
        size, of_leaf = self._size, any(large for _, large in operands)
        dtypes = [str(aval_of(v).dtype) for v in eqn.outvars]
        plain = f"{eqn.primitive.name} {[name for name, _ in operands]} -> {dtypes}"
        if elementwise(eqn, size) and all(large or aval_of(v).size == 1 for v, (_, large) in zip(eqn.invars, operands, strict=True)):
            return f"{plain} {params_text(eqn.params)}", of_leaf
        if spreads(eqn, size):
            return f"spread {plain}", True
        if of_leaf:
            if reduces(eqn, size):
                return plain, False
            return (plain if keeps_elements(eqn) else None), True
        exact = [kind_text(v.aval) for v in (*eqn.invars, *eqn.outvars)]
        return f"{plain} {params_text(eqn.params)} {exact}", False


def params_text(params: Mapping[str, object], like: tuple[int, ...] | None = None) -> str:
    """Return the parameters of an equation as text. The shape `leaf_shape` is written as L."""
    return ", ".join(f"{name}={_param(value, like)}" for name, value in sorted(params.items()))


def _param(value: object, like: tuple[int, ...] | None = None) -> str:
    if isinstance(value, tuple) and value == like:
        return "L"
    if isinstance(value, tuple | list):
        return f"({', '.join(_param(v, like) for v in cast(Sequence[object], value))})"
    body = getattr(value, "jaxpr", value)
    if hasattr(body, "eqns"):
        jaxpr = cast(Jaxpr, body)
        names = {var: f"a{i}" for i, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

        def read(v: Atom) -> str:
            return f"{v.val}:{kind_text(v.aval, like)}" if isinstance(v, Literal) else names[v]

        lines: list[str] = []
        for n, eqn in enumerate(jaxpr.eqns):
            operands = ", ".join(map(read, eqn.invars))
            kinds = [kind_text(v.aval, like) for v in eqn.outvars]
            lines.append(f"{eqn.primitive.name}[{params_text(eqn.params, like)}] {operands} -> {kinds}")
            names |= {out: f"%{n}.{i}" for i, out in enumerate(eqn.outvars)}
        constants = list(map(constant_text, getattr(value, "consts", ())))
        return f"{{{constants} {'; '.join(lines)} => {', '.join(map(read, jaxpr.outvars))}}}"
    return _ADDRESS.sub("", str(value))


def kind_text(aval: object, like: tuple[int, ...] | None = None) -> str:
    """Return the dtype, shape and weak type of an abstract value as text. The shape `leaf_shape` is written as L."""
    shape = getattr(aval, "shape", None)
    return (
        f"{getattr(aval, 'dtype', aval)}{'L' if shape == like and shape != () else shape}{'w' if getattr(aval, 'weak_type', False) else ''}"
    )


def constant_text(value: Array) -> str:
    """Return all bytes of an array as text."""
    data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return f"const{np.asarray(data).tobytes()!r}"
