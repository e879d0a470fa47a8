"""Dtypes of torch, numpy and jax, and conversion between 64-bit and 32-bit types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
import torch.utils.dlpack
from jax.core import Tracer

_T = TypeVar("_T")


class HasDtype(Protocol):
    """A torch tensor, a jax or numpy array, or a description of one."""

    @property
    def dtype(self) -> object: ...


EXTENSION_DTYPES = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the numpy (or ml_dtypes) dtype with the same bits as a torch dtype."""
    if dtype in EXTENSION_DTYPES:
        return np.dtype(EXTENSION_DTYPES[dtype][1])
    return np.dtype(str(dtype).removeprefix("torch."))


# The dtypes that torch and jax share. An array of another dtype, such as a random key, cannot become a tensor.
_SHARED_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
_SHARED_DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
TORCH_DTYPES = {str(numpy_dtype(t)): t for t in _SHARED_DTYPES}


def exists_in_torch(aval: HasDtype) -> bool:
    """Return whether torch has the dtype of an array."""
    return str(aval.dtype) in TORCH_DTYPES


_TO_32BIT = {torch.float64: torch.float32, torch.int64: torch.int32, torch.complex128: torch.complex64}


def is_64bit(x: HasDtype) -> bool:
    """Return whether a tensor or an array has a 64-bit dtype, or complex128."""
    return str(x.dtype).removeprefix("torch.") in ("float64", "int64", "uint64", "complex128")


def keeps_64bit(requested: bool | None, x64_flag: bool, inputs: Iterable[HasDtype]) -> bool:
    """Return whether a program keeps 64-bit types: as requested, else if jax's x64 flag is on or an input has a 64-bit dtype."""
    return requested if requested is not None else x64_flag or any(map(is_64bit, inputs))


def to_32bit(leaf: _T) -> _T | torch.Tensor | jax.Array:
    """Return a tensor or an array with its 64-bit dtype made 32-bit; anything else unchanged."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(_TO_32BIT.get(leaf.dtype, leaf.dtype))
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and is_64bit(leaf):
        return leaf.astype(str(leaf.dtype).replace("64", "32").replace("128", "64"))
    return leaf


def canonicalize_dtype(x: object) -> jax.Array:
    """Return an array with the dtype that `jax.jit` would give it: 64-bit only if x64 is on."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
