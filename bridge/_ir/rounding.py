"""Rounding to half precision: to the nearest number, and stochastically."""

# jax declares many of its functions in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .numerics import finfo
from .types import Array

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x, float32, rounded to the nearest number of a half type, and still float32.

    Not by a cast there and back, which XLA may drop (its xla_allow_excess_precision): no rounding would be left. Of float16
    `reduce_precision` alone would lose the subnormal numbers, the multiples of the smallest.
    """
    info = finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp == finfo(x.dtype).minexp:
        return rounded
    smallest = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.round(x / smallest) * smallest, rounded)


def bfloat16_bits(x: Array, computed: bool = True) -> jax.Array:
    """The bits, uint16, of the bfloat16 nearest to each float32, of two that are as near the even one.

    XLA's own conversion chooses between a rounded number and a NaN: LLVM takes vectors of 8 numbers, not 32.

    Args:
      x: float32.
      computed: by arithmetic, which gives no NaN that has low bits alone. One that is given would be cut to an infinity, and to keep it
        takes a tenth of AdamW's time.
    """
    bits = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(x, 8, 7), np.uint32)
    return _upper(bits) if computed else _upper(bits) | jnp.minimum(bits.astype(np.uint16), np.uint16(1))


def of_bits(bits: jax.Array) -> jax.Array:
    """The bfloat16 of bits in uint16."""
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def _upper(x: jax.Array) -> jax.Array:
    """The upper 16 bits of float32 or uint32."""
    return (jax.lax.bitcast_convert_type(x, np.uint32) >> np.uint32(16)).astype(np.uint16)


def draws(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """A random uint32 for each element, from its position and a key of two int32 words.

    A hash, because it is computed within the loop of the update: jax.random's generators take 17 ns an element on a CPU core,
    in passes of their own, which is fifteen times the rest of Adam.

    Source: the mixing function lowbias32 of https://nullprogram.com/blog/2018/07/31/.
    """

    def mixed(x: jax.Array) -> jax.Array:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> jnp.asarray(shift, jnp.uint32))) * jnp.asarray(factor, jnp.uint32)
        return x ^ (x >> jnp.asarray(16, jnp.uint32))

    parameter, count = jax.lax.bitcast_convert_type(key, jnp.uint32)
    position = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return mixed(mixed(position ^ parameter) ^ mixed(count))


def stochastic_round(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """x, float32, as one of the two nearest numbers of a half type, each as likely as x is near to it: right on average.

    `key` is as for `draws`. A number of that type stays what it is, and one beyond the largest rounds as ever. Subnormal
    numbers count as any other.

    Source: Croci et al., Stochastic rounding: implementation, error analysis and applications, R. Soc. Open Sci. 9 (2022)
    211631, https://doi.org/10.1098/rsos.211631 (mode 1).
    """
    drawn = draws(x.shape, key)
    return _stochastic_bfloat16(x, drawn) if dtype == jnp.bfloat16 else _stochastic(x, dtype, drawn)


def _stochastic(x: jax.Array, dtype: DTypeLike, drawn: jax.Array) -> jax.Array:
    """Unlike adding random bits below the last and cutting off, this serves float16, whose exponents are fewer."""
    near, one = nearest(x, dtype), jnp.asarray(1, jnp.uint16)
    bits = jax.lax.bitcast_convert_type(near.astype(dtype), jnp.uint16)
    error = x - near
    # The numbers of one sign follow each other as their bits do; next to either zero is the first one on the side of x.
    beside_zero = jnp.where(x < 0, jnp.asarray(0x8001, jnp.uint16), one)
    stepped = jnp.where(near == 0, beside_zero, jnp.where((error > 0) == (x > 0), bits + one, bits - one))
    neighbour = jax.lax.bitcast_convert_type(stepped, jnp.dtype(dtype))
    gap = jnp.abs(neighbour.astype(x.dtype) - near)
    share = (drawn >> np.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)
    step = share * gap < jnp.abs(error)
    return jnp.where(step & jnp.isfinite(neighbour), neighbour, near.astype(dtype))


def _stochastic_bfloat16(x: jax.Array, drawn: jax.Array) -> jax.Array:
    """The same numbers by integers: the 16 bits that are cut off are the error, in 2^-16 of a gap.

    With few constants, each of which is an operand of the loop: XLA's CPU compiler writes several results from one loop of fewer than 20.
    """
    below, rest = _upper(x), jax.lax.bitcast_convert_type(x, np.uint32).astype(np.uint16)  # below: towards zero
    is_below = bfloat16_bits(x) == below
    error = jnp.where(is_below, rest, -rest)
    step = (_upper(drawn) < error) & (jnp.abs(x) < finfo(jnp.bfloat16).max.astype(np.float32))  # a NaN does not step
    return of_bits(below + (is_below == step).astype(np.uint16))
