"""Guards of the warm path: with torch's guards or with a check of each parameter, they notice every change."""

import copy

import pytest
import torch
from oracles import clones, random_grads, same, set_grads
from packing import assert_near
from sampling import sampled

import bridge
import torch_api
from bridge._compat import torch as sight_torch
from bridge._compat.torch import no_guard
from torch_api._step import guards

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

SHAPES = [(5, 7), (6,), (4, 3), (), (9,)]
WAYS = {"guards": sight_torch.make_guard, "leaf by leaf": no_guard}


@pytest.fixture(autouse=True, params=WAYS)
def way(request, monkeypatch):
    """Run the test with both kinds of guards."""
    monkeypatch.setattr(guards, "make_guard", WAYS[request.param])
    return request.param


def made(**options):
    params = [torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in SHAPES]
    optimizer = torch_api.MaskedAdamW(params, lr=0.01, **options)
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    return optimizer, params


def count_slow_checks(optimizer, monkeypatch):
    """Return a list that grows each time the optimizer checks its parameters one by one."""
    count = []
    look = type(optimizer)._slow_path
    monkeypatch.setattr(type(optimizer), "_slow_path", lambda self: (count.append(1), look(self))[1])
    return count


def test_slow_check_runs_only_if_other_parameters_have_gradients(monkeypatch, way):
    optimizer, params = made()
    count = count_slow_checks(optimizer, monkeypatch)
    for absent, looked in ((None, 0), (None, 0), (1, 1), (1, 1), (None, 2), (3, 3), (3, 3)):
        set_grads(params, [None if i == absent else g for i, g in enumerate(random_grads(params))])
        optimizer.step()
        assert way != "guards" or len(count) == looked
    assert way == "guards" or len(count) == 7


@pytest.mark.parametrize("change", [lambda g: g.untyped_storage().resize_(0), lambda g: g.untyped_storage().resize_(g.nbytes - 4)])
def test_resized_storage_is_noticed(change, monkeypatch):
    optimizer, params = made()
    set_grads(params, random_grads(params))
    optimizer.step()
    count = count_slow_checks(optimizer, monkeypatch)
    change(params[1].grad)
    with pytest.raises(ValueError, match="Nothing was updated"):
        optimizer.step()
    assert count


CHANGES = {
    "parameter moved": lambda o, p: setattr(p, "data", p.data.clone()),
    "parameter in another order": lambda o, p: setattr(p, "data", p.data.t().contiguous().t()),
    "state entry replaced": lambda o, p: o.state[p].update(exp_avg=torch.full_like(p, 0.5)),
    "state replaced": lambda o, p: o.state.update({p: {k: v.clone() for k, v in o.state[p].items()}}),
    "state cleared": lambda o, p: o.state.pop(p),
    "data of the state replaced": lambda o, p: setattr(o.state[p]["exp_avg"], "data", torch.full_like(p, 0.25)),
}


@pytest.mark.parametrize("change", sampled(CHANGES.values(), CHANGES, every=2))
@pytest.mark.parametrize("absent", sampled([None, 2]))
def test_changes_by_hand_take_effect(change, absent):
    """Compare with an optimizer that checks every parameter at every step."""
    optimizer, params = made()
    twin, others = copy.deepcopy((optimizer, params))
    for each, theirs in ((optimizer, params), (twin, others)):
        set_grads(theirs, [torch.ones_like(p) for p in theirs])
        each.step()  # the copy prepares its executables again
        change(each, theirs[0])
    for _ in range(3):
        grads = [None if i == absent else g for i, g in enumerate(random_grads(params))]
        set_grads(params, grads)
        set_grads(others, grads)
        optimizer.step()
        twin._guards.invalidate()
        twin.step()
        assert same(params, others)
        for p, q in zip(params, others, strict=True):
            assert same(optimizer.state[p].values(), twin.state[q].values())


BAD = {
    "another shape": lambda p: setattr(p.grad, "data", torch.zeros(3)),
    "another dtype": lambda p: setattr(p.grad, "data", torch.zeros_like(p, dtype=torch.float64)),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_invalid_gradient_is_noticed(spoil):
    optimizer, params = made()
    set_grads(params, random_grads(params))
    before = [p.detach().clone() for p in params]
    spoil(params[1])
    with pytest.raises(ValueError, match="Nothing was updated"):
        optimizer.step()
    assert same(params, before)


def test_stale_gradient_of_a_parameter_frozen_by_hand_is_not_read():
    optimizer, params = made()
    params[1].requires_grad_(False)
    before = params[1].detach().clone()
    for _ in range(2):
        set_grads([p for p in params if p.requires_grad], random_grads([p for p in params if p.requires_grad]))
        optimizer.step()
    assert torch.equal(params[1], before)
    params[1].requires_grad_(True)
    set_grads(params, random_grads(params))
    optimizer.step()
    assert not torch.equal(params[1], before)


def test_gradient_that_returns_is_used():
    optimizer, params = made()
    for grads in (random_grads(params)[:-1] + [None], random_grads(params)[:-1] + [None], random_grads(params)):
        set_grads(params, grads)
        before = params[-1].detach().clone()
        optimizer.step()
        assert torch.equal(params[-1], before) == (grads[-1] is None)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.no_grad])
def test_guards_work_in_other_torch_modes(mode, monkeypatch):
    optimizer, params = made()
    others = clones(params)
    theirs = torch.optim.AdamW(others, lr=0.01)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch does not copy
    start = clones(params)
    compiled = bridge.compilations()
    for _ in range(3):
        grads = random_grads(params)
        set_grads(params, grads)
        set_grads(others, grads)
        with mode():
            optimizer.step()
        theirs.step()
    assert_near(params, others, start)
    assert bridge.compilations() == compiled
