"""JaxTrainStep runs forward, backward and update as one program with the results of the eager loop."""

import copy

import numpy as np
import optax
import optax.contrib
import pytest
import torch
from oracles import movement_error
from sampling import sampled
from torch import nn
from torch.nn import functional as F

import torch_api
from torch_api import JaxTrainStep

pytestmark = [pytest.mark.long, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion", "unoptimized_training")]


class Net(nn.Module):
    """A convolution, batch norm, small layers of equal shapes that share buckets, and a parameter that no loss reaches."""

    def __init__(self, width=8):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())))
        self.inner = nn.Linear(4 * 4 * 4, width)
        self.head = nn.Linear(width, 3)
        self.unused = nn.Parameter(torch.randn(width))

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x)))
        return self.head(self.body(self.inner(torch.flatten(h, 1))))


def batches(steps, dtype=torch.float32, size=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(size, 1, 4, 4, generator=generator).to(dtype), torch.randint(0, 3, (size,), generator=generator)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def twins(dtype=torch.float32, make=Net):
    torch.manual_seed(0)
    model = make().to(dtype)
    return model, copy.deepcopy(model)


def eager(model, optimizer, loss_fn, data):
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(ours, theirs, start, bound):
    """Compare the movement of every parameter that has moved, and the values of all buffers."""
    for (name, p), q, s in zip(ours.state_dict().items(), theirs.state_dict().values(), start.values(), strict=True):
        if torch.equal(q, s):
            assert torch.equal(p, s), name
        elif q.is_floating_point():
            assert movement_error(p, q, s) <= bound, name
        else:
            assert torch.equal(p, q), name


def start_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-10}
TORCH = {
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "RMSprop": (torch_api.MaskedRMSprop, torch.optim.RMSprop, {"lr": 1e-3}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TORCH)
def test_parameters_move_as_in_the_eager_loop_of_torch(name, dtype):
    ours, theirs, options = TORCH[name]
    model, twin = twins(dtype)
    start = start_of(model)
    train_step = JaxTrainStep(model, cross_entropy, ours(model.named_parameters(), **options))
    found = [train_step(*batch) for batch in batches(25, dtype)]
    expected = eager(twin, theirs(twin.parameters(), **options), cross_entropy, batches(25, dtype))
    assert all(x.shape == () and x.dtype == dtype and not x.requires_grad for x in found)
    np.testing.assert_allclose([x.item() for x in found], expected, rtol=BOUNDS[dtype])
    compare(model, twin, start, BOUNDS[dtype])
    assert model.norm.num_batches_tracked.item() == 25


OURS = {
    "Lion": lambda params: torch_api.MaskedLion(params, lr=1e-3),
    "Muon and AdamW": lambda params: torch_api.PartitionedOptimizer(
        params,
        {"muon": (optax.contrib.muon, {"lr": 0.02}), "rest": optax.adamw(1e-2)},
        labels=[("body*.weight", "muon"), ("*", "rest")],
    ),
    "chain, together": lambda params: torch_api.OptaxOptimizer(params, optax.chain(optax.clip_by_global_norm(0.5), optax.lion(1e-3))),
    "max_grad_norm": lambda params: torch_api.MaskedAdamW(params, lr=1e-2, max_grad_norm=0.1),
    "average": lambda params: torch_api.MaskedAdamW(params, lr=1e-2, ema_decay=0.9),
    "mask": lambda params: torch_api.MaskedAdamW(params, lr=1e-2, mask=["head.*", "body.0.*"], decay_mask="*.weight"),
    "elements": lambda params: torch_api.MaskedAdamW(
        params,
        lr=1e-2,
        mask={"head.weight": torch.arange(24).reshape(3, 8) % 2 == 0, "body.0.weight": torch.arange(64).reshape(8, 8) % 3 == 0},
    ),
    "copies": lambda params: torch_api.MaskedAdamW(params, lr=1e-2, writeback="copy"),
    "plateau": lambda params: torch_api.OptaxOptimizer(
        params, optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2, accumulation_size=1))
    ),
    "schedule free": lambda params: torch_api.MaskedScheduleFreeAdamW(params, lr=1e-2),
}


