"""Buckets of large parameters whose gradients are separate arguments: the layout of a GPU, tested here on the CPU too."""

import itertools
import math
from dataclasses import replace

import optax
import pytest
import torch
from oracles import clones, movement_error, random_grads, run_pair, set_grads
from packing import bucketed, unbucketed_twin
from policies import change_policy
from sampling import sampled

import torch_api
from bridge._compiler import update
from bridge._compiler.passes import per_kind
from bridge._runtime import cache
from torch_api._step import bound_executable

pytestmark = pytest.mark.unoptimized

SHAPES = [(16, 8), (8, 16), (16, 8), (128,), (64,), (8, 8), (4, 4, 4), (5, 3), (16, 8)]
MAKE = {
    "AdamW": lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda ps: torch_api.MaskedAdam(ps, lr=0.01, amsgrad=True),
    "momentum": lambda ps: torch_api.MaskedSGD(ps, lr=0.1, momentum=0.9, dampening=0.1),
    "clipped": lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, max_grad_norm=0.5),
    "averaged": lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, ema_decay=0.9),
    "NAdam": lambda ps: torch_api.MaskedNAdam(ps, lr=0.01),
    "Lion": lambda ps: torch_api.MaskedLion(ps, lr=0.01),
    "Lamb": lambda ps: torch_api.MaskedLamb(ps, lr=0.01),
    "optax": lambda ps: torch_api.OptaxOptimizer(ps, optax.adabelief, lr=0.01),
}


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0, grads_as_arguments_on=frozenset({"cpu"}))


def parameters(dtype=torch.float32):
    return [torch.nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in SHAPES]


def compare_with_unbucketed(make, ours, steps=20, grads=None, tolerance=1e-6):
    """Compare the movement with an unbucketed optimizer; return both optimizers."""
    optimizer = make(ours)
    with pytest.MonkeyPatch.context() as patch:
        change_policy(patch, "BUCKETING", grads_as_arguments_on=frozenset())
        other, theirs = unbucketed_twin(make, ours)
    start = [p.detach().clone() for p in ours]
    for _ in range(steps):
        for p, q, g in zip(ours, theirs, random_grads(ours) if grads is None else grads(ours), strict=True):
            p.grad, q.grad = (None, None) if g is None else (g, g.clone())
        optimizer.step()
        with pytest.MonkeyPatch.context() as patch:
            change_policy(patch, "BUCKETING", grads_as_arguments_on=frozenset())
            other.step()
    moved = [i for i, (p, s) in enumerate(zip(theirs, start, strict=True)) if not torch.equal(p, s)]
    assert moved
    assert max(movement_error(ours[i], theirs[i], start[i]) for i in moved) < tolerance
    return optimizer, other


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", sampled(MAKE.values(), MAKE))
def test_bucketed_parameters_move_like_unbucketed_ones(make):
    ours = parameters()
    optimizer, _ = compare_with_unbucketed(make, ours)
    bucketed(optimizer, 7)
    by_itself = [leaf.param for leaf in optimizer._trainable if leaf.bucket_row is None]
    assert any(p is ours[7] for p in by_itself)  # its bucket row would need padding
    assert all(pack.grads_as_arguments for each in optimizer._launch_cache.last_used for pack in each.buckets)
    addresses = [p.data_ptr() for p in ours]
    set_grads(ours, random_grads(ours))
    optimizer.step()
    assert addresses == [p.data_ptr() for p in ours]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_parameters_of_every_dtype_move_like_unbucketed_ones(dtype):
    ours = parameters(dtype)
    optimizer, _ = compare_with_unbucketed(
        lambda ps: torch_api.MaskedAdamW(ps, lr=0.01), ours, tolerance=1e-2 if dtype is torch.bfloat16 else 1e-6
    )
    bucketed(optimizer, 4)


