"""Python's garbage collector pauses while programs are traced."""

import gc

import jax
import optax
import pytest
from oracles import random_grads, random_params, set_grads

import torch_api
from bridge._process import gc_paused

pytestmark = pytest.mark.quick


def gc_states_while_traced(fails=()):
    """Return a joint transformation, and a list of `gc.isenabled()` at each trace of its update."""
    found = []

    def update(updates, state, params=None):
        if len(jax.tree.leaves(updates)) > 1:  # with one leaf, only the call signature is checked
            found.append(gc.isenabled())
        if fails:
            raise ValueError("no such update")
        total = sum(g.sum() for g in jax.tree.leaves(updates))
        return jax.tree.map(lambda g: -0.1 * g * total, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update), found


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_pauses_while_tracing_and_is_restored(enabled):
    params = random_params()
    set_grads(params, random_grads(params))
    tx, found = gc_states_while_traced()
    (gc.enable if enabled else gc.disable)()
    try:
        torch_api.OptaxOptimizer(params, tx, max_grad_norm=1.0).step()  # clipping makes the step trace again
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert len(found) >= 2
    assert not any(found)


def test_collector_is_restored_after_an_error():
    params = random_params()
    set_grads(params, random_grads(params))
    fails = []
    optimizer = torch_api.OptaxOptimizer(params, gc_states_while_traced(fails)[0], max_grad_norm=1.0)
    fails.append(True)
    with pytest.raises(ValueError, match="no such update"):
        optimizer.step()
    assert gc.isenabled()


def test_pauses_can_be_nested():
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