def eager_with(optimizer, model, data):
    """Run the eager loop with our optimizer, whose step gets the loss if the transformation needs it."""
    takes = any(rule.takes_extra_args for rule in optimizer._optimizer_specs.values())
    for batch in data:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward()
        optimizer.step(**({"value": loss.detach()} if takes else {}))


@pytest.mark.parametrize("name", sampled(OURS))
def test_parameters_move_as_in_the_eager_loop_with_the_same_optimizer(name):
    model, twin = twins()
    start = start_of(model)
    optimizer, other = OURS[name](model.named_parameters()), OURS[name](twin.named_parameters())
    train_step = JaxTrainStep(model, cross_entropy, optimizer)
    for batch in batches(20):
        train_step(*batch)
    eager_with(other, twin, batches(20))
    compare(model, twin, start, 2e-3 if "lion" in name.lower() else 2e-4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert optimizer.state.get(p, {}).keys() == other.state.get(q, {}).keys()
        for key, value in optimizer.state.get(p, {}).items():
            torch.testing.assert_close(value, other.state[q][key], rtol=5e-3, atol=1e-5)


@pytest.mark.parametrize("broken", ["sign", "rate", "batch", "buffers"])
def test_comparison_detects_a_wrong_step(broken):
    model, twin = twins()
    start = start_of(model)
    loss = (lambda m, x, y: -cross_entropy(m, x, y)) if broken == "sign" else cross_entropy
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.05 * (1.01 if broken == "rate" else 1), momentum=0.9)
    train_step = JaxTrainStep(model, loss, optimizer)
    for x, y in batches(25):
        train_step(x.flip(0) if broken == "batch" else x, y)
    if broken == "buffers":
        model.load_state_dict(twin.state_dict(), strict=True)
    eager(twin, torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9), cross_entropy, batches(25))
    with pytest.raises(AssertionError):
        compare(model, twin, start, 1e-4)


def test_half_parameters_with_master_weights_move_as_float32():
    model, twin = twins(torch.bfloat16, make=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    data = [(torch.randn(5, 4, dtype=torch.bfloat16), torch.randn(5, 1, dtype=torch.bfloat16)) for _ in range(20)]
    loss = lambda m, x, y: F.mse_loss(m(x), y)  # noqa: E731
    make = lambda m: torch_api.MaskedAdamW(m.named_parameters(), lr=1e-2, master_weights=True)  # noqa: E731
    start = start_of(model)
    optimizer, other = make(model), make(twin)
    train_step = JaxTrainStep(model, loss, optimizer)
    for batch in data:
        train_step(*batch)
    eager(twin, other, loss, data)
    compare(model, twin, start, 0.15)  # bfloat16 gradients are rounded at other points, and Adam divides by their size
    masters = [state["master_param"] for state in optimizer.state.values()]
    assert len(masters) == 4
    assert all(m.dtype is torch.float32 for m in masters)


def test_warm_steps_use_one_program_and_keep_all_addresses():
    model, _ = twins()
    traced = []

    def loss(model, x, y):
        traced.append(x.shape)
        return cross_entropy(model, x, y)

    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    train_step = JaxTrainStep(model, loss, optimizer)
    train_step(*next(batches(1)))
    before = [t.data_ptr() for t in model.state_dict().values()], [t.data_ptr() for s in optimizer.state.values() for t in s.values()]
    for batch in batches(20):
        train_step(*batch)
        schedule.step()
        optimizer.param_groups[0]["weight_decay"] *= 0.9
    assert before == (
        [t.data_ptr() for t in model.state_dict().values()],
        [t.data_ptr() for s in optimizer.state.values() for t in s.values()],
    )
    assert len(traced) == 1
    assert train_step.cache_info() == (20, 1, 1, 1)
    for batch in batches(3, size=4):  # another signature
        train_step(*batch)
    model.eval()
    train_step(*next(batches(1)))
    model.train()
    train_step(*next(batches(1)))
    assert len(traced) == 3
    assert train_step.cache_info().compilations == 3


def test_schedulers_change_the_lr_as_in_torch():
    model, twin = twins()
    start = start_of(model)
    ours, theirs = torch_api.MaskedSGD(model.named_parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=25) for o in (ours, theirs)]
    train_step = JaxTrainStep(model, cross_entropy, ours)
    for batch in batches(24):
        train_step(*batch)
        eager(twin, theirs, cross_entropy, [batch])
        for schedule in schedules:
            schedule.step()  # warns, which is an error here, if it has not seen a step
    compare(model, twin, start, 1e-4)


