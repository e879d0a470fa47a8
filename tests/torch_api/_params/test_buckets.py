"""Bucketed parameters get the numbers of unbucketed parameters and of torch."""

import optax
import pytest
import torch
from oracles import clones, random_grads, same, set_grads
from packing import (
    alternating_grads,
    assert_near,
    bucket_rows,
    bucketed,
    parameters,
    random_subset,
    run,
    same_states,
    states,
    step_all,
    unbucketed_twin,
)

import bridge
import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

PAIRS = {
    "Adam": (torch_api.MaskedAdam, torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (torch_api.MaskedAdamW, torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "NAdam": (torch_api.MaskedNAdam, torch.optim.NAdam, {"momentum_decay": 0.01}),
    "Adagrad": (torch_api.MaskedAdagrad, torch.optim.Adagrad, {"lr_decay": 0.1}),
}


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in ("NAdam", "Adagrad", "amsgrad") else n for n in PAIRS])
def test_steps_with_missing_gradients_move_as_in_torch_and_compile_nothing(name):
    masked, original, options = PAIRS[name]
    params = parameters()
    start, others = clones(params), clones(params)
    ours, theirs = bucketed(masked(params, lr=0.01, **options), 13), original(others, lr=0.01, **options)
    run([(ours, params), (theirs, others)], 1)
    before, compiled = ours.cache_info(), bridge.compilations()
    for _ in range(20):
        grads = random_subset(params)
        values = [p.detach().clone() for p in params]
        held = [{name: tensor.clone() for name, tensor in ours.state[p].items()} for p in params]
        step_all([(ours, params), (theirs, others)], grads)
        for p, g, value, state in zip(params, grads, values, held, strict=True):
            assert torch.equal(p, value) == (g is None)
            assert all(torch.equal(tensor, state[name]) == (g is None) for name, tensor in ours.state[p].items())
    after = ours.cache_info()
    assert bridge.compilations() == compiled, "a set of active rows needed another program"
    assert (after.programs, after.compilations) == (before.programs, before.compilations)
    assert after.misses > before.misses
    assert_near(params, others, start)
    for p, q in zip(params, others, strict=True):
        assert "step" not in theirs.state[q] or float(ours.state[p]["step"]) == float(theirs.state[q]["step"])


FEW = [(10,), (4, 4), (3, 5), (2, 5), (7,), (33,), (6, 7)]  # few sizes: each size of an unbucketed leaf is another loop to compile
HALF, FULL = torch.bfloat16, torch.float32
ALONE = {
    **{name: (masked, FULL, options, False) for name, (masked, _, options) in PAIRS.items()},
    "Lion": (torch_api.MaskedLion, FULL, {"weight_decay": 0.1}, False),
    "average": (torch_api.MaskedAdam, FULL, {"ema_decay": 0.9}, False),
    "bfloat16 state": (torch_api.MaskedAdam, FULL, {"state_dtype": HALF}, False),
    "float64": (torch_api.MaskedAdam, torch.float64, {}, False),
    "complex64": (torch_api.MaskedAdam, torch.complex64, {}, False),
    "float16": (torch_api.MaskedAdam, torch.float16, {"state_dtype": FULL}, False),
    "bfloat16": (torch_api.MaskedAdamW, HALF, {}, True),
    "master weights": (torch_api.MaskedAdamW, HALF, {"master_weights": True}, True),
    "stochastic rounding": (torch_api.MaskedAdamW, HALF, {"stochastic_rounding": True}, True),
    "stochastic rounding and average": (torch_api.MaskedAdamW, HALF, {"stochastic_rounding": True, "ema_decay": 0.9}, True),
}
QUICK = ("Adam", "bfloat16")


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALONE])
def test_bucketed_parameters_move_like_unbucketed_ones(name):
    masked, dtype, options, in_bits = ALONE[name]
    make = lambda params: masked(params, lr=0.01, **options)  # noqa: E731
    params = parameters(dtype, FEW)
    start, ours = clones(params), bucketed(make(params), 4)
    theirs, others = unbucketed_twin(make, params)
    lacking = [True, False, False, False, True, False, True]  # only two sets: without buckets each set is another program
    for step in range(20):
        step_all(
            [(ours, params), (theirs, others)], [g if step % 3 or on else None for g, on in zip(random_grads(params), lacking, strict=True)]
        )
    if in_bits:
        assert same(params, others)
        assert not any(torch.equal(p, s) for p, s in zip(params, start, strict=True))
        same_states(ours, params, theirs, others)
        return
    assert_near(params, others, start)
    if "ema_decay" in options:
        assert_near(*([o.state[p]["ema_param"] for p in ps] for o, ps in ((ours, params), (theirs, others))), start)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.complex64, marks=pytest.mark.slow)], ids=str)
