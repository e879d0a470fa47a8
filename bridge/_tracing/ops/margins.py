"""Margin losses, Poisson and Gaussian likelihoods, and CTC: mostly the C++ functions that torch.nn.functional's Python calls."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from bridge._tracing.functionalization import write_without_grad
from bridge._tracing.op_registry import builtin_op
from bridge._tracing.promotion import promote

from .distances import pairwise_distance
from .elementwise import add, clamp, disallow_negative_indices, to_floating
from .losses import reduce_loss, register_loss
from .subgradients import minimum


@builtin_op("margin_ranking_loss")
def margin_ranking_loss(input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: Any = 1) -> Any:
    """Return the loss of pairs: the first should be larger by the margin at target 1, smaller by it at -1."""
    input1, input2, target = promote(input1, input2, target)
    return reduce_loss(clamp(add(-target * (input1 - input2), float(margin)), 0), reduction)


@builtin_op("hinge_embedding_loss")
def hinge_embedding_loss(input: jax.Array, target: Any, margin: float = 1.0, reduction: Any = 1) -> Any:
    """Return the loss of distances: the distance at target 1, the margin minus the distance (at least 0) at -1."""
    zero = jnp.zeros((), input.dtype)
    apart = jnp.where(target != 1, clamp(jnp.asarray(margin, input.dtype) - input, 0), zero)
    return reduce_loss(apart + jnp.where(target != -1, input, zero), reduction)


@builtin_op("cosine_embedding_loss")
def cosine_embedding_loss(input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: Any = 1) -> Any:
    """Return the loss of pairs of vectors, which should be similar at target 1 and dissimilar at -1."""
    input1, input2 = promote(to_floating(input1), to_floating(input2))
    squares = [jnp.sum(x * x, -1) + 1e-12 for x in (input1, input2)]
    cosine = jnp.sum(input1 * input2, -1) / jnp.sqrt(squares[0] * squares[1])
    zero = jnp.zeros((), cosine.dtype)
    apart = jnp.where(target == -1, clamp(cosine - margin, 0), zero)
    return reduce_loss(jnp.where(target == 1, 1 - cosine, zero) + apart, reduction)


@builtin_op("triplet_margin_loss")
def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: Any = 1,
) -> Any:
    """Return the loss of triples: the anchor should be nearer to `positive` than to `negative` by the margin."""
    near, far = pairwise_distance(anchor, positive, p, eps), pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    return reduce_loss(clamp(margin + near - far, 0), reduction)


@builtin_op("multi_margin_loss")
def multi_margin_loss(input: Any, target: Any, p: float = 1, margin: float = 1, weight: Any = None, reduction: Any = 1) -> Any:
    """Return the loss of scores and classes: each other class should score lower by the margin."""
    input = jnp.atleast_1d(input)
    target = disallow_negative_indices(target, input.shape[-1]).reshape(input.shape[:-1])
    own = jnp.take_along_axis(input, target[..., None], -1, mode="fill")
    apart = jax.nn.relu(margin - own + input)
    apart = apart if p == 1 else apart * apart
    apart = apart if weight is None else apart * jnp.take(weight, target)[..., None]
    others = jnp.arange(input.shape[-1]) != target[..., None]
    return reduce_loss(jnp.sum(jnp.where(others, apart, jnp.zeros((), input.dtype)), -1) / input.shape[-1], reduction)


@builtin_op("multilabel_margin_loss")
def multilabel_margin_loss(input: Any, target: Any, reduction: Any = 1) -> Any:
    """Return the loss of scores and several classes, listed before the first -1: other classes should score 1 lower than each of them."""
    input, target = jnp.atleast_1d(input), jnp.atleast_1d(target)
    there = jnp.cumprod(target >= 0, -1).astype(bool)
    classes = jnp.where(there, target, 0)
    own = jnp.take_along_axis(input, classes, -1)
    others = ~jnp.any((classes[..., None] == jnp.arange(input.shape[-1])) & there[..., None], -2)
    apart = jax.nn.relu(1 - own[..., :, None] + input[..., None, :])
    counts = there[..., :, None] & others[..., None, :]
    return reduce_loss(jnp.sum(jnp.where(counts, apart, jnp.zeros((), input.dtype)), (-2, -1)) / max(1, input.shape[-1]), reduction)


@builtin_op("soft_margin_loss")
def soft_margin_loss(input: Any, target: Any, reduction: Any = 1) -> Any:
    """Return the logistic loss of scores and signs."""
    input, target = promote(input, target)
    return reduce_loss(jax.nn.softplus(-target * input), reduction)


@builtin_op("poisson_nll_loss")
def poisson_nll_loss(input: Any, target: Any, log_input: bool, full: bool, eps: float, reduction: Any) -> Any:
    """Return the loss of rates, or their logarithms, and counts. `full` adds Stirling's approximation for counts above one."""
    input, target = map(to_floating, promote(input, target))
    loss = jnp.exp(input) - target * input if log_input else input - target * jnp.log(input + eps)
    if full:
        above = target > 1
        count = jnp.where(above, target, jnp.ones((), target.dtype))
        loss += jnp.where(above, count * jnp.log(count) - count + 0.5 * jnp.log(2 * math.pi * count), jnp.zeros((), loss.dtype))
    return reduce_loss(loss, reduction)


