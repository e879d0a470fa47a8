"""Schedulers that cycle momentum work with optimizers that name it b1; `betas` is an alias of b1 and b2 there."""

import copy
import inspect
import io
import pickle

import jax
import numpy as np
import optax
import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

GRADIENTS = (1.0, -0.2, 0.5, 2.0, -0.7, 0.1)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax itself is not clean under strict promotion
        yield


def partitioned(params, first, second):
    transforms = {"a": first, "b": second}
    return torch_api.PartitionedOptimizer([(f"p{i}", p) for i, p in enumerate(params)], transforms, labels={"p0": "a", "p1": "b"})


# class without "Masked" -> the names of its betas, of those that have b1, as in optax
BETAS = {
    name.removeprefix("Masked"): tuple(key for key in inspect.signature(getattr(torch_api, name)).parameters if key in ("b1", "b2", "b3"))
    for name in torch_api.__all__
    if name.startswith("Masked") and "b1" in inspect.signature(getattr(torch_api, name)).parameters
}

# name -> (make an optimizer of parameters, the key of the first momentum in its groups)
MAKE = {name: (lambda params, name=name: getattr(torch_api, f"Masked{name}")(params, lr=1e-3), ("b1",)) for name in BETAS} | {
    "Lars": (lambda params: torch_api.MaskedLars(params, lr=1e-3), ("momentum",)),
    "optax.adamw": (lambda params: torch_api.OptaxOptimizer(params, optax.adamw, lr=1e-3), ("b1",)),
    "optax.adan": (lambda params: torch_api.OptaxOptimizer(params, optax.adan, lr=1e-3), ("b1",)),
    "bridge.Adam": (lambda params: torch_api.OptaxOptimizer(params, bridge.Adam(lr=1e-3)), ("beta1",)),
    "bridge.Momentum": (lambda params: torch_api.OptaxOptimizer(params, bridge.Momentum(lr=1e-3, beta=0.9)), ("beta",)),
    "partitioned": (
        lambda params: partitioned(params, (optax.lion, {"learning_rate": 1e-3}), (optax.sgd, {"learning_rate": 1e-3, "momentum": 0.9})),
        ("b1", "momentum"),
    ),
    "multi": (
        lambda params: torch_api.MultiOptimizer([(f"p{i}", p) for i, p in enumerate(params)], ("p0", bridge.Adam(lr=1e-3))),
        ("beta1", "lr"),
    ),
}
SCHEDULES = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, base_lr=1e-3, max_lr=0.1, step_size_up=5),
}


def parameters():
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]


def set_grads(params, number):
    for p in params:
        p.grad = torch.linspace(-1, 2, p.numel()).view_as(p) * GRADIENTS[number]


