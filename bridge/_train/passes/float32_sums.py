"""A traced program whose sums of half types are taken in float32 and rounded once, as torch takes them.

The gradient of what was broadcast is a sum, which jax asks for in the values' own type (`jax.numpy.sum` is not). XLA's CPU compiler
then adds one bfloat16 after the other: of 4800 ones it makes 256.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from bridge._ir.jaxpr import instead, is_plain, replaced, throughout


def summed_in_float32(jaxpr: Any) -> Any:
    """The program with such sums, in the functions that it calls and in its scans too; itself where there is none."""
    return throughout(jaxpr, lambda own: replaced(own, list(map(_wide, own.eqns))))


def _wide(eqn: Any) -> Any:
    if eqn.primitive.name != "reduce_sum" or not is_plain(eqn) or eqn.invars[0].aval.dtype not in (jnp.bfloat16, jnp.float16):
        return eqn
    dtype, axes = eqn.invars[0].aval.dtype, tuple(eqn.params["axes"])
    return instead(eqn, eqn.invars, lambda x: jnp.sum(x, axes, jnp.float32).astype(dtype))
