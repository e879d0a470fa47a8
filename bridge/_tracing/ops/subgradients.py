"""Functions with torch's values and subgradients where jax has others, or none: at zero, at ties and at NaN."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


@jax.custom_jvp
def _complex_sign(x: Any) -> jax.Array:
    return jnp.sign(x)


@_complex_sign.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    """Return the tangent: the part of the change that is perpendicular to the number, and zero at zero."""
    (x,), (change,) = primals, tangents
    out, size = _complex_sign(x), jnp.abs(x).astype(x.dtype)
    zero = size == 0
    turn = (change - out * out * jnp.conj(change)) / 2
    return out, jnp.where(zero, jnp.zeros((), x.dtype), turn / jnp.where(zero, jnp.ones((), x.dtype), size))


def sign(x: Any) -> Any:
    """Return the sign of a real number (0 for NaN), or x / |x| of a complex one."""
    if jnp.iscomplexobj(x):
        return _complex_sign(x)
    return x if x.dtype == bool else (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


@jax.custom_jvp
def absolute(x: Any) -> jax.Array:
    """Return the absolute value. Its derivative at zero and at NaN is zero, as in torch."""
    return jnp.abs(x)


@absolute.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (change,) = primals, tangents
    return absolute(x), jnp.real(jnp.conj(sign(x)) * change) if jnp.iscomplexobj(x) else sign(x) * change


def _extreme_of_two(function: Callable[[Any, Any], Any], is_beyond: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function for the larger or smaller of two. Equal elements share the gradient. If one is NaN, both have all of it."""

    @jax.custom_jvp
    def extreme(a: Any, b: Any) -> Any:
        return function(a, b)

    def share(x: Any, other: Any, change: Any) -> jax.Array:
        return jnp.where(is_beyond(other, x), jnp.zeros((), x.dtype), jnp.where(x == other, change / 2, change))

    @extreme.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        (a, b), (da, db) = primals, tangents
        return extreme(a, b), share(a, b, da) + share(b, a, db)

    return extreme


maximum = _extreme_of_two(jnp.maximum, operator.gt)
minimum = _extreme_of_two(jnp.minimum, operator.lt)


@jax.custom_jvp
def copysign(size: Any, sign: Any) -> jax.Array:
    """Return the size of one number with the sign of another. Its derivative at zero is zero, as in torch."""
    return jnp.copysign(size, sign)


@copysign.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (size, sign), (change, _) = primals, tangents
    out, zero = copysign(size, sign), size == 0
    return out, change * jnp.where(zero, jnp.zeros((), size.dtype), out / jnp.where(zero, jnp.ones((), size.dtype), size))


@jax.custom_jvp
def power(base: Any, exponent: Any) -> jax.Array:
    """Return base ** exponent.

    As in torch, the derivative by the base is zero where the exponent is zero. The derivative by the exponent is zero where the base is
    zero and the exponent is zero or more.
    """
    return jnp.power(base, exponent)


@functools.partial(power.defjvp, symbolic_zeros=True)
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (base, exponent), (d_base, d_exponent) = primals, tangents
    out, zero = power(base, exponent), jnp.zeros((), base.dtype)
    change = jnp.zeros_like(out)
    if not isinstance(d_base, SymbolicZero):
        slope = exponent * power(base, exponent - 1)
        change += jnp.where(exponent == 0, zero, slope) * d_base
    if not isinstance(d_exponent, SymbolicZero):
        change += jnp.where((base == 0) & (exponent.real >= 0), zero, out * jnp.log(base)) * d_exponent
    return out, change


@jax.custom_jvp
def relu(x: Any) -> jax.Array:
    """Return max(x, 0). The gradient passes at NaN, as in torch."""
    return jnp.maximum(x, 0)


relu.defjvps(lambda change, _, x: lax.select(x <= 0, lax.full_like(change, 0), change))


def zero_subgradient_at_zero(function: Callable[[Any], Any], x: Any) -> jax.Array:
    """Apply a function that is zero at zero, with zero as its derivative there."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), function(jnp.where(zero, jnp.ones_like(x), x)))


def safe_sqrt(square: Any) -> jax.Array:
    """Return the square root. Its derivative at zero is zero, as in torch's norms and standard deviations."""
    return zero_subgradient_at_zero(jnp.sqrt, square)


def arctan2(y: Any, x: Any) -> jax.Array:
    """Return the angle of the point (x, y). Its derivative at the origin is zero, as in torch."""
    origin = (y == 0) & (x == 0)
    return jnp.where(origin, lax.stop_gradient(jnp.arctan2(y, x)), jnp.arctan2(y, jnp.where(origin, jnp.ones_like(x), x)))


def angle(x: Any) -> jax.Array:
    """Return the angle of a number in the complex plane. For real numbers its derivative is zero, and it is 0 at -0.0, as in torch."""
    if jnp.iscomplexobj(x):
        return arctan2(x.imag, x.real)
    x = lax.stop_gradient(x)
    return jnp.where(x < 0, jnp.asarray(math.pi, x.dtype), jnp.where(jnp.isnan(x), x, jnp.zeros((), x.dtype)))
