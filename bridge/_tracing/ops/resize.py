"""Torch's `interpolate` and `Upsample`: resample an input, one dim after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridge._tracing.op_registry import op

_CUBIC = -0.75  # torch's coefficient, that of OpenCV
_CUBIC_ANTIALIAS = -0.5  # Pillow's coefficient, which torch uses with `antialias`
_Taps = Callable[[np.ndarray[Any, Any], int], list[tuple[Any, Any]]]


def _scale(given: float | None, size: int, out: int) -> float:
    """Return the distance in the input of one step in the output. A given scale factor has priority over the sizes, as in torch."""
    return 1 / given if given is not None and given > 0 else size / out


def _source_positions(size: int, out: int, scale: float | None, align_corners: bool) -> np.ndarray[Any, Any]:
    """Return the position in the input of each element of the output."""
    steps = np.arange(out)
    if align_corners:
        return steps * ((size - 1) / (out - 1) if out > 1 else 0.0)
    return (steps + 0.5) * _scale(scale, size, out) - 0.5


def _linear_taps(at: np.ndarray[Any, Any], size: int) -> list[tuple[Any, Any]]:
    at = np.maximum(at, 0.0)
    low = np.minimum(np.floor(at).astype(int), size - 1)
    share = np.clip(at - low, 0.0, 1.0)
    return [(low, 1 - share), (np.minimum(low + 1, size - 1), share)]


def cubic_weight(d: Any, a: float = _CUBIC) -> Any:
    """Return the weight of Keys' cubic convolution at a distance from zero to two, https://doi.org/10.1109/TASSP.1981.1163711."""
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return (np if isinstance(d, np.ndarray) else jnp).where(d <= 1, near, far)


def _cubic_taps(at: np.ndarray[Any, Any], size: int) -> list[tuple[Any, Any]]:
    """Return indices and weights of the four elements next to each position. Beyond the edge the index is that of the edge."""
    low = np.floor(at).astype(int)
    return [(np.clip(low + i, 0, size - 1), cubic_weight(np.abs(at - low - i))) for i in (-1, 0, 1, 2)]


def _lanczos(d: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(d < 3, np.sinc(d) * np.sinc(d / 3), 0.0)


# The weight as a function of the distance, and the distance beyond which the weight is zero.
_FILTERS: dict[str, tuple[Any, int]] = {
    "bilinear": (lambda d: np.maximum(1 - d, 0.0), 1),
    "bicubic": (lambda d: np.where(d < 2, cubic_weight(d, _CUBIC_ANTIALIAS), 0.0), 2),
    "lanczos": (_lanczos, 3),
}


def _resize_antialiased(
    x: Any, sizes: Sequence[int] | None, align_corners: bool, scales: Sequence[float | None], kernel: tuple[Any, int]
) -> Any:
    """Resize with `antialias`: if the size shrinks, the filter is widened by the scale."""
    weight, reach = kernel
    for axis, out, given in _resized_dims(x, sizes, scales):
        size = x.shape[axis]
        scale = ((size - 1) / (out - 1) if out > 1 else 0.0) if align_corners else _scale(given, size, out)
        wide = max(scale, 1.0)
        centre = scale * (np.arange(out) + 0.5)[:, None]
        first = np.maximum(np.trunc(centre - reach * wide + 0.5), 0)
        last = np.minimum(np.trunc(centre + reach * wide + 0.5), size)
        at = np.arange(size)
        shares = np.where((at >= first) & (at < last), weight(np.abs(at - centre + 0.5) / wide), 0.0)
        shares = jnp.asarray(shares / shares.sum(1, keepdims=True), x.dtype)
        x = jnp.moveaxis(jnp.tensordot(x, shares, ((axis,), (1,)), precision="highest"), -1, axis)
    return x


def _resize(x: Any, sizes: Sequence[int] | None, align_corners: bool, scales: Sequence[float | None], taps: _Taps) -> Any:
    """Resize by weighted sums. `taps` gives indices and weights of the elements near each position."""
    for axis, out, scale in _resized_dims(x, sizes, scales):
        size = x.shape[axis]
        if out == size and (align_corners or scale in (None, 1)):
            continue
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        parts = taps(_source_positions(size, out, scale, align_corners), size)
        x = sum(jnp.take(x, places, axis) * jnp.asarray(weights, x.dtype).reshape(shape) for places, weights in parts)
    return x


def _resize_nearest(x: Any, sizes: Sequence[int] | None, scales: Sequence[float | None], middle: float) -> Any:
    """Resize by the nearest element. `middle`: the point of an output element that is mapped to the input, from 0 to 1."""
    for axis, out, scale in _resized_dims(x, sizes, scales):
        size = x.shape[axis]
        places = np.minimum(np.floor((np.arange(out) + middle) * np.float32(_scale(scale, size, out))).astype(int), size - 1)
        if out % size == 0 and (places == np.arange(out) // (out // size)).all():  # its gradient is a sum, without a scatter
            repeated = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], out // size, *x.shape[axis + 1 :]))
            x = repeated.reshape(*x.shape[:axis], out, *x.shape[axis + 1 :])
        else:
            x = jnp.take(x, places, axis)
    return x


def _resize_in_float(resize: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Resize integers in float32, and round and clip the result."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return resize(x, *args)
    bounds = jnp.iinfo(x.dtype)
    return jnp.clip(jnp.round(resize(x.astype(jnp.float32), *args)), bounds.min, bounds.max).astype(x.dtype)


def _resized_dims(x: Any, sizes: Sequence[int] | None, scales: Sequence[float | None]) -> list[tuple[int, int, float | None]]:
    """Return the axis, the output size and the scale factor of each dim behind the channels."""
    scales = list(scales) or [None] * (x.ndim - 2)
    if sizes is None:
        sizes = [math.floor(size * (scale or 1)) for size, scale in zip(x.shape[2:], scales, strict=True)]
    return list(zip(range(2, x.ndim), map(int, sizes), scales, strict=True))


def _register() -> None:
    for dims in (1, 2, 3):
        for name, middle in (("nearest", 0.0), ("_nearest_exact", 0.5)):
            stem = "upsample_nearest" if name == "nearest" else "_upsample_nearest_exact"

            def nearest(input: Any, output_size: Any, scale_factors: Any = None, middle: float = middle) -> Any:
                return _resize_nearest(input, output_size, scale_factors or (), middle)

            op(f"{stem}{dims}d")(nearest)
    for name, taps in {"linear1d": _linear_taps, "bilinear2d": _linear_taps, "trilinear3d": _linear_taps, "bicubic2d": _cubic_taps}.items():

        def smooth(input: Any, output_size: Any, align_corners: bool, scale_factors: Any = None, taps: _Taps = taps) -> Any:
            return _resize_in_float(_resize, input, output_size, align_corners, scale_factors or (), taps)

        op(f"upsample_{name}")(smooth)
    for name, kernel in _FILTERS.items():

        def smoothed(input: Any, output_size: Any, align_corners: bool, scale_factors: Any = None, kernel: Any = kernel) -> Any:
            return _resize_in_float(_resize_antialiased, input, output_size, align_corners, scale_factors or (), kernel)

        op(f"_upsample_{name}2d_aa")(smoothed)


_register()
