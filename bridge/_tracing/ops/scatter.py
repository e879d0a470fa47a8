"""Torch functions that read, write or reduce values at indices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._tracing.functionalization import scatter_through_view
from bridge._tracing.op_registry import Op, add_ops, op

from .elementwise import disallow_negative_indices, squeeze_to_scalars
from .shapes import diagonal, select
from .views import slice_dim


def _at_least_1d(x: Any) -> Any:
    return x[None] if isinstance(x, jax.Array) and x.ndim == 0 else x


def allow_scalar_arguments(handler: Any) -> Any:
    """Wrap a function of indices so that it accepts 0-d arguments: torch treats them as vectors of one element."""

    @functools.wraps(handler)
    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        out = handler(_at_least_1d(input), *map(_at_least_1d, args), **{name: _at_least_1d(x) for name, x in kwargs.items()})
        return out if input.ndim else squeeze_to_scalars(out)

    return run


@op("index_select")
@allow_scalar_arguments
def index_select(input: jax.Array, dim: int, index: Any) -> jax.Array:
    """Return the slices at indices of one dim."""
    return jnp.take(input, disallow_negative_indices(index, input.shape[dim]), axis=dim)


@op("gather")
def gather(input: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    """Return the elements at indices of each line along dim."""
    if not index.size:
        return jnp.zeros(index.shape, input.dtype)
    shape, input, index = index.shape, _at_least_1d(input), _at_least_1d(index)
    dim = dim % input.ndim
    part = input[tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(index.shape))]
    return jnp.take_along_axis(part, disallow_negative_indices(index, part.shape[dim]), axis=dim).reshape(shape)


@op("take_along_dim")
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> jax.Array:
    """Gather as `numpy.take_along_axis` does. Without a dim, both arguments are flattened."""
    return jnp.take_along_axis(input, indices, axis=dim) if dim is not None else jnp.take(input.ravel(), indices.ravel())


@op("take")
def take(input: Any, index: Any) -> jax.Array:
    """Return the elements at indices of the flat tensor."""
    return jnp.take(input.ravel(), index)


@op("put")
def put(input: jax.Array, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Write or add values at indices of the flat tensor."""
    at = input.ravel().at[index.ravel()]
    return (at.add if accumulate else at.set)(source.ravel()).reshape(input.shape)


def _line_indices(index: Any, dim: int) -> tuple[Any, ...]:
    """Return the index tuple of `scatter`: indices of each line along dim."""
    where = list(jnp.indices(index.shape, sparse=True))
    where[dim] = index
    return tuple(where)


def _slice_indices(index: Any, dim: int) -> tuple[Any, ...]:
    """Return the index tuple of `index_add` and its variants: whole slices at indices of dim."""
    return (slice(None),) * dim + (index,)


@op("scatter")
@allow_scalar_arguments
def scatter(input: jax.Array, dim: int, index: jax.Array, src: Any = None, *, value: Any = None, reduce: str | None = None) -> Any:
    """Write values at indices of each line along dim."""
    new = jnp.asarray(value if src is None else src, input.dtype)
    new = new[tuple(map(slice, index.shape))] if new.ndim == index.ndim else new
    at = input.at[_line_indices(index, dim)]
    return at.set(new) if reduce is None else {"add": at.add, "multiply": at.multiply}[reduce](new)


@op("scatter_add")
@allow_scalar_arguments
def scatter_add(input: jax.Array, dim: int, index: jax.Array, src: Any) -> jax.Array:
    """Add values at indices of each line along dim."""
    return input.at[_line_indices(index, dim)].add(src[tuple(map(slice, index.shape))])


@op("index_add")
@allow_scalar_arguments
def index_add(input: jax.Array, dim: int, index: Any, source: jax.Array, *, alpha: Any = 1) -> jax.Array:
    """Add slices at indices of one dim."""
    return input.at[_slice_indices(index, dim % input.ndim)].add(source * jnp.asarray(alpha, source.dtype))


@op("index_copy")
@allow_scalar_arguments
def index_copy(input: jax.Array, dim: int, index: Any, source: Any) -> jax.Array:
    """Write slices at indices of one dim."""
    return input.at[_slice_indices(index, dim % input.ndim)].set(source)


@op("index_fill")
@allow_scalar_arguments
def index_fill(input: jax.Array, dim: int, index: Any, value: Any) -> jax.Array:
    """Write one value at indices of one dim."""
    return input.at[_slice_indices(index, dim % input.ndim)].set(jnp.asarray(value, input.dtype))


@op("index_put")
def index_put(input: jax.Array, indices: Any, values: Any, accumulate: bool = False) -> jax.Array:
    """Write or add values at indices."""
    at = input.at[tuple(slice(None) if i is None else i for i in indices)]
    return at.add(values) if accumulate else at.set(values)


@op("masked_scatter")
def masked_scatter(input: Any, mask: Any, source: Any) -> jax.Array:
    """Write the elements of `source`, in order, where the mask is True."""
    input, mask = jnp.broadcast_arrays(input, mask)
    order = jnp.cumsum(mask.ravel()).reshape(mask.shape) - 1
    return jnp.where(mask, jnp.take(source.ravel(), jnp.maximum(order, 0)), input)


