"""What a transformation must see together, decided from its trace; traced scalars that behave like Python floats."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from sampling import sampled

import torch_api
from bridge._compiler.hyperparams import TracedHyperparam
from bridge._compiler.separability import is_size_independent, separable_specs
from bridge._compiler.spec import NO_EXTRA_ARGS, LeafSpec, TransformSpec
from bridge._process import x64
from torch_api._rules import torch_rules

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]

PATHS = (("a", "weight"), ("a", "bias"), ("b", "weight"))
SHAPES = ((4, 6), (6,), (4, 6))
SPECS = tuple(LeafSpec(path, shape, "float32") for path, shape in zip(PATHS, SHAPES, strict=True))


def stateless(function):
    return optax.stateless(function)


def each(function):
    return stateless(lambda g, p: jax.tree.map(function, g, p))


def by_position(g, p):
    leaves, structure = jax.tree.flatten(g)
    return structure.unflatten([-0.1 * (i + 1) * x for i, x in enumerate(leaves)])


def by_name(g, p):
    return jax.tree_util.tree_map_with_path(lambda path, x: -0.1 * (ord(jax.tree_util.keystr(path)[2]) - 90) * x, g)


def by_number(g, p):
    return jax.tree.map(lambda x: -x / len(jax.tree.leaves(g)), g)


def with_a_key_for_each(g, p):
    leaves, structure = jax.tree.flatten(g)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return structure.unflatten([x + jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def with_a_key_folded_in(g, p):
    leaves, structure = jax.tree.flatten(g)
    return structure.unflatten([x + jax.random.normal(jax.random.fold_in(jax.random.key(0), i), x.shape) for i, x in enumerate(leaves)])


def of_the_first(g, p):
    first = jax.tree.leaves(g)[0]
    return jax.tree.map(lambda x: -0.1 * x * jnp.max(first), g)


def of_all(g, p):
    total = sum(jnp.sum(x * x) for x in jax.tree.leaves(g))
    return jax.tree.map(lambda x: -x / total, g)


def counted_by_all():
    """A transformation with a shared count that advances only if the first leaf's gradient is positive."""

    def update(g, state, params=None):
        return g, state + (jnp.sum(jax.tree.leaves(g)[0]) > 0).astype(jnp.int32)

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


def initialized_from_all():
    """A transformation whose state starts as a sum over all parameters."""
    start = lambda params: jax.tree.map(lambda p: p * 0 + sum(jnp.sum(x) for x in jax.tree.leaves(params)), params)  # noqa: E731
    return optax.GradientTransformation(start, lambda g, state, params=None: (jax.tree.map(jnp.multiply, g, state), state))


CONSTANTS = {"a": {"weight": 1.0, "bias": 2.0}, "b": {"weight": 3.0}}

