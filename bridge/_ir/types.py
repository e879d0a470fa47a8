"""The classes of jaxprs and pytrees, for annotations."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.extend.core import JaxprEqn as Eqn

__all__ = ["Atom", "ClosedJaxpr", "Eqn", "Jaxpr", "Literal", "PyTree", "ShapedArray", "Var", "aval_of"]

Atom: TypeAlias = Var | Literal
# Any nesting of containers that jax knows, with leaves of any class.
PyTree: TypeAlias = Any


def aval_of(atom: Atom) -> ShapedArray:
    """The shape and dtype of a variable or literal; jax declares the base class, which has neither."""
    return cast(ShapedArray, atom.aval)
