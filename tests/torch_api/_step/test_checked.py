"""Gradients that `torch.amp.GradScaler` has checked before the step: the program uses its result and reads the gradients once."""

import re

import pytest
import torch
from oracles import FUSES, NumpyAdam, clones, movement_error, random_grads, set_grads
from packing import lower_addressing_thresholds, programs, states
from policies import change_policy

import bridge
import torch_api
from bridge._xla import probes

pytestmark = pytest.mark.unoptimized

SHAPES = [(160, 256)] * 9 + [(128, 128)] * 8 + [(64, 64)] * 4 + [(99, 101), (7,), (3, 5)]


def parameters(shapes=SHAPES):
    return [torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in shapes]


def adamw(params, **options):
    return torch_api.MaskedAdamW(params, lr=0.01, weight_decay=0.1, fused=True, **options)


def scaler(kind=torch.amp.GradScaler):
    made = kind("cpu", init_scale=64.0, growth_interval=1000)
    made.scale(torch.zeros(()))  # the scaler makes its tensors here
    return made


def scaled_step(optimizer, params, grads, by):
    set_grads(params, [g * by.get_scale() for g in grads])
    by.step(optimizer)
    by.update()


def step_with_scale_set_by_hand(optimizer, params, grads):
    """Step with a scale that is set by hand, so that nobody has checked the gradients."""
    set_grads(params, [g * 8 for g in grads])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def decisive(optimizer):
    return {program.plan.needs_global_stats for program in programs(optimizer)}


@pytest.mark.skipif(not probes.fuses_multiple_outputs(), reason="this XLA writes only one result per loop")
@pytest.mark.parametrize("bound", [None, 0.5], ids=["plain", "clipped"])
def test_addressed_rows_move_as_in_torch(bound, monkeypatch):
    lower_addressing_thresholds(monkeypatch, 8)
    change_policy(monkeypatch, "STREAMING", min_elements=1)
    params, ours_by, theirs_by = parameters(), scaler(), scaler()
    start, others = clones(params), clones(params)
    ours, theirs = adamw(params, max_grad_norm=bound), torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    for step in range(21):
        grads = random_grads(params)
        if step == 11:
            grads[4][3, 5] = torch.nan
        before = [x.clone() for x in (*params, *(states(ours, params) if step else []))]
        scaled_step(ours, params, grads, ours_by)
        set_grads(others, [g * theirs_by.get_scale() for g in grads])
        if bound is not None:
            theirs_by.unscale_(theirs)
            torch.nn.utils.clip_grad_norm_(others, bound)
        theirs_by.step(theirs)
        theirs_by.update()
        after = [*params, *(states(ours, params) if step else [])]
        assert all(map(torch.equal, before, after)) is (step == 11)
    assert ours.skipped_steps == 1
    assert any(program.reads_grads_by_address for program in programs(ours))
    assert max(movement_error(p, q, s) for p, q, s in zip(params, others, start, strict=True)) < 1e-5


@pytest.mark.parametrize("broken", [False, True])
def test_steps_match_the_reference_of_the_paper(broken):
    params, by = parameters([(20, 30), (7,)]), scaler()
    start = clones(params)
    ours, papers = adamw(params), [NumpyAdam(lr=0.01, weight_decay=0.1, decoupled=True) for _ in params]
    expected = [p.detach().double().numpy() for p in params]
    for step in range(20):
        grads = random_grads(params)
        scaled_step(ours, params, [g * 1.01 for g in grads] if broken and step == 3 else grads, by)
        expected = [paper.step(p, g.double().numpy()) for paper, p, g in zip(papers, expected, grads, strict=True)]
    wrong = max(movement_error(p, torch.from_numpy(e), s) for p, e, s in zip(params, expected, start, strict=True))
    assert (wrong < 1e-5) is not broken


