"""torch.optim's update equations with operations across the elements of a leaf: Muon and Adafactor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from bridge._names import accepts_learning_rate

from .per_leaf import Scalar, State, Update, cast_scalars, initial_count, lerp, per_leaf, scaled_update, widest_float

# The quintic iteration of https://kellerjordan.github.io/posts/muon/: its slope at 0 is as large as possible.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MAX_UNROLLED_LENGTH = 8  # the most terms for which a mean is unrolled


def newton_schulz(
    matrix: jax.Array, coefficients: tuple[Scalar, Scalar, Scalar], steps: int, eps: Scalar, dtype: DTypeLike = jnp.bfloat16
) -> jax.Array:
    """Bring the singular values of an (m, n) matrix near 1, by iterating x <- a x + (b x x' + c (x x')^2) x.

    As in torch, every stored value is rounded to `dtype`. Products accumulate in float32 (in float64 if `dtype` is float64) and are
    rounded once.

    Args:
      matrix: a matrix of any floating dtype.
      coefficients: a, b, c.
      steps: the number of iterations.
      eps: the least norm by which the matrix is divided before the first iteration.
      dtype: the dtype of stored values.

    Returns:
      A matrix of the same shape and dtype.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/_muon.py; Jordan et al.,
    https://kellerjordan.github.io/posts/muon/.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> bridge.matrix_rules.newton_schulz(3 * jnp.eye(2), bridge.matrix_rules.NS_COEFFICIENTS, 5, 1e-7).round()
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    info = jnp.finfo(dtype)
    sums = jnp.float64 if info.bits == 64 else jnp.float32
    rows, columns = sorted(matrix.shape)

    def rounded(x: jax.Array) -> jax.Array:
        # XLA may drop a cast to `dtype` and back (its flag xla_allow_excess_precision). Before a cast, this rounds only once.
        return x if info.bits >= 32 else jax.lax.reduce_precision(x, info.nexp, info.nmant)

    def product(x: jax.Array, y: jax.Array, contracted_dim: int) -> jax.Array:
        dims = (((1,), (contracted_dim,)), ((), ()))
        return jax.lax.dot_general(x, y, dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=sums)

    def wide_side_last(x: jax.Array) -> jax.Array:
        # The barrier forces a copy: XLA would carry the transposition through all products, which are slower then.
        return jax.lax.optimization_barrier(x.T.reshape(-1)).reshape(rows, columns)

    tall = matrix.shape[0] > matrix.shape[1]
    x = rounded(matrix.astype(sums))
    x = wide_side_last(x) if tall else x
    norm = jnp.maximum(rounded(jnp.sqrt(jnp.sum(x * x))), rounded(cast_scalars(x)(eps)))
    a, b, c = map(cast_scalars(x), coefficients)
    x = rounded(x / norm).astype(dtype)
    for _ in range(steps):
        gram = rounded(product(x, x, 1)).astype(dtype)
        polynomial = rounded(b * gram.astype(sums) + c * product(gram, gram, 0)).astype(dtype)
        x = rounded(a * x.astype(sums) + product(polynomial, x, 0)).astype(dtype)
    return (jax.lax.optimization_barrier(x.reshape(-1)).reshape(rows, columns).T if tall else x).astype(matrix.dtype)


