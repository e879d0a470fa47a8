"""Joint transformations over small leaves: the rows of a bucket share one loop for their update and one for their sums."""

import gc
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from joint_cases import TRANSFORMATIONS, clipped, moved, moved_by, norm_of, program, pure, which_scaled_steps_move
from oracles import CLOSE, clones, movement_error, random_grads, random_params, set_grads
from packing import alternating_grads, assert_near, bucket_rows, bucketed, run, unbucketed_twin
from policies import change_policy
from sampling import sampled

import torch_api
from bridge._compiler import joint_update, separability
from bridge._compiler.passes import batch_rows, hoist
from bridge._runtime import cache

pytestmark = [pytest.mark.long, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]
# Matrices, vectors, matrices with as many elements as the vectors, rows that would be padded, a large leaf, and a rare shape.
SHAPES = [(24, 16)] * 5 + [(48,)] * 4 + [(6, 8)] * 4 + [(10,)] * 4 + [(300, 200), (5,)]
SMALL = 13
PACKED = {"clip, adafactor": 8, "two leaves": 0, "rows": 0}  # in all other cases: every small leaf without padding


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_twenty_steps_match_optax(name):
    params, tx = random_params(shapes=SHAPES), TRANSFORMATIONS[name]()
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(20)]
    optimizer = moved(tx, params, grads)
    assert sum(slot is not None for slot in bucket_rows(optimizer)) == PACKED.get(name, SMALL)
    expected, bound = pure(tx, start, grads), (10 if name == "prodigy" else 1) * 3 * CLOSE
    assert max(map(movement_error, params, expected, start)) < bound
    with pytest.raises(AssertionError):  # the comparison can fail
        assert max(map(movement_error, moved_by(tx, start, grads, lr=1.001), expected, start)) < bound


@pytest.mark.parametrize("name", sampled(["clip, adafactor", "two leaves", "rows", "sums"]))
def test_leaves_with_different_equations_are_updated_separately(name, monkeypatch):
    """The bucket classes come from another trace; if they are wrong, only speed may suffer."""
    monkeypatch.setattr(separability, "bucket_classes", lambda problem, extra: (0,) * len(problem.specs))
    params = random_params(shapes=SHAPES[4:])
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(3)]
    bucketed(moved(TRANSFORMATIONS[name](), params, grads), 8)
    assert max(map(movement_error, params, pure(TRANSFORMATIONS[name](), start, grads), start)) < 3 * CLOSE


def test_callback_gets_the_leaves_of_buckets(monkeypatch):
    monkeypatch.setattr(separability, "bucket_classes", lambda problem, extra: (0,) * len(problem.specs))
    seen = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda norm: seen.append(float(norm)), norm_of(updates))
        return jax.tree.map(lambda g: -0.1 * g, updates), state

    params = random_params(shapes=SHAPES[:5])
    start, grads = [p.detach().clone() for p in params], random_grads(params)
    bucketed(moved(optax.GradientTransformation(lambda params: optax.EmptyState(), update), params, [grads]))
    jax.effects_barrier()
    assert seen == pytest.approx([torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).item()], rel=1e-5)
    for p, g, s in zip(params, grads, start, strict=True):
        torch.testing.assert_close(p.detach(), s - 0.1 * g)


def _double_in_a_loop(x):
    """Double x in a loop whose condition depends on x."""
    return jax.lax.while_loop(lambda y: jnp.max(jnp.abs(y)) < 4, lambda y: 2 * y, x)


# Calls, nested jaxprs, equations with several results, and equations along one dimension.
WITHIN = {
    "round": lambda x: jnp.round(x, 1),
    "nan_to_num": jnp.nan_to_num,
    "sort": lambda x: jnp.sort(x, -1),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "softmax": jax.nn.softmax,
    "checkpoint": jax.checkpoint(jnp.sin),
    "while": _double_in_a_loop,
    "barrier": jax.lax.optimization_barrier,
    "custom derivative": jax.nn.relu,
}


@pytest.mark.parametrize("name", sampled(WITHIN))
def test_updates_with_a_global_norm_may_use_any_primitive(name):
    def update(updates, state, params=None):
        norm = norm_of(updates)
        return jax.tree.map(lambda g: -0.4 * g / norm + 0.01 * WITHIN[name](g) + 0.02 * WITHIN[name](g / norm), updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    params = random_params(shapes=[(24, 16)] * 4 + [(48,)] * 4 + [(5,)])
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(20)]
    moved(tx, params, grads)
    assert max(map(movement_error, params, pure(tx, start, grads), start)) < 1e-5


