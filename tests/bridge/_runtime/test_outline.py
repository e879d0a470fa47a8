"""Programs of many leaves that one transformation must see together: what is alike is compiled once, and called for some at a time."""

import gc
import math
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from joint_cases import TRANSFORMATIONS, clipped, moved, moved_by, which_scaled_steps_move, norm_of, program, pure
from oracles import CLOSE, movement_error, random_grads, random_params, set_grads

import torch_api
from bridge._compiler import chunking, joint_update
from bridge._compiler import update as step
from bridge._compiler.passes import batch_rows, per_kind
from bridge._runtime import cache, outline
from bridge._runtime.outline import Pieces
from torch_api._params import buckets

pytestmark = [pytest.mark.long, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]
SHAPES = [(24, 16)] * 9 + [(48,)] * 6 + [(30, 20), (5,)]
TILES = 3 + 3  # of nine: 4, 4, 1; of six: 4, 1, 1
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
    """Few small leaves stand for many large ones."""
    monkeypatch.setitem(buckets.GATHERED, "cpu", 0)
    monkeypatch.setattr(chunking, "LOOPS", 16)


@pytest.fixture
def whole(monkeypatch):
    """Called, programs are not cut from then on."""

    def never():
        for module in (joint_update, batch_rows):
            monkeypatch.setattr(module, "enough", lambda loops: math.inf)

    return never


