"""What editors and type checkers see of the optimizers: signatures, and mistakes in a script of a user."""

import importlib.metadata
import importlib.util
import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch

import bridge
import maskbridge
import torch_api

ROOT = Path(__file__).parents[2]

SCRIPT = """
import functools

import jax
import jax.numpy as jnp
import optax
import torch
from jax.typing import ArrayLike

import bridge
import maskbridge
import torch_api


def untyped(x, axis=0):
    return jnp.sum(x, axis)


def of_arrays(x: jax.Array, axis: int = 0) -> jax.Array:
    return x.sum(axis)


def of_array_likes(x: ArrayLike) -> tuple[jax.Array, jax.Array]:
    return jnp.sin(x), jnp.cos(x)


def of_unknown_result(params):
    return params.apply(params)


@bridge.jax_function
def decorated(x, y):
    return x @ y


model = torch.nn.Linear(4, 2)
good = torch_api.MaskedAdamW(model.named_parameters(), lr=1e-3, mask="weight", decay_mask=["weight"], max_grad_norm=1.0, ema_decay=0.9)
torch_api.OptaxOptimizer(model.named_parameters(), optax.adam(1e-3), writeback="copy", lr_scale={"weight": 0.1})
torch_api.OptaxOptimizer(model.parameters(), optax.adamw, lr=1e-3, state_dtype=torch.bfloat16)
torch_api.OptaxOptimizer(model.parameters(), bridge.Adam(learning_rate=1e-3))
torch_api.MaskedLion([{"params": model.parameters(), "lr": 0.1}], lr=1e-3, betas=(0.9, 0.99), mask=lambda name, p: p.ndim > 1)
torch_api.MultiOptimizer(model.named_parameters(), ("*.bias", bridge.Momentum(learning_rate=0.1)), state_dtype=torch.float32)
torch_api.MaskedSGD(model.parameters(), learning_rate=0.1)
torch_api.MultiOptimizer(model.named_parameters(), ("*.bias", bridge.rules.sgd(lr=0.1)), mask="weight")
good.set_trainable("weight", False)
bridge.to_jax(torch.ones(3)).block_until_ready()
bridge.to_torch(bridge.to_jax(torch.ones(3))).numpy()
maskbridge.MultiOptimizer(model.named_parameters(), ("*.bias", maskbridge.Momentum(learning_rate=0.1))).step()

bridge.jax_function(untyped)(torch.ones(3), axis=0).sum()
bridge.jax_function(of_arrays)(torch.ones(3), axis=0).backward()
first, second = bridge.jax_function(of_array_likes, x64=True)(torch.ones(3))
first.backward()
bridge.jax_function(of_unknown_result)(model)["loss"].backward()
bridge.jax_function(jnp.sin)(torch.ones(3)).backward()
bridge.jax_function(jax.nn.gelu)(torch.ones(3)).backward()
bridge.jax_function(jax.jit(of_arrays))(torch.ones(3)).backward()
bridge.jax_function(functools.partial(of_arrays, axis=0))(torch.ones(3)).backward()
bridge.jax_function(lambda params: params["w"] * 2)({"w": torch.ones(3)}).backward()
decorated(torch.ones(3), y=torch.ones(3)).backward()


def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def with_aux(model, x: torch.Tensor):
    return model(x).sum(), {"accuracy": x.mean()}


torch_api.JaxTrainStep(model, loss_fn, good)(torch.ones(2, 4)).item()
loss, aux = torch_api.JaxTrainStep(model, with_aux, good, accumulate=2, has_aux=True)(torch.ones(2, 4))
loss.item(), aux["accuracy"]
torch_api.JaxTrainStep(model, loss_fn, good, 1, False)({"x": torch.ones(2, 4)}, value=1.0).item()

torch_api.MaskedAdamW(model.parameters(), max_grad_nrom=1.0)  # mistake
torch_api.MaskedAdamW(model.parameters(), ema_decay="0.9")  # mistake
torch_api.MaskedAdamW(model.parameters(), mask=3.5)  # mistake
torch_api.MaskedAdamW(model)  # mistake
torch_api.OptaxOptimizer(model.parameters(), 3)  # mistake
torch_api.MaskedSGD(model.parameters(), writeback="fast")  # mistake
good.set_trainable("weight", "yes")  # mistake
bridge.to_jax(torch.ones(3)).numpy()  # mistake
maskbridge.MaskedAdamW(model.parameters(), max_grad_nrom=1.0)  # mistake
maskbridge.to_jax(torch.ones(3)).numpy()  # mistake
bridge.jax_function(of_arrays)(torch.ones(3)).block_until_ready()  # mistake
bridge.jax_function(3)  # mistake
torch_api.JaxTrainStep(model, loss_fn, good)(torch.ones(2, 4))["loss"]  # mistake
torch_api.JaxTrainStep(model, with_aux, good, has_aux=True)(torch.ones(2, 4)).item()  # mistake
torch_api.JaxTrainStep(model, loss_fn, torch.optim.SGD(model.parameters()))  # mistake
"""
MISTAKES = [number for number, line in enumerate(SCRIPT.split("\n"), 1) if line.endswith("# mistake")]
CHECKERS = {
    "pyright": ["-m", "pyright", "--pythonpath", sys.executable],
    "mypy": ["-m", "mypy", "--python-executable", sys.executable, "--cache-dir", "cache"],
}


