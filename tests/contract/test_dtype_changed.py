"""`model.to(dtype)` between steps: parameters are updated in the new dtype, and their state is kept."""

import copy

import optax
import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized

PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]


def build(dtype):
    torch.manual_seed(0)
    return torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(4)]).to(dtype)


def step(model, opt, scale=0.1):
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, scale * (1 + i % 3))
    opt.step()


def movement(make, before, after, parts=slice(None), reload=False):
    """Return the movement of each parameter's first element in two steps after the change of dtype."""
    model = build(before)
    opt = make(list(model.named_parameters()))
    step(model, opt)
    model[parts].to(after)
    if reload:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    start = [p.detach().flatten()[0].item() for p in model.parameters()]
    step(model, opt)
    step(model, opt, 0.2)
    assert all(p.dtype == p.grad.dtype for p in model.parameters())
    return torch.tensor([p.detach().flatten()[0].item() - s for p, s in zip(model.parameters(), start, strict=True)])


@pytest.mark.parametrize(("name", "before", "after"), [("SGD", *pair) for pair in PAIRS] + [("RMSprop", *pair) for pair in PAIRS[:2]])
def test_parameters_move_as_in_torch_after_a_change_of_dtype(name, before, after):
    options = {"momentum": 0.9} if name == "SGD" else {}
    ours, theirs = getattr(torch_api, f"Masked{name}"), getattr(torch.optim, name)
    expected = movement(lambda params: theirs(params, lr=0.1, **options), before, after)
    got = movement(lambda params: ours(params, lr=0.1, **options), before, after, reload=name == "RMSprop")
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.004)


MAKE = {
    "adamw, clipped": lambda params: torch_api.MaskedAdamW(params, lr=0.1, max_grad_norm=1.0, ema_decay=0.9, master_weights=True),
    "chain": lambda params: torch_api.OptaxOptimizer(params, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("name", "parts"), [("adamw, clipped", slice(0, 2)), ("chain", slice(None))])
def test_change_of_dtype_does_not_alter_the_movement(name, parts):
    expected = movement(MAKE[name], torch.float32, torch.float32)
    got = movement(MAKE[name], torch.float32, torch.bfloat16, parts)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.004)


def test_gradient_of_the_old_dtype_raises_and_names_both_dtypes():
    model = build(torch.float32)
    opt = torch_api.MaskedRMSprop(list(model.named_parameters()), lr=0.1)
    step(model, opt)
    before = [p.clone() for p in model.parameters()]
    model[1].weight.grad_dtype = None  # torch then accepts a gradient of any dtype
    model[1].weight.data = model[1].weight.data.double()
    with pytest.raises(ValueError, match=r"(?s)1\.weight.*float32.*float64"):
        opt.step()
    assert all(torch.equal(p.float(), q) for p, q in zip(model.parameters(), before, strict=True))
    step(model, opt)
    assert all(float(opt.state[p]["step"]) == 2.0 for p in model.parameters())


@pytest.mark.usefixtures("unoptimized_training")
def test_train_step_moves_alike_after_a_change_of_dtype():
    def train(change):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        opt = torch_api.MaskedAdamW(model.parameters(), lr=0.1)
        train_step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), opt)
        x = torch.ones(2, 6)
        train_step(x)
        if change:
            model.to(torch.float64)
            x = x.double()
        train_step(x)
        train_step(x)
        return [p.detach().double() for p in model.parameters()]

    for p, q in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
