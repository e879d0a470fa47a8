"""Torch's convolutions, pooling, padding and patches."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bridge._tracing.materialize import barrier, materialize, on_cpu
from bridge._tracing.op_registry import Op, add_ops, functions_named, op
from bridge._tracing.promotion import jax_dtype

# Windows of at most this many elements are reduced with one operation for each element.
MAX_UNROLLED_TAPS = 16


def per_dim(n: int, x: Any) -> tuple[int, ...]:
    """Return one number for each of n dims."""
    return (int(x),) * n if isinstance(x, int | np.integer) else tuple(x) * n if len(x) == 1 else tuple(x)


def add_batch_dim(input: Any, n: int) -> tuple[Any, bool]:
    """Return the input with a batch dim in front, and whether it had none."""
    return (input[None], True) if input.ndim == n + 1 else (input, False)


def conv(n: int, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> jax.Array:
    """Convolve over n dims."""
    input, alone = add_batch_dim(input, n)
    stride, dilation = per_dim(n, stride), per_dim(n, dilation)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(p // 2, p - p // 2) for p in total]
    else:
        pads = [(p, p) for p in per_dim(n, 0 if padding == "valid" else padding)]
    out = lax.conv_general_dilated(input, weight, stride, pads, rhs_dilation=dilation, feature_group_count=groups)
    out = out if bias is None else out + bias.reshape((-1,) + (1,) * n)
    return out[0] if alone else out


def conv_transpose(
    n: int, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any
) -> jax.Array:
    """Return the gradient of a convolution with respect to its input."""
    input, alone = add_batch_dim(input, n)
    stride, padding, extra, dilation = (per_dim(n, x) for x in (stride, padding, output_padding, dilation))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    # (in, out / groups, ...) -> (out, in / groups, ...), flipped.
    kernel = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(-1, weight.shape[0] // groups, *weight.shape[2:])
    kernel = jnp.flip(kernel, tuple(range(2, n + 2)))
    out = lax.conv_general_dilated(input, kernel, (1,) * n, pads, lhs_dilation=stride, rhs_dilation=dilation, feature_group_count=groups)
    out = out if bias is None else out + bias.reshape((-1,) + (1,) * n)
    return out[0] if alone else out


def _register_convolutions() -> None:
    for n in (1, 2, 3):

        def forward(
            input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, n: int = n
        ) -> jax.Array:
            return conv(n, input, weight, bias, stride, padding, dilation, groups)

        def transposed(
            input: Any,
            weight: Any,
            bias: Any = None,
            stride: Any = 1,
            padding: Any = 0,
            output_padding: Any = 0,
            groups: int = 1,
            dilation: Any = 1,
            n: int = n,
        ) -> jax.Array:
            return conv_transpose(n, input, weight, bias, stride, padding, output_padding, groups, dilation)

        op(f"conv{n}d")(forward)
        op(f"conv_transpose{n}d")(transposed)


_register_convolutions()


def _reduce_window_args(input: Any, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    """Return the arguments of `reduce_window`. `ceil_mode` pads the right side until each window that starts inside fits."""
    kernel = per_dim(n, kernel)
    stride = kernel if stride is None or stride == [] or stride == () else per_dim(n, stride)
    padding, dilation = per_dim(n, padding), per_dim(n, dilation)
    pads = []
    for size, k, s, p, d in zip(input.shape[2:], kernel, stride, padding, dilation, strict=True):
        span = size + 2 * p - d * (k - 1) - 1
        count = (math.ceil(span / s) if ceil_mode else span // s) + 1
        if ceil_mode and (count - 1) * s >= size + p:
            count -= 1
        pads.append((p, max(p, (count - 1) * s + d * (k - 1) + 1 - size - p)))
    lead = (1, 1)
    return lead + kernel, lead + stride, [(0, 0), (0, 0), *pads], lead + dilation


def _lowest(dtype: Any) -> Any:
    return np.asarray(-jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min, dtype)


def max_pool(n: int, input: Any, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Any:
    """Return the largest element of each window. Dilated windows are gathered, because jax has no derivative for them."""
    if any(d != 1 for d in per_dim(n, dilation)):
        return max_pool_with_indices(n, input, kernel, stride, padding, dilation, ceil_mode)[0]
    input, alone = add_batch_dim(input, n)
    window, strides, pads, dilations = _reduce_window_args(input, n, kernel, stride, padding, dilation, ceil_mode)
    low = _lowest(input.dtype)
    if math.prod(window) <= MAX_UNROLLED_TAPS and all(k <= s for k, s in zip(window, strides, strict=True)) and set(dilations) == {1}:
        tiles = _nonoverlapping_windows(input, low, window[2:], strides[2:], pads[2:])
        out = jnp.moveaxis(materialize(_window_max(on_cpu(), tiles)), -1, 1)
    else:
        out = lax.reduce_window(input, low, lax.max, window, strides, pads, window_dilation=dilations)
    return out[0] if alone else out


def _nonoverlapping_windows(input: Any, low: Any, window: tuple[int, ...], strides: tuple[int, ...], pads: Any) -> jax.Array:
    """Return windows that do not overlap as (N, window, element, ..., C). Loops over this layout need no integer division."""
    sizes = list(zip(input.shape[2:], window, strides, pads, strict=True))
    counts = [(size + sum(pad) - k) // s + 1 for size, k, s, pad in sizes]
    fit = [(pad[0], count * s - size - pad[0], 0) for count, (size, _, s, pad) in zip(counts, sizes, strict=True)]
    split = [n for count, s in zip(counts, strides, strict=True) for n in (count, s)]
    last = jnp.moveaxis(input, 1, -1)
    tiles = lax.pad(last, low, [(0, 0, 0), *fit, (0, 0, 0)]).reshape(last.shape[0], *split, last.shape[-1])
    return tiles[(slice(None), *(slice(k) for full in window for k in (None, full)))]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _window_max(stored: bool, tiles: Any) -> Any:
    """Return the largest element of each window, (N, window, ..., C).

    The first of equal elements has the gradient, and the last of NaNs, as in torch. The gradient is a comparison; the one of
    `reduce_window` is a scatter, which is slower on a CPU. `stored`: store the position of the largest element for the gradient.
    Else the gradient computes the position again for each element of a window.
    """
    return functools.reduce(lax.max, _taps(tiles))


def _taps(tiles: Any) -> list[Any]:
    """Return one array for each position in a window."""
    places = itertools.product(*map(range, tiles.shape[2:-1:2]))
    return [tiles[(slice(None), *(i for k in at for i in (slice(None), k)))] for at in places]


@_window_max.defjvp
def _(stored: bool, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (tiles,), (change,) = primals, tangents
    axes, out, taps = tuple(range(2, tiles.ndim - 1, 2)), _window_max(stored, tiles), list(enumerate(_taps(tiles)))
    which = jnp.zeros(out.shape, jnp.int32)
    for i, x in taps[::-1]:
        which = jnp.where(x == out, jnp.int32(i), which)
    for i, x in taps:
        which = jnp.where(x != x, jnp.int32(i), which)
    which = barrier(which) if stored else which
    inner = [n if a in axes else 1 for a, n in enumerate(tiles.shape)]
    own = jnp.expand_dims(which, axes) == jnp.arange(len(taps), dtype=jnp.int32).reshape(inner)
    return out, jnp.sum(jnp.where(own, change, jnp.zeros((), change.dtype)), axes)


def max_pool_with_indices(
    n: int, input: Any, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    """Return the largest element of each window, and its index in the flattened plane."""
    input, alone = add_batch_dim(input, n)
    window, strides, pads, dilations = _reduce_window_args(input, n, kernel, stride, padding, dilation, ceil_mode)
    plane = input.shape[2:]
    places = jnp.broadcast_to(jnp.arange(math.prod(plane), dtype=jnp.int32).reshape(plane), input.shape)
    spatial = [(p[0], p[1], 0) for p in pads]
    padded = lax.pad(input, _lowest(input.dtype), spatial)
    places = lax.pad(places, np.asarray(0, np.int32), spatial)
    starts = [
        np.arange(0, size - d * (k - 1), s) for size, k, s, d in zip(padded.shape[2:], window[2:], strides[2:], dilations[2:], strict=True)
    ]
    reaches = [start[:, None] + np.arange(k) * d for start, k, d in zip(starts, window[2:], dilations[2:], strict=True)]
    out = max_with_indices(padded, places, reaches)
    return tuple(x[0] for x in out) if alone else out


def max_with_indices(input: Any, places: Any, reaches: list[Any]) -> tuple[Any, Any]:
    """Return the largest element of each window of (N, C, ...), and its index.

    `reaches`: for each dim, the positions of the elements of its windows, (windows, elements).
    """
    n, counts = len(reaches), [len(reach) for reach in reaches]
    for i, reach in enumerate(reaches):
        input, places = (jnp.take(x, reach, axis=2 + 2 * i) for x in (input, places))
    order = (0, 1, *range(2, 2 + 2 * n, 2), *range(3, 3 + 2 * n, 2))
    input, places = (jnp.transpose(x, order).reshape(*x.shape[:2], *counts, math.prod(x.shape[3::2])) for x in (input, places))
    best = jnp.argmax(input, -1, keepdims=True)
    values, places = (jnp.take_along_axis(x, best, -1)[..., 0] for x in (input, places))
    return values, places.astype(jax_dtype(torch.int64))


def avg_pool(
    n: int,
    input: Any,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Return the mean of each window; integers are truncated. The padding that `ceil_mode` adds on the right is never counted."""
    input, alone = add_batch_dim(input, n)
    window, strides, pads, _ = _reduce_window_args(input, n, kernel, stride, padding, 1, ceil_mode)
    zero = np.asarray(0, input.dtype)
    out = lax.reduce_window(input, zero, lax.add, window, strides, pads)
    mean = lax.div if jnp.issubdtype(out.dtype, jnp.integer) else operator.truediv
    if divisor_override is not None:
        out = mean(out, jnp.full(out.shape, divisor_override, out.dtype))
        return out[0] if alone else out
    ones, outer = np.ones(input.shape[2:], np.float32), pads
    if count_include_pad:
        inner = [(p, p) for p in per_dim(n, padding)]
        ones = np.pad(ones, inner, constant_values=1)
        outer = [(0, 0), (0, 0), *((a - i, b - i) for (a, b), (i, _) in zip(pads[2:], inner, strict=True))]
    count = lax.reduce_window(jnp.asarray(ones)[None, None], np.float32(0), lax.add, window, strides, outer)
    out = mean(out, jnp.broadcast_to(count.astype(out.dtype), out.shape))
    return out[0] if alone else out


