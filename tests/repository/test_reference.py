"""Each public name has a place in docs/reference/, and each page of docs/ one in the navigation of the site."""

import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import bridge
import maskbridge
import torch_api

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
REFERENCE = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
PACKAGES = (torch_api, bridge, bridge.rules, bridge.matrix_rules, maskbridge)


def missing_names(text):
    """Return the public names that no `:::` line shows. Names of optax have an anchor, `{#bridge.identity}`, and a link instead."""
    shown = [(path.rpartition(".")[2], pkgutil.resolve_name(path)) for path in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)]
    anchors = set(re.findall(r"\{#bridge\.(\w+)\}", text))

    def is_shown(name, thing):
        if isinstance(thing, ModuleType):  # `PACKAGES` has the names inside
            return thing in PACKAGES
        if getattr(thing, "__module__", "").partition(".")[0] == "optax":
            return name in anchors
        return any(name == other and thing is value for other, value in shown)

    return [f"{p.__name__}.{name}" for p in PACKAGES for name in p.__all__ if not is_shown(name, getattr(p, name))]


def test_each_public_name_is_in_the_reference():
    assert missing_names(REFERENCE) == []


@pytest.mark.parametrize(
    "line", ["::: torch_api.MaskedLion", "::: bridge.rules.nadam", "[](){#bridge.identity}", "::: bridge.MultiOptimizer"]
)
def test_a_missing_name_is_found(line):
    text = re.sub(re.escape(line) + r"(?!\w)", "", REFERENCE)
    package, _, name = line.removeprefix("::: ").removeprefix("[](){#").removesuffix("}").rpartition(".")
    assert f"{package}.{name}" in missing_names(text)


def test_each_page_is_in_the_navigation():
    """`make docs-site` refuses others, but takes a minute."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w./-]+\.md)$", nav, flags=re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)
