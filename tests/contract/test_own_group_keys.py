"""The user's own keys in param groups are kept, saved, loaded and ignored, as in torch.optim; a misspelled known key raises."""

import copy
import pickle

import jax
import optax
import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax.adam fails under strict promotion
        yield


OWN = {
    "lr_mult": 5,
    "decay_mult": 0,
    "lr_multiplier": 1.0,
    "wd_mult": 0.1,
    "group_name": "layer_3",
    "layer_id": 3,
    "is_last_layer": False,
    "stage": None,
    "task": "a",
    "rho": 0.05,
    "adaptive": False,
    "initial_weight_decay": 0.01,
    "initial_wd": 0.1,
    "min_momentum": 0.1,
    "tags": ["a", "b"],
    "config": {"deep": (1, 2)},
    7: "seven",
    "use_muon": True,
    "d0": 1e-6,
    "warmup_steps": 10,
    "bias_correction": True,
    "lr_max": 1.0,
    "base_lr": 0.1,
}
CLASSES = {
    "AdamW": lambda groups: torch_api.MaskedAdamW(groups, lr=0.1),
    "SGD": lambda groups: torch_api.MaskedSGD(groups, lr=0.1),
    "a factory": lambda groups: torch_api.OptaxOptimizer(groups, optax.lion, lr=0.1),
    "a ready transformation": lambda groups: torch_api.OptaxOptimizer(groups, optax.adam(0.1)),
    "labels": lambda groups: torch_api.PartitionedOptimizer(
        groups, {"x": optax.sgd(0.1), "y": (optax.adam, {"lr": 0.1})}, {"0": "x", "1.weight": "x", "1.bias": "y"}
    ),
}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))


def grouped(net, own=()):
    return [
        {"params": [(f"{i}.{name}", p) for name, p in layer.named_parameters()], **(dict(own) if i else {})} for i, layer in enumerate(net)
    ]


def step(net, optimizer):
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def own_of(optimizer):
    """Return the user's keys of each group that holds parameters of the second layer."""
    return [{key: group[key] for key in OWN if key in group} for group in optimizer.param_groups if group["param_names"][0][0] == "1"]


@pytest.mark.parametrize("name", CLASSES)
def test_user_keys_are_kept_and_ignored(name):
    ends = []
    for given in (OWN, {}):
        net = model()
        optimizer = CLASSES[name](grouped(net, given))
        step(net, optimizer)
        ends.append([p.detach().clone() for p in net.parameters()])
        pickles = name in ("AdamW", "SGD", "a factory")
        for twin in (optimizer, copy.deepcopy(optimizer), *([pickle.loads(pickle.dumps(optimizer))] if pickles else [])):
            assert all(found == given for found in own_of(twin))
        saved = optimizer.state_dict()
        fresh = CLASSES[name](grouped(model()))
        fresh.load_state_dict(saved)
        assert all(found == given for found in own_of(fresh))
    assert all(map(torch.equal, *ends))


def test_user_keys_may_be_added_later():
    net = model()
    first, second = grouped(net)
    optimizer = torch_api.MaskedAdamW([first], lr=0.1)
    optimizer.add_param_group({**second, "lr_mult": 5})
    optimizer.param_groups[0]["layer_id"] = 3
    step(net, optimizer)
    train = torch_api.JaxTrainStep(net, lambda model, x: model(x).square().sum(), optimizer)
    optimizer.param_groups[0]["depth"] = 1
    train(torch.ones(1, 3))
    assert [group.get("lr_mult") for group in optimizer.param_groups] == [None, 5]
    other = torch_api.MaskedAdamW(grouped(model()), lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (other.param_groups[0]["layer_id"], other.param_groups[0]["depth"], other.param_groups[1]["lr_mult"]) == (3, 1, 5)
    theirs = torch.optim.AdamW(grouped(model()), lr=0.1)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["layer_id"] == 3


def test_new_user_key_keeps_the_cached_step():
    net = model()
    optimizer = torch_api.MaskedAdamW(grouped(net), lr=0.1)
    step(net, optimizer)
    before = optimizer.cache_info()
    optimizer.param_groups[0]["lr_mult"] = 5
    step(net, optimizer)
    after = optimizer.cache_info()
    assert (after.hits, after.misses, after.compilations) == (before.hits + 1, before.misses, before.compilations)


NEAR = {
    "trainabel": "trainable",
    "wieght_decay": "weight_decay",
    "weihgt_deacy": "weight_decay",
    "weightDecay": "weight_decay",
    "learning_rates": "lr",
    "learnig_rate": "lr",
    "LR": "lr",
    "lable": "label",
    "masks": "mask",
    "lrscale": "lr_scale",
    "wd_scales": "wd_scale",
    "beta": "betas",
    "amsgrd": "amsgrad",
    "maximise": "maximize",
    "fusde": "fused",
    "inital_lr": "initial_lr",
}


@pytest.mark.parametrize("key", NEAR)
def test_misspelled_key_raises_and_names_the_known_key(key):
    text = rf"unknown key '{key}' in a param group.*Did you mean.*'{NEAR[key]}'"
    with pytest.raises(ValueError, match=text):
        torch_api.MaskedAdamW(grouped(model(), {key: 0.1}))
    net = model()
    first, second = grouped(net)
    optimizer = torch_api.MaskedAdamW([first])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({**second, key: 0.1})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = 0.1
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)


