"""Allocate arrays that only jax holds, so that they can be donated."""

# jax and torch annotate some of these functions only in part.
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

_MAX_COPIED_BYTES = 1 << 20  # bytes up to which copying an array is cheaper than compiling a program that fills it


def full(shape: tuple[int, ...], dtype: DTypeLike, value: ArrayLike, device: Device) -> jax.Array:
    """Return a new array of one value that only jax holds. The array is ready."""
    return full_many([(shape, dtype, value)], device)[0].block_until_ready()


def full_many(fills: Sequence[tuple[tuple[int, ...], DTypeLike, ArrayLike]], device: Device) -> list[jax.Array]:
    """Return new arrays that only jax holds, each of one value. They may not be ready. Allocating many at once is much faster.

    Args:
      fills: The shape, dtype and value of each array.
      device: The device of the arrays.
    """
    keys = [
        (tuple(shape), np.dtype(dtype), np.asarray(value, dtype).tobytes()) for shape, dtype, value in fills
    ]  # the bytes tell -0.0 from 0.0
    values = dict(zip(keys, (value for *_, value in fills), strict=True))
    # The largest first: XLA writes each array in one thread, and the others would wait for a large last one.
    largest_first = sorted(range(len(keys)), key=lambda i: -math.prod(keys[i][0]) * keys[i][1].itemsize)
    with default_settings(), jax.default_device(device):
        copy_sources = {key: jax.device_put(x, device) for key in values if (x := _copy_source(key, values[key], device)) is not None}
        copies = iter(jax.device_put([copy_sources[keys[i]] for i in largest_first if keys[i] in copy_sources], device, may_alias=False))
        arrays = {i: next(copies) if keys[i] in copy_sources else jnp.full(keys[i][0], values[keys[i]], keys[i][1]) for i in largest_first}
    return [arrays[i] for i in range(len(keys))]


def _copy_source(key: tuple[tuple[int, ...], np.dtype, bytes], value: ArrayLike, device: Device) -> np.ndarray | None:
    """Return a host array to copy, which needs no program: zeros, or a small array of another value. None if a program must fill it."""
    shape, dtype, value_bytes = key
    size = math.prod(shape) * dtype.itemsize
    if device.platform != "cpu":
        return None
    if not any(value_bytes):
        return _zero_bytes(size).view(dtype).reshape(shape)
    return np.full(shape, value, dtype) if size <= _MAX_COPIED_BYTES else None


_zero_pages = np.zeros(0, np.uint8)


def _zero_bytes(size: int) -> np.ndarray:
    """Return so many aligned, read-only zero bytes. The system maps all their pages to its one page of zeros."""
    global _zero_pages
    zeros = _zero_pages
    if len(zeros) < size:
        space = np.zeros(size + ALIGNMENT, np.uint8)
        _zero_pages = zeros = space[-space.ctypes.data % ALIGNMENT :][:size]
        zeros.flags.writeable = False
    return zeros[:size]


def constant_argument(values: np.ndarray, device: Device) -> np.ndarray | jax.Array:
    """Return an argument that stays the same from call to call: on the device, unless that is the CPU."""
    return values if device.platform == "cpu" else copy_to_device(values, device).block_until_ready()


def copy_to_device(values: np.ndarray | jax.Array, device: Device) -> jax.Array:
    """Return a copy of an array that only jax holds. The caller must wait for it, because torch may write into it.

    jnp.array would compile a program for each shape, which touches the new pages in one thread. Here XLA copies in several.
    """
    with default_settings():
        return jax.device_put(jax.device_put(values, device), device, may_alias=False)


def release_freed_memory() -> None:
    """Give the memory of freed torch buffers back to the system and to the GPU.

    Adoption frees each parameter's old buffer, and compiling frees a lot. glibc keeps those pages in its arenas, and state that is
    allocated next would come on top of them.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # jax's allocator cannot use what torch's allocator keeps
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
