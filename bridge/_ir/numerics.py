"""Arithmetic on arrays of any floating or complex dtype, for passes and update equations."""

# jax declares many of its functions in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from .types import Array

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def finfo(dtype: DTypeLike) -> np.finfo:
    """Return `jnp.finfo(dtype)` with a declared type: jax declares none."""
    return cast(np.finfo, jnp.finfo(dtype))


def real_view(x: jax.Array) -> jax.Array:
    """Return half types as float32, complex arrays as their (..., 2) real view, and other arrays unchanged."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], axis=-1)
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and finfo(x.dtype).bits < 32 else x


@overload
def scale_floating(x: jax.Array, factor: jax.Array | None) -> jax.Array: ...
@overload
def scale_floating(x: Array, factor: jax.Array | None) -> Array: ...
def scale_floating(x: Array, factor: jax.Array | None) -> Array:
    """Multiply a floating or complex array by a scalar, in the array's dtype. Return other arrays unchanged."""
    return x if factor is None or not jnp.issubdtype(x.dtype, jnp.inexact) else x * factor.astype(finfo(x.dtype).dtype)


def is_prng_key(x: object) -> bool:
    """Return whether an array or its abstract value has PRNG keys as elements."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
