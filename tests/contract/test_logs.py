"""The logs `maskbridge.plan`, `jaxpr`, `hlo`, `recompiles` and `memory`: turned on by logging or by MASKBRIDGE_LOGS."""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized, pytest.mark.usefixtures("unoptimized_training")]

ROOT = Path(__file__).parents[2]


def trained(shape, **options):
    """Return an optimizer of two parameters with gradients, and the parameters. Each test has a shape of its own, so that it compiles."""
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name in ("a", "b")}
    for p in params.values():
        p.grad = torch.ones_like(p)
    return torch_api.MaskedAdamW(params.items(), lr=0.1, **options), params


@pytest.fixture
def turned_on(caplog):
    """Return a function that turns on a log, for one test, and returns its messages."""

    def turn_on(name):
        caplog.set_level(logging.INFO, f"maskbridge.{name}")
        return lambda: [record.getMessage() for record in caplog.records if record.name == f"maskbridge.{name}"]

    return turn_on


def test_recompiles_names_optimizer_device_and_reason(turned_on):
    messages = turned_on("recompiles")
    optimizer, params = trained((3, 211))
    optimizer.step()
    optimizer.step()
    assert messages() == ["MaskedAdamW on cpu: step 1 compiled 1 program: it is the first step"]
    params["b"].grad = None
    optimizer.step()
    why = "it no longer updates 'b' (frozen or without gradient)"
    assert messages()[1:] == [f"MaskedAdamW on cpu: step 3 compiled 1 program: {why}"]


def test_jaxpr_and_hlo_have_the_text_of_each_program_that_is_compiled(turned_on):
    jaxprs, programs = turned_on("jaxpr"), turned_on("hlo")
    optimizer, _ = trained((3, 212))
    optimizer.step()
    optimizer.step()
    (jaxpr,), (hlo,) = jaxprs(), programs()
    assert jaxpr.startswith("MaskedAdamW on cpu: jaxpr of the update of 2 leaves\n")
    assert "{ lambda " in jaxpr
    assert hlo.startswith("MaskedAdamW on cpu: optimized HLO for the update of 2 leaves\nHloModule ")
    assert "f32[636]" in jaxpr
    assert "f32[636]" in hlo


def test_plan_and_memory_tell_of_each_new_set_of_gradients(turned_on):
    plans, memory = turned_on("plan"), turned_on("memory")
    optimizer, params = trained((3, 214), writeback="copy")
    assert plans() == []
    (layout,) = memory()
    assert layout.startswith(
        "MaskedAdamW on cpu: parameters in jax's memory: 0, in 0 buffers of 0 bytes, 0 of them buckets; copied at each"
    )
    assert layout.endswith("step: 2 of 5,136 bytes (writeback='copy')")
    optimizer.step()
    optimizer.step()
    (plan,), (_, step) = plans(), memory()
    explained = str(optimizer.explain())
    counted = f", {optimizer.explain().bytes_per_step:,} bytes a step"
    assert plan.split("\n")[:3] == explained.replace(counted, "").split("\n")[:3]
    assert plan.startswith("MaskedAdamW on cpu: 2 parameters, 1 executable, 1 kernel class, 0 buckets\nlast compilation: step 1")
    assert step.startswith("MaskedAdamW on cpu: 10,272 bytes of state, 0 of gathered gradients, 5,")
    params["b"].grad = None
    optimizer.step()
    assert len(plans()) == 2
    assert len(memory()) == 3


def test_warm_step_asks_no_log(monkeypatch, caplog):
    model = torch.nn.Linear(3, 5)
    optimizer = torch_api.MaskedAdamW(model.named_parameters())
    train_step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)
    plain, params = trained((3, 215))
    caplog.set_level(logging.INFO, "maskbridge")
    asked, ask = [], logging.Logger.isEnabledFor
    monkeypatch.setattr(logging.Logger, "isEnabledFor", lambda self, level: asked.append(self.name) or ask(self, level))
    for _ in range(3):
        asked.clear()
        plain.step(), train_step(torch.randn(2, 3))
    assert [name for name in asked if name.startswith("maskbridge")] == []
    params["a"].grad = None
    plain.step()
    assert "maskbridge.recompiles" in asked


def test_train_step_has_the_same_logs(turned_on):
    model = torch.nn.Linear(3, 5)
    optimizer = torch_api.MaskedAdamW(model.named_parameters())
    train_step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)
    logs = {name: turned_on(name) for name in ("plan", "jaxpr", "hlo", "recompiles", "memory")}
    for _ in range(2):
        train_step(torch.randn(2, 3))
    title = "JaxTrainStep of MaskedAdamW on cpu: "
    assert logs["recompiles"]() == [f"{title}step 1 compiled 1 program: it is the first step"]
    assert [len(messages()) for messages in logs.values()] == [1, 1, 1, 1, 1]
    starts = {
        "plan": "2 parameters, 1 executable",
        "jaxpr": "jaxpr of the train program\n",
        "hlo": "optimized HLO of the train program\nHloModule",
    }
    for name, start in (starts | {"memory": "160 bytes of state, 0 of gathered gradients"}).items():
        assert logs[name]()[0].startswith(title + start), logs[name]()[0][:200]


def test_level_of_the_root_logger_turns_nothing_on_and_that_of_maskbridge_all(caplog):
    caplog.set_level(logging.DEBUG)
    optimizer, params = trained((3, 213))
    optimizer.step()
    ours = lambda: {record.name for record in caplog.records if record.name.startswith("maskbridge")}  # noqa: E731
    assert ours() == set()
    caplog.set_level(logging.INFO, "maskbridge")
    params["a"].grad = None
    optimizer.step()
    assert ours() == {f"maskbridge.{name}" for name in ("plan", "jaxpr", "hlo", "recompiles", "memory")}


@pytest.mark.slow
def test_variable_turns_logs_on_and_an_unknown_name_warns():
    code = """
        import torch, torch_api
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch_api.MaskedSGD([p], lr=1.0)
        p.grad = torch.ones(3)
        optimizer.step()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MASKBRIDGE_LOGS": "recompiles, plam"},
        check=True,
    )
    assert "MASKBRIDGE_LOGS names 'plam', which is no log. Did you mean 'plan'? Known: hlo, jaxpr, memory, plan, recompiles." in done.stderr
    assert "maskbridge.recompiles: MaskedSGD on cpu: step 1 compiled 1 program: it is the first step\n" in done.stderr
    assert done.stderr.count("maskbridge.") == 1
