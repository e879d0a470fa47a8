"""Containers that hold tensors, as outputs, trees and arguments: they come out with arrays, or an error says what to return instead."""

import collections
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

X = torch.arange(12.0).reshape(3, 4).sin()


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    value: torch.Tensor


class Plain:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


Pair = collections.namedtuple("Pair", "value rest")


class Returns(nn.Module):
    """A layer whose output is wrapped in a container."""

    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 3), wrap

    def forward(self, x):
        return self.wrap(self.linear(x))


def with_attributes(**values):
    return types.SimpleNamespace(**values)


ARRAYS = {
    "dict": (lambda y: {"value": y}, lambda out: out["value"]),
    "user dict": (lambda y: collections.UserDict(value=[y]), lambda out: out["value"][0]),
    "dataclass": (Output, lambda out: out.value),
    "frozen dataclass": (Frozen, lambda out: out.value),
    "dataclass with slots": (Slots, lambda out: out.value),
    "dataclass in a dataclass": (lambda y: Output(Frozen({"y": y})), lambda out: out.value.value["y"]),
    "namespace": (lambda y: with_attributes(value=(y, 1)), lambda out: out.value[0]),
    "named tuple": (lambda y: Pair(y, None), lambda out: out.value),
    "max": (lambda y: torch.max(y, 1), lambda out: out.values),
    "sort": (lambda y: {"sorted": y.sort(1)}, lambda out: out["sorted"].values),
    "topk": (lambda y: y.topk(2), lambda out: out[0]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_container_output_holds_arrays(kind):
    wrap, read = ARRAYS[kind]
    net = Returns(wrap)
    out = bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    assert isinstance(read(out), jax.Array)
    assert type(out) is type(net(X)) or kind == "user dict"
    np.testing.assert_allclose(read(out), read(net(X)).detach(), rtol=1e-6)


def distribution(y):
    return torch.distributions.Normal(y, 1.0, validate_args=False)


ERRORS = {
    "distribution": (distribution, r"The output of the traced code is a Normal.*dict"),
    "in a dict": (lambda y: {"policy": [distribution(y)]}, r"Output 'policy\.0' of the traced code is a Normal.*dict"),
    "in a dataclass": (lambda y: Output(distribution(y)), r"Output 'value' of the traced code is a Normal.*dict"),
    "object": (Plain, r"is a Plain.*dict"),
    "object in an object": (lambda y: Plain(Plain([y])), r"is a Plain.*dict"),
    "slots": (Slotted, r"is a Slotted.*dict"),
    "deque": (lambda y: collections.deque([y]), r"is a deque.*dict"),
    "constant tensor": (lambda y: Plain(torch.ones(2)), r"is a Plain.*dict"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_container_that_cannot_hold_arrays_raises(kind):
    wrap, text = ERRORS[kind]
    net = Returns(wrap)
    for call in (bridge.module_function(net), jax.jit(bridge.module_function(net))):
        with pytest.raises(TypeError, match=text):
            call(bridge.module_tree(net), jnp.asarray(X.numpy()))


def test_object_without_tensors_is_returned_unchanged():
    plain = Plain({"a": 1})
    net = Returns(lambda y: (y, plain))
    assert bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))[1] is plain


@pytest.mark.parametrize("wrap", [distribution, Output, Plain, lambda y: collections.deque([y])])
def test_unsupported_aux_of_a_train_step_raises_before_the_update(wrap):
    net = nn.Linear(4, 3)
    before = net.weight.detach().clone()

    def loss(model, x):
        y = model(x)
        return y.sum(), {"out": wrap(y)}

    step = torch_api.JaxTrainStep(net, loss, torch_api.MaskedSGD(net.named_parameters(), lr=0.1), has_aux=True)
    with pytest.raises(TypeError, match="dict"):
        step(X)
    assert torch.equal(net.weight, before)


NAMED = {
    "max": lambda x: torch.max(x, 1),
    "sort": torch.sort,
    "topk": lambda x: torch.topk(x, 2),
    "svd": torch.linalg.svd,
    "mode": lambda x: torch.mode(x, 1),
    "slogdet": lambda x: torch.linalg.slogdet(x @ x.T),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_tuples_of_torch_are_trees(name):
    result = NAMED[name](X)
    tree = bridge.to_jax({"a": result}, copy=None)["a"]
    assert type(tree) is type(result)
    for array, tensor in zip(tree, result, strict=True):
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(array, tensor)
    assert all(map(torch.equal, bridge.to_torch(tree), result))
    doubled = bridge.jax_function(lambda tree: [x * 2 for x in tree])(result)
    assert all(torch.equal(x, y * 2) for x, y in zip(doubled, result, strict=True))


def test_named_tuple_of_torch_may_be_a_batch():
    net = nn.Linear(2, 1)
    step = torch_api.JaxTrainStep(net, lambda model, x: model(x.values).sum(), torch_api.MaskedSGD(net.named_parameters(), lr=0.0))
    result = X.topk(2)
    np.testing.assert_allclose(step(result), net(result.values).sum().detach(), rtol=1e-6)


HOLDERS = {
    "deque": lambda x: collections.deque([{"a": x}]),
    "namespace": lambda x: with_attributes(a=[x]),
    "object": Plain,
    "object in an object": lambda x: Plain(Plain(x)),
    "slots": Slotted,
    "user dict": lambda x: collections.UserDict(a=x),
    "dict subclass": lambda x: type("Batch", (dict,), {})(a=(x,)),
    "dataclass": lambda x: Output([x]),
    "set": lambda x: {x},
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_trees_unknown_to_jax_raise(kind):
    text = r"leaf 'k' is a \w+, which holds arrays but is no pytree"
    with pytest.raises(TypeError, match=rf"^to_jax: {text}"):
        bridge.to_jax({"k": HOLDERS[kind](X)})
    if kind != "set":
        with pytest.raises(TypeError, match=rf"^to_torch: {text}"):
            bridge.to_torch({"k": HOLDERS[kind](jnp.ones(2))})


def test_objects_without_tensors_and_functions_pass_through_trees():
    tree = {"a": Plain(1), "b": torch.relu, "c": collections.deque([1]), "d": nn.Linear, "e": lambda x: X, "f": None, "g": np.ones(2)}
    found = bridge.to_jax(tree)
    assert all(found[name] is tree[name] for name in tree)
    net = nn.Linear(2, 2)
    assert bridge.to_torch({"a": net})["a"] is net


@pytest.mark.parametrize("kind", ["object", "object in an object", "slots", "frozen"])
def test_object_with_tensors_is_refused_as_a_constant_of_a_jax_function(kind):
    x = {"frozen": Frozen}.get(kind, HOLDERS.get(kind))(X)
    double = bridge.jax_function(lambda x, y: y * 2)
    with pytest.raises(TypeError, match=r"^jax_function\(<lambda>\): argument '0' is a \w+ that holds a tensor at '[\w.]*value'"):
        double(x, X)
    with pytest.raises(TypeError, match="argument 'x' is a Linear"):
        double(x=nn.Linear(2, 2), y=X)
    assert torch.equal(double(Plain(3), X), X * 2)
