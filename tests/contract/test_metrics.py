"""`grad_norm` and `metrics()`: equal to torch's numbers, before clipping and unscaled, and free where they are not asked for."""

import copy
import json
import math

import jax
import numpy as np
import optax
import pytest
import torch

import bridge
import torch_api

SHAPES = [(30, 7), (5,), (300,), (300,), (300,), (300,), (17,), (1,), (257, 5)]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [
        (f"{'head' if i % 2 else 'body'}.p{i}", torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)))
        for i, s in enumerate(shapes)
    ]


def give(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(100 + seed)
    for _, p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def norm(tensors):
    return math.sqrt(sum(float(x.detach().abs().double().square().sum()) for x in tensors))


def by_group(params):
    return [{"params": [pair for pair in params if pair[0].startswith(name)], "name": name} for name in ("head", "body")]


MAKERS = {
    "one program": lambda ps, **options: torch_api.MaskedAdamW(by_group(ps), lr=1e-2, **options),
    "a joint transformation": lambda ps, **options: torch_api.OptaxOptimizer(
        by_group(ps), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), **options
    ),
    "copied results": lambda ps, **options: torch_api.MaskedSGD(by_group(ps), lr=1e-2, momentum=0.9, writeback="copy", **options),
}
BOUNDS = [None, 0.5, 1e6]


