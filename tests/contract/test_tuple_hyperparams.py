"""Tuple hyperparameters: every sequence of the right length is accepted; other values raise and change nothing."""

import collections.abc
import copy
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from sampling import sampled

import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax itself is not clean under strict promotion
        yield


class ListConfig(collections.abc.MutableSequence):
    """A sequence like the lists of configuration libraries: neither a list nor a tuple."""

    def __init__(self, items):
        self.items = list(items)

    def __getitem__(self, index):
        return self.items[index]

    def __setitem__(self, index, value):
        self.items[index] = value

    def __delitem__(self, index):
        del self.items[index]

    def __len__(self):
        return len(self.items)

    def insert(self, index, value):
        self.items.insert(index, value)


def paired(learning_rate, betas=(0.9, 0.99)):
    return optax.adam(learning_rate, b1=betas[0], b2=betas[1])


def partitioned(params, **hyperparams):
    return torch_api.PartitionedOptimizer(params, {"a": (paired, {"learning_rate": 0.01, **hyperparams})}, labels={"": "a"})


def optax_optimizer(params, **hyperparams):
    return torch_api.OptaxOptimizer(params, paired, lr=0.01, **hyperparams)


# (class, hyperparameter, a value, another value of the same length)
TUPLES = [
    (torch_api.MaskedAdam, "betas", (0.8, 0.99), (0.5, 0.9)),
    (torch_api.MaskedAdamW, "betas", (0.8, 0.99), (0.5, 0.9)),
    (torch_api.MaskedAdamax, "betas", (0.8, 0.99), (0.5, 0.9)),
    (torch_api.MaskedNAdam, "betas", (0.8, 0.99), (0.5, 0.9)),
    (torch_api.MaskedRAdam, "betas", (0.8, 0.99), (0.5, 0.9)),
    (torch_api.MaskedRprop, "etas", (0.4, 1.5), (0.3, 1.1)),
    (torch_api.MaskedRprop, "step_sizes", (1e-3, 5), (1e-4, 7.0)),
    (torch_api.MaskedMuon, "ns_coefficients", (3.0, -4.0, 2.0), (3.4, -4.7, 2.0)),
    (torch_api.MaskedAdafactor, "eps", (1e-3, 1e-2), (1e-4, 1e-3)),
    (optax_optimizer, "betas", (0.8, 0.99), (0.5, 0.9)),
    (partitioned, "betas", (0.8, 0.99), (0.5, 0.9)),
]
KINDS = {
    "list": list,
    "ListConfig": ListConfig,
    "numpy": np.array,
    "numpy scalars": lambda values: tuple(np.asarray(values)),
    "jax": lambda values: jnp.asarray(values, jnp.float32),
    "tensor": lambda values: torch.tensor(values, dtype=torch.float64),
    "tensors": lambda values: tuple(torch.tensor(values, dtype=torch.float64)),
}


def ids(case):
    return f"{case[0].__name__}.{case[1]}"


def made(case, **hyperparams):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    return parameter, case[0]([("w", parameter)], **hyperparams)


def step(parameter, optimizer, count=1):
    for number in range(count):
        parameter.grad = torch.arange(6.0).view(3, 2) - 2.5 + number
        optimizer.step()


def trained(case, value, edited=None):
    """Return the parameter after two steps, a checkpoint loaded into a new optimizer with defaults, and two more steps."""
    parameter, optimizer = made(case, **{case[1]: value})
    step(parameter, optimizer, 2)
    if edited is not None:
        optimizer.param_groups[0][case[1]] = edited
        step(parameter, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = case[0]([("w", parameter)])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    step(parameter, resumed, 2)
    return parameter.detach().clone()


@pytest.mark.parametrize("case", sampled(TUPLES), ids=ids)
def test_value_of_another_length_raises_and_changes_nothing(case):
    name, value = case[1], case[2]
    parameter, optimizer = made(case)
    wrong = [value[:-1], (*value, 0.5), (), 0.9, "12", (*value[:-1], "x"), (*value[:-1], torch.ones(2)), dict.fromkeys(value)]
    wrong += [] if case[0] in (optax_optimizer, partitioned) else [None]  # a factory may take None
    for has_stepped in (False, True):
        if has_stepped:
            optimizer.param_groups[0][name] = value
            step(parameter, optimizer)
        before, state = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
        for given in wrong:
            optimizer.param_groups[0][name] = given
            with pytest.raises((ValueError, TypeError), match=name):
                step(parameter, optimizer)
            assert torch.equal(parameter, before)
            after = optimizer.state_dict()["state"]
            assert after.keys() == state.keys()
            assert all(torch.equal(after[i][k], x) for i, fields in state.items() for k, x in fields.items())
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0][name] = saved["param_groups"][0][name] = value
    saved["param_groups"][0][name] = value[:-1]
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(saved)
    reference, other = made(case, **{name: value})
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        reference.copy_(parameter)
    step(parameter, optimizer)
    step(reference, other)
    assert torch.equal(parameter, reference)


