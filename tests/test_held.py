"""Steps look for changes of the state only while someone may hold a part of it."""

import copy
import pickle

import optax
import pytest
import torch
from oracles import random_grads, same, set_grads

import torch_api
from torch_api import held
from torch_api import optimizer as engine

SHAPES = [(5, 7), (6,), (4, 3), (), (9,)]


def made(tx=None, steps=5):
    params = [torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in SHAPES]
    opt = torch_api.MaskedAdamW(params, lr=0.01) if tx is None else torch_api.OptaxOptimizer(params, tx)
    trained(opt, params, steps)
    return opt, params


def trained(opt, params, steps):
    for _ in range(steps):
        set_grads(params, random_grads(params))
        opt.step()


def looks(monkeypatch):
    """Counts the steps that look at state tensors from now on."""
    count = []
    monkeypatch.setattr(engine, "in_place", lambda leaves: (count.append(1), held.in_place(leaves))[1])
    return count


def test_state_that_nobody_has_asked_for_is_not_looked_at(monkeypatch):
    opt, params = made()
    count = looks(monkeypatch)
    trained(opt, params, 8)
    assert not count
    opt.state[params[0]]["exp_avg"].norm()
    trained(opt, params, 1)
    assert len(count) == 1
    trained(opt, params, 8)
    assert len(count) == 1  # it was let go again


HELD = {
    "the state": lambda opt, p: opt.state,
    "the dict of a parameter": lambda opt, p: opt.state[p],
    "a tensor": lambda opt, p: opt.state[p]["exp_avg_sq"],
    "a scalar": lambda opt, p: opt.state[p]["step"],
    "a state_dict": lambda opt, p: opt.state_dict(),
    "an iterator": lambda opt, p: iter(opt.state.values()),
}


@pytest.mark.parametrize("ask", HELD.values(), ids=HELD)
def test_state_that_is_held_is_looked_at_for_as_long_as_it_is(ask, monkeypatch):
    opt, params = made()
    something = ask(opt, params[1])
    count = looks(monkeypatch)
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
def test_a_change_through_what_was_held_for_long_is_followed(change):
    """As in an optimizer that begins with the changed state."""
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


def test_a_tensor_held_while_its_dict_is_not():
    opt, params = made()
    tensor = opt.state[params[0]]["exp_avg"]
    trained(opt, params, 20)
    tensor.data = torch.zeros_like(tensor)
    set_grads(params, [torch.ones_like(p) for p in params])
    opt.step()
    torch.testing.assert_close(opt.state[params[0]]["exp_avg"], torch.full_like(tensor, 0.1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_the_state_and_lets_it_go_too(copied, monkeypatch):
    opt, params = made()
    twin, others = copied((opt, params))
    assert same([x for fields in opt.state.values() for x in fields.values()], [x for f in twin.state.values() for x in f.values()])
    trained(twin, others, 8)
    count = looks(monkeypatch)
    trained(twin, others, 8)
    assert not count


def test_a_new_state_takes_the_place_of_the_old():
    opt, params = made()
    old = opt.state
    opt.state = type(old)(dict)
    assert opt.state is not old
    assert not opt.state
    trained(opt, params, 3)
    assert all(fields["step"] == 3 for fields in opt.state.values())


@pytest.mark.usefixtures("standard_promotion")
def test_of_state_that_all_parameters_share_too(monkeypatch):
    opt, params = made(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    count = looks(monkeypatch)
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
def test_shared_state_of_parameters_that_are_frozen_meanwhile(monkeypatch):
    """Their dicts show the shared tensors, too: none of them may be taken for one that another holds."""
    opt, params = made(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    opt.set_trainable(lambda name, p: p is params[0], False)
    trained(opt, params, 10)
    fields = opt.state[params[1]]
    trained(opt, params, 20)
    assert opt._is_out
    del fields
    trained(opt, params, 70)
    assert not opt._is_out


def test_other_kinds_of_dicts_are_looked_at(monkeypatch):
    class Fields(dict):
        pass

    opt, params = made()
    opt.state[params[0]] = Fields(opt.state[params[0]])
    count = looks(monkeypatch)
    trained(opt, params, 20)
    assert len(count) == 20
