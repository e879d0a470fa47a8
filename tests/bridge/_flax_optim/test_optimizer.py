"""flax.optim's interface: definitions match float64 NumPy, and optimizers, traversals, checkpoints and replicas work; checks can fail."""

import copy
import dataclasses
import doctest
import functools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import movement_error
from sampling import sampled_tuples

import bridge._flax_optim.optimizer
from bridge._flax_optim.definitions import LAMB, LARS, Adafactor, Adagrad, Adam, GradientDescent, Momentum, RMSProp, WeightNorm
from bridge._flax_optim.optimizer import ModelParamTraversal, MultiOptimizer, Optimizer, OptimizerDef, OptimizerState
from bridge._process import x64

pytestmark = pytest.mark.quick

STEPS = 25
SHAPES = {"weight": (6, 4), "bias": (4,)}


def tree(rng, dtype=np.float64):
    return jax.tree.map(lambda shape: np.asarray(rng.normal(size=shape), dtype), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def data(dtype=np.float64):
    rng = np.random.default_rng(0)
    return tree(rng, dtype), [tree(rng, dtype) for _ in range(STEPS)]


@jax.jit
def step(optimizer, g, overrides):
    return optimizer.apply_gradient(g, **overrides)


def follow_on(optimizer, grads, **overrides):
    for g in grads:
        optimizer = step(optimizer, g, overrides)
    return optimizer


def run(definition, start, grads, **overrides):
    return follow_on(definition.create(jax.tree.map(jnp.asarray, start)), grads, **overrides)


def error(ours, theirs, start):
    """Return the largest relative error of the movement over all leaves."""
    tensors = [[torch.tensor(np.asarray(x)) for x in jax.tree.leaves(each)] for each in (ours, theirs, start)]
    return max(movement_error(*leaf) for leaf in zip(*tensors, strict=True))


def follow(oracle, start, grads, rounded=lambda x: x):
    """Run each leaf through oracle(p, g, s, t) -> p, where the dict s holds its state and t counts from 1."""

    def leaf(p, *gs):
        state = {}
        for t, g in enumerate(gs, 1):
            p = rounded(oracle(p, g, state, t))
            state = {name: rounded(value) for name, value in state.items()}
        return p

    return jax.tree.map(leaf, start, *grads)


def momentum(p, g, s, t, lr=0.05, beta=0.9, weight_decay=0.0, nesterov=False):
    g = g + weight_decay * p
    s["m"] = beta * s.get("m", 0) + g
    return p - lr * (g + beta * s["m"] if nesterov else s["m"])


def adam_direction(g, s, t, beta1, beta2, eps):
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g * g
    return s["m"] / (1 - beta1**t) / (np.sqrt(s["v"] / (1 - beta2**t)) + eps)


def adam(p, g, s, t, lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0):
    return p - lr * adam_direction(g, s, t, beta1, beta2, eps) - lr * weight_decay * p


def adagrad(p, g, s, t, lr=0.05, eps=1e-8):
    s["G"] = s.get("G", 0) + g * g
    return p - lr * g / (np.sqrt(s["G"]) + eps)


def rmsprop(p, g, s, t, lr=0.01, beta2=0.9, eps=1e-8, centered=False):
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g * g
    s["mg"] = beta2 * s.get("mg", 0) + (1 - beta2) * g
    return p - lr * g / (np.sqrt(s["v"] - centered * s["mg"] ** 2) + eps)


def norm(x):
    return np.sqrt(np.sum(x * x))


def lamb(p, g, s, t, lr=0.01, weight_decay=0.0):
    update = adam_direction(g, s, t, 0.9, 0.999, 1e-6) + weight_decay * p
    return p - lr * norm(p) / norm(update) * update


def lars(p, g, s, t, lr=1.0, beta=0.9, weight_decay=0.0, nesterov=False, eps=0.0, flax=False):
    below = norm(g) + weight_decay * norm(p) if flax else norm(g + weight_decay * p)
    scaled = lr * 0.01 * norm(p) / (below + eps) * (g + weight_decay * p)
    s["m"] = beta * s.get("m", 0) + scaled
    return p - (scaled + beta * s["m"] if nesterov else s["m"])


def adafactor(p, g, s, t, lr=0.05, factor=4, scale=True, beta1=None, clip=1.0, decay=None, epsilon2=1e-3, offset=0):
    rate, square = 1 - (t - offset) ** -0.8, g * g + 1e-30
    if g.ndim == 2 and min(g.shape) >= factor:
        s["row"] = rate * s.get("row", 0) + (1 - rate) * square.mean(1)
        s["col"] = rate * s.get("col", 0) + (1 - rate) * square.mean(0)
        y = g / np.sqrt(np.outer(s["row"], s["col"]) / s["row"].mean())
    else:
        s["v"] = rate * s.get("v", 0) + (1 - rate) * square
        y = g / np.sqrt(s["v"])
    y = y / max(1.0, np.sqrt((y * y).mean()) / clip) if clip else y
    y = lr * (max(np.sqrt((p * p).mean()), epsilon2) if scale else 1.0) * y
    if beta1 is not None:
        y = s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * y
    return (1 - (decay or 0.0)) * p - y


def weight_norm(inner, decay=0.0):
    """Apply `inner` to v and g of w = g v / sqrt(|v|^2 + eps), with gradients by the quotient rule."""

    def oracle(p, g, s, t):
        if p.ndim < 2:
            return inner(p, g, s, t)
        if not s:
            scale = np.sqrt((p * p).sum(0, keepdims=True) + 1e-8)
            s.update(v=p / scale, g=scale, sv={}, sg={})
        r = np.sqrt((s["v"] ** 2).sum(0, keepdims=True) + 1e-8)
        along = (g * s["v"]).sum(0, keepdims=True)
        grad_v = s["g"] / r * g - s["g"] * s["v"] * along / r**3 + decay * s["v"]
        s["v"], s["g"] = inner(s["v"], grad_v, s["sv"], t), inner(s["g"], along / r, s["sg"], t)
        return s["g"] * s["v"] / np.sqrt((s["v"] ** 2).sum(0, keepdims=True) + 1e-8)

    return oracle


part = functools.partial
CASES = {
    "sgd": (GradientDescent(0.05), part(momentum, beta=0.0), 1e-12),
    "momentum": (Momentum(0.05), momentum, 1e-12),
    "momentum decay nesterov": (Momentum(0.05, 0.8, 0.1, True), part(momentum, beta=0.8, weight_decay=0.1, nesterov=True), 1e-12),
    "adam": (Adam(0.01, beta2=0.99), adam, 1e-12),
    "adam decoupled decay": (Adam(0.01, 0.8, 0.95, 1e-3, 0.3), part(adam, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3), 1e-12),
    "adagrad": (Adagrad(0.05), adagrad, 1e-6),  # flax adds eps outside the root
    "rmsprop": (RMSProp(0.01), rmsprop, 1e-12),
    "rmsprop centered": (RMSProp(0.01, 0.8, 1e-3, True), part(rmsprop, beta2=0.8, eps=1e-3, centered=True), 1e-12),
    "lamb": (LAMB(0.01, weight_decay=0.1), part(lamb, weight_decay=0.1), 1e-12),
    "lars as flax": (LARS(1.0, trust_coefficient=0.01, eps=0.1), part(lars, flax=True, eps=0.1), 1e-12),
    "lars decay": (LARS(1.0, 0.8, 0.1, 0.01, nesterov=True), part(lars, beta=0.8, weight_decay=0.1, nesterov=True), 1e-12),
    "adafactor": (Adafactor(0.05, min_dim_size_to_factor=4), adafactor, 1e-6),  # optax and flax compute the decay in float32
    "adafactor whole": (Adafactor(0.05, factored=False, epsilon2=0.5), part(adafactor, factor=99, epsilon2=0.5), 1e-6),
    "adafactor all": (
        Adafactor(0.05, True, False, 0.9, step_offset=-3, clipping_threshold=None, weight_decay_rate=0.01, min_dim_size_to_factor=4),
        part(adafactor, scale=False, beta1=0.9, clip=None, decay=0.01, offset=-3),
        1e-6,
    ),
    "weight norm": (WeightNorm(Momentum(0.05)), weight_norm(momentum), 1e-12),
    "weight norm adam decay": (WeightNorm(Adam(0.01, beta2=0.99), wn_decay=0.1), weight_norm(adam, 0.1), 1e-12),
}


@pytest.mark.parametrize("name", CASES)
def test_definition_matches_its_formula(name):
    definition, oracle, bound = CASES[name]
    start, grads = data()
    with x64():
        optimizer = run(definition, start, grads)
    assert error(optimizer.target, follow(oracle, start, grads), start) < bound
    assert int(optimizer.state.step) == STEPS
    assert jax.tree.leaves(optimizer.target)[0].dtype == np.float64


BROKEN = {
    "sgd": GradientDescent(-0.05),
    "momentum": Momentum(0.05, 0.8),
    "momentum decay nesterov": Momentum(0.05, 0.8, 0.1),
    "adam": Adam(0.01, beta2=0.98),
    "adam decoupled decay": Adam(0.01, 0.8, 0.95, 1e-3, 0.2),
    "adagrad": Adagrad(0.05, eps=0.1),
    "rmsprop": RMSProp(0.01, centered=True),
    "rmsprop centered": RMSProp(0.01, 0.8, 1e-2, True),
    "lamb": LAMB(0.01, weight_decay=0.11),
    "lars as flax": LARS(1.0, trust_coefficient=0.01),
    "lars decay": LARS(1.0, 0.8, 0.1, 0.01),
    "adafactor": Adafactor(0.05, min_dim_size_to_factor=5),
    "adafactor whole": Adafactor(0.05, factored=False),
    "adafactor all": Adafactor(0.05, True, False, 0.9, step_offset=-3, weight_decay_rate=0.01, min_dim_size_to_factor=4),
    "weight norm": Momentum(0.05),
    "weight norm adam decay": WeightNorm(Adam(0.01, beta2=0.99)),
}


@pytest.mark.parametrize("name", CASES)
def test_formula_detects_a_broken_definition(name):
    start, grads = data()
    with x64():
        optimizer = run(BROKEN[name], start, grads)
    assert error(optimizer.target, follow(CASES[name][1], start, grads), start) > 1e-4


@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop", "lamb", "adafactor", "weight norm"])
def test_float32_matches_the_formula(name):
    definition, oracle, _ = CASES[name]
    start, grads = data(np.float32)
    theirs = follow(oracle, *jax.tree.map(np.float64, (start, grads)))
    assert error(run(definition, start, grads).target, theirs, start) < 3e-5


@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop"])
def test_half_types_are_rounded_once_per_step(name):
    definition, oracle, _ = CASES[name]
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), data(np.float32))
    start, grads = jax.tree.map(np.float64, half)
    ours, naive = run(definition, *half), run_optax(OPTAX[name][1], *half)[0]
    theirs = follow(oracle, start, grads, lambda x: np.float64(np.asarray(x, jnp.bfloat16)))
    errors = [error(jax.tree.map(np.float64, target), theirs, start) for target in (ours.target, naive)]
    assert errors[0] < 0.01 < errors[1]
    before, after = jax.tree.map(lambda x: (x.shape, x.dtype), (definition.create(half[0]), ours))
    assert before == after
    assert ours.target["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "definition", [Adafactor(0.05, beta1=0.9), WeightNorm(Adam(0.1)), LAMB(0.1)], ids=["adafactor", "weight norm", "lamb"]
)
def test_dtypes_of_half_parameters_and_their_state_are_kept(definition):
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.float16), data(np.float32))
    ours = run(definition, half[0], half[1][:2])
    before, after = jax.tree.map(lambda x: (x.shape, x.dtype), (definition.create(half[0]), ours))
    assert before == after
    assert ours.target["weight"].dtype == jnp.float16
    assert np.isfinite(ours.target["weight"]).all()


