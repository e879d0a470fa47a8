"""Torch's normalizations that also return the statistics, such as `native_layer_norm`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bridge._tracing.op_registry import Op, add_ops, functions_named, op
from bridge._tracing.tensor import as_array

from .layers import batch_norm, group_norm, layer_norm, moments


def _statistics(x: Any, axes: tuple[int, ...], eps: float) -> tuple[Any, Any]:
    """Return the mean and the inverse standard deviation. Half types are computed in float32, as in torch."""
    mean, var = moments(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x, axes)
    return mean, lax.rsqrt(var + eps)


@op("native_layer_norm")
def native_layer_norm(input: jax.Array, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Return `layer_norm`, the mean and the inverse standard deviation."""
    axes = tuple(range(input.ndim - len(tuple(normalized_shape)), input.ndim))
    return layer_norm(input, normalized_shape, weight, bias, eps), *_statistics(input, axes, eps)


@op("native_group_norm")
def native_group_norm(input: jax.Array, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float) -> Any:
    """Return `group_norm`, the mean and the inverse standard deviation."""
    grouped = input.reshape(N, group, C * HxW // group)
    return group_norm(input, group, weight, bias, eps), *(x[..., 0] for x in _statistics(grouped, (2,), eps))


def native_batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Return `batch_norm`, the mean and the inverse standard deviation. Without training the two statistics are empty."""
    out = batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = as_array(input)
    if not training:
        return out, *(jnp.zeros(0, x.dtype) for _ in range(2))
    axes = (0, *range(2, x.ndim))
    return out, *(y.reshape(x.shape[1]) for y in _statistics(x, axes, eps))


def _native_batch_norm_legit(input: Any, weight: Any, bias: Any, *rest: Any, **named: Any) -> Any:
    """Call `native_batch_norm` with or without running statistics: torch has both overloads under one name."""
    without: Any = isinstance(rest[0], bool) if rest else "running_mean" not in named
    running: Any = (None, None) if without else ()
    return native_batch_norm(input, weight, bias, *running, *rest, **named)


for _name, _handler in (("native_batch_norm", native_batch_norm), ("_native_batch_norm_legit", _native_batch_norm_legit)):
    add_ops(dict.fromkeys(functions_named(_name), Op(_handler, None, raw=True)))
