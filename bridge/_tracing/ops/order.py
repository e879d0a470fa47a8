"""Torch functions that compare values: extremes, sorting, quantiles, searches and counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from bridge._tracing.op_registry import op
from bridge._tracing.promotion import jax_dtype, promote

from .elementwise import allow_scalar_input
from .subgradients import maximum, minimum


def _to_int64(x: Any) -> Any:
    return x.astype(jax_dtype(torch.int64))


def _positions(x: Any, dim: int) -> jax.Array:
    return lax.broadcasted_iota(jax_dtype(torch.int64), x.shape, dim % x.ndim)


@jax.custom_jvp
def _with_shared_gradient(x: Any, value: Any) -> Any:
    """Return a value that is an element of x. All equal elements share its gradient, as in torch for extremes of a whole tensor."""
    return value


@_with_shared_gradient.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (x, value), (change, _) = primals, tangents
    own = (x == value) | (jnp.isnan(x) & jnp.isnan(value))
    return value, jnp.sum(jnp.where(own, change, jnp.zeros((), change.dtype))) / jnp.sum(own).astype(change.dtype)


def _take_with_index(returns: Any, x: Any, places: Any, dim: int, keepdim: bool) -> Any:
    """Return one element of each line, and its index. `places` has size one along dim. The gradient goes to that element."""
    both = jnp.take_along_axis(x, places, axis=dim), _to_int64(places)
    return returns(both if keepdim else [jnp.squeeze(part, dim) for part in both])


def _make_extreme_op(whole: Any, arg: Any, pair: Any, returns: Any) -> Any:
    """Return the handler of `max` or `min`: of a whole tensor, along a dim, or of two tensors."""

    @allow_scalar_input
    def along(input: Any, dim: int, keepdim: bool) -> Any:
        return _take_with_index(returns, input, arg(input, axis=dim, keepdims=True), dim, keepdim)

    def extreme(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        other = dim if hasattr(dim, "ndim") else other
        if other is not None:
            return pair(*promote(input, other))
        return _with_shared_gradient(input, whole(lax.stop_gradient(input))) if dim is None else along(input, dim, keepdim)

    return extreme


op("max")(_make_extreme_op(jnp.max, jnp.argmax, maximum, torch.return_types.max))
op("min")(_make_extreme_op(jnp.min, jnp.argmin, minimum, torch.return_types.min))


@op("argmax")
@allow_scalar_input
def argmax(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the index of the largest element."""
    return _to_int64(jnp.argmax(input, axis=dim, keepdims=keepdim))


