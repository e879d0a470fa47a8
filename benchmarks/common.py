"""What all sections share: parameter sets, interleaved timing, the description of the machine, the results file."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch
from tqdm import tqdm

from bridge._xla.multi_output_fusion import is_fusion_enabled

Shape = tuple[int, ...]
Params = list[torch.nn.Parameter]
Step = Callable[[], Any]
Maker = Callable[[Params], Step]

RESULTS = Path(__file__).parent / "results"
PEERS = {"TorchOpt": "torchopt", "pytorch_optimizer": "pytorch_optimizer", "HeavyBall": "heavyball"}
# Rounds that are not counted: the first compiles, the second may still allocate, and RAdam skips most of its work in the first five.
WARM_UP = 6
# How often both candidates of a pair are made anew, in general and for the speed bound. If the first step takes longer than LONG seconds,
# they are made only once: torch.compile is building them.
BUILDS, BOUND_BUILDS, LONG = 8, 2, 5.0
BLOCK = 1 << 22  # elements
FLOAT = 4  # bytes per float32


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    Args:
      rounds: how many rounds of steps are counted, unless the section says otherwise.
      quick: shrink all sets and counts, only to see that a section works; its figures mean nothing.
      device: "cpu" or "cuda".
      compiled: include candidates that torch.compile must build first, which takes a minute or more for each set.
      patience: seconds after which the section of changing subsets stops.
      bound: only our candidates and a baseline of torch, for the speed bound.
    """

    rounds: int = 15
    quick: bool = False
    device: str = "cpu"
    compiled: bool = False
    patience: float = 300.0
    bound: bool = False

    def shapes(self, title: str) -> list[Shape]:
        """The shapes of a set; with `quick` only the last five, with each dimension divided by eight."""
        shapes = SETS[title]()
        return [tuple(max(1, n // 8) for n in shape) for shape in shapes[-5:]] if self.quick else shapes

    @property
    def builds(self) -> int:
        """How often both candidates of a pair are made anew."""
        return self.count(BOUND_BUILDS if self.bound else BUILDS, 1)

    def count(self, normal: int, quick: int) -> int:
        return quick if self.quick else normal


def gpt2_small() -> list[Shape]:
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def resnet50() -> list[Shape]:
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for conv in ((planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)):
                shapes += [conv, (conv[0],), (conv[0],)]
            if block == 0:
                shapes += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def mixed() -> list[Shape]:
    return [(256, 256), (256,), (64, 128), (128,), (512, 64), (), (32, 16, 3, 3), (32,), (96, 40), (7,)] * 100


SETS: dict[str, Callable[[], list[Shape]]] = {
    "gpt2": gpt2_small,
    "resnet50": resnet50,
    "tiny": lambda: [(64, 64)] * 150 + [(64,)] * 150,
    "squares": lambda: [(256, 256)] * 1000,
    "layers": lambda: [(256, 256)] * 100,
    "prime": lambda: [(3194629,)] * 8,
    "mixed": mixed,
    "steady": lambda: [(64, 64)] * 20 + [(64,)] * 20,
    "large": lambda: [(2048, 2048)] * 4,
    "odd": lambda: [(2047, 2049)] * 4,
}
NAMES = {
    "gpt2": "GPT-2 small",
    "resnet50": "ResNet-50",
    "tiny": "150 of 64x64, 150 of 64",
    "squares": "1000 of 256x256",
    "layers": "100 of 256x256",
    "prime": "8 of 3,194,629, a prime number",
    "mixed": "1000 of ten shapes",
    "steady": "20 of 64x64, 20 of 64",
    "large": "4 of 2048x2048",
    "odd": "4 of 2047x2049",
}


def elements(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def random_tensors(shapes: Sequence[Shape], scale: float, device: str, seed: int = 0) -> list[torch.Tensor]:
    """The same numbers on every device and in every process. A large tensor repeats one block of them, which saves minutes."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(shape: Shape) -> torch.Tensor:
        count = math.prod(shape)
        block = torch.randn(min(count, BLOCK), generator=generator).mul_(scale)
        return block.repeat(-(-count // BLOCK))[:count].clone().reshape(shape).to(device)

    return [tensor(shape) for shape in shapes]


def gradients(shapes: Sequence[Shape], device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random nonzero gradients, shared by all candidates: steps do not change them, except torch's clipping, the first time."""
    return [x.to(dtype) for x in random_tensors(shapes, 1e-3, device, seed=1)]


def parameters(shapes: Sequence[Shape], grads: Sequence[torch.Tensor], device: str = "cpu") -> Params:
    """Parameters with the dtypes of their gradients."""
    params = [torch.nn.Parameter(x.to(grad.dtype)) for x, grad in zip(random_tensors(shapes, 0.02, device), grads, strict=True)]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    return params


# ------------------------------------------------------------------ timing


@dataclass
class Timing:
    """Milliseconds of each candidate in each round, and seconds of its first step, which is not counted."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)

    def add(self, later: Timing) -> None:
        """Append further rounds of the same candidates."""
        for name, ms in later.ms.items():
            self.ms.setdefault(name, []).extend(ms)
            self.first.setdefault(name, later.first[name])


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage before, and not during the measurement, where a collection would slow whichever candidate is running."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def waiter(device: str) -> Callable[[], None]:
    """The function that waits for all work of torch and jax on the device; on the CPU nothing needs to wait."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


class Turn(NamedTuple):
    """How many steps and seconds a turn lasts at least. Its time is the median of its steps without the first three eighths."""

    steps: int
    seconds: float


ONE_STEP = Turn(1, 0.0)


def interleaved(
    steps: dict[str, Step],
    rounds: int,
    title: str,
    device: str = "cpu",
    synchronised: bool = True,
    turn: Turn = ONE_STEP,
    seconds: float = 0.0,
) -> Timing:
    """In each round, let every candidate take its turn, in a new random order, so that none always follows the same one.

    Args:
      steps: the candidates.
      rounds: how many rounds are counted. Before them come `WARM_UP` rounds that are not, or `rounds` if that is less.
      title: shown with the progress bar.
      device: for "cuda", wait for the device within the timed region.
      synchronised: if False, time the call alone and wait outside the timed region.
      turn: how long a candidate steps in its turn.
      seconds: add rounds until this time has passed, since short steps may be done before their threads have settled on cores.
    """
    timing = Timing({name: [] for name in steps})
    names, wait, warm_up, order = list(steps), waiter(device), min(WARM_UP, rounds), random.Random(0)
    begun, done = time.perf_counter(), 0
    with no_collection(), tqdm(total=rounds + warm_up, desc=title, leave=False, disable=None) as bar:
        while done < rounds + warm_up or time.perf_counter() - begun < seconds:
            for name in order.sample(names, len(names)):
                taken: list[float] = []
                while len(taken) < turn.steps or sum(taken) < turn.seconds:
                    wait()
                    start = time.perf_counter()
                    steps[name]()
                    if synchronised:
                        wait()
                    taken.append(time.perf_counter() - start)
                timing.first.setdefault(name, taken[0])
                if done >= warm_up:
                    timing.ms[name].append(statistics.median(taken[len(taken) * 3 // 8 :]) * 1e3)
            done += 1
            bar.update()
    return timing


def quartiles(values: Sequence[float]) -> list[float]:
    """Quartiles by interpolation, so that they lie within the values even for few rounds."""
    return statistics.quantiles(values, n=4, method="inclusive")


def rows(timing: Timing, baseline: str | None) -> dict[str, dict[str, Any]]:
    """For each candidate, the median time, and the median and quartiles of its ratio to the baseline within a round."""
    table: dict[str, dict[str, Any]] = {}
    for name, ms in timing.ms.items():
        table[name] = {"median ms": statistics.median(ms), "first step s": timing.first[name]}
        if baseline is not None:
            ratios = [own / base for own, base in zip(ms, timing.ms[baseline], strict=True)]
            low, middle, high = quartiles(ratios)
            table[name] |= {"ratio": middle, "ratio quartiles": [low, high]}
    return table


def of_bound(makers: dict[str, Maker], baseline: str | None) -> tuple[dict[str, Maker], str | None]:
    """Our candidates and a baseline of torch: the table's own, or else a fused one; None if there is neither."""
    if baseline is None or not baseline.startswith("torch"):
        baseline = next((name for name in makers if name.startswith("torch fused")), None)
    return {name: maker for name, maker in makers.items() if name == baseline or name.startswith("maskbridge")}, baseline


def compare(
    title: str,
    makers: dict[str, Maker],
    shapes: Sequence[Shape],
    settings: Settings,
    baseline: str | None,
    rounds: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Make one table: each candidate runs paired with the baseline, on parameters of these shapes. The baseline has one row for all pairs.

    Threads that a candidate leaves spinning (OpenMP's) would slow the next one, so there are only these two at a time. The memory pages
    that the system hands out change the time of a step by a few percent, and whoever is made first gets what fragments are left. So both
    are made `settings.builds` times, and take turns in being first.
    """
    gc.collect()
    if settings.bound:
        makers, baseline = of_bound(makers, baseline)
    grads, table = gradients(shapes, settings.device, dtype), {}
    alone, builds, asked = Timing(), settings.builds, rounds or settings.rounds
    each_time = max(-(-asked // builds), min(asked, WARM_UP))  # at least as many as the warm-up, or candidates would start colder
    for name in [name for name in makers if name != baseline] or makers:
        pair = list(dict.fromkeys([name] if baseline is None else [baseline, name]))
        timing, steps = Timing(), {}
        for nth in range(builds):
            if max(timing.first.values(), default=0.0) < LONG:
                steps.clear()
                gc.collect()
                steps |= {each: makers[each](parameters(shapes, grads, settings.device)) for each in (pair if nth % 2 == 0 else pair[::-1])}
            seconds = 0.0 if settings.quick else 2.0 / builds
            timing.add(interleaved(steps, each_time, title, settings.device, seconds=seconds))
        table |= rows(timing, baseline)
        if baseline is not None:
            alone.add(Timing({baseline: timing.ms[baseline]}, {baseline: timing.first[baseline]}))
    table |= rows(alone, baseline)
    ordered = {name: table[name] for name in makers}
    return {"title": title, "leaves": len(shapes), "parameters": elements(shapes), "baseline": baseline, "rows": ordered}


# ------------------------------------------------------------------ the machine


def installed(peer: str) -> bool:
    return importlib.util.find_spec(PEERS[peer]) is not None


def resident(what: str = "VmRSS") -> float:
    """MiB of memory of this process: "VmRSS" for now, "VmHWM" for the highest value so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what)) / 1024


def available() -> float:
    """Bytes of memory still available."""
    with open("/proc/meminfo") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("MemAvailable")) * 1024


def copy_bandwidth(device: str = "cpu", quick: bool = False) -> float:
    """Bytes read and written per second: the best of ten copies between two buffers too large for any cache."""
    source = torch.ones((1 << 20) if quick else (1 << 27), device=device)
    target, wait, seconds = torch.empty_like(source), waiter(device), []
    for _ in range(10):
        wait()
        start = time.perf_counter()
        target.copy_(source)
        wait()
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() * FLOAT / min(seconds)


def _processor() -> str:
    with open("/proc/cpuinfo") as info:
        return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())


def machine(device: str) -> str:
    """A description of the hardware, never the machine's name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{os.cpu_count()} cores of {_processor()}, {memory:.0f} GiB"
    return f"{torch.cuda.get_device_name()}, {host}" if device == "cuda" else host


def file_name(device: str) -> str:
    """The name of the results file for this kind of machine."""
    name = re.sub(r"\(\w+\)| processor", "", _processor().lower()) if device == "cpu" else torch.cuda.get_device_name().lower()
    count = f"{os.cpu_count()}-cores-" if device == "cpu" else ""
    return f"{device}-{count}{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}.json"


def environment(section: str, settings: Settings) -> dict[str, Any]:
    names = ["torch", "jax", "optax", "numpy", *(PEERS[peer] for peer in PEERS if installed(peer))]
    options = [f"--rounds {settings.rounds}"]
    flags = {"--compiled": settings.compiled, "--bound": settings.bound, "--quick": settings.quick}
    options += [flag for flag, given in flags.items() if given]
    options += ["--device cuda"] if settings.device == "cuda" else []
    return {
        "command": f"python benchmarks/step.py --sections {section} {' '.join(options)}",
        "machine": machine(settings.device),
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}},
        "torch threads": torch.get_num_threads(),
        "fused loops in XLA": is_fusion_enabled(),
        "quick": settings.quick,
    }


def save(path: Path, section: str, figures: dict[str, Any]) -> None:
    """Write one section into the results file and leave the others as they are."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[section] = figures
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")


def start_clients(device: str) -> None:
    """Start jax and torch on the device, so that neither is counted as part of a candidate."""
    torch.zeros(8, device=device).add_(1)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
