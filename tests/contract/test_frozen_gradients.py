"""One warning is given if all gradients of a step belong to frozen parameters; frozen parameters need no label."""

import warnings

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


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"body": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 2)})


def backward(net):
    net.zero_grad()
    net["head"](net["body"](torch.ones(1, 3))).square().sum().backward()


def warnings_in(function):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in seen]


def thrice(optimizer):
    return lambda: [optimizer.step() for _ in range(3)]


def switched_adapter(net):
    optimizer = torch_api.MaskedAdamW(net["body"].named_parameters("body"), lr=0.1)
    backward(net)
    net["body"].requires_grad_(False)
    return optimizer


def masked(net):
    optimizer = torch_api.MaskedSGD(net.named_parameters(), lr=0.1, mask="head.*")
    backward(net)
    for p in net["head"].parameters():
        p.grad = None
    return optimizer


def frozen_group(net):
    groups = [{"params": list(net["body"].named_parameters("body")), "trainable": False}]
    optimizer = torch_api.OptaxOptimizer(groups, optax.lion, lr=0.1)
    backward(net)
    return optimizer


def frozen_later(net):
    optimizer = torch_api.MaskedAdamW(net["head"].named_parameters("head"), lr=0.1)
    backward(net)
    optimizer.step()
    optimizer.set_trainable("head.*", False)
    return optimizer


def unpicked(net):
    optimizer = torch_api.MultiOptimizer(net.named_parameters(), ("head.weight", optax.sgd(0.1)))
    backward(net)
    net["head"].weight.grad = None
    return optimizer


@pytest.mark.parametrize("make", [switched_adapter, masked, frozen_group, frozen_later, unpicked])
def test_step_with_gradients_of_frozen_parameters_only_warns_once(make):
    net = model()
    optimizer = make(net)
    before = [p.detach().clone() for p in net.parameters()]
    (text,) = warnings_in(thrice(optimizer))
    assert f"{type(optimizer).__name__}.step updated nothing" in text
    assert "frozen" in text
    assert all(map(torch.equal, before, net.parameters()))


def test_other_steps_do_not_warn():
    net = model()
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), lr=0.1, mask="head.*")
    backward(net)
    assert warnings_in(thrice(optimizer)) == []
    optimizer.set_trainable("*", False)
    for p in net.parameters():
        p.grad = None
    assert warnings_in(thrice(optimizer)) == []


def test_warning_raised_as_an_error_changes_nothing():
    net = model()
    optimizer = switched_adapter(net)
    with pytest.raises(UserWarning, match="updated nothing"):
        optimizer.step()
    net["body"].requires_grad_(True)
    optimizer.step()
    assert optimizer.state[net["body"].weight]["step"] == 1


# ---------------------------------------------------------------------- labels

FREEZE = {
    "requires_grad": lambda net: net["body"].requires_grad_(False) and {},
    "mask": lambda net: {"mask": "head.*"},
    "both": lambda net: net["body"].requires_grad_(False) and {"mask": {"head": True}},
}


@pytest.mark.parametrize("by", FREEZE)
@pytest.mark.parametrize(
    "labels", [{"head": "a"}, ("head.*", "a"), lambda name: "a" if "head" in name else None], ids=["dict", "pairs", "function"]
)
def test_frozen_parameter_needs_no_label(by, labels):
    net = model()
    options = FREEZE[by](net)
    labels = [labels] if isinstance(labels, tuple) else labels
    optimizer = torch_api.PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.5)}, labels=labels, **options)
    start = [p.detach().clone() for p in net.parameters()]
    backward(net)
    optimizer.step()
    for p, before in zip(net["body"].parameters(), start[:2], strict=True):
        assert torch.equal(p, before)
    for p, before in zip(net["head"].parameters(), start[2:], strict=True):
        torch.testing.assert_close(p.detach(), before - 0.5 * p.grad)
    assert [row["label"] for row in optimizer.report().rows] == [None, None, "a", "a"]
    again = torch_api.PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.5)}, labels=labels, **options)
    again.load_state_dict(optimizer.state_dict())


def test_trained_parameter_needs_a_label():
    net = model()
    with pytest.raises(ValueError, match=r"no rule gives 'body.weight' a label"):
        torch_api.PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.5)}, labels={"head": "a"})
    net["body"].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no rule gives 'body.bias' a label"):
        torch_api.PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.5)}, labels={"head": "a"})


def test_thawing_a_parameter_without_label_raises_and_changes_nothing():
    net = model()
    optimizer = torch_api.PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.5)}, labels={"head": "a"}, mask="head.*")
    rows = optimizer.report().rows
    with pytest.raises(ValueError, match=r"no rule gives 'body.weight' a label"):
        optimizer.set_trainable("body.*", True)
    assert optimizer.report().rows == rows
    net = model()
    net["body"].requires_grad_(False)
    optimizer = torch_api.PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.5)}, labels={"head": "a"})
    net["body"].requires_grad_(True)
    backward(net)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"no rule gives 'body.weight' a label"):
        optimizer.step()
    assert all(map(torch.equal, before, net.parameters()))
    net["body"].requires_grad_(False)
    optimizer.step()
    assert not any(map(torch.equal, before[2:], net["head"].parameters()))


def test_frozen_group_without_label_can_be_added_later():
    net = model()
    optimizer = torch_api.PartitionedOptimizer(net["head"].named_parameters("head"), {"a": optax.sgd(0.5)}, labels={"head": "a"}, mask="*")
    with pytest.raises(ValueError, match=r"no rule gives 'body.weight' a label"):
        optimizer.add_param_group({"params": list(net["body"].named_parameters("body"))})
    assert len(optimizer.param_groups) == 1
    net["body"].requires_grad_(False)
    optimizer.add_param_group({"params": list(net["body"].named_parameters("body"))})
    backward(net)
    optimizer.step()
    assert [row["status"] for row in optimizer.report().rows] == ["trained", "trained", "frozen", "frozen"]
