"""Two small networks and the loop that trains them: forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import candidates
import torch
from common import Settings, Step
from torch.nn import functional as F

import torch_api


class Transformer(torch.nn.Module):
    """A transformer over 64 characters, so small that the step is a visible part of the loop."""

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


def convolutional(depth: int = 8) -> torch.nn.Module:
    """Up to eight residual blocks with BatchNorm; all eight have 62 leaves, most of them small."""
    widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [Residual(*width) for width in widths[:depth]]
    start = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, padding=1, bias=False), torch.nn.BatchNorm2d(32), torch.nn.ReLU())
    return torch.nn.Sequential(start, *blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(widths[depth - 1][1], 10))


def transformer_loss(settings: Settings) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    tokens = torch.randint(0, 128, (settings.count(8, 2), settings.count(65, 9)), device=settings.device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    model = Transformer(width=settings.count(256, 32), depth=settings.count(4, 1))
    return model, lambda model: F.cross_entropy(model(inputs).flatten(0, 1), targets)


def convolutional_loss(settings: Settings) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    images = torch.randn(settings.count(16, 2), 3, settings.count(32, 16), settings.count(32, 16), device=settings.device)
    labels = torch.randint(0, 10, (len(images),), device=settings.device)
    return convolutional(settings.count(8, 2)), lambda model: F.cross_entropy(model(images), labels)


LOOPS = {"transformer of 4 blocks, 8 x 64 tokens": transformer_loss, "convolutions with BatchNorm, 16 images of 32x32": convolutional_loss}
IN_LOOPS: dict[str, Callable[[Any], Any]] = {
    candidates.DEFAULT: lambda params: torch.optim.AdamW(params, **candidates.HYPERPARAMS),
    candidates.FOREACH: lambda params: torch.optim.AdamW(params, foreach=True, **candidates.HYPERPARAMS),
    candidates.FUSED: lambda params: torch.optim.AdamW(params, fused=True, **candidates.HYPERPARAMS),
    candidates.OURS: lambda params: torch_api.MaskedAdamW(params, **candidates.HYPERPARAMS),
}


def iteration(task: Callable[[Settings], Any], factory: Callable[[Any], Any], settings: Settings) -> tuple[Step, int]:
    """An iteration: zero the gradients, forward, backward, step. All candidates start from the same weights and data."""
    torch.manual_seed(0)
    model, loss = task(settings)
    model = model.to(settings.device)
    optimizer = factory(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step, sum(1 for _ in model.parameters())
