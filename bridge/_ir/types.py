"""Names for the classes of jaxprs and pytrees, for annotations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.extend.core import JaxprEqn as Eqn

__all__ = ["Array", "Atom", "ClosedJaxpr", "Eqn", "Jaxpr", "KeyPath", "Literal", "PyTree", "ShapedArray", "Var", "aval_of", "open_jaxpr"]

Atom: TypeAlias = Var | Literal
# The value of a variable while a jaxpr is evaluated: a tracer or a constant.
Array: TypeAlias = jax.Array | np.ndarray
# Nested containers that jax has registered, with leaves of any class.
PyTree: TypeAlias = Any
# The position of a leaf in a pytree: keys like `jax.tree_util.DictKey`.
KeyPath: TypeAlias = tuple[Hashable, ...]


def aval_of(atom: Atom) -> ShapedArray:
    """Return the shape and dtype of a variable or literal. jax declares a base class without either."""
    return cast(ShapedArray, atom.aval)


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr of a closed jaxpr, and an open one unchanged."""
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr))