def test_dependent_scalars_are_computed_in_few_rounds(monkeypatch):
    """The sum of each leaf needs the sum of the previous leaf; one round per leaf would take too long to trace."""

    def update(updates, state, params=None):
        found, total = [], 0.0
        for g in jax.tree.leaves(updates):
            total = total * 0.5 + jnp.sqrt(jnp.sum(jnp.square(g / (1 + total))))
            found.append(-0.1 * g / (1 + total))
        return jax.tree.unflatten(jax.tree.structure(updates), found), state

    rounds = []
    once = batch_rows.evaluated_once
    monkeypatch.setattr(batch_rows, "evaluated_once", lambda *given: rounds.append(None) or once(*given))
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    params = random_params(shapes=[(24, 16)] * 12 + [(48,)] * 12)
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(3)]
    bucketed(moved(tx, params, grads), 24)
    assert len(rounds) <= batch_rows._ROUNDS
    assert max(map(movement_error, params, pure(tx, start, grads), start)) < 1e-5


def test_each_equation_of_a_long_jaxpr_is_visited_once(monkeypatch):
    """Each product of an unrolled Newton-Schulz iteration reads the previous one twice; visiting both would take exponential time."""

    def update(updates, state, params=None):
        def of(x):
            x = x / norm_of(updates)
            for _ in range(12):
                y = x @ x.T @ x
                x = 1.5 * x - 0.5 * y + 0.1 * jnp.tanh(y)
            return -0.1 * x

        return jax.tree.map(of, updates), state

    calls = []
    of = hoist.Rest.of
    monkeypatch.setattr(hoist.Rest, "of", staticmethod(lambda *given: calls.append(None) or of(*given)))
    params = random_params(shapes=[(16, 16)] * 4)
    torch_api.OptaxOptimizer(params, optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    assert 4 <= len(calls) < 200


@pytest.mark.parametrize("name", sampled(["clip, adamw", "clip, lamb", "schedule-free"]))
def test_missing_gradients_move_like_unbucketed_leaves(name):
    params = random_params(shapes=SHAPES)
    start = clones(params)
    make = lambda ps: torch_api.OptaxOptimizer(ps, TRANSFORMATIONS[name]())  # noqa: E731
    ours = bucketed(make(params), SMALL)
    theirs, others = unbucketed_twin(make, start)
    run([(ours, params), (theirs, others)], 6, alternating_grads())
    assert_near(params, others, start, 3e-6)
    for p, q in zip(params, others, strict=True):
        assert ours.state[p].keys() == theirs.state[q].keys()
        for key, tensor in ours.state[p].items():
            torch.testing.assert_close(tensor, theirs.state[q][key], rtol=1e-4, atol=1e-6)


def test_each_row_uses_its_own_scalars(monkeypatch):
    params = random_params(shapes=SHAPES)
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(20)]
    scales = {f"p{i:02}": 1 + i / 10 for i in range(len(params))}
    tx = partial(clipped, optax.adamw(0.05, weight_decay=0.1))

    def ours():
        params = [torch.nn.Parameter(x.clone()) for x in start]
        bucketed(moved(tx(), params, grads, lr_scale=scales), SMALL)
        return params

    def wanted():
        names = dict(enumerate(scales.values()))
        scaled = optax.chain(tx(), optax.stateless(lambda updates, _: [names[i] * u for i, u in enumerate(updates)]))
        return pure(scaled, start, grads)

    expected = wanted()
    assert max(map(movement_error, ours(), expected, start)) < 3 * CLOSE
    columns = batch_rows.columns_of
    first = lambda flat, rows, numbers, values, count: columns(flat, rows[:1], numbers[:1], values, count)  # noqa: E731
    monkeypatch.setattr(joint_update, "columns_of", first)
    monkeypatch.setattr(cache, "_programs", {})
    assert max(map(movement_error, ours(), expected, start)) > 3 * CLOSE  # the comparison can fail


def loops(optimizer):
    text = program(optimizer).update.as_text()
    return text[text.index("ENTRY") :].count(" fusion(")


def test_number_of_loops_does_not_depend_on_the_number_of_small_leaves(monkeypatch):
    def counted(count):
        params = random_params(shapes=[(24, 16)] * count + [(48,)] * count)
        return loops(moved(clipped(optax.adamw(0.05)), params, [random_grads(params)]))

    few, many = counted(6), counted(24)
    assert many <= few + 4, (few, many)
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0)
    assert counted(24) > counted(6) + 100  # the comparison can fail


def test_warm_step_keeps_addresses_and_compiles_nothing():
    params = random_params(shapes=SHAPES)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    before = [x.data_ptr() for x in (*params, *(s for p in params for s in optimizer.state[p].values()))]
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    assert [x.data_ptr() for x in (*params, *(s for p in params for s in optimizer.state[p].values()))] == before
    assert optimizer.cache_info().compilations == 1
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in params)


