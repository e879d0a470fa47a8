"""New arrays that only jax holds."""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike, DTypeLike

from bridge._compat.types import Device
from bridge._interop.dlpack import ALIGNMENT
from bridge._process import default_settings

_SMALL = 1 << 20  # bytes up to which a second copy costs less than compiling


def full(shape: tuple[int, ...], dtype: DTypeLike, value: ArrayLike, device: Device) -> jax.Array:
    """A new array of one value that only jax holds; ready."""
    return filled([(shape, dtype, value)], device)[0].block_until_ready()


def filled(kinds: Sequence[tuple[tuple[int, ...], DTypeLike, ArrayLike]], device: Device) -> list[jax.Array]:
    """New arrays that only jax holds, each of one value, asked for at once: one by one two thousand took 0.5 to 1.1 s. To be waited for.

    Args:
      kinds: of each array the shape, the dtype and the value.
      device: where they shall be.
    """
    keys = [
        (tuple(shape), np.dtype(dtype), np.asarray(value, dtype).tobytes()) for shape, dtype, value in kinds
    ]  # -0.0 is another than 0.0
    values = dict(zip(keys, (value for *_, value in kinds), strict=True))
    # The largest first: XLA writes each in one thread, and the last one has the others wait.
    in_turn = sorted(range(len(keys)), key=lambda i: -math.prod(keys[i][0]) * keys[i][1].itemsize)
    with default_settings(), jax.default_device(device):
        copied = {key: jax.device_put(x, device) for key in values if (x := _copied(key, values[key], device)) is not None}
        copies = iter(jax.device_put([copied[keys[i]] for i in in_turn if keys[i] in copied], device, may_alias=False))
        made = {i: next(copies) if keys[i] in copied else jnp.full(keys[i][0], values[keys[i]], keys[i][1]) for i in in_turn}
    return [made[i] for i in range(len(keys))]


def _copied(key: tuple[tuple[int, ...], np.dtype, bytes], value: ArrayLike, device: Device) -> np.ndarray | None:
    """What an array of one value is to be copied from, with no program: on a CPU zeros, and few of another; None where one must fill it."""
    shape, dtype, of_one = key
    size = math.prod(shape) * dtype.itemsize
    if device.platform != "cpu":
        return None
    if not any(of_one):
        return _zeros(size).view(dtype).reshape(shape)
    return np.full(shape, value, dtype) if size <= _SMALL else None


_zero_pages = np.zeros(0, np.uint8)


def _zeros(size: int) -> np.ndarray:
    """So many zero bytes, aligned, to be read alone: their pages are then the system's one page of zeros."""
    global _zero_pages
    zeros = _zero_pages
    if len(zeros) < size:
        space = np.zeros(size + ALIGNMENT, np.uint8)
        _zero_pages = zeros = space[-space.ctypes.data % ALIGNMENT :][:size]
        zeros.flags.writeable = False
    return zeros[:size]


def constant(values: np.ndarray, device: Device) -> np.ndarray | jax.Array:
    """An argument that stays the same from call to call: on a device that has memory of its own, there."""
    return values if device.platform == "cpu" else _fresh(values, device).block_until_ready()


def _fresh(values: np.ndarray | jax.Array, device: Device) -> jax.Array:
    """A copy of an array that only jax holds. To be waited for, because torch may write into it.

    jnp.array would compile a program for each shape, which takes the new pages in one thread; here XLA copies in several.
    """
    with default_settings():
        return jax.device_put(jax.device_put(values, device), device, may_alias=False)


def return_freed() -> None:
    """Give the pages of freed torch buffers back to the system, where the C library can, and to the GPU.

    Adoption frees each parameter's old buffer, and compiling frees a lot: glibc keeps those pages in its arenas, and the
    state that is allocated next would come on top of them (2140 MiB at the peak for GPT-2 small, 1986 without).
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what torch's allocator keeps jax's cannot have
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
