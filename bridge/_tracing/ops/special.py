"""Torch's special functions (`torch.special`), and functions of the floating-point representation."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special

from bridge._tracing.functionalization import write_without_grad
from bridge._tracing.op_registry import op
from bridge._tracing.promotion import jax_dtype, promote

from .elementwise import in_float32, pow_, to_floating


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def polygamma(n: int, x: Any) -> jax.Array:
    """Return the n-th derivative of `digamma`, by reflection where jax's series does not apply: https://dlmf.nist.gov/5.15#E6."""
    if n == 0:  # jax returns NaN at zero
        return jnp.where(x == 0, jnp.copysign(jnp.asarray(jnp.inf, x.dtype), -x), lax.digamma(x))
    low = x < 0.5
    series = special.polygamma(n, jnp.where(low, 1 - x, x))
    cot, slope = 1 / jnp.tan(math.pi * (x - jnp.round(x))), np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):  # cot' = -(1 + cot ** 2)
        slope = slope.deriv() * np.polynomial.Polynomial([-1.0, 0.0, -1.0])
    of_cot = functools.reduce(lambda sum, factor: sum * cot + factor, slope.coef[::-1].tolist())  # infinite at a pole, not 0 * inf
    reflected = (-1) ** n * series - math.pi ** (n + 1) * of_cot
    return jnp.where(low, reflected, jnp.where(jnp.isposinf(x), jnp.zeros((), x.dtype), series))


@polygamma.defjvp
def _(n: int, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (change,) = primals, tangents
    return polygamma(n, x), polygamma(n + 1, x) * change


def digamma(x: Any) -> jax.Array:
    """Return the derivative of `lgamma`."""
    return polygamma(0, x)


@jax.custom_jvp
def i0(x: Any) -> Any:
    """Return the modified Bessel function of order 0. Its derivative at zero is 0, and not 1 as in jax."""
    return special.i0(x)


i0.defjvps(lambda tangent, _, x: tangent * special.i1(x))


def _polygamma(n: Any, input: Any) -> Any:
    """Call `polygamma`. The torch function has the order first, the method the tensor."""
    n, x = (n, input) if isinstance(n, int) else (input, n)
    return in_float32(functools.partial(polygamma, n))(to_floating(x))


op("polygamma")(_polygamma)


def _zeta(x: Any, q: Any) -> jax.Array:
    """Return Hurwitz's zeta function: infinite at its poles, NaN where it is not real, as in torch."""
    outside = jnp.where(q == jnp.floor(q), jnp.inf, jnp.where(x == jnp.floor(x), special.zeta(x, q), jnp.nan))
    out = jnp.where(q <= 0, outside, special.zeta(x, q))
    return jnp.where(x == 1, jnp.inf, jnp.where(x < 1, jnp.nan, out))


def _xlog1py(x: Any, y: Any) -> Any:
    return special.xlog1py(jnp.where((x == 0) & (y <= -1), lax.stop_gradient(x), x), y)


def _register() -> None:
    one = {"digamma": digamma, "special_psi": digamma, "special_gammaln": lax.lgamma, "i0": i0, "special_modified_bessel_i0": i0}
    one |= {"special_modified_bessel_i1": special.i1}
    one |= {f"special_{name}": getattr(special, name) for name in ("i0e", "i1", "i1e", "ndtr", "ndtri", "log_ndtr", "entr", "erfcx")
            if hasattr(special, name)}  # fmt: skip
    for name, f in one.items():
        op(name)(lambda input, f=f: in_float32(f)(to_floating(input)))
    two = {"logaddexp2": jnp.logaddexp2, "special_xlog1py": _xlog1py, "special_zeta": _zeta, "igamma": special.gammainc}
    two |= {"special_gammainc": special.gammainc, "igammac": special.gammaincc, "special_gammaincc": special.gammaincc}
    for name, f in two.items():
        op(name)(lambda input, other, f=f: in_float32(f)(*map(to_floating, promote(input, other))))
    for name, f in {"isposinf": jnp.isposinf, "isneginf": jnp.isneginf, "isreal": jnp.isreal, "signbit": jnp.signbit}.items():
        op(name)(lambda input, f=f: f(input))


_register()


@op("logit")
def logit(input: Any, eps: float | None = None) -> jax.Array:
    """Return the inverse of the logistic function. `eps` moves its input away from 0 and 1, above 0.5 to the other side, as in torch."""
    x = to_floating(input)
    x = x if eps is None else jnp.where(x < eps, eps, jnp.where(x > 1 - eps, 1 - eps, x))
    return jnp.log(x) - jnp.log1p(-x)


@op("mvlgamma", "special_multigammaln")
def mvlgamma(input: Any, p: int) -> Any:
    """Return the logarithm of the multivariate gamma function of dimension p."""
    return in_float32(functools.partial(_mvlgamma, p))(to_floating(input))


def _mvlgamma(p: int, x: Any) -> jax.Array:
    terms = lax.lgamma(x[..., None] - jnp.arange(p, dtype=x.dtype) / 2)
    return jnp.sum(terms, -1) + p * (p - 1) / 4 * math.log(math.pi)


@op("frexp")
def frexp(input: Any) -> Any:
    """Return the mantissa, between a half and one, and the exponent of two."""
    share, power = jnp.frexp(to_floating(input))
    both: Any = share, power.astype(jnp.int32)
    return torch.return_types.frexp(both)


@op("ldexp")
def ldexp(input: Any, other: Any) -> Any:
    """Return input * 2 ** other."""
    a, b = promote(input, pow_(2.0, other))
    return a * b


@op("float_power")
def float_power(input: Any, exponent: Any) -> jax.Array:
    """Return a power in double precision."""
    dtype = jax_dtype(torch.complex128 if any(map(jnp.iscomplexobj, (input, exponent))) else torch.float64)
    if hasattr(input, "astype"):
        return pow_(input.astype(dtype), exponent if isinstance(exponent, int | float) else jnp.asarray(exponent, dtype))
    return pow_(jnp.asarray(input, dtype), jnp.asarray(exponent, dtype))


@op("nextafter")
def nextafter(input: Any, other: Any) -> jax.Array:
    """Return the next number towards `other`. The derivative is one, or zero where both are equal."""
    a, b = promote(input, other)
    moves = jnp.where(a == b, lax.stop_gradient(a), a)
    return write_without_grad(moves, jnp.nextafter(*map(lax.stop_gradient, (a, b))))


@op("heaviside")
def heaviside(input: Any, values: Any) -> jax.Array:
    """Return 0 for negative input, 1 for positive input, and `values` at zero."""
    input, values = jnp.broadcast_arrays(input, values)
    return jnp.where(input == 0, values, (input > 0).astype(values.dtype))
