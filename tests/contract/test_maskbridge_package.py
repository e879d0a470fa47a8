"""`import maskbridge` gives the names of both packages, and no package of ours works beside a foreign one of a sibling's name."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bridge
import maskbridge
import torch_api

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
# Names that both packages have for different things -> the package whose thing maskbridge has.
COLLISIONS = {"MultiOptimizer": torch_api}


def test_package_has_the_public_names_of_both():
    assert set(maskbridge.__all__) == {*bridge.__all__, *torch_api.__all__}
    assert len(maskbridge.__all__) == len(set(maskbridge.__all__))
    for name in maskbridge.__all__:
        owner = COLLISIONS.get(name) or (torch_api if name in torch_api.__all__ else bridge)
        assert getattr(maskbridge, name) is getattr(owner, name), name


def test_names_with_two_meanings_are_decided():
    common = set(bridge.__all__) & set(torch_api.__all__)
    differ = {name for name in common if getattr(bridge, name) is not getattr(torch_api, name)}
    assert differ == COLLISIONS.keys(), "decide in COLLISIONS and in maskbridge/__init__.py which of them maskbridge has"
    assert issubclass(maskbridge.MultiOptimizer, torch.optim.Optimizer)


def test_module_is_the_doctor(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["maskbridge"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("maskbridge", run_name="__main__")
    assert ended.value.code == bridge.doctor().exit_code
    assert re.search(r"^\w+ +devices ", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", ["maskbridge", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("maskbridge", run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: python -m maskbridge")


TRY = """
import sys
for name in sys.argv[1:]:
    try:
        __import__(name)
    except ImportError as error:
        print(f"{error.name} {error.path}: {error}")
    else:
        print(f"{name} was imported")
assert not {"jax", "torch"} & sys.modules.keys(), "the check comes first"
"""


def tried(folders, *names, script=("-P", "-c", TRY)):
    """Return what the imports of some names in a new process print, a line each."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run([sys.executable, *map(str, script), *names], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def assert_names_the_file(line, name, file):
    assert line.startswith(f"{name} {file}: `import {name}` finds {file}, which is not the {name} of maskbridge (")
    assert "rename that file or folder, or uninstall the distribution" in line


@pytest.mark.parametrize(("foreign", "ours"), [("bridge", "torch_api"), ("torch_api", "bridge")])
@pytest.mark.parametrize("form", ["module", "package"])
def test_package_of_the_user_is_refused_and_named(tmp_path, foreign, ours, form):
    file = tmp_path / (f"{foreign}.py" if form == "module" else f"{foreign}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("print('it has run')")
    before = tried([tmp_path, ROOT], ours, "maskbridge")
    after = tried([tmp_path, ROOT], foreign, ours, "maskbridge")
    assert after == ["it has run", f"{foreign} was imported", *before]
    assert len(before) == 2
    for line in before:
        assert_names_the_file(line, foreign, file)


def test_script_with_the_name_of_a_package_is_named(tmp_path):
    script = tmp_path / f"{bridge.__name__}.py"
    script.write_text(TRY)
    (line,) = tried([ROOT], "torch_api", script=[script])
    assert_names_the_file(line, "bridge", script)


@pytest.mark.parametrize(("foreign", "ours"), [("bridge", "torch_api"), ("torch_api", "bridge")])
def test_file_that_another_distribution_has_replaced_is_named(tmp_path, foreign, ours):
    """Two distributions with a package of one name write to the same folder of site-packages."""
    for package in (foreign, ours, "maskbridge"):
        (tmp_path / package).mkdir()
        for path in (ROOT / package).glob("_*.py"):
            shutil.copy(path, tmp_path / package)
    (tmp_path / foreign / "__init__.py").write_text("version = 1\n")
    lines = tried([tmp_path], ours, "maskbridge")
    assert len(lines) == 2
    for line in lines:
        assert_names_the_file(line, foreign, tmp_path / foreign / "__init__.py")