def test_train_steps_and_eager_steps_alternate_across_a_checkpoint(tmp_path):
    model, twin = twins()
    start = start_of(model)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), **options)
    train_step = JaxTrainStep(model, cross_entropy, optimizer)
    data = list(batches(30))
    for i, batch in enumerate(data[:15]):
        if i % 2:
            train_step(*batch)
        else:
            eager(model, optimizer, cross_entropy, [batch])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "at_15.pt")
    saved = torch.load(tmp_path / "at_15.pt", weights_only=True)
    other = Net()
    resumed = torch_api.MaskedAdamW(other.named_parameters(), **options)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    again = JaxTrainStep(other, cross_entropy, resumed)
    for batch in data[15:]:
        train_step(*batch)
        again(*batch)
    eager(twin, torch.optim.AdamW(twin.parameters(), **options), cross_entropy, data)
    compare(model, twin, start, 1e-4)
    assert all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert set(steps) == {30.0}


def test_changes_between_calls_take_effect():
    """State, parameters, masks, submodules and modes may be changed by hand between calls, as in the eager loop."""
    model, twin = twins()
    pairs = [
        (model, torch_api.MaskedAdamW(model.named_parameters(), lr=1e-2)),
        (twin, torch_api.MaskedAdamW(twin.named_parameters(), lr=1e-2)),
    ]
    train_step = JaxTrainStep(model, cross_entropy, pairs[0][1])
    start = start_of(model)

    def both(change):
        for m, o in pairs:
            change(m, o)
        for batch in batches(3):
            train_step(*batch)
            eager(twin, pairs[1][1], cross_entropy, [batch])
        compare(model, twin, start, 3e-4)

    both(lambda m, o: None)
    both(lambda m, o: m.inner.requires_grad_(False))
    both(lambda m, o: m.inner.requires_grad_(True))
    both(lambda m, o: o.set_trainable("body.*", False))
    both(lambda m, o: setattr(m.head.weight, "data", m.head.weight.detach() * 0.5))
    both(lambda m, o: o.state[m.head.weight].update(exp_avg=torch.zeros(3, 8)))
    programs = train_step.cache_info().programs
    both(lambda m, o: o.set_trainable("body.*", True))
    assert train_step.cache_info().programs == programs == 3, "a program of an earlier mask was compiled again"
    both(lambda m, o: m.norm.eval())
    both(lambda m, o: setattr(m, "body", nn.Sequential(m.body[0], nn.ReLU(), *m.body[2:])))
    both(lambda m, o: setattr(m.norm, "running_mean", torch.ones(4)))
    both(lambda m, o: setattr(m.norm, "momentum", 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_loss_is_a_separate_tensor(dtype, accumulate):
    model = nn.Linear(3, 1)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    train_step = JaxTrainStep(model, lambda model, x: model(x).square().mean().to(dtype), optimizer, accumulate=accumulate)
    x, found, expected = torch.randn(5, 3), [], []
    for _ in range(4):
        expected.append(model(x).square().mean().detach())
        found.append(train_step(x))
        assert found[-1].dtype == dtype
        assert found[-1].shape == ()
        assert not found[-1].requires_grad
        found[-1].add_(0)  # the caller may write into it
    assert len({loss.data_ptr() for loss in found}) == 4
    bound = max(2 * torch.finfo(dtype).eps, 1e-6)
    for loss, value in zip(found, expected, strict=True):
        torch.testing.assert_close(loss.to(torch.float32), value, rtol=bound, atol=0)
