"""Joint programs with many leaves: equal parts are outlined, compiled once, and called for some leaves at a time."""

import gc
import math
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from joint_cases import TRANSFORMATIONS, clipped, moved, moved_by, norm_of, program, pure, which_scaled_steps_move
from oracles import CLOSE, movement_error, random_grads, random_params, set_grads
from policies import change_policy
from sampling import sampled

import torch_api
from bridge._compiler import update as step
from bridge._compiler.passes import per_kind
from bridge._runtime import cache, outline
from bridge._runtime.outline import Pieces

pytestmark = [pytest.mark.long, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]
SHAPES = [(24, 16)] * 9 + [(48,)] * 6 + [(30, 20), (5,)]
TILES = 3 + 3  # chunks: nine leaves are 4, 4 and 1; six are 4, 1 and 1
CUT = [
    "previous parameters",
    "previous gradients",
    "clip, adamw",
    "clip, lion",
    "clip, rmsprop, momentum",
    "clip, nadamw",
    "clip, amsgrad",
    "clip, amsgrad, average",
    "schedule-free",
]


@pytest.fixture(autouse=True)
def _many(monkeypatch):
    """Let few small leaves act like many large ones."""
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0)
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=16)


@pytest.fixture
def no_outlining(monkeypatch):
    """Return a function that turns outlining off."""

    def never():
        change_policy(monkeypatch, "CHUNKING", max_shared_loops=1000)

    return never


