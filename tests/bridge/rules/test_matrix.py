"""torch's matrix update equations in pure JAX match float64 NumPy from the papers; broken variants must be detected; Muon's rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_numpy
import torch
from oracles import movement_error
from sampling import sampled_tuples

from bridge import matrix_rules, rules
from bridge._process import x64

STEPS = 25
OPTIONS = {
    "rmsprop": [{}, {"weight_decay": 0.1, "centered": True}, {"momentum": 0.5, "alpha": 0.9}, {"centered": True, "momentum": 0.9}],
    "adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1}, {"initial_accumulator_value": 0.3, "eps": 1e-3}],
    "adadelta": [{}, {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1, "lr": 0.5}],
    "adamax": [{}, {"betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}],
    "nadam": [
        {},
        {"momentum_decay": 0.1, "weight_decay": 0.1},
        {"betas": (0.8, 0.99), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "radam": [{}, {"betas": (0.8, 0.9), "weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True, "eps": 1e-2}],
    "rprop": [{}, {"etas": (0.3, 1.5), "step_sizes": (1e-3, 0.02), "lr": 0.01}],
    "asgd": [{}, {"lambd": 0.1, "alpha": 0.5, "t0": 5.0, "weight_decay": 0.1}],
    "adafactor": [{}, {"beta2_decay": -0.5, "d": 1.5, "weight_decay": 0.1}, {"eps": (0.3, 0.5), "lr": 0.3}],
    "muon": [{}, {"nesterov": False, "momentum": 0.5}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "lr": 0.1}],
}
CASES = [(name, options) for name, all_ in OPTIONS.items() for options in all_]
SHAPES = {"muon": (6, 4), "adafactor": (3, 6, 4)}


def make(name, **options):
    """Return the rule; Muon iterates in float64 here, so that bfloat16 rounding plays no part."""
    if name == "muon":
        defaults = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": None}
        direction = functools.partial(
            matrix_rules.newton_schulz, coefficients=matrix_rules.NS_COEFFICIENTS, steps=5, eps=1e-7, dtype=jnp.float64
        )
        return matrix_rules.muon_with(direction, **(defaults | options))
    return getattr(matrix_rules if name == "adafactor" else rules, name)(**options)


def data(shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=shape), rng.normal(size=(STEPS, *shape))


def run(tx, start, grads):
    """Run a transformation in float64 as optax users do; return the end point and the state."""
    step = jax.jit(lambda p, state, g: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, state, p)))
    with x64(), jax.numpy_dtype_promotion("standard"):
        p = jnp.array(start)
        state = tx.init(p)
        for g in grads:
            p, state = step(p, state, jnp.array(g))
        return np.array(p), jax.tree.map(np.array, state)


@functools.cache
def reference(name, index, shape):
    p, grads = data(shape)
    memory = {}
    for g in grads:
        p = getattr(reference_numpy, name)(p, g, memory, **OPTIONS[name][index])
    return p, memory


def error(ours, theirs, start):
    return movement_error(torch.tensor(ours), torch.tensor(theirs), torch.tensor(start))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), sampled_tuples([(n, i) for n, all_ in OPTIONS.items() for i in range(len(all_))]))
def test_each_rule_matches_its_paper(name, index):
    for shape in [SHAPES.get(name, (6, 4)), *([(7,), (2, 3, 1), (2, 9, 11)] if name == "adafactor" else [])]:
        start, grads = data(shape)
        expected, memory = reference(name, index, shape)
        ours, state = run(make(name, **OPTIONS[name][index]), start, grads)
        assert error(ours, expected, start) < 1e-12
        up, _ = run(make(name, **OPTIONS[name][index]), start, -grads)
        assert error(up, expected, start) > 0.1  # a wrong sign is detected
        if name == "asgd":
            np.testing.assert_allclose(state.ax, memory["ax"], rtol=1e-13)


BROKEN = {
    "rmsprop": [{"alpha": 0.9901}, {"eps": 1e-4}, {"centered": True}, {"momentum": 1e-3}],
    "adagrad": [{"lr_decay": 1e-4}, {"eps": 1e-3}, {"initial_accumulator_value": 1e-3}],
    "adadelta": [{"rho": 0.901}, {"eps": 1.01e-6}],
    "adamax": [{"betas": (0.901, 0.999)}, {"betas": (0.9, 0.99)}, {"eps": 1e-4}],
    "nadam": [{"momentum_decay": 4.1e-3}, {"betas": (0.901, 0.999)}, {"betas": (0.9, 0.9991)}, {"eps": 1e-4}],
    "radam": [{"betas": (0.901, 0.999)}, {"betas": (0.9, 0.9991)}, {"eps": 1e-4}],
    "rprop": [{"etas": (0.51, 1.2)}, {"etas": (0.5, 1.21)}, {"lr": 1.001e-2}],
    "asgd": [{"lambd": 1e-3}, {"lr": 1.001e-2}, {"weight_decay": 1e-3}],
    "adafactor": [{"beta2_decay": -0.81}, {"d": 1.01}, {"lr": 1.001e-2}, {"eps": (3.0, 1e-3)}],
    "muon": [{"momentum": 0.951}, {"nesterov": False}, {"weight_decay": 0.11}, {"adjust_lr_fn": "match_rms_adamw"}],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken"), [(n, b) for n, all_ in BROKEN.items() for b in all_], ids=str)
def test_paper_reference_detects_a_broken_rule(name, broken):
    shape = SHAPES.get(name, (6, 4))
    start, grads = data(shape)
    expected, _ = reference(name, 0, shape)
    ours, _ = run(make(name, **broken), start, grads)
    assert error(ours, expected, start) > 1e-5


def test_short_means_are_written_out():
    """XLA's CPU code is slow for a sum over an axis as short as that of a convolution."""
    tx = matrix_rules.adafactor()
    for shape, means in {(5, 4, 3, 3): 0, (5, 4, 7, 8): 0, (4, 12): 1, (12, 12): 3}.items():
        p = jnp.ones(shape)
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(tx.update)(p, tx.init(p), p).eqns]
        assert names.count("reduce_sum") == 2 + means  # two more for the root mean squares of parameter and update