def test_frozen_leaves_of_a_bucket_keep_their_bits():
    params = random_params(shapes=SHAPES)
    named = [(f"{'head' if i % 3 else 'body'}.{i}", p) for i, p in enumerate(params)]
    optimizer = torch_api.OptaxOptimizer(named, clipped(optax.adamw(0.05)))
    set_grads(params, random_grads(params))
    optimizer.step()
    optimizer.set_trainable("body.*", False)
    before = [p.detach().clone() for p in params]
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    for (name, p), old in zip(named, before, strict=True):
        assert torch.equal(p, old) is name.startswith("body")


@pytest.mark.parametrize("bad", [0, -1])
def test_skipped_update_keeps_all_bits(bad):
    params = random_params(shapes=SHAPES[:9])
    optimizer = bucketed(torch_api.OptaxOptimizer(params, clipped(optax.adamw(0.05)), fused=True), 9)
    assert which_scaled_steps_move(optimizer, params, bad) == [True, True, False, True]


@pytest.mark.parametrize(
    "options",
    sampled([{"ema_decay": 0.9}, {"master_weights": True}, {}, {"master_weights": True, "ema_decay": 0.9}, {"stochastic_rounding": True}]),
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auxiliary_state_moves_like_that_of_unbucketed_leaves(options, dtype):
    if dtype is torch.float32 and (options.get("master_weights") or options.get("stochastic_rounding")):
        pytest.skip("for half parameters")
    params = random_params(dtype, shapes=[(24, 16)] * 5 + [(32,)] * 4)
    start = clones(params)
    make = lambda ps: torch_api.OptaxOptimizer(ps, clipped(optax.adamw(0.05)), **options)  # noqa: E731
    ours = make(params)
    assert sum(slot is not None for slot in bucket_rows(ours)) == (0 if options.get("stochastic_rounding") else 9)  # it draws per element
    theirs, others = unbucketed_twin(make, start)
    run([(ours, params), (theirs, others)], 20)
    rounded = dtype is torch.bfloat16
    assert_near(params, others, start, 1e-2 if rounded else 1e-6)
    if options.get("ema_decay"):
        with ours.ema_params(), theirs.ema_params():
            assert_near(params, others, start, 1e-2 if rounded else 1e-6)


def test_checkpoints_with_and_without_buckets_load_into_each_other():
    params = random_params(shapes=SHAPES)
    start = clones(params)
    make = lambda ps: torch_api.OptaxOptimizer(ps, TRANSFORMATIONS["schedule-free"]())  # noqa: E731
    ours = bucketed(make(params), SMALL)
    theirs, others = unbucketed_twin(make, start)
    run([(ours, params), (theirs, others)], 3)
    one, other = ours.state_dict(), theirs.state_dict()
    for group in (one, other):
        for entry in group["state"].values():
            for key, x in entry.items():
                entry[key] = x.clone() if isinstance(x, torch.Tensor) else x
    run([(ours, params), (theirs, others)], 2)
    with torch.no_grad():
        for p, q, s in zip(params, others, start, strict=True):
            p.copy_(s), q.copy_(s)
    ours.load_state_dict(other)
    theirs.load_state_dict(one)
    run([(ours, params), (theirs, others)], 3)
    assert_near(params, others, start, 3e-6)


def test_sums_of_computed_values_are_one_loop_per_bucket():
    """The transformation takes a norm of values computed row by row from gradient and state."""
    params = random_params(shapes=[(24, 16)] * 8)
    optimizer = moved(TRANSFORMATIONS["sums"](), params, [random_grads(params)])
    assert loops(optimizer) < 16


def test_traces_and_analyses_are_freed():
    """The trace of many leaves and the results of its analysis are large and must be freed."""
    params = random_params(shapes=SHAPES)
    optimizer = torch_api.OptaxOptimizer(params, clipped(optax.adamw(0.05)))
    assert (len(separability._live_traces), len(optimizer._hyperparam_table.held_trace), separability._last_trace) == (1, 1, [])
    set_grads(params, random_grads(params))
    optimizer.step()
    assert not separability._live_traces
    optimizer = torch_api.OptaxOptimizer(random_params(shapes=SHAPES[1:]), clipped(optax.adamw(0.05)))
    assert len(separability._live_traces) == 1
    del optimizer
    gc.collect()
    assert not separability._live_traces
    with pytest.raises(ZeroDivisionError):
        torch_api.OptaxOptimizer(params, optax.GradientTransformation(lambda params: optax.EmptyState(), lambda *given: 1 / 0))
    assert (len(separability._live_traces), separability._last_trace) == (0, [])