def through_others():
    """Each leaf is drawn to what the leaf before it was, by a share that depends on a norm over all."""

    def update(updates, state, params=None):
        share = 0.1 / (1 + norm_of(updates))
        leaves, tree = jax.tree.flatten(params)
        return jax.tree.unflatten(tree, [share * (a.mean() - b) for a, b in zip(leaves[-1:] + leaves[:-1], leaves, strict=True)]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def from_old_values():
    """As `through_others`, with the elements of the leaf before, where it is as large: it must be read before it is replaced."""

    def update(updates, state, params=None):
        share = 0.1 / (1 + norm_of(updates))
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves[-1:] + leaves[:-1], leaves, strict=True)
        return jax.tree.unflatten(tree, [share * (a.reshape(b.shape) - b) if a.size == b.size else -share * b for a, b in pairs]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def after_a_norm(keeps, before=jnp.zeros_like):
    """State that nothing but a norm reads, and what is kept in it: (gradients, state, parameters) to the new state."""

    def update(updates, state, params=None):
        size = norm_of(jax.tree.map(jnp.subtract, params, state))
        return jax.tree.map(lambda g, p: -0.1 * g / (1 + size) - 0.01 * p, updates, params), keeps(updates, state, params)

    return lambda: optax.GradientTransformation(lambda params: jax.tree.map(before, params), update)


def turned(updates, state, params):
    """Of each leaf the parameters of another of its shape, where there is one."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [a if a.shape == b.shape else b for a, b in zip(leaves[-1:] + leaves[:-1], leaves, strict=True)])


def with_constants():
    """Arrays that no argument has, in a norm and in the update."""

    arrays = {shape: jnp.linspace(0.5, 1.5, math.prod(shape)).reshape(shape) for shape in SHAPES}

    def update(updates, state, params=None):
        fixed = lambda g: arrays[g.shape]  # noqa: E731
        size = norm_of(jax.tree.map(lambda g: fixed(g) * g, updates))
        return jax.tree.map(lambda g: -0.1 * fixed(g) * g / (1 + size), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


KEEP = {
    "previous parameters": after_a_norm(lambda updates, state, params: params),
    "previous parameters of another": after_a_norm(turned),
    "previous gradients": after_a_norm(lambda updates, state, params: updates),
    "as it was": after_a_norm(lambda updates, state, params: state, lambda p: 0.5 * p),
    "constants": with_constants,
}
ALL = KEEP | TRANSFORMATIONS | {"means of others": through_others, "others": from_old_values}


def calls(optimizer):
    return program(optimizer).update._calls


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALL)
def test_twenty_steps_equal_optax(name):
    params, tx = random_params(shapes=SHAPES), ALL[name]()
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(20)]
    optimizer = moved(tx, params, grads)
    assert optimizer.cache_info().compilations == 1
    if name in CUT:
        late = [call for call in calls(optimizer) if call.donated and call.tokens]
        assert len(late) == TILES
    expected, bound = pure(tx, start, grads), (10 if name == "prodigy" else 1) * 3 * CLOSE
    assert max(map(movement_error, params, expected, start)) < bound
    with pytest.raises(AssertionError):  # the broken sibling
        assert max(map(movement_error, moved_by(tx, start, grads, lr=1.001), expected, start)) < bound


@pytest.mark.parametrize("name", CUT)
def test_pieces_give_what_one_program_gives_and_move_as_many_bytes(name, whole):
    params, others = random_params(shapes=SHAPES), random_params(shapes=SHAPES)
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(5)]
    cut = moved(ALL[name](), params, grads)
    whole()
    one = moved(ALL[name](), others, grads)
    assert isinstance(program(cut).update, Pieces)
    assert not isinstance(program(one).update, Pieces)
    assert max(map(movement_error, params, others, start)) < CLOSE
    assert program(cut).bytes_accessed < 1.2 * program(one).bytes_accessed  # numbers, which weigh more where leaves are small


def test_what_is_alike_is_compiled_once_however_much_of_it_there_is():
    found = []
    for count in (29, 58):
        params = random_params(shapes=[(7, 19)] * count)
        found.append(program(moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])).update)
    few, many = ({*each.pieces} for each in found)
    assert (len(few), len(many)) == (7, 7)  # sums over 24, 4 and 1, their loops, and all that is no part
    assert len(few & many) == 6
    assert [len(each._calls) for each in found] == [7, 13]


def test_a_trace_of_few_elements_takes_no_others_place(monkeypatch):
    """Of three elements none is made for another size: kept, it had each size traced by itself, with numbers of its own."""
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


def test_programs_of_other_sets_of_leaves_share_their_pieces():
    params = random_params(shapes=[(24, 16)] * 21)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    first = set(program(optimizer).update.pieces)
    set_grads(params, [*random_grads(params)[:-1], None])
    optimizer.step()
    assert optimizer.cache_info().compilations == 2
    new = [piece for piece in program(optimizer).update.pieces if piece not in first]
    assert len(new) == 1, "all but what is no part"


def test_addresses_stay_and_a_step_compiles_and_traces_nothing():
    params = random_params(shapes=SHAPES)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    look = lambda: [x.data_ptr() for x in (*params, *(s for p in params for s in optimizer.state[p].values()))]  # noqa: E731
    before, traced = look(), step.traces()
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    assert (look(), step.traces()) == (before, traced)
    assert optimizer.cache_info().compilations == 1


def test_large_leaves_are_read_before_they_are_replaced(whole):
    """Sums over parameters and state, by pieces that run while others are called."""

    def update(updates, trace, params=None):
        size = norm_of(params) + norm_of(trace)
        trace = jax.tree.map(lambda g, t: 0.9 * t + g, updates, trace)
        return jax.tree.map(lambda t: -0.01 * t / (1 + size), trace), trace

    make = lambda: optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)  # noqa: E731
    params = random_params(shapes=[(512, 512)] * 20)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    start, grads = [p.detach().clone() for p in params], [random_grads(params)] * 20
    assert isinstance(program(moved(make(), params, grads)).update, Pieces)
    whole()
    moved(make(), others, grads)
    assert max(map(movement_error, params, others, start)) < 3 * CLOSE


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}, {"ema_decay": 0.9}], ids=str)
def test_missing_gradients_frozen_leaves_and_masks(options):
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


def test_an_update_that_is_skipped_keeps_all_bits():
    params = random_params(shapes=SHAPES)
    optimizer = torch_api.OptaxOptimizer(params, clipped(optax.adamw(0.05)), fused=True)
    assert which_scaled_steps_move(optimizer, params, bad=3) == [True, True, False, True]
    assert isinstance(program(optimizer).update, Pieces)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_other_types(dtype, whole):
    params = random_params(dtype, shapes=SHAPES)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    start, grads = [p.detach().clone() for p in params], [random_grads(params) for _ in range(3)]
    assert isinstance(program(moved(clipped(optax.adamw(0.05)), params, grads)).update, Pieces)
    whole()
    moved(clipped(optax.adamw(0.05)), others, grads)
    assert max(map(movement_error, params, others, start)) < (1e-2 if dtype is torch.bfloat16 else CLOSE)


def test_nothing_is_kept_of_a_program_that_nobody_uses():
    params = random_params(shapes=[(24, 17)] * 29)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    mine = [weakref.ref(piece) for piece in program(optimizer).update.pieces]
    assert {id(ref()) for ref in mine} & {id(piece) for piece in outline._tiles.values()}
    del optimizer
    cache._recent.clear()
    gc.collect()
    assert [ref() for ref in mine] == [None] * 7


def test_a_piece_that_fails_names_what_is_lost(monkeypatch):
    params = random_params(shapes=SHAPES)
    optimizer = moved(clipped(optax.adamw(0.05)), params, [random_grads(params)])
    *_, last = calls(optimizer)
    monkeypatch.setattr(last.piece, "compiled", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        optimizer.step()
    lost = [name for name, p in ((f"p{i:02}", p) for i, p in enumerate(params)) if p.isnan().any()]
    assert 0 < len(lost) < len(params), "what no piece has taken is as it was"
    (note,) = raised.value.__notes__
    assert "are lost and hold NaN. Load a checkpoint." in note
    assert all(f"'{name}'" in note for name in lost)
