"""Elementwise torch functions and common reductions, and the helpers that the other operator modules share."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.core import Tracer

from bridge._tracing.context import current_module_path
from bridge._tracing.functionalization import write_without_grad
from bridge._tracing.op_registry import Op, add_ops, op
from bridge._tracing.promotion import default_float, jax_dtype, promote

from .subgradients import absolute, angle, arctan2, copysign, maximum, minimum, power, safe_sqrt, sign, zero_subgradient_at_zero

# Whether torch shares the gradient between equal arguments of clamp, fmax and fmin: from 2.14 on.
_GRAD_IS_SHARED = torch.__version__ >= "2.14"

Dims = int | Sequence[int] | None


def to_floating(x: Any) -> Any:
    """Return x in a floating dtype: torch's functions of real numbers accept integers."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(default_float())


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of floating arrays so that it computes half types in float32. jax's series are coarse for them, or reject them."""

    @functools.wraps(function)
    def wide(*xs: Any) -> Any:
        dtype = xs[-1].dtype
        return function(*(x.astype(jnp.float32) for x in xs)).astype(dtype) if dtype.itemsize < 4 else function(*xs)

    return wide


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Return x in this dtype, or x itself for None."""
    return x if dtype is None else x.astype(jax_dtype(dtype))


def is_nonzero(x: Any) -> Any:
    """Return whether each element is nonzero; bools as they are."""
    x = jnp.asarray(x)
    return x if x.dtype == bool else x != jnp.zeros((), x.dtype)


def _square(x: Any) -> jax.Array:
    return jnp.square(cast(x, torch.int64) if x.dtype == bool else x)


def _register_unary() -> None:
    real = "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh"
    names = {name: getattr(jnp, name) for name in real.split()}
    names |= {"asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan, "asinh": jnp.arcsinh, "acosh": jnp.arccosh, "atanh": jnp.arctanh}
    names |= {f"arc{name[1:]}": f for name, f in names.items() if name.startswith("a")}
    names |= {"rsqrt": lax.rsqrt, "sigmoid": jax.nn.sigmoid, "special_expit": jax.nn.sigmoid, "erf": lax.erf, "erfc": lax.erfc}
    names |= {"erfinv": lax.erf_inv, "lgamma": lax.lgamma, "reciprocal": jnp.reciprocal}
    names |= {"deg2rad": jnp.deg2rad, "rad2deg": jnp.rad2deg, "sinc": jnp.sinc, "angle": angle}
    for name, f in names.items():
        op(name)(lambda input, f=f: f(to_floating(input)))
    for name, f in {"isnan": jnp.isnan, "isinf": jnp.isinf, "isfinite": jnp.isfinite, "logical_not": lambda x: ~is_nonzero(x)}.items():
        op(name)(lambda input, f=f: f(input))
    same = {"abs absolute __abs__": absolute, "neg negative __neg__": jnp.negative, "positive __pos__": jnp.asarray, "sign sgn": sign}
    same |= {"floor": jnp.floor, "ceil": jnp.ceil, "trunc fix": jnp.trunc, "square": _square, "bitwise_not __invert__": jnp.invert}
    for aliases, f in same.items():
        op(*aliases.split())(lambda input, f=f: f(input))


_register_unary()


@op("round")
def round_(input: Any, decimals: int = 0) -> jax.Array:
    """Round half to even, as torch does."""
    return jnp.round(input, decimals)


@op("frac")
def frac(input: Any) -> jax.Array:
    """Return the fractional part."""
    return input - jnp.trunc(input)


def _select(a: jax.Array, b: jax.Array, takes_a: jax.Array) -> jax.Array:
    """Return a where it is taken or b is NaN, else b. From torch 2.14 on equal elements share the gradient."""
    value = jnp.where(takes_a | (b != b), a, b)
    if not (_GRAD_IS_SHARED and jnp.issubdtype(value.dtype, jnp.floating)):
        return value
    return write_without_grad(jnp.where(a == b, 0.5 * a + 0.5 * b, value), value)


def _register_binary() -> None:
    table: dict[str, Any] = {"maximum": maximum, "minimum": minimum, "logaddexp": logaddexp, "xlogy": _xlogy}
    table |= {"remainder": jnp.remainder, "fmod": jnp.fmod, "floor_divide": jnp.floor_divide, "hypot": jnp.hypot}
    table |= {"fmax": lambda a, b: _select(a, b, a >= b), "fmin": lambda a, b: _select(a, b, a <= b)}
    table |= {"mul": _mul, "multiply": _mul, "__floordiv__": jnp.floor_divide, "__mod__": jnp.remainder, "__mul__": _mul}
    table |= {f"bitwise_{name}": getattr(jnp, f"bitwise_{name}") for name in ("and", "or", "xor")}
    table |= {f"__{name}__": getattr(jnp, f"bitwise_{name}") for name in ("and", "or", "xor")}
    table |= {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
    table |= {"eq": operator.eq, "ne": operator.ne, "not_equal": operator.ne, "lt": operator.lt, "less": operator.lt}
    table |= {"le": operator.le, "less_equal": operator.le, "gt": operator.gt, "greater": operator.gt}
    table |= {"ge": operator.ge, "greater_equal": operator.ge}
    for name, f in table.items():
        op(name)(lambda input, other, f=f: f(*promote(input, other)))
    for aliases, f in {"atan2 arctan2": arctan2, "copysign": copysign}.items():
        op(*aliases.split())(lambda input, other, f=f: f(*map(to_floating, promote(input, other))))
    for name, f, unlike in (("__eq__", operator.eq, False), ("__ne__", operator.ne, True)):  # with None or a string, no error
        op(name)(lambda input, other, f=f, unlike=unlike: unlike if isinstance(other, str | None) else f(*promote(input, other)))
    for name in ("mul", "floordiv", "mod", "and", "or", "xor"):
        op(f"__r{name}__")(lambda input, other, f=table[f"__{name}__"]: f(*promote(other, input)))
    for name, f in {"logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor}.items():
        op(name)(lambda input, other, f=f: f(is_nonzero(input), is_nonzero(other)))


def _mul(a: Any, b: Any) -> Any:
    return jnp.logical_and(a, b) if a.dtype == bool else a * b


def _xlogy(a: Any, b: Any) -> jax.Array:
    a, b = to_floating(a), to_floating(b)
    return jax.scipy.special.xlogy(jnp.where((a == 0) & (b <= 0), lax.stop_gradient(a), a), b)


def logaddexp(a: Any, b: Any) -> jax.Array:
    """Return log(exp(a) + exp(b)).

    For complex numbers torch adds the one with the larger real part outside of the logarithm, so its angle keeps all turns.
    """
    if not jnp.iscomplexobj(a):
        return jnp.logaddexp(a, b)
    first = a.real >= b.real
    most, least = jnp.where(first, a, b), jnp.where(first, b, a)
    endless = (most.real == least.real) & jnp.isinf(most.real)
    zero = jnp.zeros((), most.dtype)
    difference = jnp.where(endless, zero, least) - jnp.where(endless, zero, most)
    ends = [jnp.where(endless & (most.real > 0), x, zero) for x in (least, most)]
    of_ends = jnp.where(most.real < 0, least, jnp.log(jnp.exp(ends[0]) + jnp.exp(ends[1])))
    return jnp.where(endless, of_ends, most + jnp.log1p(jnp.exp(difference)))


_register_binary()


@op("add", "__add__", "__radd__")
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return input + alpha * other."""
    a, b = promote(input, other)
    if a.dtype == bool:
        return jnp.logical_or(a, jnp.logical_and(b, bool(alpha)))
    return a + _scale_by_alpha(b, alpha)


