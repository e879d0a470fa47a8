"""Kernel classes: leaves whose updates are the same function, which is traced once."""

# jax annotates many of its functions only partially, and modules of this project share names that begin with an underscore.
# pyright: reportUnknownMemberType=false, reportUnusedFunction=false

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from bridge._ir.types import PyTree

if TYPE_CHECKING:
    from jax.typing import ArrayLike

MAX_SCALAR_ELEMENTS = 64  # elements up to which a value that depends only on scalars counts as a scalar


class KernelClass(NamedTuple):
    """Leaves with one traceable function of (arrays, scalars, common).

    arrays, scalars: a pytree for each leaf, with equal structures, shapes and dtypes.
    rows: the number of rows of a bucket, whose arrays and scalars have a row for each parameter; the function is of one row. None for
      single parameters.
    size_class: kernel classes with an equal size class have the same function except for the size of their arrays. The function is
      traced for the largest, if the arrays are flat. None for a function that is not shared.
    table_rows: the row of each leaf, if `scalars` has one table for all leaves. Each leaf is then an outlined part of the program.
    """

    function: Callable[..., PyTree]
    arrays: Sequence[PyTree]
    scalars: Sequence[PyTree]
    rows: int | None = None
    size_class: Hashable = None
    table_rows: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """The number of elements in one row of an array."""
        return math.prod(jax.tree.leaves(self.arrays[0])[0].shape[-1:])


def jit_if_repeated(function: Callable[..., PyTree], times: int) -> Callable[..., PyTree]:
    """Return the function, jitted if it is called more than once, so that jax traces and lowers it once. XLA inlines each call."""
    return jax.jit(function) if times > 1 else function


def abstract_value(x: ArrayLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