def adaptive_bins(size: int, out: int) -> list[tuple[int, int]]:
    """Return the start and the end (exclusive) of each of torch's adaptive windows."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def adaptive_pool(n: int, input: Any, output_size: Any, reduce: Any) -> Any:
    """Reduce a fixed number of windows along each of the last n dims. They overlap if their number does not divide the size."""
    sizes = [output_size] * n if isinstance(output_size, int) or output_size is None else list(output_size)
    for axis, out in zip(range(input.ndim - n, input.ndim), sizes, strict=True):
        size = input.shape[axis]
        if out is None or out == size:
            continue
        if size % out == 0:
            input = reduce(input.reshape(*input.shape[:axis], out, size // out, *input.shape[axis + 1 :]), axis + 1)
        else:
            parts = [reduce(lax.slice_in_dim(input, a, b, axis=axis), axis) for a, b in adaptive_bins(size, out)]
            input = jnp.stack(parts, axis)
    return input


def _register_pools() -> None:
    for n in (1, 2, 3):

        def largest(
            input: Any,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            dilation: Any = 1,
            ceil_mode: bool = False,
            return_indices: bool = False,
            n: int = n,
        ) -> Any:
            pool = max_pool_with_indices if return_indices else max_pool
            return pool(n, input, kernel_size, stride, padding, dilation, ceil_mode)

        def means(
            input: Any,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            ceil_mode: bool = False,
            count_include_pad: bool = True,
            divisor_override: int | None = None,
            n: int = n,
        ) -> Any:
            return avg_pool(n, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

        def adaptive_means(input: Any, output_size: Any, n: int = n) -> Any:
            return adaptive_pool(n, input, output_size, lambda x, a: jnp.mean(x, a))

        def largest_with_places(
            input: Any,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            dilation: Any = 1,
            ceil_mode: bool = False,
            return_indices: bool = True,
            n: int = n,
        ) -> Any:
            return max_pool_with_indices(n, input, kernel_size, stride, padding, dilation, ceil_mode)

        op(f"max_pool{n}d")(largest)
        op(f"avg_pool{n}d")(means)
        op(f"adaptive_avg_pool{n}d")(adaptive_means)
        op(f"max_pool{n}d_with_indices")(largest_with_places)


_register_pools()


def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Pad from the last dim on; negative padding crops. In mode "replicate" it may crop more than the size of the dim."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (input.ndim - len(pairs)) + pairs[::-1]
    if mode == "replicate" and min(pad, default=0) < 0:
        for axis, (a, b) in enumerate(widths):
            n = input.shape[axis]
            input = jnp.take(input, np.clip(np.arange(a + n + b), a, a + n - 1) - a, axis) if (a, b) != (0, 0) else input
        return input
    cut = tuple(slice(max(0, -a), n - max(0, -b)) for n, (a, b) in zip(input.shape, widths, strict=True))
    input, widths = input[cut], [(max(a, 0), max(b, 0)) for a, b in widths]
    if mode == "constant":
        return jnp.pad(input, widths, constant_values=jnp.asarray(0 if value is None else value, input.dtype))
    return jnp.pad(input, widths, mode={"circular": "wrap", "reflect": "reflect", "replicate": "edge"}[mode])


add_ops(dict.fromkeys(functions_named("pad"), Op(pad, None)))


@op("im2col")
def im2col(input: jax.Array, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> jax.Array:
    """Return the patches of images as columns (N, C * elements of a patch, patches), for `unfold`."""
    images = input if input.ndim == 4 else input[None]
    edges = [(p, p) for p in padding]
    found = lax.conv_general_dilated_patches(images, tuple(kernel_size), tuple(stride), edges, rhs_dilation=tuple(dilation))
    found = found.reshape(*found.shape[:2], math.prod(found.shape[2:]))
    return found if input.ndim == 4 else found[0]


@op("col2im")
def col2im(input: jax.Array, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Return the images of columns, with overlapping elements summed, for `fold`: the transpose of `im2col`."""
    columns = input if input.ndim == 3 else input[None]
    shape = columns.shape[0], columns.shape[1] // math.prod(kernel_size), *output_size
    images = jax.ShapeDtypeStruct(shape, columns.dtype)
    (found,) = jax.linear_transpose(lambda x: im2col(x, kernel_size, dilation, padding, stride), images)(columns)
    return found if input.ndim == 3 else found[0]


@op("pixel_shuffle")
def pixel_shuffle(input: jax.Array, upscale_factor: int) -> jax.Array:
    """Distribute channels over a finer grid."""
    *lead, c, h, w = input.shape
    r = upscale_factor
    x = input.reshape(*lead, c // r**2, r, r, h, w)
    n = len(lead)
    return jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2)).reshape(*lead, c // r**2, h * r, w * r)


@op("pixel_unshuffle")
def pixel_unshuffle(input: jax.Array, downscale_factor: int) -> jax.Array:
    """Invert `pixel_shuffle`."""
    *lead, c, h, w = input.shape
    r, n = downscale_factor, len(lead)
    x = input.reshape(*lead, c, h // r, r, w // r, r)
    return jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3)).reshape(*lead, c * r**2, h // r, w // r)


@op("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(input: jax.Array, groups: int) -> jax.Array:
    """Interleave the channels of groups."""
    n, c, *rest = input.shape
    return jnp.swapaxes(input.reshape(n, groups, c // groups, *rest), 1, 2).reshape(input.shape)
