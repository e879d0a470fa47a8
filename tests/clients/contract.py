"""The contract of every client: the loss falls, a resumed run equals the uninterrupted one bit for bit, frozen leaves keep their bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax
import torch
from oracles import movement_error

import torch_api

STEPS, SAVED = 12, 6  # steps of a run, and the step of its checkpoint
LR = 1e-2
EPS = 1e-5  # larger than the noise in gradients that are truly zero (see `flat`), of which Adam would make full steps


class Run(NamedTuple):
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]
    state: dict[str, Any]  # state_dict of the optimizer
    losses: list[float]


def masked_adamw(named, frozen):
    return torch_api.MaskedAdamW(named, lr=LR, eps=EPS, weight_decay=0.1, mask=[(frozen, False), ("*", True)])


def masked_sgd(named, frozen):
    return torch_api.MaskedSGD(named, lr=0.1, momentum=0.9, mask=[(frozen, False), ("*", True)])


def lion(named, frozen):
    return torch_api.OptaxOptimizer(named, optax.lion, lr=LR / 3, mask=[(frozen, False), ("*", True)])


def partitioned(named, frozen):
    parts = {"matrix": (optax.adamw, {"learning_rate": LR}), "vector": (optax.sgd, {"learning_rate": 0.1, "momentum": 0.9})}
    return torch_api.PartitionedOptimizer(
        named, parts, labels=lambda name, p: "matrix" if p.ndim > 1 else "vector", mask=[(frozen, False), ("*", True)]
    )


def torch_adamw(named, frozen):
    """torch's own AdamW, which has no mask: an lr of 0 freezes."""
    groups = [{"params": [p]} | ({"lr": 0.0} if name == frozen else {}) for name, p in named]
    return torch.optim.AdamW(groups, lr=LR, eps=EPS, weight_decay=0.1)


OURS = [masked_adamw, masked_sgd, lion, partitioned]


def network():
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def samples():
    """Return eight inputs and their classes, repeated for each step."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    return x.repeat(STEPS, 1), (x.sum(1) > 0).long().repeat(STEPS)


def run(train, optimizer, folder, resume, model=network, frozen="2.weight", still="2.bias", seed=0):
    """Run `train(model, make, folder, resume)`, which returns the optimizer from `make(named_parameters)` and the losses."""
    torch.manual_seed(seed)
    module = model()
    module.get_parameter(still).requires_grad_(False)
    start = bits(module.state_dict())
    torch.manual_seed(7)  # seeds data order and dropout
    made, losses = train(module, lambda named: optimizer(named, frozen), folder, resume)
    return Run(start, bits(module.state_dict()), made.state_dict(), losses)


def check(train, optimizer, folder, frozen="2.weight", still="2.bias", other_seed=1, reference=None, **options):
    """Check a whole run, a run resumed from its checkpoint, and torch's own optimizer if there is a `reference`."""
    reference = torch_adamw if optimizer is masked_adamw else reference
    whole = run(train, optimizer, folder / "run", False, frozen=frozen, still=still, **options)
    resumed = run(train, optimizer, folder / "run", True, frozen=frozen, still=still, seed=other_seed, **options)
    assert len(whole.losses) == STEPS
    assert sum(whole.losses[-3:]) < 0.9 * sum(whole.losses[:3]), whole.losses
    assert resumed.losses[-(STEPS - SAVED) :] == whole.losses[SAVED:]
    same(resumed.end, whole.end)
    same(resumed.state, whole.state)
    kept = {name for name, value in whole.start.items() if torch.equal(value, whole.end[name])}
    assert {frozen, still} <= kept
    assert len(whole.start) - len(kept) >= 3
    if reference is not None:
        theirs = run(train, reference, folder / "torch", False, frozen=frozen, still=still, **options)
        assert movement_error(flat(whole.end), flat(theirs.end), flat(whole.start)) < 1e-5


def flat(tensors):
    """Return the tensors as one vector, so that a weight with a truly zero gradient is not compared by its noise."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def bits(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(one, other, where="state"):
    """Check that two trees are equal, with bitwise equal tensors."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"{where}: {sorted(one)}, {sorted(other)}"
        for key, value in one.items():
            same(value, other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}[{index}]")
    else:
        assert one == other, where
