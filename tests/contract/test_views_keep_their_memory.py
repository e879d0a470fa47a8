"""Tensors over jax's memory keep their values whatever other code does with the arrays that `jax.live_arrays()` returns.

Each case runs with MALLOC_PERTURB_ of glibc, which overwrites freed memory, so that a dangling view shows wrong values.
"""

import os
import subprocess
import sys
import threading

import jax
import pytest
import torch
from sampling import sampled

import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

COMMON = """
import gc
import jax
import numpy as np
import torch
import torch_api

def twins(dtype=torch.float32, shapes=((300, 300), (7,), (6, 6), (6, 6), (6, 6), (6, 6))):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    return params, torch_api.MaskedAdamW(params, lr=0.01), others, torch_api.MaskedAdamW(others, lr=0.01)

def step(params, optimizer, others, oracle):
    for p, q in zip(params, others):
        p.grad = torch.randn(p.shape).to(p.dtype)
        q.grad = p.grad.clone()
    optimizer.step()
    oracle.step()

def views(params, optimizer):
    state = [x for p in params for x in optimizer.state[p].values() if x.ndim]
    return [p.detach() for p in params] + state

def delete(wanted):
    for array in jax.live_arrays():
        if not array.is_deleted() and (wanted is None or array.unsafe_buffer_pointer() in wanted):
            array.delete()
    gc.collect()

def same(found, expected):
    assert all(map(torch.equal, found, expected)), [int((a != b).sum()) for a, b in zip(found, expected)]
"""

HELD = """
for hold in (lambda x: np.asarray(x) if x.dtype.kind != "V" else torch.from_dlpack(x), torch.from_dlpack, memoryview):
    all_four = params, optimizer, others, oracle = twins()
    for _ in range(3):
        step(*all_four)
        seen = views(params, optimizer)
        held = [hold(array) for array in jax.live_arrays()]
        step(*all_four)
        before = [x.clone() for x in seen]
        del held
        gc.collect()
        same(seen, before)
        same(params, others)
"""

DELETED = """
params, optimizer, others, oracle = twins()
before = [p.detach().clone() for p in params]
delete(None)
same(params, before)
for dtype in (torch.float32, torch.bfloat16):
    all_four = params, optimizer, others, oracle = twins(dtype)
    for _ in range(3):
        step(*all_four)
        seen = views(params, optimizer)
        before = [x.clone() for x in seen]
        delete({x.data_ptr() for x in seen} | {p.data_ptr() for p in params})
        same(seen, before)
        step(*all_four)
        same(params, others)
        kept = [x.clone() for x in seen]
        gc.collect()
        same(seen, kept)
"""

TRAIN_STEP = """
def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3))
    model[2].weight.requires_grad_(False)
    optimizer = torch_api.MaskedAdam(model.named_parameters(), lr=0.01)
    return model, torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)

(model, train_step), (other, oracle) = made(), made()
for _ in range(3):
    x = torch.randn(8, 64)
    assert train_step(x) == oracle(x)
    seen = [*model.state_dict().values()]
    before = [v.clone() for v in seen]
    delete({v.data_ptr() for v in seen})
    same(seen, before)
    x = torch.randn(8, 64)
    assert train_step(x) == oracle(x)
    same(model.state_dict().values(), other.state_dict().values())
    seen = [*model.state_dict().values()]
    held = [np.asarray(array) for array in jax.live_arrays() if array.unsafe_buffer_pointer() in {v.data_ptr() for v in seen}]
    x = torch.randn(8, 64)
    assert train_step(x) == oracle(x)
    before = [v.clone() for v in seen]
    del held
    gc.collect()
    same(seen, before)
    same(model.state_dict().values(), other.state_dict().values())
"""

CASES = {
    "held over a step": HELD,
    "deleted": DELETED,
    "in a train step": TRAIN_STEP,
}


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can overwrite freed memory")
@pytest.mark.parametrize("case", sampled(CASES.values(), CASES))
def test_views_never_read_freed_memory(case):
    command = [sys.executable, "-W", "ignore", "-c", COMMON + case]
    done = subprocess.run(command, env={**os.environ, "MALLOC_PERTURB_": "165"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_live_arrays_may_be_listed_while_another_thread_steps():
    params = [torch.nn.Parameter(torch.zeros(40)) for _ in range(20)]
    optimizer = torch_api.MaskedSGD(params, lr=1.0)
    for p in params:
        p.grad = torch.ones(40)
    optimizer.step()
    errors, done = [], threading.Event()

    def listing():
        while not done.is_set():
            try:
                jax.live_arrays()
            except RuntimeError as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=listing)
    thread.start()
    try:
        for _ in range(60):
            optimizer.step()
            other = torch.nn.Parameter(torch.zeros(3))
            other.grad = torch.ones(3)
            torch_api.MaskedSGD([other], lr=1.0).step()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert all(torch.equal(p, torch.full((40,), -61.0)) for p in params)
