"""torch's schedulers, weight averaging and gradient scaling drive our classes as they drive torch's, without compiling."""

import copy

import optax
import pytest
import torch
from oracles import clones, movement_error, random_grads, random_params, run_pair, set_grads
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

import torch_api
from bridge._compiler import update
from bridge._runtime import cache

# torch 2.6's SequentialLR uses an API that torch 2.6 deprecates.
pytestmark = [pytest.mark.unoptimized, pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step:UserWarning")]

PAIRS = {
    "Adam": (torch_api.MaskedAdam, torch.optim.Adam, {}),
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"momentum": 0.9}),
}
STEPS = 30
SHAPES = [(7, 5), (5,), ()]

SCHEDULERS = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 1 - 1 / (10 + epoch)),
    "StepLR": lambda o: lrs.StepLR(o, 4, gamma=0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [3, 11, 20], gamma=0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, factor=0.25, total_iters=9),
    "LinearLR": lambda o: lrs.LinearLR(o, start_factor=0.1, total_iters=20),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=25, power=2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 12, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 5, T_mult=2),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=6), lrs.ExponentialLR(o, 0.9)], milestones=[6]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, total_iters=7), lrs.ExponentialLR(o, 0.95)]),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=0.05, total_steps=STEPS + 1),
    "OneCycleLR, three phases": lambda o: lrs.OneCycleLR(o, 0.05, total_steps=STEPS + 1, three_phase=True, anneal_strategy="linear"),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-3, 0.05, step_size_up=4, mode="triangular2"),
    "CyclicLR, exp_range": lambda o: lrs.CyclicLR(o, 1e-3, 0.05, step_size_up=6, mode="exp_range", gamma=0.97, base_momentum=0.7),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.3, patience=2, cooldown=1),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.002, anneal_epochs=8),
}
# ReduceLROnPlateau reads a metric, here one that stalls repeatedly.
METRIC = [1.0, 0.9, 0.9, 0.9, 0.9, 0.95, 0.5] * 5


def test_every_scheduler_of_torch_is_tested():
    classes = {n for n, c in vars(lrs).items() if isinstance(c, type) and issubclass(c, lrs.LRScheduler) and c.__module__ == lrs.__name__}
    assert classes - {"LRScheduler", "_LRScheduler"} <= {name.split(",")[0] for name in SCHEDULERS}


def advance(schedule, metric):
    schedule.step(metric) if isinstance(schedule, lrs.ReduceLROnPlateau) else schedule.step()


def numbers(optimizer):
    """Return the hyperparameters that a scheduler writes."""
    return [
        {key: float(g[key]) if key == "lr" else g[key] for key in ("lr", "betas", "momentum") if key in g} for g in optimizer.param_groups
    ]


def pair(name):
    ours, theirs, options = PAIRS[name]
    params = random_params(shapes=SHAPES)
    others = clones(params)
    groups = [[{"params": ps[:2]}, {"params": ps[2:], "lr": 0.02}] for ps in (params, others)]
    return ours(groups[0], lr=0.01, **options), params, theirs(groups[1], lr=0.01, **options), others


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("name", PAIRS)
def test_steps_under_a_scheduler_move_as_in_torch_and_compile_once(name, scheduler):
    """Warnings are errors here, including that of a scheduler stepped before the optimizer."""
    a, ours, b, theirs = pair(name)
    start = clones(ours)
    schedules = [scheduler(a), scheduler(b)]
    seen = []
    for metric in METRIC[:STEPS]:
        grads = random_grads(ours)
        for optimizer, params, schedule in ((a, ours, schedules[0]), (b, theirs, schedules[1])):
            set_grads(params, grads)
            optimizer.step()
            advance(schedule, metric)
        seen.append(numbers(a))
        assert seen[-1] == numbers(b)
        if len(seen) == 1:
            compiled = cache.compilations(), update.traces()
    assert (cache.compilations(), update.traces()) == compiled
    assert len({str(x) for x in seen}) > 1, "the scheduler changed nothing: this comparison could not fail"
    assert max(map(movement_error, ours, theirs, start)) < 1e-5
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()


