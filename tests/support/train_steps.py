"""Small models and batches for train steps."""

import torch
from oracles import movement_error
from torch import nn
from torch.nn import functional as F

import torch_api


def mlp(width=8, **kind):
    return nn.Sequential(nn.Linear(4, width, **kind), nn.Tanh(), nn.Linear(width, width, **kind), nn.Tanh(), nn.Linear(width, 1, **kind))


def mse(model, x, y):
    return F.mse_loss(model(x), y)


def batches(steps, size=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(size, 4, generator=generator).to(dtype), torch.randn(size, 1, generator=generator).to(dtype)


def adamw(model, **options):
    return torch_api.MaskedAdamW(model.named_parameters(), lr=1e-2, **options)


def assert_moved_alike(model, twin, start, bound):
    for p, q, s in zip(model.parameters(), twin.parameters(), start, strict=True):
        if torch.equal(q, s):
            assert torch.equal(p, s)
        else:
            assert movement_error(p, q, s) <= bound
