"""Updates with sums over a whole leaf: each sum is taken once, of stored values or not, and the numbers match optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import FUSES

import torch_api
from bridge._compiler.passes.reductions import Stages
from bridge._process import x64

pytestmark = [pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]
SIZE = 96


def leaves(count, seed=0):
    return [np.random.default_rng(seed + i).normal(size=SIZE).astype(np.float32) for i in range(count)]


def operations(function, *arguments):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*arguments).eqns]


def staged(function, inputs, factor=None):
    def run(inputs, one):
        return Stages(function, inputs, SIZE).begin(inputs, one)(one if factor else None)

    return run, (inputs, jnp.float32(1.0))


def trust(inputs):
    """The last part of LAMB: a ratio of norms, each tested for zero."""
    g, p, m = inputs
    m = 0.9 * m + 0.1 * g
    update = m / (jnp.abs(m) + 0.1) + 0.01 * p
    scaled, _ = optax.scale_by_trust_ratio().update(update, optax.EmptyState(), p)
    return p - 0.1 * scaled, m


def by_the_largest(inputs):
    g, p, _ = inputs
    kept = jnp.where(jnp.max(p) > 0, jnp.ones_like(g), g)
    return p - g / jnp.max(jnp.abs(kept)) - jnp.prod(jnp.where(jnp.min(g) < 0, g, jnp.full_like(g, 2.0))), jnp.sum(kept)


def nested_sums(inputs):
    """Sum a value made by another sum, with nested selects."""
    g, p, m = inputs
    g = g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g)))
    chosen = jnp.where(jnp.sum(p) > 100, jnp.zeros_like(p), jnp.where(jnp.sum(m) > 0, p, jnp.ones_like(p)))
    return p - g * jnp.sum(jnp.abs(g - m)) / jnp.sum(chosen * chosen + 1), jnp.any(chosen > 3), m


FUNCTIONS = {"trust ratio": trust, "the largest": by_the_largest, "sums of sums": nested_sums}


@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_staged_function_equals_the_function(name, factor):
    run, (_, one) = staged(FUNCTIONS[name], leaves(3), factor)
    run, function = jax.jit(run), jax.jit(FUNCTIONS[name])
    for zero in (None, 0, 1, 2):
        inputs = leaves(3)
        if zero is not None:
            inputs[zero][:] = 0
        with x64():
            found, expected = run(inputs, one), function(inputs)
        for a, b in zip(found, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def test_norm_tested_for_zero_is_taken_once():
    """optax takes each norm twice, the second time with ones where it was 0; here one scalar selects between two scalars."""
    inputs = leaves(3)
    run, arguments = staged(trust, inputs)
    sums = lambda f, *given: jax.jit(f).lower(*given).compile().as_text().count(" reduce(")  # noqa: E731
    with x64():
        assert sums(run, *arguments) == 2 < sums(trust, inputs)
        chosen = [eqn.outvars[0].aval.shape for eqn in jax.make_jaxpr(run)(*arguments).eqns if eqn.primitive.name == "select_n"]
    assert chosen
    assert set(chosen) == {()}


def test_summed_values_are_stored_with_finished_state():
    run, arguments = staged(trust, leaves(3))
    with x64():
        names = operations(run, *arguments)
        barrier = next(eqn for eqn in jax.make_jaxpr(run)(*arguments).eqns if eqn.primitive.name == "optimization_barrier")
    assert [v.aval.shape for v in barrier.outvars] == [(SIZE,), (SIZE,)]  # the new moment and the update
    assert names.index("optimization_barrier") < names.index("reduce_sum")
    run, arguments = staged(by_the_largest, leaves(3))  # sums of inputs only
    with x64():
        assert "optimization_barrier" not in operations(run, *arguments)


FEWEST = {"lamb": 48, "lars": 44, "fromage": 20}


@FUSES
@pytest.mark.parametrize("name", FEWEST)
def test_bytes_of_updates_that_sum_over_parameters(name):
    """LAMB reads gradient, parameter and moments once, stores the update, and reads it for its norm and again for the result."""
    p = torch.nn.Parameter(torch.randn(64, 64, 3, 3))
    optimizer = torch_api.OptaxOptimizer([p], getattr(optax, name), lr=1e-3)
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.bytes_accessed() / p.numel() <= FEWEST[name] * 1.01


SHAPE = (5, 4, 3, 3)
LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


def gradient(step):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step + 1))


def in_optax(name, start, mask, seen):
    """Return the leaf after 20 steps of pure optax, which sees the elements of `seen` and moves those of `mask`."""
    tx, value = getattr(optax, name)(0.01), start
    state = tx.init(value * seen)
    for step in range(20):
        update, state = tx.update(jnp.asarray(gradient(step).numpy()) * seen, state, value * seen)
        value = value + update * mask
    return value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["lamb", "lars", "fromage"])
def test_steps_match_optax_in_every_layout_and_with_element_masks(name, layout):
    """Frozen elements are not part of a norm."""
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    some = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) < 0.7
    for mask in (torch.ones_like(some), some):
        p = torch.nn.Parameter(LAYOUTS[layout](start))
        optimizer = torch_api.OptaxOptimizer([("w", p)], getattr(optax, name), lr=0.01, mask={"w": mask})
        for step in range(20):
            p.grad = LAYOUTS[layout](gradient(step))
            optimizer.step()
        begun, trained = start.numpy(), mask.numpy().astype(np.float32)
        expected = in_optax(name, begun, trained, trained)
        bound = 1e-4 * np.abs(expected - begun).max()
        assert np.abs(p.detach().numpy() - expected).max() < bound
        assert torch.equal(p.detach()[~mask], start[~mask])
    frozen_counted = in_optax(name, begun, trained, np.ones_like(trained))
    assert np.abs(frozen_counted - expected).max() > 20 * bound


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int32])
def test_sums_of_narrow_integers_wrap_as_in_jax(dtype):
    """All elements are one scalar, so no array is summed; SIZE times the scalar may overflow its dtype."""

    def function(inputs):
        g, _, _ = inputs
        flag = (jnp.sum(g) > -1e9).astype(dtype) * 3
        return g * jnp.sum(jnp.broadcast_to(flag, g.shape), dtype=dtype).astype(jnp.float32)

    run, arguments = staged(function, leaves(3))
    np.testing.assert_allclose(run(*arguments), function(leaves(3)), rtol=1e-6)
