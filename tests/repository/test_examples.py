"""Each example runs as a user runs it."""

import base64
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "interop.ipynb"
WRITES = os.environ.get("MASKBRIDGE_WRITE_DOCS") == "1"
LARGEST_PICTURE = 60_000


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


# What each example prints.
PRINTED = {
    "finetune_digits": [
        "MaskedAdamW: 6 of 14 parameters trained",
        "Frozen: 14 of 14",
        "In place: 14 of 14",
        "Resumed from the checkpoint: 20 of 20",
    ],
    "gan_two_labels": [
        "PartitionedOptimizer: 12 of 12 parameters trained",
        "Losses in the last round: discriminator",
        "Generated points near each of the Gaussians",
    ],
    "adam_weights_sgd_biases": ["PartitionedOptimizer: 4 of 4 parameters trained", "optax alone ends"],
    "optimizer_in_ten_lines": ["OptaxOptimizer: 4 of 4 parameters trained", "MultiOptimizer: 4 of 4 parameters trained"],
    "equinox_filter_mask": ["2 of 2 leaves moved, 4 of the other 4 kept their bits", "MaskedAdamW: 4 of 6 parameters trained"],
    "character_model": ["1 program compiled", "A text of its own"],
    "digits_train_step": ["by JaxTrainStep", "Losses of the first 50 steps differ by", "eager torch, fused AdamW:"],
    "two_worlds": ["Learning side by side", "An epoch in optax and one in torch"],
    "ode_physics": ["After 250 steps the films are missed by 0.0", "1 program(s) compiled"],
    "backbone_and_head": ["at the last", "traced", "Back in the module"],
    "muon_transformer": ["PartitionedOptimizer: 29 of 29 parameters trained", "with Muon and AdamW", "\nThe "],
    "finetune_from_file": ["MaskedAdamW: 14 of 14 parameters trained", "After the stage of layer1", "Without the file"],
    "lora_int8_base": [
        "MaskedAdamW: 16 of 52 parameters trained",
        "16 of 52 parameters moved; the other 36 have the same bits as before",
        "all weights, float32: loss on new code",
    ],
}
# Those that `make test` runs, with these arguments. All run without arguments in `make nightly`.
IN_EVERY_RUN = {
    "adam_weights_sgd_biases": [],
    "finetune_digits": [],
    "finetune_from_file": ["--epochs", "4"],
    "lora_int8_base": ["--steps", "5"],
    "optimizer_in_ten_lines": [],
}
RUNS = list(IN_EVERY_RUN.items())
RUNS += [pytest.param(name, [], marks=pytest.mark.nightly) for name in PRINTED if IN_EVERY_RUN.get(name) != []]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), RUNS)
def test_example_runs(name, arguments, tmp_path):
    if name in ("equinox_filter_mask", "two_worlds", "backbone_and_head"):
        pytest.importorskip("equinox")
    printed = run(name, tmp_path, "--plots", "plots", *arguments)
    for text in PRINTED[name]:
        assert text in printed
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["plots", f"plots/{name}.svg"]
    picture = (tmp_path / "plots" / f"{name}.svg").read_text()
    assert "<svg" in picture
    assert 5_000 < len(picture) <= LARGEST_PICTURE


def test_every_example_has_a_test():
    assert {path.stem for path in (ROOT / "examples").glob("[!_]*.py")} == set(PRINTED)


def test_gallery_has_every_example():
    page, pictures = (ROOT / "docs" / "gallery.md").read_text(), ROOT / "docs" / "images" / "examples"
    for name in PRINTED:
        for text in (f"](../examples/{name}.py)", f"](images/examples/{name}.svg)", f"python examples/{name}.py"):
            assert text in page
    assert {path.name for path in pictures.iterdir()} == {f"{name}.svg" for name in PRINTED}
    assert max(path.stat().st_size for path in pictures.iterdir()) <= LARGEST_PICTURE


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed_by(cells_outputs):
    """The words that each cell prints. Numbers differ from machine to machine, and with them the widths of columns."""
    texts = ["".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream") for outputs in cells_outputs]
    return [re.sub(r"-+", "-", re.sub(r"\d[\d.,]*", "0", text)).split() for text in texts]


@pytest.mark.slow
def test_cells_of_the_notebook_run_and_their_outputs_are_stored(tmp_path):
    outputs = json.loads(run_script(ROOT / "tests" / "support" / "notebook_cells.py", tmp_path, str(NOTEBOOK)))
    stored = json.loads(NOTEBOOK.read_text())
    if WRITES:
        for cell, own in zip(code_cells(stored), outputs, strict=True):
            cell["outputs"] = own
        NOTEBOOK.write_text(json.dumps(stored, indent=1) + "\n")
    assert printed_by(cell["outputs"] for cell in code_cells(stored)) == printed_by(outputs)
    assert "the noise is 0.03" in outputs[1][0]["text"][0]
    assert outputs[5][0]["text"][0].startswith("MaskedAdamW: 6 of 6 parameters trained")


def test_notebook_holds_its_outputs():
    stored = json.loads(NOTEBOOK.read_text())
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    code = code_cells(stored)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    pictures = [base64.b64decode(output["data"]["image/png"]) for output in outputs if output["output_type"] == "display_data"]
    assert len(pictures) == 3
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5_000 for picture in pictures)
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])
