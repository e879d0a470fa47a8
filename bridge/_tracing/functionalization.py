"""In-place writes as pure functions of arrays: writes through a view, and writes that autograd does not record."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def scatter_through_view(view: Callable[[jax.Array], jax.Array], array: jax.Array, new: jax.Array) -> jax.Array:
    """Return a copy of `array` in which `view(array)` is `new`."""
    position = view(jnp.arange(array.size, dtype=jnp.int32).reshape(array.shape))
    return array.reshape(-1).at[position.reshape(-1)].set(new.reshape(-1), unique_indices=True).reshape(array.shape)


@jax.custom_jvp
def _write_without_grad(old: jax.Array, new: jax.Array) -> jax.Array:
    return new


@_write_without_grad.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]


def write_without_grad(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return `new` with the derivative of `old`. torch's graph does not record a write under `torch.no_grad` or through `detach()`."""
    return _write_without_grad(old, new) if jnp.issubdtype(old.dtype, jnp.inexact) else new
