"""Classes of optax's optimizers match optax in pure JAX; schedule-free weights for evaluation."""

import copy
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from oracles import CLOSE, movement_error
from signatures import SWITCHES, own_parameters

import bridge
import torch_api
from torch_api import optax_optimizers

pytestmark = [pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]

# The class without "Masked" -> (optax's function, options to compare with optax). Options differ enough from the defaults to show.
CASES = {
    "Lion": (optax.lion, [{}, {"b1": 0.8, "b2": 0.95, "weight_decay": 0.1}]),
    "Lamb": (optax.lamb, [{}, {"b1": 0.8, "eps": 1e-3, "weight_decay": 0.1}]),
    "Lars": (optax.lars, [{}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}, {"trust_ratio_mask": False}]),
    "AdaBelief": (optax.adabelief, [{}, {"b2": 0.9, "eps": 1e-8, "nesterov": True}]),
    "Yogi": (optax.yogi, [{}, {"b1": 0.8, "eps": 1e-2}]),
    "ScheduleFreeAdamW": (optax.contrib.schedule_free_adamw, [{}, {"b1": 0.95, "weight_decay": 0.1}, {"warmup_steps": 5}]),
}
ALL = [(name, options) for name, (_, all_) in CASES.items() for options in all_]
# The name of optax's argument that selects the parameters that decay.
DECAY_MASKS = {
    name: key
    for name, (function, _) in CASES.items()
    for key in ("mask", "weight_decay_mask")
    if key in inspect.signature(function).parameters
}


def make(name, params, **options):
    return getattr(torch_api, f"Masked{name}")(params, **options)


def parameters():
    return {"body.weight": torch.nn.Parameter(torch.randn(4, 3)), "body.bias": torch.nn.Parameter(torch.randn(5))}


def run_both(name, options, steps=20, wrong=1.0, **engine):
    """Return end points of ours and of optax with equal gradients, the starts, and our optimizer."""
    params = parameters()
    start = {n: p.detach().clone() for n, p in params.items()}
    tree = {n: jnp.array(p.detach().numpy().copy()) for n, p in params.items()}
    optimizer = make(name, params.items(), lr=0.01, **options, **engine)
    tx = CASES[name][0](learning_rate=0.01 * wrong, **options)
    state, update = tx.init(tree), jax.jit(tx.update)
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.randn_like(p)
        updates, state = update({n: jnp.array(p.grad.numpy()) for n, p in params.items()}, state, tree)
        tree = optax.apply_updates(tree, updates)
        optimizer.step()
    return params, {n: torch.tensor(np.array(x)) for n, x in tree.items()}, start, optimizer, state


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), ALL, ids=str)
def test_each_class_moves_as_in_optax(name, options):
    ours, theirs, start, _, _ = run_both(name, options)
    # Schedule-free recovers its average from the parameters at each step, (y - (1 - b1) z) / b1, which amplifies rounding errors.
    bound = 1e-4 if name == "ScheduleFreeAdamW" else max(CLOSE, 1e-5)
    assert max(movement_error(ours[n], theirs[n], start[n]) for n in ours) < bound


