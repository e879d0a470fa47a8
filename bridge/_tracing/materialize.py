"""Optimization barriers: values that a program computes once and stores.

XLA's CPU compiler fuses cheap operations into every operation that reads them. The gradient of a residual stream, for example, has three
readers in each layer: the sum for the bias, and the products with the weight and with the input. Each reader then computes the chain from
the loss again. A barrier stops the fusion, but only in a program that is compiled with barriers (`bridge._xla.compile_options`). XLA
removes it from all other programs, where it costs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from bridge._ir.types import PyTree

from .context import context


def on_cpu() -> bool:
    """Whether the module that is traced is on a CPU. True also in code that jax traces later, such as a derivative rule."""
    return context.device.type == "cpu"


def materialize(x: jax.Array, enabled: bool | None = None) -> jax.Array:
    """Return x behind a barrier: x and its gradient are each stored before they are read.

    Args:
      enabled: whether to add the barrier; None: only on a CPU.
    """
    return lax.optimization_barrier(x) if _is_enabled(x, enabled) else x


def materialize_grad(x: jax.Array, enabled: bool | None = None) -> jax.Array:
    """Return x with a barrier on its gradient alone. `enabled` means the same as in `materialize`."""
    return _materialize_grad(x) if _is_enabled(x, enabled) else x


def barrier(xs: PyTree) -> PyTree:
    """Return the arrays behind one barrier: none is read before all of them are computed."""
    return lax.optimization_barrier(xs)


def _is_enabled(x: jax.Array, enabled: bool | None) -> bool:
    return (on_cpu() if enabled is None else enabled) and jnp.issubdtype(x.dtype, jnp.inexact)


@jax.custom_jvp
def _materialize_grad(x: jax.Array) -> jax.Array:
    return x


@_materialize_grad.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], lax.optimization_barrier(tangents[0])
