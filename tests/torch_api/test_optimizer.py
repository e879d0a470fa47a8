"""The drop-in classes match torch.optim, also with masks, groups and missing gradients."""

import copy
import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from oracles import NumpyAdam, NumpySGD, clones, movement_error, random_grads, random_params, run_pair, set_grads

import bridge
import torch_api
from bridge._memory import jax_buffers
from torch_api._rules import torch_rules

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

PAIRS = {
    "Adam": (torch_api.MaskedAdam, torch.optim.Adam),
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD),
}
ADAM_OPTIONS = [
    dict(zip(("weight_decay", "amsgrad", "maximize"), values, strict=True))
    for values in itertools.product((0.0, 0.1), (False, True), (False, True))
]
CONFIGS = [
    *(("Adam", options) for options in [*ADAM_OPTIONS, {"betas": (0.0, 0.9), "eps": 1e-3}, {"lr": 0.1}]),
    *(("AdamW", options) for options in ADAM_OPTIONS),
    *(
        ("SGD", options)
        for options in [
            {},
            {"weight_decay": 0.1},
            {"momentum": 0.9},
            {"momentum": 0.9, "dampening": 0.5},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, "maximize": True},
        ]
    ),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in CONFIGS]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.complex64: 1e-5}


def build(name, ours, theirs, **options):
    masked, original = PAIRS[name]
    return masked(ours, **options), original(theirs, **options)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("name", "options"), CONFIGS, ids=IDS)
def test_fifty_steps_move_as_in_torch_optim(name, options, dtype):
    ours = random_params(dtype)
    theirs, start = clones(ours), clones(ours)
    a, b = build(name, ours, theirs, **options)
    addresses = [p.data_ptr() for p in ours]
    run_pair(a, ours, b, theirs, 50)
    assert max(map(movement_error, ours, theirs, start)) < TOLERANCE[dtype]
    assert addresses == [p.data_ptr() for p in ours]


@pytest.mark.parametrize("name", PAIRS)
def test_steps_match_the_float64_reference(name):
    oracle = {"Adam": NumpyAdam, "AdamW": functools.partial(NumpyAdam, decoupled=True), "SGD": NumpySGD}[name]
    options = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    (p,) = random_params(torch.float64, [(6, 4)])
    start, reference, value = p.detach().clone(), oracle(**options), p.detach().numpy().copy()
    optimizer = PAIRS[name][0]([p], **options)
    for _ in range(25):
        p.grad = torch.randn_like(p)
        value = reference.step(value, p.grad.numpy())
        optimizer.step()
    assert movement_error(p, torch.tensor(value), start) < 1e-12


BROKEN = {
    "lr": {"lr": 1.001e-3},
    "beta1": {"betas": (0.899, 0.999)},
    "eps": {"eps": 1e-5},
    "decay": {"weight_decay": 0.0101},
    "sign": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "mask inverted": {"mask": False},
    "clipped": {"max_grad_norm": 1e-7},
}


@pytest.mark.filterwarnings("ignore:.*updated nothing")
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_comparison_with_torch_detects_a_broken_optimizer(broken):
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    optimizer = torch_api.MaskedAdamW(ours, **broken)
    run_pair(optimizer, ours, torch.optim.AdamW(theirs), theirs, 50)
    assert max(map(movement_error, ours, theirs, start)) > 1e-5


