"""Each example, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_finetune_digits(tmp_path):
    picture = tmp_path / "digits.png"
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "finetune_digits.py"), "--output", str(picture)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    for line in (
        "MaskedAdamW: 6 of 14 parameters trained",
        "Frozen: 14 of 14",
        "In place: 14 of 14",
        "Resumed from the checkpoint: 20 of 20",
    ):
        assert line in done.stdout
