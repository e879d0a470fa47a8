"""Torch's fake quantization for each tensor or channel: rounding to a grid, with a gradient as if nothing were rounded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bridge._tracing.op_registry import op


@op("fake_quantize_per_tensor_affine")
def per_tensor(input: jax.Array, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> jax.Array:
    """Round to the nearest grid point. The gradient passes within the grid only. Scale and zero point have no gradient."""
    fractional = hasattr(zero_point, "dtype") and jnp.issubdtype(zero_point.dtype, jnp.floating)
    scale, zero = jnp.asarray(scale, jnp.float32), jnp.asarray(zero_point, jnp.float32)
    scale, zero = lax.stop_gradient((scale, zero))
    step = lax.stop_gradient(input).astype(jnp.float32) * (1 / scale)
    step = jnp.round(step + zero) if fractional else jnp.round(step) + zero
    nearest = ((jnp.clip(step, quant_min, quant_max) - zero) * scale).astype(input.dtype)
    inside = (step >= quant_min) & (step <= quant_max)
    return jnp.where(inside, nearest + (input - lax.stop_gradient(input)), nearest)


@op("fake_quantize_per_channel_affine")
def per_channel(input: jax.Array, scale: jax.Array, zero_point: jax.Array, axis: int, quant_min: int, quant_max: int) -> jax.Array:
    """Apply `per_tensor` with a scale and a zero point for each index of an axis."""
    across = [1] * input.ndim
    across[axis] = -1
    return per_tensor(input, scale.reshape(across), zero_point.reshape(across), quant_min, quant_max)
