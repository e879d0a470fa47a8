"""Run the Python blocks of README.md and of the pages in docs/ as tests, by sybil: `pytest docs/logging.md` runs one page.

The blocks of a page run in order in one namespace, which holds `installed`. The configuration of pytest in pyproject.toml applies to
them, so a warning is an error.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import tempfile
import unittest.mock

# Set before jax and torch start, as in tests/conftest.py.
os.environ.setdefault("JAX_PLATFORMS", "" if os.environ.get("MASKBRIDGE_TEST_GPU") else "cpu")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MPLBACKEND", "agg")

import jax
from packaging.requirements import Requirement
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

QUICK = ("README.md", "docs/internals/upstream.md")  # pages that `make check` runs
_page = contextlib.ExitStack()


def installed(requirement):
    """Return whether a module is installed, also of a given version: `installed("jax>=0.10")`."""
    required = Requirement(requirement)
    if importlib.util.find_spec(required.name) is None:
        return False
    return not required.specifier or importlib.metadata.version(required.name) in required.specifier


def _restore_jax_config(values):
    for name, value in values.items():
        if getattr(jax.config, name, value) != value:
            jax.config.update(name, value)


def _enter_page(namespace):
    """Start a page in an empty folder, with jax's own promotion of dtypes; undo what the page changes in the process."""
    _page.enter_context(contextlib.chdir(_page.enter_context(tempfile.TemporaryDirectory())))
    _page.enter_context(unittest.mock.patch.dict(os.environ))
    _page.callback(_restore_jax_config, dict(jax.config.values))
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    namespace.update(installed=installed, __name__="__main__")


def _leave_page(namespace):
    namespace.clear()
    _page.close()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    excludes=["*/README.md"],
    setup=_enter_page,
    teardown=_leave_page,
).pytest()


def pytest_itemcollected(item):
    """Mark the blocks of some pages `quick`."""
    if item.path.suffix == ".md" and item.path.relative_to(item.config.rootpath).as_posix() in QUICK:
        item.add_marker("quick")