@pytest.mark.parametrize("name", PAIRS)
def test_complex_parameters_move_as_in_torch(name):
    ours = random_params(torch.complex64, [(4, 3), (5,), ()])
    theirs, start = clones(ours), clones(ours)
    a, b = build(name, ours, theirs, lr=0.01, weight_decay=0.1)
    run_pair(a, ours, b, theirs, 25)
    assert max(map(movement_error, ours, theirs, start)) < TOLERANCE[torch.complex64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_half_types_stay_within_one_rounding_of_torch(name, dtype):
    """The reference is torch's fused kernel, or float32 for SGD, because torch 2.13's fused SGD skips whole vectors of half types."""
    ours = random_params(dtype, scale=1.0)
    theirs = clones(ours) if name != "SGD" else [torch.nn.Parameter(p.detach().float()) for p in ours]
    masked, original = PAIRS[name]
    a, b = masked(ours, lr=0.01), original(theirs, lr=0.01, fused=name != "SGD")
    for _ in range(20):
        grads = random_grads(ours)
        set_grads(ours, grads)
        set_grads(theirs, [g.to(q.dtype) for g, q in zip(grads, theirs, strict=True)])
        a.step()
        b.step()
        for p, q in zip(ours, theirs, strict=True):
            ulp = torch.finfo(dtype).eps * torch.maximum(p.abs(), q.abs()).float() + torch.finfo(dtype).smallest_normal
            assert bool(((p.float() - q.float()).abs() <= ulp).all())
            # Each step starts at a common point, so that roundings do not add up.
            q.data.copy_(p.data)
            for key, moment in b.state[q].items():
                moment.copy_(a.state[p][key])


def test_float16_with_zero_gradients_stays_finite():
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = torch_api.MaskedAdam([p])
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert bool((p == 1).all())


@pytest.mark.parametrize("name", PAIRS)
def test_nan_gradients_act_as_in_torch(name):
    ours = random_params(shapes=[(8,), (3, 4)])
    theirs = clones(ours)
    a, b = build(name, ours, theirs, lr=0.01)
    grads = random_grads(ours)
    grads[0][2], grads[0][5] = float("nan"), float("inf")
    set_grads(ours, grads)
    set_grads(theirs, grads)
    a.step()
    b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p.isnan(), q.isnan())
        torch.testing.assert_close(p, q, equal_nan=True)


@pytest.mark.parametrize("memory_format", ["transposed", "channels_last"])
def test_parameters_of_other_layouts_move_as_in_torch(memory_format):
    base = torch.randn(6, 5).t() if memory_format == "transposed" else torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ours = clones([base])
    theirs, start = clones(ours), clones(ours)
    a, b = build("AdamW", ours, theirs, lr=0.01)
    strides = ours[0].stride()
    run_pair(a, ours, b, theirs, 20)
    assert movement_error(ours[0], theirs[0], start[0]) < 1e-5
    assert ours[0].stride() == strides == a.state[ours[0]]["exp_avg"].stride()
    torch.testing.assert_close(a.state[ours[0]]["exp_avg"], b.state[theirs[0]]["exp_avg"])


def test_gradient_may_have_other_strides_than_its_parameter():
    ours = random_params(shapes=[(6, 5)])
    theirs = clones(ours)
    a, b = build("SGD", ours, theirs, lr=1.0)
    grad = torch.randn(5, 6).t()
    ours[0].grad = theirs[0].grad = grad
    a.step()
    b.step()
    torch.testing.assert_close(ours[0], theirs[0])


# ---------------------------------------------------------------------- masks


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).clone()


