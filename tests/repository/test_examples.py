"""Each example runs as a user runs it."""

import base64
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def run(name, folder, *arguments):
    """Run an example and return what it prints."""
    return run_script(ROOT / "examples" / f"{name}.py", folder, *arguments)


def run_script(script, folder, *arguments):
    """Run a script in an empty folder with warnings as errors, return what it prints; the script's own assertions must hold."""
    # With any -W option, matplotlib's parser enables its own debugging warnings, which matplotlib 3.8 itself violates.
    old = ["-W", "ignore:::pyparsing"] if version("matplotlib").startswith("3.8.") else []
    # equinox 0.13.0 reads a name that jax 0.8 deprecates.
    old += ["-W", "ignore:jax.interpreters.batching.NotMapped"] if version("equinox") == "0.13.0" else []
    # Examples that thaw layers or alternate between networks give compilation warnings.
    old += [x for owner in ("PartitionedOptimizer", "MaskedAdamW") for x in ("-W", f"ignore:{owner}.step compiled")]
    command = [sys.executable, "-W", "error", *old, str(script), *arguments]
    # jax's default promotion: optax's functions fail under strict promotion.
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUMPY_DTYPE_PROMOTION": "standard", "MPLBACKEND": "agg"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_finetune_digits_runs(tmp_path):
    picture = tmp_path / "digits.png"
    printed = run("finetune_digits", tmp_path, "--output", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    for line in (
        "MaskedAdamW: 6 of 14 parameters trained",
        "Frozen: 14 of 14",
        "In place: 14 of 14",
        "Resumed from the checkpoint: 20 of 20",
    ):
        assert line in printed


PRINTED = {
    "gan_two_labels": [
        "PartitionedOptimizer: 12 of 12 parameters trained",
        "round 1000: loss",
        "Generated points near each of the Gaussians",
    ],
    "adam_weights_sgd_biases": ["PartitionedOptimizer: 4 of 4 parameters trained", "optax alone ends"],
    "optimizer_in_ten_lines": ["OptaxOptimizer: 4 of 4 parameters trained", "MultiOptimizer: 4 of 4 parameters trained"],
    "equinox_filter_mask": ["2 of 2 leaves moved, 4 of the other 4 kept their bits", "MaskedAdamW: 4 of 6 parameters trained"],
    "character_model": ["1 program compiled", "A text of its own"],
    "digits_train_step": ["by JaxTrainStep", "Losses of the first 50 steps differ by", "eager torch, fused AdamW:"],
    "two_worlds": ["Learning side by side", "An epoch in optax and one in torch"],
    "ode_physics": ["step 249: the films are missed by 0.0", "1 program(s) compiled"],
    "backbone_and_head": ["epoch 6: loss", "traced", "Back in the module"],
    "muon_transformer": ["PartitionedOptimizer: 29 of 29 parameters trained", "with Muon and AdamW", "\nThe "],
}


# The other examples are slower.
IN_EVERY_RUN = {"adam_weights_sgd_biases", "optimizer_in_ten_lines", "two_worlds"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [x if x in IN_EVERY_RUN else pytest.param(x, marks=pytest.mark.nightly) for x in PRINTED])
def test_example_runs(name, tmp_path):
    if name in ("equinox_filter_mask", "two_worlds", "backbone_and_head"):
        pytest.importorskip("equinox")
    printed = run(name, tmp_path)
    for text in PRINTED[name]:
        assert text in printed
    assert not list(tmp_path.iterdir()), "the example left files behind"


def notebook():
    return json.loads((ROOT / "examples" / "interop.ipynb").read_text())


@pytest.mark.slow
def test_cells_of_the_notebook_run(tmp_path):
    cells = ["".join(cell["source"]) for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join([*cells, "print(plt.get_fignums())"]))
    printed = run_script(script, tmp_path)
    assert "the noise is 0.03" in printed
    assert "MaskedAdamW: 6 of 6 parameters trained" in printed
    assert printed.endswith("[1, 2, 3]\n")


def test_notebook_holds_its_outputs():
    stored = notebook()
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    pictures = [base64.b64decode(output["data"]["image/png"]) for output in outputs if output["output_type"] == "display_data"]
    assert len(pictures) == 3
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5_000 for picture in pictures)
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])


def test_every_example_has_a_test():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {"finetune_digits", *PRINTED}