def test_bucketed_parameters_of_other_dtypes_move_as_in_torch(dtype):
    params = parameters(dtype)
    start, others = clones(params), clones(params)
    run([(bucketed(torch_api.MaskedAdam(params, lr=0.01)), params), (torch.optim.Adam(others, lr=0.01), others)], 20)
    assert_near(params, others, start)


def test_bucketed_parameters_keep_their_strides():
    def parameters_with_strides():
        made = [torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(3)]
        made += [torch.randn(4, 6).t() for _ in range(3)] + [torch.randn(24) for _ in range(2)]
        return [torch.nn.Parameter(t.clone(memory_format=torch.preserve_format)) for t in made]

    params = parameters_with_strides()
    strides, start, others = [p.stride() for p in params], clones(params), clones(params)
    ours, theirs = bucketed(torch_api.MaskedAdamW(params, lr=0.01)), torch.optim.AdamW(others, lr=0.01)
    contiguous = lambda ps: [torch.randn(p.shape) for p in ps]  # noqa: E731 - strides other than the parameter's
    run([(ours, params), (theirs, others)], 5)
    run([(ours, params), (theirs, others)], 5, contiguous)
    assert_near(params, others, start)
    assert strides == [p.stride() for p in params] == [ours.state[p]["exp_avg"].stride() for p in params]


def test_gradients_may_require_grad_or_be_strided():
    params = parameters(shapes=[(4, 4)] * 6)
    start, others = clones(params), clones(params)
    runs = [(bucketed(torch_api.MaskedAdam(params, lr=0.01), 6), params), (torch.optim.Adam(others, lr=0.01), others)]
    given = [
        torch.randn(8, 8)[::2, 1::2],
        torch.randn(4, 4).t(),
        torch.randn(()).expand(4, 4),
        torch.randn(4, 4),
        torch.randn(4, 4, 2)[..., 1],
    ]
    for optimizer, ps in runs:
        for _ in range(3):
            for p, g in zip(ps, given, strict=False):
                p.grad = g
            (p,) = ps[5:]
            p.grad = torch.autograd.grad((p**3).sum(), p, create_graph=True)[0]
            assert p.grad.requires_grad
            optimizer.step()
    assert_near(params, others, start)


def test_rows_of_a_bucket_have_their_own_lr_scale_and_decay():
    params = parameters(shapes=[(10,)] * 8)
    start, others = clones(params), clones(params)
    names = [f"{'norm' if i % 2 else 'layer'}{i}.weight" for i in range(8)]
    scale = lambda name, p: 0.5 if int(name[len(name.split(".")[0]) - 1]) < 4 else 2.0  # noqa: E731
    ours = torch_api.MaskedAdamW(
        list(zip(names, params, strict=True)), lr=0.01, weight_decay=0.3, decay_mask=lambda name, p: "norm" not in name, lr_scale=scale
    )
    bucketed(ours)
    assert len({leaf.jax_buffer for leaf in ours._trainable}) == 1
    assert len({leaf.hyperparam_row for leaf in ours._trainable}) == 4
    groups = [{"params": [p], "lr": 0.005 if i < 4 else 0.02, "weight_decay": 0.0 if i % 2 else 0.3} for i, p in enumerate(others)]
    run([(ours, params), (torch.optim.AdamW(groups), others)], 10, random_subset)
    assert_near(params, others, start)


