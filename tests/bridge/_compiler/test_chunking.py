"""Chunking: many equal leaves are updated in chunks, by executables that can be reused for every set of gradients."""

import gc
import itertools
import math
import re
import warnings

import jax
import numpy as np
import pytest
import torch
from oracles import clones, random_grads, same, set_grads
from packing import assert_near, random_subset, run, states, step_all
from policies import change_policy

import bridge
import torch_api
from bridge._compiler import chunking, policy

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

SHAPES = [(5, 7)] * 18 + [(23,)] * 14 + [(6, 3)] * 9 + [(11, 2)]


@pytest.fixture(autouse=True)
def _unbucketed_leaves(monkeypatch):
    """Let small leaves act like large ones: none is bucketed, and chunks have 24, 4 or 1 leaves."""
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0)
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=16)


def parameters(shapes=SHAPES, dtype=torch.float32):
    return [torch.nn.Parameter(0.1 * torch.randn(shape, dtype=dtype)) for shape in shapes]


def pair(masked, original, shapes=SHAPES, **options):
    params = parameters(shapes)
    others = clones(params)
    return [(masked(params, **options), params), (original(others, **options), others)], clones(params)


def sizes(optimizer):
    """Return how many leaves each executable of the last step updated."""
    return [len(launch.leaves) for launch in optimizer._launch_cache.last_used]


PAIRS = {
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "NAdam": (torch_api.MaskedNAdam, torch.optim.NAdam, {"lr": 0.01}),
}


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", ["AdamW", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("SGD", "NAdam"))])
def test_steps_with_random_missing_gradients_move_as_in_torch_and_stop_compiling(name):
    masked, original, options = PAIRS[name]
    runs, start = pair(masked, original, **options)
    (ours, params), (_, others) = runs
    compiled = []
    for _ in range(30):
        grads = random_subset(params)
        held = [(p.detach().clone(), {k: t.clone() for k, t in ours.state.get(p, {}).items()}) for p in params]
        step_all(runs, grads)
        compiled.append(ours.cache_info().compilations)
        for p, g, (value, state) in zip(params, grads, held, strict=True):
            assert torch.equal(p, value) == (g is None)
            assert g is not None or same(ours.state.get(p, {}).values(), state.values())
    assert_near(params, others, start)
    for p, q in zip(params, others, strict=True):
        assert runs[0][0].state[p].keys() == runs[1][0].state[q].keys()
        assert "step" not in ours.state[p] or float(ours.state[p]["step"]) == float(runs[1][0].state[q]["step"])
    by_shape = {}
    for program in ours._used_executables._executables:
        if len({leaf.spec for leaf in program.plan.leaves}) == 1:
            by_shape.setdefault(program.plan.leaves[0].spec, set()).add(len(program.plan.leaves))
    every = {spec: {sum(shape == s for s in SHAPES) for shape in SHAPES if math.prod(shape) == spec.shape[0]} for spec in by_shape}
    assert all(len(counts) <= 4 and counts <= {24, 4, 1} | every[spec] for spec, counts in by_shape.items()), by_shape
    assert compiled[-1] == compiled[14], "a new set of gradients needed another executable"
    assert ours.cache_info().programs <= 4 * 3 + 4


def test_chunks_contain_equal_leaves():
    runs, _ = pair(torch_api.MaskedSGD, torch.optim.SGD, lr=0.1)
    (ours, params), _ = runs
    run(runs, 1)
    assert sorted(sizes(ours)) == [1, 9, 14, 18], "with all gradients there is more than one chunk per kind of leaf"
    launches = ours._launch_cache.last_used
    assert sorted(id(p) for launch in launches for p in (leaf.param for leaf in launch.leaves)) == sorted(map(id, params))
    assert all(len({leaf.shape for leaf in launch.leaves}) == 1 for launch in launches)
    assert len({launch.executable for launch in launches}) == ours.cache_info().programs == 4
    step_all(runs, [None if i in (0, 20, 36) else torch.randn_like(p) for i, p in enumerate(params)])
    assert sorted(sizes(ours)) == [1] * 3 + [4] * 9, "with changing sets the chunks do not have the fixed sizes"
    step_all(runs, [None if i in (3, 19, 33) else torch.randn_like(p) for i, p in enumerate(params)])
    assert sorted(sizes(ours)) == [1] * 3 + [4] * 9
    assert ours.cache_info().programs == 4 + 2 + 2 + 1