@pytest.mark.parametrize("checker", [pytest.param("pyright", marks=pytest.mark.quick), pytest.param("mypy", marks=pytest.mark.nightly)])
def test_checker_finds_the_mistakes_of_a_user_and_nothing_else(checker, tmp_path):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "user.py").write_text(SCRIPT)
    environment = {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *CHECKERS[checker], "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
    found = {int(line) for line in re.findall(r"user\.py:(\d+)(?::\d+)?(?: -|:) error: (?!Skipping)", done.stdout)}
    assert found == set(MISTAKES), done.stdout


SHARED = [
    "mask",
    "decay_mask",
    "lr_scale",
    "max_grad_norm",
    "writeback",
    "state_dtype",
    "master_weights",
    "stochastic_rounding",
    "ema_decay",
]
MASKED = [name for name in torch_api.__all__ if name.startswith("Masked")]


@pytest.mark.quick
@pytest.mark.parametrize("name", MASKED)
def test_signature_and_help_show_the_shared_arguments(name):
    cls = getattr(torch_api, name)
    shown = inspect.signature(cls).parameters
    assert [argument for argument in SHARED if argument not in shown] == []
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
    general = inspect.signature(torch_api.OptaxOptimizer).parameters
    assert {argument: shown[argument].default for argument in SHARED} == {argument: general[argument].default for argument in SHARED}
    text = pydoc.render_doc(cls)
    assert all(word in text for word in ("mask", "max_grad_norm", "ema_decay"))


@pytest.mark.quick
def test_every_argument_that_a_signature_shows_is_taken():
    p = torch.nn.Parameter(torch.zeros(4, 4))
    for name in MASKED:
        cls = getattr(torch_api, name)
        shown = {k: v.default for k, v in inspect.signature(cls).parameters.items() if k not in ("params", "betas")}
        given = {k: 1e-3 if default is inspect.Parameter.empty else default for k, default in shown.items()}
        cls([("w", p)], **given)


@pytest.mark.quick
def test_jax_function_shows_the_signature_of_its_function():
    def scaled(x: jax.Array, *, factor: float = 2.0) -> jax.Array:
        """Scale."""
        return x * factor

    function = bridge.jax_function(scaled)
    assert inspect.signature(function) == inspect.signature(scaled)
    assert inspect.getdoc(function) == "Scale."


@pytest.mark.quick
def test_class_of_a_user_keeps_its_own_signature():
    class Mine(torch_api.MaskedSGD):
        def __init__(self, params, warmup, **engine):
            super().__init__(params, **engine)

    assert list(inspect.signature(Mine).parameters) == ["params", "warmup", "engine"]


@pytest.mark.quick
@pytest.mark.parametrize("package", [bridge, maskbridge, torch_api])
def test_packages_have_a_version_and_list_public_names_only(package):
    assert package.__version__ == importlib.metadata.version("maskbridge")
    listed = [name for name in dir(package) if not re.fullmatch(r"__\w+__", name)]
    assert listed == sorted(package.__all__)


@pytest.mark.nightly
def test_editable_install_is_visible_to_type_checkers(tmp_path):
    """It needs a package index, for the build backend."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT)], check=True)
    (tmp_path / "user.py").write_text("import bridge\nimport maskbridge\nimport torch_api\nimport no_such_package\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", str(python), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    missing = re.findall(r'user\.py.*Import "(\w+)" could not be resolved', done.stdout)
    assert missing == ["no_such_package"], done.stdout
