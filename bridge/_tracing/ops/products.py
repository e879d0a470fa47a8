"""Torch functions that combine vectors and matrices: products, powers, block matrices, norms of differences, and covariances."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import torch

from bridge._tracing.op_registry import op
from bridge._tracing.promotion import jax_dtype, promote

from .elementwise import add, cast, in_float32, norm, sum_, to_floating

op("inner")(lambda input, other: jnp.inner(input, other))
op("dot")(lambda input, tensor: jnp.inner(input, tensor))
op("vdot")(lambda input, other: jnp.vdot(input, other))


@op("linalg_vecdot")
def vecdot(input: Any, other: Any, *, dim: int = -1) -> jax.Array:
    """Return the inner products of vectors along a dim. The first vector is conjugated."""
    input, other = promote(input, other)
    return jnp.sum(jnp.conj(input) * other, dim)


@op("matmul", "__matmul__", "linalg_matmul")
def matmul(input: Any, other: Any) -> jax.Array:
    """Return the matrix product."""
    return jnp.matmul(input, other)


op("mm", "bmm")(lambda input, mat2: jnp.matmul(input, mat2))
op("mv")(lambda input, vec: jnp.matmul(input, vec))


@op("__rmatmul__")
def rmatmul(input: Any, other: Any) -> jax.Array:
    """Return other @ input."""
    return jnp.matmul(other, input)


@op("outer", "ger")
def outer(input: Any, vec2: Any) -> jax.Array:
    """Return the outer product of two vectors."""
    return jnp.outer(*promote(input, vec2))


@op("addmm")
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """Return beta * input + alpha * (mat1 @ mat2)."""
    product = jnp.matmul(mat1, mat2)
    product = product if alpha == 1 else product * jnp.asarray(alpha, product.dtype)
    return product if beta == 0 else product + (input if beta == 1 else input * jnp.asarray(beta, product.dtype))


op("addmv")(lambda input, mat, vec, *, beta=1, alpha=1: addmm(input, mat, vec, beta=beta, alpha=alpha))
op("baddbmm")(lambda input, batch1, batch2, *, beta=1, alpha=1: addmm(input, batch1, batch2, beta=beta, alpha=alpha))


@op("einsum")
def einsum(equation: Any, *operands: Any) -> jax.Array:
    """Return the Einstein summation of the operands."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    return jnp.einsum(equation.replace(" ", ""), *promote(*operands))


op("linalg_matrix_exp", "matrix_exp")(lambda A: in_float32(jax.scipy.linalg.expm)(A))


@op("linalg_matrix_power")
def matrix_power(A: Any, n: int) -> jax.Array:
    """Return an integer power of a matrix; a negative power is one of its inverse."""
    return jnp.linalg.matrix_power(A, n)


op("matrix_power")(lambda input, n: matrix_power(input, n))
op("linalg_multi_dot")(lambda tensors: jnp.linalg.multi_dot(tensors))
op("chain_matmul")(lambda *matrices: functools.reduce(matmul, matrices))


@op("kron")
def kron(input: Any, other: Any) -> jax.Array:
    """Return the Kronecker product."""
    a, b = promote(input, other)
    return jnp.kron(a.astype(jnp.uint8), b.astype(jnp.uint8)).astype(bool) if a.dtype == bool else jnp.kron(a, b)


@op("tensordot")
def tensordot(a: Any, b: Any, dims: Any = 2) -> jax.Array:
    """Contract dims of two tensors. A dim of size one is broadcast to the size of the other's dim."""
    a, b = promote(a, b)
    dims = dims.tolist() if hasattr(dims, "tolist") else dims
    pairs = (range(-dims, 0), range(dims)) if isinstance(dims, int) else [[d] if isinstance(d, int) else d for d in dims]
    for i, j in zip(*pairs, strict=True):
        if a.shape[i] != b.shape[j]:
            whole = [jnp.sum(x, d, keepdims=True, dtype=x.dtype) for x, d in ((a, i), (b, j))]
            a, b = (a, whole[1]) if a.shape[i] == 1 else (whole[0], b)
    return jnp.tensordot(a, b, axes=tuple(map(tuple, pairs)))


@op("addbmm")
def addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """Return beta * input + alpha * the sum of the matrix products."""
    rows, columns = jnp.moveaxis(batch1, 0, 1), batch2
    flat = rows.reshape(rows.shape[0], -1), columns.reshape(-1, columns.shape[-1])
    return addmm(input, *flat, beta=beta, alpha=alpha)


