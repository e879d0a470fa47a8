"""Measurements that need a fresh process: time to the first step, peak memory, memory after many steps, a whole training loop.

    python benchmarks/fresh.py first --candidate maskbridge --set gpt2

prints one line of JSON. The sections run it through `alone`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import candidates
import jax
import torch
from common import FLOAT, NAMES, SETS, Settings, elements, gradients, parameters, resident, start_clients, waiter
from loops import IN_LOOPS, LOOPS, iteration

CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


# Candidates with a transformation that must see all leaves at once.
CLIPPED = {
    candidates.OPTAX_CHAIN: candidates.tail()["clip, AdamW"][0][candidates.OPTAX_CHAIN],
    "optax.chain in pure JAX": candidates.tail()["clip, AdamW"][0][candidates.OPTAX],
}


def alone(task: str, name: str, title: str, settings: Settings, cache: str | None = None) -> dict[str, Any]:
    """Run one task in a fresh process, with jax's compilation cache in the folder `cache`, or without it."""
    command = [sys.executable, __file__, task, "--candidate", name, "--set", title, "--device", settings.device]
    command += ["--quick"] if settings.quick else []
    given = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=given | ({} if cache is None else CACHE | {"JAX_COMPILATION_CACHE_DIR": cache}),
    )
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------ in the fresh process


def first_step(name: str, title: str, settings: Settings) -> dict[str, Any]:
    """Seconds for the construction and for the first step, including the start of jax's client; then for a second, warm step.

    torch imports its compiler when a process constructs its first optimizer; this happens before the timed part.
    """
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    shapes = settings.shapes(title)
    params = parameters(shapes, gradients(shapes, settings.device), settings.device)
    maker, wait = (candidates.adamw(settings)[0] | CLIPPED)[name], waiter(settings.device)
    wait()
    start = time.perf_counter()
    step = maker(params)
    wait()
    constructed = time.perf_counter()
    step()
    wait()
    stepped = time.perf_counter()
    step()
    wait()
    return {"construction s": constructed - start, "first step s": stepped - constructed, "second step s": time.perf_counter() - stepped}


def peak(name: str, title: str, settings: Settings) -> dict[str, Any]:
    """The peak memory of parameters, gradients, construction and five steps, above what the process used before."""
    _warm(settings)
    before = resident()
    shapes = settings.shapes(title)
    params = parameters(shapes, gradients(shapes, settings.device), settings.device)
    with_params = resident() - before
    step = candidates.adamw(settings)[0][name](params)
    for _ in range(5):
        step()
    found = {
        "peak MiB": resident("VmHWM") - before,
        "after five steps MiB": resident() - before,
        "parameters and gradients MiB": with_params,
    }
    if settings.device == "cuda":
        free, total = torch.cuda.mem_get_info()  # counts torch and jax together
        found["on the device MiB"] = (total - free) / 2**20
    return found | {"state bytes": _state_bytes(step)}


def endurance(name: str, title: str, settings: Settings) -> dict[str, Any]:
    """Resident memory during ten thousand steps of a small set."""
    shapes = settings.shapes(title)
    params = parameters(shapes, gradients(shapes, settings.device), settings.device)
    step = candidates.adamw(settings)[0][name](params)
    marks = [10**k if not settings.quick else 10 * k for k in (1, 2, 3, 4)]
    at: dict[str, float] = {}
    for done in range(1, marks[-1] + 1):
        step()
        if done in marks:
            gc.collect()
            at[str(done)] = resident()
    return {"resident MiB after steps": at}


def leftovers(name: str, title: str, settings: Settings) -> dict[str, Any]:
    """Number of jax arrays and resident memory: before an optimizer is made, with it, after it is deleted, after its parameters are.

    The last figure is taken after the C library has given back all free memory of its heap: if it is above torch's, memory has leaked;
    if not, the heap only kept it for later.
    """
    _warm(settings)
    found: dict[str, Any] = {}

    def mark(when: str) -> None:
        gc.collect()
        found[when] = {"jax arrays": len(jax.live_arrays()), "resident MiB": resident()}

    shapes = settings.shapes(title)
    params = parameters(shapes, gradients(shapes, settings.device), settings.device)
    mark("before")
    step = candidates.adamw(settings)[0][name](params)
    for _ in range(3):
        step()
    mark("with the optimizer")
    del step
    mark("optimizer deleted")
    del params
    mark("parameters deleted")
    if hasattr(ctypes.CDLL(None), "malloc_trim"):  # exists in glibc
        ctypes.CDLL(None).malloc_trim(0)
        mark("heap trimmed")
    return found


