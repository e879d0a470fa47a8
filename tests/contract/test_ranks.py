"""After `jax.distributed.initialize` each process steps independently on its own device."""

import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unoptimized

WORKER = """
import sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import bridge
import torch
import torch_api
assert jax.process_count() == 2
rank = jax.process_index()
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
optimizer = torch_api.MaskedAdamW(model.parameters(), lr=0.1, weight_decay=0.0)
before = [p.detach().clone() for p in model.parameters()]
for _ in range(2):
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.0 + rank)
    optimizer.step()
assert all(torch.allclose(p, old - 0.2, atol=1e-3) for p, old in zip(model.parameters(), before))
step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)
loss = step(torch.full((5, 4), 1.0 + rank))
assert loss.isfinite() and loss > 0
x = torch.ones(64, requires_grad=True)
bridge.jax_function(jax.numpy.sin)(x).sum().backward()
torch.testing.assert_close(x.grad, torch.ones(64).cos())
assert bridge.to_torch(bridge.to_jax(torch.ones(64))).tolist() == [1.0] * 64
assert bridge.to_jax(torch.ones(64)).devices() == {jax.local_devices()[0]}
print("whole", rank)
"""


def test_two_processes_step_independently():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    commands = [[sys.executable, "-W", "ignore", "-c", WORKER, port, str(rank)] for rank in range(2)]
    workers = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        outputs = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [out.strip() for out, _ in outputs] == ["whole 0", "whole 1"], [err[-2000:] for _, err in outputs]
