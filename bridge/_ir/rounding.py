"""Round float32 to half precision: to the nearest number, or stochastically."""

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


def round_to_nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round float32 to the nearest number of a half type, and return it as float32.

    A cast to the half type and back does not do: XLA may drop the pair (its flag xla_allow_excess_precision). `reduce_precision` alone
    flushes float16's subnormal numbers, so these are rounded to multiples of the smallest one.
    """
    info = finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp == finfo(x.dtype).minexp:
        return rounded
    smallest = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.round(x / smallest) * smallest, rounded)


def bfloat16_bits(x: Array, from_arithmetic: bool = True) -> jax.Array:
    """Return the bits of the bfloat16 nearest to each float32, as uint16. Ties round to even.

    XLA's own conversion selects between a rounded number and a NaN, and LLVM then makes its vectors shorter.

    Args:
      x: float32.
      from_arithmetic: x is a result of arithmetic, whose NaNs have high bits set. False serves NaNs that have low bits only, which would
        be cut to infinity otherwise, and costs time.
    """
    bits = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(x, 8, 7), np.uint32)
    return _upper_bits(bits) if from_arithmetic else _upper_bits(bits) | jnp.minimum(bits.astype(np.uint16), np.uint16(1))


def bfloat16_from_bits(bits: jax.Array) -> jax.Array:
    """Return the bfloat16 numbers that have these bits, given as uint16."""
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def _upper_bits(x: jax.Array) -> jax.Array:
    """Return the upper 16 bits of float32 or uint32."""
    return (jax.lax.bitcast_convert_type(x, np.uint32) >> np.uint32(16)).astype(np.uint16)


def random_bits(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return a random uint32 for each element, hashed from its position and a key of two int32 words.

    XLA fuses a hash into the loop of the update. jax.random's generators run in loops of their own and take longer than Adam itself.

    Source: the mixing function lowbias32 of https://nullprogram.com/blog/2018/07/31/.
    """

    def mix_bits(x: jax.Array) -> jax.Array:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> jnp.asarray(shift, jnp.uint32))) * jnp.asarray(factor, jnp.uint32)
        return x ^ (x >> jnp.asarray(16, jnp.uint32))

    parameter, count = jax.lax.bitcast_convert_type(key, jnp.uint32)
    position = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return mix_bits(mix_bits(position ^ parameter) ^ mix_bits(count))


def stochastic_round(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Round float32 stochastically to one of the two nearest numbers of a half type, without bias on average.

    The nearer number is more likely, in proportion to the distances. A number of the half type is not changed. A number beyond the
    largest rounds to nearest. Subnormal numbers round like all others.

    Args:
      x: float32.
      dtype: the half type of the result.
      key: two int32 words, as for `random_bits`.

    Source: Croci et al., Stochastic rounding: implementation, error analysis and applications, R. Soc. Open Sci. 9 (2022)
    211631, https://doi.org/10.1098/rsos.211631 (mode 1).
    """
    random_words = random_bits(x.shape, key)
    return _stochastic_bfloat16(x, random_words) if dtype == jnp.bfloat16 else _stochastic_by_gap(x, dtype, random_words)


def _stochastic_by_gap(x: jax.Array, dtype: DTypeLike, random_words: jax.Array) -> jax.Array:
    """Round by comparing the gap to the second nearest number with the error of the nearest.

    Unlike adding random bits below the last one and truncating, this works for float16, whose exponent range is smaller than float32's.
    """
    near, one = round_to_nearest(x, dtype), jnp.asarray(1, jnp.uint16)
    bits = jax.lax.bitcast_convert_type(near.astype(dtype), jnp.uint16)
    error = x - near
    # Neighbors of one sign have consecutive bit patterns. The neighbor of either zero is the first number on the side of x.
    beside_zero = jnp.where(x < 0, jnp.asarray(0x8001, jnp.uint16), one)
    stepped = jnp.where(near == 0, beside_zero, jnp.where((error > 0) == (x > 0), bits + one, bits - one))
    neighbor = jax.lax.bitcast_convert_type(stepped, jnp.dtype(dtype))
    gap = jnp.abs(neighbor.astype(x.dtype) - near)
    share = (random_words >> np.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)
    step = share * gap < jnp.abs(error)
    return jnp.where(step & jnp.isfinite(neighbor), neighbor, near.astype(dtype))


def _stochastic_bfloat16(x: jax.Array, random_words: jax.Array) -> jax.Array:
    """Round as `_stochastic_by_gap` does, by integers: the lower 16 bits are the error in units of 2^-16 of the gap.

    Each constant is an operand of XLA's loop, and XLA's CPU compiler writes several results from one loop only if it has few operands.
    """
    below, rest = _upper_bits(x), jax.lax.bitcast_convert_type(x, np.uint32).astype(np.uint16)  # below: rounded toward zero
    is_below = bfloat16_bits(x) == below
    error = jnp.where(is_below, rest, -rest)
    step = (_upper_bits(random_words) < error) & (jnp.abs(x) < finfo(jnp.bfloat16).max.astype(np.float32))  # False for NaN
    return bfloat16_from_bits(below + (is_below == step).astype(np.uint16))
