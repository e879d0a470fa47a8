"""The sections that are tables of one step: large leaves, small leaves, the tail of a step, unfused optimizers, whole loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import candidates
import optax.contrib
import torch
from common import FLOAT, NAMES, Settings, Shape, Step, compare, elements, gradients, interleaved, parameters, rows
from torch.nn import functional as F

import torch_api

# ------------------------------------------------------------------ sets of parameters


def adamw_table(title: str, settings: Settings) -> dict[str, Any]:
    makers, missing = candidates.adamw(settings)
    table = compare(NAMES[title], makers, settings.shapes(title), settings, candidates.FUSED)
    return table | {"missing": missing}


def large(settings: Settings) -> dict[str, Any]:
    """Large leaves: bytes that the compiler counts, and time against torch's fused AdamW."""
    return {"bytes": bytes_per_parameter(settings), "tables": [adamw_table("gpt2", settings)]}


def small(settings: Settings) -> dict[str, Any]:
    """Many small leaves."""
    return {"tables": [adamw_table("tiny", settings), adamw_table("resnet50", settings)]}


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
# Bytes that are read a second time, since a norm must be known before the first element is updated: the gradient for
# clipping; for a trust ratio all that the update is made of.
TWICE = {"LAMB": 16, "AdamW, clip": 4, "AdamW, clip, average": 4, "AdamW, clip, optax.chain": 4}


def bytes_per_parameter(settings: Settings) -> list[dict[str, Any]]:
    """Bytes per parameter of two large leaves, beside the fewest that there can be.

    The fewest: the parameter and its state read and written once, the gradient read once, and what is read twice.
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
    """What follows the backward pass: clipping to a global norm, the update, an average of the weights, a scaled loss."""
    tails, first = candidates.tail(), "clip, AdamW"
    wanted = [*((title, "gpt2") for title in tails), *((first, name) for name in ("tiny", "resnet50"))]
    return {
        "tables": [
            compare(f"{title}, {NAMES[name]}", tails[title][0], settings.shapes(name), settings, tails[title][1]) for title, name in wanted
        ]
    }


def matrices(shapes: list[Shape]) -> list[Shape]:
    """Those that Muon is for, convolutions seen as matrices."""
    return [(shape[0], int(torch.Size(shape[1:]).numel())) for shape in shapes if len(shape) > 1]


def unfused(settings: Settings) -> dict[str, Any]:
    """Optimizers for which torch has no fused kernel on the CPU."""
    shapes = settings.shapes("resnet50")
    tables = []
    for name in candidates.UNFUSED:
        makers, baseline, missing = candidates.unfused(name)
        own = matrices(shapes) if name == "Muon" else shapes
        rounds = min(settings.rounds, 5) if name == "Muon" else settings.rounds
        table = compare(f"{name}, {NAMES['resnet50']}", makers, own, settings, baseline, rounds)
        tables.append(table | {"missing": missing})
    return {"tables": tables}


# ------------------------------------------------------------------ whole loops


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


class Residual(torch.nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(before, after, 3, stride, 1, bias=False),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
            torch.nn.Conv2d(after, after, 3, 1, 1, bias=False),
            torch.nn.BatchNorm2d(after),
        )
        self.beside = torch.nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.beside(x))


def convolutional() -> torch.nn.Module:
    """Eight residual blocks with BatchNorm: 62 leaves, most of them small."""
    widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [Residual(*width) for width in widths]
    start = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, padding=1, bias=False), torch.nn.BatchNorm2d(32), torch.nn.ReLU())
    return torch.nn.Sequential(start, *blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 10))


def transformer_loss(settings: Settings) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    tokens = torch.randint(0, 128, (settings.count(8, 2), settings.count(65, 9)), device=settings.device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    model = Transformer(width=settings.count(256, 32))
    return model, lambda model: F.cross_entropy(model(inputs).flatten(0, 1), targets)


def convolutional_loss(settings: Settings) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    images = torch.randn(settings.count(16, 2), 3, settings.count(32, 16), settings.count(32, 16), device=settings.device)
    labels = torch.randint(0, 10, (len(images),), device=settings.device)
    return convolutional(), lambda model: F.cross_entropy(model(images), labels)


LOOPS = {"transformer of 4 blocks, 8 x 64 tokens": transformer_loss, "convolutions with BatchNorm, 16 images of 32x32": convolutional_loss}
IN_LOOPS: dict[str, Callable[[Any], Any]] = {
    candidates.DEFAULT: lambda params: torch.optim.AdamW(params, **candidates.HYPERPARAMS),
    candidates.FOREACH: lambda params: torch.optim.AdamW(params, foreach=True, **candidates.HYPERPARAMS),
    candidates.FUSED: lambda params: torch.optim.AdamW(params, fused=True, **candidates.HYPERPARAMS),
    candidates.OURS: lambda params: torch_api.MaskedAdamW(params, **candidates.HYPERPARAMS),
}


def iteration(task: Callable[[Settings], Any], factory: Callable[[Any], Any], settings: Settings) -> tuple[Step, int]:
    """Zero the gradients, forward, backward, step; from the same weights and data for each candidate."""
    torch.manual_seed(0)
    model, loss = task(settings)
    model = model.to(settings.device)
    optimizer = factory(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step, sum(1 for _ in model.parameters())


def loop(settings: Settings) -> dict[str, Any]:
    """Forward, backward and step of two small networks."""
    tables = []
    for title, task in LOOPS.items():
        made = {name: iteration(task, factory, settings) for name, factory in IN_LOOPS.items()}
        timing = interleaved({name: step for name, (step, _) in made.items()}, 2 * settings.rounds, title, settings.device)
        leaves = next(iter(made.values()))[1]
        tables.append({"title": title, "leaves": leaves, "baseline": candidates.FUSED, "rows": rows(timing, candidates.FUSED)})
    return {"tables": tables}
