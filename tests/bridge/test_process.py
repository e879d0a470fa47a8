"""Python's collector waits while programs are traced, and goes on afterwards."""

import gc

import jax
import optax
import pytest
from oracles import random_grads, random_params, set_grads

import torch_api
from bridge._process import uncollected

pytestmark = pytest.mark.quick


def seen_while_traced(fails=()):
    """A transformation that must see all leaves, and what `gc.isenabled` says when its update is traced."""
    found = []

    def update(updates, state, params=None):
        if len(jax.tree.leaves(updates)) > 1:  # else it is only asked how it is called
            found.append(gc.isenabled())
        if fails:
            raise ValueError("no such update")
        total = sum(g.sum() for g in jax.tree.leaves(updates))
        return jax.tree.map(lambda g: -0.1 * g * total, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update), found


@pytest.mark.parametrize("enabled", [True, False])
def test_tracing_is_not_collected_and_afterwards_all_is_as_before(enabled):
    params = random_params()
    set_grads(params, random_grads(params))
    tx, found = seen_while_traced()
    (gc.enable if enabled else gc.disable)()
    try:
        torch_api.OptaxOptimizer(params, tx, max_grad_norm=1.0).step()  # so that the step traces too
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert len(found) >= 2
    assert not any(found)


def test_after_an_error_it_collects_again():
    params = random_params()
    set_grads(params, random_grads(params))
    fails = []
    optimizer = torch_api.OptaxOptimizer(params, seen_while_traced(fails)[0], max_grad_norm=1.0)
    fails.append(True)
    with pytest.raises(ValueError, match="no such update"):
        optimizer.step()
    assert gc.isenabled()


def test_within_itself():
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