@register_loss("gaussian_nll_loss")
def gaussian_nll_loss(input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Any:
    """Return the loss of means, values and variances. torch's Python first checks for negative variances, which a trace cannot do."""
    if not hasattr(var, "ndim"):
        var = jnp.full(input.shape, var, input.dtype)
    elif var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var[..., None]
    input, target, var = promote(input, target, var)
    var = write_without_grad(var, jnp.maximum(var, eps))
    loss = 0.5 * (jnp.log(var) + jnp.square(input - target) / var)
    return reduce_loss(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


_LOG_ZERO = -1e30  # stands for log(0); sums of it stay finite in float32


@builtin_op("ctc_loss")
def ctc_loss(
    log_probs: jax.Array,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = 1,
    zero_infinity: bool = False,
) -> Any:
    """Return the loss of log-probabilities (T, N, C) and unaligned sequences, by optax's recursion.

    Graves et al., https://doi.org/10.1145/1143844.1143891. As in torch, the gradient is the one with respect to logits, with the input as
    their log_softmax: exp(log_probs) minus the expectation over alignments.
    """
    lp = log_probs if log_probs.ndim == 3 else log_probs[:, None]
    frames, batch = lp.shape[:2]
    lengths, labels = (jnp.asarray(x, jnp.int32).reshape(batch) for x in (input_lengths, target_lengths))
    targets, beyond = _pad_targets(targets, target_lengths, labels, batch)
    lp = jnp.maximum(jnp.swapaxes(lp, 0, 1), jnp.asarray(_LOG_ZERO, lp.dtype))
    ended = jnp.arange(frames) >= lengths[:, None]
    with jax.default_matmul_precision("highest"):  # optax selects labels by a matrix product with one-hot rows
        loss = optax.ctc_loss(lp, ended.astype(lp.dtype), targets, beyond.astype(lp.dtype), blank_id=blank, log_epsilon=_LOG_ZERO)
    whole, share = jax.nn.logsumexp(lp, -1), jnp.sum(jnp.exp(lp), -1)
    loss -= jnp.sum(jnp.where(ended, 0, whole + lax.stop_gradient(share) - share), -1)  # optax normalizes the input first
    loss = loss.astype(lp.dtype)
    impossible = loss > -_LOG_ZERO / 2
    loss = loss * jnp.where(impossible, 0 if zero_infinity else jnp.inf, 1).astype(loss.dtype)
    if reduction in (1, "mean"):
        loss = loss / jnp.maximum(labels, 1).astype(loss.dtype)
    out = reduce_loss(loss, reduction)
    return out[0] if log_probs.ndim == 2 and out.ndim else out


def _pad_targets(targets: Any, given: Any, lengths: Any, batch: int) -> tuple[Any, Any]:
    """Return targets as rows, and the mask of positions beyond the end of each row. torch accepts concatenated targets too."""
    if targets.ndim == 1:
        known = not isinstance(given, Tracer)
        longest = int(np.max(np.asarray(given), initial=0)) if known else targets.shape[0]
        at = (jnp.cumsum(lengths) - lengths)[:, None] + jnp.arange(longest)
        targets = jnp.take(targets, at, mode="clip") if targets.size else jnp.zeros((batch, longest), jnp.int32)
    if targets.shape[1] == 0:
        targets = jnp.zeros((batch, 1), jnp.int32)
    beyond = jnp.arange(targets.shape[1]) >= lengths[:, None]
    return jnp.where(beyond, 0, targets), beyond