@pytest.mark.parametrize("name", ["Adam", "SGD"])
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR, exp_range"])
def test_momentum_written_by_a_scheduler_is_used(name, scheduler):
    """The same run with the momentum reset after each step ends elsewhere."""
    ends = []
    for kept in (False, True):
        torch.manual_seed(0)
        optimizer, params, _, _ = pair(name)
        schedule = SCHEDULERS[scheduler](optimizer)
        before = numbers(optimizer)
        for _ in range(10):
            if kept:
                for group, old in zip(optimizer.param_groups, before, strict=True):
                    group.update({key: old[key] for key in ("betas", "momentum") if key in old})
            set_grads(params, random_grads(params))
            optimizer.step()
            schedule.step()
        ends.append(params[0].detach())
    assert not torch.allclose(*ends, rtol=1e-3)


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_run_resumed_from_both_state_dicts_equals_the_uninterrupted_one(name, scheduler):
    grads = [random_grads(random_params(shapes=SHAPES)) for _ in range(12)]
    start = random_params(shapes=SHAPES)

    def build(values):
        params = clones(values)
        cls, _, options = PAIRS[name]
        optimizer = cls([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], lr=0.01, **options)
        return params, optimizer, scheduler(optimizer)

    def run(params, optimizer, schedule, part):
        for i in part:
            set_grads(params, grads[i])
            optimizer.step()
            advance(schedule, METRIC[i])

    whole = build(start)
    run(*whole, range(12))
    first = build(start)
    run(*first, range(5))
    saved = copy.deepcopy((first[1].state_dict(), first[2].state_dict()))
    second = build(first[0])
    second[1].load_state_dict(saved[0])
    second[2].load_state_dict(saved[1])
    run(*second, range(5, 12))
    assert numbers(second[1]) == numbers(whole[1])
    assert all(torch.equal(p, q) for p, q in zip(whole[0], second[0], strict=True))


