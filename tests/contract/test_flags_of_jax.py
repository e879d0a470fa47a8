"""jax flags that a user sets for their own jax code: maskbridge works under them, or raises as jax does."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

ROOT = Path(__file__).parents[2]

GUARDED = """
import sys, jax, numpy, torch, bridge, torch_api

jax.config.update("jax_platforms", "cuda")
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
if not torch.cuda.is_available():
    try:
        torch_api.MaskedSGD([p], lr=0.1).step()
    except RuntimeError as error:
        print(error)
jax.config.update("jax_platforms", "cpu")

jax.config.update("jax_transfer_guard", "disallow")
double = bridge.jax_function(lambda x: (x * 2 + numpy.float32(1)).sum())
x = torch.ones(3, requires_grad=True)
double(x).backward()
assert x.grad.tolist() == [2, 2, 2]
array = bridge.to_jax(torch.ones(64))
assert bridge.to_torch(array).sum() == 64
assert bridge.to_torch(bridge.to_jax(torch.ones(3, dtype=torch.bfloat16), copy=True)).sum() == 3
optimizer = torch_api.MaskedAdam([p], lr=0.5)
optimizer.step()
torch.testing.assert_close(p.detach(), torch.full((3,), 0.5))
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), torch_api.MaskedAdamW(model.named_parameters(), lr=0.1))
assert step(torch.randn(4, 3)) >= 0
fn = bridge.module_function(model.eval())
assert jax.jit(fn)(bridge.module_tree(model), bridge.to_jax(torch.ones(4, 3))).shape == (4, 3)
assert bridge.doctor(start=True).exit_code == 0

jax.config.update("jax_transfer_guard", "allow")
if jax.__version_info__ >= (0, 9):  # under a mesh, jax 0.8 refuses arguments that lie on one device
    jax.set_mesh(jax.make_mesh((2,), ("x",)))  # a mesh that a user sets for their own programs
triple = bridge.jax_function(lambda x: (x * 3).sum())
x.grad = None
triple(x).backward()
assert x.grad.tolist() == [3, 3, 3]
optimizer = torch_api.MaskedSGD([p], lr=0.5, momentum=0.9, max_grad_norm=100.0)
optimizer.step()
torch.testing.assert_close(p.detach(), torch.zeros(3))
model = torch.nn.Linear(3, 1)
step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), torch_api.MaskedSGD(model.named_parameters(), lr=0.01))
expected = model(torch.ones(4, 3)).square().mean().detach()
torch.testing.assert_close(step(torch.ones(4, 3)), expected)
"""


def test_cuda_only_platforms_transfer_guard_and_mesh_are_supported():
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "JAX_NUMPY_DTYPE_PROMOTION")}
    env |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    if not torch.cuda.is_available():
        assert "JAX_PLATFORMS is 'cuda'. Set JAX_PLATFORMS=cuda,cpu, or unset it" in done.stdout


def norms():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4), torch.nn.GELU())


@pytest.mark.usefixtures("unoptimized_training")
def test_modules_are_traced_without_rank_promotion():
    model, twin, x = norms(), norms(), torch.randn(2, 3)
    loss = twin(x).square().mean()
    loss.backward()
    params, function = bridge.module_tree(model), bridge.module_function(model)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    step = torch_api.JaxTrainStep(model, lambda model, x: jnp.mean(jnp.asarray(model(x)) ** 2), optimizer)
    with jax.numpy_rank_promotion("raise"):
        assert float(step(x)) == pytest.approx(loss.item(), rel=1e-4)
        jax.eval_shape(jax.grad(lambda params: jnp.mean(function(params, jnp.asarray(x.numpy()), train=True) ** 2)), params)
        with pytest.raises(ValueError, match="rank_promotion"):  # the flag still applies to the user's code
            torch_api.JaxTrainStep(model, lambda model, x: jnp.sum(jnp.asarray(model(x)) + jnp.ones(4)), optimizer)(x)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).detach(), (p - 0.1 * p.grad).detach(), rtol=1e-3, atol=1e-5)


CLASSES = sorted(name for name in vars(torch_api) if name.startswith("Masked"))


def test_every_class_works_without_promotion():
    """tests/conftest.py makes jax refuse to promote dtypes."""
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert len(CLASSES) > 15
    with jax.numpy_rank_promotion("raise"):
        for name in CLASSES:
            p = torch.nn.Parameter(torch.ones(4, 3))
            p.grad = torch.ones_like(p)
            optimizer = getattr(torch_api, name)([p], lr=0.01)
            for _ in range(2):
                optimizer.step()
            assert (p < 1).any(), name
            assert p.isfinite().all(), name
            optimizer.load_state_dict(optimizer.state_dict())


def test_jax_function_with_nan_raises_under_debug_nans():
    log = bridge.jax_function(jnp.log)
    assert log(torch.tensor([-1.0])).isnan().all()
    root = bridge.jax_function(lambda x: jnp.sqrt(x) * 0)
    x = torch.zeros(1, requires_grad=True)
    with jax.debug_nans(True):
        for _ in range(2):
            with pytest.raises(FloatingPointError, match=r"jax_function: result 0 of shape \(1,\) has NaN, and jax_debug_nans is on"):
                log(torch.tensor([-1.0]))
        out = root(x)
        assert log(torch.tensor([1.0])).item() == 0
        with pytest.raises(FloatingPointError, match="NaN"):
            out.backward()
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="infinity, and jax_debug_infs is on"):
        log(torch.tensor([0.0]))
    assert log(torch.tensor([-1.0])).isnan().all()


@pytest.mark.usefixtures("unoptimized_training")
def test_train_step_with_nan_raises_and_changes_nothing():
    """The NaN occurs in a call that only accumulates gradients, and in one that updates."""

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = torch_api.MaskedAdam(model.named_parameters(), lr=0.1, max_grad_norm=1.0, ema_decay=0.9)
        return model, optimizer, torch_api.JaxTrainStep(model, loss, optimizer, accumulate=2)

    def loss(model, x, factor):
        return (model(x).square() * factor).mean()

    def parts(model, optimizer):
        return jax.tree.leaves((model.state_dict(), optimizer.state_dict()["state"]), is_leaf=torch.is_tensor)

    x = torch.randn(4, 3)
    (model, optimizer, step), (twin, other, reference) = build(), build()
    for train in (step, reference):
        train(x, 1.0)
        train(x, 1.0)
    with jax.debug_nans(True):
        for pending in (0, 1):
            before = [value.clone() for value in parts(model, optimizer)]
            with pytest.raises(FloatingPointError, match=r"JaxTrainStep: the loss of shape \(\) has NaN.* Nothing was updated\."):
                step(x, float("nan"))
            for old, new in zip(before, parts(model, optimizer), strict=True):
                torch.testing.assert_close(new, old, rtol=0, atol=0)
            assert step.pending == pending
            step(x, 1.0)
            reference(x, 1.0)
    torch.testing.assert_close(parts(model, optimizer), parts(twin, other))