def train(model, optimizer, steps=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", PAIRS)
def test_frozen_parameters_keep_their_bits_and_get_no_state(name):
    model = Net()
    with torch.no_grad():
        model.body.weight[0, :3] = torch.tensor([float("nan"), -0.0, 1e-42])
    frozen = {n: bits(p) for n, p in model.named_parameters() if not n.startswith("head")}
    optimizer = PAIRS[name][0](model.named_parameters(), lr=0.1, weight_decay=0.5, mask="head.*")
    for _ in range(5):
        set_grads(list(model.parameters()), random_grads(model.parameters()))
        optimizer.step()
    for n, p in model.named_parameters():
        if n in frozen:
            assert torch.equal(bits(p), frozen[n])
            assert p not in optimizer.state
    assert {row["status"] for row in optimizer.report().rows} == {"trained", "frozen"}


def test_frozen_gradients_do_not_count_in_the_norm():
    ours = random_params(shapes=[(5,), (4,)])
    theirs = clones(ours)
    a = torch_api.MaskedSGD([("a", ours[0]), ("b", ours[1])], lr=1.0, mask="a", max_grad_norm=1.0)
    b = torch.optim.SGD(theirs[:1], lr=1.0)
    grads = [torch.randn(5) * 10, torch.full((4,), 1e6)]
    set_grads(ours, grads)
    set_grads(theirs, grads)
    torch.nn.utils.clip_grad_norm_(theirs[:1], 1.0)
    a.step()
    b.step()
    torch.testing.assert_close(ours[0], theirs[0])
    assert torch.equal(ours[0].grad, grads[0])  # the step read the gradient and did not write it


@pytest.mark.parametrize("bound", [1e-3, 1.0, 1e3])
def test_max_grad_norm_clips_all_groups_as_clip_grad_norm(bound):
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a = torch_api.MaskedAdamW([{"params": ours[:3]}, {"params": ours[3:], "lr": 0.1}], max_grad_norm=bound)
    b = torch.optim.AdamW([{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.1}])
    for _ in range(20):
        grads = random_grads(ours)
        set_grads(ours, grads)
        set_grads(theirs, grads)
        torch.nn.utils.clip_grad_norm_(theirs, bound)
        a.step()
        b.step()
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


def test_max_grad_norm_may_be_switched_on_and_off_between_steps():
    (p,) = random_params(shapes=[(4,)])
    optimizer = torch_api.MaskedSGD([p], lr=1.0)
    for bound, moved in ((None, 10.0), (1.0, 1.0), (None, 10.0)):
        before = p.detach().clone()
        optimizer.max_grad_norm = bound
        p.grad = torch.tensor([0.0, 6.0, 8.0, 0.0])
        optimizer.step()
        assert float((p.detach() - before).norm()) == pytest.approx(moved, rel=1e-5)
    for wrong in (0, -1.0, "1"):
        with pytest.raises(ValueError, match=r"MaskedSGD: max_grad_norm is .*; expected a positive number, or None for no bound"):
            optimizer.max_grad_norm = wrong
    assert optimizer.max_grad_norm is None


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_nonfinite_norm_clips_as_in_torch(norm):
    ours = random_params(shapes=[(5,), (4,)])
    theirs = clones(ours)
    a, b = build("SGD", ours, theirs, lr=0.1)
    a.max_grad_norm = 1.0
    grads = random_grads(ours)
    grads[0][1] = norm
    set_grads(ours, grads)
    set_grads(theirs, grads)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    a.step()
    b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)


def test_decay_mask_sets_weight_decay_zero_elsewhere():
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    start = clones(model.parameters())
    ours = torch_api.MaskedAdamW(model.named_parameters(), lr=0.01, weight_decay=0.5, decay_mask=torch_api.no_decay_on_bias_and_norm)
    matrices = [p for p in twin.parameters() if p.ndim > 1]
    rest = [p for p in twin.parameters() if p.ndim < 2]
    theirs = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=0.01, weight_decay=0.5)
    run_pair(ours, list(model.parameters()), theirs, list(twin.parameters()), 25)
    assert max(map(movement_error, model.parameters(), twin.parameters(), start)) < 1e-5
    assert {row["parameter"]: row["decay"] for row in ours.report().rows}["norm.weight"] == 0.0
    assert len(ours.param_groups) == 1  # a decay mask makes no further group, which would cost time at every step


def test_element_mask_keeps_the_bits_of_frozen_elements():
    (p,) = random_params(shapes=[(6, 4)])
    (q,) = clones([p])
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[2:4] = True
    start = p.detach().clone()
    a = torch_api.MaskedAdamW([("w", p)], lr=0.1, weight_decay=0.1, mask={"w": mask}, max_grad_norm=0.5)
    b = torch.optim.AdamW([q], lr=0.1, weight_decay=0.1)
    for _ in range(20):
        p.grad = torch.randn_like(p)
        q.grad = torch.where(mask, p.grad, 0.0)
        p.grad[0] = float("nan")  # frozen rows are not read
        torch.nn.utils.clip_grad_norm_([q], 0.5)
        a.step()
        b.step()
    assert torch.equal(bits(p[~mask]), bits(start[~mask]))
    assert movement_error(p[mask], q[mask], start[mask]) < 1e-5
    assert a.report().rows[0]["status"] == "trained in 8 of 24 elements"