def test_zero_gradient_in_float16_gives_no_nan():
    optimizer = run(Adam(0.01), {"w": jnp.ones((3,), jnp.float16)}, [{"w": jnp.zeros((3,), jnp.float16)}] * 3)
    assert optimizer.target["w"].tolist() == [1.0, 1.0, 1.0]


OPTAX = {
    "sgd": (GradientDescent(0.05), optax.sgd(0.05)),
    "momentum": (Momentum(0.05, nesterov=True), optax.sgd(0.05, momentum=0.9, nesterov=True)),
    "adam": (Adam(0.01, weight_decay=0.1), optax.adamw(0.01, weight_decay=0.1)),
    "adagrad": (Adagrad(0.05, eps=1e-3), optax.adagrad(0.05, initial_accumulator_value=0.0, eps=1e-6)),
    "rmsprop": (RMSProp(0.01, 0.8, centered=True), optax.rmsprop(0.01, 0.8, eps_in_sqrt=False, centered=True)),
    "lamb": (LAMB(0.01, weight_decay=0.1), optax.lamb(0.01, weight_decay=0.1)),
    "lars": (LARS(0.5, weight_decay=0.1), optax.lars(0.5, 0.1)),
    "adafactor": (Adafactor(0.05, beta1=0.9), optax.adafactor(0.05, momentum=0.9)),
}


