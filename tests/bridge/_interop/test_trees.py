"""Trees, modules and states cross between torch and jax, and trees are written back into a module."""

import collections
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import bridge
from bridge._names import unnest

pytestmark = pytest.mark.quick


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))


def over(array, tensor):
    """Return whether the array aliases the tensor's memory with equal shape and dtype."""
    assert isinstance(array, jax.Array)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert (array.shape, str(array.dtype)) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return True


# ------------------------------------------------------------------ modules


def test_module_converts_to_a_nested_dict_of_parameters():
    net = network()
    tree = bridge.to_jax(net)
    assert jax.tree.structure(tree) == jax.tree.structure(bridge.module_tree(net))
    assert all(over(array, net.get_parameter(name)) for name, array in unnest(tree).items())
    assert set(unnest(tree)) == {name for name, _ in net.named_parameters()}, "the tree contains buffers"


def test_buffers_convert_from_their_own_dict():
    net = network()
    buffers = bridge.to_jax(dict(net.named_buffers()))
    assert all(over(buffers[name], x) for name, x in net.named_buffers())
    assert str(buffers["1.num_batches_tracked"].dtype) == "int64"
    net(torch.ones(3, 6))
    assert int(buffers["1.num_batches_tracked"]) == 1


def test_tree_may_hold_modules_tensors_and_none():
    net, x = network(), torch.ones(16)
    tree = bridge.to_jax({"model": net, "batch": [x, None], "name": "run 1"})
    assert tree["batch"][1] is None
    assert tree["name"] == "run 1"
    assert over(tree["batch"][0], x)
    assert over(tree["model"]["0"]["weight"], net[0].weight)


def test_copied_module_does_not_share_memory():
    net = network()
    for name, array in unnest(bridge.to_jax(net, copy=True)).items():
        assert array.unsafe_buffer_pointer() != net.get_parameter(name).data_ptr()


def test_error_names_a_module_parameter_that_jax_cannot_alias():
    net = network()
    net[0].weight = torch.nn.Parameter(torch.zeros(8, 6)[::2])
    with pytest.raises(ValueError, match=r"'model.0.weight' \(4, 6\) has strides"):
        bridge.to_jax({"model": net})
    assert bridge.to_jax({"model": net}, copy=None)["model"]["0"]["weight"].shape == (4, 6)


def test_parameter_outside_a_module_must_be_detached():
    with pytest.raises(ValueError, match="requires grad"):
        bridge.to_jax({"w": network()[0].weight})


# ------------------------------------------------------------------ other trees


class Pair(NamedTuple):
    first: object
    second: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weight: object
    rate: float = dataclasses.field(metadata={"static": True}, default=0.5)


@dataclasses.dataclass
class Unknown:
    weight: object
    rate: float = 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, (x, None)],
        lambda x: Pair(x, {"y": x}),
        lambda x: collections.OrderedDict([("b", x), ("a", x)]),
        lambda x: Registered(x),
        lambda x: {"state": {0: {"step": x}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    ],
    ids=["list and tuple", "named tuple", "ordered dict", "dataclass", "optimizer's state_dict"],
)
def test_tree_crosses_both_ways_without_a_copy(make):
    x = torch.arange(8.0)
    tree = make(x)
    there = bridge.to_jax(tree)
    assert type(there) is type(tree)
    assert [over(leaf, x) for leaf in jax.tree.leaves(there) if isinstance(leaf, jax.Array)]
    back = bridge.to_torch(there)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for mine, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert mine.data_ptr() == theirs.data_ptr() if isinstance(theirs, torch.Tensor) else mine == theirs


def test_state_dict_of_a_module_crosses():
    net = network()
    arrays = bridge.to_jax(net.state_dict())
    assert list(arrays) == list(net.state_dict())
    assert all(over(arrays[name], x) for name, x in net.state_dict().items())
    other = network()
    other.load_state_dict({name: x + 1 for name, x in bridge.to_torch(arrays).items()})
    assert torch.equal(other[0].weight, net[0].weight + 1)


def test_flax_params_cross():
    params = {"params": {"Dense_0": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}, "empty": None}}
    tensors = bridge.to_torch(params)
    kernel = params["params"]["Dense_0"]["kernel"]
    assert tensors["params"]["Dense_0"]["kernel"].data_ptr() == kernel.unsafe_buffer_pointer()
    assert tensors["params"]["empty"] is None
    assert bridge.to_jax(tensors)["params"]["Dense_0"]["kernel"].unsafe_buffer_pointer() == kernel.unsafe_buffer_pointer()


