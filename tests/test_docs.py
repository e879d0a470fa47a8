"""Every new line of docs/migrating.md runs."""

import re
from pathlib import Path

import jax
import optax
import optax.contrib
import pytest
import torch

import bridge
import torch_api

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
pytestmark = pytest.mark.slow


def new_lines():
    rows = [line.split(" | ", 1)[1] for line in PAGE.read_text().split("\n") if line.startswith("| ") and not line.startswith("| ---")]
    code = [snippet for row in rows for snippet in re.findall(r"`([^`]+)`", row)]
    return [snippet for snippet in code if "torch_api" in snippet or "bridge" in snippet or "opt" in snippet]


@pytest.fixture
def names(tmp_path):
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
    opt = torch_api.MaskedAdamW(model.named_parameters(), mask="head.*")

    def closure():
        for p in model.parameters():
            p.grad = None
        loss = model["head"](model["encoder"](torch.ones(2, 4))).square().sum()
        loss.backward()
        return loss

    file = tmp_path / "state.pt"
    torch.save(opt.state_dict(), file)
    given = {"model": model, "opt": opt, "closure": closure, "loss": closure().detach(), "file": file}
    return given | {
        "tree": jax.tree.map(lambda x: x + 0, bridge.module_tree(model)),
        "torch": torch,
        "optax": optax,
        "bridge": bridge,
        "torch_api": torch_api,
    }


def test_there_are_lines():
    assert len(new_lines()) > 30


@pytest.mark.parametrize("line", new_lines())
def test_the_new_line_runs(line, names):
    if line.endswith(".py"):
        assert (PAGE.parent.parent / line).exists()
        return
    with jax.numpy_dtype_promotion("standard"):
        exec(line, names)
