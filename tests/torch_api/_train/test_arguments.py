"""JaxTrainStep in detail: gradients that are not computed, random draws, accumulation, results, and calls that fail."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from train_steps import adamw, assert_moved_alike, batches, mlp, mse

import bridge
import torch_api
from torch_api import JaxTrainStep

pytestmark = [pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion", "unoptimized_training")]


def count(jaxpr, name):
    """Return how often a primitive occurs in a program, including the functions that it calls."""
    bodies = [getattr(x, "jaxpr", x) for eqn in jaxpr.eqns for x in eqn.params.values()]
    own = sum(eqn.primitive.name == name for eqn in jaxpr.eqns)
    return own + sum(count(body, name) for body in bodies if hasattr(body, "eqns"))


def products(train_step):
    (program,) = train_step._programs.values()
    return count(program.jaxpr.jaxpr, "dot_general")


# ---------------------------------------------------------------------- gradients that are not computed


def test_gradients_of_frozen_parameters_are_not_computed():
    """Three layers have 3 matrix products forward, 3 backward for weights and 2 for inputs; frozen layers save theirs."""
    counts = {}
    for mask in (True, "4.*", "2.*", "0.*"):
        model = mlp()
        train_step = JaxTrainStep(model, mse, adamw(model, mask=mask))
        train_step(*next(batches(1)))
        counts[mask] = products(train_step)
        grads = [p.grad for p in model.parameters()]
        assert grads == [None] * 6
    assert counts == {True: 8, "4.*": 4, "2.*": 5, "0.*": 6}
    model = mlp()
    model[0].requires_grad_(False), model[2].requires_grad_(False)
    train_step = JaxTrainStep(model, mse, adamw(model))
    train_step(*next(batches(1)))
    assert products(train_step) == 4


class Gated(nn.Module):
    """The batch selects which layer is used; another one is used without gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.watched = nn.Linear(4, 1)

    def forward(self, x, which):
        h = self.a(x) if which == "a" else self.b(x)
        return h + self.watched(x).detach()


def test_parameter_unused_by_the_loss_does_not_change():
    model = Gated()
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    loss = lambda m, x, y, which: F.mse_loss(m(x, which), y)  # noqa: E731
    optimizer, other = adamw(model, weight_decay=0.5), torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.5)
    train_step = JaxTrainStep(model, loss, optimizer)
    for i, batch in enumerate(batches(20)):
        which = "a" if i % 3 else "b"
        train_step(*batch, which)
        other.zero_grad()
        loss(twin, *batch, which).backward()
        other.step()
    assert_moved_alike(model, twin, start, 1e-4)
    assert {name: optimizer.state.get(p, {}).get("step", torch.tensor(0.0)).item() for name, p in model.named_parameters()} == {
        "a.weight": 13, "a.bias": 13, "b.weight": 7, "b.bias": 7, "watched.weight": 0, "watched.bias": 0,
    }  # fmt: skip
    assert train_step.cache_info()[1:] == (2, 2, 2)


# ---------------------------------------------------------------------- randomness


def dropout_run(seed, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    train_step = JaxTrainStep(model, mse, torch_api.MaskedSGD(model.named_parameters(), lr=0.0))
    torch.manual_seed(seed)
    batch = next(batches(1))
    losses = [train_step(*batch).item() for _ in range(steps)]
    assert train_step.cache_info().compilations == 1
    return losses, train_step, batch


@pytest.mark.quick
def test_dropout_differs_between_calls_and_repeats_with_the_seed():
    first, train_step, batch = dropout_run(3)
    assert len(set(first)) == len(first)
    assert dropout_run(3)[0] == first
    assert dropout_run(4)[0] != first
    state = torch.get_rng_state()
    train_step.module.eval()
    value = train_step(*batch).item()
    assert value == train_step(*batch).item() == pytest.approx(mse(train_step.module, *batch).item(), rel=1e-6)
    assert torch.equal(state, torch.get_rng_state()), "a call without dropout used the random generator"


def test_dropout_keeps_the_mean():
    model = nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 1))
    nn.init.ones_(model[1].weight), nn.init.zeros_(model[1].bias)
    train_step = JaxTrainStep(model, lambda m, x: m(x).mean(), torch_api.MaskedSGD(model.named_parameters(), lr=0.0))
    means = [train_step(torch.ones(512, 4)).item() for _ in range(20)]
    assert abs(np.mean(means) - 4.0) < 0.05
    assert np.std(means) > 0.005


# ---------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulation_averages_over_the_calls(dtype):
    model = mlp(dtype=dtype)
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer, other = adamw(model, max_grad_norm=0.5), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2) for o in (optimizer, other)]
    train_step = JaxTrainStep(model, mse, optimizer, accumulate=3)
    data = list(batches(30, dtype=dtype))
    addresses = None
    for i, batch in enumerate(data):
        before = [p.detach().clone() for p in model.parameters()]
        train_step(*batch)
        assert all(map(torch.equal, before, model.parameters())) is (i % 3 != 2)
        assert train_step.pending == (i + 1) % 3
        now = [memory.address for memory in train_step._grad_accumulators.values()]
        assert addresses in (None, now)
        addresses = now
        (mse(twin, *batch) / 3).backward()
        if i % 3 == 2:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            other.step()
            other.zero_grad()
            for schedule in schedules:
                schedule.step()
    assert_moved_alike(model, twin, start, 1e-4 if dtype is torch.float32 else 1e-10)
    assert train_step.cache_info()[1:] == (2, 2, 2)


