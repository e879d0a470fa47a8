"""torch2jax is needed only to trace torch code; operators registered with it are used whether registered before or after the import."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

import bridge

pytestmark = pytest.mark.unoptimized

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch2jax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing = Missing()
sys.meta_path.insert(0, missing)
import jax, numpy, optax, torch, bridge, torch_api

def stepped(made):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = made(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return net

ours = stepped(lambda net: torch_api.MaskedAdamW(net.named_parameters(), lr=0.1))
theirs = stepped(lambda net: torch.optim.AdamW(net.parameters(), lr=0.1))
for p, q in zip(ours.parameters(), theirs.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
stepped(lambda net: torch_api.OptaxOptimizer(net.named_parameters(), optax.sgd(0.1)))
x = torch.ones(3, requires_grad=True)
bridge.jax_function(lambda x: jax.numpy.sin(x).sum())(x).backward()
torch.testing.assert_close(x.grad, x.detach().cos())
assert "torch2jax" not in sys.modules

before = [p.detach().clone() for p in ours.parameters()]
step = torch_api.JaxTrainStep(ours, lambda m, x: m(x).sum(), torch_api.MaskedSGD(ours.named_parameters(), lr=1.0))
for call in (lambda: bridge.module_function(ours)(bridge.module_tree(ours), jax.numpy.ones((4, 3))), lambda: step(torch.ones(4, 3))):
    try:
        call()
    except ImportError as error:
        assert "pip install 'torch2jax" in str(error), error
    else:
        raise AssertionError("not refused")
assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before))

sys.meta_path.remove(missing)
import torch2jax
class Special(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(torch.relu(torch.abs(x)))
torch2jax.implements(torch.special.bessel_j0)(lambda x: torch2jax._v(x) * 2)  # before the first trace
torch2jax.auto_implements(torch.relu, jax.numpy.negative)
torch2jax.auto_implements(torch.abs, jax.numpy.square)  # an operator that torch2jax implements itself
assert (bridge.module_function(Special())({}, 3 * jax.numpy.ones(2)) == -18).all()
step(torch.ones(4, 3))
assert not torch.equal(ours.weight, before[0])
"""


def test_optimizers_work_without_torch2jax_and_earlier_registrations_are_used():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def test_later_registrations_are_used_and_torch2jaxs_own_operators_are_not():
    torch2jax = pytest.importorskip("torch2jax")

    class Net(torch.nn.Module):
        def forward(self, x):
            # torch2jax's own flatten lacks end_dim, and its layer_norm rejects a one-element list.
            return torch.special.bessel_y0(torch.nn.functional.layer_norm(torch.flatten(x, 0, 1), [3]))

    fn, x = bridge.module_function(Net()), jnp.arange(12.0).reshape(2, 2, 3) ** 2
    with pytest.raises(NotImplementedError, match="bessel_y0"):
        jax.jit(fn)({}, x)
    drawn = []

    def twice(x):
        drawn.append(torch2jax.mk_rng())
        return torch2jax.Torchish(x.value * 2) + x * 0  # combines values of both types

    torch2jax.implements(torch.special.bessel_y0, Torchishify_output=False)(twice)
    try:
        found = jax.jit(fn)({}, x, rng=jax.random.key(0))
    finally:
        del torch2jax.HANDLED_FUNCTIONS[torch.special.bessel_y0]
    assert len(drawn) == 1
    expected = 2 * torch.nn.functional.layer_norm(bridge.to_torch(x, copy=True).reshape(4, 3), [3])
    assert jnp.allclose(found, bridge.to_jax(expected, copy=None), atol=1e-5)
    with pytest.raises(NotImplementedError, match="bessel_y0"):
        jax.jit(fn)({}, x + 1)