def towards_previous_mean():
    """Move each leaf towards the mean of the previous leaf, by a share that depends on a norm over all leaves."""

    def update(updates, state, params=None):
        share = 0.1 / (1 + norm_of(updates))
        leaves, tree = jax.tree.flatten(params)
        return jax.tree.unflatten(tree, [share * (a.mean() - b) for a, b in zip(leaves[-1:] + leaves[:-1], leaves, strict=True)]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def towards_previous_values():
    """Like `through_others`, but elementwise where sizes match: the previous leaf must be read before it is replaced."""

    def update(updates, state, params=None):
        share = 0.1 / (1 + norm_of(updates))
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves[-1:] + leaves[:-1], leaves, strict=True)
        return jax.tree.unflatten(tree, [share * (a.reshape(b.shape) - b) if a.size == b.size else -share * b for a, b in pairs]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def with_state_read_by_a_norm(keeps, before=jnp.zeros_like):
    """A transformation whose state is read only by a norm; `keeps` maps (gradients, state, parameters) to the new state."""

    def update(updates, state, params=None):
        size = norm_of(jax.tree.map(jnp.subtract, params, state))
        return jax.tree.map(lambda g, p: -0.1 * g / (1 + size) - 0.01 * p, updates, params), keeps(updates, state, params)

    return lambda: optax.GradientTransformation(lambda params: jax.tree.map(before, params), update)


def turned(updates, state, params):
    """Return for each leaf the parameters of another leaf with its shape, if there is one."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [a if a.shape == b.shape else b for a, b in zip(leaves[-1:] + leaves[:-1], leaves, strict=True)])


def with_constants():
    """A transformation with constant arrays in a norm and in the update."""

    arrays = {shape: jnp.linspace(0.5, 1.5, math.prod(shape)).reshape(shape) for shape in SHAPES}

    def update(updates, state, params=None):
        fixed = lambda g: arrays[g.shape]  # noqa: E731
        size = norm_of(jax.tree.map(lambda g: fixed(g) * g, updates))
        return jax.tree.map(lambda g: -0.1 * fixed(g) * g / (1 + size), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


KEEP = {
    "previous parameters": with_state_read_by_a_norm(lambda updates, state, params: params),
    "previous parameters of another": with_state_read_by_a_norm(turned),
    "previous gradients": with_state_read_by_a_norm(lambda updates, state, params: updates),
    "as it was": with_state_read_by_a_norm(lambda updates, state, params: state, lambda p: 0.5 * p),
    "constants": with_constants,
}
ALL = KEEP | TRANSFORMATIONS | {"means of others": towards_previous_mean, "others": towards_previous_values}


def calls(optimizer):
    return program(optimizer).update._calls


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALL)
def test_twenty_steps_match_optax(name):
    params, tx = random_params(shapes=SHAPES), ALL[name]()
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(20)]
    optimizer = moved(tx, params, grads)
    assert optimizer.cache_info().compilations == 1
    if name in CUT:
        late = [call for call in calls(optimizer) if call.donated and call.tokens]
        assert len(late) == TILES
    expected, bound = pure(tx, start, grads), (10 if name == "prodigy" else 1) * 3 * CLOSE
    assert max(map(movement_error, params, expected, start)) < bound
    with pytest.raises(AssertionError):  # the comparison can fail
        assert max(map(movement_error, moved_by(tx, start, grads, lr=1.001), expected, start)) < bound


@pytest.mark.parametrize("name", sampled(CUT))
def test_outlined_program_matches_one_program_and_its_bytes(name, no_outlining):
    params, others = random_params(shapes=SHAPES), random_params(shapes=SHAPES)
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(5)]
    cut = moved(ALL[name](), params, grads)
    no_outlining()
    one = moved(ALL[name](), others, grads)
    assert isinstance(program(cut).update, Pieces)
    assert not isinstance(program(one).update, Pieces)
    assert max(map(movement_error, params, others, start)) < CLOSE
    assert program(cut).bytes_accessed < 1.2 * program(one).bytes_accessed  # the difference is scalars, which matter for small leaves


def test_equal_parts_are_compiled_once_for_any_number_of_leaves():
    found = []
    for count in (29, 58):
        params = random_params(shapes=[(7, 19)] * count)
        found.append(program(moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])).update)
    few, many = ({*each.pieces} for each in found)
    assert (len(few), len(many)) == (7, 7)  # sums over 24, 4 and 1 leaves, their loops, and the main program
    assert len(few & many) == 6
    assert [len(each._calls) for each in found] == [7, 13]


def test_trace_of_a_tiny_leaf_is_not_reused_for_its_size_class(monkeypatch):
    """A leaf with three elements must not fix the trace of a size class, or every size would be traced separately."""
    moved_bytes = []
    for first in ([], [(3,), (7,)]):
        monkeypatch.setattr(per_kind, "_families", {})
        monkeypatch.setattr(cache, "_programs", {})
        if first:
            params = random_params(shapes=first)
            moved(ALL["clip, adamw"](), params, [random_grads(params)])
        params = random_params(shapes=SHAPES)
        moved_bytes.append(program(moved(ALL["clip, adamw"](), params, [random_grads(params)])).bytes_accessed)
    assert moved_bytes[0] == moved_bytes[1]


def test_programs_of_other_sets_share_outlined_parts():
    params = random_params(shapes=[(24, 16)] * 21)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    first = set(program(optimizer).update.pieces)
    set_grads(params, [*random_grads(params)[:-1], None])
    optimizer.step()
    assert optimizer.cache_info().compilations == 2
    new = [piece for piece in program(optimizer).update.pieces if piece not in first]
    assert len(new) == 1, "more than the main program was compiled again"


def test_warm_step_keeps_addresses_and_compiles_nothing():
    params = random_params(shapes=SHAPES)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    look = lambda: [x.data_ptr() for x in (*params, *(s for p in params for s in optimizer.state[p].values()))]  # noqa: E731
    before, traced = look(), step.traces()
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    assert (look(), step.traces()) == (before, traced)
    assert optimizer.cache_info().compilations == 1


def test_sums_read_leaves_before_they_are_replaced(no_outlining):
    """Sums over parameters and state are outlined and run while other parts are called."""

    def update(updates, trace, params=None):
        size = norm_of(params) + norm_of(trace)
        trace = jax.tree.map(lambda g, t: 0.9 * t + g, updates, trace)
        return jax.tree.map(lambda t: -0.01 * t / (1 + size), trace), trace

    make = lambda: optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)  # noqa: E731
    params = random_params(shapes=[(512, 512)] * 20)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    start, grads = [p.detach().clone() for p in params], [random_grads(params)] * 20
    assert isinstance(program(moved(make(), params, grads)).update, Pieces)
    no_outlining()
    moved(make(), others, grads)
    assert max(map(movement_error, params, others, start)) < 3 * CLOSE


@pytest.mark.parametrize("options", sampled([{"max_grad_norm": 0.3}, {}, {"ema_decay": 0.9}]), ids=str)
def test_missing_gradients_frozen_leaves_and_masks_are_respected(options):
    params = random_params(shapes=SHAPES * 2)
    keep = torch.zeros(24, 16, dtype=torch.bool)
    keep[3] = True
    named = [(f"{'head' if i % 5 else 'body'}.{i}", p) for i, p in enumerate(params)]
    mask = {name: keep if name == "head.1" else True for name, _ in named}
    optimizer = torch_api.OptaxOptimizer(named, clipped(optax.adamw(0.05)), mask=mask, **options)
    for n in range(4):
        set_grads(params, [g if n < 2 or i % 4 else None for i, g in enumerate(random_grads(params))])
        before = [p.detach().clone() for p in params]
        optimizer.step()
        if n == 0:
            optimizer.set_trainable("body.*", False)
        for i, (p, old) in enumerate(zip(params, before, strict=True)):
            rests = (n > 0 and i % 5 == 0) or (n > 1 and i % 4 == 0)
            assert torch.equal(p, old) is rests, (n, i)
        assert torch.equal(params[1][:3], before[1][:3])
    assert isinstance(program(optimizer).update, Pieces)


def test_skipped_update_keeps_all_bits():
    params = random_params(shapes=SHAPES)
    optimizer = torch_api.OptaxOptimizer(params, clipped(optax.adamw(0.05)), fused=True)
    assert which_scaled_steps_move(optimizer, params, bad=3) == [True, True, False, True]
    assert isinstance(program(optimizer).update, Pieces)


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float64, torch.complex64]), ids=str)
def test_other_dtypes_match_one_program(dtype, no_outlining):
    params = random_params(dtype, shapes=SHAPES)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(3)]
    assert isinstance(program(moved(clipped(optax.adamw(0.05)), params, grads)).update, Pieces)
    no_outlining()
    moved(clipped(optax.adamw(0.05)), others, grads)
    assert max(map(movement_error, params, others, start)) < (1e-2 if dtype is torch.bfloat16 else CLOSE)


def test_unused_outlined_parts_are_freed():
    params = random_params(shapes=[(24, 17)] * 29)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    mine = [weakref.ref(piece) for piece in program(optimizer).update.pieces]
    assert {id(ref()) for ref in mine} & {id(piece) for piece in outline._tiles.values()}
    del optimizer
    cache._lru.clear()
    gc.collect()
    assert [ref() for ref in mine] == [None] * 7


def test_error_of_an_outlined_part_names_the_lost_parameters(monkeypatch):
    params = random_params(shapes=SHAPES)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    *_, last = calls(optimizer)
    monkeypatch.setattr(last.piece, "compiled", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        optimizer.step()
    lost = [name for name, p in ((f"p{i:02}", p) for i, p in enumerate(params)) if p.isnan().any()]
    assert 0 < len(lost) < len(params), "parameters not yet donated were lost"
    (note,) = raised.value.__notes__
    assert "are lost and hold NaN. Load a checkpoint." in note
    assert all(f"'{name}'" in note for name in lost)
