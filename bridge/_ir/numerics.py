"""Arrays of real numbers, and multiplications that XLA must not leave out."""

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
    """`jnp.finfo`, which jax leaves undeclared."""
    return cast(np.finfo, jnp.finfo(dtype))


def real(x: jax.Array) -> jax.Array:
    """Half types as float32, complex as its (..., 2) real view."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], axis=-1)
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and finfo(x.dtype).bits < 32 else x


@overload
def times(x: jax.Array, factor: jax.Array | None) -> jax.Array: ...
@overload
def times(x: Array, factor: jax.Array | None) -> Array: ...
def times(x: Array, factor: jax.Array | None) -> Array:
    """The product for floating arrays, in their own type."""
    return x if factor is None or not jnp.issubdtype(x.dtype, jnp.inexact) else x * factor.astype(finfo(x.dtype).dtype)


def is_key(x: object) -> bool:
    """Whether an array, or its abstract value, has random keys as elements."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
