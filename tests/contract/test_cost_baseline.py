"""Cost of one step for standard optimizers and settings, compared with cost_baseline.json.

`make baseline` writes the section of the installed jaxlib.
"""

import importlib.metadata
import json
import os
from pathlib import Path

import optax
import optax.contrib
import pytest
import torch
from cost_probe import cost, fixed_environment, not_comparable
from torch import nn
from torch.nn import functional as F

import bridge
import torch_api

BASELINE = Path(__file__).parent / "cost_baseline.json"
JAXLIB = importlib.metadata.version("jaxlib")
WRITES = bool(os.environ.get("MASKBRIDGE_WRITE_BASELINE"))

# Matrices and vectors with a little more than 2^20 elements.
LARGE = [(1024, 896), (896,), (256, 512), (256,)]
# A few thousand elements, which XLA updates on one core.
SMALL = [(48, 64), (48,), (16, 48), (16,)]
TINY = [(64, 64)] * 150 + [(64,)] * 150
MANY = [(96, 96)] * 1000
LAYERS = [(256, 256)] * 60

if JAXLIB not in json.loads(BASELINE.read_text()) and not WRITES:
    pytest.skip(f"the baseline has no section for jaxlib {JAXLIB}; `make baseline` writes it", allow_module_level=True)

pytestmark = [pytest.mark.quick, pytest.mark.long, pytest.mark.usefixtures("standard_promotion")]


def parameters(shapes, dtype=torch.float32):
    """Return named parameters with gradients."""
    params = {
        f"layer{i}.{'weight' if len(shape) > 1 else 'bias'}": nn.Parameter(torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)
    }
    for p in params.values():
        p.grad = torch.randn(p.shape).to(dtype)
    return params


def count(params):
    return sum(p.numel() for p in params)


def stepping(make, shapes=LARGE, dtype=torch.float32):
    """Return a function that measures a step of `make(named parameters)`."""

    def measured():
        params = parameters(shapes, dtype)
        optimizer = make(params.items())
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        return cost(optimizer.step, optimizer, count(trained))

    return measured


def of(name, shapes=LARGE, dtype=torch.float32, **arguments):
    """Return a function that measures a class of torch_api."""
    return stepping(lambda params: getattr(torch_api, name)(params, **arguments), shapes, dtype)


def optaxs(tx, shapes=LARGE, **hyperparams):
    """Return a function that measures a transformation or a factory of optax."""
    return stepping(lambda params: torch_api.OptaxOptimizer(params, tx, **hyperparams), shapes)


def clipped(*transforms):
    return optax.chain(optax.clip_by_global_norm(1.0), *transforms)


def partitioned(params):
    params = dict(params)
    transforms = {"muon": (optax.contrib.muon, {"lr": 0.02}), "adamw": (optax.adamw, {"lr": 1e-3})}
    return torch_api.PartitionedOptimizer(
        params.items(), transforms, {name: "muon" if p.ndim == 2 else "adamw" for name, p in params.items()}
    )


def scaled(**arguments):
    """Return a function that measures a step through GradScaler, which leaves unscaling to the optimizer."""

    def measured():
        params = parameters(LARGE)
        optimizer = torch_api.MaskedAdamW(params.items(), fused=True, **arguments)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))

        def step():
            scaler.step(optimizer)
            scaler.update()

        return cost(step, optimizer, count(params.values()))

    return measured


def masked_rows():
    """Return a function that measures a matrix of which every other row is trained."""
    params = parameters([(1024, 256), (256,)])
    rows = torch.arange(1024)[:, None].expand(1024, 256) % 2 == 0
    optimizer = torch_api.MaskedAdamW(params.items(), mask={"layer0.weight": rows, "layer1.bias": True})
    return cost(optimizer.step, optimizer, count(params.values()))


def half_frozen():
    params = parameters(LARGE)
    optimizer = torch_api.MaskedAdamW(params.items(), mask=["layer0.*", "layer1.*"])
    return cost(optimizer.step, optimizer, 1024 * 896 + 896)


def some_gradients(in_ten):
    """Return a function that measures a step in which `in_ten` of ten parameters have gradients; bytes are per element with gradient."""

    def measured():
        params = parameters(LAYERS)
        for i, p in enumerate(params.values()):
            p.grad = p.grad if i % 10 < in_ten else None
        optimizer = torch_api.MaskedAdamW(params.items())
        return cost(optimizer.step, optimizer, count(p for p in params.values() if p.grad is not None))

    return measured


