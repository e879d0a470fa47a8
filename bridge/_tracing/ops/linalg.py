"""Factorizations, solvers, inverses, determinants and norms of matrices: `torch.linalg`, and torch's older names of its functions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.lax import linalg

from bridge._tracing.functionalization import write_without_grad
from bridge._tracing.op_registry import op
from bridge._tracing.promotion import jax_dtype

from .elementwise import cast, norm

return_types: Any = torch.return_types
Atol = Any  # a number, or an array with one number for each matrix


def adjoint(x: Any) -> jax.Array:
    """Return the conjugate transpose."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _broadcast_batch_dims(*matrices: Any) -> list[Any]:
    """Broadcast the batch dims of matrices."""
    lead = jnp.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    return [jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in matrices]


def _zero_info(x: Any) -> jax.Array:
    """Return torch's `info` of a success: zero for each matrix."""
    return jnp.zeros(x.shape[:-2], jnp.int32)


# ---------------------------------------------------------------------------------------------- factors


@op("linalg_svd")
def svd(A: jax.Array, full_matrices: bool = True, *, driver: str | None = None) -> Any:
    """Return singular vectors and values. Vectors that only complete a full matrix have no derivative, as in torch."""
    u, s, vh = linalg.svd(A, full_matrices=False)
    m, n = A.shape[-2:]
    if full_matrices and m != n:
        rest = linalg.svd(lax.stop_gradient(A), full_matrices=True)
        k = min(m, n)
        u = jnp.concatenate([u, rest[0][..., k:]], -1)
        vh = jnp.concatenate([vh, rest[2][..., k:, :]], -2)
    return return_types.linalg_svd((u, s, vh))


@op("svd")
def legacy_svd(input: jax.Array, some: bool = True, compute_uv: bool = True) -> Any:
    """Return singular vectors as columns, and singular values."""
    m, n = input.shape[-2:]
    if compute_uv:
        u, s, vh = svd(input, not some)
        return return_types.svd((u, s, adjoint(vh)))
    zeros = [jnp.zeros((*input.shape[:-2], k, k), input.dtype) for k in (m, n)]
    return return_types.svd((zeros[0], svdvals(input), zeros[1]))


@op("linalg_svdvals")
def svdvals(A: Any, *, driver: str | None = None) -> Any:
    """Return the singular values in descending order."""
    return linalg.svd(A, compute_uv=False)


@op("linalg_qr")
def qr(A: jax.Array, mode: str = "reduced") -> Any:
    """Return Q and R. The square part of a wide matrix determines Q, as in torch's derivative."""
    m, n = A.shape[-2:]
    q, r = linalg.qr(A[..., : min(m, n)], full_matrices=mode == "complete")
    if n > m:
        r = jnp.concatenate([r, adjoint(q) @ A[..., m:]], -1)
    return return_types.linalg_qr((jnp.zeros((0,), A.dtype) if mode == "r" else q, r))


@op("qr")
def legacy_qr(input: Any, some: bool = True) -> Any:
    """Return `linalg_qr`."""
    return return_types.qr(qr(input, "reduced" if some else "complete"))


def _hermitian_from_triangle(A: Any, upper: bool) -> jax.Array:
    """Return the Hermitian matrix of one triangle. Both triangles share the derivative, as in torch."""
    lower = jnp.tril(adjoint(A) if upper else A)
    return write_without_grad((A + adjoint(A)) / 2, lower + adjoint(jnp.tril(lower, -1)))


@op("linalg_eigh")
def eigh(A: Any, UPLO: str = "L") -> Any:
    """Return eigenvalues and eigenvectors of a Hermitian matrix. Only one triangle is read."""
    vectors, values = linalg.eigh(_hermitian_from_triangle(A, UPLO.upper() == "U"), symmetrize_input=False)
    return return_types.linalg_eigh((values, vectors))


@op("linalg_eigvalsh")
def eigvalsh(A: Any, UPLO: str = "L") -> Any:
    """Return the eigenvalues of a Hermitian matrix."""
    values, _ = eigh(A, UPLO)
    return values