def loop(name: str, title: str, settings: Settings) -> dict[str, Any]:
    """Median time of an iteration, and its page faults: it must get back from the system the pages that the C library had returned."""
    step, _ = iteration(LOOPS[title], IN_LOOPS[name], settings)
    wait, count = waiter(settings.device), settings.count(60, 3)
    for _ in range(settings.count(10, 2)):
        step()
    wait()
    faults, taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, []
    for _ in range(count):
        start = time.perf_counter()
        step()
        wait()
        taken.append(1e3 * (time.perf_counter() - start))
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return {"median ms": statistics.median(taken), "page faults": pages / count}


def _warm(settings: Settings) -> None:
    """Make one small step with torch, so that the memory of its threads and libraries is not counted."""
    start_clients(settings.device)
    shapes = [(8, 8), (8,)]
    torch.optim.AdamW(parameters(shapes, gradients(shapes)), fused=True).step()


def _state_bytes(step: Any) -> int:
    """Bytes of all tensors in the state of an optimizer with torch's interface."""
    return sum(t.numel() * t.element_size() for fields in step.__self__.state.values() for t in fields.values() if torch.is_tensor(t))


TASKS = {"first": first_step, "peak": peak, "endurance": endurance, "leftovers": leftovers, "loop": loop}


# ------------------------------------------------------------------ the sections

PAIR = [candidates.OURS, candidates.FUSED]
STARTING = [*PAIR, candidates.DEFAULT, candidates.OPTAX]
PEAKS = [*PAIR, "maskbridge, copying", candidates.DEFAULT, candidates.FOREACH]


def first(settings: Settings) -> dict[str, Any]:
    """Time to the first step: cold, and with programs of an earlier process in jax's persistent cache; the median of three rounds."""
    found = []
    for title in ["gpt2"] if settings.quick else ["gpt2", "resnet50", "tiny", "squares", "mixed"]:
        rounds = [_starts(title, settings) for _ in range(settings.count(3, 1))]
        starts = {name: _middle([each[name] for each in rounds]) for name in rounds[0]}
        shapes = settings.shapes(title)
        found.append({"title": NAMES[title], "leaves": len(shapes), "parameters": elements(shapes), "starts": starts})
    return {"sets": found}


def _starts(title: str, settings: Settings) -> dict[str, dict[str, float]]:
    """Run `first_step` for each candidate in its own process; results by name."""
    names = PAIR if settings.quick else [*STARTING, *CLIPPED]
    starts = {name: alone("first", name, title, settings) for name in names}
    for name in [n for n in (candidates.OURS, candidates.OPTAX, candidates.OPTAX_CHAIN) if n in names]:
        with tempfile.TemporaryDirectory() as cache:
            filling = alone("first", name, title, settings, cache)
            starts[f"{name}, second start"] = alone("first", name, title, settings, cache)
            starts[f"{name}, filling the cache"] = filling
    return starts


def _middle(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The run with the median total, with the totals of all runs."""
    runs = sorted(runs, key=_total)
    return runs[len(runs) // 2] | {"totals s": list(map(_total, runs))}


def _total(start: dict[str, float]) -> float:
    return start["construction s"] + start["first step s"]


def memory(settings: Settings) -> dict[str, Any]:
    """Peak memory, memory of the state, growth over many steps, and what is left once an optimizer is deleted."""
    names = PAIR if settings.quick else PEAKS
    shapes = settings.shapes("gpt2")
    return {
        "peak": {
            "title": NAMES["gpt2"],
            "smallest MiB": 4 * FLOAT * elements(shapes) / 2**20,
            "rows": {name: alone("peak", name, "gpt2", settings) for name in names},
        },
        "endurance": {"title": NAMES["steady"], "rows": {name: alone("endurance", name, "steady", settings) for name in PAIR}},
        "leftovers": {"title": NAMES["resnet50"], "rows": {name: alone("leftovers", name, "resnet50", settings) for name in PAIR}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--candidate", required=True)
    parser.add_argument("--set", required=True, choices=[*SETS, *LOOPS])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    print(json.dumps(TASKS[given.spec](given.candidate, given.set, Settings(quick=given.quick, device=given.device))))


if __name__ == "__main__":
    main()
