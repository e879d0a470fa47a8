"""Torch functions that reshape, slice, join and rearrange tensors."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._tracing.context import current_module_path
from bridge._tracing.op_registry import Op, add_ops, dispatch, is_traced, op
from bridge._tracing.promotion import jax_dtype, promote
from bridge._tracing.tensor import TracedTensor, as_array

from .create import parse_sizes


def _nonnegative_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


@op("view", "reshape", views=True)
def reshape(input: jax.Array, *shape: Any, **named: Any) -> jax.Array:
    """Return the same elements in another shape, or the same bits in another dtype."""
    shape = (named["shape"],) if "shape" in named else shape
    if shape and isinstance(shape[0], torch.dtype):
        return jax.lax.bitcast_convert_type(input, jax_dtype(shape[0]))
    return jnp.reshape(input, parse_sizes(shape))


@op("contiguous", views=True)
def contiguous(input: jax.Array, **_: Any) -> jax.Array:
    """Return the tensor itself if it is contiguous, else a copy."""
    return input


@op("view_as", "reshape_as", views=True)
def view_as(input: jax.Array, other: jax.Array) -> jax.Array:
    """Reshape to the shape of `other`."""
    return jnp.reshape(input, other.shape)


@op("flatten", views=True)
def flatten(input: jax.Array, start_dim: int = 0, end_dim: int = -1) -> jax.Array:
    """Merge the dims from start to end into one."""
    if input.ndim == 0:
        return input.reshape(1)
    start, end = _nonnegative_dim(start_dim, input.ndim), _nonnegative_dim(end_dim, input.ndim)
    return jnp.reshape(input, (*input.shape[:start], math.prod(input.shape[start : end + 1]), *input.shape[end + 1 :]))


@op("ravel", views=True)
def ravel(input: jax.Array) -> jax.Array:
    """Flatten to one dim."""
    return jnp.ravel(input)


@op("unflatten", views=True)
def unflatten(input: jax.Array, dim: int, sizes: Any) -> jax.Array:
    """Split one dim into several."""
    dim = _nonnegative_dim(dim, input.ndim)
    sizes = [int(n) for n in sizes]
    if -1 in sizes:
        sizes[sizes.index(-1)] = input.shape[dim] // -math.prod(sizes)
    return jnp.reshape(input, (*input.shape[:dim], *sizes, *input.shape[dim + 1 :]))


@op("permute", views=True)
def permute(input: jax.Array, *dims: Any, **named: Any) -> jax.Array:
    """Reorder dims."""
    return jnp.transpose(input, parse_sizes((named["dims"],) if named else dims))


@op("transpose", "swapaxes", "swapdims", views=True)
def transpose(input: jax.Array, dim0: int, dim1: int) -> jax.Array:
    """Swap two dims."""
    return jnp.swapaxes(input, dim0, dim1) if input.ndim else input


@op("t", views=True)
def t(input: jax.Array) -> jax.Array:
    """Transpose a matrix."""
    return input.T


@op("adjoint", views=True)
def adjoint(input: jax.Array) -> jax.Array:
    """Return the conjugate transpose."""
    return jnp.conj(jnp.swapaxes(input, -1, -2))


@op("movedim", "moveaxis", views=True)
def movedim(input: jax.Array, source: Any, destination: Any) -> jax.Array:
    """Move dims."""
    return jnp.moveaxis(input, source, destination) if input.ndim else input


@op("squeeze", views=True)
def squeeze(input: jax.Array, dim: Any = None) -> jax.Array:
    """Remove dims of size one."""
    dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return jnp.squeeze(input, tuple(d for d in dims if input.ndim and input.shape[d] == 1))


@op("unsqueeze", views=True)
def unsqueeze(input: jax.Array, dim: int) -> jax.Array:
    """Insert a dim of size one."""
    return jnp.expand_dims(input, dim)


@op("expand", "broadcast_to", views=True)
def expand(input: jax.Array, *size: Any, **_: Any) -> jax.Array:
    """Broadcast dims of size one, and add dims in front."""
    size = parse_sizes((_["size"],) if "size" in _ else size)
    lead = len(size) - input.ndim
    return jnp.broadcast_to(input, tuple(input.shape[i - lead] if n == -1 else n for i, n in enumerate(size)))


@op("expand_as", views=True)
def expand_as(input: jax.Array, other: jax.Array) -> jax.Array:
    """Broadcast to the shape of `other`."""
    return jnp.broadcast_to(input, other.shape)


@op("narrow", views=True)
def narrow(input: jax.Array, dim: int, start: Any, length: int) -> jax.Array:
    """Return a range of one dim."""
    if is_traced(start):
        return jax.lax.dynamic_slice_in_dim(input, start, length, dim)
    size = input.shape[dim]
    first = _nonnegative_dim(start, size)
    if not 0 <= first <= first + length <= size:
        raise RuntimeError(
            f"narrow: start {start} and length {length} do not lie within dim {dim} of size {size} ({current_module_path()})."
        )
    return jax.lax.slice_in_dim(input, first, first + length, axis=dim)


@op("select", views=True)
def select(input: jax.Array, dim: int, index: int) -> jax.Array:
    """Return the slice at one index of one dim."""
    return jnp.take(input, index, axis=dim) if is_traced(index) else jax.lax.index_in_dim(input, index, dim, keepdims=False)


@op("unbind", views=True)
def unbind(input: jax.Array, dim: int = 0) -> Any:
    """Return the slices at all indices of one dim."""
    return tuple(jnp.squeeze(part, dim) for part in split(input, 1, dim))  # the gradient is one concatenation


@op("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", views=True)
def split(input: jax.Array, split_size: Any, dim: int = 0, **_: Any) -> Any:
    """Split into parts of these sizes, or of one size with a smaller last part."""
    n = input.shape[dim]
    sizes = [min(split_size, n - i) for i in range(0, max(n, 1), split_size)] if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != n:
        raise ValueError(f"split: the sizes {sizes} do not add up to {n}, the size of dim {dim}.")
    return tuple(jax.lax.split(input, sizes, axis=dim % input.ndim))


@op("chunk", "unsafe_chunk", views=True)
def chunk(input: jax.Array, chunks: int, dim: int = 0) -> Any:
    """Split into at most this many parts of equal size."""
    return split(input, max(1, math.ceil(input.shape[dim] / chunks)), dim)


@op("tensor_split", views=True)
def tensor_split(input: jax.Array, indices_or_sections: Any, dim: int = 0) -> Any:
    """Split as `numpy.array_split` does. Indices are those of slices, so a negative one counts from the end."""
    if isinstance(indices_or_sections, jax.Array):
        indices_or_sections = np.asarray(indices_or_sections).tolist()
    if isinstance(indices_or_sections, int):
        return tuple(jnp.array_split(input, indices_or_sections, axis=dim))
    ends = zip([None, *indices_or_sections], [*indices_or_sections, None], strict=True)
    return tuple(input[(slice(None),) * (dim % input.ndim) + (slice(*part),)] for part in ends)


@op("detach", views=True)
def detach(input: jax.Array) -> Any:
    """Return the same values without a gradient."""
    return jax.lax.stop_gradient(input)


@op("diagonal", views=True)
def diagonal(input: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """Return a diagonal."""
    return jnp.diagonal(input, offset, dim1, dim2)


op("real", views=True)(lambda input: jnp.real(input) if jnp.iscomplexobj(input) else input)
op("imag")(jnp.imag)
op("view_as_complex")(lambda input: jax.lax.complex(input[..., 0], input[..., 1]))
op("view_as_real")(lambda input: jnp.stack([input.real, input.imag], -1))


def unfold(input: Any, dimension: int, size: int, step: int) -> Any:
    """Return windows along one dim, with their elements in a new last dim."""
    if input.ndim == 0:
        return input[None][:size]
    starts = jnp.arange(0, input.shape[dimension] - size + 1, step)
    windows = jnp.take(input, (starts[:, None] + jnp.arange(size)).reshape(-1), axis=dimension)
    return jnp.moveaxis(unflatten(windows, dimension, (-1, size)), _nonnegative_dim(dimension, input.ndim) + 1, -1)


add_ops({torch.Tensor.unfold: Op(unfold, inspect.signature(unfold))})  # torch.nn.functional.unfold is `im2col`


@op("cat", "concat", "concatenate")
def cat(tensors: Any, dim: int = 0, **named: Any) -> jax.Array:
    """Concatenate along a dim. Empty vectors are left out, as in torch."""
    parts = promote(*tensors)
    return jnp.concatenate([x for x in parts if x.shape != (0,)] or parts, axis=named.get("axis", dim))


@op("stack")
def stack(tensors: Any, dim: int = 0) -> jax.Array:
    """Stack along a new dim."""
    return jnp.stack(promote(*tensors), axis=dim)


@op("pad_sequence")
def pad_sequence(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right") -> jax.Array:
    """Stack tensors of different lengths, padded to the longest one, in the dtype of the first."""
    longest, rest = max(len(x) for x in sequences), [(0, 0)] * (sequences[0].ndim - 1)
    gaps = [longest - len(x) for x in sequences]
    ends = [(0, gap) if padding_side == "right" else (gap, 0) for gap in gaps]
    alike = [x.astype(sequences[0].dtype) for x in sequences]
    padded = [jnp.pad(x, [end, *rest], constant_values=padding_value) for x, end in zip(alike, ends, strict=True)]
    return jnp.stack(padded, 0 if batch_first else 1)


@op("hstack")
def hstack(tensors: Any) -> jax.Array:
    """Stack horizontally."""
    return jnp.hstack(promote(*tensors))


@op("vstack")
def vstack(tensors: Any) -> jax.Array:
    """Stack vertically."""
    return jnp.vstack(promote(*tensors))


@op("dstack")
def dstack(tensors: Any) -> jax.Array:
    """Stack along the third dim."""
    return jnp.dstack(promote(*tensors))


@op("column_stack")
def column_stack(tensors: Any) -> jax.Array:
    """Stack vectors as columns."""
    return jnp.column_stack(promote(*tensors))


@op("repeat")
def repeat(input: Any, *repeats: Any) -> jax.Array:
    """Repeat the tensor this many times along each dim."""
    return jnp.tile(input, parse_sizes(repeats))


@op("tile")
def tile(input: Any, *dims: Any) -> jax.Array:
    """Repeat the tensor, as `repeat` does."""
    return jnp.tile(input, parse_sizes(dims))


@op("repeat_interleave")
def repeat_interleave(input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> jax.Array:
    """Repeat each element this many times."""
    return jnp.repeat(input, repeats, axis=dim, total_repeat_length=output_size)


@op("flip")
def flip(input: jax.Array, *dims: Any, **named: Any) -> jax.Array:
    """Reverse dims."""
    return jnp.flip(input, parse_sizes((named["dims"],) if named else dims)) if input.ndim else input


op("fliplr")(lambda input: jnp.flip(input, 1))
op("flipud")(lambda input: jnp.flip(input, 0))


@op("rot90")
def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> jax.Array:
    """Rotate by quarter turns in the plane of two dims."""
    return jnp.rot90(input, k, tuple(dims))


@op("roll")
def roll(input: Any, shifts: Any, dims: Any = None) -> jax.Array:
    """Shift elements cyclically."""
    return jnp.roll(input, shifts, axis=dims)


@op("tril")
def tril(input: Any, diagonal: int = 0) -> jax.Array:
    """Return the elements on and below a diagonal, zeros elsewhere."""
    return jnp.tril(input, diagonal)


@op("triu")
def triu(input: Any, diagonal: int = 0) -> jax.Array:
    """Return the elements on and above a diagonal, zeros elsewhere."""
    return jnp.triu(input, diagonal)


@op("diag")
def diag(input: Any, diagonal: int = 0) -> jax.Array:
    """Return the diagonal of a matrix, or a matrix with the vector as diagonal."""
    return jnp.diag(input, diagonal)


@op("diagflat")
def diagflat(input: Any, offset: int = 0) -> jax.Array:
    """Return a matrix with all elements on a diagonal."""
    return jnp.diagflat(input, offset)


@op("combinations")
def combinations(input: jax.Array, r: int = 2, with_replacement: bool = False) -> jax.Array:
    """Return all combinations of r elements as rows."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    return input[np.array(list(choose(range(input.size), r)), int).reshape(-1, r)] if r else input[:0]


