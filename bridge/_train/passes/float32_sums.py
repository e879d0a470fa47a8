"""A pass that computes sums of half-precision values in float32 and rounds once, as torch does.

The gradient of a broadcast is a sum, which jax computes in the dtype of the values (`jax.numpy.sum` does not). XLA's CPU compiler
then adds the values one by one in bfloat16, and a sum of ones stops at 256.
"""

from __future__ import annotations

import jax.numpy as jnp

from bridge._ir.jaxpr import is_replaceable, replace_eqn, rewrite_bottom_up, with_eqns
from bridge._ir.types import Eqn, Jaxpr, aval_of


def sum_in_float32(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with float32 sums, also in the functions that it calls and in its scans; the same object if it has no such sum."""
    return rewrite_bottom_up(jaxpr, lambda own: with_eqns(own, list(map(_with_float32_sum, own.eqns))))


def _with_float32_sum(eqn: Eqn) -> Eqn:
    if eqn.primitive.name != "reduce_sum" or not is_replaceable(eqn) or aval_of(eqn.invars[0]).dtype not in (jnp.bfloat16, jnp.float16):
        return eqn
    dtype, axes = aval_of(eqn.invars[0]).dtype, tuple(eqn.params["axes"])
    return replace_eqn(eqn, eqn.invars, lambda x: jnp.sum(x, axes, jnp.float32).astype(dtype))