def values_of_torch(schedule):
    """Return the lr and the first beta of torch.optim.Adam at each step."""
    params = parameters()
    optimizer = torch.optim.Adam(params, lr=1e-3)
    scheduler, seen = SCHEDULES[schedule](optimizer), []
    for number in range(len(GRADIENTS)):
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["betas"][0]))
        set_grads(params, number)
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("schedule", "name"), [*(("OneCycleLR", name) for name in MAKE), ("CyclicLR", "Lion"), ("CyclicLR", "Lars")])
def test_first_momentum_is_cycled_as_in_torch(schedule, name):
    make, keys = MAKE[name]
    values = values_of_torch(schedule)
    params, twins = parameters(), parameters()
    optimizer, reference = make(params), make(twins)
    scheduler = SCHEDULES[schedule](optimizer)
    for number, (lr, momentum) in enumerate(values):
        for group, key in zip(optimizer.param_groups, keys, strict=True):
            assert group["lr"] == pytest.approx(lr)
            assert group[key] == pytest.approx(lr if key == "lr" else momentum)
        for group, key in zip(reference.param_groups, keys, strict=True):
            group[key] = momentum
            group["lr"] = lr
        for own, stepped in ((params, optimizer), (twins, reference)):
            set_grads(own, number)
            stepped.step()
        scheduler.step()
    assert optimizer.cache_info().compilations <= 2
    torch.testing.assert_close(params, twins, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", BETAS)
def test_betas_set_b1_and_b2(name):
    made, names = getattr(torch_api, f"Masked{name}"), BETAS[name]
    values = (0.8, 0.5, 0.4)[: len(names)]
    for betas in (values, [*values], np.array(values), torch.tensor(values, dtype=torch.float64)):
        group = made(parameters(), lr=0.1, betas=betas).param_groups[0]
        assert tuple(float(group[key]) for key in names) == values
    for key, value in zip(names, values, strict=True):
        with pytest.raises(TypeError, match=f"both betas and {key} are given"):
            made(parameters(), lr=0.1, betas=values, **{key: value})
    for betas in (values[:-1], (*values, 0.5), 0.8, ()):
        with pytest.raises(ValueError, match=rf"betas is .*; expected {len(names)} numbers, for {', '.join(names)}"):
            made(parameters(), lr=0.1, betas=betas)
    first, second = (0.7, 0.6, 0.3)[: len(names)], (0.5, 0.4, 0.2)[: len(names)]
    groups = [{"params": [p], "betas": first} for p in parameters()]
    optimizer = made(groups, lr=0.1)
    optimizer.add_param_group({"params": parameters()[:1], "betas": second})
    assert [tuple(g[key] for key in names) for g in optimizer.param_groups] == [first, first, second]


def test_betas_set_the_arguments_of_factories_and_labels():
    optimizer = torch_api.OptaxOptimizer(parameters(), optax.adamw, lr=0.1, betas=(0.8, 0.5))
    assert (optimizer.param_groups[0]["b1"], optimizer.param_groups[0]["b2"]) == (0.8, 0.5)
    optimizer = torch_api.OptaxOptimizer(parameters(), optax.adan, lr=0.1, betas=(0.8, 0.5, 0.4))
    assert (optimizer.param_groups[0]["b1"], optimizer.param_groups[0]["b3"]) == (0.8, 0.4)
    optimizer = torch_api.OptaxOptimizer(parameters(), bridge.Adam(lr=0.1), betas=(0.8, 0.5))
    assert (optimizer.param_groups[0]["beta1"], optimizer.param_groups[0]["beta2"]) == (0.8, 0.5)
    first = (optax.lion, {"learning_rate": 0.1, "betas": (0.8, 0.5)})
    optimizer = partitioned(parameters(), first, optax.sgd(0.1))
    assert (optimizer.param_groups[0]["b1"], optimizer.param_groups[0]["b2"]) == (0.8, 0.5)
    own = [{"params": [("p0", parameters()[0])], "betas": (0.7, 0.6)}]
    optimizer = torch_api.PartitionedOptimizer(own, {"a": (optax.lion, {"learning_rate": 0.1})}, labels={"": "a"})
    assert (optimizer.param_groups[0]["b1"], optimizer.param_groups[0]["b2"]) == (0.7, 0.6)
    with pytest.raises(TypeError, match="both betas and b1 are given"):
        torch_api.OptaxOptimizer(parameters(), optax.adamw, lr=0.1, betas=(0.8, 0.5), b1=0.5)
    with pytest.raises(TypeError, match="unknown argument 'betas'"):
        torch_api.OptaxOptimizer(parameters(), optax.sgd, lr=0.1, betas=(0.8, 0.5))
    with pytest.raises(TypeError, match="unknown argument 'betas'"):
        torch_api.MaskedLars(parameters(), lr=0.1, betas=(0.8, 0.5))


def test_betas_is_an_alias_and_not_a_group_entry():
    params = parameters()
    optimizer = torch_api.MaskedLion(params, lr=0.1, b1=0.8, b2=0.5)
    group = optimizer.param_groups[0]
    assert "betas" in optimizer.defaults
    assert "betas" in group
    assert group["betas"] == group.get("betas") == group.setdefault("betas", (0.1, 0.1)) == (0.8, 0.5)
    group["betas"] = (0.7, 0.4)
    assert (group["b1"], group["b2"]) == (0.7, 0.4)
    group["b1"] = 0.6
    assert group["betas"] == (0.6, 0.4)
    group.update(betas=(0.3, 0.2), lr=0.5)
    assert (group["b1"], group["b2"], group["lr"]) == (0.3, 0.2, 0.5)
    for wrong in ((0.9,), 0.9, (0.9, 0.9, 0.9)):
        with pytest.raises(ValueError, match="betas"):
            group["betas"] = wrong
    assert group["betas"] == (0.3, 0.2)
    assert "betas" not in {**group, **dict(group), **optimizer.state_dict()["param_groups"][0]}
    with pytest.raises(KeyError):
        group["beta"]
    assert "betas" not in torch_api.MaskedLars(params, lr=0.1).defaults


def test_schedulers_work_on_copies_and_loaded_optimizers():
    params = parameters()
    optimizer = torch_api.MaskedLion(params, lr=0.1)
    scheduler = SCHEDULES["OneCycleLR"](optimizer)
    set_grads(params, 0)
    optimizer.step()
    scheduler.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch_api.MaskedLion(parameters(), lr=0.5)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
        SCHEDULES["OneCycleLR"](other)
        assert other.param_groups[0]["b1"] == 0.95
    saved = optimizer.state_dict()
    saved["param_groups"][0]["betas"] = saved["param_groups"][0].pop("b1"), saved["param_groups"][0].pop("b2")
    loaded.load_state_dict(saved)  # as a Lion of another library saves them
    assert loaded.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]


