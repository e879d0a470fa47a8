"""Rows updated all in one loop, their gradients read where they lie: many equal parameters on a CPU, most of them with a gradient."""

import re

import jax
import optax
import pytest
import torch
from oracles import NumpyAdam, clones, movement_error, random_grads, run_pair, set_grads
from packing import ODD, apart, near, programs, read_elsewhere, run, same_states, slots, states, take_few_for_many

import bridge
import torch_api
from bridge import at_once, lanes, scattered
from bridge import programs as made
from torch_api import launch, launches, packs

SHAPES = [(160, 256)] * 9 + [(128, 128)] * 8 + [(64, 64)] * 4 + [(99, 101)]
AT_ONCE = 17  # the others are gathered, and by itself
MAKE = {
    "AdamW": lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, weight_decay=0.1),
    "L2": lambda ps: torch_api.MaskedAdam(ps, lr=0.01, weight_decay=0.1, amsgrad=True),
    "momentum": lambda ps: torch_api.MaskedSGD(ps, lr=0.1, momentum=0.9, dampening=0.1, nesterov=False, weight_decay=0.1),
    "averaged": lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, ema_decay=0.9),
    "NAdam": lambda ps: torch_api.MaskedNAdam(ps, lr=0.01),
    "Rprop": lambda ps: torch_api.MaskedRprop(ps, lr=0.01),
    "Adadelta": lambda ps: torch_api.MaskedAdadelta(ps, lr=1.0),
    "centered": lambda ps: torch_api.MaskedRMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "Lion": lambda ps: torch_api.MaskedLion(ps, lr=0.01),
    "adabelief": lambda ps: torch_api.OptaxOptimizer(ps, optax.adabelief, lr=0.01),
    "adan": lambda ps: torch_api.OptaxOptimizer(ps, optax.adan, lr=0.01),
    "MultiSteps": lambda ps: torch_api.OptaxOptimizer(ps, optax.MultiSteps(optax.adam(0.01), 2)),
}
adamw = MAKE["AdamW"]

pytestmark = pytest.mark.skipif(not scattered.in_place(), reason="XLA copies all rows at each turn of a loop here")


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    take_few_for_many(monkeypatch, 8)


def parameters(dtype=torch.float32, shapes=SHAPES):
    return [torch.nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in shapes]


def leaves_at_once(optimizer):
    return [leaf for program in programs(optimizer) for leaf in program.plan.leaves if leaf.at_once]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_numbers_are_those_of_leaves_by_themselves_and_nothing_is_stored(make):
    ours = parameters()
    optimizer = make(ours)
    other, theirs = apart(make, ours)
    start = [p.detach().clone() for p in ours]
    run([(optimizer, ours), (other, theirs)], 20)
    near(ours, theirs, start, 1e-5)
    assert sum(leaf.count for leaf in leaves_at_once(optimizer)) == AT_ONCE
    assert not any(program.stores or program.looped for program in programs(optimizer))
    for program in programs(optimizer):
        if program.scattered:
            assert program.update.memory_analysis().temp_size_in_bytes < 1 << 16
            text = program.update.as_text()
            for leaf in program.plan.leaves:
                shape = "{}[{},{}]".format("f32", *leaf.buffer[0])
                assert len(re.findall(rf"= \(?{re.escape(shape)}.* fusion\(", text)) == 1
                assert not re.search(rf"= {re.escape(shape)}\S* copy\(", text)
    for p, q in zip(ours, theirs, strict=True):
        for name, tensor in optimizer.state[p].items():
            torch.testing.assert_close(tensor, other.state[q][name], rtol=1e-4, atol=1e-5)


def test_the_bytes_are_those_of_one_update():
    ours = parameters(shapes=[(128, 128)] * 32)
    optimizer = adamw(ours)
    run([(optimizer, ours)], 1)
    addresses = [x.data_ptr() for x in (*ours, *states(optimizer, ours))]
    run([(optimizer, ours)], 2)
    assert addresses == [x.data_ptr() for x in (*ours, *states(optimizer, ours))]
    assert len(programs(optimizer)) == 1
    assert optimizer.bytes_accessed() / sum(p.numel() for p in ours) == pytest.approx(28, rel=0.01)
    assert not any(each.rows or each.flat.copies for each in optimizer._launches.latest)


