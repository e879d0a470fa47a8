"""Torch's adaptive and fractional max pooling with indices, and `max_unpool`, which uses the indices."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch.nn.functional as F

from bridge._tracing.op_registry import Op, add_ops, builtin_op, dispatch

from .windows import adaptive_bins, add_batch_dim, max_with_indices, per_dim


def _plane_positions(input: Any) -> jax.Array:
    """Return the index of each element in its flattened plane."""
    plane = input.shape[2:]
    return jnp.broadcast_to(jnp.arange(math.prod(plane), dtype=jnp.int32).reshape(plane), input.shape)


def adaptive_max_pool(n: int, input: Any, output_size: Any) -> Any:
    """Return the maxima of a fixed number of windows, and their indices."""
    input, alone = add_batch_dim(input, n)
    reaches = []
    for size, out in zip(input.shape[2:], per_dim(n, output_size), strict=True):
        bins = adaptive_bins(size, size if out is None else out)
        longest = max((b - a for a, b in bins), default=0)
        # A shorter window repeats its first element, which changes neither the maximum nor its first index.
        reaches.append(np.array([[a + i if a + i < b else a for i in range(longest)] for a, b in bins], int).reshape(len(bins), longest))
    out = max_with_indices(input, _plane_positions(input), reaches)
    return tuple(x[0] for x in out) if alone else out


def _window_starts(sample: Any, size: int, out: int, kernel: int) -> jax.Array:
    """Return the start of each window: Graham, https://arxiv.org/abs/1412.6071."""
    steps = jnp.arange(out - 1, dtype=sample.dtype)
    step = (size - kernel) / (out - 1) if out > 1 else 0.0
    starts = ((steps + sample[..., None]) * step).astype(jnp.int32) - (sample[..., None] * step).astype(jnp.int32)
    return jnp.concatenate([starts, jnp.full((*sample.shape, 1), size - kernel, jnp.int32)], -1)


def fractional_max_pool(n: int, input: Any, kernel_size: Any, output_size: Any, _random_samples: Any) -> Any:
    """Return the maxima of windows whose starts the samples (N, C, n) determine, and their indices."""
    input, alone = add_batch_dim(input, n)
    kernel, sizes = per_dim(n, kernel_size), per_dim(n, output_size)
    samples = jnp.flip(_random_samples, -1) if n == 2 else _random_samples  # for 2 dims torch has the sample of the width first
    starts = [
        _window_starts(samples[..., d], size, out, k)[..., None] + jnp.arange(k)
        for d, (size, out, k) in enumerate(zip(input.shape[2:], sizes, kernel, strict=True))
    ]

    def plane(x: Any, *reaches: Any) -> Any:
        found = max_with_indices(x[None, None], _plane_positions(x[None, None]), list(reaches))
        return tuple(y[0, 0] for y in found)

    out = jax.vmap(jax.vmap(plane))(input, *starts)
    return tuple(x[0] for x in out) if alone else out


def max_unpool(n: int, input: Any, indices: Any, output_size: Any) -> jax.Array:
    """Write values at their indices into a larger plane of zeros. A repeated index gets one of its values, as in torch."""
    input, alone = add_batch_dim(input, n)
    flat, where = (x.reshape(*input.shape[:2], math.prod(input.shape[2:])) for x in (input, indices))
    lead = jnp.indices(flat.shape, sparse=True)[:2]
    empty = jnp.zeros((*input.shape[:2], math.prod(output_size)), input.dtype)
    out = empty.at[(*lead, where)].set(flat, unique_indices=True).reshape(*input.shape[:2], *output_size)
    return out[0] if alone else out


def _return_indices_on_request(function: Any) -> Any:
    """Return a handler that drops the indices unless `return_indices` is True. torch has this in Python that asks for no overrides."""
    signature = inspect.signature(function)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        both = dispatch(function, args, kwargs)
        return both if signature.bind(*args, **kwargs).arguments.get("return_indices") else both[0]

    return chosen


def _register() -> None:
    for n in (1, 2, 3):

        def adaptive(input: Any, output_size: Any, n: int = n) -> Any:
            return adaptive_max_pool(n, input, output_size)

        def fractional(input: Any, kernel_size: Any, output_size: Any, random_samples: Any, n: int = n) -> Any:
            return fractional_max_pool(n, input, kernel_size, output_size, random_samples)

        def back(input: Any, indices: Any, output_size: Any, stride: Any = None, padding: Any = None, n: int = n) -> jax.Array:
            return max_unpool(n, input, indices, output_size)

        name = f"adaptive_max_pool{n}d"
        add_ops({getattr(F, name): Op(_return_indices_on_request(getattr(F, f"{name}_with_indices")), None, raw=True)})
        builtin_op(name)(adaptive)
        if n > 1:
            name = f"fractional_max_pool{n}d"
            add_ops({getattr(F, name): Op(_return_indices_on_request(getattr(F, f"{name}_with_indices")), None, raw=True)})
            builtin_op(name)(fractional)
        builtin_op(f"max_unpool{n}d")(back)


_register()
