"""softmax(scores) v with the gradient of FlashAttention, which reads the weights once and not their product with a softmax's own.

Dao et al., https://arxiv.org/abs/2205.14135, algorithm 4: with D the sum of g * o over a row, the scores have the gradient P * (g v^T - D).
It is written as a tangent, whose transpose that is, so that forward mode and second derivatives are there as well.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .stored import gradient_once, on_cpu, once


def attended(scores: Any, dead: Any, kept: Any, value: Any) -> Any:
    """The mean of values, weighted by the softmax of the scores' last dim, in the type of the values.

    dead: (..., 1) bool, rows that are zero; None for none. kept: factors of the weights (dropout), or None.
    """
    return _attended(on_cpu(), scores, dead, kept, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attended(stored: bool, scores: Any, dead: Any, kept: Any, value: Any) -> Any:
    return _product(_times(_weights(stored, scores, dead), kept), value)


@functools.partial(_attended.defjvp, symbolic_zeros=True)
def _(stored: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (scores, dead, kept, value), (d_scores, _, _, d_value) = primals, tangents
    weights = _weights(stored, scores, dead)
    out, parts = _product(_times(weights, kept), value), []
    if not isinstance(d_scores, SymbolicZero):
        change = weights * d_scores
        parts.append(_product(gradient_once(_times(change, kept), stored), value) - _shared(change, out))
    if not isinstance(d_value, SymbolicZero):
        parts.append(_product(_times(weights, kept), d_value))
    return out, sum(parts) if parts else jnp.zeros_like(out)


def _shared(change: Any, out: Any) -> Any:
    """What the weights of a row lose together, since they sum to one: transposed, D."""
    return jnp.sum(change, -1, keepdims=True).astype(out.dtype) * out


def _weights(stored: bool, scores: Any, dead: Any) -> Any:
    """Stored once, for the product with the values and for the gradient."""
    top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    powers = jnp.exp(scores - top)
    weights = once(powers / jnp.sum(powers, -1, keepdims=True), stored)
    return weights if dead is None else jnp.where(dead, jnp.zeros((), weights.dtype), weights)


def _times(weights: Any, kept: Any) -> Any:
    return weights if kept is None else weights * kept


def _product(weights: Any, value: Any) -> Any:
    return jnp.matmul(weights.astype(value.dtype), value)