def test_gathers_that_are_shared_are_stored_and_the_rows_are_updated_in_turn(monkeypatch):
    """The broken sibling of places that XLA cannot see to be the same."""
    monkeypatch.setattr(at_once, "READS", 2)
    monkeypatch.setattr("torch_api.launch.READS", 2)
    ours = parameters(shapes=[(130, 256)] * 9)
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    optimizer = adamw(ours)
    run_pair(optimizer, ours, torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs, 20)
    near(ours, theirs, start, 1e-5)
    assert not leaves_at_once(optimizer)
    tried = [program for plan, program in made._programs.items() if any(leaf.at_once for leaf in plan.leaves)]
    assert any(program.stores for program in tried if program.plan.leaves[0].spec.shape == (130 * 256,))


def test_numbers_are_torchs_and_the_papers():
    ours = parameters()
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    reference, broken = (NumpyAdam(lr=0.01, weight_decay=0.1, betas=(0.9, b), decoupled=True) for b in (0.999, 0.99))
    x = y = start[0].double().numpy()
    optimizer, other = adamw(ours), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    for _ in range(20):
        grads = random_grads(ours)
        for each, params in ((optimizer, ours), (other, theirs)):
            set_grads(params, grads)
            each.step()
        g = grads[0].double().numpy()
        x, y = reference.step(x, g), broken.step(y, g)
    near(ours, theirs, start, 1e-5)
    assert movement_error(ours[0], torch.from_numpy(x), start[0]) < 1e-5
    assert movement_error(ours[0], torch.from_numpy(y), start[0]) > 1e-3


def test_two_types_are_two_programs():
    ours = [*parameters(shapes=[(128, 128)] * 8), *parameters(torch.float64, [(128, 128)] * 8)]
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    optimizer = adamw(ours)
    run_pair(optimizer, ours, torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs, 20)
    near(ours[:8], theirs[:8], start[:8], 1e-5)
    near(ours[8:], theirs[8:], start[8:], 1e-12)
    assert sorted(leaf.spec.dtype for leaf in leaves_at_once(optimizer)) == ["float32", "float64"]
    assert len(programs(optimizer)) == 2


def live_but(params, dead):
    return [None if i in dead else torch.randn_like(p) for i, p in enumerate(params)]


@pytest.mark.parametrize("shape", [(160, 256), (128, 128)])
def test_a_row_without_a_gradient_keeps_its_bits_and_no_set_compiles_again(shape, monkeypatch):
    monkeypatch.setattr(lanes, "CORES", 2)
    ours = parameters(shapes=[shape] * 16)
    optimizer = adamw(ours)
    run([(optimizer, ours)], 2)
    small = ours[0].numel() * 4 <= packs.GATHERED["cpu"]
    before, kinds = bridge.compilations(), set()
    for nth in range(8):
        dead = {(nth + i) % 16 for i in range(8 if nth % 2 else 2)}
        kept = [[x.clone() for x in (p.detach(), *states(optimizer, [p]))] for p in ours]
        run([(optimizer, ours)], 1, lambda params, dead=dead: live_but(params, dead))
        for i, (p, old) in enumerate(zip(ours, kept, strict=True)):
            same = [torch.equal(x, y) for x, y in zip((p.detach(), *states(optimizer, [p])), old, strict=True)]
            assert all(same) if i in dead else not any(same)
        # Half of them dead, larger rows are updated one after the other: no byte of the others moves.
        assert {program.looped for program in programs(optimizer)} == {nth % 2 == 1 and not small}
        kinds |= set(programs(optimizer))
    assert bridge.compilations() <= before + 2 * (not small)  # of packs of two sizes
    assert optimizer.cache_info().programs == len(kinds)