def test_calls_that_reach_different_parameters_accumulate():
    """Calls that do not reach a parameter add nothing to its gradient; flush updates with the accumulated gradients."""
    model = Gated()
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    loss = lambda m, x, y, which: F.mse_loss(m(x, which), y)  # noqa: E731
    optimizer, other = adamw(model), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train_step = JaxTrainStep(model, loss, optimizer, accumulate=2)
    data = [(*batch, which) for batch, which in zip(batches(9), "ab" + "aa" + "bb" + "ba" + "b", strict=True)]
    for i, batch in enumerate(data):
        train_step(*batch)
        (loss(twin, *batch) / (1 if i == 8 else 2)).backward()
        if i % 2 or i == 8:
            other.step()
            other.zero_grad()
    assert train_step.pending == 1
    train_step.flush()
    assert train_step.pending == 0
    assert_moved_alike(model, twin, start, 1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    train_step.flush()
    assert all(map(torch.equal, before, model.parameters())), "flush updated without pending calls"
    assert all(p.grad is None for p in model.parameters())


def test_half_gradients_are_accumulated_in_float32():
    model = mlp(dtype=torch.bfloat16)
    train_step = JaxTrainStep(model, mse, adamw(model), accumulate=2)
    for batch in batches(2, dtype=torch.bfloat16):
        train_step(*batch)
    assert {str(memory.array.dtype) for memory in train_step._grad_accumulators.values()} == {"float32"}


# ---------------------------------------------------------------------- hooks, failures, lifetimes


def test_hooks_of_the_optimizer_run_around_each_update():
    model, seen = mlp(), []
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train_step = JaxTrainStep(model, mse, optimizer, accumulate=2)
    for batch in batches(4):
        train_step(*batch)
    assert seen == ["before", "after"] * 2


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11 warns
def test_global_hooks_run_and_the_profiler_shows_the_step():
    model, seen = mlp(), []
    train_step = JaxTrainStep(model, mse, adamw(model))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    (first, second, third) = batches(3)
    try:
        train_step(*first)
    finally:
        for handle in handles:
            handle.remove()
    with torch.profiler.profile() as profile:
        train_step(*second)
    train_step(*third)
    assert seen == ["before", "after"]
    assert [event.count for event in profile.key_averages() if event.key == "Optimizer.step#MaskedAdamW.step"] == [1]


SETTINGS = {"jax_disable_jit": True, "jax_transfer_guard": "disallow"}


@pytest.mark.parametrize("name", SETTINGS)
def test_debug_settings_of_jax_do_not_affect_the_step(name):
    model = mlp()
    train_step = JaxTrainStep(model, mse, adamw(model))
    before = getattr(jax.config, name)
    jax.config.update(name, SETTINGS[name])
    try:
        losses = [float(train_step(x, y * scale)) for scale in (1.0, float("inf")) for x, y in batches(2)]
    finally:
        jax.config.update(name, before)
    assert np.isfinite(losses[:2]).all()
    assert not np.isfinite(losses[2:]).any()


def test_loss_that_raises_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = adamw(model)

    def loss(m, x, broken):
        out = m(x).square().mean()
        if broken:
            raise KeyError("mine")
        return out

    train_step = JaxTrainStep(model, loss, optimizer)
    x = torch.randn(6, 4)
    train_step(x, False)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    parts = [*model.parameters(), *model.buffers()]
    with pytest.raises(KeyError, match="mine"):
        train_step(x, True)
    assert all(map(torch.equal, before[0].values(), model.state_dict().values()))
    torch.testing.assert_close(before[1], optimizer.state_dict()["state"], rtol=0, atol=0)
    assert all(a is b for a, b in zip(parts, (*model.parameters(), *model.buffers()), strict=True))
    assert type(model[0].weight) is nn.Parameter
    train_step(x, False)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_program_that_fails_restores_all_values(accumulate):
    """A callback raises inside the running program, after parameters, state, buffers and accumulators were donated."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer, broken = adamw(model), []

    def called(value):
        if broken:
            raise KeyError("mine")
        return value

    def loss(m, x):
        value = jnp.mean(jnp.square(jnp.asarray(m(x))))
        same = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return value + 0 * jax.pure_callback(called, same, jax.lax.stop_gradient(value))

    train_step = JaxTrainStep(model, loss, optimizer, accumulate=accumulate)
    x = torch.randn(6, 4)
    for _ in range(2 * accumulate - 1):
        train_step(x)
    tensors = [*model.state_dict().values(), *(t for state in optimizer.state.values() for t in state.values())]
    before = [t.clone() for t in tensors]
    broken.append(True)
    with pytest.raises(Exception, match=r"mine|callback") as caught:
        train_step(x)
    broken.clear()
    now = [*model.state_dict().values(), *(t for state in optimizer.state.values() for t in state.values())]
    assert all(map(torch.equal, before, now))
    assert train_step.pending in (0, accumulate - 1)
    assert train_step.pending or accumulate == 1 or "gradients of 1 calls" in str(caught.value.__notes__)
    for _ in range(accumulate):
        train_step(x)
    assert not torch.equal(before[0], model[0].weight)


def test_tensors_follow_results_at_other_addresses():
    """A NumPy view of a donated jax array makes XLA write results elsewhere; parameters, state and buffers must move there."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    loss = lambda m, x, y: (m(x) - y).square().mean()  # noqa: E731
    train_step = JaxTrainStep(model, loss, adamw(model))
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    held = []
    for batch in batches(8):
        train_step(*batch)
        held.append([np.asarray(a) for a in jax.live_arrays() if a.size in (16, 4)])
        other.zero_grad()
        loss(twin, *batch).backward()
        other.step()
    assert_moved_alike(model, twin, start, 1e-4)
    torch.testing.assert_close(model[1].running_var, twin[1].running_var)


def test_parameters_outlive_the_step_and_the_optimizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    train_step = JaxTrainStep(model, lambda m, x: m(x).square().mean(), adamw(model))
    train_step(torch.randn(6, 4))
    gone = weakref.ref(train_step)
    values = {name: t.clone() for name, t in model.state_dict().items()}
    del train_step
    gc.collect()
    assert gone() is None
    for _ in range(20):
        jnp.ones((64, 64)).block_until_ready()
    assert all(map(torch.equal, values.values(), model.state_dict().values()))


def test_backward_through_an_older_graph_raises():
    model = nn.Linear(4, 4)
    train_step = JaxTrainStep(model, lambda m, x: m(x).square().mean(), adamw(model))
    x = torch.randn(6, 4, requires_grad=True)
    stale = model(x).square().sum()
    train_step(torch.randn(6, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_traces_and_compilations_are_counted():
    model = mlp()
    before = bridge.traces(), bridge.compilations()
    train_step = JaxTrainStep(model, mse, adamw(model))
    for batch in batches(5):
        train_step(*batch)
    assert (bridge.traces(), bridge.compilations()) == (before[0] + 1, before[1] + 1)
    assert train_step.cache_info() == (4, 1, 1, 1)


def test_ninth_program_warns():
    model = mlp(width=2)
    train_step = JaxTrainStep(model, lambda m, x, n: m(x).mean() * n, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    for n in range(8):
        train_step(torch.ones(2, 4), n + 1)
    with pytest.warns(torch_api.CompilationWarning, match="9 programs") as caught:
        train_step(torch.ones(2, 4), 9)
    assert caught[0].filename == __file__


class Layer(nn.Module):
    """A torch module that calls a layer written in JAX, with a constant, a static setting and several outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))
        self.layer = bridge.jax_function(lambda p, x, c, power: {"out": jnp.tanh(p["w"] * x @ c) ** power, "half": 0.5})

    def forward(self, x):
        made = self.layer({"w": self.scale}, self.first(x), torch.arange(6.0).reshape(3, 2), power=2)
        return made["out"].sum(-1, keepdim=True) * made["half"]


def test_layer_written_in_jax_is_part_of_the_program():
    torch.manual_seed(0)
    model = Layer()
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    train_step, eager = JaxTrainStep(model, mse, adamw(model)), adamw(twin)
    for x, y in batches(3):
        loss = train_step(x, y)
        eager.zero_grad()
        want = mse(twin, x, y)
        want.backward()
        eager.step()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-5, atol=1e-6)
    assert_moved_alike(model, twin, start, 1e-3)
    assert model.layer.programs == 0  # it compiled no program of its own
    got = jax.jit(bridge.module_function(model))(bridge.module_tree(model), jnp.asarray(x.numpy()))
    np.testing.assert_allclose(got, model(x).detach().numpy(), rtol=1e-5)


def test_loss_may_use_jax_grad():
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]

    def by_jax(model, x):
        slope = jax.grad(lambda v: jnp.sum(jnp.asarray(model(v))))(jnp.asarray(x))
        return jnp.mean((slope - 1) ** 2)

    def by_torch(model, x):
        x = x.clone().requires_grad_()
        return ((torch.autograd.grad(model(x).sum(), x, create_graph=True)[0] - 1) ** 2).mean()

    train_step, eager = JaxTrainStep(model, by_jax, adamw(model)), adamw(twin)
    for x, _ in batches(3):
        loss = train_step(x)
        eager.zero_grad()
        want = by_torch(twin, x)
        want.backward()
        eager.step()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-5, atol=1e-6)
    assert_moved_alike(model, twin, start, 1e-3)