def test_requires_grad_false_freezes_even_with_a_stale_gradient():
    params = random_params(shapes=[(4,), (4,)])
    optimizer = torch_api.MaskedAdamW(params, lr=0.1)
    set_grads(params, random_grads(params))
    params[1].requires_grad_(False)
    before = bits(params[1])
    optimizer.step()
    assert torch.equal(bits(params[1]), before)
    assert params[1] not in optimizer.state
    params[1].requires_grad_(True)
    optimizer.step()
    assert not torch.equal(bits(params[1]), before)
    assert float(optimizer.state[params[0]]["step"]) == 2.0
    assert float(optimizer.state[params[1]]["step"]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_parameters_without_gradient_do_not_change(name):
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a, b = build(name, ours, theirs, lr=0.01, weight_decay=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    generator = np.random.default_rng(1)

    def sometimes(params):
        return [g if generator.random() < 0.6 else None for g in random_grads(params)]

    run_pair(a, ours, b, theirs, 40, grads=sometimes)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5
    for p, q in zip(ours, theirs, strict=True):
        assert a.state[p].keys() == b.state[q].keys()
        assert name == "SGD" or torch.equal(a.state[p]["step"], b.state[q]["step"])


def test_a_step_without_any_gradient_changes_nothing():
    params = random_params()
    optimizer = torch_api.MaskedAdamW(params)
    before = [bits(p) for p in params]
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert optimizer.step() is None
    assert all(torch.equal(bits(p), b) for p, b in zip(params, before, strict=True))
    assert not optimizer.state


def test_set_trainable_freezes_and_thaws_with_or_without_moments():
    model = Net()
    optimizer = torch_api.MaskedAdam(model.named_parameters(), lr=0.1)
    train(model, optimizer, 3)
    optimizer.set_trainable("body.*", False)
    optimizer.set_trainable("norm.*", False, keep_state=False)
    frozen = bits(model.body.weight)
    train(model, optimizer, 2)
    assert torch.equal(bits(model.body.weight), frozen)
    assert model.norm.weight not in optimizer.state
    optimizer.set_trainable("*", True)
    train(model, optimizer, 1)
    counts = {n: float(optimizer.state[p]["step"]) for n, p in model.named_parameters()}
    assert counts == {"body.weight": 4, "body.bias": 4, "norm.weight": 1, "norm.bias": 1, "head.weight": 6, "head.bias": 6}


# ---------------------------------------------------------------------- groups, schedulers, the protocol


def test_group_flags_scale_and_freeze():
    ours = random_params(shapes=[(4,), (4,), (4,)])
    theirs, start = clones(ours), clones(ours)
    a = torch_api.MaskedAdamW(
        [
            {"params": [ours[0]], "lr_scale": 0.1, "wd_scale": 2.0},
            {"params": [ours[1]], "trainable": False},
            {"params": [ours[2]], "label": "rest"},
        ],
        lr=0.01,
        weight_decay=0.1,
    )
    b = torch.optim.AdamW([{"params": [theirs[0]], "lr": 0.001, "weight_decay": 0.2}, {"params": [theirs[2]]}], lr=0.01, weight_decay=0.1)
    run_pair(a, ours, b, theirs, 25)
    assert max(movement_error(ours[i], theirs[i], start[i]) for i in (0, 2)) < 1e-5
    assert torch.equal(ours[1], start[1])
    a.param_groups[1]["trainable"] = True
    a.step()
    assert not torch.equal(ours[1], start[1])
    assert [row["label"] for row in a.report().rows] == [None, None, "rest"]


def test_mask_in_a_group_applies_to_that_group():
    model = Net()
    groups = [
        {"params": [("body.weight", model.body.weight), ("body.bias", model.body.bias)], "mask": "*.bias"},
        {"params": [("head.weight", model.head.weight)]},
    ]
    optimizer = torch_api.MaskedAdamW(groups, mask="*.*")
    assert {row["parameter"]: row["status"] for row in optimizer.report().rows} == {
        "body.weight": "frozen",
        "body.bias": "trained",
        "head.weight": "trained",
    }
    assert "mask" not in optimizer.param_groups[0]


SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=60),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=7),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")
def test_schedulers_drive_ours_and_torchs_alike(name, scheduler):
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a, b = build(name, ours, theirs, lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))
    schedulers = [scheduler(a), scheduler(b)]
    run_pair(a, ours, b, theirs, 50, after=lambda: [s.step() for s in schedulers])
    assert max(map(movement_error, ours, theirs, start)) < 1e-5
    assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]


def test_lr_zero_changes_no_weights():
    params = random_params()
    optimizer = torch_api.MaskedAdamW(params, lr=0.0, weight_decay=0.1)
    before = [bits(p) for p in params]
    set_grads(params, random_grads(params))
    optimizer.step()
    assert all(torch.equal(bits(p), b) for p, b in zip(params, before, strict=True))