def test_state_dtypes_reach_optax():
    """Check only the dtypes: in bfloat16 most elements of the momentum differ even between optax with and without jit."""
    params = parameters()
    for name, options in (("Lion", {"mu_dtype": jnp.bfloat16}), ("ScheduleFreeAdamW", {"state_dtype": torch.bfloat16})):
        optimizer = make(name, params.items(), lr=0.01, **options)
        for p in params.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
        field = "mu" if name == "Lion" else "z"
        assert all(optimizer.state[p][field].dtype is torch.bfloat16 for p in params.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_comparison_with_optax_detects_a_wrong_rate(name):
    ours, theirs, start, _, _ = run_both(name, {}, wrong=1.001)
    assert max(movement_error(ours[n], theirs[n], start[n]) for n in ours) > 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_masks_freeze_and_checkpoints_resume_without_compiling(name):
    params = parameters()
    frozen = params["body.bias"].detach().clone()
    optimizer = make(name, params.items(), lr=0.01, mask="*.weight")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def advance(optimizer, params, steps):
        for _ in range(steps):
            for p in params.values():
                p.grad = torch.randn_like(p)
            optimizer.step()

    advance(optimizer, params, 1)
    compiled = bridge.compilations()
    for step in range(5):
        schedule.step()
        optimizer.param_groups[0]["b1" if name != "Lars" else "momentum"] = 0.8 + 0.01 * step
        advance(optimizer, params, 1)
    if {"b1", "lr"} & optimizer.defaults.keys() <= dict(
        optimizer._hyperparam_table.transforms[0].traced_hyperparams
    ).keys():  # an older optax cannot trace lr
        assert bridge.compilations() == compiled
    assert torch.equal(params["body.bias"], frozen)
    assert params["body.bias"] not in optimizer.state
    twins = {n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()}
    resumed = make(name, twins.items(), lr=0.5, mask="*.weight")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((optimizer, params), (resumed, twins)):
        torch.manual_seed(3)
        advance(*each, 3)
    assert all(torch.equal(p, twins[n]) for n, p in params.items())


@pytest.mark.parametrize("name", DECAY_MASKS)
def test_decay_mask_replaces_the_mask_of_optax(name):
    key = DECAY_MASKS[name]
    params = parameters()
    tree = {n: jnp.array(p.detach().numpy().copy()) for n, p in params.items()}
    optimizer = make(name, params.items(), lr=0.01, weight_decay=0.5, decay_mask={"body.weight": True, "body.bias": False})
    tx = CASES[name][0](0.01, weight_decay=0.5, **{key: {"body.weight": True, "body.bias": False}})
    for p in params.values():
        p.grad = torch.randn_like(p)
    updates, _ = tx.update({n: jnp.array(p.grad.numpy()) for n, p in params.items()}, tx.init(tree), tree)
    optimizer.step()
    for n, p in params.items():
        torch.testing.assert_close(p.detach(), torch.tensor(np.array(tree[n] + updates[n])))


@pytest.mark.quick
def test_each_class_is_exported_and_has_a_case():
    here = {
        cls.__name__ for cls in vars(optax_optimizers).values() if isinstance(cls, type) and cls.__module__ == optax_optimizers.__name__
    }
    assert here == {f"Masked{name}" for name in CASES}
    assert here <= set(torch_api.__all__)


def recorded(monkeypatch, name, *args, **options):
    """Return the transformation and the arguments that a class gives to `OptaxOptimizer`."""
    found = []
    monkeypatch.setattr(torch_api.OptaxOptimizer, "__init__", lambda _, params, tx, **arguments: found.append((tx, arguments)))
    make(name, [], *args, **options)
    return found[0]


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_each_argument_reaches_optax_under_its_name(name, monkeypatch):
    names = list(own_parameters(getattr(torch_api, f"Masked{name}"), without=("params", "betas", *SWITCHES)))
    values = {n: 0.5 + 0.01 * i for i, n in enumerate(names)}
    assert recorded(monkeypatch, name, **values) == (CASES[name][0], values)
    betas = {n: value for n, value in values.items() if n in ("b1", "b2", "b3")}
    if betas:
        found = recorded(monkeypatch, name, lr=0.1, betas=tuple(betas.values()))[1]
        assert betas.items() <= found.items()
        assert "betas" not in found


@pytest.mark.quick
def test_arguments_are_those_of_optax():
    for name, (function, _) in CASES.items():
        theirs = {n: p.default for n, p in inspect.signature(function).parameters.items() if n not in ("mask", "state_dtype")}
        ours = own_parameters(getattr(torch_api, f"Masked{name}"), without=("params", "betas", *SWITCHES))
        ours = {n: p.default for n, p in ours.items()}
        ours = {"learning_rate" if n == "lr" else n: default for n, default in ours.items()}
        assert list(ours.items()) == list(theirs.items()), name


# ---------------------------------------------------------------------- schedule-free


def test_eval_params_gives_optax_weights_and_restores_the_training_weights():
    ours, theirs, start, optimizer, state = run_both("ScheduleFreeAdamW", {})
    expected = optax.contrib.schedule_free_eval_params(state, {n: jnp.array(x.numpy()) for n, x in theirs.items()})
    before = {n: p.detach().clone() for n, p in ours.items()}
    places = {n: (id(p), p.data_ptr()) for n, p in ours.items()}
    with optimizer.eval_params():
        for n, p in ours.items():
            assert movement_error(p, torch.tensor(np.array(expected[n])), start[n]) < 1e-4
            assert not torch.equal(p, before[n])
        assert places == {n: (id(p), p.data_ptr()) for n, p in ours.items()}
    assert all(torch.equal(p, before[n]) for n, p in ours.items())
    assert places == {n: (id(p), p.data_ptr()) for n, p in ours.items()}
    optimizer.step()


@pytest.mark.parametrize("inside", ["an error", "a step", "itself again"])
def test_error_inside_eval_params_restores_the_training_weights(inside):
    ours, _, _, optimizer, _ = run_both("ScheduleFreeAdamW", {}, steps=3)
    before = {n: p.detach().clone() for n, p in ours.items()}
    error = ZeroDivisionError if inside == "an error" else RuntimeError

    def act():
        with optimizer.eval_params():
            if inside == "an error":
                _ = 1 / 0
            elif inside == "a step":
                optimizer.step()
            else:
                act()

    with pytest.raises(error, match="division" if inside == "an error" else r"inside eval_params\(\) the parameters hold other values"):
        act()
    assert all(torch.equal(p, before[n]) for n, p in ours.items())
    optimizer.step()
    with optimizer.eval_params():
        pass


def test_eval_params_leaves_frozen_and_new_parameters_unchanged():
    params = parameters()
    optimizer = torch_api.MaskedScheduleFreeAdamW(params.items(), mask="*.weight")
    values = {n: p.detach().clone() for n, p in params.items()}
    with optimizer.eval_params():
        assert all(torch.equal(p, values[n]) for n, p in params.items())
    assert not optimizer.state  # eval_params makes no state
    for _ in range(3):
        for p in params.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
    values = {n: p.detach().clone() for n, p in params.items()}
    with optimizer.eval_params():
        assert torch.equal(params["body.bias"], values["body.bias"])
        assert not torch.equal(params["body.weight"], values["body.weight"])
