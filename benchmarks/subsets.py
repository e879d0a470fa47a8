"""Changing subsets: at each step a different random third of the leaves has no gradient, as in a mixture of experts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import candidates
import numpy as np
import torch
from common import NAMES, Settings, elements, gradients, no_collection, parameters, quartiles, waiter
from tqdm import tqdm

import bridge
import torch_api

ABSENT = 0.3
SIDES = {candidates.FUSED: torch.optim.AdamW, candidates.OURS: torch_api.MaskedAdamW}


def subsets(settings: Settings) -> dict[str, Any]:
    """Programs compiled during 200 steps, and the time compared with torch's fused AdamW on the same subsets.

    Both sides take their gradients from one pool; setting them is not timed. The section stops once its patience is over, since
    compiling a program for each subset would take hours.
    """
    shapes = settings.shapes("squares")
    grads = gradients(shapes, settings.device)
    sides = {name: parameters(shapes, grads, settings.device) for name in SIDES}
    made = {name: SIDES[name](params, fused=True, **candidates.HYPERPARAMS) for name, params in sides.items()}
    ms: dict[str, list[float]] = {name: [] for name in SIDES}
    compiled: list[int] = []
    generator, wait = np.random.default_rng(0), waiter(settings.device)
    began = time.perf_counter()
    with no_collection():
        for step in tqdm(range(settings.count(200, 5)), desc="subsets", leave=False, disable=None):
            present = generator.random(len(shapes)) >= ABSENT
            for params in sides.values():
                for p, grad, has in zip(params, grads, present, strict=True):
                    p.grad = grad if has else None
            before = bridge.compilations()
            for name in list(SIDES)[:: 1 if step % 2 else -1]:
                wait()
                start = time.perf_counter()
                made[name].step()
                wait()
                ms[name].append((time.perf_counter() - start) * 1e3)
            compiled.append(bridge.compilations() - before)
            if time.perf_counter() - began > settings.patience:
                break
    return {"title": NAMES["squares"], "leaves": len(shapes), "parameters": elements(shapes), "absent": ABSENT, **_figures(ms, compiled)}


def _figures(ms: dict[str, list[float]], compiled: list[int]) -> dict[str, Any]:
    ours, fused = ms[candidates.OURS], ms[candidates.FUSED]
    ratios = [own / base for own, base in zip(ours, fused, strict=True)]
    half = len(ratios) // 2
    low, middle, high = quartiles(ratios)
    return {
        "steps": len(ours),
        "programs compiled": sum(compiled),
        "programs compiled in the second half": sum(compiled[half:]),
        "median ms": {name: statistics.median(times) for name, times in ms.items()},
        "total s": {name: sum(times) / 1e3 for name, times in ms.items()},
        "ratio": middle,
        "ratio quartiles": [low, high],
        "ratio in the second half": statistics.median(ratios[half:]),
        "slowest step ms": {name: max(times) for name, times in ms.items()},
    }