def test_momentum_switched_on_later_makes_its_buffer():
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a, b = build("SGD", ours, theirs, lr=0.1)
    run_pair(a, ours, b, theirs, 3)
    assert not a.state
    a.param_groups[0]["momentum"] = b.param_groups[0]["momentum"] = 0.9
    run_pair(a, ours, b, theirs, 20)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


def test_added_group_is_trained():
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a, b = build("AdamW", ours[:3], theirs[:3], lr=0.01)
    run_pair(a, ours, b, theirs, 5)
    a.add_param_group({"params": ours[3:], "lr": 0.1})
    b.add_param_group({"params": theirs[3:], "lr": 0.1})
    run_pair(a, ours, b, theirs, 20)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


def test_selector_functions_also_decide_about_an_added_group():
    first, second = Net(), Net()
    decays = torch_api.no_decay_on_bias_and_norm
    optimizer = torch_api.MaskedAdamW(first.named_parameters("a"), mask=lambda name, p: "norm" not in name, decay_mask=decays)
    optimizer.add_param_group({"params": list(second.named_parameters("b"))})
    rows = {row["parameter"]: (row["status"], row["decay"]) for row in optimizer.report().rows}
    assert rows["b.norm.weight"] == ("frozen", None)
    assert rows["b.head.bias"] == ("trained", 0.0)
    assert rows["b.head.weight"] == ("trained", 0.01)


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    model = Net()
    optimizer = torch_api.MaskedSGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().sum()
        loss.backward()
        return loss

    before = bits(model.head.weight)
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() > 0
    assert not torch.equal(bits(model.head.weight), before)


def test_step_hooks_run():
    params = random_params()
    optimizer = torch_api.MaskedAdam(params)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    set_grads(params, random_grads(params))
    optimizer.step()
    assert calls == ["pre", "post"]
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_are_independent_and_continue_alike(how):
    model = Net()
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[0] = False
    optimizer = torch_api.MaskedSGD(
        model.named_parameters(), lr=0.01, momentum=0.9, dampening=0.5, mask={"body.weight": mask, "head": True}, max_grad_norm=1.0
    )
    train(model, optimizer)
    twin = how(optimizer)
    assert [{k: v for k, v in row.items() if k != "write-back"} for row in twin.report().rows] == [
        {k: v for k, v in row.items() if k != "write-back"} for row in optimizer.report().rows
    ]
    params, twins = ([p for g in o.param_groups for p in g["params"]] for o in (optimizer, twin))
    compiled = bridge.compilations()
    for _ in range(3):
        grads = random_grads(params)
        set_grads(params, grads)
        set_grads(twins, grads)
        optimizer.step()
        twin.step()
    assert all(torch.equal(p, q) and p.data_ptr() != q.data_ptr() for p, q in zip(params, twins, strict=True))
    assert twin.report().rows == optimizer.report().rows  # the copy also updates its parameters in place
    assert bridge.compilations() == compiled


def test_tied_parameters_are_updated_as_one():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    expected = model[0].weight.detach() - 0.1 * model[0].weight.grad
    optimizer.step()
    torch.testing.assert_close(model[1].weight.detach(), expected)
    assert model[0].weight is model[1].weight


def test_lr_may_be_a_tensor():
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a, b = build("AdamW", ours, theirs, lr=torch.tensor(0.01))
    run_pair(a, ours, b, theirs, 20)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


def test_grad_scaler_skips_a_step_with_infinite_gradients():
    params = random_params(shapes=[(4,)])
    optimizer = torch_api.MaskedSGD(params, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = params[0].detach().clone()
    for value, expected in ((float("inf"), start), (16.0, start - 2.0 * 2)):
        optimizer.zero_grad()
        scaler.scale(torch.zeros(()))  # the scaler creates its scale on the first call
        params[0].grad = torch.full((4,), value)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(params[0].detach(), expected)


def test_optax_optimizer_accepts_a_torch_rule():
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a = torch_api.OptaxOptimizer(ours, torch_rules.ADAM, lr=0.01, amsgrad=True)
    run_pair(a, ours, torch.optim.Adam(theirs, lr=0.01, amsgrad=True), theirs, 20)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


def test_parameter_has_no_second_copy_in_memory():
    (p,) = random_params(shapes=[(256, 256)])
    optimizer = torch_api.MaskedSGD([p], lr=0.1)
    p.grad = torch.randn_like(p)
    optimizer.step()
    import jax

    assert {a.unsafe_buffer_pointer() for a in jax.live_arrays() if a.size == 256 * 256} == {p.data_ptr()}
    assert jax_buffers.find_unshared_buffer(p.detach()).array.unsafe_buffer_pointer() == p.data_ptr()


# ---------------------------------------------------------------------- groups edited by hand


def test_parameter_replaced_in_its_group_is_trained_with_its_mask():
    old, frozen, new = random_params(shapes=[(3,), (2,), (5,)])
    optimizer = torch_api.MaskedSGD([("points", old), ("rest", frozen)], lr=0.5, mask="points")
    optimizer.param_groups[0]["params"][0] = new
    for p in (old, frozen, new):
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in (old, frozen, new)]
    optimizer.step()
    assert torch.equal(old, before[0])
    assert torch.equal(frozen, before[1])
    torch.testing.assert_close(new.detach(), before[2] - 0.5)
    assert [row["parameter"] for row in optimizer.report().rows] == ["points", "rest"]


