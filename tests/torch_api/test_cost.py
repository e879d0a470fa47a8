"""Cost of a step: compilations, bytes, Python frames, state."""

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
from policies import change_policy

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
def test_each_set_of_gradients_compiles_once_whatever_the_hyperparameters(make):
    params = parameters()
    optimizer = make(params)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    subset = {"body.weight", "body.bias", "head.weight"}
    for names in (None, subset):
        compiled, traced = bridge.compilations(), bridge.traces()
        give(params, names)
        optimizer.step()
        assert bridge.compilations() - compiled == bridge.traces() - traced <= 1  # 0 if another optimizer has compiled the same program
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
def test_warm_step_enters_at_most_20_frames_in_10_files(make):
    params = parameters()
    optimizer = make(params)
    for step in range(3):
        give(params, seed=step)
        optimizer.step()
    give(params)
    frames = project_frames(optimizer.step)
    assert len(frames) <= 20, frames
    assert len({file for file, _ in frames}) <= 10, frames


@pytest.mark.parametrize("bound", [None, 1.0], ids=["", "with a norm"])
def test_each_further_executable_enters_at_most_4_frames(bound, monkeypatch):
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=4)
    params = {f"layer{i}.weight": torch.nn.Parameter(torch.randn(1024, 300 + i % 3)) for i in range(24)}
    optimizer = torch_api.MaskedAdamW(params.items(), lr=1e-3, max_grad_norm=bound)
    for step in range(3):
        give(params, seed=step)
        optimizer.step()
    give(params)
    frames, executables = project_frames(optimizer.step), len(optimizer._launch_cache.last_used)
    assert executables >= 3
    assert len(frames) <= 20 + 4 * (executables - 1), [name for _, name in frames]


def test_two_optimizers_share_programs_of_one_transformation():
    tx = optax.adam(1e-3)
    for attempt in range(2):
        params = parameters(seed=attempt)
        optimizer = torch_api.OptaxOptimizer(params.items(), tx)
        give(params)
        before = bridge.compilations()
        optimizer.step()
    assert bridge.compilations() == before


@pytest.fixture
def two_unused_programs_kept(monkeypatch):
    """Empty the cache of programs and let it keep two unused ones."""
    monkeypatch.setattr(programs, "_programs", weakref.WeakValueDictionary())
    monkeypatch.setattr(programs, "_lru", {})
    monkeypatch.setattr(programs, "_LRU_SIZE", 2)


@pytest.mark.usefixtures("two_unused_programs_kept")
def test_cache_keeps_a_limited_number_of_unused_programs():
    rules = [optax.sgd(rate) for rate in (0.1, 0.2, 0.3, 0.4)]

    def compiled(rule):
        """Return a new optimizer of this rule, and how many programs its first step compiles."""
        params = parameters()
        optimizer = torch_api.OptaxOptimizer(params.items(), rule)
        give(params)
        before = bridge.compilations()
        optimizer.step()
        return optimizer, bridge.compilations() - before

    made, counts = zip(*map(compiled, rules), strict=True)
    assert counts == (1, 1, 1, 1)
    assert len(programs._lru) == 2
    assert [compiled(rule)[1] for rule in rules] == [0, 0, 0, 0]  # programs in use are found although the cache is smaller
    assert len(programs._lru) == 2
    del made
    gc.collect()
    assert len(programs._programs) == 2
    assert [compiled(rule)[1] for rule in rules[::-1]] == [0, 0, 1, 1]
    kept = [weakref.ref(program) for program in programs._lru.values()]
    programs._lru.clear()
    gc.collect()
    assert [program() for program in kept] == [None, None]
    assert not programs._programs


@pytest.mark.usefixtures("two_unused_programs_kept")
def test_cache_keeps_the_programs_of_a_step_together(monkeypatch):
    params = parameters()
    optimizers = [torch_api.OptaxOptimizer(params.items(), rule) for rule in (optax.sgd(0.1), optax.adam(0.1))]
    for optimizer in optimizers:
        give(params)
        optimizer.step()
    plans = list(programs._programs)
    assert len(plans) == 2
    monkeypatch.setattr(programs, "_LRU_SIZE", 1)
    monkeypatch.setattr(programs, "_programs", weakref.WeakValueDictionary())
    before = bridge.compilations()
    programs.get_executables(plans)
    assert bridge.compilations() == before + 2
    gc.collect()
    programs.get_executables(plans)
    assert bridge.compilations() == before + 2


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_frozen_parameter_costs_no_bytes(make):
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


