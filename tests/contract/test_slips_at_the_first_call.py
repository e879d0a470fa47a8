"""Common mistakes at a first call (unaligned modules, operator counters, functions that recompile) warn once or raise with advice."""

import functools
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized


def unaligned():
    """Return a module whose weight does not start at a multiple of 64 bytes, as one from a file."""
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    flat = torch.zeros(64)
    start = next(i for i in range(1, 16) if flat[i:].data_ptr() % 64)
    net[0].weight = nn.Parameter(flat[start : start + 15].view(5, 3).copy_(torch.arange(15.0).view(5, 3)))
    return net


def test_module_tree_of_unaligned_weights_needs_copy_none():
    net = unaligned()
    with pytest.raises(ValueError, match=r"'0\.weight'.*Pass copy=None"):
        bridge.module_tree(net)
    tree = bridge.module_tree(net, copy=None)
    np.testing.assert_array_equal(tree["0"]["weight"], net[0].weight.detach())
    assert tree["1"]["weight"].unsafe_buffer_pointer() == net[1].weight.data_ptr()
    copied = bridge.module_tree(net, copy=True)
    assert copied["1"]["weight"].unsafe_buffer_pointer() != net[1].weight.data_ptr()
    assert jax.tree.structure(copied) == jax.tree.structure(tree)


def test_error_names_an_active_operator_counter():
    net = nn.Linear(3, 2)
    step = torch_api.JaxTrainStep(net, lambda model, x: model(x).sum(), torch_api.MaskedSGD(net.named_parameters(), lr=0.1))
    before = net.weight.detach().clone()
    for call in (lambda: bridge.module_function(net)(bridge.module_tree(net), jnp.ones((2, 3))), lambda: step(torch.ones(2, 3))):
        with FlopCounterMode(display=False), pytest.raises(NotImplementedError, match="FlopCounterMode"):
            call()
    assert torch.equal(net.weight, before)
    step(torch.ones(2, 3))


def warnings_of(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in seen if warning.category is torch_api.CompilationWarning]


def test_recompiling_for_each_int_warns_at_the_ninth():
    function = bridge.jax_function(lambda x, *, step: x * step)
    x = torch.ones(3)
    assert warnings_of(lambda: [function(x, step=step) for step in range(8)]) == []
    (text,) = warnings_of(lambda: [function(x, step=step) for step in range(12)])
    assert "arguments 'step'." in text
    assert "'0'" not in text


def test_recompiling_for_each_shape_warns_at_the_ninth():
    function = bridge.jax_function(lambda x, y: x.sum() + y)
    (text,) = warnings_of(lambda: [function(torch.ones(n), torch.ones(())) for n in range(1, 12)])
    assert "arguments '0'." in text


FRESH = {
    "lambda": lambda i: bridge.jax_function(lambda x: x * i),
    "partial": lambda i: bridge.jax_function(functools.partial(lambda x, n: x * n, n=i)),
    "jit": lambda i: bridge.jax_function(jax.jit(lambda x: x * i)),
    "gradient": lambda i: bridge.jax_function(jax.grad(lambda x: x.sum() * i)),
}


@pytest.mark.parametrize("kind", FRESH)
def test_making_a_function_at_each_call_warns_once(kind):
    made = FRESH[kind]
    (text,) = warnings_of(lambda: [made(float(i))(torch.ones(2)) for i in range(12)])
    assert "made anew" in text


def test_programs_of_a_deleted_function_are_not_counted():
    def call():
        for _ in range(2):
            function = bridge.jax_function(lambda x: x - 1)
            for n in range(1, 9):
                function(torch.ones(n))

    assert warnings_of(call) == []


def test_kept_functions_with_the_same_code_do_not_warn():
    layers = []

    def call():
        for i in range(12):
            layers.append(bridge.jax_function(lambda x, i=i: x + i))
            layers[-1](torch.ones(2))

    assert warnings_of(call) == []
    assert warnings_of(lambda: [layer(torch.ones(2)) for layer in layers]) == []


class Flax(types.ModuleType):
    """The part of flax.serialization that registers types."""

    def __init__(self):
        super().__init__("flax.serialization")
        self.kinds = {}

    def is_serializable(self, kind):
        return kind in self.kinds

    def register_serialization_state(self, kind, to_state_dict, from_state_dict, override=False):
        self.kinds[kind] = to_state_dict, from_state_dict


def test_states_are_registered_with_flax_if_it_is_imported(monkeypatch):
    flax, params = Flax(), {"a": jnp.ones(2), "b": jnp.ones(3)}
    monkeypatch.setitem(sys.modules, "flax.serialization", flax)
    elements = {"a": np.array([True, False]), "b": False}
    state = bridge.select(optax.adam(0.1), elements).init(params)
    save, restore = flax.kinds[type(state.labels)]
    saved = save(state.labels)
    assert [x.tolist() for x in jax.tree.leaves(saved)] == [[True, False]]
    assert jax.tree.structure(restore(state.labels, saved)) == jax.tree.structure(state.labels)
    other = bridge.select(optax.adam(0.1), "a").init(params)
    with pytest.raises(ValueError, match="same mask"):
        restore(other.labels, saved)
    optimizer = bridge.Adam(0.1).create(params).apply_gradient(params)
    save, restore = flax.kinds[type(optimizer)]
    found = restore(bridge.Adam(0.1).create(params), save(optimizer))
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(optimizer)))


class Traversal:
    """A traversal like flax's: an object with `iterate` and `update` that is not callable."""

    def iterate(self, inputs):
        yield inputs["a"]

    def update(self, fn, inputs):
        return inputs | {"a": fn(inputs["a"])}


def test_traversal_of_flax_selects_parameters():
    params = {"a": jnp.ones(2), "b": {"c": jnp.ones(3)}}
    optimizer = bridge.MultiOptimizer((Traversal(), bridge.GradientDescent(0.5))).create(params)
    target = optimizer.apply_gradient(params).target
    assert jax.tree.map(lambda x: x.tolist(), target) == {"a": [0.5, 0.5], "b": {"c": [1.0, 1.0, 1.0]}}
