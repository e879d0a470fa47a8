"""What an update must know of all its gradients before the first element is updated: their norm, and whether all are finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bridge._ir.numerics import real, times

# Platforms whose programs choose between two ways by themselves. On a GPU the host would wait for what is chosen by, in `step()`
# (openxla/xla, backends/gpu/runtime/conditional_thunk.cc): there both sums are taken, which no device has timed yet.
CHOOSING = {"cpu"}


def found_in(
    clip: bool, grads: Sequence[Any], masks: Sequence[Any], lives: Sequence[Any], scaling: Sequence[Any], before: Any, platform: str
) -> Any:
    """What was found of other gradients, and of these: float64 (2,), the sum of their squares, and a 0 that is NaN if one is not finite.

    Of a scaled loss both are one reading of each gradient: a sum that is finite had finite terms. One that is not may only
    have overflown, so the terms are then looked at one by one, which takes XLA's CPU code three times as long.
    """
    seen = []
    for g, mask, live in zip(grads, masks, lives, strict=True):
        trained = mask if live is None else along(live, g)
        seen.append(real(g if trained is None else jnp.where(trained, g, jnp.zeros_like(g))))

    def sum_of(term: Callable[[Any], Any]) -> Any:
        """Each array's own in its type."""
        return sum((jnp.sum(term(g)).astype(jnp.float64) for g in seen), jnp.zeros((), jnp.float64))

    return before + found_by(sum_of, clip, scaling, platform)


def found_by(sum_of: Callable[[Callable[[Any], Any]], Any], clip: bool, scaling: Sequence[Any], platform: str) -> Any:
    """As of `found_in`, of gradients of which `sum_of` gives the sum over all elements of what a function makes of each, float64."""
    nothing = jnp.zeros((), jnp.float64)
    if not scaling:
        return jnp.stack([sum_of(jnp.square), nothing])
    unscaling = _unscaling(scaling)

    def one_by_one() -> Any:
        # 0 * g is 0 where g is finite and else NaN: the predicates of `isfinite` would be stored.
        squares = sum_of(lambda g: jnp.square(times(g, unscaling))) if clip else nothing
        return jnp.stack([squares, sum_of(lambda g: g * jnp.zeros((), g.dtype))])

    if platform not in CHOOSING:
        return one_by_one()
    total = sum_of(jnp.square if clip else lambda g: g)
    at_once = lambda: jnp.stack([total * unscaling**2 if clip else nothing, nothing])  # noqa: E731
    return jax.lax.cond(jnp.isfinite(total), at_once, one_by_one)


def _unscaling(scaling: Sequence[Any]) -> Any:
    """The factor that undoes the loss scale, if there is one."""
    return 1 / scaling[0][0].astype(jnp.float64) if scaling else None


def consequences(clip: bool, bound: Any, scaling: Sequence[Any], measure: Any) -> tuple[Any, Any, list[Any]]:
    """What the gradients are to be multiplied by, whether to skip the update, and the count of skipped ones with this.

    The factor brings the global norm down to the bound, as torch's clip_grad_norm_: one scalar, so that no clipped gradient is
    ever stored. A norm of NaN or infinity gives what torch's gives.
    """
    scale, skip, skipped = _unscaling(scaling), None, []
    if clip:
        factor = jnp.minimum(bound / (jnp.sqrt(measure[0]) + 1e-6), 1.0)
        scale = factor if scale is None else factor * scale
    if scaling:
        _, found, count = scaling
        skip = (found[0] > 0) | ~jnp.isfinite(measure[1])
        skipped = [count + skip.astype(count.dtype)]
    return scale, skip, skipped


def along(live: Any, x: Any) -> Any:
    """A flag for each row, ready to be broadcast over the rows of x."""
    return live.reshape(live.shape + (1,) * (x.ndim - 1))
