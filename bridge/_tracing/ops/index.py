"""Torch's indexing: `x[key]` and `x[key] = value`."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from bridge._tracing.context import current_module_path
from bridge._tracing.functionalization import write_without_grad
from bridge._tracing.op_registry import Op, add_ops, iter_leaves
from bridge._tracing.tensor import TracedTensor, ViewSpec, as_array


def _to_jax_key(key: Any) -> Any:
    """Convert torch's index to jax's: tensors and lists become arrays."""
    if isinstance(key, tuple):
        return tuple(map(_to_jax_key, key))
    if isinstance(key, list):
        return np.asarray(key) if key and all(isinstance(k, bool) for k in key) else jnp.asarray([as_array(k) for k in key])
    if isinstance(key, slice):
        return slice(*(None if x is None else operator.index(as_array(x)) for x in (key.start, key.stop, key.step)))
    key = as_array(key)
    if getattr(key, "dtype", None) != jnp.uint8:
        return key
    with nullcontext() if isinstance(key, Tracer) else jax.ensure_compile_time_eval():  # a uint8 mask, torch's older form
        return key.astype(bool)


def _is_integer_index(k: Any) -> bool:
    if isinstance(k, jax.Array | np.ndarray):
        return k.shape == () and k.dtype != bool
    return isinstance(k, int) and not isinstance(k, bool)


def _is_array_index(k: Any) -> bool:
    return isinstance(k, jax.Array | np.ndarray) and not _is_integer_index(k)


def _split_key(key: Any) -> tuple[Any, Any]:
    """Split torch's index of integers and tensors into two jax indices: first integers, slices and new dims, then tensors.

    NumPy treats an integer like a tensor. If a slice lies between them, NumPy moves the indexed dims to the front.
    """
    if not isinstance(key, tuple) or not any(map(_is_integer_index, key)) or not any(map(_is_array_index, key)):
        return key, None
    first, then = [], []
    for k in key:
        width = k.ndim if _is_array_index(k) and k.dtype == bool else 1
        first += [slice(None)] * width if _is_array_index(k) else [k]
        then += [k] if _is_array_index(k) or k is Ellipsis else [] if _is_integer_index(k) else [slice(None)]
    return tuple(first), tuple(then)


def _take(array: Any, key: Any) -> Any:
    first, then = _split_key(key)
    try:
        return array[first] if then is None else array[first][then]
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise _dynamic_mask_error() from error


def _put(array: Any, key: Any, value: Any) -> Any:
    first, then = _split_key(key)
    try:
        return array.at[first].set(value) if then is None else array.at[first].set(array[first].at[then].set(value))
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise _dynamic_mask_error() from error


def _dynamic_mask_error() -> NotImplementedError:
    """Return the error for a mask whose values decide a shape."""
    return NotImplementedError(
        f"A boolean mask is an index {current_module_path()}, and how many elements it chooses depends on values, which one compiled "
        "program cannot follow. Use torch.where(mask, ...), masked_fill, or multiply by the mask."
    )


def getitem(input: Any, key: Any) -> Any:
    """Return input[key]. The result is a view unless the key contains a tensor."""
    array, made = as_array(input), _to_jax_key(key)
    _check_in_range(array, made)
    if isinstance(input, TracedTensor) and not any(isinstance(k, jax.Array | np.ndarray) for k in iter_leaves(made)):
        return TracedTensor(_take(array, made), input, ViewSpec(_take, (made,), {}, None, operator.getitem))
    return _take(array, made)


def _check_in_range(array: Any, key: Any) -> None:
    """Raise IndexError for an integer that is out of range. jax would clamp it."""
    dim = 0
    for k in key if isinstance(key, tuple) else (key,):
        if k is Ellipsis or (isinstance(k, jax.Array) and k.dtype == bool):
            return
        if isinstance(k, int) and not isinstance(k, bool) and dim < array.ndim and not -array.shape[dim] <= k < array.shape[dim]:
            raise IndexError(f"index {k} is out of range for dim {dim} of size {array.shape[dim]}.")
        dim += k is not None and not isinstance(k, bool)


def setitem(input: Any, key: Any, value: Any) -> None:
    """Execute input[key] = value."""
    if not isinstance(input, TracedTensor):
        raise ValueError(
            f"a traced value is written into a plain torch tensor {current_module_path()}. Register it as a buffer, or make it inside "
            "forward."
        )
    array, made = input.value, _to_jax_key(key)
    _check_in_range(array, made)
    value = jnp.asarray(as_array(value), array.dtype)
    trimmed = jnp.squeeze(value, tuple(range(next((i for i, n in enumerate(value.shape) if n != 1), value.ndim))))
    chosen = _as_full_mask(made, array.shape, trimmed.shape)
    if chosen is not None:
        new = jnp.where(chosen, trimmed, array)
    else:
        while value.ndim and value.shape[0] == 1 and value.ndim > jax.eval_shape(lambda a: _take(a, made), array).ndim:
            value = value[0]
        new = _put(array, made, value)
    input.value = new if torch.is_grad_enabled() else write_without_grad(array, new)


def _as_full_mask(key: Any, shape: tuple[int, ...], value: tuple[int, ...]) -> Any:
    """Return an index of one mask and full slices as a mask over all dims of an array of this shape, or None for another index.

    Return None too if a value of that shape does not broadcast over the dims behind the mask: it may have one number for each masked
    element.
    """
    keys = key if isinstance(key, tuple) else (key,)
    masks = [i for i, k in enumerate(keys) if isinstance(k, jax.Array) and k.dtype == bool]
    if len(masks) != 1 or any(i != masks[0] and not (isinstance(k, slice) and k == slice(None)) for i, k in enumerate(keys)):
        return None
    mask, before = keys[masks[0]], masks[0]
    behind = shape[before + mask.ndim :]
    if len(value) > len(behind) or any(n not in (1, size) for n, size in zip(value[::-1], behind[::-1], strict=False)):
        return None
    return mask.reshape((1,) * before + mask.shape + (1,) * len(behind))


add_ops({torch.Tensor.__getitem__: Op(getitem, None, raw=True), torch.Tensor.__setitem__: Op(setitem, None, raw=True)})
