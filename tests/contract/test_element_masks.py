"""Element masks with transformations whose state starts as a copy of the parameter: `init` and `update` see only selected elements."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]
SHAPES = {"a": (6, 4), "b": (5,), "c": (3,)}


def distance():
    """Scale each leaf by its distance from its start over the norm of its gradient; the state holds the start and its norm."""

    def init(params):
        return {"start": params, "norm": jax.tree.map(lambda p: jnp.sqrt(jnp.sum(p * p)), params)}

    def update(updates, state, params):
        def move(g, p, start, norm):
            return -(0.1 + 0.1 * norm + jnp.sqrt(jnp.sum((p - start) ** 2))) * g / (1 + jnp.sqrt(jnp.sum(g * g)))

        return jax.tree.map(move, updates, params, state["start"], state["norm"]), state

    return optax.GradientTransformation(init, update)


TRANSFORMATIONS = {
    "dog": lambda: optax.contrib.dog(1.0),
    "dowg": lambda: optax.contrib.dowg(1.0),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "distance of each": distance,
    "joint": lambda: optax.chain(optax.clip_by_global_norm(1.0), distance()),
}


def draw():
    generator = np.random.default_rng(0)
    values = [{n: generator.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()} for _ in range(5)]
    masks = {"a": generator.random((6, 4)) < 0.5, "b": np.array([True, False, True, True, False])}
    return values[0], values[1:], masks


def trained(tx, start, grads, masks, transposed=False):
    in_order = lambda x: x.t().contiguous().t() if transposed and x.ndim > 1 else x  # noqa: E731
    own = {n: torch.nn.Parameter(in_order(torch.tensor(x))) for n, x in start.items()}
    by_name = {n: torch.from_numpy(masks[n]) if n in masks else True for n in own}
    optimizer = torch_api.OptaxOptimizer(own.items(), tx, mask=by_name)
    for each in grads:
        for n, p in own.items():
            p.grad = torch.tensor(each[n])
        optimizer.step()
    return optimizer, own


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transposed"), [*((name, False) for name in TRANSFORMATIONS), ("dog", True), ("distance of each", True)])
def test_initial_state_depends_only_on_selected_elements(name, transposed):
    start, grads, masks = draw()
    _, own = trained(TRANSFORMATIONS[name](), start, grads, masks, transposed)
    chosen = {n: masks.get(n, np.ones(shape, bool)) for n, shape in SHAPES.items()}
    tx = TRANSFORMATIONS[name]()  # optax sees the selected elements of each leaf as a vector
    params = {n: jnp.asarray(x[chosen[n]]) for n, x in start.items()}
    state = tx.init(params)
    for each in grads:
        updates, state = tx.update({n: jnp.asarray(g[chosen[n]]) for n, g in each.items()}, state, params)
        params = optax.apply_updates(params, updates)
    for n, p in own.items():
        np.testing.assert_allclose(p.detach().numpy()[chosen[n]], params[n], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(p.detach().numpy()[~chosen[n]], start[n][~chosen[n]])


@pytest.mark.parametrize("before", [optax.identity(), optax.clip_by_global_norm(1.0)], ids=["alone", "clipped"])
def test_masked_elements_of_the_state_start_at_the_parameter(before):
    """If the mask is lifted later, the distance of the newly trained elements starts at 0."""
    start, grads, masks = draw()
    optimizer, own = trained(optax.chain(before, distance()), start, grads[:1], masks)
    np.testing.assert_array_equal(optimizer.state[own["a"]]["start"], start["a"])