def _scale_by_alpha(x: Any, alpha: Any) -> Any:
    """Return x * alpha. A negative alpha wraps around in unsigned dtypes, as in torch."""
    if isinstance(alpha, int | float) and alpha == 1:
        return x
    dtype = jax_dtype(torch.int64) if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else x.dtype
    return x * jnp.asarray(alpha, dtype).astype(x.dtype)


@op("sub", "subtract", "__sub__")
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return input - alpha * other."""
    a, b = promote(input, other)
    return a - _scale_by_alpha(b, alpha)


@op("rsub", "__rsub__")
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return other - alpha * input."""
    a, b = promote(input, other)
    return b - _scale_by_alpha(a, alpha)


@op("div", "divide", "true_divide", "__div__", "__truediv__")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Return input / other. Integers give torch's default dtype, unless `rounding_mode` is set."""
    a, b = promote(input, other)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc":
        return jnp.trunc(a / b) if jnp.issubdtype(a.dtype, jnp.inexact) else lax.div(*jnp.broadcast_arrays(a, b))
    return to_floating(a) / to_floating(b)


@op("__rtruediv__", "__rdiv__")
def rdiv(input: Any, other: Any) -> Any:
    """Return other / input."""
    return div(other, input)


@op("pow", "__pow__")
def pow_(input: Any, exponent: Any) -> jax.Array:
    """Return input ** exponent. A whole exponent becomes multiplications, whose derivative is also right at zero."""
    if isinstance(exponent, int | float) and not isinstance(exponent, bool) and abs(exponent) < 64 and exponent == int(exponent):
        base = promote(input, exponent)[0]
        if exponent < 0 and not jnp.issubdtype(base.dtype, jnp.inexact):
            raise RuntimeError(
                f"A tensor of {base.dtype} is raised to the power {exponent} {current_module_path()}, and torch raises integers to no "
                "negative number. Convert the tensor to a floating dtype first."
            )
        return lax.integer_pow(base, int(exponent))
    if isinstance(exponent, float) and exponent == 0.5:
        return jnp.sqrt(to_floating(input))
    a, b = promote(input, exponent)
    return _integer_power(a, b) if jnp.issubdtype(a.dtype, jnp.signedinteger) else power(a, b)


