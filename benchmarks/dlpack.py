"""Microseconds per tensor across the bridge: ours against the public calls of jax and torch.

    python benchmarks/dlpack.py [--json PATH]

Interleaved in one process; medians of many short rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch
from step import environment

import bridge
from bridge import dlpack

CALLS = 1000
ROUNDS = 15


def microseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS * 1e6


def candidates() -> dict[str, Callable[[], Any]]:
    tensor = torch.randn(64, 64)
    array = bridge.to_jax(tensor)
    importer, device, _ = dlpack._route(tensor.device)
    hundred, orders = [tensor] * 100, [None] * 100
    return {
        "bridge.to_jax": lambda: bridge.to_jax(tensor),
        "  the C calls in it": lambda: importer(tensor, device),
        "jax.dlpack.from_dlpack": lambda: jax.dlpack.from_dlpack(tensor),
        "bridge.to_torch": lambda: bridge.to_torch(array),
        "torch.from_dlpack": lambda: torch.from_dlpack(array),
        "operands, 100 tensors": lambda: dlpack.operands(hundred, orders),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    functions = candidates()
    rounds = [{name: microseconds(function) for name, function in functions.items()} for _ in range(ROUNDS)]
    figures = {name: statistics.median(r[name] for r in rounds) for name in functions}
    for name, value in figures.items():
        print(f"{name:24}{value:9.2f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(), "microseconds per call": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
