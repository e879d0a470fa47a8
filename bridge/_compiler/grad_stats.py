"""The statistics of all gradients that an update needs before it changes the first element: their norm, and whether all are finite."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from bridge._ir.numerics import real_view, scale_floating
from bridge._ir.types import Array

# Platforms on which a program branches with `cond`. On a GPU the host would wait for the predicate in `step()`
# (openxla/xla, backends/gpu/runtime/conditional_thunk.cc), so programs for a GPU compute both sums.
COND_PLATFORMS = {"cpu"}


def grad_stats(
    clip: bool,
    grads: Sequence[jax.Array],
    weights: Sequence[float],
    masks: Sequence[jax.Array | None],
    row_flags: Sequence[jax.Array | None],
    loss_scaling: Sequence[jax.Array],
    previous_stats: Array,
    platform: str,
) -> Array:
    """Return the statistics of these gradients, added to previous ones.

    The statistics are float64 (2,): the sum of the squares, and a 0 that is NaN if an element is not finite. For a scaled loss one
    pass over the gradients serves both, because a finite sum has only finite terms. A sum that is not finite may only have overflowed.
    A second pass, which is slower, then checks each element.

    Args:
      clip: whether the sum of the squares is needed.
      grads: the gradients.
      weights: for each gradient the factor of its squares.
      masks: for each gradient which elements count; None for all.
      row_flags: for each bucket which rows count; None for other gradients.
      loss_scaling: as in `UpdateArguments`.
      previous_stats: the statistics of other gradients.
      platform: the platform of the program.
    """
    trained_grads: list[jax.Array] = []
    for g, mask, live in zip(grads, masks, row_flags, strict=True):
        trained = mask if live is None else broadcast_rows(live, g)
        trained_grads.append(real_view(g if trained is None else jnp.where(trained, g, jnp.zeros_like(g))))

    def sum_of(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return the sum over all gradients; each one is summed in its own dtype."""
        sums = [jnp.sum(term(g)).astype(jnp.float64) for g in trained_grads]
        return sum((x if weight == 1 else x * weight for x, weight in zip(sums, weights, strict=True)), jnp.zeros((), jnp.float64))

    return previous_stats + stats_by(sum_of, clip, loss_scaling, platform)


def stats_by(
    sum_of: Callable[[Callable[[jax.Array], jax.Array]], jax.Array], clip: bool, loss_scaling: Sequence[jax.Array], platform: str
) -> jax.Array:
    """Return the statistics of gradients that only `sum_of` reads.

    Args:
      sum_of: takes an elementwise function and returns the float64 sum of its results over all gradients.
      clip: whether the sum of the squares is needed.
      loss_scaling: as in `grad_stats`.
      platform: the platform of the program.
    """
    nothing = jnp.zeros((), jnp.float64)
    if not loss_scaling:
        return jnp.stack([sum_of(jnp.square), nothing])
    unscaling = inverse_loss_scale(loss_scaling)

    def one_by_one() -> jax.Array:
        # g * 0 is 0 where g is finite, and otherwise NaN. XLA would materialize the predicates of `isfinite`.
        squares = sum_of(lambda g: jnp.square(scale_floating(g, unscaling))) if clip else nothing
        return jnp.stack([squares, sum_of(lambda g: g * jnp.zeros((), g.dtype))])

    if platform not in COND_PLATFORMS:
        return one_by_one()
    total = sum_of(jnp.square if clip else lambda g: g)

    def from_total() -> jax.Array:
        return jnp.stack([total * unscaling**2 if clip else nothing, nothing])

    return cast(jax.Array, jax.lax.cond(jnp.isfinite(total), from_total, one_by_one))


def inverse_loss_scale(loss_scaling: Sequence[jax.Array]) -> jax.Array:
    """Return the factor that undoes the loss scale."""
    return 1 / loss_scaling[0][0].astype(jnp.float64)


def clip_and_skip(
    clip: bool, max_norm: jax.Array, loss_scaling: Sequence[jax.Array], stats: Array
) -> tuple[jax.Array | None, jax.Array | None, list[jax.Array]]:
    """Return the factor of the gradients, whether to skip the update, and the new count of skipped updates.

    The factor brings the global norm down to `max_norm`, as `torch.nn.utils.clip_grad_norm_` does. It is one scalar, so no clipped
    gradient is materialized. A norm of NaN or infinity has the same effect as in torch.
    """
    scale, skip = inverse_loss_scale(loss_scaling) if loss_scaling else None, None
    skipped: list[jax.Array] = []
    if clip:
        factor = jnp.minimum(max_norm / (jnp.sqrt(stats[0]) + 1e-6), 1.0)
        scale = factor if scale is None else factor * scale
    if loss_scaling:
        _, found, count = loss_scaling
        skip = (found[0] > 0) | ~jnp.isfinite(stats[1])
        skipped = [count + skip.astype(count.dtype)]
    return scale, skip, skipped


def broadcast_rows(row_flags: jax.Array, x: Array) -> jax.Array:
    """Return one flag for each row in a shape that broadcasts over the rows of `x`."""
    return row_flags.reshape(row_flags.shape + (1,) * (x.ndim - 1))