@op("constant_pad_nd")
def constant_pad_nd(input: jax.Array, pad: Any, value: Any = 0) -> jax.Array:
    """Pad by these numbers before and after, from the last dim on. Negative numbers crop."""
    widths = [(before, after, 0) for before, after in zip(pad[::2], pad[1::2], strict=True)]
    return jax.lax.pad(input, jnp.asarray(value, input.dtype), [(0, 0, 0)] * (input.ndim - len(widths)) + widths[::-1])


@op("diag_embed")
def diag_embed(input: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    """Return matrices with the vectors as diagonals."""
    n = input.shape[-1] + abs(offset)
    places = jnp.arange(input.shape[-1])
    out = jnp.zeros((*input.shape[:-1], n, n), input.dtype).at[..., places + max(-offset, 0), places + max(offset, 0)].set(input)
    return jnp.moveaxis(out, (-2, -1), (dim1, dim2))


@op("meshgrid")
def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    """Return the coordinates of a grid."""
    each = tensors[0] if isinstance(tensors[0], list | tuple) else tensors
    return tuple(jnp.meshgrid(*map(jnp.ravel, each), indexing=indexing or "ij"))


@op("broadcast_tensors", raw=True)
def broadcast_tensors(*tensors: Any) -> Any:
    """Broadcast all tensors to one shape. Each is expanded separately, so that known values stay known."""
    each = [
        x if isinstance(x, TracedTensor) else TracedTensor(as_array(x))
        for x in (tensors[0] if isinstance(tensors[0], list | tuple) else tensors)
    ]
    shape = jnp.broadcast_shapes(*(x.shape for x in each))
    return tuple(dispatch(torch.Tensor.expand, (x, shape), {}) for x in each)


@op("one_hot")
def one_hot(tensor: Any, num_classes: int = -1) -> jax.Array:
    """Return one-hot rows of classes."""
    if num_classes < 0:
        num_classes = int(tensor.max()) + 1
    return jax.nn.one_hot(tensor, num_classes, dtype=jax_dtype(torch.int64))
