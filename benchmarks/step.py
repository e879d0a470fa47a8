"""One optimizer step, side by side: torch.optim, optax in pure JAX, and maskbridge in place and with a copy.

    python benchmarks/step.py [--sets gpt2 resnet50 tiny loop] [--rounds 15] [--json PATH]

One process; in each round every candidate takes one step, in an order that rotates, so that a busy moment hits all of
them. Times are medians; a ratio is to torch's fused AdamW of the same round, with the quartiles of that ratio. Peak
memory and the time to the first step come from a fresh process per candidate.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from torch.nn import functional as F
from tqdm import tqdm

import bridge
import torch_api

HYPERPARAMS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BASELINE = "torch fused"
OURS = {"maskbridge in place": "inplace", "maskbridge copy": "copy"}
TORCH: dict[str, dict[str, Any]] = {"torch default": {"foreach": False}, "torch foreach": {"foreach": True}, BASELINE: {"fused": True}}
CANDIDATES = [*TORCH, "optax in pure JAX", *OURS]


def gpt2_small() -> list[tuple[int, ...]]:
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def resnet50() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for conv in ((planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)):
                shapes += [conv, (conv[0],), (conv[0],)]
            if block == 0:
                shapes += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "gpt2": gpt2_small,
    "resnet50": resnet50,
    "tiny": lambda: [(64, 64)] * 150 + [(64,)] * 150,
}


class Transformer(torch.nn.Module):
    """Four blocks over 64 characters: small enough that the step is a visible part of the loop."""

    def __init__(self, vocabulary: int = 128, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def parameters(shapes: list[tuple[int, ...]], grads: list[torch.Tensor] | None = None) -> list[torch.nn.Parameter]:
    """Random parameters; gradients are shared between candidates, since a step only reads them."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes]
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3 if grads is None else grads[i]
    return params


def torch_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    if name in OURS:
        return torch_api.MaskedAdamW(params, **HYPERPARAMS, writeback=OURS[name])
    return torch.optim.AdamW(params, **HYPERPARAMS, **TORCH[name])


def optax_step(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    tx = optax.adamw(HYPERPARAMS["lr"], *HYPERPARAMS["betas"], eps=HYPERPARAMS["eps"], weight_decay=HYPERPARAMS["weight_decay"])
    grads = bridge.to_jax([p.grad for p in params])
    values = [jax.numpy.array(x, copy=True) for x in bridge.to_jax([p.detach() for p in params])]
    current = [values, jax.jit(tx.init)(values)]

    def update(values: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, values)
        return optax.apply_updates(values, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def run() -> None:
        current[:] = jax.block_until_ready(compiled(*current, grads))

    return run


def candidate(name: str, params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    return optax_step(params) if name == "optax in pure JAX" else torch_optimizer(name, params).step


def loop_candidate(name: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch_optimizer(name, model.parameters())
    tokens = torch.randint(0, 128, (8, 65))

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def interleaved(steps: dict[str, Callable[[], Any]], rounds: int, title: str) -> dict[str, list[float]]:
    """Milliseconds per candidate and round, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in tqdm(range(rounds + 2), desc=title, leave=False):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            start = time.perf_counter()
            steps[name]()
            if round_ >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def row(times: dict[str, list[float]], name: str) -> dict[str, Any]:
    ratios = [own / fused for own, fused in zip(times[name], times[BASELINE], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median ms": statistics.median(times[name]), "ratio": middle, "ratio quartiles": [low, high]}


def compiled_bytes(name: str, count: int, params: list[torch.nn.Parameter]) -> float | None:
    """Bytes that the compiler counts for one step, per parameter element."""
    if name not in OURS:
        return None
    optimizer = torch_optimizer(name, params)
    optimizer.step()
    return optimizer.bytes_accessed() / count  # pyright: ignore[reportAttributeAccessIssue]


def measure_set(title: str, rounds: int) -> dict[str, Any]:
    shapes = SETS[title]()
    grads: list[torch.Tensor] = [p.grad for p in parameters(shapes)]  # pyright: ignore[reportAssignmentType]
    before = bridge.traces()
    steps = {name: candidate(name, parameters(shapes, grads)) for name in CANDIDATES}
    times = interleaved(steps, rounds, title)
    traces = bridge.traces() - before
    del steps
    gc.collect()
    count = sum(int(np.prod(shape)) for shape in shapes)
    table = {name: row(times, name) for name in CANDIDATES}
    for name in CANDIDATES:
        table[name] |= {"bytes per parameter": compiled_bytes(name, count, parameters(shapes, grads)), **alone(name, title)}
    return {"tensors": len(shapes), "parameters": count, "traces": traces, "candidates": table}


def measure_loop(rounds: int) -> dict[str, Any]:
    names = [name for name in CANDIDATES if name != "optax in pure JAX"]
    times = interleaved({name: loop_candidate(name) for name in names}, 3 * rounds, "loop")
    return {"parameters": sum(p.numel() for p in Transformer().parameters()), "candidates": {name: row(times, name) for name in names}}


def alone(name: str, title: str) -> dict[str, Any]:
    """Peak memory and time to the first step of one candidate in a process of its own."""
    command = [sys.executable, __file__, "--alone", name, "--sets", title]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_alone(name: str, title: str) -> dict[str, Any]:
    """In a fresh process: peak of the resident set over five steps above that of the imports, and the first step."""
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    params = parameters([(8, 8), (8,)])
    torch.optim.AdamW(params, fused=True).step()
    base = _status("VmRSS")
    params = parameters(SETS[title]())
    start = time.perf_counter()
    step = candidate(name, params)
    step()
    first = time.perf_counter() - start
    for _ in range(4):
        step()
    return {"seconds to first step": first, "peak MiB": (_status("VmHWM") - base) / 1024}


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def environment() -> dict[str, Any]:
    return {
        "command": "python benchmarks/step.py " + " ".join(sys.argv[1:]),
        "machine": f"{os.cpu_count()} cores of {_cpu()}, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "devices": [str(device) for device in jax.devices()],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "jax": jax.__version__, "optax": optax.__version__},
        "torch threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    with open("/proc/cpuinfo") as info:
        return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())


def show(title: str, result: dict[str, Any]) -> None:
    print(f"\n{title}: {result['parameters']:,} parameters" + (f", {result['traces']} traces of maskbridge" if "traces" in result else ""))
    print(f"{'':22}{'ms':>9}{'ratio':>8}{'quartiles':>14}{'B/param':>9}{'peak MiB':>10}{'first s':>9}")
    for name, cells in result["candidates"].items():
        low, high = cells["ratio quartiles"]
        line = f"{name:22}{cells['median ms']:9.2f}{cells['ratio']:8.2f}{f'{low:.2f}..{high:.2f}':>14}"
        if "peak MiB" in cells:
            moved = cells["bytes per parameter"]
            line += f"{'-' if moved is None else f'{moved:.1f}':>9}{cells['peak MiB']:10.0f}{cells['seconds to first step']:9.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=[*SETS, "loop"], choices=[*SETS, "loop"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--alone", choices=CANDIDATES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(measure_alone(arguments.alone, arguments.sets[0])))
        return
    figures: dict[str, Any] = {"environment": environment(), "sets": {}}
    for title in arguments.sets:
        figures["sets"][title] = measure_loop(arguments.rounds) if title == "loop" else measure_set(title, arguments.rounds)
        show(title, figures["sets"][title])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"\nwritten to {arguments.json}")


if __name__ == "__main__":
    main()