@op("_grouped_mm")
def grouped_mm(input: jax.Array, mat2: jax.Array, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> jax.Array:
    """Multiply groups of rows, of columns or of summed terms. Each group ends at its offset; the rest is in no group."""
    if offs is None:
        out = jnp.matmul(input, mat2)
    elif input.ndim == mat2.ndim:  # groups of terms
        terms, end = jnp.arange(input.shape[1]), offs[:, None]
        inside = (terms < end) & (terms >= jnp.concatenate([jnp.zeros_like(end[:1]), end[:-1]]))
        out = jnp.matmul(jnp.where(inside[:, None, :], input, jnp.zeros((), input.dtype)), mat2)
    else:
        rows = input.ndim == 2
        left, right = (input, mat2) if rows else (mat2.T, jnp.swapaxes(input, 1, 2))
        out = jax.lax.ragged_dot(left, right, jnp.diff(offs, prepend=jnp.zeros_like(offs[:1])))
        out = out if rows else out.T
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.astype(jax_dtype(out_dtype))


@op("addr")
def addr(input: jax.Array, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Return beta * input + alpha * the outer product of two vectors."""
    product = outer(vec1, vec2)
    if beta == 0:
        return jnp.asarray(alpha, product.dtype) * product
    return add(input if beta == 1 else input * jnp.asarray(beta, input.dtype), product, alpha=alpha)


@op("linalg_cross")
def cross(input: Any, other: Any, *, dim: int = -1) -> Any:
    """Return the cross product."""
    a, b = jnp.broadcast_arrays(*promote(input, other))
    return jnp.cross(a, b, axis=dim)


@op("cross")
def legacy_cross(input: jax.Array, other: jax.Array, dim: int | None = None) -> Any:
    """Return the cross product, by default along the first dim of size three."""
    shape = jnp.broadcast_shapes(input.shape, other.shape)
    return cross(input, other, dim=shape.index(3) if dim is None else dim)


@op("linalg_diagonal", views=True)
def diagonal(A: jax.Array, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    """Return a diagonal of each matrix."""
    return jnp.diagonal(A, offset, dim1, dim2)


@op("trace")
def trace(input: Any) -> jax.Array:
    """Return the sum of the diagonal."""
    return sum_(jnp.diagonal(input))


@op("linalg_vander")
def vander(x: jax.Array, *, N: int | None = None) -> jax.Array:
    """Return powers of each element in increasing order, from the zeroth."""
    x = jnp.atleast_1d(x if jnp.issubdtype(x.dtype, jnp.inexact) else cast(x, torch.int64))
    n = x.shape[-1] if N is None else N
    rest = jnp.broadcast_to(x[..., None], (*x.shape, n - 1))
    return jnp.cumprod(jnp.concatenate([jnp.ones((*x.shape, 1), x.dtype), rest], -1), axis=-1)


@op("vander")
def legacy_vander(x: Any, N: int | None = None, increasing: bool = False) -> jax.Array:
    """Return powers of each element, by default in decreasing order."""
    return vander(x, N=N) if increasing else jnp.flip(vander(x, N=N), -1)


@op("block_diag")
def block_diag(*tensors: Any) -> jax.Array:
    """Return a block diagonal matrix."""
    return jax.scipy.linalg.block_diag(*promote(*tensors))


@op("cartesian_prod")
def cartesian_prod(*tensors: Any) -> Any:
    """Return all combinations of elements as rows."""
    tensors = tuple(promote(*tensors))
    return tensors[0] if len(tensors) == 1 else jnp.stack([x.reshape(-1) for x in jnp.meshgrid(*tensors, indexing="ij")], -1)


@op("dist")
def dist(input: Any, other: Any, p: Any = 2) -> Any:
    """Return the norm of the difference."""
    a, b = promote(input, other)
    return norm(a - b, p)


@op("renorm")
def renorm(input: jax.Array, p: Any, dim: int, maxnorm: Any) -> jax.Array:
    """Scale down each slice along `dim` whose norm exceeds `maxnorm`."""
    size = norm(input, p, tuple(d for d in range(input.ndim) if d != dim % input.ndim), True)
    return input * jnp.where(size > maxnorm, maxnorm / (size + 1e-7), jnp.ones((), size.dtype))


@op("cov")
def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> jax.Array:
    """Return the covariances of rows. `fweights`: the number of times each column counts. `aweights`: the weight of each column."""
    weights = [w for w in (fweights, aweights) if w is not None]
    x, *weights = promote(jnp.atleast_2d(to_floating(input)), *weights)
    share = math.prod(weights, start=jnp.ones(x.shape[1], x.dtype))
    total = jnp.sum(share)
    x = x - jnp.sum(x * share, 1, keepdims=True) / total
    taken = total if aweights is None else jnp.sum(share * weights[-1])
    degrees = total - correction * taken / total
    return jnp.squeeze(x @ jnp.conj(x * share).T / jnp.maximum(degrees.real, 0).astype(x.dtype))


@op("corrcoef")
def corrcoef(input: Any) -> jax.Array:
    """Return the correlations of rows."""
    return jnp.corrcoef(to_floating(input))
