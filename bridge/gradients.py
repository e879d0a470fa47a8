"""What an update must know of all its gradients before the first element is updated: their norm, and whether all are finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .problem import real, times


def found_in(clip: bool, grads: Sequence[Any], masks: Sequence[Any], lives: Sequence[Any], scaling: Sequence[Any], before: Any) -> Any:
    """What was found of other gradients, and of these: float64 (2,), the sum of their squares, and a 0 that is NaN if one is not finite.

    Of a scaled loss both are one reading of each gradient: a sum that is finite had finite terms. One that is not may only
    have overflown, so the terms are then looked at one by one, which takes XLA three times as long.
    """
    seen = []
    for g, mask, live in zip(grads, masks, lives, strict=True):
        trained = mask if live is None else along(live, g)
        seen.append(real(g if trained is None else jnp.where(trained, g, jnp.zeros_like(g))))
    if not scaling:
        return before + jnp.stack([_sum(g * g for g in seen), jnp.zeros((), jnp.float64)])
    total, unscaling = _sum(g * g if clip else g for g in seen), _unscaling(scaling)

    def at_once() -> Any:
        return jnp.stack([total * unscaling**2 if clip else jnp.zeros_like(total), jnp.zeros_like(total)])

    def one_by_one() -> Any:
        # 0 * g is 0 where g is finite and else NaN: the predicates of `isfinite` would be stored.
        squares = _sum(jnp.square(times(g, unscaling)) for g in seen) if clip else jnp.zeros_like(total)
        return jnp.stack([squares, _sum(g * jnp.zeros((), g.dtype) for g in seen)])

    return before + jax.lax.cond(jnp.isfinite(total), at_once, one_by_one)


def _sum(arrays: Iterable[Any]) -> Any:
    """The sum over all elements of all arrays, float64; each array's own in its type."""
    return sum((jnp.sum(x).astype(jnp.float64) for x in arrays), jnp.zeros((), jnp.float64))


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
