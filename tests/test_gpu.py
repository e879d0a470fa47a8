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
