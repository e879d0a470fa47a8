"""`lr_scale` in a param group is applied once: it scales the default lr, but not a group's lr that was already scaled."""

import copy

import optax
import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized

BASE, SCALES = 0.1, (0.25, 0.5, 1.0)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in SCALES))


def beit(net):
    """Return groups as the constructors of BEiT, MAE and mmengine make them: lr is scaled already, lr_scale is informative."""
    return [
        {"params": list(m.parameters()), "lr": BASE * s, "lr_scale": s, "layer_id": i}
        for i, (m, s) in enumerate(zip(net, SCALES, strict=True))
    ]


def timm(net):
    return [{"params": list(m.parameters()), "lr_scale": s} for m, s in zip(net, SCALES, strict=True)]


class TimmScheduler:
    """timm's scheduler: the base value is the lr of the group, and each step writes value * lr_scale."""

    def __init__(self, optimizer):
        self.groups, self.t = optimizer.param_groups, 0
        for group in self.groups:
            group.setdefault("initial_lr", group["lr"])
        self.base = [group["initial_lr"] for group in self.groups]
        self.step()

    def step(self):
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base / (1 + self.t) * group.get("lr_scale", 1.0)
        self.t += 1


class LoopOfMAE(TimmScheduler):
    """MAE's loop: one value for all groups, times lr_scale where a group has one."""

    def step(self):
        for group in self.groups:
            group["lr"] = BASE / (1 + self.t) * group["lr_scale"]
        self.t += 1


SCHEDULERS = {
    "none": None,
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=6, cycle_momentum=False
    ),
    "timm": TimmScheduler,
    "MAE's loop": LoopOfMAE,
}
OURS = {
    "SGD": lambda groups: torch_api.MaskedSGD(groups, lr=BASE),
    "a factory": lambda groups: torch_api.OptaxOptimizer(groups, optax.sgd, lr=BASE),
    "labels": lambda groups: torch_api.PartitionedOptimizer(groups, {"x": (optax.sgd, {"lr": BASE})}, labels=lambda name, p: "x"),
}


def run(net, optimizer, scheduler, steps=3):
    schedule = None if scheduler is None else scheduler(optimizer)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", OURS)
def test_groups_with_scaled_lr_move_as_in_torch(name, scheduler):
    ours, theirs = model(), model()
    a, b = OURS[name](beit(ours)), torch.optim.SGD(beit(theirs), lr=BASE)
    torch.testing.assert_close(run(ours, a, SCHEDULERS[scheduler]), run(theirs, b, SCHEDULERS[scheduler]), rtol=1e-5, atol=1e-7)
    assert [group["lr_scale"] for group in a.param_groups[:2]] == list(SCALES[:2])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", OURS)
def test_groups_of_timm_are_scaled_once_under_every_scheduler(name, scheduler):
    """Schedulers that multiply by lr_scale give torch's numbers; other schedulers give the numbers of groups with scaled lrs."""
    ours, theirs = model(), model()
    reads = scheduler in ("timm", "MAE's loop")
    a, b = OURS[name](timm(ours)), torch.optim.SGD(timm(theirs) if reads else beit(theirs), lr=BASE)
    end = run(ours, a, SCHEDULERS[scheduler])
    torch.testing.assert_close(end, run(theirs, b, SCHEDULERS[scheduler]), rtol=1e-5, atol=1e-7)


def test_added_group_is_scaled_like_an_initial_group():
    for groups in (beit, timm):
        ours, theirs = model(), model()
        a, b = torch_api.MaskedSGD(groups(ours)[2:], lr=BASE), torch.optim.SGD(beit(theirs)[2:], lr=BASE)
        for own, other in zip(groups(ours)[:2], beit(theirs)[:2], strict=True):
            a.add_param_group(own)
            b.add_param_group(other)
        torch.testing.assert_close(run(ours, a, None), run(theirs, b, None))


def test_ambiguous_group_moves_as_in_torch_and_warns_once():
    ours, theirs = model(), model()
    groups = lambda net: [{"params": list(m.parameters()), "lr": 0.03, "lr_scale": s} for m, s in zip(net, SCALES, strict=True)]  # noqa: E731
    with pytest.warns(UserWarning, match=r"MaskedSGD: a param group has lr 0.03 and lr_scale 0.25, beside a default lr of 0.1") as seen:
        a = torch_api.MaskedSGD(groups(ours), lr=BASE)
    assert len(seen) == 1
    torch.testing.assert_close(run(ours, a, None), run(theirs, torch.optim.SGD(groups(theirs), lr=BASE), None))