DRAWING = ("a key for each leaf", "a key with the position")
FLAT, WHOLE, SHAPED, TOGETHER = "flat", "whole", "shaped", "together"
CASES = {
    "elementwise": (lambda: each(lambda g, p: -jnp.tanh(g) * jnp.exp(-p * p)), FLAT),
    "an optimizer": (lambda: optax.adamw(1e-3), FLAT),
    "a schedule": (lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 10)), FLAT),
    "a derivative of its own": (lambda: each(lambda g, p: -jax.nn.relu(g)), FLAT),
    "a tree that only fits the whole": (lambda: stateless(lambda g, p: jax.tree.map(lambda g, c: -c * g, g, CONSTANTS)), TOGETHER),
    "a constant of the leaf's shape": (lambda: each(lambda g, p: -g * np.arange(g.size, dtype=np.float32).reshape(g.shape)), SHAPED),
    "a mask by name": (lambda: optax.masked(optax.adam(1e-3), {"a": {"weight": True, "bias": False}, "b": True}), FLAT),
    "a sum": (lambda: each(lambda g, p: -g / jnp.sqrt(jnp.sum(g * g))), WHOLE),
    "a sum of what was reshaped": (lambda: each(lambda g, p: -g / (1 + jnp.max(jnp.abs(g.reshape(-1, 2))))), WHOLE),
    "a norm that keeps its dimensions": (lambda: each(lambda g, p: -g / jnp.squeeze(jnp.linalg.norm(g[None], keepdims=True), 0)), WHOLE),
    "a sum of sums": (lambda: each(lambda g, p: -g / (1 + jnp.sum(jnp.abs(jnp.sum(g, axis=0))))), SHAPED),
    "a sum of a part": (lambda: each(lambda g, p: -g / (1 + jnp.sum(g[1:] ** 2))), SHAPED),
    "a sum of what lies there": (lambda: each(lambda g, p: -g / (1 + jnp.sum(g**2 * jnp.arange(g.shape[-1], dtype=g.dtype)))), SHAPED),
    "a mean of a dimension beside it": (lambda: each(lambda g, p: -g * p.shape[-1] / (1 + jnp.sum(g**2))), SHAPED),
    "the largest of turned ones": (lambda: each(lambda g, p: -g / (1 + jnp.max(jnp.abs(g.T.reshape(g.shape) * p)))), SHAPED),
    "a sum beside another leaf's": (lambda: stateless(of_all), TOGETHER),
    "lamb": (lambda: optax.lamb(1e-3), WHOLE),
    "lars": (lambda: optax.lars(1e-3), WHOLE),
    "trust ratio": (optax.scale_by_trust_ratio, WHOLE),
    "a root mean square of each leaf": (lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.adam(1e-3)), WHOLE),
    "norms of units": (lambda: optax.adaptive_grad_clip(0.1), SHAPED),
    "muon": (lambda: optax.contrib.muon(1e-3), SHAPED),
    "factored": (lambda: optax.adafactor(1e-3, min_dim_size_to_factor=2), SHAPED),
    "centred": (optax.centralize, SHAPED),
    "along one dimension": (lambda: each(lambda g, p: -jnp.cumsum(g, axis=0)), SHAPED),
    "turned round": (lambda: each(lambda g, p: -g[::-1]), SHAPED),
    "a loop over rows": (lambda: each(lambda g, p: jax.lax.map(lambda row: -row / row.size, g)), SHAPED),
    "where the element lies": (lambda: each(lambda g, p: -g * jnp.arange(g.shape[-1], dtype=g.dtype)), SHAPED),
    "which row the element is in": (lambda: each(lambda g, p: -g * jax.lax.broadcasted_iota(jnp.float32, g.shape, 0)), SHAPED),
    "how many dimensions": (lambda: optax.masked(optax.scale(0.5), lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)), SHAPED),
    "how many rows": (lambda: each(lambda g, p: -g / g.shape[0]), SHAPED),
    "a global norm": (lambda: optax.clip_by_global_norm(1.0), TOGETHER),
    "the position of the leaf": (lambda: stateless(by_position), TOGETHER),
    "the number of leaves": (lambda: stateless(by_number), TOGETHER),
    "a key for each leaf": (lambda: stateless(with_a_key_for_each), TOGETHER),
    "a key with the position": (lambda: stateless(with_a_key_folded_in), TOGETHER),
    "the first leaf": (lambda: stateless(of_the_first), TOGETHER),
    "a count that a leaf decides": (counted_by_all, TOGETHER),
    "a beginning from all": (initialized_from_all, TOGETHER),
    "a key in the state": (lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)), TOGETHER),
    "numbers to be changed by hand": (lambda: optax.inject_hyperparams(optax.adam)(1e-3), TOGETHER),
}


def scope_of(tx):
    found = separable_specs(TransformSpec(lambda: tx, (), (), is_optax=True), PATHS, SPECS, NO_EXTRA_ARGS)
    return TOGETHER if found is None else WHOLE if found[0].reduces_over_leaf else FLAT if found[0].is_flat else SHAPED


@pytest.mark.parametrize("name", CASES)
def test_transformation_sees_only_what_it_needs(name):
    make, expected = CASES[name]
    assert scope_of(make()) == expected


def test_leaf_names_may_decide_about_their_own_leaf():
    found = separable_specs(TransformSpec(lambda: stateless(by_name), (), (), is_optax=True), PATHS, SPECS, NO_EXTRA_ARGS)
    assert [view.path for view in found] == [PATHS[0], PATHS[1], PATHS[2]]


