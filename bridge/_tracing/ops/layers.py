"""Layers, activations, dropout, normalization and attention of torch.nn.functional."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax
from jax.custom_derivatives import SymbolicZero

from bridge._tracing.context import next_key
from bridge._tracing.functionalization import write_without_grad
from bridge._tracing.materialize import materialize, materialize_grad, on_cpu
from bridge._tracing.op_registry import Op, add_ops, builtin_op, op
from bridge._tracing.tensor import as_array

from .attention import mask_scores, softmax_matmul
from .elementwise import allow_scalar_input, cast, disallow_negative_indices, to_floating
from .subgradients import relu


def _register_activations() -> None:
    plain: dict[str, Callable[[Any], Any]] = {
        "relu": relu,
        "relu6": lambda x: hardtanh(x, 0.0, 6.0),
        "silu": jax.nn.silu,
        "selu": lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772),
        "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        "logsigmoid log_sigmoid": jax.nn.log_sigmoid,
        "softsign": lambda x: jax.nn.soft_sign(to_floating(x)),
        "tanhshrink": lambda x: to_floating(x) - jnp.tanh(to_floating(x)),
        "hardswish": lambda x: x * hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
        "hardsigmoid": lambda x: hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
    }
    for names, f in plain.items():
        op(*names.split())(lambda input, inplace=False, f=f: f(input))


_register_activations()


@op("gelu")
def gelu(input: Any, *, approximate: str = "none") -> jax.Array:
    """Return x * Phi(x), or its approximation by tanh."""
    if approximate == "tanh":
        return jax.nn.gelu(input, approximate=True)
    return _gelu(on_cpu(), input)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gelu(again: bool, x: Any) -> jax.Array:
    """Return gelu by erf; jax's own by erfc is slower with its gradient. `again`: the gradient computes erf again instead of storing it."""
    half, root = (jnp.asarray(y, x.dtype) for y in (0.5, math.sqrt(0.5)))
    return half * x * (1 + lax.erf(x * root))


@_gelu.defjvp
def _(again: bool, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (change,) = primals, tangents
    half, root, top = (jnp.asarray(y, x.dtype) for y in (0.5, math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)))
    share = half * (1 + lax.erf(x * materialize(root, again)))
    return _gelu(again, x), (share + x * (top * jnp.exp(-half * x * x))) * change


@op("leaky_relu")
def leaky_relu(input: jax.Array, negative_slope: float = 0.01, inplace: bool = False) -> jax.Array:
    """Return x, or slope * x below zero."""
    return jnp.where(input > 0, input, input * jnp.asarray(negative_slope, input.dtype))


@op("elu")
def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> jax.Array:
    """Return x, or alpha * (exp(x) - 1) below zero."""
    return _generalized_elu(input, alpha, 1.0)


@op("celu")
def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> jax.Array:
    """Return x, or alpha * (exp(x / alpha) - 1) below zero."""
    return _generalized_elu(input, alpha, 1 / alpha)


def _generalized_elu(x: Any, alpha: float, slope: float) -> jax.Array:
    """Return x, or alpha * (exp(slope * x) - 1) up to zero. The gradient passes at NaN, as in torch."""
    below = x <= 0
    return jnp.where(below, alpha * jnp.expm1(slope * jnp.where(below, x, jnp.zeros((), x.dtype))), x)


@op("prelu")
def prelu(input: jax.Array, weight: jax.Array) -> jax.Array:
    """Return x, or weight * x below zero, with one weight for all channels or for each."""
    shape = (1, -1) + (1,) * (input.ndim - 2) if input.ndim > 1 and weight.size > 1 else (-1,) if input.ndim else ()
    return jnp.where(input > 0, input, input * weight.reshape(shape))


