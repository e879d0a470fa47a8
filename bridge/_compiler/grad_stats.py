"""What an update must know of all its gradients before the first element is updated: their norm, and whether all are finite."""

# jax declares many of its functions in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from bridge._ir.numerics import real, times
from bridge._ir.types import Array

# Platforms whose programs choose between two ways by themselves. On a GPU the host would wait for what is chosen by, in `step()`
# (openxla/xla, backends/gpu/runtime/conditional_thunk.cc): there both sums are taken, which no device has timed yet.
CHOOSING = {"cpu"}


def found_in(
    clip: bool,
    grads: Sequence[jax.Array],
    masks: Sequence[jax.Array | None],
    lives: Sequence[jax.Array | None],
    scaling: Sequence[jax.Array],
    before: Array,
    platform: str,
) -> Array:
    """What was found of other gradients, and of these: float64 (2,), the sum of their squares, and a 0 that is NaN if one is not finite.

    Of a scaled loss both are one reading of each gradient: a sum that is finite had finite terms. One that is not may only
    have overflown, so the terms are then looked at one by one, which takes XLA's CPU code three times as long.
    """
    seen: list[jax.Array] = []
    for g, mask, live in zip(grads, masks, lives, strict=True):
        trained = mask if live is None else along(live, g)
        seen.append(real(g if trained is None else jnp.where(trained, g, jnp.zeros_like(g))))

    def sum_of(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Each array's own in its type."""
        return sum((jnp.sum(term(g)).astype(jnp.float64) for g in seen), jnp.zeros((), jnp.float64))

    return before + found_by(sum_of, clip, scaling, platform)


def found_by(
    sum_of: Callable[[Callable[[jax.Array], jax.Array]], jax.Array], clip: bool, scaling: Sequence[jax.Array], platform: str
) -> jax.Array:
    """As of `found_in`, of gradients of which `sum_of` gives the sum over all elements of what a function makes of each, float64."""
    nothing = jnp.zeros((), jnp.float64)
    if not scaling:
        return jnp.stack([sum_of(jnp.square), nothing])
    unscaling = _unscaling(scaling)

    def one_by_one() -> jax.Array:
        # 0 * g is 0 where g is finite and else NaN: the predicates of `isfinite` would be stored.
        squares = sum_of(lambda g: jnp.square(times(g, unscaling))) if clip else nothing
        return jnp.stack([squares, sum_of(lambda g: g * jnp.zeros((), g.dtype))])

    if platform not in CHOOSING:
        return one_by_one()
    total = sum_of(jnp.square if clip else lambda g: g)

    def at_once() -> jax.Array:
        return jnp.stack([total * unscaling**2 if clip else nothing, nothing])

    return cast(jax.Array, jax.lax.cond(jnp.isfinite(total), at_once, one_by_one))


def _unscaling(scaling: Sequence[jax.Array]) -> jax.Array:
    """The factor that undoes the loss scale."""
    return 1 / scaling[0][0].astype(jnp.float64)


def consequences(
    clip: bool, bound: jax.Array, scaling: Sequence[jax.Array], measure: Array
) -> tuple[jax.Array | None, jax.Array | None, list[jax.Array]]:
    """What the gradients are to be multiplied by, whether to skip the update, and the count of skipped ones with this.

    The factor brings the global norm down to the bound, as torch's clip_grad_norm_: one scalar, so that no clipped gradient is
    ever stored. A norm of NaN or infinity gives what torch's gives.
    """
    scale, skip = _unscaling(scaling) if scaling else None, None
    skipped: list[jax.Array] = []
    if clip:
        factor = jnp.minimum(bound / (jnp.sqrt(measure[0]) + 1e-6), 1.0)
        scale = factor if scale is None else factor * scale
    if scaling:
        _, found, count = scaling
        skip = (found[0] > 0) | ~jnp.isfinite(measure[1])
        skipped = [count + skip.astype(count.dtype)]
    return scale, skip, skipped


def along(live: jax.Array, x: Array) -> jax.Array:
    """A flag for each row, ready to be broadcast over the rows of x."""
    return live.reshape(live.shape + (1,) * (x.ndim - 1))
