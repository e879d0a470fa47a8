"""docs/guides/distributed.md: torchrun runs the scripts of the page on two processes, and they print what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "distributed.md"
COMMAND = r"    torchrun (--standalone --nproc_per_node=2) (\w+\.py)\n"
SCRIPT = re.compile(rf"```python\n((?:(?!```).)*?)\n```\n\n{COMMAND}\n```text\n(.*?)```", re.DOTALL)
LIMIT = 300  # seconds per script, on a busy machine


def scripts():
    """Return for each script of the page its name, source, the arguments of torchrun and the printed text."""
    return {name: (source, arguments.split(), printed) for source, arguments, name, printed in SCRIPT.findall(PAGE.read_text())}


def test_the_page_has_two_scripts():
    assert list(scripts()) == ["ddp.py", "fsdp.py"]


@pytest.mark.parametrize("name", ["ddp.py", "fsdp.py"])
def test_a_script_prints_what_the_page_shows(name, tmp_path):
    source, arguments, printed = scripts()[name]
    (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, name]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert [line.rstrip() for line in ended.stdout.splitlines()] == printed.splitlines()
