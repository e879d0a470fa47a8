"""Writes into arrays, as functions: through a view, and such as torch's graph does not see."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def written_through(view: Callable[[jax.Array], jax.Array], array: jax.Array, new: jax.Array) -> jax.Array:
    """A copy of an array of which this view is `new`."""
    position = view(jnp.arange(array.size, dtype=jnp.int32).reshape(array.shape))
    return array.reshape(-1).at[position.reshape(-1)].set(new.reshape(-1), unique_indices=True).reshape(array.shape)


@jax.custom_jvp
def _unnoticed(old: jax.Array, new: jax.Array) -> jax.Array:
    return new


@_unnoticed.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]


def unnoticed(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` with the derivative of `old`: what is written under `torch.no_grad`, or through `detach()`, torch's graph does not see."""
    return _unnoticed(old, new) if jnp.issubdtype(old.dtype, jnp.inexact) else new
