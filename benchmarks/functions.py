"""Microseconds for a call of `jax_function` with a small function; for comparison, torch's own and the compiled program alone.

A section of `benchmarks/step.py`. The calls are interleaved in one process; each figure is the median of many short rounds. The bridge's
cost is the difference to the program alone, which gets its arguments as jax arrays, and is waited for. That program returns only the
output: residuals that a recording call also returns count as a cost of the bridge.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import torch
from common import Settings, Step, no_collection
from dlpack import microseconds

import bridge

SIDE = 16


def small(a: Any, b: Any) -> Any:
    """Two arguments, one output; both residuals of the backward pass are recomputed from the arguments."""
    return jnp.sin(a) * b


def turned(a: Any, b: Any) -> Any:
    """The same on the rows in reverse order, which the backward pass does not recompute: two residuals are kept."""
    return jnp.sin(a[::-1]) * b


def forwards(device: str) -> dict[str, Step]:
    function, program = bridge.jax_function(small), jax.jit(small)
    keeping, of_turned = bridge.jax_function(turned), jax.jit(turned)
    a, b = (torch.randn(SIDE, SIDE, device=device) for _ in range(2))
    wanted = [x.clone().requires_grad_() for x in (a, b)]
    arrays = bridge.to_jax([a, b])

    def without_grad() -> Any:
        with torch.no_grad():
            return function(*wanted)

    return {
        "program alone": lambda: program(*arrays).block_until_ready(),
        "jax_function": lambda: function(a, b),
        "jax_function, no_grad": without_grad,
        "jax_function, recording": lambda: function(*wanted),
        "program alone, two residuals kept": lambda: of_turned(*arrays).block_until_ready(),
        "jax_function, two residuals kept, recording": lambda: keeping(*wanted),
        "torch, recording": lambda: torch.sin(wanted[0]) * wanted[1],
    }


def backwards(device: str) -> dict[str, Step]:
    function = bridge.jax_function(small)
    program = jax.jit(lambda a, b, seed: jax.vjp(small, a, b)[1](seed))
    a, b, seed = (torch.randn(SIDE, SIDE, device=device) for _ in range(3))
    wanted = [x.clone().requires_grad_() for x in (a, b)]
    arrays = bridge.to_jax([a, b, seed])
    return {
        "program alone, backward": lambda: jax.block_until_ready(program(*arrays)),
        "jax_function, forward and backward": lambda: torch.autograd.grad(function(*wanted), wanted, seed),
        "torch, forward and backward": lambda: torch.autograd.grad(torch.sin(wanted[0]) * wanted[1], wanted, seed),
    }


def functions(settings: Settings) -> dict[str, Any]:
    """Calls with two matrices of 16x16: forward with and without recording, and backward."""
    steps, calls = forwards(settings.device) | backwards(settings.device), settings.count(200, 5)
    for step in steps.values():
        step()
    with no_collection():
        rounds = [{name: microseconds(step, calls) for name, step in steps.items()} for _ in range(settings.rounds)]
    return {"microseconds per call": {name: statistics.median(r[name] for r in rounds) for name in steps}}
