"""Initial state equals the result of `init`, zeros need no program, and every buffer is separate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import random_grads, random_params, set_grads

import torch_api
from bridge._runtime import initial_state

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("standard_promotion")]
SHAPES = [(30, 20), (30, 20), (7,), ()]


def with_every_kind_of_state():
    """A transformation with every kind of state: scalars, constants, values computed from parameters, a repeated array, a table."""

    def init(params):
        leaves = jax.tree.leaves(params)
        table = jnp.arange(5.0)
        return {
            "copy": params,
            "half": jax.tree.map(lambda p: jnp.full_like(p, 0.5, dtype=jnp.bfloat16), params),
            "ones": jax.tree.map(jnp.ones_like, params),
            "negative": jax.tree.map(lambda p: jnp.full_like(p, -0.0), params),
            "scaled": jax.tree.map(lambda p: jnp.tanh(p) * 2, params),
            "count": jnp.zeros((), jnp.int32),
            "norm": jnp.sqrt(sum(jnp.sum(jnp.square(p)) for p in leaves)),
            "table": table,
            "again": table,
            "key": jax.random.key(3),
        }

    def update(updates, state, params=None):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(updates)))
        return jax.tree.map(lambda g: -0.1 * g / (1 + norm), updates), state

    return optax.GradientTransformation(init, update)


def test_initial_state_equals_init_in_separate_memory():
    params = [(f"p{i}", p) for i, p in enumerate(random_params(shapes=SHAPES))]
    expected = with_every_kind_of_state().init({name: jnp.array(p.detach().numpy(), copy=True) for name, p in params})
    opt = torch_api.OptaxOptimizer(params, with_every_kind_of_state())
    for _, p in params:
        p.grad = torch.zeros_like(p)  # updates nothing
    opt.step()
    addresses = []
    for name, p in params:
        state = {key.split(".")[0]: value for key, value in opt.state[p].items()}
        for key in ("copy", "half", "ones", "negative", "scaled"):
            want = np.asarray(expected[key][name], np.float32)
            np.testing.assert_array_equal(state[key].float().numpy(), want, err_msg=key)
            np.testing.assert_array_equal(np.signbit(state[key].float().numpy()), np.signbit(want), err_msg=key)
            addresses.append(state[key].data_ptr())
    shared = {key.split(".")[0]: value for key, value in opt.state[params[0][1]].items()}
    for key in ("count", "norm", "table", "again"):
        np.testing.assert_array_equal(shared[key].numpy(), np.asarray(expected[key]), err_msg=key)
        addresses.append(shared[key].data_ptr())
    np.testing.assert_array_equal(shared["key"].numpy(), np.asarray(jax.random.key_data(expected["key"])))
    assert len({*addresses, *(p.data_ptr() for _, p in params)}) == len(addresses) + len(params)


def test_zero_state_of_joint_leaves_compiles_nothing():
    """Otherwise each shape and each field would need a program."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    params = random_params(shapes=[(1000 + i, 3) for i in range(12)])  # shapes that no other test uses
    opt = torch_api.OptaxOptimizer(params, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    set_grads(params, random_grads(params))
    opt.step()
    assert sum("backend_compile" in event for event in compiled) <= 2  # one of them is the update


def test_constant_state_of_joint_leaves_needs_no_further_trace_of_init(monkeypatch):
    def init(params):
        like = {
            "half": jax.tree.map(lambda p: jnp.full_like(p, 0.5, dtype=jnp.bfloat16), params),
            "negative": jax.tree.map(lambda p: jnp.full_like(p, -0.0), params),
            "large": jax.tree.map(jnp.zeros_like, params),
        }
        return like | {"count": jnp.full((), 7, jnp.int32), "threes": jnp.full(4, 3.0)}

    traces = []
    traced = initial_state._trace_init
    monkeypatch.setattr(initial_state, "_trace_init", lambda *of: traces.append(of) or traced(*of))
    tx = optax.GradientTransformation(init, with_every_kind_of_state().update)
    params = [(f"p{i}", p) for i, p in enumerate(random_params(shapes=SHAPES))]
    mask = {f"p{i}": i != 1 for i in range(4)}
    opt = torch_api.OptaxOptimizer(params, tx, mask=mask)
    expected = init({name: jnp.asarray(p.detach().numpy()) for name, p in params})

    def check(live):
        addresses = []
        for name, p in live:
            state = {key.split(".")[0]: value for key, value in opt.state[p].items()}
            for key in ("half", "negative", "large"):
                want = np.asarray(expected[key][name], np.float32)
                assert str(state[key].dtype).removeprefix("torch.") == expected[key][name].dtype
                np.testing.assert_array_equal(state[key].float().numpy(), want)
                np.testing.assert_array_equal(np.signbit(state[key].float().numpy()), np.signbit(want))
                addresses.append(state[key].data_ptr())
            assert state["count"] == 7
            np.testing.assert_array_equal(state["threes"].numpy(), [3.0] * 4)
        assert len(set(addresses)) == len(addresses)

    def step(live):
        for _, p in live:
            p.grad = torch.zeros_like(p)
        opt.step()

    trained = [pair for pair in params if mask[pair[0]]]
    step(trained)
    assert traces == []
    check(trained)
    opt.set_trainable("p1", True)  # `init` must be traced again for one leaf
    with pytest.warns(torch_api.CompilationWarning):
        step(params)
    assert len(traces) == 1
    check(params)