def run_optax(tx, start, grads):
    """Run a transformation as optax users do; optax itself promotes int32 counts."""
    with jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(jnp.asarray, start)
        state = tx.init(params)

        def body(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), jax.tree.map(lambda *g: jnp.stack(g), *grads))[0]


@pytest.mark.parametrize("name", OPTAX)
def test_definition_is_a_transformation_equal_to_its_optax_form(name):
    ours, theirs = OPTAX[name]
    start, grads = data(np.float32)
    mine, state = run_optax(ours, start, grads)
    assert error(mine, run_optax(theirs, start, grads)[0], start) < 3e-6
    assert isinstance(state, OptimizerState)
    assert error(mine, jax.tree.map(lambda p, s: s + 1.01 * (p - s), mine, start), start) > 1e-3


def weights(params):
    return jax.tree.map(lambda p: np.ndim(p) > 1, params)


def both(params):
    return jax.tree.map(lambda p: "matrix" if np.ndim(p) > 1 else "rest", params)


PLACES = {
    "chain": lambda a, b: optax.chain(optax.clip_by_global_norm(1.0), a),
    "masked": lambda a, b: optax.masked(a, weights),
    "partition": lambda a, b: optax.partition({"matrix": a, "rest": b}, both),
    "MultiSteps": lambda a, b: optax.MultiSteps(a, 2),
    "apply_if_finite": lambda a, b: optax.apply_if_finite(optax.chain(optax.scale(2.0), a), 3),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_definition_works_wherever_optax_takes_a_transformation(place):
    start, grads = data(np.float32)
    ours, _ = run_optax(place(Momentum(0.05), Adam(0.01)), start, grads)
    theirs, _ = run_optax(place(optax.sgd(0.05, momentum=0.9), optax.adam(0.01)), start, grads)
    alone, _ = run_optax(optax.sgd(0.05, momentum=0.9), start, grads)
    assert error(ours, theirs, start) < 3e-6
    assert error(ours, alone, start) > 1e-3


def test_tree_map_params_maps_parameter_state_only():
    start, _ = data(np.float32)
    definition = Adam(0.1)
    state = optax.tree_utils.tree_map_params(definition, lambda x: x + 1, definition.init(start))
    assert int(state.step) == 0
    assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(state.param_states))


def test_update_without_params_raises_the_error_of_optax():
    definition = Momentum(0.1)
    state = definition.init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"not passing `params` when calling `update`"):
        definition.update({"w": jnp.ones(3)}, state)
    with_extra, _ = definition.update({"w": jnp.ones(3)}, state, {"w": jnp.ones(3)}, value=1.0)
    assert with_extra["w"].tolist() == pytest.approx([-0.1] * 3)


def test_update_of_unmatched_leaves_changes_no_bit():
    params = {"w": jnp.array([-0.0, 0.0, jnp.inf, 1.0]), "b": jnp.ones(2)}
    definition = MultiOptimizer(("b", GradientDescent(0.1)))
    updates, _ = definition.update({"w": jnp.full(4, jnp.nan), "b": jnp.ones(2)}, definition.init(params), params)
    after = optax.apply_updates(params, updates)
    assert np.asarray(after["w"]).tobytes() == np.asarray(params["w"]).tobytes()
    assert after["b"].tolist() == pytest.approx([0.9, 0.9])


# The base class


def test_example_of_the_docstring_runs():
    source = bridge._flax_optim.optimizer.__doc__
    definition = [line for line in source.split("\n") if line.startswith((">>> class", "..."))]
    assert len(definition) == 11
    example = doctest.DocTestParser().get_doctest(source, vars(bridge._flax_optim.optimizer).copy(), "optim", None, 0)
    results = doctest.DocTestRunner().run(example)
    assert results.attempted >= 5
    assert results.failed == 0


class TupleParams(NamedTuple):
    learning_rate: Any
    beta: Any = 0.9


@dataclasses.dataclass
class PlainParams:
    learning_rate: Any
    beta: Any = 0.9


class ObjectParams:
    def __init__(self, learning_rate, beta=0.9):
        self.learning_rate, self.beta = learning_rate, beta


class Signum(OptimizerDef):
    def init_param_state(self, param):
        return jnp.zeros_like(param)

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        assert param.dtype != jnp.bfloat16
        state = hyper_params.beta * state + (1 - hyper_params.beta) * grad
        return param - hyper_params.learning_rate * jnp.sign(state), state


def signum(p, g, s, t, lr=0.1, beta=0.9):
    s["m"] = beta * s.get("m", 0) + (1 - beta) * g
    return p - lr * np.sign(s["m"])


@pytest.mark.parametrize("kind", [TupleParams, PlainParams, ObjectParams])
def test_hyper_params_may_be_any_object_with_attributes(kind):
    start, grads = data()
    definition = Signum(kind(0.1))
    with x64():
        ours = run(definition, start, grads)
        traced = jax.jit(lambda rate: run(definition.with_hyper_params(lr=rate), start, grads, beta=0.5))(0.2)
    assert error(ours.target, follow(signum, start, grads), start) < 1e-12
    assert error(traced.target, follow(part(signum, lr=0.2, beta=0.5), start, grads), start) < 1e-12
    assert error(traced.target, follow(signum, start, grads), start) > 0.1
    assert definition.hyper_param_values() == {"learning_rate": 0.1, "beta": 0.9}
    assert type(definition.with_hyper_params(beta=0.8)) is Signum
    assert definition.with_hyper_params(beta=0.8).hyper_param_values() == {"learning_rate": 0.1, "beta": 0.8}
    assert repr(definition) == "Signum(learning_rate=0.1, beta=0.9)"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_traced_hyper_params_do_not_change_dtypes(dtype):
    params = {"w": jnp.ones((3,), dtype)}
    optimizer = Signum(TupleParams(0.5)).create(params)
    with x64():  # strict promotion would refuse float64 * float32
        after = jax.jit(lambda o, g, rate: o.apply_gradient(g, lr=rate))(optimizer, params, jnp.asarray(0.25, jnp.float64))
    assert after.target["w"].tolist() == [0.75] * 3
    assert (after.target["w"].dtype, after.state.param_states["w"].dtype) == (dtype, dtype)


