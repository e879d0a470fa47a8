"""`torch.amp.GradScaler` with an optimizer that unscales, checks and skips in its program."""

import jax
import numpy as np
import optax
import pytest
import torch
from oracles import FUSES, clones, movement_error, random_params, set_grads

import bridge
import torch_api
from bridge._compiler import grad_stats
from bridge._process import x64
from bridge._runtime import cache

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]
MAKERS = {
    "adamw": lambda params, **kw: torch_api.MaskedAdamW(params, lr=1e-2, fused=True, **kw),
    "sgd": lambda params, **kw: torch_api.MaskedSGD(params, lr=1e-2, momentum=0.9, dampening=0.1, fused=True, **kw),
    "factory": lambda params, **kw: torch_api.OptaxOptimizer(params, optax.adam, lr=1e-2, fused=True, **kw),
    "together": lambda params, **kw: torch_api.OptaxOptimizer(
        params, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), fused=True, **kw
    ),
}


def loss(params, seed):
    x = torch.Generator().manual_seed(seed)
    return sum((p * torch.randn(p.shape, generator=x)).square().mean() + p.sin().mean() for p in params)


def train(optimizer, params, steps, scaler, spoil=(), before=lambda: None):
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss(params, step)).backward()
        if step in spoil:
            params[1].grad[0] = torch.inf
        before()
        scaler.step(optimizer)
        scaler.update()


def scaler(**kw):
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, **kw)


def snapshot(optimizer, params):
    return [p.detach().clone() for p in params], [{k: t.clone() for k, t in optimizer.state[p].items()} for p in params]


@pytest.fixture(params=[True, False], ids=["chosen", "both"])
def choosing(request, monkeypatch):
    """Run the test with the gradient check of a CPU program and with that of a GPU program."""
    if not request.param:
        monkeypatch.setattr(grad_stats, "COND_PLATFORMS", set())
        monkeypatch.setattr(cache, "_programs", {})


@pytest.mark.slow
@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_device_path_moves_like_the_host_path(make):
    params = random_params()
    start, other = clones(params), clones(params)
    ours, theirs = make(params), make(other)
    assert ours._step_supports_amp_scaling
    theirs._step_supports_amp_scaling = False  # torch's host path: unscale_, check on the host, skip the step
    train(ours, params, 20, scaler(), spoil={4, 11})
    train(theirs, other, 20, scaler(), spoil={4, 11})
    assert (ours.skipped_steps, theirs.skipped_steps) == (2, 0)
    for p, q, s in zip(params, other, start, strict=True):
        assert movement_error(p, q, s) < 1e-5
    for p, q in zip(params, other, strict=True):
        assert all(torch.equal(t, theirs.state[q][name]) for name, t in ours.state[p].items() if t.ndim == 0 and p.ndim)