@op("scatter_reduce")
@allow_scalar_arguments
def scatter_reduce(input: Any, dim: int, index: jax.Array, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """Reduce the values at each index of each line along dim to a sum, product, mean or extreme."""
    return _reduce_into(_line_indices, dim, reduce, include_self, index, input, src[tuple(map(slice, index.shape))])


@op("index_reduce")
@allow_scalar_arguments
def index_reduce(input: jax.Array, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    """Reduce the slices at each index of one dim to a product, mean or extreme."""
    return _reduce_into(_slice_indices, dim % input.ndim, reduce, include_self, index, input, source)


def _reduce_into(places_of: Any, dim: int, reduce: str, include_self: bool, index: Any, x: Any, new: Any) -> Any:
    """Reduce `new` into x. `places_of(index, dim)` gives the index tuple."""
    if reduce == "prod":
        return _product(places_of, dim, include_self, index, x, new)
    if reduce in ("amax", "amin"):
        return _extremum(places_of, dim, reduce, include_self, index, x, new)
    where = places_of(index, dim)
    whole = _sum(where, include_self, x, new)
    if reduce == "sum":
        return whole
    count = _sum(where, include_self, jnp.ones(x.shape, jnp.int32), 1).astype(x.dtype)
    return whole / count if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.floor_divide(whole, count)


def _exclude_self(x: Any, where: Any, include_self: bool, value: Any) -> Any:
    """Return x. Without `include_self`, the elements that are written to become `value`, which is neutral in the reduction."""
    return x if include_self else jnp.where(jnp.zeros(x.shape, bool).at[where].set(True), jnp.asarray(value, x.dtype), x)


def _sum(where: Any, include_self: bool, x: Any, new: Any) -> Any:
    return _exclude_self(x, where, include_self, 0).at[where].add(new)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _product(places_of: Any, dim: int, include_self: bool, index: Any, x: Any, new: Any) -> Any:
    where = places_of(index, dim)
    return _exclude_self(x, where, include_self, 1).at[where].multiply(new)


@_product.defjvp
def _(places_of: Any, dim: int, include_self: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the tangent. The derivative by each factor is the product of the others, which is zero if another factor is zero."""
    (index, x, new), (_, dx, d_new) = primals, tangents
    where = places_of(index, dim)
    x, dx = _exclude_self(x, where, include_self, 1), _exclude_self(dx, where, include_self, 0)
    zeros = (x == 0).astype(jnp.int32).at[where].add((new == 0).astype(jnp.int32))
    rest = jnp.where(x == 0, 1, x).at[where].multiply(jnp.where(new == 0, 1, new))

    def of_others(factor: Any, zeros: Any, rest: Any) -> jax.Array:
        return jnp.where(zeros > (factor == 0).astype(zeros.dtype), 0, rest / jnp.where(factor == 0, 1, factor))

    change = of_others(x, zeros, rest) * dx
    return _product(places_of, dim, include_self, index, x, new), change.at[where].add(of_others(new, zeros[where], rest[where]) * d_new)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _extremum(places_of: Any, dim: int, reduce: str, include_self: bool, index: Any, x: Any, new: Any) -> Any:
    where = places_of(index, dim)
    real = jnp.issubdtype(x.dtype, jnp.inexact)
    least, most = (-jnp.inf, jnp.inf) if real else (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
    at = _exclude_self(x, where, include_self, least if reduce == "amax" else most).at[where]
    return (at.max if reduce == "amax" else at.min)(new)


@_extremum.defjvp
def _(places_of: Any, dim: int, reduce: str, include_self: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the tangent. Equal elements share the gradient.

    As in torch, x has its part of the gradient also without `include_self`. That part is lost.
    """
    (index, x, new), (_, dx, d_new) = primals, tangents
    where = places_of(index, dim)
    out = _extremum(places_of, dim, reduce, include_self, index, x, new)
    own, of_new = (x == out).astype(x.dtype), (new == out[where]).astype(x.dtype)
    change = (own * _exclude_self(dx, where, include_self, 0)).at[where].add(of_new * d_new)
    return out, change / own.at[where].add(of_new)


@op("select_scatter")
def select_scatter(input: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    """Return `input` with `src` written at one index of one dim."""
    return scatter_through_view(lambda x: select(x, dim, index), input, src.astype(input.dtype))


@op("slice_scatter")
def slice_scatter(
    input: jax.Array, src: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    """Return `input` with `src` written to a slice of one dim."""
    return scatter_through_view(lambda x: slice_dim(x, dim, start, end, step), input, src.astype(input.dtype))


@op("diagonal_scatter")
def diagonal_scatter(input: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """Return `input` with `src` written to a diagonal."""
    return scatter_through_view(lambda x: diagonal(x, offset, dim1, dim2), input, src.astype(input.dtype))


def _fill_diagonal(input: Any, fill_value: Any, wrap: bool = False) -> jax.Array:
    return jnp.fill_diagonal(input, jnp.asarray(fill_value, input.dtype), wrap=wrap, inplace=False)


add_ops({torch.Tensor.fill_diagonal_: Op(_fill_diagonal, None, inplace=True)})
