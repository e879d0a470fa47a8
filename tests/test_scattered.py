"""Rows updated one after the other, their gradients read where they lie: many equal parameters on a CPU, some without a gradient."""

import copy
import itertools
import os
import re
import subprocess
import sys
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import clones, movement_error, random_grads, run_pair, set_grads
from packing import (
    ODD,
    apart,
    misaligned,
    near,
    one_by_one,
    programs,
    read_elsewhere,
    run,
    same_states,
    slots,
    some,
    states,
    take_few_for_many,
)

import bridge
import torch_api
from bridge import lanes, scattered, step
from torch_api import launches, packs

# Rows of one turn and of four, and one that no turn divides.
SHAPES = [(64, 64)] * 9 + [(160, 256)] * 8 + [(64, 61)] * 8
LOOPED = 17
MAKE = {
    "AdamW": lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda ps: torch_api.MaskedAdam(ps, lr=0.01, amsgrad=True),
    "momentum": lambda ps: torch_api.MaskedSGD(ps, lr=0.1, momentum=0.9, dampening=0.1),
    "averaged": lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, ema_decay=0.9),
    "NAdam": lambda ps: torch_api.MaskedNAdam(ps, lr=0.01),
    "Rprop": lambda ps: torch_api.MaskedRprop(ps, lr=0.01),
    "Lion": lambda ps: torch_api.MaskedLion(ps, lr=0.01),
    "optax": lambda ps: torch_api.OptaxOptimizer(ps, optax.adabelief, lr=0.01),
}
adamw = MAKE["AdamW"]


pytestmark = pytest.mark.skipif(not scattered.in_place(), reason="XLA copies all rows at each turn of a loop here")


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setitem(packs.GATHERED, "cpu", 0)
    take_few_for_many(monkeypatch, 4)
    monkeypatch.setattr(launches, "_mostly_live", lambda blocks: False)  # of those `test_at_once.py`


def parameters(dtype=torch.float32, shapes=SHAPES):
    return [torch.nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in shapes]


def compared(make, steps=8, dtype=torch.float32, grads=some, tolerance=1e-6):
    """The movement of looped rows beside that of leaves by themselves."""
    ours = parameters(dtype)
    optimizer = make(ours)
    other, theirs = one_by_one(make, ours)
    start = [p.detach().clone() for p in ours]
    run([(optimizer, ours), (other, theirs)], steps, grads)
    moved = [i for i, (p, s) in enumerate(zip(theirs, start, strict=True)) if not torch.equal(p, s)]
    assert len(moved) == len(ours)
    assert max(movement_error(ours[i], theirs[i], start[i]) for i in moved) <= tolerance
    return optimizer, ours, other, theirs


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_numbers_are_those_of_leaves_by_themselves(make):
    optimizer, ours, other, theirs = compared(make)
    assert sum(slot is not None for slot in slots(optimizer)) == LOOPED
    looped = {program for program in programs(optimizer) if program.looped}
    assert looped
    for program in looped:  # what lies between operations, never a copy of the rows
        (leaf,) = program.plan.leaves
        room = program.update.memory_analysis().temp_size_in_bytes
        assert room < 10 * leaf.spec.shape[0] * 4
    assert not any(program.looped for each in other.optimizers for program in programs(each))
    for p, q in zip(ours, theirs, strict=True):
        assert optimizer.state[p].keys() == other.state[q].keys()
        for name, tensor in optimizer.state[p].items():
            torch.testing.assert_close(tensor, other.state[q][name], rtol=1e-5, atol=1e-7)


def test_numbers_are_torchs():
    ours = parameters()
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    run_pair(adamw(ours), ours, torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs, steps=20)
    near(ours, theirs, start)


def test_float64():
    optimizer, *_ = compared(adamw, 4, torch.float64, tolerance=1e-12)
    assert any(program.looped for program in programs(optimizer))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, max_grad_norm=0.5), torch.float32),
        (lambda ps: torch_api.MaskedLamb(ps, lr=0.01), torch.float32),
        (adamw, torch.bfloat16),
        (adamw, torch.float16),
        (adamw, torch.complex64),
        (lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, state_dtype=torch.bfloat16), torch.float32),
        (lambda ps: torch_api.MaskedAdafactor(ps, lr=0.01), torch.float32),
    ],
    ids=["a common norm", "sums over the leaf", "bfloat16", "float16", "complex", "state of a half type", "rows and columns"],
)
def test_what_a_loop_over_parts_cannot_do_is_done_without(make, dtype):
    ours = parameters(dtype)
    optimizer = make(ours)
    set_grads(ours, random_grads(ours))
    optimizer.step()
    assert not any(program.looped for program in programs(optimizer))