def test_steps_move_as_torchs_fused_adamw():
    params = random_params()
    start, other = clones(params), clones(params)
    ours, theirs = MAKERS["adamw"](params), torch.optim.AdamW(other, lr=1e-2, fused=True)
    one, two = scaler(), scaler()
    train(ours, params, 20, one, spoil={0, 7})
    train(theirs, other, 20, two, spoil={0, 7})
    assert one.get_scale() == two.get_scale()
    for p, q, s in zip(params, other, start, strict=True):
        assert movement_error(p, q, s) < 1e-5
        assert torch.equal(ours.state[p]["step"], theirs.state[q]["step"])


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("infinities", [None, 0.0, 1.0])
def test_grad_scale_and_found_inf_are_read_as_by_fused_adamw(scale, infinities):
    params = random_params()
    start, other = clones(params), clones(params)
    pairs = (MAKERS["adamw"](params), params), (torch.optim.AdamW(other, lr=1e-2, fused=True), other)
    for optimizer, trained in pairs:
        for p in trained:
            p.grad = torch.linspace(-1.0, 2.0, p.numel()).reshape(p.shape)
        for name, value in (("grad_scale", scale), ("found_inf", infinities)):
            if value is not None:
                setattr(optimizer, name, torch.tensor(value))
        optimizer.step()
    for p, q, s in zip(params, other, start, strict=True):
        assert torch.equal(p, s) == torch.equal(q, s) == (infinities == 1.0)
        if infinities != 1.0:
            assert movement_error(p, q, s) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5, "ema_decay": 0.9}], ids=["plain", "clip and average"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_skipped_step_changes_nothing_and_the_next_one_updates(make, options):
    params = random_params()
    optimizer, scale = make(params, **options), scaler()
    train(optimizer, params, 3, scale)
    values, states = snapshot(optimizer, params)
    compiled = bridge.compilations()
    train(optimizer, params, 1, scale, spoil={0})
    assert all(map(torch.equal, params, values))
    assert all(torch.equal(optimizer.state[p][k], t) for p, state in zip(params, states, strict=True) for k, t in state.items())
    assert optimizer.skipped_steps == 1
    train(optimizer, params, 1, scale)
    assert not any(map(torch.equal, params, values))
    assert bridge.compilations() == compiled


def test_scaled_step_reads_nothing_on_the_host(monkeypatch):
    params = random_params()
    optimizer, scale = MAKERS["adamw"](params), scaler()
    train(optimizer, params, 2, scale)
    reads = []
    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, name=name, original=original: reads.append(name) or original(self, *a))
    set_grads(params, [torch.ones_like(p) for p in params])
    scale.scale(torch.ones(()))
    scale.step(optimizer)
    assert reads == []
    assert optimizer.skipped_steps == 0


def test_gradients_may_be_unscaled_and_clipped_before_the_step():
    params = random_params()
    start, other = clones(params), clones(params)
    ours, theirs = MAKERS["adamw"](params), torch.optim.AdamW(other, lr=1e-2, fused=True)
    for optimizer, own in ((ours, params), (theirs, other)):
        scale = scaler()

        def clip(optimizer=optimizer, own=own, scale=scale):
            scale.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(own, 0.1)

        train(optimizer, own, 6, scale, spoil={2}, before=clip)
    assert ours.skipped_steps == 1
    for p, q, s in zip(params, other, start, strict=True):
        assert movement_error(p, q, s) < 1e-5


def test_check_covers_only_trained_elements():
    params = random_params()
    rows = torch.zeros(7, 5, dtype=torch.bool)
    rows[1] = True
    names = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = torch_api.MaskedSGD(names, lr=1.0, mask={"p0": rows, "p1": True}, fused=True)
    start = clones(params)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    set_grads(params, [torch.full_like(p, 4.0) for p in params])
    params[0].grad[0, 0], params[3].grad[0] = torch.inf, torch.nan
    optimizer.step()
    assert optimizer.skipped_steps == 0
    torch.testing.assert_close(params[0].detach(), start[0].detach() - rows.float())
    torch.testing.assert_close(params[1].detach(), start[1].detach() - 1)
    params[1].grad[2] = torch.nan  # only the program finds it; found_inf is 0
    before = clones(params)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(map(torch.equal, params, before))
    params[1].grad[2], optimizer.found_inf = 4.0, torch.tensor(1.0)  # as if another process had found an infinity
    optimizer.step()
    assert optimizer.skipped_steps == 2
    assert all(map(torch.equal, params, before))


