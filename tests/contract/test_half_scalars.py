"""Scalar state of half precision parameters stays float32, and the float32 master weights are updated as by pure optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import torch_api

pytestmark = pytest.mark.usefixtures("standard_promotion")


def decaying():
    """Multiply the gradient by 1 - m, where m is a scalar state of each leaf."""

    def update(updates, numbers, params=None):
        numbers = jax.tree.map(lambda m: 0.999 * m, numbers)
        return jax.tree.map(lambda g, m: -(1 - m) * g, updates, numbers), numbers

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda p: jnp.asarray(0.999, p.dtype), params), update)


TRANSFORMATIONS = {
    "adamw": lambda: optax.inject_hyperparams(optax.adamw)(0.01, weight_decay=0.1),
    "schedule": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.01, 0.001, 10)),
    "joint": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.lion)(0.01, b1=0.95)),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "number of each leaf": decaying,
}


@pytest.mark.parametrize(("name", "dtype"), [(name, torch.bfloat16) for name in TRANSFORMATIONS] + [("adamw", torch.float16)])
def test_scalar_state_stays_float32(name, dtype):
    start = {"v": torch.linspace(0.25, 3, 7, dtype=dtype), "w": torch.linspace(0.5, 2, 5, dtype=dtype)}
    wide = {n: jnp.asarray(x.float().numpy()) for n, x in start.items()}
    params, tx, state = wide, TRANSFORMATIONS[name](), TRANSFORMATIONS[name]().init(wide)
    own = {n: torch.nn.Parameter(x.clone()) for n, x in start.items()}
    optimizer = torch_api.OptaxOptimizer(own.items(), TRANSFORMATIONS[name](), master_weights=True, state_dtype=torch.float32)
    for gradient in (0.5, -0.25, 0.125):
        updates, state = tx.update(jax.tree.map(lambda p, g=gradient: jnp.full(p.shape, g), params), state, params)
        params = optax.apply_updates(params, updates)
        for p in own.values():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
    for n, p in own.items():
        got, move = optimizer.state[p]["master_param"].numpy(), np.asarray(params[n]) - np.asarray(wide[n])
        np.testing.assert_allclose(got - np.asarray(wide[n]), move, rtol=1e-3, atol=1e-7)
        assert dtype not in {x.dtype for x in optimizer.state[p].values()}


def test_moments_of_a_scalar_parameter_have_its_dtype():
    parameter = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    optimizer = torch_api.OptaxOptimizer([parameter], optax.inject_hyperparams(optax.sgd)(0.01, momentum=0.9))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    assert {name: x.dtype for name, x in state.items() if name in ("trace", "learning_rate", "momentum")} == {
        "trace": torch.bfloat16, "learning_rate": torch.float32, "momentum": torch.float32
    }  # fmt: skip