OPTAX = {
    "factory": (lambda ps: torch_api.OptaxOptimizer(ps, optax.adamw, lr=0.01, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    "factory, sgd": (lambda ps: torch_api.OptaxOptimizer(ps, optax.sgd, lr=0.01, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "ready": (lambda ps: torch_api.OptaxOptimizer(ps, optax.adam(1.0), lr=0.01), torch.optim.Adam, {}),
    "partitioned": (
        lambda ps: torch_api.PartitionedOptimizer(
            [(str(i), p) for i, p in enumerate(ps)], {"all": (optax.sgd, {"lr": 0.01, "momentum": 0.9})}, lambda *_: "all"
        ),
        torch.optim.SGD,
        {"momentum": 0.9},
    ),
}


@pytest.mark.parametrize("scheduler", ["LambdaLR", "SequentialLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau"])
@pytest.mark.parametrize("which", OPTAX)
@pytest.mark.usefixtures("standard_promotion")
def test_schedulers_drive_optax_transformations(which, scheduler):
    make, reference, options = OPTAX[which]
    ours = random_params(shapes=SHAPES)
    theirs, start = clones(ours), clones(ours)
    a, b = make(ours), reference(theirs, lr=0.01, **options)
    schedules = [SCHEDULERS[scheduler](a), SCHEDULERS[scheduler](b)]
    compiled = None
    for metric in METRIC[:STEPS]:
        grads = random_grads(ours)
        for optimizer, params, schedule in ((a, ours, schedules[0]), (b, theirs, schedules[1])):
            set_grads(params, grads)
            optimizer.step()
            advance(schedule, metric)
        compiled = compiled or cache.compilations()
        assert [g["lr"] for g in a.param_groups] == [g["lr"] for g in b.param_groups]
    assert cache.compilations() == compiled
    assert max(map(movement_error, ours, theirs, start)) < 3e-5


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR, exp_range"])
@pytest.mark.usefixtures("standard_promotion")
def test_schedulers_cycle_the_momentum_of_a_factory(scheduler):
    ours = random_params(shapes=SHAPES)
    theirs, start = clones(ours), clones(ours)
    a, b = torch_api.OptaxOptimizer(ours, optax.sgd, lr=0.01, momentum=0.9), torch.optim.SGD(theirs, lr=0.01, momentum=0.9)
    schedules = [SCHEDULERS[scheduler](o) for o in (a, b)]
    seen, compiled = set(), None
    for _ in range(STEPS):
        run_pair(a, ours, b, theirs, 1, after=lambda: [schedule.step() for schedule in schedules])
        compiled = compiled or cache.compilations()
        assert numbers(a) == numbers(b)
        seen.add(a.param_groups[0]["momentum"])
    assert len(seen) > 5
    assert cache.compilations() == compiled
    assert max(map(movement_error, ours, theirs, start)) < 3e-5


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
@pytest.mark.usefixtures("standard_promotion")
def test_momentum_scheduler_raises_for_an_optimizer_without_momentum(scheduler):
    optimizer = torch_api.OptaxOptimizer(random_params(), optax.adagrad, lr=0.01)
    with pytest.raises(ValueError, match=r"momentum.* or .*beta1?"):
        SCHEDULERS[scheduler](optimizer)
    without = lrs.CyclicLR(optimizer, 1e-3, 0.1, step_size_up=3, cycle_momentum=False)
    set_grads(
        [p for g in optimizer.param_groups for p in g["params"]], random_grads([p for g in optimizer.param_groups for p in g["params"]])
    )
    optimizer.step()
    without.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 + 0.099 / 3)


def test_scheduler_stepped_before_the_optimizer_still_warns():
    optimizer = torch_api.MaskedSGD(random_params())
    schedule = lrs.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`"):
        schedule.step()


# ---------------------------------------------------------------------- averages of the weights


def network():
    """The layer before the normalization has no bias: its gradient would be rounding noise, which Adam amplifies."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 2))


AVERAGES = {
    "mean": {},
    "EMA": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "SWA": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "own": {"avg_fn": lambda average, now, n: 0.5 * average + 0.5 * now},
    "with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5), "use_buffers": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("name", PAIRS)
def test_averaged_model_follows_the_weights(name, options):
    """The average is a deepcopy of the model, whose parameters are copied into torch's own memory."""
    batches = [torch.randn(8, 4) for _ in range(4)]
    ends = []
    for cls in PAIRS[name][:2]:
        net = network()
        optimizer = cls(net.parameters(), lr=0.01, **PAIRS[name][2])
        average = swa_utils.AveragedModel(net, **options)
        swa = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)
        for batch in batches * 3:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            swa.step()
            average.update_parameters(net)
        swa_utils.update_bn(batches, average)
        assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in average.parameters()}
        ends.append([*average.state_dict().values(), *net.state_dict().values(), average(batches[0])])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- gradient scaling on the host


class HostSGD(torch_api.MaskedSGD):
    """A class without amp scaling in its step: GradScaler unscales, checks for infinities and skips the step."""

    _step_supports_amp_scaling = False


class HostAdamW(torch_api.MaskedAdamW):
    _step_supports_amp_scaling = False


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True], ids=["", "unscale_ and clip"])
@pytest.mark.parametrize("classes", [(HostSGD, torch.optim.SGD), (HostAdamW, torch.optim.AdamW)], ids=["SGD", "AdamW"])
def test_grad_scaler_scales_skips_and_grows_as_with_torch(classes, clip):
    said, ends = [], []
    for cls in classes:
        net = network()
        optimizer = cls(net.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        lines = []
        for i, x in enumerate(torch.randn(12, 8, 4, generator=torch.Generator().manual_seed(3))):
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            if i in (2, 7, 8):
                net[3].bias.grad[0] = (torch.inf, torch.nan)[i % 2]
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            before = [p.detach().clone() for p in net.parameters()]
            scaler.step(optimizer)
            moved = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
            scaler.update()
            lines.append((any(moved), scaler.get_scale()))
        said.append(lines)
        ends.append([p.detach() for p in net.parameters()])
        assert [moved for moved, _ in lines] == [i not in (2, 7, 8) for i in range(12)]
    assert said[0] == said[1]
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_one_scaler_skips_only_the_optimizer_with_infinities():
    params = random_params(shapes=[(4,), (4,)])
    optimizers = [HostSGD([p], lr=1.0) for p in params]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    before = [p.detach().clone() for p in params]
    set_grads(params, [torch.tensor([1.0, torch.inf, 1.0, 1.0]), torch.full((4,), 8.0)])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(params[0], before[0])
    torch.testing.assert_close(params[1].detach(), before[1] - 2.0)
    assert scaler.get_scale() == 2.0


def test_skipped_step_does_not_count_in_the_state():
    (p,) = random_params(shapes=[(4,)])
    optimizer = HostAdamW([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    counts = []
    for value in (1.0, torch.inf, 1.0):
        p.grad = torch.full((4,), value)
        scaler.step(optimizer)
        scaler.update()
        counts.append(float(optimizer.state[p]["step"]))
    assert counts == [1.0, 1.0, 2.0]
