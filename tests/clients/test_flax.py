"""flax: `flax.serialization` saves and restores states and optimizers, and its traversals select leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bridge

serialization = pytest.importorskip("flax.serialization")

PARAMS = {"a": jnp.ones(2), "b": jnp.ones(3)}
ELEMENTS = {"a": np.array([True, False]), "b": True}


def of(tx):
    def make(steps):
        state, params = tx.init(PARAMS), PARAMS
        for _ in range(steps):
            updates, state = tx.update(PARAMS, state, params)
            params = optax.apply_updates(params, updates)
        return state

    return make


def trained(definition):
    def make(steps):
        optimizer = definition.create(PARAMS)
        for _ in range(steps):
            optimizer = optimizer.apply_gradient(PARAMS)
        return optimizer

    return make


STATES = {
    "select": of(bridge.select(optax.adam(0.1), "a")),
    "elements": of(bridge.select(optax.adam(0.1), ELEMENTS)),
    "partition": of(bridge.partition({"x": optax.adam(0.1), "y": optax.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y"})),
    "chain": of(optax.chain(bridge.masked(optax.adam(0.1), {"a": True, "b": False}), bridge.select(optax.sgd(0.1), "b"))),
    "Adam": trained(bridge.Adam(0.1)),
    "MultiOptimizer": trained(bridge.MultiOptimizer(("a", bridge.Adam(0.1)), ("b", bridge.Momentum(0.1)))),
    "focus": lambda steps: bridge.Adam(0.1).create(PARAMS, focus="a"),
}


@pytest.mark.parametrize("kind", STATES)
def test_state_is_saved_and_restored(kind):
    state = STATES[kind](2)
    restored = serialization.from_bytes(STATES[kind](0), serialization.to_bytes(state))
    (paths, leaves), (known, expected) = (zip(*jax.tree_util.tree_leaves_with_path(x), strict=True) for x in (restored, state))
    assert paths == known
    assert all(map(np.array_equal, leaves, expected))


@pytest.mark.filterwarnings("ignore:.*Traversal:DeprecationWarning")
def test_traversal_of_flax_selects_leaves():
    from flax.traverse_util import ModelParamTraversal

    kind = ModelParamTraversal(lambda path, _: path.endswith("/a"))
    for make in (lambda d: bridge.MultiOptimizer((kind, d)).create(PARAMS), lambda d: d.create(PARAMS, focus=kind)):
        target = make(bridge.GradientDescent(0.5)).apply_gradient(PARAMS).target
        assert jax.tree.map(lambda x: x.tolist(), target) == {"a": [0.5, 0.5], "b": [1.0, 1.0, 1.0]}