def test_who_has_no_gradient_stays_as_it_is_and_no_subset_compiles():
    ours = parameters()
    optimizer = adamw(ours)
    run([(optimizer, ours)], 1)
    kinds = len(set(programs(optimizer)))
    before = bridge.compilations()
    for _ in range(12):
        grads = [None if shape == (64, 61) else g for shape, g in zip(SHAPES, some(ours), strict=True)]
        kept = [[x.clone() for x in (p.detach(), *states(optimizer, [p]))] for p in ours]
        run([(optimizer, ours)], 1, lambda _, grads=grads: grads)
        for p, g, old in zip(ours, grads, kept, strict=True):
            same = [torch.equal(x, y) for x, y in zip((p.detach(), *states(optimizer, [p])), old, strict=True)]
            assert all(same) if g is None else not any(same)
    assert bridge.compilations() == before
    assert len(set(programs(optimizer))) <= kinds
    assert optimizer.cache_info().programs <= kinds


def test_rows_are_divided_among_the_cores_and_programs_among_their_lanes(monkeypatch):
    monkeypatch.setattr(lanes, "CORES", 2)
    ours = parameters(shapes=[(64, 64)] * 32)
    optimizer = adamw(ours)
    run([(optimizer, ours)], 1)
    launches = optimizer._launches.latest
    assert [launch.program.plan.leaves[0].count for launch in launches] == [8] * 4
    assert len(set(programs(optimizer))) == 1
    memories = [leaf.memory for p in ours for leaf in optimizer._active if leaf.param is p]
    assert all(a is not b for a, b in itertools.pairwise(memories))
    taken = []
    monkeypatch.setattr(lanes, "opened", lambda numbers, device, count: taken.append(count) or (numbers, [0, 0]))
    run([(optimizer, ours)], 1)
    assert taken == [2]


def test_with_one_order_of_execution_a_loop_would_have_one_core(monkeypatch):
    monkeypatch.setattr(lanes, "SEVERAL", False)
    ours = parameters()
    optimizer = adamw(ours)
    run([(optimizer, ours)], 1)
    assert set(slots(optimizer)) == {None}


def test_nothing_is_copied_and_addresses_stay():
    ours = parameters()
    optimizer = adamw(ours)
    run([(optimizer, ours)], 1)
    addresses = [x.data_ptr() for x in (*ours, *states(optimizer, ours))]
    run([(optimizer, ours)], 3)
    assert addresses == [x.data_ptr() for x in (*ours, *states(optimizer, ours))]
    for launch in optimizer._launches.latest:
        if launch.program.looped:
            assert not launch.rows
            assert launch.flat.copies == []
            shape = "f32[{},{}]".format(*launch.inplace[0].memory.array.shape)
            flat = f"f32[{launch.inplace[0].memory.array.size}]"
            text = launch.program.update.as_text()
            assert shape in text
            assert not re.search(rf"= ({re.escape(shape)}|{re.escape(flat)})\S* copy\(", text)


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_gradients_that_are_not_dense_are_read_all_the_same(odd):
    ours = parameters(shapes=[(64, 64)] * 8)
    optimizer = adamw(ours)
    other, theirs = apart(adamw, ours)
    for _ in range(3):
        for p, q, g in zip(ours, theirs, random_grads(ours), strict=True):
            p.grad = odd(g)
            q.grad = p.grad.clone().contiguous() + 0
        optimizer.step()
        other.step()
    assert programs(optimizer)[0].looped
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cores", [1, 3, 48])
def test_any_number_of_cores(monkeypatch, cores):
    monkeypatch.setattr(lanes, "CORES", cores)
    ours = parameters(shapes=[(64, 64)] * 16)
    optimizer = adamw(ours)
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    run_pair(optimizer, ours, torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs, steps=3)
    near(ours, theirs, start)
    counts = [program.plan.leaves[0].count for program in programs(optimizer)]
    assert sum(counts) == 16
    assert len(counts) == 2  # each of at least so many rows


class Coefficients(NamedTuple):
    momentum: Any
    both: Any


def shared_vector():
    def update(updates, state, params=None):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, updates)
        return jax.tree.map(lambda m: -0.01 * (state.both[0] + state.both[1]) * m, momentum), Coefficients(momentum, state.both)

    init = lambda params: Coefficients(jax.tree.map(jnp.zeros_like, params), jnp.array([0.5, 0.25], jnp.float32))  # noqa: E731
    return optax.GradientTransformation(init, update)