def test_which_rows_are_better_updated_at_once(monkeypatch):
    monkeypatch.setattr(lanes, "CORES", 2)

    class Some:
        def __init__(self, live, rows):
            self.leaves, self.rows = range(live), range(rows)

    assert launches._mostly_live([])
    assert launches._mostly_live([Some(16, 16), Some(8, 16)])
    assert not launches._mostly_live([Some(16, 16), Some(7, 16)])
    assert launches._mostly_live([Some(6, 16)])  # one after the other they would be on one core
    assert not launches._mostly_live([Some(5, 16)])


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_gradients_that_are_not_dense_are_read_all_the_same(odd):
    ours = parameters(shapes=[(128, 128)] * 8)
    theirs = clones(ours)
    optimizer, other = adamw(ours), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        for p, q, g in zip(ours, theirs, random_grads(ours), strict=True):
            p.grad = odd(g)
            q.grad = p.grad.clone().contiguous() + 0
        optimizer.step()
        other.step()
        assert all(each.flat.copies == [] for each in optimizer._launches.latest)
    assert leaves_at_once(optimizer)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shift", [1, 128 * 128])
def test_the_oracle_sees_gradients_read_elsewhere(monkeypatch, shift):
    monkeypatch.setattr(scattered.Places, "__call__", read_elsewhere(shift))
    ours = parameters(shapes=[(128, 128)] * 8)
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    space = [torch.randn(128 * 128 + 16)[: 128 * 128].view(128, 128) for _ in ours]
    run_pair(adamw(ours), ours, torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs, 3, lambda _: space)
    with pytest.raises(AssertionError):
        near(ours, theirs, start, 1e-4)


GATHERED = {
    "half": (adamw, torch.bfloat16),
    "a norm": (lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, max_grad_norm=0.5), torch.float32),
    "half state": (lambda ps: torch_api.MaskedAdamW(ps, lr=0.01, state_dtype=torch.bfloat16), torch.float32),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", GATHERED)
def test_what_cannot_be_read_so_is_gathered(name):
    make, dtype = GATHERED[name]
    ours = parameters(dtype, [(160, 160)] * 9)
    optimizer = make(ours)
    other, theirs = apart(make, ours)
    start = [p.detach().clone() for p in ours]
    run([(optimizer, ours), (other, theirs)], 8)
    near(ours, theirs, start, 1e-2 if name.startswith("half") else 1e-6)
    assert not any(program.scattered for program in programs(optimizer))
    assert sorted(slots(optimizer)) == list(range(9))


def test_a_scaled_loss_gathers_and_goes_on_at_once():
    ours = parameters(shapes=[(128, 128)] * 8)
    theirs = clones(ours)
    optimizer = torch_api.MaskedAdamW(ours, lr=0.01, weight_decay=0.1, fused=True)
    other = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)
    addresses = [p.data_ptr() for p in ours]
    for scaled in (False, True, True, False):
        grads = random_grads(ours)
        for params, each in ((ours, optimizer), (theirs, other)):
            set_grads(params, [g * 8 if scaled else g for g in grads])
            if scaled:
                each.grad_scale, each.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            each.step()
            if scaled:
                del each.grad_scale, each.found_inf
        known = next(parts for key, parts in optimizer._launches.known.items() if key[2] is scaled)
        assert {launch.program.scattered for part in known for launch in part} == {not scaled}
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert addresses == [p.data_ptr() for p in ours]


def test_a_norm_given_later_is_over_the_gradients():
    ours = parameters()
    optimizer = adamw(ours)
    other, theirs = apart(adamw, ours)
    start = clones(ours)
    run([(optimizer, ours), (other, theirs)], 2)
    optimizer.max_grad_norm = other.max_grad_norm = 0.5
    run([(optimizer, ours), (other, theirs)], 2)
    assert not any(program.scattered for program in programs(optimizer))
    optimizer.max_grad_norm = other.max_grad_norm = None
    run([(optimizer, ours), (other, theirs)], 2)
    near(ours, theirs, start, 1e-5)


def test_a_checkpoint_goes_both_ways(tmp_path):
    ours = parameters()
    optimizer = adamw(ours)
    run([(optimizer, ours)], 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other, _theirs = apart(adamw, ours)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again = clones(ours)
    third = adamw(again)
    third.load_state_dict(other.state_dict())
    run([(optimizer, ours), (third, again)], 3)
    for p, q in zip(ours, again, strict=True):
        assert torch.equal(p, q)
        assert p.untyped_storage().nbytes() == p.numel() * 4
    same_states(optimizer, ours, third, again)


def test_a_training_step_of_jax_and_ordinary_steps_take_turns():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(8)))
    twin = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(8)))
    twin.load_state_dict(model.state_dict())
    start = clones(model.parameters())
    optimizer, other = torch_api.MaskedAdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(twin.parameters(), lr=1e-3)
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    train_step = None
    for turn in range(6):
        if turn == 2:
            train_step = torch_api.JaxTrainStep(model, loss, optimizer)
        x = torch.randn(16, 128)
        if turn in (3, 5):
            train_step(x)
        else:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
            assert programs(optimizer)[0].scattered
        other.zero_grad()
        loss(twin, x).backward()
        other.step()
    for p, q, s in zip(model.parameters(), twin.parameters(), start, strict=True):
        assert movement_error(p, q, s) < 1e-3