@op("argmin")
@allow_scalar_input
def argmin(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the index of the smallest element."""
    return _to_int64(jnp.argmin(input, axis=dim, keepdims=keepdim))


@op("aminmax")
@allow_scalar_input
def aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the smallest and the largest element."""
    ends: Any = [f(input, axis=dim, keepdims=keepdim) for f in (jnp.min, jnp.max)]
    return torch.return_types.aminmax(ends)


@allow_scalar_input
def _sort_with_indices(x: Any, dim: int, descending: bool) -> Any:
    """Sort stably along dim, with NaN as the largest. Return the values and their indices."""
    both = [x, _positions(x, dim)]
    both = [jnp.flip(a, dim) for a in both] if descending else both
    both = lax.sort(both, dimension=dim, num_keys=1, is_stable=True)
    return tuple(jnp.flip(a, dim) for a in both) if descending else tuple(both)


@op("sort")
def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return sorted values and their indices."""
    return torch.return_types.sort(_sort_with_indices(input, dim, descending))


@op("msort")
def msort(input: Any) -> Any:
    """Sort along the first dim."""
    return _sort_with_indices(input, 0, False)[0]


@op("argsort")
def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return the indices of the sorted values."""
    return _sort_with_indices(lax.stop_gradient(input), dim, descending)[1]


@op("topk")
@allow_scalar_input
def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the k largest or smallest elements, and their indices."""
    if largest:
        both: Any = [jnp.moveaxis(x, -1, dim) for x in lax.top_k(jnp.moveaxis(input, dim, -1), k)]
        both[1] = _to_int64(both[1])
    else:
        both = [lax.slice_in_dim(x, 0, k, axis=dim) for x in _sort_with_indices(input, dim, False)]
    return torch.return_types.topk(both)


def _nth_smallest_index(x: Any, n: Any, dim: int) -> jax.Array:
    """Return the index of the n-th smallest element of each line. n is a number, or has size one along dim."""
    order = _sort_with_indices(lax.stop_gradient(x), dim, False)[1]
    shape = [1 if d == dim % x.ndim else size for d, size in enumerate(x.shape)]
    return jnp.take_along_axis(order, jnp.broadcast_to(jnp.asarray(n, order.dtype), shape), axis=dim)


@op("kthvalue")
@allow_scalar_input
def kthvalue(input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the k-th smallest element, counted from one, and its index."""
    return _take_with_index(torch.return_types.kthvalue, input, _nth_smallest_index(input, k - 1, dim), dim, keepdim)


def _register_medians() -> None:
    def median(x: Any, dim: int, skip: bool) -> jax.Array:
        missing = jnp.isnan(x)
        numbers = jnp.sum(~missing, axis=dim, keepdims=True)
        middle = _nth_smallest_index(x, jnp.maximum(numbers - 1, 0) // 2, dim)
        return middle if skip else jnp.where(numbers < x.shape[dim], jnp.argmax(missing, axis=dim, keepdims=True), middle)

    for name, returns in {"median": torch.return_types.median, "nanmedian": torch.return_types.nanmedian}.items():

        @allow_scalar_input
        def along(input: Any, dim: int, keepdim: bool, skip: bool = name == "nanmedian", returns: Any = returns) -> Any:
            return _take_with_index(returns, input, median(input, dim, skip), dim, keepdim)

        def whole(input: Any, dim: int | None = None, keepdim: bool = False, along: Any = along) -> Any:
            """Return the median; of two middle elements the lower."""
            if dim is not None:
                return along(input, dim, keepdim)
            return (
                _with_shared_gradient(input, along(lax.stop_gradient(input).ravel(), 0, False)[0])
                if input.size
                else jnp.full((), jnp.nan, input.dtype)
            )

        op(name)(whole)


_register_medians()


@op("mode")
@allow_scalar_input
def mode(input: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the most frequent value (the smallest of several), and its last index."""
    x, places = _sort_with_indices(lax.stop_gradient(input), dim, False)
    n = _positions(x, dim)
    first = jnp.concatenate([jnp.ones_like(lax.slice_in_dim(x, 0, 1, axis=dim), bool), jnp.diff(x, axis=dim) != 0], dim)
    length = n - lax.cummax(jnp.where(first, n, 0), dim % x.ndim)
    return _take_with_index(
        torch.return_types.mode, input, jnp.take_along_axis(places, jnp.argmax(length, dim, keepdims=True), dim), dim, keepdim
    )


def _register_quantiles() -> None:
    for name, f in {"quantile": jnp.quantile, "nanquantile": jnp.nanquantile}.items():

        def quantile(
            input: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear", f: Any = f
        ) -> Any:
            x = input if input.ndim else input[None]
            return f(x, jnp.asarray(q, x.dtype), axis=dim, keepdims=keepdim and input.ndim > 0, method=interpolation)

        op(name)(quantile)


_register_quantiles()


def _register_cumulative_extremes() -> None:
    for name, f in {"cummax": lax.cummax, "cummin": lax.cummin}.items():
        returns = getattr(torch.return_types, name)

        @allow_scalar_input
        def running(input: Any, dim: int, f: Any = f, returns: Any = returns) -> Any:
            """Return the cumulative extreme, and its index (the last of equal elements). NaN stays NaN."""
            x, dim = lax.stop_gradient(input), dim % input.ndim
            best = f(x, axis=dim)
            own = (x == best) | jnp.isnan(x)
            return _take_with_index(returns, input, lax.cummax(jnp.where(own, _positions(x, dim), 0), axis=dim), dim, True)

        op(name)(running)


_register_cumulative_extremes()


@op("searchsorted")
def searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Return the indices at which values would be inserted into sorted lines."""
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    rows, values = promote(sorted_sequence, input)
    side = "right" if right or side == "right" else "left"
    search = jnp.vectorize(lambda row, x: jnp.searchsorted(row, x, side=side), signature="(n),(m)->(m)")
    found = jnp.searchsorted(rows, values, side=side) if rows.ndim == 1 else search(rows, values)
    return found.astype(jnp.int32) if out_int32 else _to_int64(found)


@op("bucketize")
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Return the index of the interval between boundaries for each value."""
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


@op("isin")
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> jax.Array:
    """Return whether each element is one of the test elements."""
    return jnp.isin(*promote(elements, test_elements), invert=invert)


def _widen_empty_range(low: Any, high: Any, room: float) -> tuple[Any, Any]:
    """Return the ends of a histogram's range, widened if they are equal."""
    same = low == high
    return jnp.where(same, low - room, low), jnp.where(same, high + room, high)


@op("histc")
def histc(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> jax.Array:
    """Count the values in bins of equal width. Values outside of the range are not counted."""
    x = lax.stop_gradient(input).ravel()
    low, high = _widen_empty_range(*((jnp.min(x), jnp.max(x)) if min == max and x.size else (min, max)), 1)
    bin = jnp.clip(jnp.floor((x - low) * bins / (high - low)).astype(jnp.int32), 0, bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, x.dtype).at[bin].add(inside.astype(x.dtype))


@op("histogram")
def histogram(input: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Return the counts of values between edges, and the edges. Edges are given or equally spaced."""
    x = lax.stop_gradient(input).ravel()
    low, high = range or ((jnp.min(x), jnp.max(x)) if x.size else (0, 1))
    edges = bins if hasattr(bins, "ndim") else jnp.linspace(*_widen_empty_range(low, high, 0.5), bins + 1, dtype=x.dtype)
    counts = jnp.histogram(x, edges, weights=None if weight is None else weight.ravel(), density=density)[0]
    both: Any = [counts.astype(x.dtype), edges]
    return torch.return_types.histogram(both)


@op("bincount")
def bincount(input: Any, weights: Any = None, minlength: int = 0) -> jax.Array:
    """Count how often each number occurs."""
    return jnp.bincount(input, weights, length=max(minlength, int(input.max()) + 1))


@op("nonzero_static")
def nonzero_static(input: jax.Array, *, size: int, fill_value: int = -1) -> Any:
    """Return the indices of the first `size` nonzero elements, filled up with `fill_value`."""
    if not input.ndim or not input.size:
        return jnp.full((size, input.ndim), fill_value, jax_dtype(torch.int64))
    return _to_int64(jnp.argwhere(input, size=size, fill_value=fill_value))