def test_initial_state_uses_the_hyperparameters_of_its_group():
    """Rprop's step sizes start at the lr."""
    params = parameters(shapes=[(10,)] * 6)
    start, others = clones(params), clones(params)
    split = lambda ps: [{"params": ps[::2], "lr": 0.01}, {"params": ps[1::2], "lr": 0.05}]  # noqa: E731
    ours = bucketed(torch_api.MaskedRprop(split(params)), 6)
    assert len({leaf.jax_buffer for leaf in ours._trainable}) == 1
    run([(ours, params), (torch.optim.Rprop(split(others)), others)], 3)
    assert_near(params, others, start)


def test_late_initial_state_uses_the_current_hyperparameters():
    params = parameters(shapes=[(10,)] * 6)
    start, others = clones(params), clones(params)
    runs = [(bucketed(torch_api.MaskedRprop(params, lr=0.01), 6), params), (torch.optim.Rprop(others, lr=0.01), others)]
    run(runs, 2, lambda ps: [None, None, *random_grads(ps[2:])])
    for optimizer, _ in runs:
        optimizer.param_groups[0]["lr"] = 0.1
    run(runs, 3)
    assert_near(params, others, start)


@pytest.mark.slow
def test_groups_that_share_a_bucket_may_differ_in_an_option():
    params = parameters(shapes=[(10,)] * 8)
    start, others = clones(params), clones(params)
    split = lambda ps: [{"params": ps[::2]}, {"params": ps[1::2], "lr": 0.03}]  # noqa: E731
    ours, theirs = (
        bucketed(torch_api.MaskedSGD(split(params), lr=0.01, momentum=0.9)),
        torch.optim.SGD(split(others), lr=0.01, momentum=0.9),
    )
    runs = [(ours, params), (theirs, others)]
    assert len({leaf.jax_buffer for leaf in ours._trainable}) == 1
    for option in ({"maximize": True}, {"nesterov": True, "weight_decay": 0.1}, {"maximize": False, "nesterov": False}):
        run(runs, 3, random_subset)
        for optimizer, _ in runs:
            optimizer.param_groups[1].update(option)
    run(runs, 3)
    assert_near(params, others, start)


# ---------------------------------------------------------------------- all gradients together


