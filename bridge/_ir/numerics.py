"""Arrays of real numbers, and multiplications that XLA must not leave out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def real(x: Any) -> Any:
    """Half types as float32, complex as its (..., 2) real view."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], axis=-1)
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32 else x


def times(x: Any, factor: Any) -> Any:
    """The product for floating arrays, in their own type."""
    return x if factor is None or not jnp.issubdtype(x.dtype, jnp.inexact) else x * factor.astype(jnp.finfo(x.dtype).dtype)


def is_key(x: Any) -> bool:
    """Whether an array, or its abstract value, has random keys as elements."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
