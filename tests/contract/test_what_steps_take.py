"""Whatever `step()` accepts can be saved, loaded and copied: out-of-range hyperparameters, and a wrapper's entries in the state."""

import copy
import io
import pickle

import jax
import numpy as np
import optax
import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized

MAKE = {
    "MaskedAdamW": lambda params: torch_api.MaskedAdamW(params, lr=0.1),
    "MaskedSGD": lambda params: torch_api.MaskedSGD(params, lr=0.1),
    "MaskedLion": lambda params: torch_api.MaskedLion(params, lr=0.1),
    "MaskedLamb": lambda params: torch_api.MaskedLamb(params, lr=0.1),
    "ready": lambda params: torch_api.OptaxOptimizer(params, optax.adam(0.1)),
    "stateless": lambda params: torch_api.OptaxOptimizer(params, optax.sgd, lr=0.1),
    "partitioned": lambda params: torch_api.PartitionedOptimizer(
        params, {"a": (optax.adam, {"learning_rate": 0.1}), "b": optax.sgd(0.1, momentum=0.9)}, lambda name, p: "ab"[p.ndim - 1]
    ),
}


def build(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    return model, make(list(model.named_parameters()))


def step(model, opt):
    opt.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    opt.step()


def reload(model, opt):
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    return model, opt


def reload_from_file(model, opt):
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    opt.load_state_dict(torch.load(file, weights_only=True))
    return model, opt


WAYS = {
    "load": reload,
    "file": reload_from_file,
    "deepcopy": lambda model, opt: copy.deepcopy((model, opt)),
    "pickle": lambda model, opt: pickle.loads(pickle.dumps((model, opt))),
}


def put_entries(model, opt):
    for p in model.parameters():
        opt.state[p]["slow_buffer"] = torch.full_like(p, 7.0)
        opt.state[p]["wrapper"] = {"calls": 3, "norms": [torch.tensor(2.0)]}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("name", "freezes"), [(name, name in ("MaskedSGD", "ready")) for name in MAKE])
def test_state_entries_of_a_wrapper_are_saved_and_loaded(name, freezes):
    model, opt = build(MAKE[name])
    if freezes:
        opt.set_trainable([model[0].weight], False)
    step(model, opt)
    put_entries(model, opt)
    step(model, opt)
    twin, other = build(MAKE[name])
    twin.load_state_dict(model.state_dict())
    saved = opt.state_dict()
    other.load_state_dict(saved)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        entries = other.state[q]
        assert (entries["slow_buffer"] == 7.0).all()
        assert entries["slow_buffer"].data_ptr() != opt.state[p]["slow_buffer"].data_ptr()
        assert (entries["wrapper"]["calls"], entries["wrapper"]["norms"][0].item()) == (3, 2.0)
    step(model, opt)
    step(twin, other)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert opt.state[p].keys() == other.state[q].keys()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "load"])
def test_state_entries_of_a_wrapper_are_copied(way):
    model, opt = build(torch_api.MaskedAdamW)
    put_entries(model, opt)
    step(model, opt)
    other_model, other = WAYS[way](model, opt)
    assert all((other.state[p]["slow_buffer"] == 7.0).all() for p in other_model.parameters())
    step(other_model, other)


def test_state_entries_of_a_wrapper_load_before_the_first_step():
    model, opt = build(torch_api.MaskedAdamW)
    put_entries(model, opt)
    reload(model, opt)
    assert all(opt.state[p].keys() == {"slow_buffer", "wrapper"} for p in model.parameters())
    saved = opt.state_dict()
    saved["state"] = {0: {"square_avg": torch.zeros(3, 3)}}
    with pytest.raises(ValueError, match=r"0\.weight.*square_avg.*exp_avg"):
        opt.load_state_dict(saved)
    step(model, opt)
    assert (opt.state[model[0].weight]["slow_buffer"] == 7.0).all()


def test_optax_state_has_no_entries_of_a_wrapper():
    model, opt = build(MAKE["MaskedLion"])
    step(model, opt)
    expected = torch_api.to_optax_state(opt)
    put_entries(model, opt)
    got = torch_api.to_optax_state(opt)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
    torch_api.load_optax_state(opt, jax.tree.map(np.asarray, got))
    assert (opt.state[model[0].bias]["slow_buffer"] == 7.0).all()


class LookAhead:
    """Slow weights in the state of another optimizer, as in timm's Lookahead."""

    def __init__(self, base):
        self.base, self.param_groups, self.zero_grad = base, base.param_groups, base.zero_grad
        for group in self.param_groups:
            group.setdefault("lookahead_alpha", 0.5)

    def step(self):
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.base.state[p].setdefault("slow_buffer", p.detach().clone())
                    slow.add_(p.detach() - slow, alpha=group["lookahead_alpha"])
                    p.detach().copy_(slow)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, saved):
        self.base.load_state_dict(saved)
        self.param_groups = self.base.param_groups


@pytest.mark.parametrize("name", ["MaskedSGD", "MaskedLion"])
def test_lookahead_may_wrap_a_masked_optimizer(name):
    def train(reloads):
        model, opt = build(lambda params: LookAhead(getattr(torch_api, name)(params, lr=0.1, mask="1.*")))
        for _ in range(3):
            step(model, opt)
            if reloads:
                reload(model, opt)
        assert "slow_buffer" in opt.base.state[model[0].weight]
        return [p.detach().clone() for p in model.parameters()]

    for p, q in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(p, q)


CHANGES = [(change, way) for change in ({"lr": -0.05}, {"betas": (0.5, 1.0)}) for way in WAYS]
CHANGES += [({"lr": np.float32(0.05)}, "file"), ({"lr": jax.numpy.float32(0.05)}, "file"), ({"lr": jax.numpy.float32(0.05)}, "load")]


@pytest.mark.parametrize(("change", "way"), CHANGES)
def test_hyperparameters_written_by_a_scheduler_are_saved_and_loaded(change, way):
    (model, opt), (expected, theirs) = (build(cls) for cls in (torch_api.MaskedAdamax, torch.optim.Adamax))
    for tensors, optimizer in ((model, opt), (expected, theirs)):
        step(tensors, optimizer)
        optimizer.param_groups[0].update({key: float(x) if tensors is expected and key == "lr" else x for key, x in change.items()})
        step(tensors, optimizer)
    model, opt = WAYS[way](model, opt)
    opt.param_groups[0]["maximize"] = theirs.param_groups[0]["maximize"] = True  # the next step needs a new program
    for tensors, optimizer in ((model, opt), (expected, theirs)):
        step(tensors, optimizer)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_out_of_range_hyperparameters_raise_in_the_call_that_gives_them():
    model, opt = build(torch_api.MaskedAdamW)
    opt.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="learning rate"):
        opt.add_param_group({"params": [("a", torch.nn.Parameter(torch.ones(2)))], "lr": -1.0})
    opt.add_param_group({"params": [("a", torch.nn.Parameter(torch.ones(2)))], "lr": 0.5})
    step(model, opt)
    with pytest.raises(ValueError, match="learning rate"):
        torch_api.MaskedAdamW(model.parameters(), lr=-1.0)
    opt.param_groups[0]["lr"] = "fast"
    with pytest.raises((TypeError, ValueError), match="fast"):
        step(model, opt)