def test_changing_frozen_leaves_stop_compiling_after_a_few_sets():
    """Each set is all trainable parameters; from the fifth on, chunks of the fixed sizes are reused."""
    runs, start = pair(*PAIRS["AdamW"][:2], **PAIRS["AdamW"][2])
    (ours, params), (_, others) = runs
    run(runs, 1)
    made = [{len(program.plan.leaves) for program in ours._used_executables._executables}]
    frozen = set()
    for i in range(7):
        frozen |= {i, 18 + i}
        ours.set_trainable(lambda name, p, one=params[i], other=params[18 + i]: p is one or p is other, False)
        before = set(ours._used_executables._executables)
        step_all(runs, [None if i in frozen else torch.randn_like(p) for i, p in enumerate(params)])
        made.append({len(program.plan.leaves) for program in ours._used_executables._executables - before} - {24, 4, 1})
    assert_near(params, others, start)
    assert made == [{18, 14, 9, 1}, {17, 13}, {16, 12}, {15, 11}, set(), set(), set(), set()]


def test_few_leaves_share_one_executable():
    params = parameters([(5, 7)] * policy.CHUNKING.max_shared_loops)
    ours = torch_api.MaskedSGD(params, lr=0.1)
    run([(ours, params)], 1)
    assert sizes(ours) == [policy.CHUNKING.max_shared_loops]


def test_more_leaves_are_split_into_chunks_of_equal_leaves(monkeypatch):
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=40)
    params = parameters([(5, 7)] * 31 + [(23,)] * 9)
    ours = torch_api.MaskedSGD(params, lr=0.1)
    run([(ours, params)], 1)
    assert sizes(ours) == [40]
    params = parameters([(5, 7)] * 30 + [(23,)] * 8 + [(3,)] * 3)
    ours = torch_api.MaskedSGD(params, lr=0.1)
    run([(ours, params)], 1)
    assert sorted(sizes(ours)) == [3, 8, 15, 15]
    assert ours.cache_info().compilations == 3
    assert policy.CHUNKING.min_equal_leaves(40) > 1e9 > policy.CHUNKING.min_equal_leaves(41) == 4


@pytest.mark.parametrize("count", [1, 2, 23, 24, 25, 36, 48, 49, 1000])
def test_equal_leaves_with_gradients_are_split_into_as_few_chunks_as_possible(count):
    found = list(chunking.equal_chunks(range(count)))
    assert [i for tile in found for i in tile] == list(range(count))
    assert len(found) == math.ceil(count / policy.CHUNKING.max_equal_leaves)
    assert len({len(tile) for tile in found[:-1]}) <= 1
    assert all(len(found[-1]) <= len(tile) <= policy.CHUNKING.max_equal_leaves for tile in found)


@pytest.mark.parametrize(("equal", "found"), [(24, [24, 4, 1]), (16, [16, 4, 1]), (2, [2, 1]), (1, [1])])
def test_chunk_sizes_are_decreasing(equal, found):
    assert policy.ChunkingPolicy(max_equal_leaves=equal).chunk_sizes == found


@pytest.mark.parametrize("seed", range(5))
def test_every_leaf_is_in_exactly_one_chunk(seed):
    random = np.random.default_rng(seed)
    kinds = [None if random.random() < 0.1 else int(k) for k in random.integers(0, 5, 60)]
    frequent = [kinds.count(kind) + (kind == 2) if kind in (0, 1, 2) else 0 for kind in kinds]
    for few, restless in itertools.product((False, True), repeat=2):
        found = list(chunking.chunk_leaves(kinds, [f * (not few) for f in frequent], restless))
        assert sorted(i for tile in found for i in tile) == list(range(60))
        mixed = [tile for tile in found if len({kinds[i] for i in tile}) > 1]
        assert len(mixed) <= 1
        assert all(kinds[i] is None for tile in mixed for i in tile) or not restless
        if few and not restless:
            assert len(found) == 1


# ---------------------------------------------------------------------- all gradients together


def test_norm_is_taken_over_all_executables_as_in_torch():
    params = parameters()
    start, others = clones(params), clones(params)
    ours = torch_api.MaskedSGD(params, lr=0.1, momentum=0.9, max_grad_norm=0.7)
    theirs = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    for step in range(6):
        grads = [g if g is None else (50.0, 0.01)[step % 2] * g for g in (random_grads(params) if step < 2 else random_subset(params))]
        set_grads(params, grads)
        set_grads(others, grads)
        torch.nn.utils.clip_grad_norm_([p for p in others if p.grad is not None], 0.7)
        ours.step()
        theirs.step()
        assert len(sizes(ours)) > 3
    assert_near(params, others, start)