def test_lr_scale_selector_always_scales():
    net = model()
    optimizer = torch_api.MaskedSGD(
        [{**group, "params": list(m.named_parameters(str(i)))} for i, (group, m) in enumerate(zip(beit(net), net, strict=True))],
        lr=BASE,
        lr_scale={"0": 0.1, "": 1.0},
    )
    assert [row["lr"] for row in optimizer.report().rows] == pytest.approx([0.0025] * 2 + [0.05] * 2 + [0.1] * 2)


def test_checkpoints_of_ours_and_of_torch_keep_the_scaled_lrs():
    for groups in (beit, timm):
        ours, theirs = model(), model()
        a, b = torch_api.MaskedSGD(groups(ours), lr=BASE), torch.optim.SGD(groups(theirs), lr=BASE)
        saved, of_torch = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
        for group, other in zip(saved["param_groups"], of_torch["param_groups"], strict=True):
            assert (group["lr"], group["lr_scale"]) == (other["lr"], other["lr_scale"])
        for state in (saved, of_torch):
            fresh = torch_api.MaskedSGD(groups(model()), lr=BASE)
            fresh.load_state_dict(state)
            assert [row["lr"] for row in fresh.report().rows[::2]] == pytest.approx([BASE * s for s in SCALES])
        # Groups without lr_scale take the meaning that lr_scale has in the checkpoint: torch's, or ours.
        plain = [{"params": list(m.parameters())} for m in model()]
        fresh = torch_api.MaskedSGD(plain, lr=BASE)
        fresh.load_state_dict(of_torch)
        assert [row["lr"] for row in fresh.report().rows[::2]] == pytest.approx([group["lr"] for group in of_torch["param_groups"]])
        fresh.load_state_dict(saved)
        assert [row["lr"] for row in fresh.report().rows[::2]] == pytest.approx([BASE * s for s in SCALES])


def test_copied_group_is_scaled_like_the_original():
    for groups in (beit, timm):
        net = model()
        optimizer = torch_api.MaskedSGD(groups(net)[:2], lr=BASE)
        optimizer.add_param_group({**optimizer.param_groups[0], "params": list(net[2].parameters())})
        rates = [row["lr"] for row in optimizer.report().rows[::2]]
        assert rates == pytest.approx([BASE * s for s in (SCALES[0], SCALES[1], SCALES[0])])


class WithDefault(torch_api.MaskedSGD):
    def __init__(self, params, lr=0.2, **options):
        super().__init__(params, lr=lr, **options)


class Passing(torch_api.MaskedAdamW):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


WITHOUT_LR = {
    "SGD": torch_api.MaskedSGD,
    "AdamW": torch_api.MaskedAdamW,
    "a class of the user's": WithDefault,
    "a class that passes all on": Passing,
    "a ready transformation": lambda groups: torch_api.OptaxOptimizer(groups, optax.scale(-1.0)),
    "a factory with a default": lambda groups: torch_api.OptaxOptimizer(groups, with_default),
    "labels": lambda groups: torch_api.PartitionedOptimizer(groups, {"x": (with_default, {})}, labels=lambda name, p: "x"),
}


def with_default(learning_rate=0.3):
    return optax.sgd(learning_rate)


@pytest.mark.parametrize("name", WITHOUT_LR)
def test_implicit_default_lr_gives_no_warning(name):
    """The scaled lr of each group stands alone, without a default."""
    net = model()
    optimizer = WITHOUT_LR[name](beit(net)[:2])
    optimizer.add_param_group(beit(net)[2])
    assert [row["lr"] for row in optimizer.report().rows[::2]] == pytest.approx([BASE * s for s in SCALES])
    twin = copy.deepcopy(optimizer)
    twin.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.07, "lr_scale": 0.1})
    assert twin.report().rows[-1]["lr"] == pytest.approx(0.07)


GIVEN = {
    "by keyword": lambda groups: torch_api.MaskedSGD(groups, lr=1e-3),
    "by position": lambda groups: torch_api.MaskedSGD(groups, 1e-3),
    "to a class of the user's": lambda groups: WithDefault(groups, lr=0.5),
    "to a factory": lambda groups: torch_api.OptaxOptimizer(groups, with_default, learning_rate=0.5),
    "for a label": lambda groups: torch_api.PartitionedOptimizer(groups, {"x": (optax.sgd, {"lr": 0.5})}, labels=lambda name, p: "x"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_warning_names_the_lr_given_by_the_user(name):
    with pytest.warns(UserWarning, match=r"lr 0.025 and lr_scale 0.25, beside a default lr of (0.001|0.5)"):
        GIVEN[name](beit(model()))