@FUSES
def test_check_by_grad_scaler_costs_no_bytes_in_the_step():
    """28 bytes per parameter, as without a scaled loss; 4 more if the program itself must check the gradients."""
    counts = []
    for step in (None, scaled_step, step_with_scale_set_by_hand):
        params = parameters([(256, 256), (300, 200)])
        optimizer, size = adamw(params), sum(p.numel() for p in params)
        grads = random_grads(params)
        if step is None:
            set_grads(params, grads)
            optimizer.step()
        else:
            step(optimizer, params, grads, *([scaler()] if step is scaled_step else []))
        counts.append(optimizer.bytes_accessed() / size)
    plain, told, itself = counts
    assert 28 <= plain < 28.1
    assert 28 <= told < 28.1
    assert 32 <= itself < 36.2  # the compiler also counts the branch that reads the gradients again


def test_result_of_grad_scaler_is_trusted_as_by_fused_torch():
    class NoCheckScaler(torch.amp.GradScaler):
        """A scaler that reports no infinities without a check."""

        def _check_inf_per_device(self, optimizer):
            found = {torch.device("cpu"): torch.tensor(0.0)}
            self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
            return found

    for make in (adamw, lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)):
        params = parameters([(4, 5), (7,)])
        grads, optimizer = random_grads(params), make(params)
        grads[1][2] = torch.nan
        scaled_step(optimizer, params, grads, scaler(NoCheckScaler))
        assert [bool(p.isfinite().all()) for p in params] == [True, False]


@pytest.mark.parametrize("bound", [None, 0.5], ids=["plain", "clipped"])
def test_changing_who_checks_compiles_only_if_nothing_else_needs_the_check(bound):
    params, by = parameters([(20, 30), (7,)]), scaler()
    optimizer = adamw(params, max_grad_norm=bound)
    scaled_step(optimizer, params, random_grads(params), by)
    assert decisive(optimizer) == {bound is not None}
    compiled = bridge.compilations()
    scaled_step(optimizer, params, random_grads(params), by)
    assert bridge.compilations() == compiled
    if bound is None:
        cause = re.escape("compiled another program: the program itself now checks whether gradients are finite") + "$"
        with pytest.warns(torch_api.CompilationWarning, match=cause):
            step_with_scale_set_by_hand(optimizer, params, random_grads(params))
    else:
        step_with_scale_set_by_hand(optimizer, params, random_grads(params))
        assert bridge.compilations() == compiled
    assert decisive(optimizer) == {True}  # the check of GradScaler is valid for one step only
    bad = random_grads(params)
    bad[0][0] = torch.inf
    before = clones(params)
    step_with_scale_set_by_hand(optimizer, params, bad)
    assert all(map(torch.equal, params, before))
    assert optimizer.skipped_steps == 1
    compiled = bridge.compilations()
    scaled_step(optimizer, params, random_grads(params), by)
    assert bridge.compilations() == compiled


def test_failed_scaler_step_does_not_affect_later_steps():
    params, by = parameters([(20, 30), (7,)]), scaler()
    optimizer = adamw(params)
    params[0].grad = torch.ones(20, 30).to_sparse()
    params[1].grad = torch.ones(7)
    with pytest.raises((ValueError, RuntimeError)):
        by.step(optimizer)
    for held in ("grad_scale", "found_inf"):
        vars(optimizer).pop(held, None)
    step_with_scale_set_by_hand(optimizer, params, random_grads(params))
    assert decisive(optimizer) == {True}
    host = torch_api.MaskedAdamW(params, lr=0.01)  # here GradScaler unscales gradients and skips steps
    scaled_step(host, params, random_grads(params), scaler())
    step_with_scale_set_by_hand(host, params, random_grads(params))
    assert decisive(host) == {True}


def test_gradients_unscaled_before_are_not_checked_again():
    params, by = parameters([(20, 30), (7,)]), scaler()
    optimizer, before = adamw(params), clones(params)
    set_grads(params, [g * 64 for g in random_grads(params)])
    params[1].grad[3] = -torch.inf
    by.unscale_(optimizer)
    by.step(optimizer)
    by.update()
    assert decisive(optimizer) == {False}
    assert optimizer.skipped_steps == 1
    assert by.get_scale() == 32.0
    assert all(map(torch.equal, params, before))
