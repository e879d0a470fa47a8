"""Torch's `grid_sample` and `affine_grid`: samples of an input at positions that a tensor gives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge._tracing.op_registry import op
from bridge._tracing.promotion import promote

from .resize import cubic_weight

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2  # the values of `interpolation_mode` and `padding_mode` in torch.grid_sampler
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalize(x: Any, size: int, align_corners: bool) -> Any:
    """Convert positions in [-1, 1] to indices."""
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _clip(at: Any, size: int) -> jax.Array:
    """Clip indices to the input. The gradient at its edges is zero, as in torch."""
    return jnp.where(at <= 0, jnp.zeros((), at.dtype), jnp.where(at >= size - 1, jnp.asarray(size - 1, at.dtype), at))


def _reflect(at: Any, size: int, align_corners: bool) -> jax.Array:
    """Reflect indices at the edges, as often as needed."""
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(at)
    at = at - low
    at = jnp.where(at < 0, -at, at)
    rest, flips = jnp.fmod(at, span), jnp.floor(at / span)
    return jnp.where(flips % 2 == 0, rest, span - rest) + low


def _apply_padding(at: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Apply a padding mode to indices."""
    if padding == _REFLECTION:
        at = _reflect(at, size, align_corners)
    return at if padding == _ZEROS else _clip(at, size)


def _take_or_zero(flat: Any, places: list[Any], sizes: tuple[int, ...]) -> jax.Array:
    """Return elements of the flattened (N, C, size) at integer indices, (N, P) for each dim; zero where an index is outside."""
    inside, where = jnp.ones((), bool), jnp.zeros((), jnp.int32)
    for at, size in zip(places, sizes, strict=True):
        inside &= (at >= 0) & (at <= size - 1)
        where = where * size + jnp.clip(at, 0, size - 1).astype(jnp.int32)
    found = jnp.take_along_axis(flat, where[:, None], 2)
    return jnp.where(inside[:, None], found, jnp.zeros((), flat.dtype))


@op("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """Return samples of (N, C, ...) at positions (N, ..., dims). The coordinate of the input's last dim comes first."""
    input, grid = promote(input, grid)
    n, sizes = grid.shape[-1], input.shape[2:]
    flat = input.reshape(*input.shape[:2], math.prod(sizes))
    each = [grid[..., n - 1 - d].reshape(grid.shape[0], math.prod(grid.shape[1:-1])) for d in range(n)]
    each = [_unnormalize(x, size, align_corners) for x, size in zip(each, sizes, strict=True)]
    if interpolation_mode != _BICUBIC:
        each = [_apply_padding(x, size, padding_mode, align_corners) for x, size in zip(each, sizes, strict=True)]
    if interpolation_mode == _NEAREST:
        out = _take_or_zero(flat, [jnp.round(x) for x in each], sizes)
    else:
        out = jnp.zeros((), flat.dtype)
        lows = [jnp.floor(x) for x in each]
        for offset in itertools.product((-1, 0, 1, 2) if interpolation_mode == _BICUBIC else (0, 1), repeat=n):
            taps = [low + o for low, o in zip(lows, offset, strict=True)]
            shares = [jnp.abs(x - tap) for x, tap in zip(each, taps, strict=True)]
            if interpolation_mode == _BICUBIC:
                shares = [cubic_weight(s) for s in shares]
                taps = [_apply_padding(t, size, padding_mode, align_corners) for t, size in zip(taps, sizes, strict=True)]
            else:
                shares = [1 - (x - low) if o == 0 else x - low for x, low, o in zip(each, lows, offset, strict=True)]
            share: Any = math.prod(shares)
            out = out + _take_or_zero(flat, taps, sizes) * share[:, None]
    return out.reshape(*input.shape[:2], *grid.shape[1:-1])


@op("affine_grid_generator")
def affine_grid_generator(theta: jax.Array, size: Any, align_corners: bool) -> jax.Array:
    """Return positions for `grid_sample`: the grid of the output, mapped by an affine map for each batch element."""
    axes = []
    for n in tuple(size)[2:]:
        steps = np.linspace(-1, 1, n) if n > 1 else np.zeros(n)
        axes.append(steps if align_corners else steps * (n - 1) / max(n, 1))
    base = np.stack([*np.meshgrid(*axes, indexing="ij")[::-1], np.ones([len(a) for a in axes])], -1)
    return jnp.einsum("...i,nji->n...j", jnp.asarray(base, theta.dtype), theta, precision="highest")
