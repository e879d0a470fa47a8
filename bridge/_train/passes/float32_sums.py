"""A traced program whose sums of half types are taken in float32 and rounded once, as torch takes them.

The gradient of what was broadcast is a sum, which jax asks for in the values' own type (`jax.numpy.sum` is not). XLA's CPU compiler
then adds one bfloat16 after the other: of 4800 ones it makes 256.
"""

from __future__ import annotations

import jax.numpy as jnp

from bridge._ir.jaxpr import instead, is_plain, replaced, throughout
from bridge._ir.types import Eqn, Jaxpr, aval_of


def summed_in_float32(jaxpr: Jaxpr) -> Jaxpr:
    """The program with such sums, in the functions that it calls and in its scans too; itself where there is none."""
    return throughout(jaxpr, lambda own: replaced(own, list(map(_wide, own.eqns))))


def _wide(eqn: Eqn) -> Eqn:
    if eqn.primitive.name != "reduce_sum" or not is_plain(eqn) or aval_of(eqn.invars[0]).dtype not in (jnp.bfloat16, jnp.float16):
        return eqn
    dtype, axes = aval_of(eqn.invars[0]).dtype, tuple(eqn.params["axes"])
    return instead(eqn, eqn.invars, lambda x: jnp.sum(x, axes, jnp.float32).astype(dtype))
