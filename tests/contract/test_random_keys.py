"""Transformations that make random keys in their update, in every form of key, give the numbers of pure optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from sampling import sampled

import torch_api

pytestmark = pytest.mark.usefixtures("standard_promotion")
SHAPES = {"a": (64,), "b": (64,), "c": (64,), "d": (64,), "e": (5, 7)}


def random(key_of, use):
    def update(updates, count, params=None):
        leaves, tree = jax.tree.flatten(updates)
        return tree.unflatten(use(leaves, key_of(count))), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


def one_number(leaves, key):
    return [g * (1 + jax.random.uniform(key, (), g.dtype)) for g in leaves]


def each_element(leaves, key):
    return [g + 0.1 * jax.random.normal(key, g.shape, g.dtype) for g in leaves]


def folded(count):
    return jax.random.fold_in(jax.random.key(0), count)


CASES = {
    "a number": lambda: random(folded, one_number),
    "elements": lambda: random(folded, each_element),
    "of another kind": lambda: random(lambda count: jax.random.key(count, impl="rbg"), one_number),
    "one of several": lambda: random(lambda count: jax.random.split(jax.random.key(count), 3)[1], one_number),
    "joint": lambda: optax.chain(optax.clip_by_global_norm(1.0), random(folded, each_element)),
    "kept in state": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(3)),
}


@pytest.mark.parametrize("name", sampled(CASES))
def test_steps_with_random_keys_equal_optax(name):
    generator, tx = np.random.default_rng(0), optax.chain(CASES[name](), optax.sgd(0.1, momentum=0.9))
    start, *grads = ({n: generator.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()} for _ in range(3))
    own = {n: torch.nn.Parameter(torch.tensor(x)) for n, x in start.items()}
    optimizer = torch_api.OptaxOptimizer(own.items(), tx)
    params, state = start, tx.init(start)
    for each in grads:
        updates, state = tx.update(each, state, params)
        params = optax.apply_updates(params, updates)
        for n, p in own.items():
            p.grad = torch.tensor(each[n])
        optimizer.step()
    for n, p in own.items():
        np.testing.assert_allclose(p.detach(), params[n], atol=1e-5)
