"""The sections that are tables of single steps: large, small and middle leaves, the end of a training step, optimizers that torch has not
fused, other dtypes, and whole loops."""

from __future__ import annotations

from typing import Any

import candidates
import optax.contrib
import torch
from common import FLOAT, NAMES, Settings, Shape, compare, elements, gradients, interleaved, parameters, rows
from fresh import PAIR, alone
from loops import IN_LOOPS, LOOPS, iteration

import torch_api

# ------------------------------------------------------------------ sets of parameters


def adamw_table(title: str, settings: Settings) -> dict[str, Any]:
    makers, missing = candidates.adamw(settings)
    table = compare(NAMES[title], makers, settings.shapes(title), settings, candidates.FUSED)
    return table | {"missing": missing}


def large(settings: Settings) -> dict[str, Any]:
    """Large leaves: the bytes counted by the compiler, and the time compared with torch's fused AdamW."""
    bytes_ = {} if settings.bound else {"bytes": bytes_per_parameter(settings)}
    return bytes_ | {"tables": [adamw_table("gpt2", settings)]}


def small(settings: Settings) -> dict[str, Any]:
    """Many small leaves."""
    return {"tables": [adamw_table("tiny", settings), adamw_table("resnet50", settings)]}


def middle(settings: Settings) -> dict[str, Any]:
    """Many equal leaves of middle size, and large leaves whose number of elements is prime."""
    makers = candidates.adamw(settings)[0]
    few = {name: makers[name] for name in (candidates.FUSED, candidates.FOREACH, candidates.OPTAX, candidates.OURS)}
    clip, clipped = candidates.tail()["clip, AdamW"]
    clip = {name: maker for name, maker in clip.items() if name in (clipped, candidates.OPTAX, candidates.OURS)}
    sets = ("layers", "squares", "prime")
    return {
        "tables": [
            *(compare(f"AdamW, {NAMES[title]}", few, settings.shapes(title), settings, candidates.FUSED) for title in sets),
            compare(f"clip, AdamW, {NAMES['squares']}", clip, settings.shapes("squares"), settings, clipped),
        ]
    }


BYTES: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("MaskedAdam", {}),
    "AdamW": ("MaskedAdamW", {}),
    "NAdam": ("MaskedNAdam", {}),
    "RAdam": ("MaskedRAdam", {}),
    "Adamax": ("MaskedAdamax", {}),
    "Adadelta": ("MaskedAdadelta", {}),
    "AdaBelief": ("MaskedAdaBelief", {"lr": 1e-3}),
    "SGD": ("MaskedSGD", {}),
    "SGD, momentum": ("MaskedSGD", {"momentum": 0.9}),
    "RMSprop": ("MaskedRMSprop", {}),
    "Adagrad": ("MaskedAdagrad", {}),
    "Lion": ("MaskedLion", {"lr": 1e-4}),
    "LAMB": ("MaskedLamb", {"lr": 1e-3}),
    "AdamW, average": ("MaskedAdamW", {"ema_decay": candidates.EMA_DECAY}),
    "AdamW, clip": ("MaskedAdamW", {"max_grad_norm": candidates.MAX_NORM}),
    "AdamW, clip, average": ("MaskedAdamW", {"max_grad_norm": candidates.MAX_NORM, "ema_decay": candidates.EMA_DECAY}),
    "AdamW, clip, optax.chain": ("OptaxOptimizer", {"tx": candidates.adamw_in_jax(clip=True)}),
    "schedule-free AdamW, optax": ("OptaxOptimizer", {"tx": optax.contrib.schedule_free_adamw(1e-3)}),
}
# Bytes that are read a second time, because a norm must be known before the first element is updated: for clipping, the gradient;
# for a trust ratio, all that the update is computed from.
TWICE = {"LAMB": 16, "AdamW, clip": 4, "AdamW, clip, average": 4, "AdamW, clip, optax.chain": 4}


def bytes_per_parameter(settings: Settings) -> list[dict[str, Any]]:
    """Bytes moved per parameter for two large leaves, and the fewest possible.

    The fewest: the parameter and its state are read and written once, the gradient is read once, plus what must be read twice.
    """
    shapes: list[Shape] = [(settings.count(1 << 22, 1 << 14),), (settings.count(1 << 21, 1 << 13),)]
    found = []
    for name, (factory, arguments) in BYTES.items():
        params = parameters(shapes, gradients(shapes, settings.device), settings.device)
        optimizer = getattr(torch_api, factory)(params, **arguments)
        optimizer.step()
        count = params[0].numel()
        state = sum(t.numel() * t.element_size() for t in optimizer.state[params[0]].values() if t.numel() > 1)
        fewest = 3 * FLOAT + 2 * state / count + TWICE.get(name, 0)
        found.append({"optimizer": name, "bytes": optimizer.bytes_accessed() / elements(shapes), "fewest": fewest})
    return found


def tail(settings: Settings) -> dict[str, Any]:
    """The part after the backward pass: clip the global norm, update, average the weights, unscale gradients."""
    tails, first = candidates.tail(), "clip, AdamW"
    wanted = [*((title, "gpt2") for title in tails), *((first, name) for name in ("tiny", "resnet50"))]
    return {
        "tables": [
            compare(f"{title}, {NAMES[name]}", tails[title][0], settings.shapes(name), settings, tails[title][1]) for title, name in wanted
        ]
    }


def matrices(shapes: list[Shape]) -> list[Shape]:
    """The shapes that Muon updates; convolutions count as matrices."""
    return [(shape[0], int(torch.Size(shape[1:]).numel())) for shape in shapes if len(shape) > 1]


def unfused(settings: Settings) -> dict[str, Any]:
    """Optimizers for which torch has no fused kernel on the CPU."""
    shapes = settings.shapes("resnet50")
    tables = []
    for name in candidates.UNFUSED:
        makers, baseline, missing = candidates.unfused(name, settings.bound)
        own = matrices(shapes) if name == "Muon" else shapes
        rounds = min(settings.rounds, 5) if name == "Muon" else settings.rounds
        table = compare(f"{name}, {NAMES['resnet50']}", makers, own, settings, baseline, rounds)
        tables.append(table | {"missing": missing})
    return {"tables": tables}


def types(settings: Settings) -> dict[str, Any]:
    """Parameters and state in other dtypes, and leaves with an odd number of elements."""
    return {
        "tables": [
            compare(f"{title}, {NAMES[name]}", makers, settings.shapes(name), settings, candidates.FUSED, dtype=dtype)
            for title, name, dtype, makers in candidates.of_types()
        ]
    }


# ------------------------------------------------------------------ whole loops


def loop(settings: Settings) -> dict[str, Any]:
    """Forward, backward and step of two small networks: taking turns in one process, and each candidate in processes of its own."""
    tables = []
    for title, task in LOOPS.items():
        made = {name: iteration(task, factory, settings) for name, factory in IN_LOOPS.items()}
        timing = interleaved({name: step for name, (step, _) in made.items()}, 2 * settings.rounds, title, settings.device)
        leaves = next(iter(made.values()))[1]
        rounds = [{name: alone("loop", name, title, settings) for name in PAIR} for _ in range(settings.count(5, 1))]
        apart = {name: {key: [each[name][key] for each in rounds] for key in rounds[0][name]} for name in PAIR}
        tables.append(
            {"title": title, "leaves": leaves, "baseline": candidates.FUSED, "rows": rows(timing, candidates.FUSED), "apart": apart}
        )
    return {"tables": tables}