def test_equinox_model_crosses_both_ways():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    tensors = bridge.to_torch(model)
    assert type(tensors) is type(model)
    assert isinstance(tensors.layers[0].weight, torch.Tensor)
    assert tensors.activation is model.activation
    assert tensors.layers[0].weight.data_ptr() == model.layers[0].weight.unsafe_buffer_pointer()
    back = bridge.to_jax(tensors)
    x = jnp.ones(3)
    np.testing.assert_array_equal(back(x), model(x))


def test_state_of_optax_crosses(standard_promotion):
    params = {"w": jnp.ones(8)}
    state = optax.adamw(1e-3).init(params)
    tensors = bridge.to_torch(state)
    assert isinstance(tensors[0].mu["w"], torch.Tensor)
    assert jax.tree.structure(bridge.to_jax(tensors)) == jax.tree.structure(state)


@pytest.mark.parametrize("container", [Unknown, lambda x: collections.UserDict(weight=x)], ids=["dataclass", "mapping"])
def test_container_unknown_to_jax_raises(container):
    with pytest.raises(TypeError, match=r"to_jax: leaf 'config' is a \w+, which holds arrays but is no pytree"):
        bridge.to_jax({"config": container(torch.ones(3))})
    with pytest.raises(TypeError, match="to_torch: the tree is a"):
        bridge.to_torch(container(jnp.ones(3)))
    settings = container(3.0)
    assert bridge.to_jax({"config": settings})["config"] is settings
    assert bridge.to_jax({"type": Unknown})["type"] is Unknown


# ------------------------------------------------------------------ back into a module


def test_tree_is_written_into_existing_parameters():
    net = network()
    before = {name: (p, p.data_ptr()) for name, p in net.named_parameters()}
    tree = jax.tree.map(lambda x: x + 1, bridge.to_jax(net, copy=True))
    version = net[0].weight._version
    bridge.load_module_tree(net, tree)
    assert {name: (p, p.data_ptr()) for name, p in net.named_parameters()} == before
    assert net[0].weight._version > version
    for name, x in unnest(tree).items():
        np.testing.assert_array_equal(net.get_parameter(name).detach().numpy(), x)


def test_numpy_and_narrower_arrays_are_written():
    net = torch.nn.Linear(2, 2).double()
    bridge.load_module_tree(net, {"weight": np.eye(2), "bias": jnp.ones(2, jnp.float32)})
    assert torch.equal(net.weight, torch.eye(2).double())
    assert torch.equal(net.bias, torch.ones(2).double())
    half = torch.nn.Linear(2, 2, bias=False).bfloat16()
    bridge.load_module_tree(half, {"weight": jnp.full((2, 2), 0.1, jnp.bfloat16), "bias": None})
    assert torch.equal(half.weight, torch.full((2, 2), 0.1).bfloat16())


def test_nothing_is_written_if_one_leaf_does_not_fit():
    net = network()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    good = bridge.to_jax(net, copy=True)
    for change, text in (
        (lambda t: t["0"].pop("bias"), r"the tree has no '0.bias', of shape \(4,\)"),
        (lambda t: t["2"].update(wieght=t["2"].pop("weight")), r"no parameter '2.wieght'. Did you mean '2.weight'"),
        (lambda t: t["2"].update(weight=jnp.ones((2, 5))), r"'2.weight' has shape \(2, 5\) and dtype torch.float32; expected"),
        (
            lambda t: t["2"].update(weight=np.ones((2, 4))),
            r"dtype torch.float64; expected an array of shape \(2, 4\) and dtype torch.float32",
        ),
        (lambda t: t["2"].update(weight=0.5), r"'2.weight' has 0.5; expected an array"),
    ):
        tree = jax.tree.map(lambda x: x + 1, good)
        change(tree)
        with pytest.raises(ValueError, match=text):
            bridge.load_module_tree(net, tree)
        assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_tied_parameter_is_written_once():
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    net["b"].weight = net["a"].weight
    bridge.load_module_tree(net, {"a": {"weight": jnp.ones((2, 2))}})
    assert torch.equal(net["b"].weight, torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"no parameter 'b.weight'. It is tied to 'a.weight'; give it once"):
        bridge.load_module_tree(net, {"a": {"weight": jnp.ones((2, 2))}, "b": {"weight": jnp.ones((2, 2))}})


def test_error_names_tracers_and_donated_arrays():
    net = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="array 'weight' is a tracer"):
        jax.jit(lambda w: bridge.load_module_tree(net, {"weight": w}))(jnp.ones((2, 2)))
    gone = jnp.ones((2, 2))
    gone.delete()
    with pytest.raises(ValueError, match="array 'weight' was donated or deleted"):
        bridge.load_module_tree(net, {"weight": gone})
