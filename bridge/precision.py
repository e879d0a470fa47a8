"""What is kept of a parameter beside its transformation's state, and how results become a half type.

Each is an array field of the parameter's state, by the name given here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MASTER = "master_param"  # float32, of a half parameter: what the update is added to
AVERAGE = "ema_param"  # exponential moving average of the trained weights
KEY = "rounding_key"  # two words of the next stochastic rounding: of the parameter, and a count
BESIDE = frozenset({MASTER, AVERAGE, KEY})

HALF = frozenset({"float16", "bfloat16"})


class Kept(NamedTuple):
    """What a row keeps beside the state of its transformation.

    `state_dtype`: the type of a parameter's floating arrays of state, None as the transformation has it.
    """

    state_dtype: str | None = None
    master_weights: bool = False
    stochastic_rounding: bool = False
    average: bool = False

    def fields(self, dtype: str) -> list[tuple[str, tuple[int, ...] | None, str]]:
        """Name, shape (None: the parameter's) and dtype of each array kept beside a parameter of this dtype."""
        half = dtype in HALF
        wide = "float32" if half else dtype
        fields: list[tuple[str, tuple[int, ...] | None, str]] = []
        if self.master_weights and half:
            fields.append((MASTER, None, wide))
        if self.stochastic_rounding and half:
            fields.append((KEY, (2,), "int32"))  # the bits of uint32, which torch cannot unpickle
        if self.average:
            fields.append((AVERAGE, None, wide))
        return fields


NOTHING = Kept()


def nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """x, float32, rounded to the nearest number of a half type, and still float32.

    Not by a cast there and back, which XLA may drop (its xla_allow_excess_precision): no rounding would be left. Of float16
    `reduce_precision` alone would lose the subnormal numbers, the multiples of the smallest.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp == jnp.finfo(x.dtype).minexp:
        return rounded
    smallest = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.round(x / smallest) * smallest, rounded)


def shares(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """A float32 in [0, 1) for each element, from its position and a key of two int32 words.

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
    bits = mixed(mixed(position ^ parameter) ^ mixed(count))
    return (bits >> jnp.asarray(8, jnp.uint32)).astype(jnp.float32) * jnp.float32(2**-24)


def stochastic_round(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """x, float32, as one of the two nearest numbers of a half type, each as likely as x is near to it: right on average.

    `key` is as for `shares`. A number of that type stays what it is, and one beyond the largest rounds as ever. Subnormal
    numbers count as any other. Unlike adding random bits below the last and cutting off, this serves float16 too, whose
    exponents are fewer.

    Source: Croci et al., Stochastic rounding: implementation, error analysis and applications, R. Soc. Open Sci. 9 (2022)
    211631, https://doi.org/10.1098/rsos.211631 (mode 1).
    """
    near, one = nearest(x, dtype), jnp.asarray(1, jnp.uint16)
    bits = jax.lax.bitcast_convert_type(near.astype(dtype), jnp.uint16)
    error = x - near
    # The numbers of one sign follow each other as their bits do; next to either zero is the first one on the side of x.
    beside_zero = jnp.where(x < 0, jnp.asarray(0x8001, jnp.uint16), one)
    stepped = jnp.where(near == 0, beside_zero, jnp.where((error > 0) == (x > 0), bits + one, bits - one))
    neighbour = jax.lax.bitcast_convert_type(stepped, jnp.dtype(dtype))
    gap = jnp.abs(neighbour.astype(x.dtype) - near)
    step = shares(x.shape, key) * gap < jnp.abs(error)
    return jnp.where(step & jnp.isfinite(neighbour), neighbour, near.astype(dtype))
