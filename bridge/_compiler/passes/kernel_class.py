"""Leaves whose updates are the same function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_FEW = 64  # elements up to which a value that depends on scalars alone is one of them


class Alike(NamedTuple):
    """Leaves with one function of (arrays, scalars, common), which jax can trace.

    arrays, scalars: for each leaf a pytree; equal structures, shapes and dtypes.
    rows: of a leaf that stands for so many, one in each row of its arrays and scalars, their number; the function is of one row.
    family: kinds of one family have one function but for the size of their arrays: it is traced for the largest, if those are flat.
      None for a kind by itself.
    at: where the scalars of all leaves are given once, as columns, the row of each leaf in those. Each is then a `part` of the program.
    """

    function: Callable[..., Any]
    arrays: Sequence[Any]
    scalars: Sequence[Any]
    rows: int | None = None
    family: Any = None
    at: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """The elements of one row of an array."""
        return math.prod(jax.tree.leaves(self.arrays[0])[0].shape[-1:])


def _repeated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """The function, traced and lowered once, and called from then on, if that is asked for more than once: XLA writes out each call."""
    return jax.jit(function) if times > 1 else function


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
