"""The device paths: skipped where jax or torch sees no GPU. Run with MASKBRIDGE_TEST_GPU=1 pytest -m gpu."""

import os

import pytest
import torch
from oracles import SHAPES, movement_error, random_grads, set_grads

import bridge
import torch_api

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (os.environ.get("MASKBRIDGE_TEST_GPU") and torch.cuda.is_available()), reason="no GPU asked for, or none there"),
]


def on_gpu(dtype=torch.float32):
    return [torch.nn.Parameter((torch.randn(shape) * 0.1).to("cuda", dtype)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_tensors_travel_without_a_copy(dtype):
    tensor = torch.randn(64, device="cuda").to(dtype)
    array = bridge.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == bridge.to_torch(array).data_ptr()


@pytest.mark.parametrize("writeback", ["inplace", "copy"])
def test_fifty_steps_move_as_torch_moves(writeback):
    ours = on_gpu()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    a = torch_api.MaskedAdamW(ours, lr=0.01, max_grad_norm=1e6, writeback=writeback)
    b = torch.optim.AdamW(theirs, lr=0.01)
    addresses = [p.data_ptr() for p in ours]
    for _ in range(50):
        grads = random_grads(ours)
        set_grads(ours, grads)
        set_grads(theirs, grads)
        a.step()
        b.step()
    assert max(map(movement_error, ours, theirs, start)) < 1e-5
    assert addresses == [p.data_ptr() for p in ours]


def test_gradients_may_be_freed_while_a_slow_kernel_still_runs():
    p = torch.nn.Parameter(torch.zeros(1 << 24, device="cuda"))
    q = torch.nn.Parameter(p.detach().clone())
    ours, theirs = torch_api.MaskedSGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    slow = torch.randn(8192, 8192, device="cuda")
    for _ in range(50):
        slow = (slow @ slow).clamp(-1, 1)
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        p.grad = None
        torch.full_like(p, float("nan"))
    assert torch.equal(p, q)


def test_a_scaled_loss_is_skipped_on_the_device_and_nothing_waits():
    ours = on_gpu()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    optimizers = torch_api.MaskedAdamW(ours, lr=0.01, fused=True), torch.optim.AdamW(theirs, lr=0.01, fused=True)
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in optimizers]
    for step in range(20):
        grads = [g * 1024 for g in random_grads(ours)]
        if step == 7:
            grads[0][0] = torch.inf
        for params, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            set_grads(params, grads)
            scaler.scale(torch.zeros((), device="cuda"))
            if step:  # the first step compiles
                torch.cuda.set_sync_debug_mode("error")
            scaler.step(optimizer)
            torch.cuda.set_sync_debug_mode("default")
            scaler.update(1024.0)
    assert optimizers[0].skipped_steps == 1
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


@pytest.mark.parametrize(
    "options", [{"master_weights": True}, {"stochastic_rounding": True}, {"ema_decay": 0.9}], ids=lambda o: next(iter(o))
)
def test_what_is_kept_beside_the_state_lies_on_the_device(options):
    params = on_gpu(torch.bfloat16)
    optimizer = torch_api.MaskedAdam(params, lr=0.01, state_dtype=torch.float32, **options)
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    assert all(t.is_cuda for state in optimizer.state.values() for t in state.values())
    assert all(torch.isfinite(p).all() for p in params)


def test_scalars_of_state_stay_on_the_device():
    params = [torch.nn.Parameter(torch.randn(300, 300, device="cuda")) for _ in range(4)]
    optimizer = torch_api.MaskedAdamW(params, lr=1e-3)
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    counts = [optimizer.state[p]["step"] for p in params]
    assert all(count.is_cuda and int(count) == 3 for count in counts)