@pytest.mark.parametrize("case", TUPLES[5:], ids=ids)
def test_any_sequence_is_accepted_saved_and_loaded(case):
    _, _, value, other = case
    expected, edited = trained(case, value), trained(case, value, other)
    assert not torch.equal(expected, edited)
    for kind in ("ListConfig", "numpy", "tensor"):
        torch.testing.assert_close(trained(case, KINDS[kind](value)), expected, rtol=1e-6, atol=0, msg=kind)
        torch.testing.assert_close(trained(case, value, KINDS[kind](other)), edited, rtol=1e-6, atol=0, msg=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sequence_is_accepted(kind):
    case = TUPLES[1]
    make = KINDS[kind]
    expected, edited = trained(case, case[2]), trained(case, case[2], case[3])
    torch.testing.assert_close(trained(case, make(case[2])), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(trained(case, case[2], make(case[3])), edited, rtol=1e-6, atol=0)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "betas": make((0.8, 0.99))}]
    optimizer = torch_api.MaskedAdamW(groups)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "betas": make((0.7, 0.9))})
    assert [tuple(round(float(x), 6) for x in group["betas"]) for group in optimizer.param_groups] == [(0.8, 0.99), (0.7, 0.9)]
    assert float(copy.deepcopy(optimizer).param_groups[0]["betas"][0]) == pytest.approx(0.8)


def test_value_that_is_not_a_pair_of_numbers_raises_at_construction():
    for given in ((0.9,), np.ones((1, 2)), torch.tensor(0.9), iter((0.9, 0.99)), "ab", {0.9, 0.99}, ListConfig([0.9])):
        with pytest.raises(ValueError, match="betas"):
            torch_api.MaskedAdamW([torch.nn.Parameter(torch.ones(2))], betas=given)


def test_tensor_of_betas_is_read_at_each_step():
    """The tensor is read at each step, like an lr tensor, so writes into it take effect."""
    ours, theirs = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    betas = torch.tensor([0.9, 0.99])
    optimizer, reference = torch_api.MaskedAdam([ours], betas=betas), torch.optim.Adam([theirs], betas=tuple(betas.tolist()))
    for number in range(3):
        step(ours, optimizer)
        step(theirs, reference)
        with torch.no_grad():
            betas[0] = 0.8 - 0.1 * number
        reference.param_groups[0]["betas"] = tuple(betas.tolist())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_train_step_accepts_sequences_and_refuses_another_length():
    def loss(model, x):
        return (model(x) ** 2).mean()

    torch.manual_seed(0)
    one = torch.nn.Linear(2, 2)
    other = copy.deepcopy(one)
    optimizer = torch_api.MaskedAdamW(one.parameters(), betas=ListConfig([0.8, 0.9]))
    reference = torch.optim.AdamW(other.parameters(), betas=(0.8, 0.9))
    train_step, x = torch_api.JaxTrainStep(one, loss, optimizer), torch.ones(3, 2)

    def torch_step():
        reference.zero_grad()
        loss(other, x).backward()
        reference.step()

    for betas in ((0.8, 0.9), np.array([0.5, 0.99]), ListConfig([0.6, 0.95])):
        optimizer.param_groups[0]["betas"] = betas
        reference.param_groups[0]["betas"] = tuple(map(float, betas))
        train_step(x)
        torch_step()
    before = [p.detach().clone() for p in one.parameters()]
    for betas in ((0.9,), (0.9, 0.99, 0.5), ()):
        optimizer.param_groups[0]["betas"] = betas
        with pytest.raises(ValueError, match="betas"):
            train_step(x)
        assert all(map(torch.equal, before, one.parameters()))
    optimizer.param_groups[0]["betas"] = (0.6, 0.95)
    train_step(x)
    torch_step()
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-5, atol=1e-6)


def test_argument_without_tuple_default_is_passed_unchanged():
    seen = []

    def factory(learning_rate, weights=None, betas=(0.9, 0.99)):
        seen.append((weights, betas))
        return optax.sgd(learning_rate)

    weights = np.array([1.0, 2.0])
    torch_api.OptaxOptimizer([torch.nn.Parameter(torch.ones(2))], factory, lr=0.1, weights=weights, betas=np.array([0.5, 0.25]))
    assert all(given is weights for given, _ in seen)
    assert seen[0][1] == (0.5, 0.25)


def test_integers_in_a_tuple_of_floats_are_traced():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch_api.OptaxOptimizer([parameter], paired, lr=0.1, betas=(0, 0.99))
    for first in (0, 0.5, 0.9):
        optimizer.param_groups[0]["betas"] = (first, 0.99)
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert optimizer.cache_info().compilations == 1