@op("hardtanh")
def hardtanh(input: jax.Array, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> jax.Array:
    """Return `input` clamped to bounds. The gradient at the bounds is zero, as in torch."""
    low, high = jnp.asarray(min_val, input.dtype), jnp.asarray(max_val, input.dtype)
    return jnp.where(input <= low, low, jnp.where(input >= high, high, input))


@op("softplus")
def softplus(input: jax.Array, beta: float = 1.0, threshold: float = 20.0) -> jax.Array:
    """Return log(1 + exp(beta * x)) / beta, or x where beta * x exceeds the threshold."""
    scaled = input * jnp.asarray(beta, input.dtype)
    return jnp.where(scaled > threshold, input, jax.nn.softplus(scaled) / jnp.asarray(beta, input.dtype))


@op("threshold")
def threshold(input: jax.Array, threshold: float, value: float, inplace: bool = False) -> jax.Array:
    """Return `value` up to the threshold, and x above it or at NaN."""
    return jnp.where(input <= threshold, jnp.asarray(value, input.dtype), input)


@op("hardshrink")
def hardshrink(input: jax.Array, lambd: float = 0.5) -> jax.Array:
    """Return zero where |x| <= lambd, else x. NaN stays NaN."""
    return jnp.where(jnp.abs(input) <= lambd, jnp.zeros((), input.dtype), input)


@op("softshrink")
def softshrink(input: jax.Array, lambd: float = 0.5) -> jax.Array:
    """Return x moved towards zero by at most lambd. NaN stays NaN."""
    shift = jnp.asarray(lambd, input.dtype)
    return jnp.where(jnp.abs(input) <= shift, jnp.zeros((), input.dtype), jnp.where(input > shift, input - shift, input + shift))


@op("glu")
def glu(input: Any, dim: int = -1) -> jax.Array:
    """Return one half of the input times the sigmoid of the other."""
    return jax.nn.glu(input, axis=dim)


def _with_default_dim(function: Any, input: Any, dim: int | None) -> Any:
    """Apply a function along `dim`; None means torch's legacy default."""
    return function(input, axis=dim if dim is not None else 0 if input.ndim in (1, 3) else 1)


@op("softmax", "special_softmax")
@allow_scalar_input
def softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Return the softmax along a dim."""
    dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype
    return _with_default_dim(jax.nn.softmax, cast(input, dtype), dim)


@op("log_softmax", "special_log_softmax")
@allow_scalar_input
def log_softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Return the logarithm of `softmax`."""
    dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype
    return _with_default_dim(jax.nn.log_softmax, cast(input, dtype), dim)


@op("softmin")
def softmin(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Return `softmax` of -x."""
    return softmax(-input, dim, dtype=dtype)


def _dropout_factors(shape: tuple[int, ...], p: float, what: str, input: Any) -> jax.Array:
    """Return a random mask of `shape`, divided by the probability to keep an element."""
    if p >= 1:
        return jnp.zeros(shape, input.dtype)
    keep = jax.random.bernoulli(next_key(what), jnp.float32(1 - p), shape)  # under x64 a float64 would draw twice the bits
    return jnp.where(keep, jnp.asarray(1 / (1 - p), input.dtype), jnp.zeros((), input.dtype))


@op("dropout")
def dropout(input: jax.Array, p: float = 0.5, training: bool = True, inplace: bool = False) -> jax.Array:
    """Drop elements by the call's key. No key is needed if nothing can be dropped."""
    return input * _dropout_factors(input.shape, p, "dropout", input) if training and p > 0 else input


@op("native_dropout")
def native_dropout(input: jax.Array, p: float, training: bool | None) -> Any:
    """Return `dropout`, and the mask of kept elements."""
    if training is False or p == 0:
        return input, jnp.ones(input.shape, bool)
    kept = _dropout_factors(input.shape, p, "dropout", input)
    return input * kept, kept != 0


@op("feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def feature_dropout(input: jax.Array, p: float = 0.5, training: bool = True, inplace: bool = False) -> jax.Array:
    """Drop whole channels by the call's key."""
    shape = input.shape[:2] + (1,) * (input.ndim - 2)
    return input * _dropout_factors(shape, p, "dropout of channels", input) if training and p > 0 else input


def _alpha_dropout(input: Any, p: float, training: bool, shape: tuple[int, ...], what: str) -> Any:
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0
    floor = -1.7580993408473766
    a = ((1 - p) * (1 + p * floor**2)) ** -0.5
    keep = jax.random.bernoulli(next_key(what), jnp.float32(1 - p), shape)
    return jnp.where(keep, input, jnp.asarray(floor, input.dtype)) * a - a * floor * p


@op("alpha_dropout")
def alpha_dropout(input: jax.Array, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    """Replace random elements by SELU's lower limit, and keep mean and variance."""
    return _alpha_dropout(input, p, training, input.shape, "alpha_dropout")


@op("feature_alpha_dropout")
def feature_alpha_dropout(input: jax.Array, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    """Apply `alpha_dropout` to whole channels."""
    return _alpha_dropout(input, p, training, input.shape[:2] + (1,) * (input.ndim - 2), "feature_alpha_dropout")


@op("rrelu")
def rrelu(input: jax.Array, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> jax.Array:
    """Return x, or x times a random slope below zero. Without training the slope is the mean of its bounds."""
    if not training:
        return leaky_relu(input, (lower + upper) / 2)
    slope = jax.random.uniform(next_key("rrelu"), input.shape, input.dtype, lower, upper)
    return jnp.where(input <= 0, input * slope, input)


@op("linear")
def linear(input: Any, weight: jax.Array, bias: Any = None) -> jax.Array:
    """Return x @ W.T + b."""
    out = jnp.matmul(input, weight.T)
    return out if bias is None else out + bias


@op("bilinear")
def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> jax.Array:
    """Return x1 @ W @ x2 + b."""
    out = jnp.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


def take_rows(weight: Any, index: Any, by_frequency: bool = False) -> jax.Array:
    """Return rows of a weight, NaN where the index is out of range. `by_frequency`: a row's gradient is divided by its number of uses."""
    index = disallow_negative_indices(index, weight.shape[0])
    rows = jnp.take(weight, index, axis=0)
    if not by_frequency:
        return rows
    often = jnp.take(jnp.zeros(weight.shape[0], jnp.int32).at[index].add(1), index)
    return write_without_grad(rows / jnp.maximum(often, 1)[..., None].astype(rows.dtype), rows)


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Return rows of the weight, NaN where the index is out of range. The row of `padding_idx` gets no gradient."""
    if max_norm is not None:
        raise NotImplementedError(
            "embedding: max_norm changes the weight in place and is not supported. Leave it out, and renormalize the weight before."
        )
    rows = take_rows(weight, input, scale_grad_by_freq)
    if padding_idx is None:
        return rows
    return jnp.where((input == padding_idx % weight.shape[0])[..., None], lax.stop_gradient(rows), rows)


add_ops({F.embedding: Op(embedding, inspect.signature(embedding))})


@builtin_op("embedding")
def _embedding_primitive(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> jax.Array:
    return embedding(indices, weight, None if padding_idx == -1 else padding_idx, None, 2.0, scale_grad_by_freq)


@op("layer_norm")
def layer_norm(input: jax.Array, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """Normalize the last dims to mean zero and variance one. Half types are computed in float32, as in torch."""
    axes = tuple(range(input.ndim - len(tuple(normalized_shape)), input.ndim))
    out = _normalize(input, axes, eps)
    return _affine(out, weight, bias).astype(input.dtype)


def _normalize(input: Any, axes: tuple[int, ...], eps: float) -> jax.Array:
    x = input.astype(jnp.float32) if input.dtype.itemsize < 4 else input
    return _standardize(axes, x, jnp.ones((), x.dtype), jnp.asarray(eps, x.dtype))


def moments(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the mean and the biased variance along axes, which stay with size one."""
    return jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _standardize(axes: tuple[int, ...], x: Any, scale: Any, eps: Any) -> jax.Array:
    """Normalize to mean zero and variance one along axes, times a scale that is constant along them. `eps` has no gradient."""
    mean, var = moments(x, axes)
    return (x - mean) * lax.rsqrt(var + eps) * scale


@functools.partial(_standardize.defjvp, symbolic_zeros=True)
def _(axes: tuple[int, ...], primals: tuple[Any, Any, Any], tangents: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Return the tangent. Its transpose has two sums over the gradient, the same as the gradients of a bias and a scale.

    Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, section 3. The transpose multiplies by what is constant along the axes last.
    """
    (x, scale, eps), (change, d_scale, _) = primals, tangents
    mean, var = moments(x, axes)
    inverse = lax.rsqrt(var + eps)
    plain, parts = (x - mean) * inverse, []
    if not isinstance(change, SymbolicZero):
        change, share = change * (inverse * scale), jnp.asarray(-1 / max(1, math.prod(x.shape[a] for a in axes)), x.dtype)
        sums = [jnp.sum(y, axes, keepdims=True) * share for y in (change, plain * change)]
        parts = [change + sums[0] + plain * sums[1]]
    if not isinstance(d_scale, SymbolicZero):
        parts.append(plain * d_scale)
    return _standardize(axes, x, scale, eps), sum(parts) if parts else jnp.zeros_like(x)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight.astype(x.dtype)
    return x if bias is None else x + bias.astype(x.dtype)


@op("group_norm")
def group_norm(input: jax.Array, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """Normalize groups of channels to mean zero and variance one."""
    grouped = input.reshape(input.shape[0], num_groups, math.prod(input.shape[1:]) // num_groups)
    out = _normalize(grouped, (2,), eps).reshape(input.shape)
    return _affine(out, *_broadcast_over_channels(input.ndim, weight, bias)).astype(input.dtype)


def _broadcast_over_channels(ndim: int, *arrays: Any) -> list[Any]:
    return [None if a is None else a.reshape((1, -1) + (1,) * (ndim - 2)) for a in arrays]


@op("rms_norm")
def rms_norm(input: jax.Array, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Normalize the last dims to root mean square one."""
    axes = tuple(range(input.ndim - len(tuple(normalized_shape)), input.ndim))
    x = input.astype(jnp.float32) if input.dtype.itemsize < 4 else input
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    return _affine(x * lax.rsqrt(jnp.mean(jnp.square(x), axes, keepdims=True) + eps), weight, None).astype(input.dtype)


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Normalize each channel by statistics of the batch or by running statistics. Training updates the running statistics.

    The running variance is updated with the unbiased variance, as in torch.
    """
    return _channel_norm(input, running_mean, running_var, weight, bias, training, momentum, eps, tuple(range(input.ndim - 1)))


def _channel_norm(input: Any, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: Any, eps: float, axes: Any) -> Any:
    """Normalize with statistics that are shared along `axes`, which are counted with channels last."""
    raw = as_array(input)
    if raw.size == 0:
        return raw
    # XLA's CPU convolutions compute with channels last, so this layout needs no transposition between layers.
    x = jnp.moveaxis(raw.astype(jnp.float32) if raw.dtype.itemsize < 4 else raw, 1, -1)
    weight, bias = as_array(weight), as_array(bias)
    if not training and mean is not None:
        use_mean, use_var = as_array(mean).astype(x.dtype), as_array(var).astype(x.dtype)
        out = _affine((x - use_mean) * lax.rsqrt(use_var + eps), weight, bias)
    else:
        n = math.prod(x.shape[a] for a in axes)
        if n == 1:
            raise ValueError(f"batch_norm: one value per channel (input of shape {tuple(raw.shape)}) has no variance; give a larger batch.")
        use_mean, use_var = moments(x, axes)
        if mean is not None:
            factor = as_array(momentum)
            _update_running_stat(mean, use_mean, factor)
            _update_running_stat(var, use_var * (n / (n - 1)), factor)
        scale = jnp.ones((), x.dtype) if weight is None else weight.astype(x.dtype)
        out = _affine(_standardize(axes, x, scale, jnp.asarray(eps, x.dtype)), None, bias)
    return jnp.moveaxis(out, -1, 1).astype(raw.dtype)


def _update_running_stat(running: Any, new: Any, factor: Any) -> None:
    """Update a running statistic. Statistics of single instances are averaged over the batch."""
    old = running.value
    flat = jnp.mean(lax.stop_gradient(new), tuple(range(new.ndim - 1))).astype(old.dtype)
    factor = jnp.asarray(factor, old.dtype)
    running.value = old * (1 - factor) + flat * factor


def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: Any = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Normalize as `batch_norm` does, each instance by its own statistics."""
    return _channel_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, tuple(range(1, input.ndim - 1)))


add_ops(dict.fromkeys((F.batch_norm, torch.batch_norm), Op(batch_norm, None, raw=True)))
add_ops(dict.fromkeys((F.instance_norm, torch.instance_norm), Op(instance_norm, None, raw=True)))


@op("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: jax.Array,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Return softmax(q k^T * scale + mask) v. The softmax of half types is computed in float32."""
    if enable_gqa:
        key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    factor, half = 1 / math.sqrt(query.shape[-1]) if scale is None else scale, query.dtype.itemsize < 4
    wide = jnp.dtype(jnp.float32) if half else query.dtype
    factor = jnp.asarray(factor, wide)
    query = query if half else query * factor
    scores = materialize_grad(jnp.matmul(query, jnp.swapaxes(key, -1, -2), preferred_element_type=wide))
    scores = scores * factor if half else scores
    if is_causal:  # each query attends to the first key at least
        scores = mask_scores(scores, jnp.tri(*scores.shape[-2:], dtype=bool))
    elif attn_mask is not None and attn_mask.dtype == bool:
        scores = mask_scores(scores, attn_mask)
    elif attn_mask is not None:
        scores = scores + attn_mask.astype(scores.dtype)
    kept = _dropout_factors(scores.shape, dropout_p, "dropout", scores) if dropout_p > 0 else None
    return materialize_grad(softmax_matmul(scores, kept, value))


@op("_weight_norm")
def weight_norm(v: jax.Array, g: Any, dim: int = 0) -> jax.Array:
    """Return g * v / |v|, where the norm is over all dims but one."""
    axes = tuple(range(v.ndim)) if dim == -1 else tuple(a for a in range(v.ndim) if a != dim % v.ndim)
    return v * (g / jnp.sqrt(jnp.sum(jnp.square(v), axes, keepdims=True)))
