"""Steps check the state for edits only while user code may hold a part of it."""

import copy
import pickle
from collections import defaultdict

import jax
import optax
import pytest
import torch
from oracles import random_grads, same, set_grads

import torch_api
from torch_api._step import state_watch

pytestmark = pytest.mark.unoptimized

SHAPES = [(5, 7), (6,), (4, 3), (), (9,)]


def made(tx=None, steps=5, shapes=SHAPES):
    params = [torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in shapes]
    opt = torch_api.MaskedAdamW(params, lr=0.01) if tx is None else torch_api.OptaxOptimizer(params, tx)
    trained(opt, params, steps)
    return opt, params


def trained(opt, params, steps):
    for _ in range(steps):
        set_grads(params, random_grads(params))
        opt.step()


def count_state_checks(monkeypatch):
    """Return a list that grows with each step that checks state tensors."""
    count = []
    looks = state_watch.StateWatchingOptimizer._state_is_unmodified
    monkeypatch.setattr(state_watch.StateWatchingOptimizer, "_state_is_unmodified", lambda self: (count.append(1), looks(self))[1])
    return count


def test_state_that_was_never_read_is_not_checked(monkeypatch):
    opt, params = made()
    count = count_state_checks(monkeypatch)
    trained(opt, params, 8)
    assert not count
    opt.state[params[0]]["exp_avg"].norm()
    trained(opt, params, 1)
    assert len(count) == 1
    trained(opt, params, 8)
    assert len(count) == 1  # the state is no longer watched


HELD = {
    "the state": lambda opt, p: opt.state,
    "the dict of a parameter": lambda opt, p: opt.state[p],
    "a tensor": lambda opt, p: opt.state[p]["exp_avg_sq"],
    "a scalar": lambda opt, p: opt.state[p]["step"],
    "a state_dict": lambda opt, p: opt.state_dict(),
    "an iterator": lambda opt, p: iter(opt.state.values()),
}


@pytest.mark.parametrize("ask", HELD.values(), ids=HELD)
def test_state_is_checked_as_long_as_it_is_held(ask, monkeypatch):
    opt, params = made()
    something = ask(opt, params[1])
    count = count_state_checks(monkeypatch)
    trained(opt, params, 40)
    assert len(count) == 40
    del something
    trained(opt, params, 64)
    assert len(count) < 104
    before = len(count)
    trained(opt, params, 8)
    assert len(count) == before