def _integer_power(a: Any, b: Any) -> jax.Array:
    """Return a ** b of integers. A negative exponent gives a truncated result: 0 except for the bases 1 and -1."""
    one = jnp.ones((), a.dtype)
    inverse = jnp.where(a == one, one, jnp.where(a == -one, 1 - 2 * (b % 2), jnp.zeros((), a.dtype)))
    return jnp.where(b < 0, inverse, jnp.power(a, jnp.maximum(b, jnp.zeros((), b.dtype))))


@op("__rpow__")
def rpow(input: Any, other: Any) -> jax.Array:
    """Return other ** input."""
    return pow_(other, input)


def _inner_grad(x: jax.Array, low: jax.Array | None, high: jax.Array | None) -> jax.Array:
    """Return a function of x whose derivative is one strictly between the bounds, which are numbers, and zero elsewhere."""
    inside = (True if low is None else x > low) & (True if high is None else x < high)
    return jnp.where(inside, x, lax.stop_gradient(x))


def _shared_grad(x: jax.Array, low: jax.Array | None, high: jax.Array | None) -> jax.Array:
    """Return a function of x and of bounds that are tensors, whose derivatives are those of torch.clamp."""
    if low is None or high is None:
        return minimum(x, high) if low is None else maximum(x, low)
    ordered, tie = low < high, (x == low) | (x == high)
    of_x = jnp.where((x < low) | (x > high), 0.0, jnp.where(tie & ordered, 0.5, 1.0))
    of_low = jnp.where((x < low) & (low <= high), 1.0, jnp.where((x == low) & ordered, 0.5, 0.0))
    of_high = jnp.where((x > high) | (high < low), 1.0, jnp.where((x == high) & ordered, 0.5, 0.0))
    return x * of_x.astype(x.dtype) + low * of_low.astype(x.dtype) + high * of_high.astype(x.dtype)


@op("clamp", "clip")
def clamp(input: Any, min: Any = None, max: Any = None) -> jax.Array:
    """Return `input` clamped to bounds, and NaN where it or a bound is NaN. The gradient is that of the installed torch.

    Before torch 2.14 it passes at the bounds and is zero at NaN. From 2.14 on it is zero at bounds that are numbers and at NaN; with
    bounds that are tensors, input and bound share it where they are equal, and it passes at NaN.
    """
    given = [x for x in (min, max) if x is not None]
    is_tensor = any(isinstance(x, jax.Array) for x in given)
    input, *bounds = promote(input, *given)
    low = None if min is None else bounds[0]
    high = None if max is None else bounds[-1]
    value = input if low is None else jnp.maximum(input, low)
    value = value if high is None else jnp.minimum(value, high)
    if _GRAD_IS_SHARED:
        return write_without_grad(_shared_grad(input, low, high) if is_tensor else _inner_grad(input, low, high), value)
    inside, source = True, lax.stop_gradient(value)
    if low is not None:
        inside = input >= low
        source = jnp.where(input < low if high is None else (input < low) & (low < high), low, source)
    if high is not None:
        inside &= input <= high
        source = jnp.where(input > high if low is None else (input > high) | (high < low), high, source)
    return write_without_grad(jnp.where(inside, input, source), value)


