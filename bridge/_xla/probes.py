"""Probe XLA's CPU compiler with small programs: barriers and multi-output fusion."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from bridge._interop.dlpack import cpu_device
from bridge._ir.queries import Properties
from bridge._process import default_promotion, default_settings

from .compile import Executable, compile_lowered
from .compile_options import keep_barriers


@functools.cache
def barriers_survive() -> bool:
    """Return whether barriers survive compilation, and loops around them still have several results."""
    options = keep_barriers(Properties())
    if not options:
        return False

    def two(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        (kept,) = jax.lax.optimization_barrier([x * 2])
        return jnp.sin(kept) + x, jnp.cos(x) * kept

    with default_settings(), default_promotion(), jax.default_device(cpu_device()):
        text = (
            compile_lowered(jax.jit(two).lower(jax.ShapeDtypeStruct((1 << 10,), np.float32)), fuse_outputs=True, options=options).as_text()
            or ""
        )
    return " opt-barrier(" in text and text.count(" fusion(") == 2  # one loop before the barrier, one behind it


@functools.cache
def fuses_multiple_outputs() -> bool:
    """Return whether XLA's CPU compiler writes several results from one loop, which then reads shared inputs once."""
    both = jax.jit(lambda x, y: (x * y, x + y), donate_argnums=(0, 1))
    arrays = [jax.ShapeDtypeStruct((1 << 10,), np.float32)] * 2
    with default_settings(), default_promotion(), jax.default_device(cpu_device()):
        text = compile_lowered(both.lower(*arrays), fuse_outputs=True).as_text() or ""
    return text.count(" fusion(") == 1


_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")


def barrier_bytes(compiled: Executable) -> float:
    """Return the bytes that the compiler counts for the barriers of a compiled program, although nothing moves there.

    The compiler counts the operands and the result of each barrier. A result of several arrays is a tuple of addresses.
    """
    total = 0.0
    for line in (compiled.as_text() or "").splitlines():
        before, barrier, _ = line.partition(" opt-barrier(")
        result = before.partition(" = ")[2]
        arrays = _ARRAY.findall(result) if barrier else []
        size = sum(math.prod(map(int, filter(None, shape.split(",")))) * int(bits or 8) / 8 for _, bits, shape in arrays)  # pred has none
        total += size if result.startswith("(") else 2 * size
    return total