@accepts_learning_rate
def muon(
    lr: Scalar = 1e-3,
    weight_decay: Scalar = 0.1,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[Scalar, Scalar, Scalar] = NS_COEFFICIENTS,
    eps: Scalar = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> optax.GradientTransformation:
    """torch.optim.Muon for leaves that are matrices: momentum, orthogonalized in bfloat16, and decoupled weight decay.

    The momentum is an average (the gradient enters with 1 - momentum), as in torch; in optax.contrib.muon it is a sum.
    `lr` is multiplied by sqrt(max(1, rows / columns)) if `adjust_lr_fn` is "original" or None, by 0.2 * sqrt(max(rows, columns)) if it is
    "match_rms_adamw", and by sqrt(rows / columns) if it is "spectral_unclamped".

    Args:
      lr: the learning rate.
      weight_decay: the decoupled decay: p is multiplied by 1 - lr * weight_decay.
      momentum: the decay rate of the average of the gradient.
      nesterov: whether to step along the average of the gradient and the new momentum.
      ns_coefficients, eps, ns_steps: the coefficients, eps and steps of `newton_schulz`.
      adjust_lr_fn: "original", "match_rms_adamw", "spectral_unclamped" or None.

    Source: https://github.com/pytorch/pytorch/blob/v2.15.0/torch/optim/_muon.py; Jordan et al.,
    https://kellerjordan.github.io/posts/muon/; match_rms_adamw: Liu et al., arXiv:2502.16982; spectral_unclamped: Bernstein,
    https://jeremybernste.in/writing/deriving-muon.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.matrix_rules.muon(lr=1.0, weight_decay=0.0)
      >>> params = grads = {"w": jnp.eye(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round()
      Array([[-1.,  0.],
             [ 0., -1.]], dtype=float32)
    """
    direction = functools.partial(newton_schulz, coefficients=ns_coefficients, steps=ns_steps, eps=eps)
    return muon_with(direction, lr, weight_decay, momentum, nesterov, adjust_lr_fn)


@accepts_learning_rate
def muon_with(
    direction: Callable[[jax.Array], jax.Array],
    lr: Scalar,
    weight_decay: Scalar,
    momentum: Scalar,
    nesterov: bool,
    adjust_lr_fn: str | None,
) -> optax.GradientTransformation:
    """`muon` with another function from the momentum to the direction of the update, such as `newton_schulz` in float64.

    Args:
      direction: the function.
      lr, weight_decay, momentum, nesterov, adjust_lr_fn: as in `muon`.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.matrix_rules.muon_with(jnp.sign, 1.0, 0.0, 0.9, True, None)
      >>> params = grads = {"w": jnp.eye(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round()
      Array([[-1.,  0.],
             [ 0., -1.]], dtype=float32)
    """

    def ratio(rows: int, columns: int) -> float:
        if adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        shape_ratio = rows / max(columns, 1)
        return math.sqrt(shape_ratio if adjust_lr_fn == "spectral_unclamped" else max(1, shape_ratio))

    def init_leaf(p: jax.Array) -> State:
        if p.ndim != 2:
            raise ValueError(
                f"muon: a leaf has the shape {p.shape}; expected matrices. Give the other leaves another update by bridge.partition, or "
                "in torch by PartitionedOptimizer with labels=torch_api.muon_labels."
            )
        return {"momentum_buffer": jnp.zeros_like(p)}

    def update_leaf(g: jax.Array, p: jax.Array, momentum_buffer: jax.Array) -> Update:
        buffer = lerp(momentum_buffer, g, 1 - widest_float(momentum))
        update = direction(lerp(g, buffer, momentum) if nesterov else buffer)
        rows, columns = p.shape
        update = -cast_scalars(p)(widest_float(lr) * ratio(rows, columns)) * update
        return scaled_update(p, 1 - widest_float(lr) * widest_float(weight_decay), update), {"momentum_buffer": buffer}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def adafactor(
    lr: Scalar = 1e-2,
    beta2_decay: Scalar = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
    dtype: str | None = None,
) -> optax.GradientTransformation:
    """torch.optim.Adafactor, per leaf. A leaf of two or more dimensions has the row and column means of its squared gradients as state.

    The last two dimensions are factored; a vector has all its squares as state. The step is relative to the root mean square of the leaf,
    which counts as at least eps[1], and the relative step is at most 1 / sqrt(step). eps[0] None means the machine epsilon of `dtype`,
    the dtype that the leaf is stored in (None: the dtype that it has here). optax.adafactor has other schedules, and momentum.

    Args:
      lr: the greatest step relative to the leaf.
      beta2_decay: the averages of squared gradients decay by 1 - step ** beta2_decay.
      eps: the least squared gradient, and the least root mean square of a leaf.
      d: the bound on the root mean square of the update.
      weight_decay: the decoupled decay: p is multiplied by 1 - lr * weight_decay.
      maximize: whether to ascend: the gradient is negated.
      dtype: the name of the dtype for eps[0].

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/_adafactor.py; Shazeer and Stern,
    arXiv:1804.04235.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.matrix_rules.adafactor(lr=0.5)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        if p.ndim < 2:
            return {"step": initial_count(), "variance": jnp.zeros_like(p)}
        rows, columns = (*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])
        return {"step": initial_count(), "row_var": jnp.zeros(rows, p.dtype), "col_var": jnp.zeros(columns, p.dtype)}

    def update_leaf(
        g: jax.Array,
        p: jax.Array,
        step: jax.Array,
        row_var: jax.Array | None = None,
        col_var: jax.Array | None = None,
        variance: jax.Array | None = None,
    ) -> Update:
        cast, step = cast_scalars(g), step + 1
        g = -g if maximize else g
        eps1 = float(jnp.finfo(dtype or p.dtype).eps) if eps[0] is None else eps[0]
        share = widest_float(step) ** widest_float(beta2_decay)
        rate = jnp.minimum(widest_float(lr), 1 / jnp.sqrt(widest_float(step))) * _max_ignoring_nan(
            widest_float(eps[1]), widest_float(_root_mean_square(p))
        )
        if variance is None:
            assert row_var is not None  # a leaf has both, or `variance`
            assert col_var is not None
            row_var = lerp(row_var, _mean(g * g, -1), share)
            col_var = lerp(col_var, _mean(g * g, -2), share)
            estimate = row_var * col_var / jnp.maximum(_mean(row_var, -2), cast(eps1))
        else:
            estimate = variance = lerp(variance, g * g, share)
        update = g * jax.lax.rsqrt(jnp.maximum(estimate, cast(eps1 * eps1)))
        clipped = rate / _max_ignoring_nan(widest_float(1.0), widest_float(_root_mean_square(update)) / widest_float(d))
        update = scaled_update(p, 1 - widest_float(lr) * widest_float(weight_decay), -cast(clipped) * update)
        return update, {"step": step, "row_var": row_var, "col_var": col_var, "variance": variance}

    return per_leaf(init_leaf, update_leaf)


def _max_ignoring_nan(bound: jax.Array, x: jax.Array) -> jax.Array:
    """Return the larger of both, and the bound if x is NaN, as Python's max in torch does: a NaN then does not spread to the whole leaf."""
    return jnp.where(x > bound, x, bound)


def _mean(x: jax.Array, axis: int) -> jax.Array:
    length = x.shape[axis]
    if not 0 < length <= _MAX_UNROLLED_LENGTH:
        return jnp.sum(x, axis, keepdims=True) / max(length, 1)
    # XLA's sum on a CPU makes a call for each row, which takes long for short rows, such as the three of a convolution.
    return functools.reduce(jnp.add, (jax.lax.slice_in_dim(x, i, i + 1, axis=axis % x.ndim) for i in range(length))) / length


def _root_mean_square(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.reshape(-1))) / max(x.size, 1))
