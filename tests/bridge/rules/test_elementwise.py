"""Elementwise update equations match three oracles; broken variants must be detected."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import NumpyAdam, NumpySGD, movement_error

from bridge import rules
from bridge._process import x64
from bridge.rules import per_leaf

pytestmark = pytest.mark.quick

STEPS = 25


def run_rule(tx, params, grads, jit=True):
    """Run a transformation in pure JAX, as optax users do."""
    with jax.numpy_dtype_promotion("standard"):  # optax's rules promote int32 counts
        return _run_rule(tx, params, grads, jit)


def _run_rule(tx, params, grads, jit):
    state = tx.init(params)

    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def data(dtype=np.float64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(6, 4)).astype(dtype), rng.normal(size=(STEPS, 6, 4)).astype(dtype)


def error(ours, theirs, start):
    return movement_error(torch.tensor(np.asarray(ours)), torch.tensor(theirs), torch.tensor(start))


ADAM_OPTIONS = [
    dict(zip(("weight_decay", "amsgrad", "maximize", "decoupled"), values, strict=True))
    for values in itertools.product((0.0, 0.1), (False, True), (False, True), (False, True))
]
SGD_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
    {"maximize": True},
]


def our_adam(decoupled=False, **options):
    return rules.adam(0.01, (0.9, 0.99), decoupled_weight_decay=decoupled, **options)


@pytest.mark.parametrize("options", ADAM_OPTIONS, ids=str)
def test_adam_matches_the_paper(options):
    start, grads = data()
    oracle, p = NumpyAdam(0.01, (0.9, 0.99), **options), start
    for g in grads:
        p = oracle.step(p, g)
    with x64():
        ours, state = run_rule(our_adam(**options), jnp.array(start), jnp.array(grads))
    assert error(ours, p, start) < 1e-12
    assert float(state.step) == STEPS
    assert hasattr(state, "max_exp_avg_sq") is options["amsgrad"]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_matches_the_reference(options):
    start, grads = data()
    oracle, p = NumpySGD(0.05, **options), start
    for g in grads:
        p = oracle.step(p, g)
    with x64():
        ours, _ = run_rule(rules.sgd(0.05, **options), jnp.array(start), jnp.array(grads))
    assert error(ours, p, start) < 1e-12


BROKEN = {
    "sign": lambda: rules.adam(0.01, (0.9, 0.99), maximize=True),
    "beta1": lambda: rules.adam(0.01, (0.8, 0.99)),
    "beta2": lambda: rules.adam(0.01, (0.9, 0.98)),
    "eps": lambda: rules.adam(0.01, (0.9, 0.99), eps=1e-3),
    "decay": lambda: rules.adam(0.01, (0.9, 0.99), weight_decay=1e-3),
    "no bias correction": lambda: optax.chain(optax.scale_by_adam(0.9, 0.99, eps_root=0.0), optax.scale(-0.0101)),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_numpy_oracle_detects_a_broken_adam(broken):
    start, grads = data()
    oracle, p = NumpyAdam(0.01, (0.9, 0.99)), start
    for g in grads:
        p = oracle.step(p, g)
    with x64():
        ours, _ = run_rule(broken(), jnp.array(start), jnp.array(grads))
    assert error(ours, p, start) > 1e-5


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rules.adam(0.01, (0.9, 0.99)), optax.adam(0.01, 0.9, 0.99)),
        (rules.adam(0.01, (0.9, 0.99), weight_decay=0.1, decoupled_weight_decay=True), optax.adamw(0.01, 0.9, 0.99, weight_decay=0.1)),
        (rules.sgd(0.05, 0.9), optax.sgd(0.05, 0.9)),
        (rules.sgd(0.05, 0.9, nesterov=True), optax.sgd(0.05, 0.9, nesterov=True)),
    ],
    ids=["adam", "adamw", "momentum", "nesterov"],
)
def test_equal_equations_of_optax_give_equal_movement(ours, theirs):
    start, grads = data()
    with x64():
        a, _ = run_rule(ours, jnp.array(start), jnp.array(grads))
        b, _ = run_rule(theirs, jnp.array(start), jnp.array(grads))
        wrong, _ = run_rule(optax.adam(0.0101, 0.9, 0.99), jnp.array(start), jnp.array(grads))
    assert error(a, np.array(b), start) < 1e-12
    assert error(wrong, np.array(b), start) > 1e-5


def test_float32_bias_corrections_are_precise_without_x64():
    start, grads = data(np.float32)
    oracle, p = NumpyAdam(0.01, (0.9, 0.999)), start.astype(np.float64)
    for g in grads[:1].astype(np.float64):
        p = oracle.step(p, g)
    ours, _ = run_rule(rules.adam(0.01, (0.9, 0.999)), jnp.array(start), jnp.array(grads[:1]))
    assert error(np.asarray(ours, np.float64), p, start.astype(np.float64)) < 2e-6  # computing 1 - 0.999 in float32 would give 1e-5


def test_each_leaf_has_its_own_step_count():
    tx = rules.adam()
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    state = tx.init(params)
    assert jax.tree.structure(state.step) == jax.tree.structure(params)
    _, state = tx.update(params, state, params)
    state = state._replace(step={"a": state.step["a"], "b": state.step["b"] + 5})
    updates, state = tx.update(params, state, params)
    assert (float(state.step["a"]), float(state.step["b"])) == (2.0, 7.0)
    assert not np.allclose(updates["a"][:2], updates["b"])


@pytest.mark.parametrize("tx", [rules.adam(), rules.sgd()], ids=["adam", "sgd"])
def test_error_without_params_says_how_to_call_update(tx):
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_rules_compose_with_optax():
    params = {"w": jnp.ones(4)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), rules.adam(0.1))
    updates, _ = tx.update({"w": jnp.full(4, 100.0)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)


def lerp_by_definition(start, end, weight):
    """`torch.lerp` by its definition: one of two formulas is selected."""
    return jnp.where(weight < 0.5, start + (end - start) * weight, end - (end - start) * (1 - weight))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.5, 1e30, -1e-30, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("weight", [0.0, 1e-3, 0.1, 0.4999999, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lerp_equals_its_definition_bit_for_bit(dtype, weight):
    rng = np.random.default_rng(0)
    pairs = np.array([*itertools.product(SPECIAL, SPECIAL), *rng.normal(size=(400, 2))], dtype)
    with x64(), jax.numpy_dtype_promotion("standard"):
        ours, plain, other = (
            np.asarray(jax.jit(f)(*map(jnp.asarray, pairs.T), dtype(weight)))
            for f in (per_leaf.lerp, lerp_by_definition, lambda start, end, weight: start * (1 - weight) + end * weight)
        )
    assert same_bits(ours, plain)
    torchs = torch.lerp(*map(torch.tensor, pairs.T), weight).numpy()
    np.testing.assert_allclose(ours, torchs, rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)
    if weight in (0.1, 0.9):
        assert not same_bits(other, plain)


def same_bits(a, b):
    return np.array_equal(np.where(np.isnan(a), 0, a).tobytes(), np.where(np.isnan(b), 0, b).tobytes()) and np.array_equal(
        np.isnan(a), np.isnan(b)
    )
