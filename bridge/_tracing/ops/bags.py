"""Torch's `embedding_bag`: rows of a weight, reduced over bags of indices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge._tracing.op_registry import builtin_op
from bridge._tracing.promotion import jax_dtype

from .layers import take_rows

_SUM, _MEAN, _MAX = 0, 1, 2  # the values of `mode` in torch.embedding_bag


@builtin_op("embedding_bag")
def embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Return the reduced rows, the bag of each index, the size of each bag, and the index of each maximum (the sizes in other modes).

    Indices equal to `padding_idx` do not count.
    """
    long, bags = jax_dtype(torch.int64), offsets.shape[0] - bool(include_last_offset)
    n = indices.shape[0]
    bag = jnp.searchsorted(offsets, jnp.arange(n, dtype=offsets.dtype), side="right") - 1
    counts = jnp.ones(n, bool)
    if padding_idx is not None and padding_idx >= -weight.shape[0]:
        counts = indices != padding_idx % weight.shape[0]
    rows = take_rows(weight, indices, scale_grad_by_freq)
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    sizes = jax.ops.segment_sum(counts.astype(long), bag, bags)
    if mode == _MAX:
        out, largest = _bag_max(rows, indices, counts, bag, bags)
    else:
        out = jax.ops.segment_sum(jnp.where(counts[:, None], rows, jnp.zeros((), rows.dtype)), bag, bags)
        largest = sizes
        if mode == _MEAN:
            out = out / jnp.maximum(sizes, 1)[:, None].astype(out.dtype)
    return out, bag.astype(long), sizes, largest.astype(long)


def _bag_max(rows: Any, indices: Any, counts: Any, bag: Any, bags: int) -> tuple[Any, Any]:
    """Return the maximum of each bag and its index in the weight, or zeros for an empty bag.

    The first of equal elements is gathered, so that the gradient goes to one element.
    """
    n, values = rows.shape[0], lax.stop_gradient(rows)
    if n == 0:
        return jnp.zeros((bags, rows.shape[1]), rows.dtype), jnp.zeros((bags, rows.shape[1]), int)
    top = jax.ops.segment_max(jnp.where(counts[:, None], values, -jnp.inf), bag, bags)
    own = counts[:, None] & (values == top[bag])
    first = jax.ops.segment_min(jnp.where(own, jnp.arange(n)[:, None], n), bag, bags)
    there = (first >= 0) & (first < n)
    first = jnp.where(there, first, 0)
    out = jnp.where(there, jnp.take_along_axis(rows, first, 0), jnp.zeros((), rows.dtype))
    return out, jnp.where(there, indices[first], 0)
