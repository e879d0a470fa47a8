"""The pages on performance and on mechanisms name variables, files and tests that exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PACKAGES = ("bridge", "torch_api", "maskbridge")
PAGES = sorted(
    [*(ROOT / "docs" / "performance").glob("*.md"), *(ROOT / "docs" / "internals").glob("*.md"), ROOT / "benchmarks" / "README.md"]
)
GENERATED = re.compile(r"<!-- figures.*?<!-- end of figures -->", re.DOTALL)
FOLDERS = ("benchmarks", "docs", "examples", "tests", *PACKAGES)
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]


def quoted(page):
    """Return what stands in backquotes in the text of a page, without the tables of results."""
    return set(re.findall(r"`([^`\n]+)`", GENERATED.sub("", page.read_text())))


def missing_files(names):
    """Return the names that are files of this repository by their form, but that no path ends in."""
    paths = ["/" + path.relative_to(ROOT).as_posix() for path in FILES]
    files = {name for name in names if re.fullmatch(r"[\w/]+\.(py|json|md)", name)}
    return sorted(name for name in files if not any(path.endswith("/" + name) for path in paths))


def missing_tests(names):
    text = "\n".join(path.read_text() for path in FILES if path.suffix == ".py" and path.name.startswith("test_"))
    return sorted(name for name in names if re.fullmatch(r"test_\w+", name) and f"def {name}(" not in text)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_named_files_and_tests_exist(page):
    names = quoted(page)
    assert missing_files(names) == []
    assert missing_tests(names) == []


def test_missing_files_and_tests_are_noticed():
    assert missing_files({"bridge/_compiler/policy.py", "policy.py", "bridge/_compiler/policies.py", "no_such.py", "optax.adam"}) == [
        "bridge/_compiler/policies.py",
        "no_such.py",
    ]
    assert missing_tests({"test_missing_files_and_tests_are_noticed", "test_" + "of_nothing"}) == ["test_of_nothing"]


def test_page_of_settings_has_each_variable_of_the_source():
    source = "\n".join(path.read_text() for path in FILES if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES)
    named = set(re.findall(r"MASKBRIDGE_[A-Z_]+", source))
    listed = set(re.findall(r"^\| `(MASKBRIDGE_[A-Z_]+)", (ROOT / "docs" / "performance" / "settings.md").read_text(), re.MULTILINE))
    assert listed == named