@pytest.mark.parametrize("norm", [None, 0.5])
def test_parameter_without_gradient_does_not_change(norm):
    turn = itertools.count()

    def grads(params):
        n = next(turn)
        return [None if (i + n) % 3 == 0 else torch.randn_like(p) for i, p in enumerate(params)]

    ours = parameters()
    optimizer, other = compare_with_unbucketed(lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, max_grad_norm=norm), ours, grads=grads)
    counts = [[int(o.state[p]["step"]) for p in o.param_groups[0]["params"]] for o in (optimizer, other)]
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1
    frozen, before = ours[0], ours[0].detach().clone()
    set_grads(ours, random_grads(ours))
    frozen.grad = None
    others = [p.grad for p in ours]
    optimizer.step()
    assert torch.equal(frozen, before)
    assert others[1] is ours[1].grad


def test_gradients_are_arguments_without_a_copy():
    ours = parameters()
    optimizer = torch_api.MaskedAdamW(ours, lr=0.01)
    set_grads(ours, random_grads(ours))
    optimizer.step()
    (only,) = optimizer._launch_cache.last_used
    assert not only.gradients.buffers
    assert all(pack._gathered_grads is None for pack in only.buckets)
    size = sum(math.prod(shape) for shape in SHAPES)
    assert len(only.gradients.positions) == len(SHAPES)
    assert only.executable.elements == size


def test_strided_parameters_and_gradients_move_as_in_torch():
    def weights():
        torch.manual_seed(3)
        return [torch.nn.Parameter(torch.randn(4, 4, 2, 2).to(memory_format=torch.channels_last)) for _ in range(3)]

    ours, theirs = weights(), weights()
    optimizer, other = torch_api.MaskedAdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    start = [p.detach().clone() for p in ours]
    for turn in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(4, 4, 2, 2) if turn % 2 else torch.randn(4, 4, 2, 2).to(memory_format=torch.channels_last)
            q.grad = p.grad.clone()
        optimizer.step()
        other.step()
    bucketed(optimizer, 3)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


def test_checkpoints_load_from_and_into_torch():
    ours = parameters()
    theirs = clones(ours)
    start = [p.detach().clone() for p in ours]
    a, b = torch_api.MaskedAdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    run_pair(a, ours, b, theirs, 10)
    saved = a.state_dict()
    a.load_state_dict(b.state_dict())
    b.load_state_dict(saved)
    run_pair(a, ours, b, theirs, 10)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for s in a.state.values() for t in s.values())


def test_train_step_and_eager_steps_alternate():
    def model():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    one, other = model(), model()
    a, b = torch_api.MaskedAdamW(one.parameters(), lr=0.01), torch.optim.AdamW(other.parameters(), lr=0.01)
    loss_of = lambda m, x, y: torch.nn.functional.mse_loss(m(x), y)  # noqa: E731
    train_step = torch_api.JaxTrainStep(one, loss_of, a)
    start = [p.detach().clone() for p in other.parameters()]
    for turn in range(20):
        x, y = torch.randn(8, 16), torch.randn(8, 1)
        if turn % 3:
            train_step(x, y)
        else:
            a.zero_grad()
            loss_of(one, x, y).backward()
            a.step()
        b.zero_grad()
        loss_of(other, x, y).backward()
        b.step()
    bucketed(a, 4)
    assert max(map(movement_error, one.parameters(), other.parameters(), start)) < 1e-4


def test_gradient_in_the_wrong_row_is_detected(monkeypatch):
    """The comparison above can fail."""
    sources = bound_executable.ProgramOperand.grad_sources.fget
    reversed_positions = lambda found: [replace(x, position=y.position) for x, y in zip(found, found[::-1], strict=True)]  # noqa: E731
    monkeypatch.setattr(bound_executable.ProgramOperand, "grad_sources", property(lambda self: reversed_positions(sources(self))))
    with pytest.raises(AssertionError):
        compare_with_unbucketed(MAKE["AdamW"], parameters())


def test_scalars_in_one_table_give_the_same_movement(monkeypatch):
    """Programs of a GPU read scalars this way."""
    asked = []
    inner = per_kind.for_each
    monkeypatch.setattr(update, "for_each", lambda kinds, common, apart: asked.append(apart) or inner(kinds, common, False))
    monkeypatch.setattr(cache, "_programs", {})
    compare_with_unbucketed(MAKE["AdamW"], parameters())
    assert asked