def test_misspelled_key_written_later_raises_at_the_next_step():
    net = model()
    optimizer = torch_api.MaskedAdamW(grouped(net))
    train = torch_api.JaxTrainStep(net, lambda model, x: model(x).square().sum(), optimizer)
    step(net, optimizer)
    optimizer.param_groups[1]["wieght_decay"] = 0.1
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        with pytest.raises(ValueError, match="'weight_decay'"):
            step(net, optimizer)
        with pytest.raises(ValueError, match="'weight_decay'"):
            train(torch.ones(1, 3))
    assert all(map(torch.equal, before, net.parameters()))
    del optimizer.param_groups[1]["wieght_decay"]
    step(net, optimizer)
    assert not any(map(torch.equal, before, net.parameters()))


def test_group_keys_without_effect_raise():
    for own in ({"weight_decay": 0.0}, {"betas": (0.9, 0.99)}, {"eps": 1e-6}):
        with pytest.raises(ValueError, match=next(iter(own))):
            torch_api.OptaxOptimizer(grouped(model(), own), optax.sgd, lr=0.1)
    for own in ({"decay_mask": "*weight"}, {"max_grad_norm": 1.0}, {"ema_decay": 0.9}):
        with pytest.raises(ValueError, match="argument of the constructor"):
            torch_api.MaskedAdamW(grouped(model(), own))
        net = model()
        optimizer = torch_api.MaskedAdamW(grouped(net))
        step(net, optimizer)
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.param_groups[1].update(own)
        with pytest.raises(ValueError, match="argument of the constructor"):
            step(net, optimizer)
        assert all(map(torch.equal, before, net.parameters()))


def test_frozen_group_may_hold_hyperparameters_without_label():
    net = model()
    net[0].requires_grad_(False)
    first, second = grouped(net)
    optimizer = torch_api.PartitionedOptimizer(
        [{**first, "weight_decay": 0.0, "layer_id": 1}, second], {"x": (optax.adamw, {"lr": 0.1, "weight_decay": 0.1})}, {"1": "x"}
    )
    step(net, optimizer)
    assert {row["parameter"]: row["status"] for row in optimizer.report().rows} == {
        "0.weight": "frozen",
        "0.bias": "frozen",
        "1.weight": "trained",
        "1.bias": "trained",
    }


@pytest.mark.parametrize("removed", ["lr_mult", "depth"], ids=["an earlier key", "the latest key"])
def test_misspelled_key_raises_if_another_key_is_removed_at_once(removed):
    net = model()
    optimizer = torch_api.MaskedAdamW(grouped(net, {"lr_mult": 5, "depth": 1}))
    train = torch_api.JaxTrainStep(net, lambda model, x: model(x).square().sum(), optimizer)
    step(net, optimizer)
    del optimizer.param_groups[1][removed]
    optimizer.param_groups[1]["wieght_decay"] = 0.1
    before = [p.detach().clone() for p in net.parameters()]
    for call in (lambda: step(net, optimizer), lambda: train(torch.ones(1, 3))):
        with pytest.raises(ValueError, match="'weight_decay'"):
            call()
    assert all(map(torch.equal, before, net.parameters()))
    optimizer.param_groups[1][removed] = optimizer.param_groups[1].pop("wieght_decay")
    step(net, optimizer)


def test_misspelled_key_in_a_replaced_group_raises():
    net = model()
    optimizer = torch_api.MaskedAdamW(grouped(net, {"lr_mult": 5}))
    step(net, optimizer)
    last = optimizer.param_groups[1]
    optimizer.param_groups[1] = {("lr_scales" if key == "lr_mult" else key): value for key, value in last.items()}
    with pytest.raises(ValueError, match="'lr_scale'"):
        step(net, optimizer)
