"""What a step of any transformation costs: compilations, bytes, frames, state."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from oracles import FUSES, project_frames

import bridge
import torch_api
from bridge._compiler import update
from bridge._compiler.passes import per_kind
from bridge._ir.queries import properties_of
from bridge._runtime import cache as programs

pytestmark = pytest.mark.usefixtures("standard_promotion")


def parameters(shapes=((8, 6), (6,), (8, 6), (3, 8)), seed=0):
    generator = torch.Generator().manual_seed(seed)
    names = ["body.weight", "body.bias", "neck.weight", "head.weight"]
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in zip(names, shapes, strict=True)}


def give(params, names=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, p in params.items():
        g = torch.randn(p.shape, generator=generator)
        p.grad = g if names is None or name in names else None


MAKERS = {
    "alone": lambda params: torch_api.OptaxOptimizer(params.items(), optax.adamw, lr=1e-3),
    "alone, shaped": lambda params: torch_api.OptaxOptimizer(params.items(), optax.lamb, lr=1e-3),
    "together": lambda params: torch_api.OptaxOptimizer(params.items(), optax.contrib.prodigy, lr=1.0),
    "ready": lambda params: torch_api.OptaxOptimizer(params.items(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))),
    "partitioned": lambda params: torch_api.PartitionedOptimizer(
        params.items(), {"a": (optax.adamw, {"lr": 1e-3}), "b": optax.sgd(0.1)}, {"body": "a", "neck": "b", "head": "b"}
    ),
    "multi": lambda params: torch_api.MultiOptimizer(
        params.items(), ("*.weight", bridge.Momentum(lr=0.1)), ("*.bias", bridge.Adam(lr=0.1))
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_one_compilation_for_a_set_of_live_leaves_whatever_the_numbers_are(make):
    params = parameters()
    optimizer = make(params)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    subset = {"body.weight", "body.bias", "head.weight"}
    for names in (None, subset):
        compiled, traced = bridge.compilations(), bridge.traces()
        give(params, names)
        optimizer.step()
        assert bridge.compilations() - compiled == bridge.traces() - traced <= 1  # 0 where another optimizer had the same before
    compiled, traced = bridge.compilations(), bridge.traces()
    for step in range(12):
        give(params, None if step % 3 else subset, seed=step)
        for group in optimizer.param_groups:
            for key in ("b1", "beta", "weight_decay", "beta1"):
                if key in group:
                    group[key] = 0.5 + 0.01 * step
        optimizer.step()
        schedule.step()
    assert (bridge.compilations(), bridge.traces()) == (compiled, traced)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_warm_step_enters_at_most_20_frames_in_10_files(make):
    params = parameters()
    optimizer = make(params)
    for step in range(3):
        give(params, seed=step)
        optimizer.step()
    give(params)
    frames = project_frames(optimizer.step)
    assert len(frames) <= 20, frames
    assert len({file for file, _ in frames}) <= 10, frames


def test_two_optimizers_over_one_transformation_share_its_programs():
    tx = optax.adam(1e-3)
    for attempt in range(2):
        params = parameters(seed=attempt)
        optimizer = torch_api.OptaxOptimizer(params.items(), tx)
        give(params)
        before = bridge.compilations()
        optimizer.step()
    assert bridge.compilations() == before


@pytest.fixture
def few_kept(monkeypatch):
    """No program is known, and two are kept that nobody uses."""
    monkeypatch.setattr(programs, "_programs", weakref.WeakValueDictionary())
    monkeypatch.setattr(programs, "_recent", {})
    monkeypatch.setattr(programs, "_PROGRAMS_KEPT", 2)


@pytest.mark.usefixtures("few_kept")
def test_programs_that_nobody_uses_are_kept_to_a_number():
    rules = [optax.sgd(rate) for rate in (0.1, 0.2, 0.3, 0.4)]

    def compiled(rule):
        """A new optimizer with it, and how many programs its first step compiles."""
        params = parameters()
        optimizer = torch_api.OptaxOptimizer(params.items(), rule)
        give(params)
        before = bridge.compilations()
        optimizer.step()
        return optimizer, bridge.compilations() - before

    made, counts = zip(*map(compiled, rules), strict=True)
    assert counts == (1, 1, 1, 1)
    assert len(programs._recent) == 2
    assert [compiled(rule)[1] for rule in rules] == [0, 0, 0, 0]  # what an optimizer has need not be kept to be found
    assert len(programs._recent) == 2
    del made
    gc.collect()
    assert len(programs._programs) == 2
    assert [compiled(rule)[1] for rule in rules[::-1]] == [0, 0, 1, 1]
    kept = [weakref.ref(program) for program in programs._recent.values()]
    programs._recent.clear()
    gc.collect()
    assert [program() for program in kept] == [None, None]
    assert not programs._programs


@pytest.mark.usefixtures("few_kept")
def test_the_programs_of_a_step_are_kept_together(monkeypatch):
    params = parameters()
    optimizers = [torch_api.OptaxOptimizer(params.items(), rule) for rule in (optax.sgd(0.1), optax.adam(0.1))]
    for optimizer in optimizers:
        give(params)
        optimizer.step()
    plans = list(programs._programs)
    assert len(plans) == 2
    monkeypatch.setattr(programs, "_PROGRAMS_KEPT", 1)
    monkeypatch.setattr(programs, "_programs", weakref.WeakValueDictionary())
    before = bridge.compilations()
    programs.programs(plans)
    assert bridge.compilations() == before + 2
    gc.collect()
    programs.programs(plans)
    assert bridge.compilations() == before + 2


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_frozen_leaf_costs_no_byte(make):
    small, large = parameters(), parameters(((8, 6), (6,), (8, 6), (3, 8)))
    large["body.frozen"] = torch.nn.Parameter(torch.randn(300, 400), requires_grad=False)
    counts = []
    for params in (small, large):
        optimizer = make(params)
        give({name: p for name, p in params.items() if name != "body.frozen"})
        if "body.frozen" in params:
            params["body.frozen"].grad = torch.full((300, 400), torch.nan)
        optimizer.step()
        counts.append(optimizer.bytes_accessed())
        assert not optimizer.state.get(params.get("body.frozen"))
    assert counts[0] == counts[1]


def test_a_program_is_the_same_whatever_was_compiled_before(monkeypatch):
    caches = (per_kind, "_families"), (update, "_of_any_size"), (programs, "_programs")
    for cache in caches:
        monkeypatch.setattr(*cache, {})
    transforms = {"a": (optax.adamw, {"lr": 1e-3}), "b": optax.sgd(0.1)}

    def bytes_of(sizes):
        params = {f"{label}{size}": torch.nn.Parameter(torch.ones(size)) for label in transforms for size in sizes}
        optimizer = torch_api.PartitionedOptimizer(params.items(), transforms, {name: name[0] for name in params})
        give(params)
        optimizer.step()
        return optimizer.bytes_accessed()

    few = 6, 24, 48  # no more elements than an array may have that is a number of the rule
    alone = bytes_of(few)
    for cache in caches:
        getattr(*cache).clear()
    bytes_of((300, 200, 100, 50))  # of which the same rules are kept
    assert per_kind._families
    programs._programs.clear()
    assert bytes_of(few) == alone


def test_a_mask_allocates_no_state_for_what_it_freezes():
    params = parameters()
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.adamw, lr=1e-3, mask="body.*")
    before = params["head.weight"].detach().clone()
    give(params)
    optimizer.step()
    elements = params["body.weight"].numel() + params["body.bias"].numel()
    counts = 2 * 4  # the step count of each
    assert sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values()) == 2 * 4 * elements + counts
    assert torch.equal(params["head.weight"], before)


@FUSES
@pytest.mark.parametrize(
    ("name", "bytes_each", "hyperparams"),
    [
        ("adam", 28, {}),
        ("adamw", 28, {}),
        ("nadamw", 28, {}),
        ("lion", 20, {}),
        ("rmsprop", 20, {}),
        ("sgd", 20, {"momentum": 0.9}),
        ("sgd", 12, {}),
    ],
)
def test_optaxs_own_equations_move_as_few_bytes_as_can_be(name, bytes_each, hyperparams):
    p = torch.nn.Parameter(torch.randn(1 << 16))
    optimizer = torch_api.OptaxOptimizer([p], getattr(optax, name), lr=1e-3, **hyperparams)
    p.grad = torch.randn(1 << 16)
    optimizer.step()
    assert optimizer.bytes_accessed() / p.numel() == pytest.approx(bytes_each, rel=0.01)


def test_set_to_zero_costs_nothing():
    """The leaves of that label are live, but neither they nor their gradients are read or written."""
    p = {"a.w": torch.nn.Parameter(torch.randn(1000)), "b.w": torch.nn.Parameter(torch.randn(50000))}
    optimizer = torch_api.PartitionedOptimizer(p.items(), {"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"a": "a", "b": "b"})
    alone = torch_api.OptaxOptimizer([("a.w", torch.nn.Parameter(torch.randn(1000)))], optax.adam(1e-3))
    for q in (*p.values(), alone.param_groups[0]["params"][0]):
        q.grad = torch.randn(q.shape)
    before = p["b.w"].detach().numpy().tobytes()
    optimizer.step()
    alone.step()
    assert optimizer.bytes_accessed() <= alone.bytes_accessed() + 64
    assert p["b.w"].detach().numpy().tobytes() == before
    assert not optimizer.state[p["b.w"]]


def test_the_trust_ratio_is_that_of_the_parameter_in_its_own_shape_and_order():
    """LAMB and Muon look at a parameter as a whole, whatever the order of its memory is."""
    for tx in (optax.lamb(0.1), optax.contrib.muon(0.1)):
        plain = torch.nn.Parameter(torch.randn(6, 4))
        turned = torch.nn.Parameter(plain.detach().t().contiguous().t())
        for p in (plain, turned):
            optimizer = torch_api.OptaxOptimizer([p], tx)
            for step in range(3):
                p.grad = torch.from_numpy(np.random.default_rng(step).normal(size=(6, 4)).astype(np.float32))
                optimizer.step()
        torch.testing.assert_close(turned.contiguous(), plain, rtol=1e-6, atol=1e-6)


def forgetful():
    """State of which only a constant is written, whatever it was: beside a moment that is read."""

    def update(updates, state, params=None):
        moments, _ = state
        moments = jax.tree.map(lambda m, g: 0.5 * m + g, moments, updates)
        return jax.tree.map(lambda m: -0.1 * m, moments), (moments, jax.tree.map(lambda g: jnp.full_like(g, 0.25), updates))

    return optax.GradientTransformation(lambda params: (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.ones_like, params)), update)


@pytest.mark.parametrize("count", [1, 3])
def test_state_that_is_written_unread_stays_where_it_is(count):
    """Of equal leaves, whose update is a function that the program calls, too."""
    params = [torch.nn.Parameter(torch.ones(300, 400)) for _ in range(count)]
    optimizer = torch_api.OptaxOptimizer(params, forgetful())
    places = []
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        tensors = [t for p in params for t in (p, *optimizer.state[p].values())]
        places.append([t.data_ptr() for t in tensors])
    assert places == places[:1] * 3
    assert sum(bool((t == 0.25).all()) for t in tensors) == count
    assert all(torch.allclose(p.detach(), torch.tensor(1 - 0.1 * (1 + 1.5 + 1.75))) for p in params)


def test_what_a_program_does_not_read_is_seen_through_its_calls():
    called = jax.jit(lambda x, y, z: (x + 1, jax.jit(lambda y, z: jnp.zeros_like(y))(y, z)))
    jaxpr = jax.make_jaxpr(lambda x, y, z, u: (called(x, y, z), u))(*[jnp.ones(3)] * 4).jaxpr
    assert properties_of(jaxpr).used_inputs == (True, False, False, True)
    read = jax.make_jaxpr(lambda x, y: jax.jit(lambda x, y: x + y)(x, y))(*[jnp.ones(3)] * 2).jaxpr
    assert properties_of(read).used_inputs == (True, True)
