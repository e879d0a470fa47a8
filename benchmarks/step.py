"""The benchmark: times of optimizer steps, compared side by side in the situations that the sections name.

    python benchmarks/step.py [--sections large small ...] [--rounds 15] [--compiled | --bound] [--device cuda] [--json PATH]

Everything runs in one process. In each round, every candidate takes one step, in a new random order. Times are medians. A ratio is the
median of the ratios to the baseline within a round, with quartiles. Each section is written to the results file as soon as it is done,
and can be run again on its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # must be set before jax starts: torch needs the device's memory too
os.environ.setdefault("MASKBRIDGE_XLA_FLAGS", "1")  # the candidates in pure JAX get our fused loops too

import device
import dlpack
import fresh
import functions
import growth
import jax
import pipelines
import sections
import subsets
import tables
import torch
from common import RESULTS, Settings, environment, file_name, save

SECTIONS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "large": tables.large,
    "small": tables.small,
    "middle": tables.middle,
    "tail": tables.tail,
    "unfused": tables.unfused,
    "types": tables.types,
    "loop": tables.loop,
    "pipelines": pipelines.pipelines,
    "first": fresh.first,
    "subsets": subsets.subsets,
    "memory": fresh.memory,
    "growth": growth.growth,
    "dlpack": dlpack.interop,
    "functions": functions.functions,
    "device": device.device,
}
ON_DEVICE = [name for name in SECTIONS if name != "dlpack"]
# What the speed bound is measured with, unless the command line says otherwise.
BOUND = {
    "sections": ["large", "small", "tail", "unfused", "subsets"],
    "rounds": 7,
    "patience": 40.0,
    "json": RESULTS / "bound-local.json",
}


def no_device() -> str | None:
    """Why no GPU can be measured here; None if one can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if jax.default_backend() != "gpu":
        return "jax sees no CUDA device: install maskbridge[cuda]"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), help="all that the device has, if not given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compiled", action="store_true", help="also what torch.compile builds: minutes for each set of parameters")
    parser.add_argument("--bound", action="store_true", help="our candidates and torch's only, for bound.py: less than ten minutes")
    parser.add_argument("--quick", action="store_true", help="small sets, to see that a section works; its figures mean nothing")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds after which the section of subsets stops")
    parser.add_argument("--json", type=Path, help="the results file; one for this class of machine in benchmarks/results, if not given")
    given = parser.parse_args()
    if given.bound and given.compiled:
        parser.error("--bound: has no candidate that torch.compile builds")
    if given.bound:
        parser.set_defaults(**BOUND)
        given = parser.parse_args()
    missing = no_device() if given.device == "cuda" else None
    if missing is not None:
        print(f"Nothing measured: {missing}.")
        return
    if given.rounds < 2:
        parser.error("--rounds: quartiles need two rounds at least")
    torch.optim.AdamW([torch.zeros(1)])  # makes torch import its compiler
    gc.collect()
    gc.freeze()  # else each collection before a candidate would scan all that was imported, in a quarter of a second
    settings = Settings(given.rounds, given.quick, given.device, given.compiled, given.patience, given.bound)
    path = given.json or RESULTS / (file_name(given.device) if not given.quick else "quick-local.json")
    everything = ON_DEVICE if given.device == "cuda" else [name for name in SECTIONS if name != "device"]
    for name in given.sections or everything:
        start = time.perf_counter()
        figures = {"environment": environment(name, settings), **SECTIONS[name](settings)}
        save(path, name, figures | {"seconds": time.perf_counter() - start})
        print("\n".join(sections.section(name, figures)), flush=True)
    print(f"written to {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
