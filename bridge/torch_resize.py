"""Torch's `interpolate` and `Upsample`: samples of an input between its places, one dim after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .torch_calls import op

_CUBIC = -0.75  # torch's coefficient, as of OpenCV
_Taps = Callable[[np.ndarray[Any, Any], int], list[tuple[Any, Any]]]


def _scale(given: float | None, size: int, out: int) -> float:
    """What a step in the output is in the input; the factor itself where one was given, as torch has it."""
    return 1 / given if given is not None and given > 0 else size / out


def _places(size: int, out: int, scale: float | None, align_corners: bool) -> np.ndarray[Any, Any]:
    """Where in the input each place of the output lies."""
    steps = np.arange(out)
    if align_corners:
        return steps * ((size - 1) / (out - 1) if out > 1 else 0.0)
    return (steps + 0.5) * _scale(scale, size, out) - 0.5


def _linear(at: np.ndarray[Any, Any], size: int) -> list[tuple[Any, Any]]:
    at = np.maximum(at, 0.0)
    low = np.minimum(np.floor(at).astype(int), size - 1)
    share = np.clip(at - low, 0.0, 1.0)
    return [(low, 1 - share), (np.minimum(low + 1, size - 1), share)]


def _cubic(at: np.ndarray[Any, Any], size: int) -> list[tuple[Any, Any]]:
    """Keys' convolution, https://doi.org/10.1109/TASSP.1981.1163711, over the four next to a place; beyond the edge the edge."""
    low, a, taps = np.floor(at).astype(int), _CUBIC, []
    for offset in (-1, 0, 1, 2):
        d = np.abs(at - low - offset)
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        taps.append((np.clip(low + offset, 0, size - 1), np.where(d <= 1, near, far)))
    return taps


def _resized(x: Any, sizes: Sequence[int] | None, align_corners: bool, scales: Sequence[float | None], taps: _Taps) -> Any:
    for axis, out, scale in _dims(x, sizes, scales):
        size = x.shape[axis]
        if out == size and (align_corners or scale in (None, 1)):
            continue
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        parts = taps(_places(size, out, scale, align_corners), size)
        x = sum(jnp.take(x, places, axis) * jnp.asarray(weights, x.dtype).reshape(shape) for places, weights in parts)
    return x


def _nearest(x: Any, sizes: Sequence[int] | None, scales: Sequence[float | None], middle: float) -> Any:
    for axis, out, scale in _dims(x, sizes, scales):
        size = x.shape[axis]
        places = np.minimum(np.floor((np.arange(out) + middle) * np.float32(_scale(scale, size, out))).astype(int), size - 1)
        if out % size == 0 and (places == np.arange(out) // (out // size)).all():  # whose gradient is a sum, without a scatter
            repeated = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], out // size, *x.shape[axis + 1 :]))
            x = repeated.reshape(*x.shape[:axis], out, *x.shape[axis + 1 :])
        else:
            x = jnp.take(x, places, axis)
    return x


def _dims(x: Any, sizes: Sequence[int] | None, scales: Sequence[float | None]) -> list[tuple[int, int, float | None]]:
    """Axis, size and factor of each dim behind the channels."""
    scales = list(scales) or [None] * (x.ndim - 2)
    if sizes is None:
        sizes = [math.floor(size * (scale or 1)) for size, scale in zip(x.shape[2:], scales, strict=True)]
    return list(zip(range(2, x.ndim), map(int, sizes), scales, strict=True))


def _register() -> None:
    for dims in (1, 2, 3):
        for name, middle in (("nearest", 0.0), ("_nearest_exact", 0.5)):
            stem = "upsample_nearest" if name == "nearest" else "_upsample_nearest_exact"

            def nearest(input: Any, output_size: Any, scale_factors: Any = None, middle: float = middle) -> Any:
                return _nearest(input, output_size, scale_factors or (), middle)

            op(f"{stem}{dims}d")(nearest)
    for name, taps in {"linear1d": _linear, "bilinear2d": _linear, "trilinear3d": _linear, "bicubic2d": _cubic}.items():

        def smooth(input: Any, output_size: Any, align_corners: bool, scale_factors: Any = None, taps: _Taps = taps) -> Any:
            return _resized(input, output_size, align_corners, scale_factors or (), taps)

        op(f"upsample_{name}")(smooth)


_register()
