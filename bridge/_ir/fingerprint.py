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

from .classify import is_broadcast, is_elementwise, is_full_reduction, is_reshape
from .jaxpr import OBJECT_ADDRESS, backward_slice
from .types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Var, aval_of


class ShapeFreeText:
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
        self._names = {var: (constant_text(value) + aval_text(var.aval), False) for var, value in constants} | dict(inputs)

    def text(self, results: Sequence[tuple[str, Atom]]) -> str | None:
        """Return one line for each equation, then one for each result. Return None where an equation depends on the leaf's shape."""
        names = dict(self._names)
        lines: list[str] = []

        def read(v: Atom) -> tuple[str, bool]:
            if isinstance(v, Literal):
                return f"{v.val if np.ndim(v.val) == 0 else constant_text(v.val)}:{aval_text(v.aval)}", False
            return names[v]

        for eqn in backward_slice(self._eqns, [var for _, var in results]):
            operands = [read(v) for v in eqn.invars]
            line, of_leaf = self._line(eqn, operands)
            if line is None:
                return None
            if is_reshape(eqn) and (of_leaf or aval_of(eqn.outvars[0]).size == 1):
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
        if is_elementwise(eqn, size) and all(large or aval_of(v).size == 1 for v, (_, large) in zip(eqn.invars, operands, strict=True)):
            return f"{plain} {params_text(eqn.params)}", of_leaf
        if is_broadcast(eqn, size):
            return f"spread {plain}", True
        if of_leaf:
            if is_full_reduction(eqn, size):
                return plain, False
            return (plain if is_reshape(eqn) else None), True
        exact = [aval_text(v.aval) for v in (*eqn.invars, *eqn.outvars)]
        return f"{plain} {params_text(eqn.params)} {exact}", False


def params_text(params: Mapping[str, object], leaf_shape: tuple[int, ...] | None = None) -> str:
    """Return the parameters of an equation as text. The shape `leaf_shape` is written as L."""
    return ", ".join(f"{name}={_param_text(value, leaf_shape)}" for name, value in sorted(params.items()))


def _param_text(value: object, leaf_shape: tuple[int, ...] | None = None) -> str:
    if isinstance(value, tuple) and value == leaf_shape:
        return "L"
    if isinstance(value, tuple | list):
        return f"({', '.join(_param_text(v, leaf_shape) for v in cast(Sequence[object], value))})"
    body = getattr(value, "jaxpr", value)
    if hasattr(body, "eqns"):
        jaxpr = cast(Jaxpr, body)
        names = {var: f"a{i}" for i, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

        def read(v: Atom) -> str:
            return f"{v.val}:{aval_text(v.aval, leaf_shape)}" if isinstance(v, Literal) else names[v]

        lines: list[str] = []
        for n, eqn in enumerate(jaxpr.eqns):
            operands = ", ".join(map(read, eqn.invars))
            kinds = [aval_text(v.aval, leaf_shape) for v in eqn.outvars]
            lines.append(f"{eqn.primitive.name}[{params_text(eqn.params, leaf_shape)}] {operands} -> {kinds}")
            names |= {out: f"%{n}.{i}" for i, out in enumerate(eqn.outvars)}
        constants = list(map(constant_text, getattr(value, "consts", ())))
        return f"{{{constants} {'; '.join(lines)} => {', '.join(map(read, jaxpr.outvars))}}}"
    return OBJECT_ADDRESS.sub("", str(value))


def aval_text(aval: object, leaf_shape: tuple[int, ...] | None = None) -> str:
    """Return the dtype, shape and weak type of an abstract value as text. The shape `leaf_shape` is written as L."""
    shape = getattr(aval, "shape", None)
    shown = "L" if shape == leaf_shape and shape != () else shape
    return f"{getattr(aval, 'dtype', aval)}{shown}{'w' if getattr(aval, 'weak_type', False) else ''}"


def constant_text(value: Array) -> str:
    """Return all bytes of an array as text."""
    data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return f"const{np.asarray(data).tobytes()!r}"