def test_a_vector_that_all_share_is_no_part_of_a_row():
    ours = parameters(shapes=[(64, 64)] * 8)
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    optimizer = torch_api.OptaxOptimizer(ours, shared_vector())
    run_pair(optimizer, ours, torch.optim.SGD(theirs, lr=0.0075, momentum=0.9), theirs, steps=4)
    near(ours, theirs, start, 1e-5)
    assert not any(program.looped for program in programs(optimizer))


@pytest.mark.parametrize("looped", [True, False])
def test_a_parameter_whose_memory_order_changes_keeps_its_state(monkeypatch, looped):
    if not looped:
        monkeypatch.setitem(packs.GATHERED, "cpu", 1 << 17)
    ours = parameters(shapes=[(16, 8, 8, 8)] * 8)
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    optimizer, other = adamw(ours), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        run_pair(optimizer, ours, other, theirs, steps=2)
        assert programs(optimizer)[0].looped is looped
        for p in (*ours, *theirs):
            p.data = p.data.to(memory_format=torch.channels_last if p.is_contiguous() else torch.contiguous_format)
    near(ours, theirs, start, 1e-5)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])


def test_no_copy_of_a_gradient_outlives_the_step():
    ours = [torch.nn.Parameter((0.1 * torch.randn(16, 8, 8, 8)).to(memory_format=torch.channels_last)) for _ in range(8)]
    optimizer = adamw(ours)
    for order in (torch.channels_last, torch.contiguous_format):
        for p in ours:
            p.grad = torch.randn(p.shape).to(memory_format=order)
        optimizer.step()
        assert all(launch.flat.copies == [] for launch in optimizer._launches.latest)
        counts = [torch._C._storage_Use_Count(p.grad.untyped_storage()._cdata) for p in ours]
        assert max(counts) == torch._C._storage_Use_Count(torch.zeros(3).untyped_storage()._cdata)


def test_an_error_can_be_shown_with_all_variables(monkeypatch):
    ours = parameters(shapes=[(64, 64)] * 16)
    optimizer = adamw(ours)
    run([(optimizer, ours)], 1)
    broken = optimizer._launches.latest[-1].program
    monkeypatch.setattr(broken, "update", lambda *_: 1 / 0)
    set_grads(ours, random_grads(ours))
    with pytest.raises(ZeroDivisionError) as caught:
        optimizer.step()
    shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "<all memory as float32>" in shown
    everything = scattered.everything(np.dtype("float32"))
    assert copy.deepcopy(everything) is everything


