"""Torch functions of sums and differences along a dim, comparisons of whole tensors, and functions of integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge._tracing.op_registry import op
from bridge._tracing.promotion import jax_dtype, promote

from .elementwise import Dims, allow_scalar_input, cast, div, is_nonzero, logaddexp, numpy_axes, sum_, to_floating


@op("logsumexp", "special_logsumexp")
@allow_scalar_input
def logsumexp(input: Any, dim: Dims, keepdim: bool = False) -> Any:
    """Return the logarithm of the sum of exponentials."""
    return jax.scipy.special.logsumexp(to_floating(input), axis=numpy_axes(dim), keepdims=keepdim)


@op("cumsum")
@allow_scalar_input
def cumsum(input: Any, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    """Return cumulative sums."""
    input = cast(input, _accumulation_dtype(input, dtype))
    return jnp.cumsum(input, axis=dim, dtype=input.dtype)


@op("cumprod")
@allow_scalar_input
def cumprod(input: Any, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    """Return cumulative products."""
    input = cast(input, _accumulation_dtype(input, dtype))
    return jnp.cumprod(input, axis=dim, dtype=input.dtype)


def _accumulation_dtype(x: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the requested dtype, or int64 for integers without one. None means the dtype of x."""
    return torch.int64 if dtype is None and not jnp.issubdtype(x.dtype, jnp.inexact) else dtype


@op("logcumsumexp")
@allow_scalar_input
def logcumsumexp(input: Any, dim: int) -> jax.Array:
    """Return the cumulative `logsumexp`.

    Complex numbers are added one after the other, as in torch: the order decides how many turns an angle has.
    """
    x = to_floating(input)
    if not jnp.iscomplexobj(x):
        return lax.cumlogsumexp(x, axis=dim % x.ndim)

    def append(total: Any, x: Any) -> Any:
        total = logaddexp(x, total)
        return total, total

    rows = jnp.moveaxis(x, dim, 0)
    return jnp.moveaxis(lax.scan(append, jnp.full(rows.shape[1:], -jnp.inf, x.dtype), rows)[1], 0, dim)


@op("nansum")
def nansum(input: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    """Return the sum without NaN."""
    return sum_(jnp.where(jnp.isnan(input), jnp.zeros((), input.dtype), input), dim, keepdim, dtype=dtype)


@op("nanmean")
def nanmean(input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    """Return the mean without NaN."""
    whole = nansum(input, dim, keepdim, dtype=dtype)
    return whole / sum_(~jnp.isnan(input), dim, keepdim).astype(whole.dtype)


@op("count_nonzero")
@allow_scalar_input
def count_nonzero(input: Any, dim: Dims = None) -> jax.Array:
    """Count nonzero elements."""
    return jnp.sum(is_nonzero(input), axis=numpy_axes(dim), dtype=jax_dtype(torch.int64))


@op("sum_to_size")
def sum_to_size(input: jax.Array, *size: Any) -> jax.Array:
    """Sum to a shape that broadcasts to the shape of `input`."""
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = input.ndim - len(shape)
    dims = [d for d in range(input.ndim) if d < lead or (shape[d - lead] == 1 and input.shape[d] != 1)]
    return sum_(input, dims).reshape(shape) if dims else input


@op("diff")
def diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the differences of neighbors."""
    if n == 0:
        return input
    parts = promote(*[x for x in (prepend, input, append) if x is not None])
    return jnp.diff(jnp.concatenate(parts, dim), n=min(n, sum(x.shape[dim] for x in parts)), axis=dim)


def _twice_trapezoid_areas(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """Return twice the areas of the trapezoids between neighbors, with dim at the end."""
    y = jnp.moveaxis(y, dim, -1)
    if x is not None:
        dx = jnp.diff(x if x.ndim == 1 else jnp.moveaxis(x, dim, -1))
    ends, dx = promote(y[..., 1:] + y[..., :-1], 1 if dx is None else dx)
    return ends * dx


@op("trapezoid", "trapz")
def trapezoid(y: Any, x: Any = None, *, dx: Any = None, dim: int = -1) -> Any:
    """Return the integral by the trapezoidal rule."""
    return div(sum_(_twice_trapezoid_areas(y, x, dx, dim), -1), 2)


@op("cumulative_trapezoid")
def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = None, dim: int = -1) -> jax.Array:
    """Return the integral up to each element by the trapezoidal rule."""
    return jnp.moveaxis(jnp.cumsum(div(_twice_trapezoid_areas(y, x, dx, dim), 2), axis=-1), -1, dim)


def _gradient_along_dim(y: Any, steps: Any, dim: int, edge_order: int) -> jax.Array:
    """Return the derivative along one dim of the parabola through three neighbors. An edge may use the line through two."""
    y, steps = jnp.moveaxis(y, dim, -1), jnp.asarray(steps, y.dtype)
    h = jnp.broadcast_to(steps, (y.shape[-1] - 1,))
    lines = jnp.diff(y) / h
    before, after = h[:-1], h[1:]
    if steps.ndim:
        inner = (lines[..., :-1] * after + lines[..., 1:] * before) / (before + after)
    else:
        inner = (y[..., 2:] - y[..., :-2]) / (2 * steps)
    first, last = lines[..., :1], lines[..., -1:]
    if edge_order == 2:
        bend = (lines[..., 1:] - lines[..., :-1]) / (before + after)
        first, last = first - bend[..., :1] * h[:1], last + bend[..., -1:] * h[-1:]
    return jnp.moveaxis(jnp.concatenate([first, inner, last], -1), -1, dim)


@op("gradient")
def gradient(input: jax.Array, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """Return the derivatives along each dim. `spacing` gives the distances or the coordinates of neighbors."""
    dims = [dim] if isinstance(dim, int) else list(range(input.ndim) if dim is None else dim)
    spacing = 1 if spacing is None else spacing
    given = list(spacing) if isinstance(spacing, list | tuple) else [spacing] * len(dims)
    steps = [jnp.diff(x) if getattr(x, "ndim", 0) else x for x in given]
    return tuple(_gradient_along_dim(to_floating(input), h, d, edge_order) for h, d in zip(steps, dims, strict=True))


@op("isclose")
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> jax.Array:
    """Return whether each element is close to the other's."""
    return jnp.isclose(*promote(input, other), rtol=rtol, atol=atol, equal_nan=equal_nan)


@op("allclose")
def allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> jax.Array:
    """Return whether all elements are close; a known bool if the values are known."""
    return jnp.all(isclose(input, other, rtol, atol, equal_nan))


@op("equal")
def equal(input: jax.Array, other: jax.Array) -> Any:
    """Return whether two tensors have the same shape and elements; a known bool if the values are known."""
    return input.shape == other.shape and jnp.all(input == other)


def _register_integer_ops() -> None:
    table: dict[str, Any] = {"gcd": jnp.gcd, "lcm": jnp.lcm}
    for name, f in {"left_shift": jnp.left_shift, "right_shift": jnp.right_shift}.items():
        table[f"bitwise_{name}"] = table[f"__{name[0]}shift__"] = f
    for name, f in table.items():
        op(name)(lambda input, other, f=f: f(*promote(input, other)))
    for name in ("lshift", "rshift"):
        op(f"__r{name}__")(lambda input, other, f=table[f"__{name}__"]: f(*promote(other, input)))


_register_integer_ops()
