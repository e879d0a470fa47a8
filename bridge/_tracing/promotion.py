"""torch's type promotion for traced values, and the mapping between torch's and NumPy's dtypes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._interop.dtypes import EXTENSION_DTYPES

from .context import current_module_path

_NAMES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]
NUMPY_DTYPE_OF = {getattr(torch, name): np.dtype(name) for name in _NAMES} | {
    d: np.dtype(like) for d, (_, like) in EXTENSION_DTYPES.items()
}
TORCH_DTYPE_OF = {theirs: ours for ours, theirs in NUMPY_DTYPE_OF.items()}


def torch_dtype(array: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> torch.dtype:
    """Return the torch dtype of an array.

    Raises:
      TypeError: torch has no such dtype.
    """
    found = TORCH_DTYPE_OF.get(np.dtype(array.dtype))
    if found is None:
        raise TypeError(f"torch has no dtype for {array.dtype} ({current_module_path()}). Convert it with astype first.")
    return found


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the dtype that jax gives an array of a torch dtype. It has 64 bits only if x64 is on."""
    return jax.dtypes.canonicalize_dtype(NUMPY_DTYPE_OF[dtype])


def default_float() -> np.dtype:
    """Return torch's default dtype as a jax dtype."""
    return jax_dtype(torch.get_default_dtype())


def promote(*xs: Any) -> list[Any]:
    """Return arrays and Python numbers as arrays of the dtype to which torch promotes them."""
    dtype = jax_dtype(result_type(*xs))
    return [jnp.asarray(x, dtype) if not hasattr(x, "astype") else x.astype(dtype) for x in xs]


def result_type(*xs: Any) -> torch.dtype:
    """Return `torch.result_type` of any number of arrays and Python numbers."""
    with torch.DisableTorchFunction():
        arrays = [_meta_tensor_of(torch_dtype(x), min(x.ndim, 1)) if hasattr(x, "dtype") else x for x in xs]
        wide = [x for x in arrays if isinstance(x, torch.Tensor) and x.ndim]
        flat = [x for x in arrays if isinstance(x, torch.Tensor) and not x.ndim]
        numbers = [x for x in arrays if not isinstance(x, torch.Tensor)]
        if not wide and not flat:
            return torch.result_type(torch.tensor(numbers[0]), numbers[-1])
        # As in torch, zero-dimensional tensors are promoted among themselves before they are combined with the others.
        best, *others = [functools.reduce(_promote_pair, group) for group in (wide, flat) if group]
        return functools.reduce(_promote_pair, [*others, *numbers], best).dtype


def _promote_pair(x: torch.Tensor, y: torch.Tensor | complex) -> torch.Tensor:
    return _meta_tensor_of(torch.result_type(x, y), x.ndim)


@functools.cache
def _meta_tensor_of(dtype: torch.dtype, ndim: int) -> torch.Tensor:
    return torch.empty((1,) * ndim, dtype=dtype, device="meta")