def test_abstract_definition_names_the_missing_method():
    with pytest.raises(NotImplementedError, match=r"OptimizerDef does not define init_param_state\(param\)"):
        OptimizerDef(None).create({"w": jnp.ones(1)})
    assert OptimizerDef(None).hyper_param_values() == {}


def test_code_written_for_flax_optim_runs():
    optimizer = Momentum(learning_rate=0.1, beta=0.2).create(np.ones((1,)))
    assert (int(optimizer.state.step), optimizer.state.param_states.momentum.tolist()) == (0, [0.0])
    state = OptimizerState(1, type(optimizer.state.param_states)(jnp.array([1.0])))
    params, state = optimizer.optimizer_def.apply_gradient(optimizer.optimizer_def.hyper_params, np.ones((1,)), state, np.array([3.0]))
    assert params.tolist() == pytest.approx([1.0 - 0.32])
    assert (state.step, state.param_states.momentum.tolist()) == (2, pytest.approx([3.2]))
    adam = Adam(0.1, 0.2, 0.9, 0.01)
    state = OptimizerState(1, type(adam.init_param_state(np.ones(1)))(np.array([0.1], np.float32), np.array([0.9], np.float32)))
    params, _ = adam.apply_gradient(adam.hyper_params, np.array([1.0]), state, np.array([4.0]))
    assert params.tolist() == pytest.approx([0.906085])  # the bias correction is that of step 2, which follows the state's step
    empty = Momentum(0.1).create({}).apply_gradient({})
    assert (empty.target, int(empty.state.step)) == ({}, 1)
    assert GradientDescent(1.0).create({"a": 0.0}).apply_gradient({"a": -1.0}).target == {"a": 1.0}


def test_hyper_params_are_pytrees_with_static_structure():
    hyper_params = Momentum(0.1, nesterov=True).hyper_params
    assert jax.tree.leaves(hyper_params) == [0.1, 0.9, 0.0]
    definition, params = Momentum(0.1), {"w": jnp.ones(3)}
    plain = step(definition.create(params), params, {"hyper_params": definition.hyper_params.replace(learning_rate=0.5)})
    nesterov = step(definition.create(params), params, {"hyper_params": hyper_params})
    assert (plain.target["w"].tolist(), nesterov.target["w"].tolist()) == (pytest.approx([0.5] * 3), pytest.approx([0.81] * 3))


def test_learning_rate_may_come_with_the_call_or_as_a_schedule():
    params = {"w": jnp.ones(2)}
    optimizer = Momentum().create(params)
    with pytest.raises(
        ValueError, match=r"Momentum was given no learning rate. Pass learning_rate= to Momentum\(...\) or to apply_gradient"
    ):
        optimizer.apply_gradient(params)
    assert optimizer.apply_gradient(params, lr=0.5).target["w"].tolist() == [0.5, 0.5]
    scheduled = run(GradientDescent(lambda step: 0.5**step), params, [params] * 3)
    assert scheduled.target["w"].tolist() == pytest.approx([1 - 1 - 0.5 - 0.25] * 2)


def test_lr_is_an_alias_of_learning_rate():
    for kind in (GradientDescent, Momentum, Adam, Adagrad, RMSProp, LAMB, LARS, Adafactor):
        assert kind(lr=0.25).hyper_params.learning_rate == 0.25
        assert kind(0.1).update_hyper_params(lr=0.25).learning_rate == 0.25
        assert kind(0.1).with_hyper_params(lr=0.25).hyper_params.learning_rate == 0.25
        with pytest.raises(TypeError, match=f"{kind.__name__} got both lr and learning_rate"):
            kind(0.1, lr=0.1)
        with pytest.raises(TypeError, match=f"{kind.__name__} got both lr and learning_rate"):
            kind().update_hyper_params(lr=0.1, learning_rate=0.1)


def test_error_names_unknown_and_known_hyper_params():
    message = r"Momentum has no hyper param 'bta'. Known: learning_rate, beta, weight_decay, nesterov."
    for call in (Momentum(0.1).update_hyper_params, Momentum(0.1).with_hyper_params, Momentum(0.1).create({}).apply_gradient):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(**({"grads": {}} if "apply" in call.__name__ else {}), bta=0.5)
    with pytest.raises(TypeError, match="Momentum has no hyper param 'x'"):
        MultiOptimizer(("*", Momentum(0.1))).update_hyper_params(x=1)


def test_changed_hyper_params_compile_nothing():
    traces = []

    @jax.jit
    def counted(optimizer, g, **overrides):
        traces.append(None)
        return optimizer.apply_gradient(g, **overrides)

    start, grads = data(np.float32)
    start = jax.tree.map(jnp.asarray, start)
    multi = MultiOptimizer(("weight", WeightNorm(Adam(0.1))), ("bias", Momentum(0.1)))
    for definition, names in ((Adam(0.1), ("lr", "beta1", "eps")), (Adafactor(0.1), ("lr",)), (multi, ("lr", "0.beta1", "0.wn_decay"))):
        traces.clear()
        optimizer, seen = definition.create(start), []
        for value in (0.5, 0.25, 0.125):
            optimizer = counted(optimizer, grads[0], **{name: jnp.float32(value) for name in names})
            seen.append(np.asarray(optimizer.target["weight"]))
        assert len(traces) == 1
        assert np.abs(seen[1] - seen[0]).max() > 1e-3


def test_changed_state_structure_raises():
    params = {"w": jnp.ones((2, 3))}
    optimizer = RMSProp(0.1).create(params)
    assert optimizer.state.param_states["w"].mg is None
    with pytest.raises(ValueError, match=r"RMSProp: the state has no 'mg' of shape \(2, 3\). What decides its structure must be the same"):
        optimizer.apply_gradient(params, centered=True)
    with pytest.raises(ValueError, match=r"Adafactor: the state has no 'm' of shape \(2, 3\)"):
        Adafactor(0.1).create(params).apply_gradient(params, beta1=0.9)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda flag: Momentum(0.1).create(params).apply_gradient(params, nesterov=flag))(True)