def test_leaves_of_different_ranks_share_one_state():
    tx = matrix_rules.adafactor()
    params = {"matrix": jnp.ones((3, 2)), "vector": jnp.ones(4)}
    state = tx.init(params)
    assert (state.row_var["vector"], state.variance["matrix"]) == (None, None)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    np.testing.assert_allclose(updates["matrix"], -0.01, rtol=1e-5)
    np.testing.assert_allclose(updates["vector"], -0.01, rtol=1e-5)


def in_bfloat16(x):
    return x.astype(jnp.bfloat16).astype(np.float64)


def newton_schulz_by_definition(g, steps, eps):
    """Compute in float64 NumPy and round to bfloat16 wherever torch stores a value: one rounding per torch operation."""
    a, b, c = matrix_rules.NS_COEFFICIENTS
    x = in_bfloat16(g.astype(np.float64))
    x = x.T if g.shape[0] > g.shape[1] else x
    x = in_bfloat16(x / max(in_bfloat16(np.linalg.norm(x)), in_bfloat16(np.float64(eps))))
    for _ in range(steps):
        gram = in_bfloat16(x @ x.T)
        x = in_bfloat16(a * x + in_bfloat16(b * gram + c * (gram @ gram)) @ x)
    return x.T if g.shape[0] > g.shape[1] else x


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shape", [(4, 4), (16, 32), (48, 20), (1, 7)])
def test_newton_schulz_rounds_as_in_torch(shape, steps):
    theirs = pytest.importorskip("torch.optim._muon")._zeropower_via_newtonschulz
    ours = jax.jit(lambda x: matrix_rules.newton_schulz(x, matrix_rules.NS_COEFFICIENTS, steps, 1e-7))
    in_float32 = jax.jit(lambda x: matrix_rules.newton_schulz(x, matrix_rules.NS_COEFFICIENTS, steps, 1e-7, jnp.float32))
    differing: dict[str, list[float]] = {"by definition": [], "torch": []}
    for seed in range(9):
        torch.manual_seed(sum(shape) + seed)
        g = torch.randn(shape)
        found = np.asarray(ours(jnp.array(g.numpy())))
        in_torch = theirs(g, matrix_rules.NS_COEFFICIENTS, steps, 1e-7).float().numpy()
        for name, expected in (("by definition", newton_schulz_by_definition(g.numpy(), steps, 1e-7)), ("torch", in_torch)):
            differing[name].append(float(np.mean(found != expected)))
            assert np.abs(found - expected).max() <= 2**-7 * np.abs(expected).max()
            if min(shape) > 1:
                assert np.mean(np.asarray(in_float32(jnp.array(g.numpy()))) != expected) > 0.9  # without rounding nearly all differ
    # Most matrices differ only in the few elements whose sum lies between two bfloat16 numbers. The order of the sum depends on the
    # processor. It may decide such an element early, and later steps may amplify that to a large part of the matrix.
    for fractions in differing.values():
        assert np.median(fractions) < 0.1


def test_empty_leaves_stay_finite():
    for tx, shape in [(matrix_rules.muon(), (0, 3)), (matrix_rules.muon(), (3, 0)), (matrix_rules.adafactor(), (2, 0, 3))]:
        p = jnp.zeros(shape)
        updates, state = tx.update(p, tx.init(p), p)
        assert updates.shape == shape
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 3)])
def test_muon_refuses_leaves_that_are_no_matrices(shape):
    with pytest.raises(ValueError, match=r"^muon: a leaf has the shape \(.*\); expected matrices\. Give the other leaves another update"):
        matrix_rules.muon().init({"w": jnp.zeros((3, 3)), "b": jnp.zeros(shape)})
