"""Torch's Fourier transforms, short-time Fourier transforms, and constructors of complex numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bridge._compat.torch import unpadded_stft
from bridge._tracing.op_registry import Op, add_ops, op
from bridge._tracing.promotion import promote

from .elementwise import to_floating

Dims = int | Sequence[int] | None

_INVERSE_NORM = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _transform(f: Callable[..., Any], input: Any, s: Any, dim: Dims, norm: str | None) -> Any:
    """Apply a transform along dims. -1 in `s` keeps the size of a dim; for the last dim of a half spectrum, the size of the full one."""
    x = to_floating(input)
    dims = list(range(x.ndim)) if dim is None and s is None else list(range(-len(s), 0)) if dim is None else dim
    dims = [dims] if isinstance(dims, int) else list(dims)
    if s is not None:
        sizes = [x.shape[d] for d in dims]
        if f in (jnp.fft.irfftn, _hfftn) and dims:
            sizes[-1] = 2 * (sizes[-1] - 1)
        s = [size if n == -1 else int(n) for n, size in zip([s] if isinstance(s, int) else s, sizes, strict=True)]
    return f(x, s=s, axes=dims, norm=norm)


def _hfftn(x: Any, s: Any, axes: Any, norm: Any) -> jax.Array:
    return jnp.fft.irfftn(jnp.conj(x), s=s, axes=axes, norm=_INVERSE_NORM[norm])


def _ihfftn(x: Any, s: Any, axes: Any, norm: Any) -> jax.Array:
    return jnp.conj(jnp.fft.rfftn(x, s=s, axes=axes, norm=_INVERSE_NORM[norm]))


def _register() -> None:
    for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
        line = getattr(jnp.fft, name)
        several = {"hfft": _hfftn, "ihfft": _ihfftn}.get(name) or getattr(jnp.fft, f"{name}n")

        def one(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None, line: Any = line) -> Any:
            return line(to_floating(input), n=n, axis=dim, norm=norm)

        op(f"fft_{name}")(one)
        for ending, dims in {"2": (-2, -1), "n": None}.items():

            def many(input: Any, s: Any = None, dim: Dims = dims, norm: str | None = None, several: Any = several) -> Any:
                return _transform(several, input, s, dim, norm)

            op(f"fft_{name}{ending}")(many)


_register()
op("fft_fftshift")(lambda input, dim=None: jnp.fft.fftshift(input, dim))
op("fft_ifftshift")(lambda input, dim=None: jnp.fft.ifftshift(input, dim))


def _centered_window(window: Any, win_length: int, n_fft: int, dtype: Any) -> jax.Array:
    """Return the window, centered in a frame of `n_fft` samples."""
    window = jnp.ones(win_length, dtype) if window is None else window
    left = (n_fft - win_length) // 2
    return jnp.pad(window, (left, n_fft - win_length - left))


def _frame_indices(size: int, n_fft: int, hop: int) -> Any:
    """Return the indices of each frame in the signal."""
    return np.arange(0, size - n_fft + 1, hop)[:, None] + np.arange(n_fft)


def stft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """Return the spectrum of each frame. torch pads the signal before this call."""
    win_length = win_length or n_fft
    window = _centered_window(window, win_length, n_fft, input.dtype)
    if align_to_window:  # the first window starts at the first sample
        left = (n_fft - win_length) // 2
        input = jnp.pad(input, [(0, 0)] * (input.ndim - 1) + [(left, n_fft - win_length - left)])
    frames = jnp.take(input, _frame_indices(input.shape[-1], n_fft, hop_length or n_fft // 4), -1) * window
    half = onesided is not False and not jnp.iscomplexobj(frames)
    out = (jnp.fft.rfft if half else jnp.fft.fft)(frames, norm="ortho" if normalized else None)
    out = jnp.swapaxes(out, -1, -2)
    return out if return_complex or (jnp.iscomplexobj(input) and return_complex is None) else jnp.stack([out.real, out.imag], -1)


add_ops({unpadded_stft: Op(stft, None)} if unpadded_stft is not None else {})


@op("istft")
def istft(
    input: jax.Array,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> jax.Array:
    """Return the signal whose frames have the spectra nearest to these: Griffin and Lim, https://doi.org/10.1109/TASSP.1984.1164317."""
    hop = hop_length or n_fft // 4
    window = _centered_window(window, win_length or n_fft, n_fft, input.real.dtype)
    norm = "ortho" if normalized else None
    spectra = jnp.swapaxes(input, -1, -2)
    frames = jnp.fft.ifft(spectra, norm=norm) if return_complex else jnp.fft.irfft(spectra[..., : n_fft // 2 + 1], n_fft, norm=norm)
    size = n_fft + hop * (input.shape[-1] - 1)
    places = _frame_indices(size, n_fft, hop)
    frames *= window
    signal = jnp.zeros((*frames.shape[:-2], size), frames.dtype).at[..., places].add(frames)
    weight = jnp.zeros(size, window.dtype).at[places].add(jnp.broadcast_to(jnp.square(jnp.abs(window)), places.shape))
    start = n_fft // 2 if center else 0
    end = min(size, start + length) if length is not None else size - start
    out = signal[..., start:end] / weight[start:end]
    return out if length is None else jnp.pad(out, [(0, 0)] * (out.ndim - 1) + [(0, length - out.shape[-1])])


@op("complex")
def complex_(real: Any, imag: Any) -> jax.Array:
    """Return complex numbers of real and imaginary parts."""
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@op("polar")
def polar(abs: Any, angle: Any) -> jax.Array:
    """Return complex numbers of absolute values and angles. The derivative at zero is zero, as in torch."""
    size, angle = promote(abs, angle)
    size = jnp.where(size == 0, lax.stop_gradient(size), size)
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


op("conj_physical")(lambda input: jnp.conj(input) if jnp.iscomplexobj(input) else input)
for _name in ("resolve_conj", "resolve_neg"):
    op(_name, views=True)(lambda input: input)