def test_betas_of_a_plain_dict_group_are_read():
    params, twins = parameters(), parameters()
    optimizer, reference = torch_api.MaskedLion(params, lr=0.1), torch_api.MaskedLion(twins, lr=0.1)
    group = optimizer.param_groups[0] = dict(optimizer.param_groups[0])
    for number, b1 in enumerate((0.9, 0.5, 0.2)):
        group["betas"] = (b1, 0.8)
        reference.param_groups[0].update(b1=b1, b2=0.8)
        for own, stepped in ((params, optimizer), (twins, reference)):
            set_grads(own, number)
            stepped.step()
        assert group["b1"] == b1
    torch.testing.assert_close(params, twins, rtol=0, atol=0)


def test_train_step_uses_the_cycled_momentum():
    torch.manual_seed(0)
    one = torch.nn.Linear(2, 2)
    other = copy.deepcopy(one)
    optimizer, reference = torch_api.MaskedLion(one.parameters(), lr=0.1), torch_api.MaskedLion(other.parameters(), lr=0.1)
    step = torch_api.JaxTrainStep(one, lambda model, x: (model(x) ** 2).mean(), optimizer)
    scheduler, x = SCHEDULES["CyclicLR"](optimizer), torch.ones(3, 2)
    for _ in range(4):
        reference.param_groups[0].update(lr=optimizer.param_groups[0]["lr"], b1=optimizer.param_groups[0]["b1"])
        step(x)
        reference.zero_grad()
        (other(x) ** 2).mean().backward()
        reference.step()
        scheduler.step()
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Lion", "optax.adamw", "bridge.Adam", "partitioned", "multi", "Lars"])
def test_groups_and_defaults_are_saved_as_plain_dicts(name):
    optimizer = MAKE[name][0](parameters())
    file = io.BytesIO()
    torch.save([optimizer.param_groups, optimizer.defaults], file)
    file.seek(0)
    groups, defaults = torch.load(file, weights_only=True)
    for loaded, own in zip([*groups, defaults], [*optimizer.param_groups, optimizer.defaults], strict=True):
        assert isinstance(loaded, dict)
        assert type(loaded).__module__ in ("builtins", "collections")
        plain = lambda group: {key: value for key, value in group.items() if key != "params"}  # noqa: E731
        assert plain(loaded) == plain(dict(own))
        assert all(map(torch.equal, loaded.get("params", ()), own.get("params", ())))


BYPASSES = {
    "|=": lambda group, betas: group.__ior__({"betas": betas}),
    "dict.update": lambda group, betas: dict.update(group, betas=betas),
    "update": lambda group, betas: group.update([("betas", betas)]),
    "dict.__setitem__": lambda group, betas: dict.__setitem__(group, "betas", betas),
}


@pytest.mark.parametrize("way", BYPASSES)
def test_betas_are_read_however_they_are_written(way):
    params, twins = parameters(), parameters()
    optimizer, reference = torch_api.MaskedLion(params, lr=0.1), torch_api.MaskedLion(twins, lr=0.1, b1=0.5, b2=0.8)
    set_grads(params, 0)

    def write_and_step(betas):
        BYPASSES[way](optimizer.param_groups[0], betas)
        optimizer.step()

    with pytest.raises(ValueError, match=r"betas is .*; expected 2 numbers, for b1, b2"):
        write_and_step((0.5, 0.8, 0.9))
    torch.testing.assert_close(params, parameters(), rtol=0, atol=0)
    BYPASSES[way](optimizer.param_groups[0], (0.5, 0.8))
    for own, stepped in ((params, optimizer), (twins, reference)):
        set_grads(own, 0)
        stepped.step()
    group = optimizer.param_groups[0]
    assert group["betas"] == (group["b1"], group["b2"]) == (0.5, 0.8)
    assert "betas" not in optimizer.state_dict()["param_groups"][0]
    torch.testing.assert_close(params, twins, rtol=0, atol=0)