def channels_last():
    model = nn.Sequential(nn.Conv2d(64, 128, 3), nn.Conv2d(128, 64, 3)).to(memory_format=torch.channels_last)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer = torch_api.MaskedAdamW(model.named_parameters())
    return cost(optimizer.step, optimizer, count(model.parameters()))


def train_step(accumulate=1, **arguments):
    def measured():
        model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch_api.MaskedAdamW(model.parameters(), **arguments)
        step = torch_api.JaxTrainStep(model, lambda model, x, y: F.cross_entropy(model(x), y), optimizer, accumulate=accumulate)
        batch = torch.randn(16, 32), torch.randint(10, (16,))
        update = lambda: [step(*batch) for _ in range(accumulate)]  # noqa: E731
        return cost(update, step, count(model.parameters()))

    return measured


BF16 = torch.bfloat16
CONFIGURATIONS = {
    # classes of torch.optim
    "AdamW": of("MaskedAdamW"),
    "AdamW, small": of("MaskedAdamW", SMALL),
    "Adam, amsgrad": of("MaskedAdam", amsgrad=True),
    "SGD": of("MaskedSGD", lr=0.1),
    "SGD, momentum": of("MaskedSGD", lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": of("MaskedAdagrad"),
    "Adadelta": of("MaskedAdadelta"),
    "RMSprop": of("MaskedRMSprop", momentum=0.9),
    "Adafactor": of("MaskedAdafactor"),
    "NAdam": of("MaskedNAdam"),
    "RAdam": of("MaskedRAdam"),
    "Adamax": of("MaskedAdamax"),
    "Muon": stepping(lambda params: torch_api.MaskedMuon([(name, p) for name, p in params if p.ndim == 2]), SMALL),
    # transformations of optax
    "Lion": of("MaskedLion", lr=1e-4),
    "LAMB": of("MaskedLamb", lr=1e-3),
    "LARS": of("MaskedLars", lr=1e-3),
    "schedule-free AdamW": of("MaskedScheduleFreeAdamW", lr=1e-3),
    "optax.adamw": optaxs(optax.adamw, lr=1e-3),
    "optax.lamb, small": optaxs(optax.lamb, SMALL, lr=1e-3),
    "optax.contrib.madgrad": optaxs(optax.contrib.madgrad, lr=1e-3),
    "optax.contrib.muon": optaxs(optax.contrib.muon, SMALL, lr=1e-3),
    "optax.contrib.prodigy": optaxs(optax.contrib.prodigy(), LARGE),
    "optax.contrib.schedule_free_adamw": optaxs(optax.contrib.schedule_free_adamw(1e-3), LARGE),
    "optax.MultiSteps": optaxs(optax.MultiSteps(optax.adam(1e-3), 4), LARGE),
    "optax.apply_if_finite": optaxs(optax.apply_if_finite(optax.adam(1e-3), 3), LARGE),
    "optax chain with a global norm": optaxs(clipped(optax.adamw(1e-3)), LARGE),
    "Muon and AdamW, partitioned": stepping(partitioned, SMALL),
    "MultiOptimizer": stepping(
        lambda params: torch_api.MultiOptimizer(params, ("*.weight", bridge.Momentum(lr=0.1)), ("*.bias", bridge.Adam(lr=0.1)))
    ),
    # dtypes
    "AdamW, bfloat16": of("MaskedAdamW", LARGE, BF16),
    "AdamW, bfloat16, master weights": of("MaskedAdamW", LARGE, BF16, master_weights=True),
    "AdamW, bfloat16, stochastic rounding": of("MaskedAdamW", LARGE, BF16, stochastic_rounding=True),
    "AdamW, float16": of("MaskedAdamW", LARGE, torch.float16),
    "AdamW, state in bfloat16": of("MaskedAdamW", LARGE, state_dtype=BF16),
    "AdamW, float64": of("MaskedAdamW", LARGE, torch.float64),
    "SGD, momentum, bfloat16, master weights": of("MaskedSGD", LARGE, BF16, lr=0.1, momentum=0.9, master_weights=True),
    # settings
    "AdamW, average": of("MaskedAdamW", ema_decay=0.999),
    "AdamW, max_grad_norm": of("MaskedAdamW", max_grad_norm=1.0),
    "AdamW, max_grad_norm, average": of("MaskedAdamW", max_grad_norm=1.0, ema_decay=0.999),
    "AdamW, GradScaler": scaled(),
    "AdamW, GradScaler, max_grad_norm": scaled(max_grad_norm=1.0),
    "AdamW, mask of rows": masked_rows,
    "AdamW, frozen layers": half_frozen,
    "AdamW, copied back": of("MaskedAdamW", writeback="copy"),
    "AdamW, odd length": of("MaskedAdamW", [(300007,), (300007,)]),
    "AdamW, channels_last": channels_last,
    "AdamW, 7 in 10 gradients": some_gradients(7),
    "AdamW, 1 in 10 gradients": some_gradients(1),
    # many leaves
    "AdamW, 300 tiny leaves": of("MaskedAdamW", TINY),
    "optax chain with a global norm, 300 tiny leaves": optaxs(clipped(optax.adamw(1e-3)), TINY),
    "AdamW, 60 equal leaves": of("MaskedAdamW", LAYERS),
    "AdamW, 60 equal leaves, max_grad_norm": of("MaskedAdamW", LAYERS, max_grad_norm=1.0),
    "AdamW, 1000 equal leaves": of("MaskedAdamW", MANY),
    # whole training steps
    "JaxTrainStep": train_step(),
    "JaxTrainStep, max_grad_norm, average": train_step(max_grad_norm=1.0, ema_decay=0.999),
    "JaxTrainStep, accumulate": train_step(accumulate=2),
}


def sections():
    return json.loads(BASELINE.read_text()) if BASELINE.exists() else {}


def write(section):
    """Write `section` as the section of the installed jaxlib."""
    known = sections() | {JAXLIB: section}
    versions = (
        f"{json.dumps(version)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in known[version].items())
        + "\n}"
        for version in sorted(known)
    )
    BASELINE.write_text("{\n" + ",\n".join(versions) + "\n}\n")


def baseline():
    """Return the costs by configuration for the installed jaxlib."""
    reason = not_comparable()
    if reason is not None:
        pytest.skip(reason)
    if JAXLIB not in sections() and not WRITES:
        pytest.skip(f"{BASELINE.name} has no section for jaxlib {JAXLIB}: `make baseline` writes it")
    return sections().get(JAXLIB, {})


def changes(name, before, now):
    """Return a line for each changed field."""
    return [
        f"{name}: {field.replace('_', ' ')} {before.get(field, 'unknown')} before, {value} now"
        for field, value in now._asdict().items()
        if before.get(field) != value
    ]


def check(name, before, now):
    found = changes(name, before, now)
    assert not found, "\n".join([*found, f"if the change is intended, `make baseline` writes {BASELINE.name}"])


def measured(name):
    with fixed_environment():
        return CONFIGURATIONS[name]()


@pytest.mark.fast_path
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_cost_of_a_step_equals_the_baseline(name):
    known = baseline()
    found, added = measured(name)
    assert added == 0, f"{name}: the second step traces or compiles"
    if WRITES:
        write(known | {name: found._asdict()})
    check(name, baseline().get(name, {}), found)


def test_baseline_lists_exactly_the_configurations():
    known = baseline()
    if WRITES:
        write({name: known[name] for name in CONFIGURATIONS})
    assert list(baseline()) == list(CONFIGURATIONS)


def test_failure_prints_configuration_field_and_both_values():
    before = baseline()["SGD"]
    altered = before | {"bytes_per_element": before["bytes_per_element"] - 4, "executables": 7}
    with pytest.raises(AssertionError) as raised:
        check("SGD", altered, measured("SGD")[0])
    lines = list(map(str.strip, str(raised.value).splitlines()))
    assert lines[:2] == ["SGD: bytes per element 8 before, 12 now", "SGD: executables 7 before, 1 now"]


def test_recompiling_step_is_counted():
    params = parameters(SMALL)
    optimizer = torch_api.MaskedAdamW(params.items())

    def step():
        optimizer.param_groups[0]["maximize"] = not optimizer.param_groups[0]["maximize"]
        optimizer.step()

    with fixed_environment():
        found, added = cost(step, optimizer, count(params.values()))
    assert (found.traces, found.compilations, added) == (1, 1, 2)
