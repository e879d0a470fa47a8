"""Gradients with another dtype than their parameters (`p.grad_dtype`): arithmetic is float32, and the result is rounded once."""

import warnings

import optax
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.unoptimized, pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")]
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
ALONE, PACKED, MIXED = [(3, 50)], [(4, 5)] * 6, [(300, 200), (7,), (7,), (7,), (7,), ()]
WIDE = {"state_dtype": FLOAT32}


def parameters(shapes, dtype, gradient_dtype):
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in made:
        p.grad_dtype = gradient_dtype
    return made


def give_gradients(ps, nth, dtype=FLOAT32):
    generator = torch.Generator().manual_seed(nth)
    for p in ps:
        p.grad = (torch.randn(p.shape, generator=generator) / 3).to(dtype)


def check(ours, optimizer, make_twin, steps=3):
    """Compare each step with a step of float32 parameters that start at the same rounded values."""
    twins = [torch.nn.Parameter(p.detach().float()) for p in ours]
    twin = make_twin(twins)
    for nth in range(steps):
        give_gradients(ours, nth)
        give_gradients(twins, nth)
        for p, q in zip(ours, twins, strict=True):
            q.data.copy_(p.detach())
        optimizer.step()
        twin.step()
        for p, q in zip(ours, twins, strict=True):
            error = (p.detach().float() - q.detach()).abs()
            assert (error <= q.detach().abs() * 2**-8 + 1e-6).all()  # half a unit of bfloat16
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], twin.state[q]["exp_avg"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shapes", [ALONE, PACKED, MIXED], ids=["alone", "packed", "mixed"])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_adamw_of_half_parameters_takes_float32_gradients(dtype, shapes):
    if dtype is torch.float16 and shapes is not PACKED:
        pytest.skip("one is enough")
    ps = parameters(shapes, dtype, FLOAT32)
    check(ps, torch_api.MaskedAdamW(ps, lr=0.1, **WIDE), lambda twins: torch.optim.AdamW(twins, lr=0.1))


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_parameters_move_as_in_torch(name):
    ours, theirs = parameters(PACKED, BFLOAT16, FLOAT32), parameters(PACKED, BFLOAT16, FLOAT32)
    optimizer, twin = getattr(torch_api, f"Masked{name}")(ours, lr=0.1), getattr(torch.optim, name)(theirs, lr=0.1)
    for nth in range(3):
        for ps, each in ((ours, optimizer), (theirs, twin)):
            give_gradients(ps, nth)
            each.step()
    for p, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, expected, rtol=0.02, atol=0.02)


def test_clipping_reads_gradients_in_full_precision():
    ps = parameters(MIXED, BFLOAT16, FLOAT32)
    twins = [torch.nn.Parameter(p.detach().float()) for p in ps]
    give_gradients(twins, 0)
    norm = torch.nn.utils.clip_grad_norm_(twins, 1.0)
    assert norm > 1
    torch.optim.SGD(twins, lr=1.0).step()
    give_gradients(ps, 0)
    torch_api.MaskedSGD(ps, lr=1.0, max_grad_norm=1.0).step()
    for p, q in zip(ps, twins, strict=True):
        assert (p.detach() == q.detach().to(BFLOAT16)).float().mean() > 0.95


def test_joint_transformation_takes_float32_gradients():
    ps, twins = parameters(PACKED, BFLOAT16, FLOAT32), parameters(PACKED, FLOAT32, FLOAT32)
    for p, q in zip(ps, twins, strict=True):
        q.data.copy_(p.detach())
    for each in (ps, twins):
        give_gradients(each, 0)
        torch_api.OptaxOptimizer(each, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))).step()
    for p, q in zip(ps, twins, strict=True):
        torch.testing.assert_close(p.detach(), q.detach().to(BFLOAT16), rtol=2**-7, atol=1e-3)


