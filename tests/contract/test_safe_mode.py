"""MASKBRIDGE_SAFE=1: optimizers update torch's own memory, and get the numbers of torch.optim."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = """
import jax.numpy as jnp
import optax
import torch

import bridge
import torch_api

torch.manual_seed(0)
SHAPES = [(200, 300)] * 3 + [(16, 8, 3, 3)] + [(7,)] * 20 + [()]


def parameters():
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    params[3].data = params[3].data.to(memory_format=torch.channels_last)
    return params


def moved(params, start):
    return torch.cat([(p.detach() - s).double().reshape(-1) for p, s in zip(params, start)])


def compare(name, make, other, clip=None):
    ours, theirs = parameters(), parameters()
    with torch.no_grad():
        for p, q in zip(ours, theirs):
            q.copy_(p)
    start, addresses = [p.detach().clone() for p in ours], [p.data_ptr() for p in ours]
    optimizer, peer = make(ours), other(theirs)
    for _ in range(20):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        optimizer.step()
        peer.step()
    ours_moved, theirs_moved = moved(ours, start), moved(theirs, start)
    error = float((ours_moved - theirs_moved).norm() / theirs_moved.norm())
    state = [x for p in ours for x in optimizer.state[p].values() if isinstance(x, torch.Tensor)]
    print(name, "error", error < 1e-5, error)
    print(name, "addresses", addresses == [p.data_ptr() for p in ours])
    print(name, "torch", all(x.untyped_storage().resizable() for x in (*ours, *state) if x.numel()))
    print(name, "reason", all("MASKBRIDGE_SAFE" in row["write-back"] for row in optimizer.report().rows) if SAFE else True)


SAFE = __import__("os").environ.get("MASKBRIDGE_SAFE") == "1"
compare("adamw", lambda p: torch_api.MaskedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01))
clipped = lambda p: torch_api.MaskedSGD(p, lr=0.1, momentum=0.9, max_grad_norm=0.5)
compare("clipped", clipped, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0.5)
compare("optax", lambda p: torch_api.OptaxOptimizer(p, optax.adam(0.01)), lambda p: torch.optim.Adam(p, lr=0.01))
print(bridge.doctor())
"""


def run(safe):
    environment = {k: v for k, v in os.environ.items() if k != "MASKBRIDGE_SAFE"} | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env=environment | ({"MASKBRIDGE_SAFE": "1"} if safe else {}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("safe", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["safe", "as usual"])
def test_safe_mode_moves_as_torch_in_memory_of_torch(safe):
    """Without the variable the memory is jax's, so the assertions can fail."""
    text = run(safe)
    found = dict(re.findall(r"^(\w+ \w+) (True|False)", text, re.M))
    for name in ("adamw", "clipped", "optax"):
        assert found[f"{name} error"] == "True", text
        assert found[f"{name} addresses"] == found[f"{name} torch"] == str(safe), text
        assert found[f"{name} reason"] == "True", text
    assert ("MASKBRIDGE_SAFE" in text) is safe
