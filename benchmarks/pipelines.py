"""The section of whole training steps: forward, backward and update as one XLA program, compared with eager torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import candidates
import torch
from common import Settings, Step, Turn, interleaved, rows
from torch import nn
from torch.nn import functional as F

import torch_api

Batch = tuple[torch.Tensor, ...]
Task = tuple[nn.Module, Callable[..., Any], Batch]
BESIDE = f"{candidates.OURS}, eager backward"
# Steps in a row, as in training. The first ones suffer from what another candidate has left behind, and from threads that slept
# meanwhile: the system may keep two of them on one core for tens of steps.
TURN = Turn(8, 0.25)


def digits_net() -> nn.Module:
    """The network of examples/finetune_digits.py."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, 32, 3, padding=1), norm1=nn.BatchNorm2d(32), relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1), norm2=nn.BatchNorm2d(64), relu2=nn.ReLU(), pool=nn.MaxPool2d(2), flat=nn.Flatten(),
            hidden=nn.Linear(64 * 4 * 4, 64), norm=nn.LayerNorm(64), relu=nn.ReLU(), out=nn.Linear(64, 10),
        )
    )  # fmt: skip


class CharacterModel(nn.Module):
    """Two blocks over bytes, as in examples/character_model.py, but without dropout, so that losses can be compared."""

    def __init__(self, width: int = 96, length: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(128, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.qkv, self.out = (nn.ModuleList(nn.Linear(width, n * width) for _ in range(2)) for n in (3, 1))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for i in range(2):
            query, key, value = self.qkv[i](self.norms[2 * i](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out[i](F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return F.linear(self.norms[4](x), self.token.weight)


def digits(settings: Settings) -> Task:
    count = settings.count(64, 8)
    images, labels = torch.rand(count, 1, 8, 8), torch.randint(0, 10, (count,))
    return digits_net(), _classes, (images, labels)


def characters(settings: Settings) -> Task:
    length = settings.count(64, 8)
    text = torch.tensor(list("".join(topics.values()).encode("ascii", "ignore")))
    rows_ = text[torch.randint(len(text) - length, (settings.count(16, 4), 1)) + torch.arange(length + 1)]
    loss = lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())  # noqa: E731
    return CharacterModel(), loss, (rows_,)


class Block(nn.Module):
    """A residual block of a ResNet."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        before = channels // stride
        self.conv1, self.norm1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.beside = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + (self.beside(x) if self.conv1.stride[0] > 1 else x))


class Recurrent(nn.Module):
    """An LSTM with a classifier on its last output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(64, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def residual(settings: Settings) -> Task:
    blocks = [*(Block(32) for _ in range(settings.count(4, 1))), Block(64, 2), *(Block(64) for _ in range(settings.count(3, 0)))]
    stem, head = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()), (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    count = settings.count(16, 2)
    return nn.Sequential(*stem, *blocks, *head), _classes, (torch.rand(count, 3, 32, 32), torch.randint(0, 10, (count,)))


def encoder(settings: Settings) -> Task:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, settings.count(4, 1), enable_nested_tensor=False)
    return model, lambda model, x: model(x).square().mean(), (torch.randn(settings.count(8, 2), 64, 128),)


def recurrent(settings: Settings) -> Task:
    count = settings.count(16, 2)
    return Recurrent(128), _classes, (torch.randn(count, settings.count(32, 4), 64), torch.randint(0, 10, (count,)))


def _classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


TASKS: dict[str, Callable[[Settings], Task]] = {
    "digits job, 64 images of 8x8": digits,
    "character model, 16 x 64 characters of pydoc_data.topics": characters,
    "residual network of 8 blocks, 16 images of 32x32": residual,
    "nn.TransformerEncoder of 4 layers, 8 x 64": encoder,
    "nn.LSTM, 16 x 32": recurrent,
}


def eager(task: Task, optimizer: torch.optim.Optimizer, forward: Callable[..., Any] | None = None) -> Step:
    """The body of torch's training loop; `forward` is the model compiled by torch.compile, if given."""
    model, loss_fn, batch = task

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_fn(model if forward is None else forward, *batch)  # not `or`: a compiled model does not support len()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def torch_fused(task: Task) -> torch.optim.Optimizer:
    return torch.optim.AdamW(task[0].parameters(), fused=True, **candidates.HYPERPARAMS)


def one_program(task: Task) -> Step:
    model, loss_fn, batch = task
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), **candidates.HYPERPARAMS)
    train_step = torch_api.JaxTrainStep(model, loss_fn, optimizer)
    return lambda: train_step(*batch)


MAKERS: dict[str, Callable[[Task], Step]] = {
    candidates.FUSED: lambda task: eager(task, torch_fused(task)),
    candidates.COMPILED: lambda task: eager(task, torch_fused(task), forward=torch.compile(task[0])),
    BESIDE: lambda task: eager(task, torch_api.MaskedAdamW(task[0].named_parameters(), **candidates.HYPERPARAMS)),
    candidates.OURS: one_program,
}


def made(task: Callable[[Settings], Task], make: Callable[[Task], Step], settings: Settings) -> Step:
    """Make the step of a candidate, from the same weights and data as the others."""
    torch.manual_seed(0)
    model, loss_fn, batch = task(settings)
    return make((model.to(settings.device), loss_fn, tuple(x.to(settings.device) for x in batch)))


def pipelines(settings: Settings) -> dict[str, Any]:
    """Whole steps of small models; the baseline is eager torch with its fused AdamW."""
    why = candidates.absent(None, True, settings)
    missing = {} if why is None else {candidates.COMPILED: why}
    tables = []
    for title, task in TASKS.items():
        steps = {name: made(task, make, settings) for name, make in MAKERS.items() if name not in missing}
        timing = interleaved(steps, settings.rounds, title, settings.device, turn=TURN)
        leaves = sum(1 for _ in task(settings)[0].parameters())
        table = {"title": title, "leaves": leaves, "baseline": candidates.FUSED, "rows": rows(timing, candidates.FUSED)}
        tables.append(table | {"missing": missing})
    return {"tables": tables}
