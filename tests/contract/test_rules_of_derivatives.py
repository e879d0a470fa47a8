"""Custom derivative rules of users and solvers run under the 64-bit flag that the user has set, wherever jax calls them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

dtypes = set()


def record_dtype():
    dtypes.add(str(jnp.ones(1).dtype))
    return jnp.ones(())


@jax.custom_jvp
def by_jvp(x):
    return jnp.sin(x)


@by_jvp.defjvp
def _(primals, tangents):
    return jnp.sin(primals[0]), jnp.cos(primals[0]) * record_dtype() * tangents[0]


@jax.custom_jvp
def by_jvps(x, y):
    return jnp.sin(x) * y


by_jvps.defjvps(lambda t, _, x, y: jnp.cos(x) * y * t * record_dtype(), None)


@jax.custom_vjp
def by_vjp(x):
    return jnp.sin(x)


by_vjp.defvjp(lambda x: (jnp.sin(x) * record_dtype(), x), lambda x, grad: (jnp.cos(x) * grad * record_dtype(),))


@jax.custom_gradient
def by_gradient(x):
    return jnp.sin(x), lambda grad: jnp.cos(x) * grad * record_dtype()


jitted_before = jax.jit(lambda x: by_vjp(by_jvp(x)))


def everywhere(x):
    """Apply every kind of rule, also inside functions that jax traces separately; the value does not change."""
    x = by_jvp(x) + by_vjp(x) + by_gradient(x) + by_jvps(x, 2.0)
    x = jitted_before(jax.jit(by_vjp)(x) + jax.checkpoint(by_jvp)(x))
    return jax.lax.scan(lambda carry, _: (by_vjp(by_jvp(carry)), None), x, None, length=2)[0]


def eagerly(x):
    x = 5 * torch.sin(x)  # 1 + 1 + 1 + 2
    x = 2 * torch.sin(x)
    for _ in range(6):
        x = torch.sin(x)
    return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.layer = bridge.jax_function(everywhere)

    def forward(self, x):
        return self.layer(self.linear(x))


@pytest.mark.usefixtures("unoptimized_training")
@pytest.mark.parametrize("is_layer", [False, True])
def test_rules_in_a_train_step_see_the_users_flag(is_layer):
    torch.manual_seed(0)
    model = Net() if is_layer else torch.nn.Linear(2, 2)
    linear = model.linear if is_layer else model
    x, labels = torch.randn(3, 2), torch.tensor([1, 0, 1])
    expected = torch.nn.functional.cross_entropy(eagerly(linear(x)), labels)
    grad = torch.autograd.grad(expected, linear.weight)[0]
    weight = (linear.weight - 0.1 * grad).detach()

    def loss(model, x, labels):
        out = model(x) if is_layer else everywhere(jnp.asarray(model(x)))
        return torch.nn.functional.cross_entropy(out, labels)

    jitted_before(jnp.ones((3, 2)))  # jax does not trace it again where the loss calls it
    dtypes.clear()
    step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    assert float(step(x, labels)) == pytest.approx(expected.item(), rel=1e-5)
    assert dtypes == {"float32"}
    torch.testing.assert_close(linear.weight.detach(), weight)


def test_rules_in_an_x64_function_see_64_bits():
    model = torch.nn.Linear(2, 2).double()
    dtypes.clear()
    loss = lambda model, x: jnp.mean(by_vjp(jnp.asarray(model(x))))  # noqa: E731
    step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    step(torch.ones(1, 2, dtype=torch.float64))
    assert dtypes == {"float64"}


@pytest.mark.usefixtures("unoptimized_training")
def test_equinox_solver_runs_over_a_module():
    """A neural ODE: diffrax solves by this loop."""
    loops = pytest.importorskip("equinox.internal")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)

    def loss(model, y):
        def euler(carry):
            return carry[0] + jnp.float32(0.1) * jnp.asarray(model(carry[0])), carry[1] + 1

        first = jnp.asarray(y), jnp.int32(0)
        y, _ = loops.while_loop(lambda carry: carry[1] < 3, euler, first, kind="checkpointed", max_steps=8)
        return jnp.mean(y**2)

    function, params = bridge.module_function(model), jax.tree.map(jnp.copy, bridge.module_tree(model))
    with jax.numpy_dtype_promotion("standard"):  # equinox itself is not clean under strict promotion
        value_and_grad = jax.jit(jax.value_and_grad(lambda params: loss(lambda y: function(params, y), jnp.ones((3, 2)))))
        expected, grads = value_and_grad(params)
        step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
        assert float(step(torch.ones(3, 2))) == pytest.approx(float(expected), rel=1e-5)
    weight = np.asarray(params["weight"] - 0.1 * grads["weight"])
    np.testing.assert_allclose(model.weight.detach().numpy(), weight, rtol=1e-5, atol=1e-6)
