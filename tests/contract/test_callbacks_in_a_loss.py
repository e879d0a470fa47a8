"""JAX callbacks in a loss run under the 64-bit flag that the user has set, wherever in the loss they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

seen = []


def look(x):
    seen.append((str(np.asarray(x).dtype), str(jnp.ones(1).dtype)))


def sine(x):
    look(x)
    return np.sin(np.asarray(x, np.float64))  # jax casts it to float32 where its 64-bit flag is off


def cosine(x):
    look(x)
    return np.cos(np.asarray(x, np.float64))


def on_host(function, x):
    return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def differentiable(x):
    return on_host(sine, x)


differentiable.defvjp(lambda x: (on_host(sine, x), x), lambda x, grad: (on_host(cosine, x) * grad,))


def in_a_loop(x):
    return jax.lax.scan(lambda carry, _: (differentiable(carry), None), x, None, length=2)[0]


def printed(x):
    jax.debug.callback(look, x)
    return jnp.sin(x)


KINDS = {
    "plain": (lambda x: x * on_host(sine, jax.lax.stop_gradient(x)), lambda x: x * torch.sin(x.detach())),
    "in a rule": (differentiable, torch.sin),
    "in a jitted function": (jax.jit(differentiable), torch.sin),
    "in a loop": (in_a_loop, lambda x: torch.sin(torch.sin(x))),
    "debug": (printed, torch.sin),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_callback_sees_the_users_64_bit_flag_and_its_results_are_used(kind, dtype):
    ours, theirs = KINDS[kind]
    model, reference = (torch.nn.Linear(3, 1).to(dtype) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    optimizer = torch_api.MaskedSGD(model.parameters(), lr=1.0)
    step = torch_api.JaxTrainStep(model, lambda model, x: ours(jnp.asarray(model(x))).mean(), optimizer)
    x = torch.arange(6, dtype=dtype).view(2, 3)
    seen.clear()
    loss = step(x)
    expected = theirs(reference(x)).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.weight.detach(), (reference.weight - reference.weight.grad).detach())
    assert set(seen) == {(str(dtype).removeprefix("torch."),) * 2}
