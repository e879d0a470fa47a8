"""Microseconds to pass a tensor between torch and jax: ours, and by the public calls of jax and torch.

A section of `benchmarks/step.py`. The calls are interleaved in one process; each figure is the median of many short rounds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import torch
from common import Settings, Step, no_collection

import bridge


def microseconds(function: Step, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def crossings() -> dict[str, Step]:
    tensor = torch.randn(64, 64)
    array = bridge.to_jax(tensor)
    return {
        "bridge.to_jax": lambda: bridge.to_jax(tensor),
        "jax.dlpack.from_dlpack": lambda: jax.dlpack.from_dlpack(tensor),
        "bridge.to_torch": lambda: bridge.to_torch(array),
        "torch.from_dlpack": lambda: torch.from_dlpack(array),
    }


def interop(settings: Settings) -> dict[str, Any]:
    """Pass one tensor of 64x64 from torch to jax, and one back."""
    functions, calls = crossings(), settings.count(1000, 10)
    with no_collection():
        rounds = [{name: microseconds(function, calls) for name, function in functions.items()} for _ in range(settings.rounds)]
    return {"microseconds per call": {name: statistics.median(r[name] for r in rounds) for name in functions}}