def test_other_pairs_of_dtypes_are_computed_in_float32():
    for dtype, gradient_dtype in ((FLOAT32, BFLOAT16), (torch.float16, BFLOAT16)):
        ps = parameters(PACKED, dtype, gradient_dtype)
        twins = [torch.nn.Parameter(p.detach().float()) for p in ps]
        give_gradients(ps, 0, gradient_dtype)
        for p, q in zip(ps, twins, strict=True):
            q.grad = p.grad.float()
        torch_api.MaskedAdamW(ps, lr=0.1).step()
        torch.optim.AdamW(twins, lr=0.1).step()
        for p, q in zip(ps, twins, strict=True):
            torch.testing.assert_close(p.detach(), q.detach().to(dtype), rtol=2e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch_api.CompilationWarning")
def test_gradient_dtype_may_change_between_steps():
    ps, twins = parameters(MIXED, BFLOAT16, None), parameters(MIXED, FLOAT32, None)
    for p, q in zip(ps, twins, strict=True):
        q.data.copy_(p.detach())
    for each in (ps, twins):
        optimizer = torch_api.MaskedSGD(each, lr=0.1, momentum=0.9)
        for nth, dtype in enumerate([BFLOAT16, FLOAT32, BFLOAT16]):
            give_gradients(each, nth, dtype)
            if nth == 1:
                each[1].grad = each[1].grad.to(BFLOAT16)
            optimizer.step()
    for p, q in zip(ps, twins, strict=True):
        torch.testing.assert_close(p.detach().float(), q.detach(), rtol=0.02, atol=0.02)


def test_gradient_dtype_may_change_in_a_refused_step():
    ps, twins = parameters(PACKED, BFLOAT16, None), parameters(PACKED, BFLOAT16, None)
    optimizer, twin = torch_api.MaskedSGD(ps, lr=0.1), torch.optim.SGD(twins, lr=0.1)
    for nth, dtype in enumerate([BFLOAT16, FLOAT32]):
        for each in (ps, twins):
            give_gradients(each, nth, dtype)
        if nth == 1:
            good, ps[-1].grad = ps[-1].grad, torch.ones(4, 5, dtype=torch.float64)
            with pytest.raises(ValueError, match="float64"):
                optimizer.step()
            ps[-1].grad = good
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch_api.CompilationWarning)
            optimizer.step()
        twin.step()
    for p, expected in zip(ps, twins, strict=True):
        torch.testing.assert_close(p, expected, rtol=2**-7, atol=1e-3)


def test_float64_gradient_of_a_bfloat16_parameter_is_refused():
    (p,) = parameters(ALONE, BFLOAT16, None)
    optimizer, before = torch_api.MaskedSGD([("w", p)], lr=0.1), p.detach().clone()
    p.grad = torch.ones(p.shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'w'.*float64.*bfloat16"):
        optimizer.step()
    torch.testing.assert_close(p.detach(), before, rtol=0, atol=0)


def test_train_step_accumulates_in_the_dtype_of_the_gradient():
    x, movements = torch.linspace(-1, 1, 24).view(2, 12), []
    for dtype, accumulate in ((BFLOAT16, 3), (FLOAT32, 3), (FLOAT32, 4)):
        torch.manual_seed(0)
        model = torch.nn.Linear(12, 3).to(BFLOAT16)
        start = [p.detach().float() for p in model.parameters()]
        for p in model.parameters():
            p.grad_dtype = dtype
        optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=4.0, master_weights=True)
        step = torch_api.JaxTrainStep(model, lambda model, x: model(x).float().square().mean(), optimizer, accumulate=accumulate)
        for nth in range(3):
            step((x * (nth + 1)).to(BFLOAT16))
        step.flush()
        movements.append([optimizer.state[p]["master_param"] - before for p, before in zip(model.parameters(), start, strict=True)])
    for rounded, summed, flushed in zip(*movements, strict=True):
        torch.testing.assert_close(summed, flushed, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rounded, summed, rtol=0.01, atol=0.01)
        assert not torch.equal(rounded, summed)