@pytest.mark.parametrize("where", [0, 20, 35, 41])
@pytest.mark.parametrize("bound", [None, pytest.param(0.5, marks=pytest.mark.slow)], ids=["plain", "clipped"])
def test_one_nonfinite_gradient_skips_all_executables(where, bound):
    params = parameters()
    start, others = clones(params), clones(params)
    ours = torch_api.MaskedSGD(params, lr=0.1, momentum=0.9, fused=True, max_grad_norm=bound)
    theirs = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    scaler.scale(torch.zeros(()))  # the scaler makes its tensors here
    for step in range(4):
        grads = random_grads(params)
        set_grads(params, [g * scaler.get_scale() for g in grads])
        values, state = clones(params), [t.clone() for t in states(ours, params)]
        if step == 2:
            params[where].grad.view(-1)[3] = torch.inf
        scaler.step(ours)
        scaler.update()
        assert same(params, values) == (step == 2)
        if step == 2:
            assert same(states(ours, params), state)
        else:
            set_grads(others, grads)
            torch.nn.utils.clip_grad_norm_(others, bound or torch.inf)
            theirs.step()
        assert ours.skipped_steps == (step >= 2)
        assert len(sizes(ours)) > 3
    assert scaler.get_scale() == 32.0
    assert_near(params, others, start)


# ---------------------------------------------------------------------- what is compiled, and why


def test_cache_info_counts():
    params = parameters()
    ours = torch_api.MaskedSGD(params, lr=0.0789, momentum=0.9, dampening=0.25)
    assert ours.cache_info() == (0, 0, 0, 0)
    before = bridge.compilations()
    run([(ours, params)], 3)
    first = ours.cache_info()
    assert (first.hits, first.misses) == (2, 1)
    assert first.compilations == bridge.compilations() - before
    assert first.programs == len({launch.executable for launch in ours._launch_cache.last_used})
    grads = random_grads(params)
    grads[0] = None
    for _ in range(2):
        step_all([(ours, params)], grads)
    run([(ours, params)], 1)
    assert ours.cache_info()[:2] == (4, 2)
    twin = torch_api.MaskedSGD(clones(params), lr=0.5, momentum=0.8, dampening=0.125)
    run([(twin, twin.param_groups[0]["params"])], 1)
    assert twin.cache_info() == (0, 1, first.programs, 0)


def test_changed_hyperparameters_hit_the_cache_without_warning():
    params = parameters([(3, 41)] * 3)
    ours = torch_api.MaskedAdamW(params, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(ours, 0.1, total_steps=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(10):
            run([(ours, params)], 1)
            schedule.step()
            ours.param_groups[0] |= {"weight_decay": 0.1 * step, "eps": 1e-8 + 1e-9 * step}
            ours.max_grad_norm = 1.0 + step
    assert ours.cache_info()[:2] == (9, 1)


def test_known_trainable_pattern_compiles_and_warns_nothing():
    params = parameters()
    ours = torch_api.MaskedSGD([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, momentum=0.9)
    run([(ours, params)], 1)
    ours.set_trainable(re.compile("w(3|19|33|41)$"), False)
    run([(ours, params)], 1)
    compiled = bridge.compilations()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trainable in (True, False, True):
            ours.set_trainable(re.compile("w(3|19|33|41)$"), trainable)
            run([(ours, params)], 2)
    assert bridge.compilations() == compiled


# ---------------------------------------------------------------------- memory


def test_state_has_the_bytes_of_torch():
    runs, _ = pair(torch_api.MaskedAdamW, torch.optim.AdamW, lr=0.01)
    run(runs, 2)
    size = lambda o: sum(t.nbytes for s in o.state.values() for t in s.values())  # noqa: E731
    assert size(runs[0][0]) == size(runs[1][0]) > 0


@pytest.mark.parametrize("limit", [0, 1 << 17], ids=["tiles", "packs"])
def test_deleted_optimizer_leaves_only_the_memory_of_its_parameters(limit, monkeypatch):
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=limit)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    params = parameters()
    ours = torch_api.MaskedSGD(params, lr=0.1, momentum=0.9, max_grad_norm=1.0)
    run([(ours, params)], 2)
    run([(ours, params)], 2, random_subset)
    held = {leaf.jax_buffer for leaf in ours._records}
    expected = {memory.array.unsafe_buffer_pointer() for memory in held}
    assert len(held) == (2 if limit else len(params))  # buckets of two padded row lengths
    assert len(jax.live_arrays()) - len(before) > len(held)
    del ours, held
    gc.collect()
    left = [array for array in jax.live_arrays() if id(array) not in before]
    assert {array.unsafe_buffer_pointer() for array in left} == expected
    del left, params
    gc.collect()
    assert not [array for array in jax.live_arrays() if id(array) not in before]