def test_error_names_a_gradient_that_does_not_fit():
    optimizer = Momentum(0.1).create({"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"Momentum: the gradient of 'a.w' is an array of shape \(3,\); expected one of shape \(2, 3\)"):
        optimizer.apply_gradient({"a": {"w": jnp.ones(3)}, "b": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"the gradient of 'b' is None"):
        optimizer.apply_gradient({"a": {"w": jnp.ones((2, 3))}, "b": None})
    with pytest.raises(ValueError, match=r"grads must have the structure of the parameters"):
        optimizer.apply_gradient({"a": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"the state must have the structure of the parameters"):
        optimizer.replace(target={"a": jnp.ones(3)}).apply_gradient({"a": jnp.ones(3)})


def test_optimizer_is_a_pytree_and_can_be_copied_and_pickled():
    start, grads = data(np.float32)
    optimizer = run(Adam(0.1), start, grads[:2])
    assert len(jax.tree.leaves(optimizer)) == 1 + 3 * 2
    assert isinstance(jax.tree.map(lambda x: x, optimizer), Optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        ours, theirs = optimizer.apply_gradient(grads[2]), other.apply_gradient(grads[2])
        assert jax.tree.all(jax.tree.map(np.array_equal, ours.target, theirs.target))


# Weight normalization


def test_weight_norm_separates_direction_and_scale():
    params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.ones(2)}
    optimizer = WeightNorm(Momentum(0.1)).create(params).apply_gradient(jax.tree.map(jnp.ones_like, params))
    assert np.allclose(optimizer.target["kernel"], 1.9)
    assert np.allclose(optimizer.target["bias"], 0.9)
    state = optimizer.state.param_states["kernel"]
    assert np.allclose(state.scale, 1.9 * 2**0.5)
    assert (state.direction_state.momentum.shape, state.scale_state.momentum.shape) == ((2, 2), (1, 2))
    assert optimizer.state.param_states["bias"].scale == ()
    across = WeightNorm(GradientDescent(0.1)).create(params)  # a gradient orthogonal to the direction keeps the norms
    across = across.apply_gradient({"kernel": jnp.array([[1.0, 1.0], [-1.0, -1.0]]), "bias": jnp.ones(2)})
    assert np.allclose(np.linalg.norm(across.target["kernel"], axis=0), np.linalg.norm(params["kernel"], axis=0))
    assert np.abs(np.asarray(across.target["kernel"]) - 2.0).min() > 0.05


def test_weight_norm_shares_hyper_params_with_its_inner_definition():
    definition = WeightNorm(Momentum(0.1), wn_decay=0.5)
    values = {"learning_rate": 0.1, "beta": 0.9, "weight_decay": 0.0, "nesterov": False, "wn_decay": 0.5, "wn_eps": 1e-8}
    assert definition.hyper_param_values() == values
    hyper_params = definition.update_hyper_params(lr=0.2, wn_decay=0.25)
    assert (hyper_params.inner.learning_rate, hyper_params.wn_decay, hyper_params.wn_eps) == (0.2, 0.25, 1e-8)
    other = definition.with_hyper_params(**(values | {"beta": 0.5, "wn_eps": 0.1}))
    assert (other.hyper_params.inner.beta, other.wrapped_optimizer.hyper_params.beta, other.hyper_params.wn_eps) == (0.5, 0.5, 0.1)
    assert definition.hyper_param_values() == values


def test_weight_norm_moves_an_output_of_zeros():
    params = {"kernel": jnp.zeros((4, 2))}
    optimizer = run(WeightNorm(Momentum(0.1)), params, [{"kernel": jnp.ones((4, 2))}] * 20)
    assert np.isfinite(optimizer.target["kernel"]).all()
    assert np.abs(optimizer.target["kernel"]).min() > 1e-3


# Several definitions

PARAMS = {"body": {"weight": jnp.ones((3, 2)), "bias": jnp.ones(2)}, "head": {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def moved(optimizer):
    paths = jax.tree_util.tree_leaves_with_path(optimizer.target)
    return {bridge._names.path_name(path): round(1 - float(leaf.ravel()[0]), 5) for path, leaf in paths if float(leaf.ravel()[0]) != 1}


SELECTORS = {
    "traversal": ModelParamTraversal(lambda path, _: path.startswith("/head/")),
    "glob": "head.*",
    "list": ["head.weight", "head.bias"],
    "regex": re.compile(r"^head\."),
    "callable": lambda name, _: name.startswith("head"),
    "prefix": {"head": True},
    "tree": {"body": {"weight": False, "bias": False}, "head": {"weight": True, "bias": True}},
}


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS.keys())
def test_multi_optimizer_accepts_traversals_and_selectors(selector):
    for optimizer in (GradientDescent(0.5).create(PARAMS, focus=selector), MultiOptimizer((selector, GradientDescent(0.5))).create(PARAMS)):
        assert optimizer.state.param_states["body"] == {"weight": None, "bias": None}
        after = optimizer.apply_gradient(GRADS)
        assert moved(after) == {"head.weight": 0.5, "head.bias": 0.5}
        assert after.target["body"]["weight"] is PARAMS["body"]["weight"]
        assert after.state.param_states["body"] == {"weight": None, "bias": None}
        assert int(after.state.step) == 1


def test_each_leaf_is_updated_by_its_definition():
    weights = ModelParamTraversal(lambda path, param: path.endswith("/weight") and param.ndim == 2)
    optimizer = MultiOptimizer((weights, Momentum(0.5)), ("*.bias", Adam(0.25))).create(PARAMS)
    after = jax.jit(lambda o, g: o.apply_gradient(g))(optimizer, GRADS)
    assert moved(after) == {"body.weight": 0.5, "head.weight": 0.5, "body.bias": 0.25, "head.bias": 0.25}
    alone = run(Adam(0.25), PARAMS["head"], [GRADS["head"]] * 20)
    many = run(optimizer.optimizer_def, PARAMS, [GRADS] * 20)
    assert np.allclose(many.target["head"]["bias"], alone.target["bias"], rtol=1e-6)
    assert not np.allclose(many.target["head"]["weight"], alone.target["weight"], rtol=1e-2)


def test_leaf_matched_by_two_pairs_raises_and_all_are_named():
    definition = MultiOptimizer(
        (ModelParamTraversal(lambda path, _: "head" in path), Adam(0.1)), ("body.*", Adam(0.1)), ("*.bias", Momentum(0.1))
    )
    message = (
        r"Multiple optimizers match the same leaves: 'body.bias' belongs to pairs 1 \(Adam, by mask 'body.\*'\) and "
        r"2 \(Momentum, by mask '\*.bias'\). Narrow one"
    )
    for init in (definition.create, jax.jit(definition.init_state), definition.init):
        with pytest.raises(ValueError, match=message):
            init(PARAMS)


def test_multi_optimizer_refuses_wrong_pairs():
    with pytest.raises(ValueError, match=r"the pattern 'haed.\*' matches none of 4 parameters. Did you mean"):
        MultiOptimizer(("haed.*", Adam(0.1))).create(PARAMS)
    with pytest.raises(TypeError, match=r"expected pairs of \(selector, OptimizerDef\), got \('\*', 0.1\)"):
        MultiOptimizer(("*", 0.1))
    with pytest.raises(TypeError, match="got none"):
        MultiOptimizer()
    elements = {"body": {"weight": True, "bias": np.array([True, False])}, "head": {"weight": True, "bias": True}}
    with pytest.raises(TypeError, match=r"'body.bias' got an array from .*; a pair owns whole leaves"):
        MultiOptimizer((elements, Adam(0.1))).create(PARAMS)
    with pytest.raises(TypeError, match=r"ModelParamTraversal: expected a function \(path, param\) -> bool, got 'head'"):
        ModelParamTraversal("head")
    stranger = MultiOptimizer(("body.*", Adam(0.1))).create(PARAMS)
    with pytest.raises(ValueError, match=r"'body.bias' has a state but no selector names it"):
        stranger.replace(optimizer_def=MultiOptimizer(("*.weight", Adam(0.1)))).apply_gradient(GRADS)


def test_gradients_of_frozen_leaves_may_be_none():
    definition = MultiOptimizer(("*.weight", GradientDescent(0.5)), ("*.bias", Momentum(0.5)))
    focused = MultiOptimizer(("*.bias", GradientDescent(0.5))).create(PARAMS)
    after = focused.apply_gradient({"body": {"weight": None, "bias": jnp.ones(2)}, "head": {"weight": None, "bias": jnp.ones(2)}})
    assert moved(after) == {"body.bias": 0.5, "head.bias": 0.5}
    # Biases are None here, so their pattern matches nothing, which is not an error.
    some = jax.tree_util.tree_map_with_path(lambda path, x: x if x.ndim == 2 else None, PARAMS)
    state = definition.init(PARAMS)
    states = jax.tree.structure(PARAMS).flatten_up_to(state.param_states)
    states = jax.tree.structure(PARAMS).unflatten(
        [s if p.ndim == 2 else None for s, p in zip(states, jax.tree.leaves(PARAMS), strict=True)]
    )
    updates, _ = definition.update(some, OptimizerState(state.step, states), some)
    assert [u.ravel()[0].item() for u in jax.tree.leaves(updates)] == [-0.5, -0.5]


class Stateless(GradientDescent):
    def init_param_state(self, param):
        return None

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        return param - hyper_params.learning_rate * grad, None


def test_only_unmatched_leaves_have_state_none():
    optimizer = MultiOptimizer(("head.*", Stateless(0.5))).create(PARAMS).apply_gradient(GRADS).apply_gradient(GRADS)
    assert moved(optimizer) == {"head.weight": 1.0, "head.bias": 1.0}
    assert optimizer.state.param_states == {"body": {"weight": None, "bias": None}, "head": {"weight": (), "bias": ()}}


def test_hyper_params_of_a_call_may_address_one_pair_or_all():
    optimizer = MultiOptimizer(("body.*", GradientDescent(0.5)), ("head.*", Momentum(0.25))).create(PARAMS)
    definition = optimizer.optimizer_def
    assert [hp.learning_rate for hp in definition.hyper_params] == [0.5, 0.25]
    by_hand = [definition.hyper_params[0].replace(learning_rate=0.75), None]
    expected = {
        "list": ({"hyper_params": by_hand}, 0.75, 0.25),
        "all": ({"lr": 0.125}, 0.125, 0.125),
        "one": ({"1.learning_rate": 0.75}, 0.5, 0.75),
        "one wins": ({"1.learning_rate": 0.75, "learning_rate": 0.125}, 0.125, 0.75),
        "list and one": ({"hyper_params": by_hand, "1.lr": 0.0625}, 0.75, 0.0625),
    }
    for overrides, body, head in expected.values():
        result = moved(optimizer.apply_gradient(GRADS, **overrides))
        assert (result["body.weight"], result["head.weight"]) == (body, pytest.approx(head, abs=1e-4))
        other = definition.with_hyper_params(**overrides)
        assert (
            [hp.learning_rate for hp in other.hyper_params]
            == [sub.hyper_params.learning_rate for sub in other.sub_optimizers]
            == [body, head]
        )
    values = {f"1.{name}": value for name, value in Momentum(0.25).hyper_param_values().items()}
    assert definition.hyper_param_values() == {"0.learning_rate": 0.5} | values
    with pytest.raises(ValueError, match=r"hyper_params must be a list of 2 entries \(None keeps a pair's own\), got \[None\]"):
        optimizer.apply_gradient(GRADS, hyper_params=[None])
    with pytest.raises(TypeError, match=r"MultiOptimizer has no hyper param '2.lr'. Known: 0.learning_rate, 1.learning_rate, 1.beta"):
        optimizer.apply_gradient(GRADS, **{"2.lr": 1.0})


def test_definitions_may_be_nested_and_see_names():
    inner = MultiOptimizer(("head.weight", GradientDescent(0.5)), ("head.bias", GradientDescent(0.25)))
    optimizer = MultiOptimizer(("head.*", inner), ("body.*", WeightNorm(GradientDescent(0.125)))).create(PARAMS)
    after = optimizer.apply_gradient(GRADS)
    assert (moved(after)["head.weight"], moved(after)["head.bias"], moved(after)["body.bias"]) == (0.5, 0.25, 0.125)
    assert list(optimizer.optimizer_def.hyper_param_values())[:2] == ["0.0.learning_rate", "0.1.learning_rate"]
    after = optimizer.apply_gradient(GRADS, **{"0.1.lr": 0.75})
    assert (moved(after)["head.weight"], moved(after)["head.bias"], moved(after)["body.bias"]) == (0.5, 0.75, 0.125)


def test_traversal_iterates_and_updates():
    traversal = ModelParamTraversal(lambda path, _: re.search("/head/", path))
    assert [leaf.shape for leaf in traversal.iterate(PARAMS)] == [(2,), (2, 2)]
    updated = traversal.update(lambda x: x.ndim, PARAMS)
    assert updated["head"] == {"weight": 2, "bias": 1}
    assert updated["body"]["bias"] is PARAMS["body"]["bias"]


# Saving and restoring


@pytest.mark.parametrize("name", [*CASES, "multi"])
def test_state_dict_is_plain_and_restores_exactly(name):
    definition = CASES[name][0] if name in CASES else MultiOptimizer(("weight", Adam(0.1)))
    start, grads = data(np.float32)
    trained = run(definition, start, grads[:3])
    saved = trained.state_dict()

    def plain(node):
        assert isinstance(node, jax.Array | np.ndarray | int) or all(isinstance(key, str) and plain(value) for key, value in node.items())
        return True

    assert plain(saved)
    host = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, saved)))
    restored = definition.create(jax.tree.map(jnp.zeros_like, start)).restore_state(host)
    ours, theirs = (follow_on(o, grads[3:6]) for o in (restored, trained))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    fresh = definition.create(jax.tree.map(jnp.asarray, start))
    assert not jax.tree.all(jax.tree.map(np.array_equal, follow_on(fresh, grads[3:6]).target, theirs.target))


def test_state_dict_has_the_layout_of_flax():
    by_flax = {
        "target": {"dense": {"kernel": np.full((2, 3), 5.0, np.float32)}},
        "state": {
            "step": np.int32(7),
            "param_states": {"dense": {"kernel": {n: np.full((2, 3), v, np.float32) for n, v in (("grad_ema", 1), ("grad_sq_ema", 2))}}},
        },
    }
    optimizer = Adam(0.1).create({"dense": {"kernel": jnp.zeros((2, 3))}})
    assert jax.tree.structure(optimizer.state_dict()) == jax.tree.structure(by_flax)
    restored = optimizer.restore_state(by_flax)
    assert (
        int(restored.state.step),
        restored.state.param_states["dense"]["kernel"].grad_sq_ema[0, 0],
        restored.target["dense"]["kernel"][0, 0],
    ) == (7, 2, 5)
    centred = {"step": 3, "param_states": {"v": np.ones(2, np.float32), "mg": None}}
    assert int(RMSProp(0.1).create(jnp.zeros(2)).restore_state({"target": np.ones(2, np.float32), "state": centred}).state.step) == 3
    adafactor = Adafactor(0.1).create({"w": jnp.zeros(2)}).state.param_states["w"]
    assert {name: value.shape for name, value in adafactor._asdict().items()} == {"v_row": (1,), "v_col": (1,), "v": (2,), "m": (1,)}


def test_state_dict_that_does_not_fit_raises_and_names_the_entry():
    optimizer = MultiOptimizer(("head.*", Momentum(0.1))).create(PARAMS)
    saved = optimizer.state_dict()
    assert saved["state"]["param_states"].keys() == {"head"}

    def changed(**arrays):
        other = copy.deepcopy(saved)
        other["state"]["param_states"]["head"]["bias"] = arrays
        return other

    with pytest.raises(ValueError, match=r"the saved state has no entry 'state.param_states.head.bias.momentum' \(1 such\). Did you mean"):
        optimizer.restore_state(changed())
    with pytest.raises(ValueError, match=r"this optimizer has no entry 'state.param_states.head.bias.mass' \(1 such\)"):
        optimizer.restore_state(changed(momentum=np.zeros(2, np.float32), mass=np.zeros(2)))
    with pytest.raises(
        ValueError, match=r"'state.param_states.head.bias.momentum' has shape \(3,\) and dtype float32; expected shape \(2,\)"
    ):
        optimizer.restore_state(changed(momentum=np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match=r"has shape \(2,\) and dtype float64; expected shape \(2,\) and dtype float32"):
        optimizer.restore_state(changed(momentum=np.zeros(2)))
    with pytest.raises(ValueError, match=r"the saved state has no entry 'state.step' \(7 such\). It is empty"):
        optimizer.restore_state({})
    whole = Momentum(0.1).create(PARAMS).state_dict()  # trained whole before: state of frozen leaves must not be dropped silently
    with pytest.raises(ValueError, match=r"this optimizer has no entry 'state.param_states.body.bias.momentum' \(2 such\)"):
        optimizer.restore_state(whole)


# Replicas

REPLICAS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from bridge._flax_optim.optimizer import MultiOptimizer, ReplicatedOptimizer
from bridge._flax_optim.definitions import Adam, Momentum

out = {"devices": jax.local_device_count()}
mesh = Mesh(np.array(jax.local_devices()), ("batch",))
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
start = {"body": {"weight": normal(3, 2), "bias": normal(2)}, "frozen": normal(2)}
xs, ys = normal(20, 8, 4, 3), normal(20, 8, 4, 2)
loss = lambda p, x, y: jnp.mean((x @ p["body"]["weight"] + p["body"]["bias"] * p["frozen"] - y) ** 2)
first = lambda tree: jax.tree.map(lambda x: x[0], tree)
stacked = lambda tree: jax.tree.map(lambda x: x[None], tree)
each_grad = jax.vmap(jax.grad(loss), (None, 0, 0))
step = lambda o, x, y: o.apply_gradient(jax.grad(loss)(o.target, x, y))
movement = lambda a, b: float(max(
    jnp.linalg.norm(p - q) / jnp.linalg.norm(q - s) for p, q, s in zip(*map(jax.tree.leaves, (a["body"], b["body"], start["body"])))))

class Sum(ReplicatedOptimizer):
    def apply_gradient(self, hp, params, state, grads):
        return self.optimizer_def.apply_gradient(hp, params, state, jax.lax.psum(grads, self.axis_name))

class Each(ReplicatedOptimizer):
    def apply_gradient(self, hp, params, state, grads):
        return self.optimizer_def.apply_gradient(hp, params, state, grads)

def distributed(how, optimizer):
    if how == "pmap":
        f = jax.pmap(step, axis_name="batch")
    else:
        inside = lambda o, x, y: stacked(step(first(o), x[0], y[0]))
        f = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(P("batch"), P("batch"), P("batch")), out_specs=P("batch")))
    for x, y in zip(xs, ys):
        optimizer = f(optimizer, x, y)
    return optimizer

multi = MultiOptimizer(("*.weight", Momentum(0.05)), ("*.bias", Adam(0.05)))
for name, definition in {"momentum": Momentum(0.05), "multi": multi}.items():
    single = definition.create(start)
    mean = jax.jit(lambda o, x, y: o.apply_gradient(jax.tree.map(lambda g: g.mean(0), each_grad(o.target, x, y))))
    for x, y in zip(xs, ys):
        single = mean(single, x, y)
    for how in ("pmap", "shard_map"):
        replicated = definition.create(start).replicate()
        done = distributed(how, replicated)
        back = done.unreplicate()
        weight = done.target["body"]["weight"]
        out[f"{name} {how}"] = {
            "error": movement(back.target, single.target),
            "broken": [
                movement(first(distributed(how, replicated.replace(optimizer_def=kind(definition)))).target, single.target)
                for kind in ((Sum, Each) if name == "momentum" else ())
            ],
            "equal": bool((weight == weight[:1]).all()), "shape": list(weight.shape), "on": len(weight.sharding.device_set),
            "back on": len(back.target["body"]["weight"].devices()), "same def": back.optimizer_def is definition,
            "frozen": bool((back.target["frozen"] == start["frozen"]).all()), "steps": int(back.state.step),
        }

saved = done.state_dict()
fresh = multi.create(jax.tree.map(jnp.zeros_like, start)).replicate()
restored = fresh.restore_state(jax.tree.map(np.asarray, saved))
out["saved shape"] = list(saved["target"]["body"]["weight"].shape)
out["restored"] = bool((restored.target["body"]["weight"] == done.target["body"]["weight"]).all()) and int(restored.state.step[3]) == 20
out["restored on"] = len(restored.target["body"]["weight"].sharding.device_set)
few = Momentum(0.05).create(start).replicate(devices=jax.local_devices()[:2], axis_name="data")
out["few"] = [list(few.target["frozen"].shape), few.optimizer_def.axis_name, few.optimizer_def.hyper_param_values()["learning_rate"]]
rate = jax.pmap(lambda o, g, lr: o.apply_gradient(g, lr=lr), axis_name="data", in_axes=(0, 0, None), devices=jax.local_devices()[:2])
g = jax.tree.map(lambda x: jnp.stack([x * 0, x * 0 + 4]), start)
out["rate"] = [float((few.target["frozen"] - rate(few, g, lr).target["frozen"])[0, 0]) for lr in (0.5, 0.25)]

# One optimizer for all replicas takes the mean of explicit gradients; jax's own gradients would already be summed.
one = Momentum(0.05).create(start)
one = one.replace(optimizer_def=ReplicatedOptimizer(one.optimizer_def))
local = each_grad(start, xs[0], ys[0])
f = jax.shard_map(lambda o, g: o.apply_gradient(first(g)), mesh=mesh, in_specs=(P(), P("batch")), out_specs=P())
expected = Momentum(0.05).create(start).apply_gradient(jax.tree.map(lambda g: g.mean(0), local))
out["one"] = movement(jax.jit(f)(one, local).target, expected.target)
auto = dict(mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
try:
    jax.jit(jax.shard_map(lambda o, x, y: step(o, x[0], y[0]), **auto))(one, xs[0], ys[0])
    out["summed"] = "no error"
except ValueError as error:
    out["summed"] = str(error)
f = jax.shard_map(lambda o, x, y: step(o, x[0], y[0]), **auto, check_vma=False)
out["unchecked"] = movement(jax.jit(f)(one, xs[0], ys[0]).target, expected.target)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def replicas():
    """Run the script on 8 simulated devices in its own process, because jax fixes their number when it starts; return its results."""
    # On a busy machine the eight threads of a collective may wait for each other for longer than XLA's 40 seconds.
    more = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {more}"
    root = str(Path(__file__).parents[3])
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-W", "error", "-c", REPLICAS], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().split("\n")[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"), sampled_tuples([("momentum", "pmap"), ("momentum", "shard_map"), ("multi", "shard_map"), ("multi", "pmap")])
)
def test_replicas_use_the_mean_of_the_gradients(replicas, name, how):
    result = replicas[f"{name} {how}"]
    assert replicas["devices"] == 8
    assert result["error"] < 1e-5
    assert len(result["broken"]) == 2 * (name == "momentum")
    assert all(broken > 0.05 for broken in result["broken"])
    assert (result["equal"], result["shape"], result["on"]) == (True, [8, 3, 2], 8)
    assert (result["back on"], result["same def"], result["steps"]) == (1, True, 20)
    assert result["frozen"] is (name == "multi")


