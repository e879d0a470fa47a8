"""The metrics of an update: for each parameter the sums of squares of its gradient, of its change and of its old value."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp

from bridge._ir.numerics import real_view, scale_floating

from .plan import LeafPlan

# The columns of the result.
GRAD, UPDATE, PARAM = range(3)


def leaf_metrics(
    leaf: LeafPlan,
    old: jax.Array,
    new: jax.Array,
    grad: jax.Array,
    mask: jax.Array | None,
    row_sizes: jax.Array,
    unscaling: jax.Array | None,
) -> jax.Array:
    """Return the sums of squares of one leaf, float64 (rows, 3); a parameter is one row.

    Elements that a mask freezes do not count, nor does the padding of a bucket. Half types are computed in float32.

    Args:
      leaf: the leaf.
      old, new: the parameter before and after the update.
      grad: its gradient.
      mask: the elements that are trained; None for all.
      row_sizes: the number of elements of each row.
      unscaling: the factor that undoes the loss scale, or None.
    """
    kept = mask if leaf.rows is None else jax.lax.broadcasted_iota(row_sizes.dtype, old.shape, 1) < row_sizes[:, None]

    def sum_of_squares(x: jax.Array) -> jax.Array:
        x = x if kept is None else jnp.where(kept, x, jnp.zeros_like(x))
        squares = jnp.square(real_view(x)).reshape(leaf.rows or 1, -1)
        return jnp.sum(squares, axis=1).astype(jnp.float64)

    wide_old, wide_new = _at_least_float32(old), _at_least_float32(new)
    columns = (scale_floating(_at_least_float32(grad), unscaling), wide_new - wide_old, wide_old)
    return jnp.stack(list(map(sum_of_squares, columns)), axis=1)


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.complexfloating) else real_view(x)
