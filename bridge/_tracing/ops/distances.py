"""Distances and the cosine similarity of torch.nn.functional."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge._tracing.op_registry import op
from bridge._tracing.promotion import promote

from .elementwise import add, norm, sub
from .subgradients import safe_sqrt


@op("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return the cosine of the angle between vectors along `dim`."""
    x1, x2 = jnp.broadcast_arrays(*promote(x1, x2))
    if x1.ndim == 0:
        return cosine_similarity(x1[None], x2[None], 0, eps)
    lengths = [jnp.maximum(safe_sqrt(jnp.sum(jnp.square(x), dim, keepdims=True)), eps) for x in (x1, x2)]
    return jnp.sum(x1 / lengths[0] * (x2 / lengths[1]), dim)


@op("cdist")
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """Return the distance of each row of `x1` to each row of `x2`, computed from their differences."""
    return norm(x1[..., :, None, :] - x2[..., None, :, :], p, -1)


@op("pairwise_distance")
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """Return the distance of each pair of rows. `eps` is added to each difference."""
    return norm(add(sub(x1, x2), eps), p, -1, keepdim)


@op("pdist")
def pdist(input: jax.Array, p: float = 2.0) -> Any:
    """Return the distances of all pairs of rows."""
    one, other = np.triu_indices(input.shape[0], 1)
    return norm(input[one] - input[other], p, -1)
