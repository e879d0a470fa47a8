"""Torch functions that draw random numbers. Each draw has its own key of the call's `rng`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._tracing.context import next_key
from bridge._tracing.op_registry import Op, add_ops, op
from bridge._tracing.promotion import default_float, jax_dtype, promote

from .create import parse_sizes, register_factory
from .elementwise import to_floating

_NORMAL_APPROXIMATION_RATE = 2.0**30


def _draw_dtype(dtype: Any) -> Any:
    """Return the dtype to draw in. Half types have so few values that tails would be cut off and ties be common."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def _normal(key: Any, shape: Any, dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, _draw_dtype(dtype)).astype(dtype)


def _unit_uniform(key: Any, shape: Any, dtype: Any) -> jax.Array:
    """Return uniform numbers in [0, 1), for complex dtypes in both parts."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.uniform(key, shape, dtype)
    return jax.lax.complex(*jax.random.uniform(key, (2, *shape), jnp.finfo(dtype).dtype))


def _register_random() -> None:
    for name, draw in {"rand": _unit_uniform, "randn": _normal}.items():

        def make(*size: Any, dtype: Any = None, name: str = name, draw: Any = draw, **_: Any) -> Any:
            return draw(next_key(f"torch.{name}"), parse_sizes(_.get("size") or size), jax_dtype(dtype or torch.get_default_dtype()))

        def like(input: Any, *, dtype: Any = None, name: str = name, draw: Any = draw, **_: Any) -> Any:
            return draw(next_key(f"torch.{name}_like"), tuple(input.shape), jax_dtype(dtype) if dtype else input.dtype)

        register_factory(name, make)
        register_factory(f"{name}_like", like)


_register_random()


@op("randint", always=True)
def randint(low: Any, high: Any = None, size: Any = None, *, dtype: Any = torch.int64, **_: Any) -> jax.Array:
    """Return random integers from low to high - 1."""
    if size is None:
        low, high, size = 0, low, high
    dtype = jax_dtype(dtype)
    whole = dtype if jnp.issubdtype(dtype, jnp.integer) else jax_dtype(torch.int64)
    return jax.random.randint(next_key("torch.randint"), tuple(size), low, high, whole).astype(dtype)


@op("randint_like", always=True)
def randint_like(input: jax.Array, low: Any, high: Any = None, *, dtype: Any = None, **_: Any) -> jax.Array:
    """Return random integers in the shape of `input`."""
    low, high = (0, low) if high is None else (low, high)
    drawn = jax.random.randint(next_key("torch.randint_like"), tuple(input.shape), low, high, jax_dtype(torch.int64))
    return drawn.astype(jax_dtype(dtype) if dtype else input.dtype)


@op("randperm", always=True)
def randperm(n: int, *, dtype: Any = torch.int64, **_: Any) -> jax.Array:
    """Return a random permutation."""
    return jax.random.permutation(next_key("torch.randperm"), n).astype(jax_dtype(dtype))


@op("normal", always=True)
def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, dtype: Any = None, **_: Any) -> Any:
    """Return normal numbers of this mean and standard deviation, neither of which has a gradient."""
    if size is None:
        size = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    like = next((x for x in (mean, std) if hasattr(x, "dtype")), None)
    kind = jax_dtype(dtype) if dtype else default_float() if like is None else like.dtype
    drawn = _normal(next_key("torch.normal"), tuple(size), kind)
    drawn, mean, std = jax.lax.stop_gradient(promote(drawn, mean, std))
    return (drawn * std + mean).astype(kind)


@op("bernoulli", always=True)
def bernoulli(input: jax.Array, p: Any = None, **_: Any) -> jax.Array:
    """Return one with this probability, else zero."""
    return _bernoulli(next_key("torch.bernoulli"), input, input if p is None else p).astype(input.dtype)


def _bernoulli(key: Any, x: Any, p: Any = 0.5) -> jax.Array:
    """Return True with probability p, in the shape of x."""
    return jax.random.bernoulli(key, p.astype(_draw_dtype(p.dtype)) if hasattr(p, "dtype") else p, x.shape)


@op("multinomial", always=True)
def multinomial(input: jax.Array, num_samples: int, replacement: bool = False, **_: Any) -> Any:
    """Return indices drawn by weight. Without replacement they are those of the largest log-weights plus Gumbel noise."""
    logits, key = jnp.log(input.astype(_draw_dtype(input.dtype))), next_key("torch.multinomial")
    if replacement:
        drawn = jax.random.categorical(key, logits[..., None, :], shape=(*input.shape[:-1], num_samples))
    else:
        drawn = jax.lax.top_k(logits + jax.random.gumbel(key, logits.shape, logits.dtype), num_samples)[1]
    return drawn.astype(jax_dtype(torch.int64))


@op("_standard_gamma", always=True)
def standard_gamma(input: jax.Array, generator: Any = None) -> jax.Array:
    """Return gamma numbers of this concentration, none of them subnormal. The gradient is the one at a fixed quantile, as in torch."""
    dtype = _draw_dtype(input.dtype)
    log = jax.random.loggamma(next_key("torch._standard_gamma"), input.astype(dtype), dtype=dtype)
    return jnp.exp(_clip_with_identity_gradient(log, math.log(2 * jnp.finfo(dtype).tiny), jnp.inf)).astype(input.dtype)


@op("_sample_dirichlet", always=True)
def sample_dirichlet(input: jax.Array, generator: Any = None) -> Any:
    """Return Dirichlet numbers of this concentration, none of them 0 or 1.

    The gradient is that of gamma numbers divided by their sum. torch's gradient has the same mean.
    """
    dtype = _draw_dtype(input.dtype)
    shares = jax.random.dirichlet(next_key("torch._sample_dirichlet"), input.astype(dtype), dtype=dtype)
    return _clip_with_identity_gradient(shares, jnp.finfo(dtype).tiny, 1 - jnp.finfo(dtype).eps / 2).astype(input.dtype)


def _clip_with_identity_gradient(x: Any, least: Any, most: Any) -> Any:
    """Clip x to bounds, with the derivative of x."""
    return x + jax.lax.stop_gradient(jnp.clip(x, least, most) - x)


@op("poisson", always=True)
def poisson(input: jax.Array, generator: Any = None) -> jax.Array:
    """Return counts of this rate, without a gradient.

    Rates beyond the threshold use the normal distribution, since counts are int32. It is the same to the dtype's precision.
    """
    rate, key = jax.lax.stop_gradient(input.astype(_draw_dtype(input.dtype))), next_key("torch.poisson")
    counts = jax.random.poisson(key, jnp.minimum(rate, _NORMAL_APPROXIMATION_RATE)).astype(rate.dtype)
    normal = jnp.round(rate + jnp.sqrt(rate) * jax.random.normal(jax.random.fold_in(key, 1), rate.shape, rate.dtype))
    return jnp.where(rate < _NORMAL_APPROXIMATION_RATE, counts, normal).astype(input.dtype)


@op("binomial", always=True)
def binomial(count: Any, prob: Any, generator: Any = None) -> jax.Array:
    """Return the number of successes in `count` trials, without a gradient."""
    count, prob = jax.lax.stop_gradient(promote(count, prob))
    dtype = _draw_dtype(count.dtype)
    return jax.random.binomial(next_key("torch.binomial"), count.astype(dtype), prob.astype(dtype), dtype=dtype).astype(count.dtype)


def _inplace_draw(name: str, draw: Callable[..., Any]) -> None:
    """Register a method of torch.Tensor that fills a tensor with random numbers."""

    def fill(input: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        return draw(next_key(f"torch.Tensor.{name}"), input, *args, **kwargs).astype(input.dtype)

    add_ops({getattr(torch.Tensor, name): Op(fill, None, always=True, inplace=True)})


def _uniform(key: Any, x: Any, from_: float = 0.0, to: float = 1.0, **bounds: float) -> jax.Array:
    low, high = bounds.get("from", from_), bounds.get("to", to)
    return jax.random.uniform(key, x.shape, to_floating(x).dtype, low, high)


def _exponential(key: Any, x: Any, lambd: Any = 1.0) -> jax.Array:
    drawn = jax.random.exponential(key, x.shape, _draw_dtype(x.dtype))
    return jnp.maximum(drawn, jnp.finfo(drawn.dtype).eps / 2) / lambd  # never 0, as in torch: code may take its logarithm


_inplace_draw("uniform_", _uniform)
_inplace_draw("normal_", lambda key, x, mean=0.0, std=1.0: jax.random.normal(key, x.shape, _draw_dtype(x.dtype)) * std + mean)
_inplace_draw("bernoulli_", _bernoulli)
_inplace_draw("exponential_", _exponential)
_inplace_draw("geometric_", lambda key, x, p: jax.random.geometric(key, p, x.shape))
_inplace_draw("cauchy_", lambda key, x, median=0.0, sigma=1.0: jax.random.cauchy(key, x.shape, _draw_dtype(x.dtype)) * sigma + median)
_inplace_draw("log_normal_", lambda key, x, mean=1.0, std=2.0: jnp.exp(jax.random.normal(key, x.shape, _draw_dtype(x.dtype)) * std + mean))


def _random(key: Any, x: Any, low: Any = None, high: Any = None, *, to: Any = None, **bounds: Any) -> jax.Array:
    low, high = bounds.get("from", low), high if to is None else to
    if high is None:  # a single number is the end; without one, the dtype decides
        real = jnp.issubdtype(x.dtype, jnp.floating)
        most = 2 ** (jnp.finfo(x.dtype).nmant + 1) if real else 2 if x.dtype == bool else int(jnp.iinfo(x.dtype).max)
        low, high = 0, most if low is None else low
    return jax.random.randint(key, x.shape, low or 0, high, jax_dtype(torch.int64))


_inplace_draw("random_", _random)
