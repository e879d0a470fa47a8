"""Losses of torch.nn.functional."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bridge._tracing.op_registry import op
from bridge._tracing.promotion import promote

from .elementwise import disallow_negative_indices
from .subgradients import absolute


def register_loss(*names: str) -> Callable[[Any], Any]:
    """Register a loss with `op`. The loss also accepts `size_average` and `reduce`, torch's older forms of `reduction`."""

    def register(handler: Any) -> Any:
        signature = inspect.signature(handler)

        @functools.wraps(handler)
        def asked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            average, each = (given.arguments.pop(name, None) for name in ("size_average", "reduce"))
            if average is not None or each is not None:
                mean = "sum" if average is False else "mean"
                given.arguments["reduction"] = "none" if each is False else mean
            return handler(*given.args, **given.kwargs)

        return op(*names)(asked)

    return register


def reduce_loss(loss: Any, reduction: Any) -> Any:
    """Return the mean, the sum, or the unreduced loss. `reduction` is a name, or 1, 2 or 0 as in torch's C++."""
    return jnp.mean(loss) if reduction in ("mean", 1) else jnp.sum(loss) if reduction in ("sum", 2) else loss


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _take_one_per_row(axis: int, x: Any, index: Any) -> jax.Array:
    """Return one element of each row along an axis. The gradient is a comparison with the index, which needs no scatter into zeros."""
    return jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(index, axis), axis=axis), axis)


@_take_one_per_row.defjvp
def _(axis: int, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (x, index), (change, _) = primals, tangents
    own = jnp.expand_dims(index, axis) == lax.broadcasted_iota(index.dtype, x.shape, axis)
    return _take_one_per_row(axis, x, index), jnp.sum(jnp.where(own, change, jnp.zeros((), change.dtype)), axis)


def _nll_loss(log_p: Any, target: Any, weight: Any, ignore_index: int, reduction: str, smoothing: float) -> Any:
    """Return the loss of log-probabilities (N, C, ...) and classes (N, ...), for `nll_loss` and `cross_entropy`."""
    axis = 1 if log_p.ndim > 1 else 0
    valid = target != ignore_index
    safe = disallow_negative_indices(jnp.where(valid, target, 0), log_p.shape[axis])
    picked = -_take_one_per_row(axis, log_p, safe)
    share = jnp.ones(picked.shape, log_p.dtype) if weight is None else jnp.take(weight, safe).astype(log_p.dtype)
    share = jnp.where(valid, share, jnp.zeros((), log_p.dtype))
    loss = jnp.where(valid, picked * share, jnp.zeros((), log_p.dtype))
    if smoothing > 0:
        shape = (-1,) + (1,) * (log_p.ndim - axis - 1)
        spread = -jnp.sum(log_p if weight is None else log_p * weight.reshape(shape), axis)
        spread = jnp.where(valid, spread, jnp.zeros((), log_p.dtype)) / log_p.shape[axis]
        loss = (1 - smoothing) * loss + smoothing * spread
    return jnp.sum(loss) / jnp.sum(share) if reduction == "mean" else reduce_loss(loss, reduction)


@register_loss("cross_entropy", "cross_entropy_loss")
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the cross entropy of logits and classes, or of logits and class probabilities."""
    axis = 1 if input.ndim > 1 else 0
    log_p = jax.nn.log_softmax(input, axis)
    if jnp.issubdtype(target.dtype, jnp.integer):
        return _nll_loss(log_p, target, weight, ignore_index, reduction, label_smoothing)
    target = target.astype(log_p.dtype) * (1 - label_smoothing) + label_smoothing / input.shape[axis]
    if weight is not None:
        log_p = log_p * weight.reshape((-1,) + (1,) * (input.ndim - axis - 1))
    loss = -jnp.sum(log_p * target, axis)
    return jnp.sum(loss) / loss.size if reduction == "mean" else reduce_loss(loss, reduction)


@register_loss("nll_loss", "nll_loss_nd")
def nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Return the negative log-likelihood of classes under log-probabilities."""
    return _nll_loss(input, target, weight, ignore_index, reduction, 0.0)


@register_loss("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    """Return the binary cross entropy of logits and probabilities."""
    input, target = promote(input, target)
    positive = jax.nn.softplus(-input) * (1 if pos_weight is None else pos_weight)
    loss = target * positive + (1 - target) * jax.nn.softplus(input)
    return reduce_loss(loss if weight is None else loss * weight, reduction)


@register_loss("binary_cross_entropy")
def binary_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Any:
    """Return the binary cross entropy of probabilities. Logarithms are at least -100, as in torch."""
    loss = _binary_cross_entropy(input, target)
    return reduce_loss(loss if weight is None else loss * weight, reduction)


@jax.custom_jvp
def _binary_cross_entropy(p: Any, target: Any) -> Any:
    log = jnp.maximum(jnp.log(p), -100.0), jnp.maximum(jnp.log1p(-p), -100.0)
    return -(target * log[0] + (1 - target) * log[1])


@_binary_cross_entropy.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the tangent. The divisor is at least 1e-12, as in torch, so that the gradient of a saturated sigmoid is not NaN."""
    (p, target), (change, of_target) = primals, tangents
    odds = jnp.maximum(jnp.log1p(-p), -100.0) - jnp.maximum(jnp.log(p), -100.0)
    return _binary_cross_entropy(p, target), change * ((p - target) / jnp.maximum(p * (1 - p), 1e-12)) + of_target * odds


def _register_difference_loss(name: str, of: Any) -> None:
    """Register a loss that applies a function to the difference between input and target."""

    @register_loss(name)
    def loss(input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None) -> Any:
        a, b = promote(input, target)
        each = of(a - b)
        return reduce_loss(each if weight is None else each * weight, reduction)


_register_difference_loss("mse_loss", jnp.square)
_register_difference_loss("l1_loss", absolute)


@op("huber_loss")
def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> Any:
    """Return the Huber loss: quadratic for differences below delta, linear beyond."""
    a, b = promote(input, target)
    d = jnp.abs(a - b)
    loss = jnp.where(d < delta, 0.5 * d * d, delta * (d - 0.5 * delta))
    return reduce_loss(loss if weight is None else loss * weight, reduction)


@register_loss("smooth_l1_loss")
def smooth_l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> Any:
    """Return `huber_loss` / beta, or the absolute difference if beta is 0."""
    a, b = promote(input, target)
    d = jnp.abs(a - b)
    return reduce_loss(d if beta == 0 else jnp.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta), reduction)


@register_loss("kl_div")
def kl_div(input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False) -> Any:
    """Return the Kullback-Leibler divergence of log-probabilities and probabilities (or their logarithms)."""
    each = jnp.exp(target) * (target - input) if log_target else jax.scipy.special.xlogy(target, target) - target * input
    return jnp.sum(each) / input.shape[0] if reduction == "batchmean" else reduce_loss(each, reduction)
