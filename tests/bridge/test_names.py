"""Dotted names convert to nested dicts and back, and a module's parameters to arrays over the same memory."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
from bridge._names import nest, unnest

pytestmark = pytest.mark.quick


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.again = self.body


@pytest.mark.parametrize(
    ("pairs", "tree"),
    [
        ([], {}),
        ([("a", 1)], {"a": 1}),
        ([("a.b.c", 1), ("a.b.d", 2), ("a.e", 3), ("f", 4)], {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4}),
        ([("a.x", 1), ("b", 2), ("a.y", 3)], {"a": {"x": 1, "y": 3}, "b": 2}),
        ([("0.weight", 1), ("10.weight", 2), ("1.weight", 3)], {"0": {"weight": 1}, "10": {"weight": 2}, "1": {"weight": 3}}),
        ([("a.b", None), ("a.c", [1, (2,)])], {"a": {"b": None, "c": [1, (2,)]}}),
    ],
    ids=["nothing", "one name", "depths", "interleaved names", "digits", "containers as leaves"],
)
def test_names_nest_at_their_dots_and_unnest_again(pairs, tree):
    assert nest(pairs) == tree
    assert unnest(tree) == dict(pairs)


def test_nested_names_keep_their_order():
    pairs = [("z.b", 1), ("z.a", 2), ("c", 3), ("a.z", 4)]
    assert list(nest(pairs)) == ["z", "c", "a"]
    assert list(unnest(nest(pairs)).items()) == pairs


def test_nest_keeps_leaves_without_copies():
    leaf = torch.ones(2)
    tree = nest([("a.b", leaf)])
    assert tree["a"]["b"] is leaf
    assert unnest(tree)["a.b"] is leaf


def test_random_trees_survive_the_round_trip():
    rng = random.Random(0)

    def tree(depth):
        if depth == 0 or rng.random() < 0.3:
            return rng.random()
        return {rng.choice("abcdef") * rng.randint(1, 2): tree(depth - 1) for _ in range(rng.randint(1, 4))}

    depths = set()
    for _ in range(200):
        expected = {"root": tree(4), "other": tree(2)}
        pairs = list(unnest(expected).items())
        depths.update(name.count(".") for name, _ in pairs)
        rng.shuffle(pairs)
        assert nest(pairs) == expected
        for name, leaf in pairs:
            found = expected
            for key in name.split("."):
                found = found[key]
            assert found is leaf
    assert depths == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "pairs",
    [[("a", 1), ("a.b", 2)], [("a.b", 2), ("a", 1)], [("a.b", 1), ("c", 2), ("a.b", 3)]],
    ids=["a leaf above", "a leaf below", "twice"],
)
def test_names_that_do_not_fit_a_nested_dict_raise(pairs):
    with pytest.raises(ValueError, match=r"'a(\.b)?'"):
        nest(pairs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ModuleDict({"out": nn.Linear(4, 2, bias=False)})),
        lambda: nn.ModuleList([nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.GRU(2, 3)]),
        lambda: nn.Linear(3, 2, dtype=torch.bfloat16),
        lambda: nn.Linear(3, 2).requires_grad_(False),
        lambda: nn.ParameterDict({"scalar": nn.Parameter(torch.tensor(2.0)), "turned": nn.Parameter(torch.randn(3, 2).t())}),
    ],
    ids=["nested modules", "list and layouts", "bfloat16", "frozen", "no dimensions and transposed"],
)
def test_module_tree_aliases_every_parameter(make):
    module = make()
    arrays = unnest(bridge.module_tree(module))
    parameters = dict(module.named_parameters())
    assert set(arrays) == set(parameters)
    for name, parameter in parameters.items():
        array = arrays[name]
        assert isinstance(array, jax.Array)
        assert array.unsafe_buffer_pointer() == parameter.data_ptr()
        assert array.shape == tuple(parameter.shape)
        assert str(array.dtype) == str(parameter.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(np.asarray(array.astype(jnp.float32)), parameter.detach().float().numpy())


def test_module_tree_is_nested_by_module():
    tree = bridge.module_tree(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    assert jax.tree.map(lambda array: array.shape, tree) == {"0": {"weight": (4, 3), "bias": (4,)}, "1": {"weight": (4,), "bias": (4,)}}


def test_writes_by_torch_show_in_the_module_tree():
    module = nn.Linear(3, 2)
    tree = bridge.module_tree(module)
    with torch.no_grad():
        module.weight.fill_(7.0)
    np.testing.assert_array_equal(np.asarray(tree["weight"]), np.full((2, 3), 7.0, np.float32))


def test_module_without_parameters_has_an_empty_tree():
    assert bridge.module_tree(nn.Sequential(nn.ReLU(), nn.Flatten())) == {}


def test_module_tree_has_a_tied_parameter_under_its_first_name():
    tree = bridge.module_tree(Tied())
    assert jax.tree.map(lambda array: array.shape, tree) == {
        "embed": {"weight": (5, 3)},
        "body": {"weight": (3, 3), "bias": (3,)},
        "head": {"bias": (5,)},
    }


def test_tied_names_map_to_the_first_name():
    assert bridge.tied_names(Tied()) == {
        "head.weight": "embed.weight",
        "again.weight": "body.weight",
        "again.bias": "body.bias",
    }


def test_equal_parameters_are_not_tied():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].load_state_dict(module[0].state_dict())
    assert torch.equal(module[0].weight, module[1].weight)
    assert bridge.tied_names(module) == {}


def test_three_tied_names_map_to_the_first():
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    layers[2].weight = layers[1].weight = layers[0].weight
    assert bridge.tied_names(nn.Sequential(*layers)) == {"1.weight": "0.weight", "2.weight": "0.weight"}