def test_program_does_not_depend_on_earlier_compilations(monkeypatch):
    caches = (per_kind, "_families"), (update, "_size_independent"), (programs, "_programs")
    for cache in caches:
        monkeypatch.setattr(*cache, {})
    transforms = {"a": (optax.adamw, {"lr": 1e-3}), "b": optax.sgd(0.1)}

    def bytes_of(sizes):
        params = {f"{label}{size}": torch.nn.Parameter(torch.ones(size)) for label in transforms for size in sizes}
        optimizer = torch_api.PartitionedOptimizer(params.items(), transforms, {name: name[0] for name in params})
        give(params)
        optimizer.step()
        return optimizer.bytes_accessed()

    few = 6, 24, 48  # small sizes: the rule's own constants may be arrays of so many elements
    alone = bytes_of(few)
    for cache in caches:
        getattr(*cache).clear()
    bytes_of((300, 200, 100, 50))  # caches results for the same rules
    assert per_kind._families
    programs._programs.clear()
    assert bytes_of(few) == alone


def test_masked_parameters_have_no_state():
    params = parameters()
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.adamw, lr=1e-3, mask="body.*")
    before = params["head.weight"].detach().clone()
    give(params)
    optimizer.step()
    elements = params["body.weight"].numel() + params["body.bias"].numel()
    counts = 2 * 4  # one step count per parameter
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
def test_optax_optimizers_read_and_write_each_array_once(name, bytes_each, hyperparams):
    p = torch.nn.Parameter(torch.randn(1 << 16))
    optimizer = torch_api.OptaxOptimizer([p], getattr(optax, name), lr=1e-3, **hyperparams)
    p.grad = torch.randn(1 << 16)
    optimizer.step()
    assert optimizer.bytes_accessed() / p.numel() == pytest.approx(bytes_each, rel=0.01)


def test_set_to_zero_costs_nothing():
    """Leaves with this label have gradients, but neither they nor the gradients are read or written."""
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


def test_transposed_parameter_is_updated_in_its_logical_shape():
    """LAMB and Muon use the whole parameter, whatever the order of its dimensions in memory."""
    for tx in (optax.lamb(0.1), optax.contrib.muon(0.1)):
        plain = torch.nn.Parameter(torch.randn(6, 4))
        turned = torch.nn.Parameter(plain.detach().t().contiguous().t())
        for p in (plain, turned):
            optimizer = torch_api.OptaxOptimizer([p], tx)
            for step in range(3):
                p.grad = torch.from_numpy(np.random.default_rng(step).normal(size=(6, 4)).astype(np.float32))
                optimizer.step()
        torch.testing.assert_close(turned.contiguous(), plain, rtol=1e-6, atol=1e-6)


def writes_unread_state():
    """A transformation with a moment, and with a second state that is written but never read."""

    def update(updates, state, params=None):
        moments, _ = state
        moments = jax.tree.map(lambda m, g: 0.5 * m + g, moments, updates)
        return jax.tree.map(lambda m: -0.1 * m, moments), (moments, jax.tree.map(lambda g: jnp.full_like(g, 0.25), updates))

    return optax.GradientTransformation(lambda params: (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.ones_like, params)), update)


@pytest.mark.parametrize("count", [1, 3])
def test_write_only_state_keeps_its_address(count):
    """With equal leaves, the update is a function that the program calls several times."""
    params = [torch.nn.Parameter(torch.ones(300, 400)) for _ in range(count)]
    optimizer = torch_api.OptaxOptimizer(params, writes_unread_state())
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


def test_unused_inputs_are_found_through_calls():
    called = jax.jit(lambda x, y, z: (x + 1, jax.jit(lambda y, z: jnp.zeros_like(y))(y, z)))
    jaxpr = jax.make_jaxpr(lambda x, y, z, u: (called(x, y, z), u))(*[jnp.ones(3)] * 4).jaxpr
    assert properties_of(jaxpr).used_inputs == (True, False, False, True)
    read = jax.make_jaxpr(lambda x, y: jax.jit(lambda x, y: x + y)(x, y))(*[jnp.ones(3)] * 2).jaxpr
    assert properties_of(read).used_inputs == (True, True)