@pytest.mark.filterwarnings("ignore:.*with a learning rate of")
@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(CASES))
def test_transformation_matches_pure_jax(name):
    tx = CASES[name][0]()
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator)  # noqa: E731
    params = {".".join(path): torch.nn.Parameter(draw(shape)) for path, shape in zip(PATHS, SHAPES, strict=True)}
    grads = [{name: draw(p.shape) for name, p in params.items()} for _ in range(20)]
    nested = lambda flat: {  # noqa: E731
        "a": {"weight": jnp.asarray(flat["a.weight"].numpy()), "bias": jnp.asarray(flat["a.bias"].numpy())},
        "b": {"weight": jnp.asarray(flat["b.weight"].numpy())},
    }
    tree = nested({name: p.detach().clone() for name, p in params.items()})
    optimizer = torch_api.OptaxOptimizer(params.items(), tx, lr=0.01)
    state = tx.init(tree)
    update = jax.jit(tx.update)
    for g in grads:
        for name, p in params.items():
            p.grad = g[name]
        optimizer.step()
        updates, state = update(nested(g), state, tree)
        tree = jax.tree.map(lambda p, u: p + jnp.float32(0.01) * u, tree, updates)
    for path in PATHS:
        reference = np.asarray(tree[path[0]][path[1]])
        np.testing.assert_allclose(params[".".join(path)].detach().numpy(), reference, rtol=2e-6, atol=2e-6)


def test_traced_scalar_is_float64_and_takes_the_dtype_of_arrays():
    def f(values, x):
        b = TracedHyperparam(values[0], np.float32)
        with x64(False):
            return (1 - b) * x, x / (1 - b**2), (b < 1), -b * x

    with x64():
        small, inverse, less, negative = jax.jit(f)(np.array([0.999]), np.ones(3, np.float32))
    assert small.dtype == inverse.dtype == np.float32
    assert float(small[0]) == float(np.float32(1 - 0.999)) != float(1 - np.float32(0.999))
    assert float(inverse[0]) == pytest.approx(1 / (1 - 0.999**2), rel=1e-7)
    assert bool(less)
    assert float(negative[0]) == float(-np.float32(0.999))


def test_hyperparameter_that_decides_a_branch_becomes_static():
    def factory(learning_rate, steepness=2.0, power=0.5):
        if steepness > 1:  # reads the value
            return optax.chain(optax.scale(steepness**power), optax.sgd(learning_rate))
        return optax.sgd(learning_rate)

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch_api.OptaxOptimizer([p], factory, lr=0.1)
    assert dict(optimizer._hyperparam_table.transforms[0].traced_hyperparams).keys() == {"lr", "power"}
    p.grad = torch.ones(3)
    optimizer.step()
    assert p[0].item() == pytest.approx(1 - 0.1 * 2**0.5, rel=1e-6)
    optimizer.param_groups[0]["steepness"] = 0.5
    optimizer.step()
    assert p[0].item() == pytest.approx(1 - 0.1 * 2**0.5 - 0.1, rel=1e-6)


def by_size():
    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: g / jnp.float32(g.size), updates))


IN_PARTS = {
    **{name: (getattr(torch_rules, name), True) for name in ("ADAM", "SGD", "RMSPROP", "ADAGRAD", "ADADELTA", "ADAMAX", "NADAM", "RADAM")},
    **{name: (getattr(torch_rules, name), True) for name in ("RPROP", "ASGD")},
    "torch's adafactor": (torch_rules.ADAFACTOR, False),
    "lion": (optax.lion(1e-3), True),
    "adamw": (optax.adamw(1e-3), True),
    "lamb": (optax.lamb(1e-3), False),
    "adafactor": (optax.adafactor(1e-3), False),
    "by size": (by_size(), False),
    "noise": (optax.add_noise(0.1, 0.5, jax.random.key(0)), False),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_size_independent_transformations_are_recognized(name):
    tx, expected = IN_PARTS[name]
    for dtype in (torch.float32, torch.complex64) if name in ("ADAM", "SGD") else (torch.float32,):
        optimizer = torch_api.OptaxOptimizer([("w", torch.nn.Parameter(torch.ones(7, dtype=dtype)))], tx)
        row, spec = optimizer._hyperparam_table.transforms[0], optimizer._records[0].spec
        assert is_size_independent(row, optimizer._hyperparam_table.all_paths, spec, NO_EXTRA_ARGS) is expected