@op("clamp_min")
def clamp_min(input: Any, min: Any) -> jax.Array:
    """Clamp from below."""
    return clamp(input, min)


@op("clamp_max")
def clamp_max(input: Any, max: Any) -> jax.Array:
    """Clamp from above."""
    return clamp(input, None, max)


def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    """Return elements of `input` where the condition is True, else of `other`. Without both, return the indices of True."""
    if input is None:
        return jnp.where(condition)
    return jnp.where(condition, *promote(input, other))


def _where_method(input: Any, condition: Any, other: Any) -> Any:
    return where(condition, input, other)


add_ops({torch.where: Op(where, inspect.signature(where)), torch.Tensor.where: Op(_where_method, None)})


@op("masked_fill")
def masked_fill(input: jax.Array, mask: Any, value: Any) -> jax.Array:
    """Return `value` where the mask is True, else `input`."""
    return jnp.where(mask, jnp.asarray(value, input.dtype), input)


@op("lerp")
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """Return input + weight * (end - input)."""
    input, end, weight = promote(input, end, weight)
    return input + weight * (end - input)


@op("addcmul")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """Return input + value * tensor1 * tensor2."""
    return add(input, _mul(*promote(tensor1, tensor2)), alpha=value)


@op("addcdiv")
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """Return input + value * tensor1 / tensor2."""
    return add(input, div(tensor1, tensor2), alpha=value)