def test_moved_parameters_and_replaced_groups_take_effect():
    ours = random_params(shapes=[(3,), (4,), (5,)])
    theirs = clones(ours)
    pair = [
        cls([{"params": [ps[0]], "lr": 1.0}, {"params": [ps[1]], "lr": 0.1}, {"params": [ps[2]], "lr": 0.01}])
        for cls, ps in ((torch_api.MaskedSGD, ours), (torch.optim.SGD, theirs))
    ]

    def both(change):
        for optimizer in pair:
            change(optimizer.param_groups)
        run_pair(pair[0], ours, pair[1], theirs, 2)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q)

    both(lambda groups: None)
    both(lambda groups: groups[1]["params"].append(groups[0]["params"].pop()))
    both(lambda groups: groups.__setitem__(1, dict(groups[1], lr=3.0)))
    both(lambda groups: groups.pop(2))


def test_extra_keys_in_the_state_are_kept():
    (p,) = random_params(shapes=[(3,)])
    optimizer = torch_api.MaskedAdam([p])
    optimizer.state[p]["mine"] = 5
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.state[p]["mine"] == 5
    assert float(optimizer.state[p]["step"]) == 2.0


def test_amsgrad_switched_on_later_raises_as_in_torch():
    (p,) = random_params(shapes=[(3,)])
    optimizer = torch_api.MaskedAdam([("w", p)])
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(
        ValueError, match=r"state of parameter 'w' has no 'max_exp_avg_sq'.*such as amsgrad, must be set before the first step"
    ):
        optimizer.step()


@pytest.mark.parametrize("name", PAIRS)
def test_infinite_parameter_acts_as_in_torch(name):
    ours = [torch.nn.Parameter(torch.tensor([1.0, -torch.inf, torch.inf, torch.nan]))]
    theirs = clones(ours)
    a, b = build(name, ours, theirs, lr=0.1)
    run_pair(a, ours, b, theirs, 3, grads=lambda ps: [torch.tensor([1.0, 1.0, 0.0, 1.0])])
    torch.testing.assert_close(ours[0], theirs[0], equal_nan=True)


def test_beta_of_zero_uses_the_gradient_alone():
    (p,) = random_params(shapes=[(1,)])
    optimizer = torch_api.MaskedAdam([p], betas=(0.0, 0.9))
    for value in (1e4, 1e-5):
        p.grad = torch.tensor([value])
        optimizer.step()
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(1e-5)


def test_set_trainable_lifts_an_element_mask_but_accepts_none():
    (p,) = random_params(shapes=[(4,)])
    optimizer = torch_api.MaskedSGD([("w", p)], mask={"w": torch.tensor([True, False, False, False])})
    with pytest.raises(TypeError, match=r"'w' got .* expected True or False"):
        optimizer.set_trainable({"w": torch.tensor([True, False, False, False])}, False)
    optimizer.set_trainable("w", True)
    assert optimizer.report().rows[0]["status"] == "trained"


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_ask_named_selector_functions_about_new_groups(how):
    (first, second) = random_params(shapes=[(3, 3), (3,)])
    twin = how(torch_api.MaskedAdamW([("w", first)], decay_mask=torch_api.no_decay_on_bias_and_norm))
    twin.add_param_group({"params": [("bias", second)]})
    assert [row["decay"] for row in twin.report().rows] == [0.01, 0.0]
