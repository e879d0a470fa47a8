"""JaxTrainStep: batches, losses and aux of every kind, and parameters and buffers of every layout."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import movement_error
from sampling import sampled
from torch import nn
from torch.nn import functional as F
from train_steps import adamw, assert_moved_alike, batches, mlp, mse

import bridge
import torch_api
from torch_api import JaxTrainStep

pytestmark = pytest.mark.usefixtures("standard_promotion", "unoptimized_training")


@pytest.mark.quick
def test_aux_of_any_structure_is_returned_as_tensors():
    model = mlp()

    def loss(m, batch, scale):
        out = m(batch["x"])
        return F.mse_loss(out, batch["y"]) * scale, {"out": out, "more": [out.argmax(), None, "name", 3], "y": batch["y"]}

    train_step = JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.0), has_aux=True)
    x, y = next(batches(1))
    for scale in (2.0, 3.0):
        value, aux = train_step({"x": x, "y": y}, scale)
        torch.testing.assert_close(aux["out"], model(x).detach())
        torch.testing.assert_close(value, (mse(model, x, y) * scale).detach())
        assert torch.equal(aux["y"], y)
        assert aux["more"][0].item() == model(x).argmax().item()
        assert aux["more"][1:] == [None, "name", 3]
    assert train_step.cache_info().compilations == 1


def test_loss_may_be_written_in_jax():
    model = mlp()
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)

    def loss(m, x, y):
        return jnp.mean(jnp.square(jnp.asarray(m(x)) - jnp.asarray(y)))

    train_step = JaxTrainStep(model, loss, adamw(model))
    for batch in batches(20):
        value = train_step(*batch)
        other.zero_grad()
        mse(twin, *batch).backward()
        other.step()
    assert value.dtype is torch.float32
    assert_moved_alike(model, twin, start, 1e-4)


def test_batches_may_be_numpy_and_jax_arrays():
    model, results = mlp(), []
    train_step = JaxTrainStep(model, lambda m, x, y: jnp.mean((jnp.asarray(m(x)) - jnp.asarray(y)) ** 2),
                              torch_api.MaskedSGD(model.named_parameters(), lr=0.0))  # fmt: skip
    x, y = next(batches(1))
    for kind in (lambda t: t, lambda t: t.t().contiguous().t()):
        results.append(train_step(kind(x), y.numpy()).item())
        results.append(train_step(kind(x), jnp.asarray(y.numpy())).item())
    assert results == pytest.approx([mse(model, x, y).item()] * 4, rel=1e-6)


def test_batch_that_aliases_a_parameter_is_read_before_the_update():
    model = nn.Linear(4, 4)
    twin = copy.deepcopy(model)
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    ours, theirs = torch_api.MaskedSGD(model.parameters(), lr=0.5), torch.optim.SGD(twin.parameters(), lr=0.5)
    train_step = JaxTrainStep(model, loss, ours)
    for _ in range(5):
        train_step(model.weight.detach())
        theirs.zero_grad()
        loss(twin, twin.weight.detach().clone()).backward()
        theirs.step()
    torch.testing.assert_close(model.weight, twin.weight)


def test_tied_weights_are_updated_as_one_parameter():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.down.weight = self.up.weight

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    model = Tied()
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    loss = lambda m, x, y: (m(x) - x).square().mean()  # noqa: E731
    train_step = JaxTrainStep(model, loss, adamw(model))
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for batch in batches(20):
        train_step(*batch)
        other.zero_grad()
        loss(twin, *batch).backward()
        other.step()
    assert model.up.weight is model.down.weight
    assert_moved_alike(model, twin, start, 1e-4)


def test_extra_arguments_reach_the_transformation():
    def times():
        def update(updates, state, params=None, *, factor, **extra):
            return jax.tree.map(lambda u: -u * factor * extra["value"], updates), state

        return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    train_step = JaxTrainStep(model, mse, torch_api.OptaxOptimizer(model.named_parameters(), times()))
    x, y = next(batches(1))
    loss = mse(model, x, y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    train_step(x, y, factor=0.25)
    for p, q, g in zip(model.parameters(), before, grads, strict=True):
        torch.testing.assert_close(p.detach(), q - 0.25 * loss.item() * g)
    train_step(x, y, factor=0.5)
    assert train_step.cache_info().compilations == 1


def in_pure_jax(tx, model, x, y, steps):
    """Return losses and parameters of `mlp` with a frozen middle layer, trained in pure JAX."""
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
    frozen = {name: params.pop(name) for name in ("2.weight", "2.bias")}
    x, y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

    def loss(params):
        p = params | frozen
        h = jnp.tanh(jnp.tanh(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"])
        return jnp.mean(jnp.square(h @ p["4.weight"].T + p["4.bias"] - y))

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses, params


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float64]))
def test_line_search_runs_inside_the_program(dtype):
    """L-BFGS evaluates the loss at trial points; here these evaluations are part of the program."""
    model = mlp(dtype=dtype)
    model[2].requires_grad_(False)
    x, y = next(batches(1, size=40, dtype=dtype))
    with bridge._process.x64(dtype is torch.float64):
        losses, expected = in_pure_jax(optax.lbfgs(), model, x, y, 8)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_step = JaxTrainStep(model, mse, torch_api.OptaxOptimizer(model.named_parameters("net"), optax.lbfgs()))
    np.testing.assert_allclose([train_step(x, y).item() for _ in range(8)], losses, rtol=1e-3 if dtype is torch.float32 else 1e-8)
    for name, value in expected.items():
        p = torch.from_numpy(np.array(value))
        assert movement_error(model.get_parameter(name), p, start[name]) < (0.02 if dtype is torch.float32 else 1e-6)
    assert losses[-1] < 0.9 * losses[0]
    assert train_step.cache_info().compilations == 1


# ---------------------------------------------------------------------- layouts


class Odd(nn.Module):
    """A module whose parameters and buffers are channels last, transposed, views, empty, 0-d and complex."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        whole = torch.randn(40)
        self.view = nn.Parameter(whole[3:13])
        self.none, self.scale = nn.Parameter(torch.randn(0, 3)), nn.Parameter(torch.tensor(0.7))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(8)[2:6])
        self.register_buffer("turned_too", torch.zeros(5, 4).t())
        self.register_buffer("constant", torch.arange(4.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.held = whole, self.seen

    def forward(self, x):
        h = self.conv(x).mean((2, 3)) + self.constant
        self.seen.mul_(0.5).add_(h.mean(0).detach())
        self.turned_too += self.turned.detach()
        self.calls += 1
        wave = ((h @ self.turned).to(torch.complex64) * self.phase).abs().square().mean()
        return wave * self.scale + self.view.square().sum() + self.none.sum()


def test_parameters_and_buffers_may_have_any_layout():
    model = Odd()
    twin = copy.deepcopy(model)
    start = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer, other = adamw(model), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train_step = JaxTrainStep(model, lambda m, x: m(x), optimizer)
    addresses = None
    for seed in range(20):
        x = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
        x = x.to(memory_format=torch.channels_last) if seed % 2 else x
        loss = train_step(x)
        other.zero_grad()
        expected = twin(x)
        expected.backward()
        other.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
        now = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
        assert addresses in (None, now)
        addresses = now
    for name, p in twin.named_parameters():
        assert not p.numel() or movement_error(model.get_parameter(name), p, start[name]) < 1e-4, name
    for name, b in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), b, rtol=1e-4, atol=1e-4)
        assert model.get_buffer(name).stride() == b.stride()
    assert model.calls.item() == 20
    assert model.held[1] is not model.seen or torch.equal(model.held[1], model.seen)
    assert model.held[0][3:13].equal(model.view.detach()), "the step replaced a view by a copy"
    assert train_step.cache_info().compilations == 1


def test_frozen_tensors_are_read_at_each_call():
    """Frozen tensors that change by hand between calls, lie in a bucket with trained ones, or are unaligned, have their current values."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    whole = torch.randn(17)
    model[5].weight = nn.Parameter(whole[1:].view(4, 4), requires_grad=False)
    twin = copy.deepcopy(model)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.0)
    train_step = JaxTrainStep(model, mse, optimizer)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    train_step(x, y)
    optimizer.set_trainable(["0.*", "3.*"], False)
    for round_ in range(4):
        with torch.no_grad():
            for m in (model, twin):
                for p in m.parameters():
                    p.mul_(1.1 + round_ / 10)
        torch.testing.assert_close(train_step(x, y), mse(twin, x, y).detach())


def test_loss_that_calls_the_original_module_raises():
    model = mlp()
    train_step = JaxTrainStep(model, lambda m, x, y: mse(model, x, y), adamw(model))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)):
        train_step(*next(batches(1)))
    assert all(map(torch.equal, before, model.parameters()))