@op("nan_to_num")
def nan_to_num(input: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> jax.Array:
    """Replace NaN and infinities by numbers."""
    return jnp.nan_to_num(input, nan=nan or 0.0, posinf=posinf, neginf=neginf)


def disallow_negative_indices(index: Any, size: int) -> Any:
    """Replace negative indices by one that is out of range. torch rejects them, and jax would count them from the end."""
    if not jnp.issubdtype(index.dtype, jnp.signedinteger):
        return index
    index = index if index.dtype.itemsize >= 4 else index.astype(jnp.int32)  # a dtype that can hold `size`
    return jnp.where(index < 0, size, index)


def numpy_axes(dim: Dims) -> Any:
    """Return numpy's `axis` for torch's `dim`. None and () mean all dims."""
    return None if dim is None or (not isinstance(dim, int) and len(dim) == 0) else dim if isinstance(dim, int) else tuple(dim)


def allow_scalar_input(handler: Any) -> Any:
    """Wrap a function along a dim so that it accepts a 0-d input: torch treats it as a vector of one element."""

    @functools.wraps(handler)
    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(input, *args, **kwargs) if jnp.ndim(input) else squeeze_to_scalars(handler(input[None], *args, **kwargs))

    return run


def squeeze_to_scalars(out: Any) -> Any:
    """Return vectors of one element, alone or in a tuple, as 0-d arrays."""
    return type(out)(list(map(squeeze_to_scalars, out))) if isinstance(out, tuple) else out.reshape(())


@op("sum")
@allow_scalar_input
def sum_(input: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    """Return the sum. Bools and integers are summed in int64, as in torch."""
    if dtype is None and not jnp.issubdtype(input.dtype, jnp.inexact):
        dtype = torch.int64
    input = cast(input, dtype)
    return jnp.sum(input, axis=numpy_axes(dim), keepdims=keepdim, dtype=input.dtype)


@op("mean")
@allow_scalar_input
def mean(input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    """Return the mean."""
    return jnp.mean(cast(input, dtype), axis=numpy_axes(dim), keepdims=keepdim)


@op("prod")
@allow_scalar_input
def prod(input: jax.Array, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    """Return the product. Bools and integers are multiplied in int64, as in torch."""
    if dtype is None and not jnp.issubdtype(input.dtype, jnp.inexact):
        dtype = torch.int64
    input = cast(input, dtype)
    return jnp.prod(input, axis=dim, keepdims=keepdim, dtype=input.dtype)


@op("var")
@allow_scalar_input
def var(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> jax.Array:
    """Return the variance, by default with Bessel's correction."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    ddof: Any = correction if correction is not None else 1 if unbiased else 0
    return jnp.var(input, axis=numpy_axes(dim), keepdims=keepdim, ddof=ddof)


@op("std")
@allow_scalar_input
def std(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> jax.Array:
    """Return the square root of `var`."""
    return safe_sqrt(var(input, dim, unbiased, keepdim, correction=correction))


@op("var_mean")
@allow_scalar_input
def var_mean(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> Any:
    """Return the variance and the mean."""
    return var(input, dim, unbiased, keepdim, correction=correction), mean(input, None if isinstance(dim, bool) else dim, keepdim)


@op("std_mean")
@allow_scalar_input
def std_mean(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> Any:
    """Return the standard deviation and the mean."""
    return std(input, dim, unbiased, keepdim, correction=correction), mean(input, None if isinstance(dim, bool) else dim, keepdim)


@op("all")
@allow_scalar_input
def all_(input: Any, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    """Return whether all elements are nonzero, as uint8 for uint8 and as bool for other dtypes."""
    return jnp.all(is_nonzero(input), axis=numpy_axes(dim), keepdims=keepdim).astype(_predicate_dtype(input))


def _predicate_dtype(x: Any) -> Any:
    return x.dtype if x.dtype == jnp.uint8 else bool


@op("_assert")
def assert_(condition: Any, message: str) -> None:
    """Assert a condition if its value is known. A traced condition passes."""
    if not isinstance(condition, Tracer):
        assert condition, message


@op("_is_all_true")
def is_all_true(input: Any) -> Any:
    """Return whether all elements are True, for torch's own checks. A traced input passes."""
    return isinstance(input, Tracer) or jnp.all(input)


@op("any")
@allow_scalar_input
def any_(input: Any, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    """Return whether any element is nonzero, as uint8 for uint8 and as bool for other dtypes."""
    return jnp.any(is_nonzero(input), axis=numpy_axes(dim), keepdims=keepdim).astype(_predicate_dtype(input))


@op("amax")
@allow_scalar_input
def amax(input: Any, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    """Return the largest element. Equal elements share the gradient, as in torch."""
    return jnp.max(input, axis=numpy_axes(dim), keepdims=keepdim)


@op("amin")
@allow_scalar_input
def amin(input: Any, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    """Return the smallest element. Equal elements share the gradient, as in torch."""
    return jnp.min(input, axis=numpy_axes(dim), keepdims=keepdim)


@op("linalg_vector_norm")
@allow_scalar_input
def norm(input: Any, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return the p-norm of all elements, or along dims."""
    p, x, axis = ord, cast(input, dtype), numpy_axes(dim)
    if p in (None, "fro", 2):
        return safe_sqrt(jnp.sum(jnp.square(absolute(x)), axis=axis, keepdims=keepdim))
    if math.isinf(p):
        return (jnp.max if p > 0 else jnp.min)(absolute(x), axis=axis, keepdims=keepdim)
    if p == 0:
        return jnp.sum(x != 0, axis=axis, keepdims=keepdim).astype(x.dtype)
    if p == 1:
        return jnp.sum(absolute(x), axis=axis, keepdims=keepdim)
    if p < 0:  # one zero element makes the norm and its derivative zero
        zero = x == 0
        whole = pow_(jnp.sum(pow_(absolute(jnp.where(zero, jnp.ones_like(x), x)), p), axis=axis, keepdims=keepdim), 1 / p)
        return jnp.where(jnp.any(zero, axis=axis, keepdims=keepdim), jnp.zeros_like(whole), whole)
    power = functools.partial(pow_, exponent=p)
    powers = zero_subgradient_at_zero(power, absolute(x)) if 0 < p < 1 else power(absolute(x))
    return zero_subgradient_at_zero(lambda whole: pow_(whole, 1 / p), jnp.sum(powers, axis=axis, keepdims=keepdim))