def test_a_default_device_changes_nothing():
    ours = parameters(shapes=[(64, 64)] * 8)
    optimizer = adamw(ours)
    other, theirs = apart(adamw, ours)
    grads = random_grads(ours)
    for p, q, g in zip(ours, theirs, grads, strict=True):
        p.grad, q.grad = misaligned(g), g.clone()
    with torch.device("meta"):
        optimizer.step()
    other.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_strided_parameters():
    ours = [torch.nn.Parameter((0.1 * torch.randn(16, 8, 8, 8)).to(memory_format=torch.channels_last)) for _ in range(8)]
    optimizer = adamw(ours)
    other, theirs = apart(adamw, ours)
    run([(optimizer, ours), (other, theirs)], 3)
    run([(optimizer, ours), (other, theirs)], 3, lambda ps: [torch.randn(p.shape) for p in ps])  # in another order than they
    assert programs(optimizer)[0].looped
    assert not any(p.is_contiguous() for p in ours)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_scaled_loss_gathers_the_gradients_and_goes_on_in_the_loop():
    ours = parameters(shapes=[(64, 64)] * 8)
    optimizer = torch_api.MaskedAdamW(ours, lr=0.01, weight_decay=0.1, fused=True)
    theirs = clones(ours)
    other = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)
    for scaled in (False, True, True, False):
        grads = random_grads(ours)
        for params, each in ((ours, optimizer), (theirs, other)):
            set_grads(params, [g * 8 if scaled else g for g in grads])
            if scaled:
                each.grad_scale, each.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            each.step()
            if scaled:
                del each.grad_scale, each.found_inf
        known = next(parts for key, parts in optimizer._launches.known.items() if key[2] is scaled)
        assert {launch.program.looped for part in known for launch in part} == {not scaled}
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_norm_given_later_takes_the_leaves_out_of_their_packs():
    ours = parameters()
    optimizer = adamw(ours)
    other, theirs = apart(adamw, ours)
    run([(optimizer, ours), (other, theirs)], 2)
    optimizer.max_grad_norm = other.max_grad_norm = 0.5
    run([(optimizer, ours), (other, theirs)], 2)
    assert not any(program.looped for program in programs(optimizer))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_goes_both_ways(tmp_path):
    ours = parameters()
    optimizer = adamw(ours)
    run([(optimizer, ours)], 3, some)
    theirs = clones(ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "LOOPED", 0)
        other = adamw(theirs)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again = clones(ours)
    third = adamw(again)
    third.load_state_dict(other.state_dict())
    run([(optimizer, ours), (third, again)], 3, some)
    for p, q in zip(ours, again, strict=True):
        assert torch.equal(p, q)
    same_states(optimizer, ours, third, again)
    torch.save(ours[0].detach(), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < ours[0].numel() * 4 + 4096


def test_a_training_step_of_jax_and_ordinary_steps_take_turns():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    twin = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    twin.load_state_dict(model.state_dict())
    optimizer = torch_api.MaskedAdamW(model.parameters(), lr=1e-3)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    train_step: Any = None
    for turn in range(6):
        if turn == 2:  # from here on rows are parameters by themselves, which go on from the same state
            train_step = torch_api.JaxTrainStep(model, loss, optimizer)
        x = torch.randn(16, 64)
        if turn in (3, 5):
            train_step(x)
        else:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
            assert programs(optimizer)[0].looped is (turn < 2)
        other.zero_grad()
        loss(twin, x).backward()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_gradients_may_be_written_as_soon_as_the_step_returns():
    ours = parameters(shapes=[(160, 256)] * 12)
    optimizer = torch_api.MaskedSGD(ours, lr=1.0)
    space = [torch.empty_like(p) for p in ours]
    start = [p.detach().clone() for p in ours]
    for n in range(100):
        for p, g in zip(ours, space, strict=True):
            p.grad = g.fill_(2.0**-10)
        optimizer.step()
        for g in space:
            g.fill_(torch.nan)
        assert n or programs(optimizer)[0].looped
    for p, s in zip(ours, start, strict=True):
        torch.testing.assert_close(p.detach(), s - 100 * 2.0**-10)


@pytest.mark.parametrize("shift", [1, 64 * 64])
def test_the_oracle_sees_gradients_read_elsewhere(monkeypatch, shift):
    monkeypatch.setattr(scattered.Places, "__call__", read_elsewhere(shift))
    grads = lambda params: [torch.randn_like(torch.cat([p.detach().reshape(-1), torch.zeros(8)]))[:-8].view(p.shape) for p in params]  # noqa: E731
    with pytest.raises(AssertionError):
        compared(adamw, 3, grads=grads)


def test_a_part_divides_the_row():
    assert scattered.part(65536) == 16384
    assert scattered.part(160 * 256) == 10240
    assert scattered.part(64 * 61) is None
    assert scattered.part(8191) == 8191
    assert scattered.part(65537) is None
    assert all(size % scattered.part(size) == 0 for size in range(1 << 15, 1 << 17, 4096))


def test_the_bytes_of_a_loop_are_counted_for_all_its_turns():
    ours = parameters(shapes=[(160, 256)] * 8)
    optimizer = torch_api.MaskedAdamW(ours, lr=0.01)
    run([(optimizer, ours)], 1)
    looped = {program for program in programs(optimizer) if program.looped}
    assert looped == set(step.programs([program.plan for program in looped]))
    elements = sum(p.numel() for p in ours)
    assert 28 * elements < optimizer.bytes_accessed() < 60 * elements


@pytest.mark.parametrize("flags", ["0", "1"])
def test_where_xla_copies_rows_leaves_stay_by_themselves(flags):
    code = """
import time, torch, torch_api
from bridge import scattered
params = [torch.nn.Parameter(torch.zeros(256, 256)) for _ in range(64)]
optimizer = torch_api.MaskedAdamW(params, lr=0.1)
for p in params:
    p.grad = torch.ones_like(p)
optimizer.step()
looped = {launch.program.scattered for launch in optimizer._launches.latest}
assert looped == {scattered.in_place()}, looped
print(scattered.in_place(), float(params[5][0, 0]) < -0.09)
"""
    environment = {**os.environ, "MASKBRIDGE_XLA_FLAGS": flags, "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(flags == "1"), "True"]