def test_gradients_may_be_written_as_soon_as_the_step_returns():
    ours = parameters(shapes=[(160, 256)] * 12)
    optimizer = torch_api.MaskedSGD(ours, lr=1.0)
    space = [torch.empty_like(p) for p in ours]
    start = [p.detach().clone() for p in ours]
    for _ in range(100):
        for p, g in zip(ours, space, strict=True):
            p.grad = g.fill_(2.0**-10)
        optimizer.step()
        for g in space:
            g.fill_(torch.nan)
    assert leaves_at_once(optimizer)
    for p, s in zip(ours, start, strict=True):
        torch.testing.assert_close(p.detach(), s - 100 * 2.0**-10)


@pytest.mark.parametrize("broken", [False, True])
def test_a_norm_is_read_from_where_they_lie_too(broken, monkeypatch):
    """The broken sibling reads one gradient of each pack."""
    if broken:
        far = launch.Launch.far.fget
        monkeypatch.setattr(launch.Launch, "far", property(lambda self: far(self)[:1]))
    shapes = [(160, 256)] * 32 + [(99, 101)]
    ours = parameters(shapes=shapes)
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    optimizer = torch_api.MaskedAdamW(ours, lr=0.01, weight_decay=0.1, eps=1.0, max_grad_norm=0.5)
    other = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, eps=1.0)  # which makes the scale of gradients matter
    ways = set()
    for nth in range(20):
        dead = {(nth + i) % 32 for i in range((0, 2, 20)[nth % 3])}
        grads = live_but(ours, dead)
        set_grads(ours, grads)
        set_grads(theirs, grads)
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        optimizer.step()
        other.step()
        ways |= {(leaf.at_once, leaf.looped) for program in programs(optimizer) for leaf in program.plan.leaves if leaf.scattered}
    assert ways == {(True, False), (False, True)}
    assert (max(movement_error(p, q, s) for p, q, s in zip(ours, theirs, start, strict=True)) <= 1e-5) is not broken


@pytest.mark.parametrize(
    ("stages", "stage"), [(30, lambda x: x / (1 + abs(x))), (400, lambda x: x * 0.999)], ids=["twice each", "once each"]
)
def test_a_long_rule_is_traced_in_no_time(stages, stage):
    """Of what would be read 2**30 times there is one gather; of a long chain, no recursion."""

    def rule(g):
        for _ in range(stages):
            g = stage(g)
        return -0.1 * g

    ours = parameters(shapes=[(128, 128)] * 8)
    start, grads = clones(ours), random_grads(ours)
    optimizer = torch_api.OptaxOptimizer(ours, optax.stateless(lambda updates, _: jax.tree.map(rule, updates)))
    set_grads(ours, grads)
    optimizer.step()
    assert leaves_at_once(optimizer)
    for p, s, g in zip(ours, start, grads, strict=True):
        assert movement_error(p, s.double() + rule(g.double()), s) < 1e-4


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Rprop", "Adadelta"])
def test_packs_of_several_sizes_share_a_trace(name):
    sizes = [(130 + 2 * i, 128) for i in range(5)]  # so many kinds that they are one family
    ours = parameters(shapes=[shape for shape in sizes for _ in range(8)])
    theirs, start = clones(ours), [p.detach().clone() for p in ours]
    optimizer = getattr(torch_api, f"Masked{name}")(ours, lr=0.01)
    run_pair(optimizer, ours, getattr(torch.optim, name)(theirs, lr=0.01), theirs, 20)
    near(ours, theirs, start, 5e-5)
    assert len(leaves_at_once(optimizer)) == 5
