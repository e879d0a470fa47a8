"""Torch functions that view several tensors or strided memory, and the `_copy` forms of views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from bridge._tracing.context import current_module_path
from bridge._tracing.op_registry import OPS, Op, make_view, op
from bridge._tracing.tensor import TracedTensor


def _register_for_each(name: str, function: Callable[[Any], Any]) -> None:
    """Register a function of one tensor that also accepts several."""

    def each(*tensors: Any) -> Any:
        several = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
        return function(several[0]) if len(several) == 1 and several is tensors else tuple(map(function, several))

    op(name, raw=True)(each)


def _atleast_3d(x: Any) -> Any:
    return x.reshape(1, -1, 1) if x.ndim < 2 else x.unsqueeze(-1) if x.ndim == 2 else x


_register_for_each("atleast_1d", lambda x: x if x.ndim else x.reshape(1))
_register_for_each("atleast_2d", lambda x: x if x.ndim > 1 else x.reshape(1, -1))
_register_for_each("atleast_3d", _atleast_3d)


def _register_split(name: str, dim: int) -> None:
    """Register `tensor_split` along this dim, or along the first dim of tensors that have fewer."""

    def split(input: Any, indices_or_sections: Any) -> Any:
        return torch.tensor_split(input, indices_or_sections, dim=dim if input.ndim > dim else 0)

    op(name, raw=True)(split)


_register_split("hsplit", 1)
_register_split("vsplit", 0)
_register_split("dsplit", 2)


def slice_dim(input: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """Return a slice of one dim."""
    return input[(slice(None),) * (dim % input.ndim) + (slice(start, end, step),)]


def _register_copies() -> None:
    names = "detach diagonal expand narrow permute select split split_with_sizes squeeze t transpose unbind unsqueeze unfold view"
    for name in names.split():
        op(f"{name}_copy")(OPS[getattr(torch.Tensor, name)].handler)
    op("slice_copy")(slice_dim)
    op("alias_copy")(lambda input: input)
    op("view_as_complex_copy")(OPS[torch.view_as_complex].handler)
    op("view_as_real_copy")(OPS[torch.view_as_real].handler)


_register_copies()


@op("masked_select", raw=True)
def masked_select(input: Any, mask: Any) -> Any:
    """Return the elements where the mask is True. Their number is a shape, so jax must know the mask."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return input.expand(shape)[mask.expand(shape)]


def _strided_offsets(size: Any, stride: Any, start: int) -> np.ndarray[Any, Any]:
    at = np.full((), start)
    for n, step in zip(size, stride, strict=True):
        at = at[..., None] + np.arange(n) * step
    return at


@op("as_strided", raw=True)
def as_strided(input: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Return a strided view of the elements of a contiguous tensor."""
    layout = input.as_meta_tensor() if isinstance(input, TracedTensor) else input
    own = int(layout.storage_offset())
    start = own if storage_offset is None else storage_offset
    at = _strided_offsets(size, stride, int(start) - own)
    if not layout.is_contiguous() or (at.size and not 0 <= at.min() <= at.max() < layout.numel()):
        raise NotImplementedError(
            f"as_strided reaches beyond its tensor {current_module_path()}, or that tensor is not contiguous, and a traced one has no "
            "memory around it. Call it on the contiguous tensor that holds all those elements."
        )
    return make_view(Op(lambda x, *_: jnp.take(x.ravel(), at), None), torch.as_strided, (input, tuple(size), tuple(stride), start), {})


@op("as_strided_copy", raw=True)
def as_strided_copy(input: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Return a copy of `as_strided`."""
    return as_strided(input, size, stride, storage_offset).clone()


@op("as_strided_scatter", raw=True)
def as_strided_scatter(input: Any, src: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Return a copy with `src` written to the elements that `as_strided` returns."""
    as_strided(input, size, stride, storage_offset)  # raises the errors of this function
    out = torch.clone(input)
    out.as_strided(size, stride, storage_offset).copy_(src)
    return out
