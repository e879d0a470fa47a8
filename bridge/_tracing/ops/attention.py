"""softmax(scores) @ value with the gradient of FlashAttention, which reads the weights once.

Dao et al., https://arxiv.org/abs/2205.14135, algorithm 4: the scores have the gradient P * (g v^T - D), where D is the sum of g * o over a
row. The rule is written as a tangent, and its transpose is this gradient. So forward mode and second derivatives work too.

The stored weights are exponentials that are not divided by their row sums. The rows of the product, or of its gradient, are divided
instead. XLA's CPU library then sums, multiplies and divides in one pass over the exponentials. A second pass multiplies the scores,
applies the mask and takes the exponentials. It fuses minima and maxima but no selects, so the mask is a minimum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from bridge._tracing.materialize import materialize, materialize_grad, on_cpu


@jax.custom_jvp
def mask_scores(scores: Any, mask: Any) -> jax.Array:
    """Return the scores where `mask` (bool) is True, else -inf. There the gradient is zero, because the weight is zero."""
    return jnp.minimum(scores, jnp.where(mask, jnp.inf, -jnp.inf).astype(scores.dtype))


@mask_scores.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    out = mask_scores(*primals)
    return out, jnp.broadcast_to(tangents[0], out.shape)


def softmax_matmul(scores: Any, kept: Any, value: Any) -> jax.Array:
    """Return the mean of the values, weighted by the softmax over the last dim of the scores, in the dtype of the values.

    A row of scores that are all -inf gives zeros. `kept`: factors of the weights (dropout), or None.
    """
    return _softmax_matmul(on_cpu(), scores, kept, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _softmax_matmul(stored: bool, scores: Any, kept: Any, value: Any) -> jax.Array:
    powers = _shifted_exp(stored, scores)
    return _weighted_mean(powers, _inverse_row_sums(powers), kept, value)


@functools.partial(_softmax_matmul.defjvp, symbolic_zeros=True)
def _(stored: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (scores, kept, value), (d_scores, _, d_value) = primals, tangents
    powers = _shifted_exp(stored, scores)
    out, parts = _weighted_mean(powers, _inverse_row_sums(powers), kept, value), []
    powers = materialize(powers, stored)  # else XLA merges the two row sums and does not fuse the product with its division
    share = _inverse_row_sums(powers)
    if not isinstance(d_scores, SymbolicZero):
        change = powers * d_scores
        product = _matmul(materialize_grad(_apply_dropout(change, kept), stored), value) - _normalization_tangent(change, out)
        parts.append(materialize_grad(product * share, stored).astype(out.dtype))
    if not isinstance(d_value, SymbolicZero):
        parts.append(_weighted_mean(powers, share, kept, d_value))
    return out, sum(parts) if parts else jnp.zeros_like(out)


def _normalization_tangent(change: Any, out: Any) -> jax.Array:
    """Return the change that all weights of a row share, because they sum to one. Its transpose is D."""
    return jnp.sum(change, -1, keepdims=True) * out.astype(change.dtype)


def _shifted_exp(stored: bool, scores: Any) -> jax.Array:
    """Return exp(scores - row maximum), stored once for the product with the values and for the gradient."""
    top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    top = jnp.maximum(top, jnp.finfo(scores.dtype).min)  # where all scores are -inf
    return materialize(jnp.exp(scores - top), stored)


def _inverse_row_sums(powers: Any) -> jax.Array:
    """Return 1 / row sum. The sum is at least 1, or 0 where all scores are -inf: the bound avoids a division by zero."""
    return 1 / jnp.maximum(jnp.sum(powers, -1, keepdims=True), 0.5)


def _weighted_mean(powers: Any, share: Any, kept: Any, value: Any) -> jax.Array:
    """Return the weighted mean of the values, in their dtype."""
    return (_matmul(_apply_dropout(powers, kept), value) * share).astype(value.dtype)


def _apply_dropout(weights: Any, kept: Any) -> Any:
    return weights if kept is None else weights * kept


def _matmul(weights: Any, value: Any) -> jax.Array:
    """Return weights @ value in the dtype of the weights: rows that are not divided yet may overflow a half type."""
    return jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=weights.dtype)