@pytest.mark.usefixtures("choosing")
def test_norm_is_taken_of_unscaled_gradients():
    params, other = random_params(), None
    other = clones(params)
    ours, theirs = MAKERS["sgd"](params, max_grad_norm=0.3), MAKERS["sgd"](other, max_grad_norm=0.3)
    ours.grad_scale, ours.found_inf = torch.tensor(2.0**20), torch.tensor(0.0)
    for step in range(3):
        torch.manual_seed(step)
        grads = [torch.randn_like(p) for p in params]
        set_grads(other, grads), set_grads(params, [g * 2.0**20 for g in grads])
        ours.step(), theirs.step()
    for p, q in zip(params, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_amp_scaling_is_supported_only_with_fused():
    """As in torch: trainers that clip between unscale_ and step, and those that count skipped steps, need the host path by default."""
    params = random_params()
    assert not getattr(torch_api.MaskedAdamW(params), "_step_supports_amp_scaling", False)
    assert not getattr(torch.optim.AdamW(clones(params)), "_step_supports_amp_scaling", False)
    optimizer = torch_api.MaskedAdamW(params)
    train(optimizer, params, 3, scaler(), spoil={1})
    assert optimizer.skipped_steps == 0
    assert float(optimizer.state[params[0]]["step"]) == 2


@FUSES
def test_check_reads_the_gradients_once():
    p = torch.nn.Parameter(torch.zeros(65536))
    counts = []
    for scale in (None, torch.tensor(1.0)):
        optimizer = torch_api.MaskedAdam([p], fused=True)
        if scale is not None:
            optimizer.grad_scale = scale
        p.grad = torch.ones_like(p)
        optimizer.step()
        counts.append(optimizer.bytes_accessed())
    # The compiler also counts the branch for a nonfinite sum, which reads the gradients once more.
    assert 4 * p.numel() < counts[1] - counts[0] < 8.1 * p.numel()


@pytest.mark.parametrize("clip", [False, True])
def test_only_a_nonfinite_sum_makes_the_program_read_gradients_again(clip):
    """The program sums each gradient once; then a cond selects between a branch that reads no gradient and one that reads all."""
    size, counts = 65536, jax.ShapeDtypeStruct((1,), np.float32)
    grads = [jax.ShapeDtypeStruct((size,), np.float32)] * 3
    skipped, before = jax.ShapeDtypeStruct((1,), np.int32), jax.ShapeDtypeStruct((2,), np.float64)

    def program(platform):
        measure = lambda g, scaling, before: grad_stats.grad_stats(clip, g, [1.0] * 3, [None] * 3, [None] * 3, scaling, before, platform)  # noqa: E731
        with x64():
            return jax.make_jaxpr(measure)(grads, [counts, counts, skipped], before).jaxpr

    jaxpr = program("cpu")
    (choice,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    one_by_one, at_once = (branch.jaxpr for branch in choice.params["branches"])
    assert sums(jaxpr.eqns, size) == 3
    assert sums(one_by_one.eqns, size) == (6 if clip else 3)
    assert all(v.aval.size < size for eqn in at_once.eqns for v in (*eqn.invars, *eqn.outvars))
    without = program("gpu").eqns  # a cond would make the host wait there
    assert not any(eqn.primitive.name == "cond" for eqn in without)
    assert sums(without, size) == (6 if clip else 3)


def sums(eqns, size):
    return sum(eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == size for eqn in eqns)


@pytest.mark.usefixtures("choosing")
def test_norm_is_right_if_the_scaled_squares_overflow():
    params = [torch.nn.Parameter(torch.ones(20)), torch.nn.Parameter(torch.ones(3, 2))]
    ours = torch_api.MaskedSGD(params, lr=1.0, fused=True, max_grad_norm=1.0)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**70)
    scale.scale(torch.zeros(()))
    for p in params:
        p.grad = torch.full_like(p, 3 * 2.0**70)
    scale.step(ours)
    for p in params:
        assert torch.allclose(p, 1 - torch.full_like(p, 26**-0.5), rtol=1e-6)


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e38}], ids=["plain", "clip"])
@pytest.mark.parametrize("values", [[3e38, 3e38], [torch.inf, -torch.inf], [torch.nan, 1.0]], ids=["overflows", "cancels", "nan"])
def test_step_is_skipped_for_nonfinite_values_but_not_for_an_overflowing_sum(values, options):
    params = [torch.nn.Parameter(torch.ones(20)), torch.nn.Parameter(torch.ones(3, 2))]
    ours = torch_api.MaskedSGD(params, lr=1e-30, fused=True, **options)
    scale = torch.amp.GradScaler("cpu", init_scale=1.0)
    scale.scale(torch.zeros(()))
    for p in params:
        p.grad = torch.zeros_like(p)
    params[0].grad[:2] = torch.tensor(values)
    scale.step(ours)
    finite = torch.tensor(values).isfinite().all().item()
    assert ours.skipped_steps == (0 if finite else 1)
    if not options:  # with clipping, the norm of the first case overflows in torch too, which then multiplies by 0
        assert torch.equal(params[0], torch.ones(20)) == (not finite)
