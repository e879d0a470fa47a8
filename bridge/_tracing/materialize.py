"""Values that a program computes once and stores, where XLA would compute a chain of cheap operations anew for each of its readers.

XLA's CPU compiler fuses what is cheap into every reader: the gradient that comes down a residual stream into the bias's
sum, the product with the weight and that with the input, at each layer again from the loss on. A barrier ends that, but only in a
program that is compiled with barriers (`compile_options.of_training`); in others XLA takes it out, and it costs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from bridge._ir.types import PyTree

from .context import TRACE


def on_cpu() -> bool:
    """Whether the module whose code is being traced is on a CPU; True in what jax traces later, such as a rule of derivatives."""
    return TRACE.device.type == "cpu"


def once(x: jax.Array, wanted: bool | None = None) -> jax.Array:
    """x, stored before it is read; so is its gradient. As it is where this is not `wanted`: None for `on_cpu`."""
    return lax.optimization_barrier(x) if _applies(x, wanted) else x


def gradient_once(x: jax.Array, wanted: bool | None = None) -> jax.Array:
    """x, whose gradient is stored before it is read; x itself is computed wherever it is read. `wanted` as of `once`."""
    return _with_stored_gradient(x) if _applies(x, wanted) else x


def together(xs: PyTree) -> PyTree:
    """Arrays, none of which is read before all are there: what else reads the memory that comes next is done by then."""
    return lax.optimization_barrier(xs)


def _applies(x: jax.Array, wanted: bool | None) -> bool:
    return (on_cpu() if wanted is None else wanted) and jnp.issubdtype(x.dtype, jnp.inexact)


@jax.custom_jvp
def _with_stored_gradient(x: jax.Array) -> jax.Array:
    return x


@_with_stored_gradient.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], lax.optimization_barrier(tangents[0])