@op("linalg_eig")
def eig(A: Any) -> Any:
    """Return eigenvalues and eigenvectors."""
    values, vectors = jnp.linalg.eig(A)
    return return_types.linalg_eig((values, vectors))


op("linalg_eigvals")(lambda A: jnp.linalg.eigvals(A))


@op("linalg_cholesky")
def cholesky(A: Any, *, upper: bool = False) -> Any:
    """Return the Cholesky factor. Only one triangle is read, but both share the gradient, as in torch."""
    lower = linalg.cholesky(_hermitian_from_triangle(A, upper), symmetrize_input=False)
    return adjoint(lower) if upper else lower


op("cholesky")(lambda input, upper=False: cholesky(input, upper=upper))


@op("linalg_cholesky_ex")
def cholesky_ex(A: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Return the Cholesky factor, and 1 where there is none. torch returns the order of the first failing minor instead of 1."""
    root = cholesky(A, upper=upper)
    return return_types.linalg_cholesky_ex((root, jnp.isnan(root).any((-2, -1)).astype(jnp.int32)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cholesky_solve(b: Any, root: Any, upper: bool) -> Any:
    """Solve by a Cholesky factor. The derivative is torch's, as if both triangles of the factor were read."""
    root, b = _broadcast_batch_dims(root, b)
    first = linalg.triangular_solve(root, b, left_side=True, lower=not upper, transpose_a=upper, conjugate_a=upper)
    return linalg.triangular_solve(root, first, left_side=True, lower=not upper, transpose_a=not upper, conjugate_a=not upper)


@_cholesky_solve.defjvp
def _(upper: bool, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (b, root), (db, droot) = primals, tangents
    x = _cholesky_solve(b, root, upper)
    half = adjoint(droot) @ root if upper else droot @ adjoint(root)
    return x, _cholesky_solve(db - (half + adjoint(half)) @ x, root, upper)


@op("cholesky_solve")
def cholesky_solve(input: Any, input2: Any, upper: bool = False) -> Any:
    """Solve linear equations of a matrix whose Cholesky factor is given."""
    return _cholesky_solve(input, input2, upper)


@op("cholesky_inverse")
def cholesky_inverse(input: jax.Array, upper: bool = False) -> Any:
    """Return the inverse of a matrix whose Cholesky factor is given."""
    return _cholesky_solve(jnp.eye(input.shape[-1], dtype=input.dtype), input, upper)


def _lu(A: Any, pivot: bool) -> tuple[Any, Any, Any]:
    """Return both triangles in one matrix, torch's pivots (counted from one), and the number of the first zero pivot or 0."""
    if not pivot:
        raise NotImplementedError("LU factors with pivot=False have no implementation in jax, nor in torch for the CPU. Use pivot=True.")
    factors, pivots, _ = linalg.lu(A)
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    first = jnp.where(zero.any(-1), jnp.argmax(zero, -1) + 1, 0) if zero.shape[-1] else _zero_info(A)
    return factors, pivots + 1, first.astype(jnp.int32)


@op("linalg_lu_factor_ex")
def lu_factor_ex(A: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """Return factors, pivots, and the number of the first zero pivot or 0."""
    return return_types.linalg_lu_factor_ex(_lu(A, pivot))


@op("linalg_lu_factor")
def lu_factor(A: Any, *, pivot: bool = True) -> Any:
    """Return factors and pivots."""
    return return_types.linalg_lu_factor(_lu(A, pivot)[:2])


op("_lu_with_info")(lambda input, pivot=True, check_errors=True: _lu(input, pivot))
op("lu")(lambda A, pivot=True, get_infos=False: _lu(A, pivot)[: 3 if get_infos else 2])


@op("lu_unpack")
def lu_unpack(LU_data: jax.Array, LU_pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """Return the permutation and the two triangles. Those not requested are empty."""
    m, n = LU_data.shape[-2:]
    k = min(m, n)
    p = lower = upper = jnp.zeros((0,), LU_data.dtype)
    if unpack_pivots:
        order = linalg.lu_pivots_to_permutation(LU_pivots - 1, m)
        p = jnp.swapaxes(jax.nn.one_hot(order, m, dtype=LU_data.dtype), -1, -2)
    if unpack_data:
        lower = jnp.tril(LU_data[..., :k], -1) + jnp.eye(m, k, dtype=LU_data.dtype)
        upper = jnp.triu(LU_data[..., :k, :])
    return return_types.lu_unpack((p, lower, upper))


@op("linalg_lu")
def lu(A: Any, *, pivot: bool = True) -> Any:
    """Return the permutation and the two triangles."""
    return return_types.linalg_lu(lu_unpack(*_lu(A, pivot)[:2]))


@op("linalg_lu_solve")
def lu_solve(LU: jax.Array, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    """Solve linear equations of a matrix whose LU factors are given."""
    if not left:
        return _adjoint(lu_solve(LU, pivots, _adjoint(B), adjoint=not adjoint))
    order = linalg.lu_pivots_to_permutation(pivots - 1, LU.shape[-1])
    both, b = _broadcast_batch_dims(LU, B)
    order = jnp.broadcast_to(order, both.shape[:-1])[..., None]
    lower: Any = functools.partial(linalg.triangular_solve, both, left_side=True, lower=True, unit_diagonal=True)
    upper: Any = functools.partial(linalg.triangular_solve, both, left_side=True, lower=False)
    if not adjoint:
        return upper(lower(jnp.take_along_axis(b, order, -2)))
    out = lower(upper(b, transpose_a=True, conjugate_a=True), transpose_a=True, conjugate_a=True)
    return jnp.take_along_axis(out, jnp.argsort(order, -2), -2)


_adjoint = adjoint  # a second name, for where torch's argument `adjoint` hides the function
op("lu_solve")(lambda input, LU_data, LU_pivots: lu_solve(LU_data, LU_pivots, input))


@op("linalg_householder_product", "orgqr")
def householder_product(A: jax.Array, tau: Any) -> Any:
    """Return the first columns of a product of reflections."""
    m, n = A.shape[-2:]
    return _apply_reflections(A, tau, jnp.broadcast_to(jnp.eye(m, n, dtype=A.dtype), A.shape), False)


def _apply_reflections(vectors: Any, tau: Any, x: Any, transpose: bool) -> Any:
    """Apply reflections to x, the last one first unless transposed. Their vectors are the columns below the diagonal."""
    k = tau.shape[-1]
    columns = jnp.tril(vectors[..., :k], -1) + jnp.eye(vectors.shape[-2], k, dtype=vectors.dtype)

    def reflect(x: Any, one: Any) -> Any:
        v, t = one
        t = jnp.conj(t) if transpose else t
        return x - t[..., None, None] * v[..., :, None] * (jnp.conj(v)[..., None, :] @ x), None

    return lax.scan(reflect, x, (jnp.moveaxis(columns, -1, 0), jnp.moveaxis(tau, -1, 0)), reverse=not transpose)[0]


@op("ormqr")
def ormqr(input: Any, tau: Any, other: Any, left: bool = True, transpose: bool = False) -> Any:
    """Return the product of reflections with a matrix."""
    if left:
        return _apply_reflections(input, tau, other, transpose)
    return adjoint(_apply_reflections(input, tau, adjoint(other), not transpose))


# ---------------------------------------------------------------------------------------------- solutions


def _solve(A: Any, B: Any, left: bool) -> jax.Array:
    if B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1]):
        return jnp.linalg.solve(A, B[..., None])[..., 0]
    if left:
        return jnp.linalg.solve(A, B)
    return jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(A, -1, -2), jnp.swapaxes(B, -1, -2)), -1, -2)


@op("linalg_solve")
def solve(A: Any, B: Any, *, left: bool = True) -> jax.Array:
    """Solve linear equations."""
    return _solve(A, B, left)


@op("linalg_solve_ex")
def solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    """Solve linear equations. Also return the number of the first zero pivot or 0."""
    return return_types.linalg_solve_ex((_solve(A, B, left), _lu(lax.stop_gradient(A), True)[2]))


op("linalg_inv")(lambda A: jnp.linalg.inv(A))
op("inverse")(lambda input: jnp.linalg.inv(input))


@op("linalg_inv_ex")
def inv_ex(A: Any, *, check_errors: bool = False) -> Any:
    """Return the inverse, and the number of the first zero pivot or 0."""
    return return_types.linalg_inv_ex((jnp.linalg.inv(A), _lu(lax.stop_gradient(A), True)[2]))


@op("linalg_solve_triangular")
def solve_triangular(A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Solve linear equations of a triangular matrix."""
    a, b = _broadcast_batch_dims(A, B)
    return linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@op("triangular_solve")
def triangular_solve(input: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    """Solve linear equations of a triangular matrix. Also return the matrix."""
    a, b = _broadcast_batch_dims(A, input)
    out = linalg.triangular_solve(a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular)
    return return_types.triangular_solve((out, a))


def _tolerances(A: Any, atol: Atol, rtol: Atol) -> tuple[Any, Any]:
    """Return the absolute and relative tolerances below which a singular value counts as zero, with torch's defaults."""
    dtype = A.real.dtype
    absolute = jnp.zeros((), dtype) if atol is None else jnp.asarray(atol, dtype)
    default = jnp.where(absolute > 0, 0, jnp.asarray(jnp.finfo(dtype).eps * max(A.shape[-2:]), dtype))
    return absolute, default if rtol is None else jnp.asarray(rtol, dtype)


def _exceeds_tolerance(s: Any, atol: Any, rtol: Any) -> jax.Array:
    """Return which singular values exceed the tolerances."""
    size = jnp.abs(s)
    return size > jnp.maximum(atol, rtol * jnp.max(size, -1, initial=0))[..., None]


@op("linalg_matrix_rank")
def matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, *, atol: Atol = None, rtol: Atol = None) -> jax.Array:
    """Count nonzero singular values."""
    s = lax.stop_gradient(eigvalsh(A) if hermitian else svdvals(A))
    atol, rtol = (atol, rtol) if tol is None else (tol, 0.0)
    return jnp.sum(_exceeds_tolerance(s, *_tolerances(A, atol, rtol)), -1).astype(jax_dtype(torch.int64))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _pinv(A: Any, atol: Any, rtol: Any, hermitian: bool) -> jax.Array:
    if hermitian:
        s, left = eigh(A)
        right = adjoint(left)
    else:
        left, s, right = linalg.svd(A, full_matrices=False)
    kept = _exceeds_tolerance(s, atol, rtol)
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)[..., None, :].astype(A.dtype)
    return (adjoint(right) * inverse) @ adjoint(left)