def expected(params, before, bound):
    """Return the metrics by float64 arithmetic of torch."""
    own = {}
    for suffix in ("", "/head", "/body"):
        chosen = [(p, old) for (name, p), old in zip(params, before, strict=True) if not suffix or name.startswith(suffix[1:])]
        grad, update, param = norm(p.grad for p, _ in chosen), norm(p.detach() - old for p, old in chosen), norm(old for _, old in chosen)
        values = {"grad_norm": grad, "update_norm": update, "param_norm": param, "update_ratio": update / param}
        own |= {name + suffix: value for name, value in values.items()}
    clip = {} if bound is None else {"clip_factor": min(1.0, bound / (own["grad_norm"] + 1e-6))}
    return own | clip | {"skipped": 0.0, "skipped_steps": 0.0}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_metrics_equal_those_of_torch(maker, bound, broken):
    """The broken variant looks at the parameters of another step."""
    params = parameters()
    optimizer = MAKERS[maker](params, max_grad_norm=bound, metrics=True)
    assert optimizer.metrics() == {}
    for step in range(3):
        give(params, step)
        before = [p.detach().clone() for _, p in params]
        optimizer.step()
    if broken:
        give(params, 7)
    found, wanted = optimizer.metrics(), expected(params, before, bound)
    assert found.keys() == wanted.keys()
    assert all(type(value) is float for value in found.values())
    assert json.loads(json.dumps(found)) == found
    far = [name for name, value in wanted.items() if abs(found[name] - value) > 1e-5 * abs(value)]
    assert bool(far) is broken, far


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_grad_norm_is_what_torchs_clipping_returns(dtype):
    params = parameters(dtype, shapes=[(6, 5), (5,), (1,)])
    copies = [torch.nn.Parameter(p.detach().double() if dtype is torch.bfloat16 else p.detach().clone()) for _, p in params]
    optimizer = torch_api.MaskedSGD(params, lr=0.1, max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    for step in range(3):
        give(params, step)
        for q, (_, p) in zip(copies, params, strict=True):
            q.grad = p.grad.to(q.dtype)
        optimizer.step()
        theirs = torch.nn.utils.clip_grad_norm_(copies, 1.0)
        assert (optimizer.grad_norm.shape, optimizer.grad_norm.dtype) == ((), torch.float64)
        assert abs(float(optimizer.grad_norm) / float(theirs) - 1) < 1e-6
    kept = optimizer.grad_norm
    number = float(kept)
    give(params, 9, scale=100.0)
    optimizer.step()
    assert float(kept) == number  # a later step leaves the tensor alone
    assert float(optimizer.grad_norm) > 10 * number


def test_grad_norm_of_large_gradients_and_of_several_programs():
    params = parameters(shapes=[(1100, 1000), (300,), (7,)] + [(5 + i, 40) for i in range(80)])
    optimizer = torch_api.MaskedSGD(params, lr=0.1, max_grad_norm=1.0)
    give(params, 0)
    optimizer.step()
    assert abs(float(optimizer.grad_norm) / norm(p.grad for _, p in params) - 1) < 1e-6


@pytest.mark.quick
def test_only_trained_elements_count():
    params = parameters(shapes=[(4, 3), (5,), (6,)])
    mask = {"body.p0": torch.arange(12).reshape(4, 3) > 5, "head.p1": True, "body.p2": False}
    optimizer = torch_api.MaskedAdamW(params, lr=1e-2, mask=mask, max_grad_norm=1.0, metrics=True)
    give(params, 0)
    trained = [params[0][1].grad[mask["body.p0"]], params[1][1].grad]
    weights = norm([params[0][1][mask["body.p0"]], params[1][1]])
    params[2][1].grad.fill_(torch.nan)
    optimizer.step()
    assert abs(float(optimizer.grad_norm) / norm(trained) - 1) < 1e-6
    assert abs(optimizer.metrics()["grad_norm"] / norm(trained) - 1) < 1e-6
    assert abs(optimizer.metrics()["param_norm"] / weights - 1) < 1e-6


@pytest.mark.parametrize("bound", [None, 1.0])
def test_gradients_of_a_scaled_loss_are_unscaled_and_a_skipped_step_says_so(bound):
    params = parameters(shapes=[(4, 3), (5,)])
    optimizer = torch_api.MaskedAdamW(params, lr=1e-2, max_grad_norm=bound, metrics=True, fused=True)
    for step, found_inf in enumerate([0.0, 1.0, 0.0]):
        give(params, step, scale=8.0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
        optimizer.step()
        metrics = optimizer.metrics()
        assert abs(metrics["grad_norm"] / (norm(p.grad for _, p in params) / 8) - 1) < 1e-6
        assert metrics["skipped"] == found_inf
        assert metrics["skipped_steps"] == (step > 0)
        assert (metrics["update_norm"] == 0) is bool(found_inf)


@pytest.mark.quick
def test_labels_have_entries_of_their_own():
    params = parameters()
    split = {"fast": (optax.adam, {"lr": 1e-2}), "slow": (optax.sgd, {"lr": 1e-3})}
    optimizer = torch_api.PartitionedOptimizer(params, split, {"head": "fast", "body": "slow"}, metrics=True)
    give(params, 0)
    optimizer.step()
    for label, prefix in (("fast", "head"), ("slow", "body")):
        assert abs(optimizer.metrics()[f"grad_norm/{label}"] / norm(p.grad for n, p in params if n.startswith(prefix)) - 1) < 1e-6


def test_without_metrics_nothing_is_computed_and_the_error_says_what_to_do():
    params = parameters()
    plain, other = torch_api.MaskedAdamW(params, lr=1e-2), torch_api.MaskedAdamW(parameters(), lr=1e-2, metrics=True)
    for optimizer in (plain, other):
        give([("", p) for group in optimizer.param_groups for p in group["params"]], 0)
        optimizer.step()
    assert plain.grad_norm is None
    with pytest.raises(RuntimeError, match=r"MaskedAdamW.metrics: no metrics are computed. Construct the optimizer with metrics=True."):
        plain.metrics()
    assert plain.bytes_accessed() < other.bytes_accessed()
    for p, q in zip(plain.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)  # metrics change no bit of the update


def test_metrics_add_few_bytes_an_element():
    size, counts = 1 << 18, []
    for options in ({}, {"metrics": True}):
        params = parameters(shapes=[(size,)])
        optimizer = torch_api.MaskedAdamW(params, lr=1e-2, **options)
        give(params, 0)
        optimizer.step()
        counts.append(optimizer.bytes_accessed())
    bound = 24.5 if jax.__version_info__ >= (0, 10) else 41.0  # 40.8 with jaxlib 0.8.0, the oldest that is supported
    assert counts[0] < counts[1] <= counts[0] + bound * size


@pytest.mark.quick
def test_a_step_without_gradients_has_norm_0_and_a_copy_begins_anew():
    params = parameters(shapes=[(4, 3)])
    optimizer = torch_api.MaskedAdamW(params, lr=1e-2, max_grad_norm=1.0, metrics=True)
    give(params, 0)
    optimizer.step()
    assert copy.deepcopy(optimizer).grad_norm is None
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="updated nothing"):
        optimizer.step()
    assert float(optimizer.grad_norm) == 0
    assert optimizer.metrics()["grad_norm"] == 0


@pytest.mark.parametrize("bound", [None, 0.5])
def test_train_step_has_both(bound):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    other = copy.deepcopy(model)
    options = {"lr": 1e-2, "max_grad_norm": bound, "metrics": True}
    eager, compiled = (torch_api.MaskedAdamW(m.named_parameters(), **options) for m in (model, other))
    step = torch_api.JaxTrainStep(other, lambda m, x: m(x).square().mean(), compiled)
    assert step.grad_norm is None
    for seed in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        eager.zero_grad()
        model(x).square().mean().backward()
        eager.step()
        step(x)
        assert abs(float(step.grad_norm) / float(eager.grad_norm) - 1) < 1e-5
        ours, theirs = step.metrics(), eager.metrics()
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)


def test_warm_steps_with_metrics_compile_nothing():
    params = parameters()
    optimizer = torch_api.MaskedAdamW(by_group(params), lr=1e-2, max_grad_norm=1.0, metrics=True)
    counts = []
    for step in range(4):
        give(params, step)
        optimizer.step()
        optimizer.metrics()
        counts.append((bridge.compilations(), bridge.traces()))
    assert len(set(counts)) == 1