@pytest.mark.slow
def test_replicated_state_is_saved_once_and_restored_everywhere(replicas):
    assert (replicas["saved shape"], replicas["restored"], replicas["restored on"]) == ([3, 2], True, 8)


@pytest.mark.slow
def test_replicate_takes_devices_and_an_axis_name(replicas):
    assert replicas["few"] == [[2, 2], "data", 0.05]
    assert replicas["rate"] == pytest.approx([0.5 * 2, 0.25 * 2])


@pytest.mark.slow
def test_gradients_already_summed_by_jax_raise(replicas):
    assert replicas["one"] < 1e-5
    assert replicas["unchecked"] < 1e-5
    text = "the gradients do not vary over 'batch'. shard_map sums the gradients of parameters that enter with PartitionSpec()"
    assert text in replicas["summed"]


def test_only_a_replicated_optimizer_can_be_unreplicated():
    with pytest.raises(ValueError, match=r"unreplicate: this optimizer is not replicated. Call replicate\(\) first."):
        Momentum(0.1).create(PARAMS).unreplicate()
    replicated = Momentum(0.1).create(PARAMS).replicate(devices=jax.local_devices()[:1])
    assert replicated.target["head"]["bias"].shape == (1, 2)
    assert replicated.optimizer_def.with_hyper_params(lr=0.5).hyper_param_values()["learning_rate"] == 0.5
    assert replicated.unreplicate().target["head"]["bias"].tolist() == [1.0, 1.0]
