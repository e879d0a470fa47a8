"""Transformations that call the loss (line searches): the compiled update calls the torch closure back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import jitted
from sampling import sampled

import torch_api
from bridge._process import x64
from torch_api._step import closure as arguments

MATRIX = np.diag(np.linspace(1.0, 20.0, 6)) + 0.3

pytestmark = [pytest.mark.unoptimized, pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def torch_loss(w, b):
    return 0.5 * w @ torch.from_numpy(MATRIX).to(w.dtype) @ w + (b - 1.0).square().sum() + torch.cos(w).sum()


def jax_loss(params):
    w, b = params["w"], params["b"]
    return 0.5 * w @ jnp.asarray(MATRIX, w.dtype) @ w + jnp.sum((b - 1.0) ** 2) + jnp.sum(jnp.cos(w))


def start(dtype=torch.float32):
    return {"w": torch.nn.Parameter(torch.linspace(-1.0, 2.0, 6, dtype=dtype)), "b": torch.nn.Parameter(torch.zeros(3, dtype=dtype))}


def closure_of(params, optimizer, calls=None):
    def closure():
        if calls is not None:
            calls.append(torch.is_grad_enabled())
        optimizer.zero_grad(set_to_none=False)
        loss = torch_loss(params["w"], params["b"])
        loss.backward()
        return loss

    return closure


def in_pure_jax(tx, steps, dtype):
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in start(dtype).items()}
    state = tx.init(params)

    @jitted
    def step(params, state):
        value, grad = jax.value_and_grad(jax_loss)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=jax_loss)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


SEARCHES = {
    "lbfgs": lambda: optax.lbfgs(),
    "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
}


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-6), (torch.float32, 1e-4)], ids=["float64", "float32"])
@pytest.mark.parametrize("name", sampled(SEARCHES))
def test_line_search_through_a_closure_matches_pure_jax(name, dtype, near):
    """The losses of both frameworks differ in float32, and a line search amplifies that; elsewhere the tolerance is 1e-6."""
    tx, params, calls = SEARCHES[name](), start(dtype), []
    optimizer = torch_api.OptaxOptimizer(params.items(), tx)
    steps = 20 if dtype is torch.float64 else 8
    losses = [optimizer.step(closure_of(params, optimizer, calls)).item() for _ in range(steps)]
    with x64(dtype is torch.float64):
        reference = in_pure_jax(tx, steps, dtype)
    assert torch_loss(*params.values()).item() < 0.5 * losses[0]
    assert len(calls) > steps
    assert all(calls)
    begun = start(dtype)
    for key, p in params.items():
        moved = np.abs(np.asarray(reference[key]) - begun[key].detach().clone().numpy()).max()
        assert np.abs(p.detach().clone().numpy() - np.asarray(reference[key])).max() <= near * moved


def test_lbfgs_without_a_closure_raises_with_advice():
    params = start()
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.lbfgs())
    torch_loss(*params.values()).backward()
    with pytest.raises(TypeError, match=r"needs more than gradients .*opt\.step\(value=loss\), or give a closure"):
        optimizer.step()


def test_error_of_a_closure_inside_the_search_changes_nothing():
    params, calls = start(), []
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.lbfgs())
    closure = closure_of(params, optimizer, calls)
    optimizer.step(closure)
    before = {name: p.detach().clone() for name, p in params.items()}
    state = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in params.items()}
    calls.clear()

    def failing():
        if calls:
            raise RuntimeError("out of data")
        return closure()

    with pytest.raises(RuntimeError, match="out of data"):
        optimizer.step(failing)
    for name, p in params.items():
        assert torch.equal(p, before[name])
        for key, tensor in optimizer.state[p].items():
            torch.testing.assert_close(tensor, state[name][key], rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(optimizer.step(closure))
    assert not torch.equal(params["w"], before["w"])


def test_gradients_set_by_the_closure_remain_after_the_step():
    params = start()
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.lbfgs())
    at = {name: p.detach().clone() for name, p in params.items()}
    optimizer.step(closure_of(params, optimizer))
    torch_loss(*(leaves := {n: v.requires_grad_() for n, v in at.items()}).values()).backward()
    assert all(torch.equal(p.grad, leaves[name].grad) for name, p in params.items())


def test_value_and_grad_default_to_those_of_the_closure():
    seen = []

    def update(updates, state, params=None, *, value, grad, **_):
        jax.debug.callback(lambda v, g: seen.append((float(v), float(g))), value, jnp.sum(grad["b"]))
        return updates, state

    tx = optax.chain(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update), optax.sgd(0.01))
    params = start()
    optimizer = torch_api.OptaxOptimizer(params.items(), tx)
    loss = optimizer.step(closure_of(params, optimizer))
    optimizer.step(closure_of(params, optimizer), value=7.0)
    jax.effects_barrier()
    assert seen[0] == pytest.approx((loss.item(), -6.0), rel=1e-6)
    assert seen[1][0] == 7.0


def test_extra_arguments_by_parameter_name_reach_active_parameters():
    def update(updates, state, params=None, *, weights, **_):
        return jax.tree.map(lambda g, w: -g * w, updates, weights), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params = start()
    optimizer = torch_api.OptaxOptimizer(params.items(), tx)
    weights = {"w": torch.full((6,), 0.5), "b": torch.tensor([1.0, 2.0, 3.0])}
    for p in params.values():
        p.grad = torch.ones_like(p)
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.step(weights=weights)
    assert torch.allclose(params["w"], before["w"] - 0.5)
    assert torch.allclose(params["b"], before["b"] - weights["b"])
    params["w"].grad = None
    optimizer.step(weights=weights)
    assert torch.allclose(params["b"], before["b"] - 2 * weights["b"])


def test_unsupported_extra_arguments_raise():
    params = start()
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.scale(0.1))
    with pytest.raises(TypeError, match=r"takes no extra arguments, but got \['valu'\]"):
        optimizer.step(valu=1.0)


@pytest.mark.nightly
def test_float64_survives_a_callback_in_a_thread_of_xla():
    """x64 is off; programs with small operands run in the caller's thread, where it is on."""
    size, steps = 2000, 6
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(size, dtype=torch.float64, generator=generator))
    scales = torch.linspace(1.0, 30.0, size, dtype=torch.float64)
    matrix = torch.diag(scales) + torch.outer(scales.sin(), scales.sin()) / size
    first, optimizer = w.detach().clone(), torch_api.OptaxOptimizer([w], optax.lbfgs())

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * w @ matrix @ w
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    with x64():
        tx, params, square = optax.lbfgs(), jnp.asarray(first.numpy()), jnp.asarray(matrix.numpy())
        value_fn = lambda p: 0.5 * p @ square @ p  # noqa: E731
        state = tx.init(params)
        for _ in range(steps):
            value, grad = jax.value_and_grad(value_fn)(params)
            updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
            params = optax.apply_updates(params, updates)
    moved = torch.from_numpy(np.array(params)) - first
    assert (w.detach() - first - moved).norm() < 1e-9 * moved.norm()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 5)])
def test_arrays_keep_their_bits_through_a_host_callback(dtype, shape):
    pairs = np.random.default_rng(0).normal(size=(*shape, 2))
    x = np.asarray(pairs.view(np.complex128)[..., 0] if dtype is np.complex128 else pairs[..., 0].astype(dtype))
    crossed = arguments._to_words(x)
    assert (crossed.shape, crossed.dtype) == (arguments._word_shape(x).shape, arguments._word_shape(x).dtype)
    assert crossed.dtype.itemsize == 4
    back = arguments._from_words(crossed, x)
    assert back.dtype == dtype
    assert np.array_equal(back, x)
