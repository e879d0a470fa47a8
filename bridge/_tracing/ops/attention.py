"""softmax(scores) v with the gradient of FlashAttention, which reads the weights once and not their product with a softmax's own.

Dao et al., https://arxiv.org/abs/2205.14135, algorithm 4: with D the sum of g * o over a row, the scores have the gradient P * (g v^T - D).
It is written as a tangent, whose transpose that is, so that forward mode and second derivatives are there as well.

The weights P are not divided by their sums: what is stored are the powers, and a row of the product, or of its gradient, is
divided. XLA's CPU library then sums, multiplies and divides in one pass over the powers, and multiplies, bounds and takes the
powers of the scores in another: it takes minima and maxima, and no selection.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from bridge._tracing.materialize import gradient_once, on_cpu, once


@jax.custom_jvp
def bounded(scores: Any, mask: Any) -> jax.Array:
    """Scores where the mask (bool) is True, else -inf, where their gradient is zero since the weight is."""
    return jnp.minimum(scores, jnp.where(mask, jnp.inf, -jnp.inf).astype(scores.dtype))


@bounded.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    out = bounded(*primals)
    return out, jnp.broadcast_to(tangents[0], out.shape)


def attended(scores: Any, kept: Any, value: Any) -> jax.Array:
    """The mean of values, weighted by the softmax of the scores' last dim, in the type of the values; zeros where all are -inf.

    kept: factors of the weights (dropout), or None.
    """
    return _attended(on_cpu(), scores, kept, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attended(stored: bool, scores: Any, kept: Any, value: Any) -> jax.Array:
    powers = _powers(stored, scores)
    return _mean(powers, _share(powers), kept, value)


@functools.partial(_attended.defjvp, symbolic_zeros=True)
def _(stored: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (scores, kept, value), (d_scores, _, d_value) = primals, tangents
    powers = _powers(stored, scores)
    out, parts = _mean(powers, _share(powers), kept, value), []
    powers = once(powers, stored)  # else both sums are one, and a product with many readers is not fused with what it divides
    share = _share(powers)
    if not isinstance(d_scores, SymbolicZero):
        change = powers * d_scores
        product = _product(gradient_once(_times(change, kept), stored), value) - _shared(change, out)
        parts.append(gradient_once(product * share, stored).astype(out.dtype))
    if not isinstance(d_value, SymbolicZero):
        parts.append(_mean(powers, share, kept, d_value))
    return out, sum(parts) if parts else jnp.zeros_like(out)


def _shared(change: Any, out: Any) -> jax.Array:
    """What the weights of a row lose together, since they sum to one: transposed, D."""
    return jnp.sum(change, -1, keepdims=True) * out.astype(change.dtype)


def _powers(stored: bool, scores: Any) -> jax.Array:
    """e to the scores, the largest of a row being 1, stored once, for the product with the values and for the gradient."""
    top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    top = jnp.maximum(top, jnp.finfo(scores.dtype).min)  # where all are -inf
    return once(jnp.exp(scores - top), stored)


def _share(powers: Any) -> jax.Array:
    """One by the sum of a row, which is at least 1, or 0 where all powers are."""
    return 1 / jnp.maximum(jnp.sum(powers, -1, keepdims=True), 0.5)


def _mean(powers: Any, share: Any, kept: Any, value: Any) -> jax.Array:
    return (_product(_times(powers, kept), value) * share).astype(value.dtype)


def _times(weights: Any, kept: Any) -> Any:
    return weights if kept is None else weights * kept


def _product(weights: Any, value: Any) -> jax.Array:
    """In the type of the weights: what is not divided yet may be too large for a half one."""
    return jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=weights.dtype)
