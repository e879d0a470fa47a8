"""Leaves whose updates are the same function."""

# jax declares many of its functions in part only, and modules of ours share names that begin with an underscore.
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

_FEW = 64  # elements up to which a value that depends on scalars alone is one of them


class Alike(NamedTuple):
    """Leaves with one function of (arrays, scalars, common), which jax can trace.

    arrays, scalars: for each leaf a pytree; equal structures, shapes and dtypes.
    rows: of a leaf that stands for so many, one in each row of its arrays and scalars, their number; the function is of one row.
    family: kinds of one family have one function but for the size of their arrays: it is traced for the largest, if those are flat.
      None for a kind by itself.
    at: where the scalars of all leaves are given once, as columns, the row of each leaf in those. Each is then a `part` of the program.
    """

    function: Callable[..., PyTree]
    arrays: Sequence[PyTree]
    scalars: Sequence[PyTree]
    rows: int | None = None
    family: Hashable = None
    at: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """The elements of one row of an array."""
        return math.prod(jax.tree.leaves(self.arrays[0])[0].shape[-1:])


def _repeated(function: Callable[..., PyTree], times: int) -> Callable[..., PyTree]:
    """The function, traced and lowered once, and called from then on, if that is asked for more than once: XLA writes out each call."""
    return jax.jit(function) if times > 1 else function


def _shape(x: ArrayLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