def test_norm_is_over_active_rows_as_in_torch():
    params = parameters()
    start, others = clones(params), clones(params)
    ours, theirs = bucketed(torch_api.MaskedSGD(params, lr=0.1, max_grad_norm=0.7), 13), torch.optim.SGD(others, lr=0.1)
    for step in range(8):
        size = (100.0, 0.01)[step % 2]  # gradients left over from the previous step would dominate
        grads = [g if g is None else size * g for g in random_subset(params, 0.6)]
        set_grads(params, grads)
        set_grads(others, grads)
        torch.nn.utils.clip_grad_norm_([p for p in others if p.grad is not None], 0.7)
        ours.step()
        theirs.step()
        assert all((p.grad is None) == (g is None) or torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
    assert_near(params, others, start)


def scaled_step(optimizer, params, grads, scale=8.0):
    set_grads(params, [None if g is None else g * scale for g in grads])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    optimizer.step()


@pytest.mark.parametrize("bound", [None, pytest.param(0.5, marks=pytest.mark.slow)], ids=["plain", "clipped"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
def test_nonfinite_row_skips_the_step_unless_it_is_inactive(bad, bound):
    params = parameters()
    start, others = clones(params), clones(params)
    ours = bucketed(torch_api.MaskedAdam(params, lr=0.01, fused=True, max_grad_norm=bound), 13)
    theirs = torch_api.MaskedAdam(others, lr=0.01, max_grad_norm=bound)
    grads = random_grads(params)
    scaled_step(ours, params, grads)
    step_all([(theirs, others)], grads)
    values, state, spoiled = clones(params), [t.clone() for t in states(ours, params)], random_grads(params)
    spoiled[2][5] = bad
    scaled_step(ours, params, spoiled)
    assert ours.skipped_steps == 1
    assert same(params, values)
    assert same(states(ours, params), state)
    for _ in range(2):
        grads = random_grads(params)
        grads[2] = None  # its row still holds nonfinite values
        scaled_step(ours, params, grads)
        step_all([(theirs, others)], grads)
    assert ours.skipped_steps == 1
    assert torch.equal(params[2], values[2])
    assert_near(params, others, start)


def test_grad_scaler_with_buckets_works_as_in_torch():
    params = parameters()
    start, others = clones(params), clones(params)
    runs = [
        (bucketed(torch_api.MaskedAdamW(params, lr=0.01, fused=True)), params),
        (torch.optim.AdamW(others, lr=0.01, fused=True), others),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in runs]
    for step in range(8):
        targets = random_grads(params)
        for (optimizer, ps), scaler in zip(runs, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(sum((p * t).sum() + p.square().sum() for p, t in zip(ps, targets, strict=True))).backward()
            if step in (3, 4):
                ps[4].grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert runs[0][0].skipped_steps == 2
    assert_near(params, others, start, 1e-5)


# ---------------------------------------------------------------------- parameters that may not be bucketed

TENSORWISE = {
    "Muon": lambda params: torch_api.MaskedMuon(params),
    "Adafactor": lambda params: torch_api.MaskedAdafactor(params),
    "adaptive_grad_clip": lambda params: torch_api.OptaxOptimizer(params, optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(0.01))),
    "centralize": lambda params: torch_api.OptaxOptimizer(params, optax.chain(optax.centralize(), optax.sgd(0.01))),
    "masks of elements": lambda params: torch_api.MaskedAdam(
        list(zip("abcdef", params, strict=True)), mask={name: torch.eye(4, dtype=torch.bool) for name in "abcdef"}
    ),
    "writeback": lambda params: torch_api.MaskedAdam(params, writeback="copy"),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", TENSORWISE.values(), ids=TENSORWISE.keys())
def test_transformations_of_whole_tensors_are_not_bucketed(make):
    params = parameters(shapes=[(4, 4)] * 6)
    optimizer = make(params)
    run([(optimizer, params)], 2)
    assert bucket_rows(optimizer) == [None] * 6
    bucketed(torch_api.MaskedAdam(parameters(shapes=[(4, 4)] * 6)), 6)  # these shapes can be bucketed


# These transformations update each row as a tensor, which is right where rows are no longer than the tensors.
ROWWISE = {
    "Lamb": lambda params: torch_api.MaskedLamb(params, lr=0.01, weight_decay=0.1),
    "Lars": lambda params: torch_api.MaskedLars(params, lr=0.1, weight_decay=0.1),
    "clip_by_block_rms": lambda params: torch_api.OptaxOptimizer(params, optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.01))),
    "clip_by_global_norm": lambda params: torch_api.OptaxOptimizer(params, optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", ROWWISE.values(), ids=ROWWISE.keys())
def test_transformations_that_sum_are_bucketed_if_rows_have_no_padding(make):
    params = [*parameters(shapes=[(4, 4), (2, 8), (16,)] * 2), *parameters(shapes=[(3, 5), (10,)] * 4)]
    start = clones(params)
    ours = make(params)
    theirs, others = unbucketed_twin(make, start)
    run([(ours, params), (theirs, others)], 6, alternating_grads())
    assert {leaf.shape.numel() for leaf in ours._trainable if leaf.bucket_row is not None} == {16}
    assert sum(slot is not None for slot in bucket_rows(ours)) == 6
    assert_near(params, others, start)


@pytest.mark.usefixtures("standard_promotion")
def test_elementwise_optax_transformations_are_bucketed():
    params = parameters(shapes=[(4, 4), (10,)] * 3)
    start = clones(params)
    make = lambda ps: torch_api.OptaxOptimizer(ps, optax.adamw, learning_rate=0.01)  # noqa: E731
    ours = bucketed(make(params), 6)
    theirs, others = unbucketed_twin(make, start)
    run([(ours, params), (theirs, others)], 5, alternating_grads())
    assert_near(params, others, start)
