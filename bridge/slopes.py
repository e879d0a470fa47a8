"""Functions that have torch's derivatives where jax has others, or none: at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def absolute(x: Any) -> Any:
    """The absolute value; its derivative at zero is zero, as torch's."""
    return jnp.abs(x)


@absolute.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (change,) = primals, tangents
    return absolute(x), jnp.real(jnp.conj(jnp.sign(x)) * change) if jnp.iscomplexobj(x) else jnp.sign(x) * change


def flat_at_zero(function: Callable[[Any], Any], x: Any) -> Any:
    """A function that is zero at zero, where its derivative is taken as zero too."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), function(jnp.where(zero, jnp.ones_like(x), x)))


def root(square: Any) -> Any:
    """The square root; its derivative at zero is zero, as that of torch's norms and standard deviations."""
    return flat_at_zero(jnp.sqrt, square)


def angle(y: Any, x: Any) -> Any:
    """The angle of a point; at the origin without a derivative, as torch's."""
    origin = (y == 0) & (x == 0)
    return jnp.where(origin, lax.stop_gradient(jnp.arctan2(y, x)), jnp.arctan2(y, jnp.where(origin, jnp.ones_like(x), x)))