CHANGES = {
    "data replaced": lambda fields, name: setattr(fields[name], "data", torch.full_like(fields[name], 0.25)),
    "entry replaced": lambda fields, name: fields.__setitem__(name, torch.full_like(fields[name], 0.25)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_edit_through_a_long_held_reference_takes_effect(change):
    """The result is that of an optimizer that starts with the edited state."""
    opt, params = made()
    fields = opt.state[params[0]]
    trained(opt, params, 37)
    change(fields, "exp_avg")
    twin, others = copy.deepcopy((opt, params))
    grads = random_grads(params)
    for each, theirs in ((opt, params), (twin, others)):
        set_grads(theirs, grads)
        each.step()
    assert same(params, others)
    assert same(opt.state[params[0]].values(), twin.state[others[0]].values())


def test_edit_of_a_held_tensor_takes_effect():
    opt, params = made()
    tensor = opt.state[params[0]]["exp_avg"]
    trained(opt, params, 20)
    tensor.data = torch.zeros_like(tensor)
    set_grads(params, [torch.ones_like(p) for p in params])
    opt.step()
    torch.testing.assert_close(opt.state[params[0]]["exp_avg"], torch.full_like(tensor, 0.1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copied_state_is_not_checked_once_it_is_released(copied, monkeypatch):
    opt, params = made()
    twin, others = copied((opt, params))
    assert same([x for fields in opt.state.values() for x in fields.values()], [x for f in twin.state.values() for x in f.values()])
    trained(twin, others, 8)
    count = count_state_checks(monkeypatch)
    trained(twin, others, 8)
    assert not count


def test_assigned_state_replaces_the_old_one():
    opt, params = made()
    old = opt.state
    opt.state = type(old)(dict)
    assert opt.state is not old
    assert not opt.state
    trained(opt, params, 3)
    assert all(fields["step"] == 3 for fields in opt.state.values())


@pytest.mark.usefixtures("standard_promotion")
def test_shared_state_is_checked_while_it_is_held(monkeypatch):
    opt, params = made(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    count = count_state_checks(monkeypatch)
    trained(opt, params, 8)
    assert not count
    shared = opt.state[params[0]]["count"]
    assert shared is opt.state[params[1]]["count"]
    trained(opt, params, 20)
    assert len(count) == 20
    shared.data = torch.tensor(100, dtype=torch.int32)
    trained(opt, params, 1)
    assert int(opt.state[params[1]]["count"]) == 101


@pytest.mark.usefixtures("standard_promotion")
def test_shared_state_of_frozen_parameters_is_not_taken_for_held(monkeypatch):
    """Dicts of frozen parameters also show the shared tensors; such a reference must not count as held by user code."""
    opt, params = made(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    opt.set_trainable(lambda name, p: p is params[0], False)
    trained(opt, params, 10)
    fields = opt.state[params[1]]
    trained(opt, params, 20)
    assert opt._state_access.may_be_referenced
    del fields
    trained(opt, params, 70)
    assert not opt._state_access.may_be_referenced


def test_state_in_a_dict_subclass_is_checked(monkeypatch):
    class Fields(dict):
        pass

    opt, params = made()
    opt.state[params[0]] = Fields(opt.state[params[0]])
    count = count_state_checks(monkeypatch)
    trained(opt, params, 20)
    assert len(count) == 20


def zeroed(opt, p):
    opt.state[p] = {name: torch.zeros_like(x) for name, x in opt.state[p].items()}


EDITS = {
    "replaced": zeroed,
    "cleared": lambda opt, p: opt.state.pop(p),
    "an entry": lambda opt, p: opt.state[p].update(exp_avg=torch.full_like(p, 0.25)),
    "data": lambda opt, p: setattr(opt.state[p]["exp_avg"], "data", torch.full_like(p, 0.25)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("shapes", [SHAPES, [(4, 4)] * 5], ids=["alone", "packed"])
def test_edit_while_the_parameter_has_no_gradient_takes_effect(edit, shapes):
    """As in a GAN: the parameter is active again some steps later and continues from the edited state."""
    opt, params = made(shapes=shapes)
    theirs = [p.detach().clone().requires_grad_() for p in params]
    twin = torch.optim.AdamW(theirs, lr=0.01)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))  # torch does not copy the tensors
    for each, ps in ((opt, params), (twin, theirs)):
        edit(each, ps[0])
    for absent in (True, True, True, False, False):
        grads = random_grads(params)
        grads[0] = None if absent else grads[0]
        for each, ps in ((opt, params), (twin, theirs)):
            set_grads(ps, grads)
            each.step()
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        assert opt.state[p]["step"] == twin.state[q]["step"]


@pytest.mark.usefixtures("standard_promotion")
def test_a_change_while_a_step_is_under_way_is_followed_by_the_next():
    edits = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: edits.pop()() if edits else None)
        return inner.update(updates, state, params)

    inner = optax.trace(0.9)
    opt, params = made(optax.GradientTransformation(inner.init, update))
    edits.append(lambda: opt.state[params[0]].update(trace=torch.zeros_like(params[0])))
    trained(opt, params, 1)
    assert not edits
    set_grads(params, [torch.ones_like(p) for p in params])
    opt.step()
    assert torch.equal(opt.state[params[0]]["trace"], torch.ones_like(params[0]))


def test_state_in_a_new_dict_stays_whole():
    opt, params = made(steps=0)
    set_grads(params, [*random_grads(params)[:-1], None])
    opt.step()
    opt.state = defaultdict(dict, opt.state)
    trained(opt, params, 2)
    assert [float(opt.state[p]["step"]) for p in params] == [3.0] * 4 + [2.0]
    trained(opt, params, 70)
    assert not opt._state_access.may_be_referenced


def test_values_that_are_no_tensors_hold_nothing():
    opt, params = made()
    opt.state[params[0]]["mine"] = 3
    trained(opt, params, 8)
    assert not opt._state_access.may_be_referenced
    assert opt.state[params[0]]["mine"] == 3


class Wrapper:
    """As Lightning wraps an optimizer: a subclass of its class, over another instance."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


def test_wrappers_that_are_a_subclass_see_the_state():
    opt, params = made()
    wrapped = type("Wrapped", (Wrapper, type(opt)), {})(opt)
    assert wrapped.state is opt.state
    copied = object.__new__(type(opt))
    vars(copied).update(vars(opt))
    trained(opt, params, 8)
    copied.state[params[0]]["exp_avg"] = torch.zeros_like(params[0])
    set_grads(params, [torch.ones_like(p) for p in params])
    opt.step()
    torch.testing.assert_close(opt.state[params[0]]["exp_avg"], torch.full_like(params[0], 0.1))


@pytest.mark.parametrize("rows", [8, 5], ids=["known batch", "new batch"])
def test_a_train_step_follows_it_with_any_batch(rows):
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [torch_api.MaskedAdamW(model.parameters(), lr=0.01) for model in models]
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    train_step = torch_api.JaxTrainStep(models[0], loss, opts[0])

    def eager(x):
        opts[1].zero_grad()
        loss(models[1], x).backward()
        opts[1].step()

    for size in (8, 8, 8, rows, 8):
        x = torch.randn(size, 3)
        if size == rows:
            for model, opt in zip(models, opts, strict=True):
                zeroed(opt, model.weight)
        train_step(x)
        eager(x)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    for _ in range(3):
        train_step(x)
    assert not opts[0]._state_access.may_be_referenced