@_pinv.defjvp
def _(hermitian: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return Golub and Pereyra's tangent for a constant rank, https://doi.org/10.1137/0710036."""
    a, da = primals[0], tangents[0]
    p = _pinv(*primals, hermitian)
    dah, ph = adjoint(da), adjoint(p)
    right, left = p @ (ph @ dah), (dah @ ph) @ p
    return p, -p @ da @ p + right - right @ a @ p + left - p @ (a @ left)


@op("linalg_pinv")
def pinv(A: jax.Array, rcond: Any = None, hermitian: bool = False, *, atol: Atol = None, rtol: Atol = None) -> jax.Array:
    """Return the Moore-Penrose inverse."""
    if 0 in A.shape:
        return jnp.swapaxes(A, -1, -2)
    atol, rtol = (atol, rtol) if rcond is None else (None, rcond)
    return _pinv(A, *_tolerances(A, atol, rtol), hermitian)


op("pinverse")(lambda input, rcond=1e-15: pinv(input, rcond))


@op("linalg_lstsq")
def lstsq(A: jax.Array, B: jax.Array, rcond: Any = None, *, driver: str | None = None) -> Any:
    """Return the least-squares solution by the pseudo-inverse, as in torch's derivative. Residuals assume full rank, as in torch."""
    driver = driver or "gelsy"
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    b = B[..., None] if vector else B
    x = pinv(A, None if driver == "gels" else rcond) @ b
    m, n = A.shape[-2:]
    none = jnp.zeros((0,), A.real.dtype)
    off = jnp.sum(jnp.square(jnp.abs(A @ x - b)), -2) if m > n and driver != "gelsy" else none
    rank = jnp.zeros((0,), jax_dtype(torch.int64)) if driver == "gels" else matrix_rank(A, rtol=rcond)
    s = svdvals(A) if driver in ("gelsd", "gelss") else none
    return return_types.linalg_lstsq((x[..., 0] if vector else x, off, rank, s))


op("linalg_tensorinv")(lambda A, ind=2: jnp.linalg.tensorinv(A, ind))


@op("linalg_tensorsolve")
def tensorsolve(A: Any, B: jax.Array, dims: Any = None) -> jax.Array:
    """Solve a contraction over the last dims. `dims` are moved there first."""
    a = A if dims is None else jnp.moveaxis(A, tuple(dims), tuple(range(-len(dims), 0)))
    return jnp.linalg.solve(a.reshape(B.size, -1), B.reshape(-1)).reshape(a.shape[B.ndim :])


# ---------------------------------------------------------------------------------------------- determinants and norms


def det(A: Any) -> jax.Array:
    """Return the determinant; 1 for a matrix without elements."""
    return jnp.linalg.det(A) if A.shape[-1] else jnp.ones(A.shape[:-2], A.dtype)


op("linalg_det")(det)
op("det")(lambda input: det(input))
op("linalg_slogdet")(lambda A: return_types.linalg_slogdet(jnp.linalg.slogdet(A)))
op("slogdet")(lambda input: return_types.slogdet(jnp.linalg.slogdet(input)))


@op("logdet")
def logdet(input: Any) -> jax.Array:
    """Return the logarithm of the determinant; NaN if it is negative."""
    sign, log = jnp.linalg.slogdet(input)
    return log + jnp.log(sign) if jnp.iscomplexobj(input) else jnp.where(sign < 0, jnp.nan, log)


@op("linalg_matrix_norm")
def matrix_norm(A: jax.Array, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return a norm of matrices: Frobenius, nuclear, or induced by a vector norm."""
    x = jnp.moveaxis(cast(A, dtype), tuple(dim), (-2, -1))
    if ord == "fro":
        out = norm(x, 2, (-2, -1))
    elif ord == "nuc":
        out = jnp.sum(svdvals(x), -1)
    else:
        lines = svdvals(x) if abs(ord) == 2 else norm(x, 1, -2 if abs(ord) == 1 else -1)
        lines = lines if lines.shape[-1] else jnp.zeros((*lines.shape[:-1], 1), lines.dtype)
        out = (jnp.max if ord > 0 else jnp.min)(lines, -1)
    return jnp.expand_dims(out, tuple(d % A.ndim for d in dim)) if keepdim else out


@op("linalg_norm")
def linalg_norm(A: jax.Array, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return a matrix norm for two dims, else a vector norm."""
    if ord is None:
        return norm(A, 2, dim, keepdim, dtype=dtype)
    dims = tuple(range(A.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    return (matrix_norm if len(dims) == 2 else norm)(A, ord, dims, keepdim, dtype=dtype)


@op("norm")
def legacy_norm(input: jax.Array, p: Any = "fro", dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return the norm of all elements or along dims, or the nuclear norm of a matrix."""
    if p == "nuc":
        return matrix_norm(input, p, range(input.ndim) if dim is None else dim, keepdim, dtype=dtype)
    return norm(input, p, dim, keepdim, dtype=dtype)


@op("linalg_cond")
def cond(A: jax.Array, p: Any = None) -> Any:
    """Return the condition number."""
    if p in (None, 2, -2):
        s = svdvals(A)
        if not s.shape[-1]:
            return jnp.zeros(A.shape[:-2], s.dtype)
        return s[..., -1] / s[..., 0] if p == -2 else s[..., 0] / s[..., -1]
    return matrix_norm(A, p) * matrix_norm(jnp.linalg.inv(A), p)
