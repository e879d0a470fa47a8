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

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

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
    why = "'b' no longer take part, frozen or without gradient"
    assert messages()[1:] == [f"MaskedAdamW on cpu: step 3 compiled 1 program: {why}"]


def test_jaxpr_and_hlo_have_the_text_of_each_program_that_is_compiled(turned_on):
    jaxprs, programs = turned_on("jaxpr"), turned_on("hlo")
    optimizer, _ = trained((3, 212))
    optimizer.step()
    optimizer.step()
    (jaxpr,), (hlo,) = jaxprs(), programs()
    assert jaxpr.startswith("MaskedAdamW on cpu: jaxpr of the update of 2 leaves\n")
    assert "{ lambda " in jaxpr
    assert hlo.startswith("MaskedAdamW on cpu: optimized HLO of the update of 2 leaves\nHloModule ")
    assert "f32[636]" in jaxpr
    assert "f32[636]" in hlo


def test_level_of_the_root_logger_turns_nothing_on_and_that_of_maskbridge_all(caplog):
    caplog.set_level(logging.DEBUG)
    optimizer, params = trained((3, 213))
    optimizer.step()
    ours = lambda: {record.name for record in caplog.records if record.name.startswith("maskbridge")}  # noqa: E731
    assert ours() == set()
    caplog.set_level(logging.INFO, "maskbridge")
    params["a"].grad = None
    optimizer.step()
    assert ours() == {f"maskbridge.{name}" for name in ("jaxpr", "hlo", "recompiles")}


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
