"""The files of a release: metadata, links of the long description, versions and pins that stand in two places."""

import importlib.util
import io
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOKS = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]


@pytest.fixture(scope="module")
def check_release():
    spec = importlib.util.spec_from_file_location("check_release", ROOT / "tools" / "check_release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_absolute_links(markdown):
    """Apply the substitutions of pyproject.toml as hatch-fancy-pypi-readme does."""
    for each in HOOKS["fancy-pypi-readme"]["substitutions"]:
        markdown = re.sub(each["pattern"], each["replacement"], markdown)
    return markdown.replace("$HFPR_VERSION", "1.2.3").replace("@REPOSITORY@", "https://host/project")


def test_readme_has_only_absolute_links_on_the_index_page(check_release):
    assert check_release.relative_links((ROOT / "README.md").read_text())
    assert check_release.relative_links(with_absolute_links((ROOT / "README.md").read_text())) == []


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](docs/a.md#b)", "[a](https://host/project/blob/v1.2.3/docs/a.md#b)"),
        ("[a](LICENSE), [b](CODE_OF_CONDUCT.md)", "[a]({0}/LICENSE), [b]({0}/CODE_OF_CONDUCT.md)"),
        ("![a](docs/images/a.svg)", "![a](https://host/project/raw/v1.2.3/docs/images/a.svg)"),
        ("[![a](docs/a.png)](docs/a.md)", "[![a](https://host/project/raw/v1.2.3/docs/a.png)]({0}/docs/a.md)"),
        (
            '<a href="docs/a.md"><img src="docs/a.png"></a>',
            '<a href="{0}/docs/a.md"><img src="https://host/project/raw/v1.2.3/docs/a.png"></a>',
        ),
        ("[a](#b)", "[a]({0}/README.md#b)"),
        ("[a](https://host/docs/a.md), ![b](https://host/a.svg)", "[a](https://host/docs/a.md), ![b](https://host/a.svg)"),
        ('model["head"](docs), layers[0](x)', 'model["head"](docs), layers[0](x)'),
    ],
)
def test_links_and_pictures_of_the_readme_become_absolute(written, shown):
    assert with_absolute_links(written) == shown.replace("{0}", "https://host/project/blob/v1.2.3")


def test_relative_links_are_found_in_prose_and_not_in_code(check_release):
    text = '[a](docs/a.md) `[b](b)` <img src="c.png">\n```python\nlayers[0](d)\n```\n[e]: f.md\n[g](https://h)'
    assert check_release.relative_links(text) == ["docs/a.md", "c.png", "f.md"]


SOURCES = {
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 - 2030-01-31\n",
    "CITATION.cff": "version: 1.2.3\n",
    "CONTRIBUTING.md": "Replace example.invalid.\n",
    "docs/a.md": "",
    "pyproject.toml": "https://host/maskbridge",
}


def write_release(folder, check_release, *, description="[a](https://b)", packages=None, version="1.2.3", **changed):
    with zipfile.ZipFile(folder / "maskbridge-1.2.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("maskbridge-1.2.3.dist-info/METADATA", f"Metadata-Version: 2.4\nVersion: {version}\n\n{description}\n")
        for package in check_release.PACKAGES if packages is None else packages:
            wheel.writestr(f"{package}/py.typed", "")
    with tarfile.open(folder / "maskbridge-1.2.3.tar.gz", "w:gz") as sdist:
        for name, text in (SOURCES | changed).items():
            member = tarfile.TarInfo(f"maskbridge-1.2.3/{name}")
            member.size = len(text)
            sdist.addfile(member, io.BytesIO(text.encode()))


def run(check_release, folder, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(check_release, "list_tracked_files", lambda: [*SOURCES])
    status = check_release.main([str(folder), *arguments])
    return status, capsys.readouterr().out


def test_complete_release_passes(check_release, tmp_path, monkeypatch, capsys):
    write_release(tmp_path, check_release)
    assert run(check_release, tmp_path, monkeypatch, capsys, "--tag", "v1.2.3")[0] == 0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"CHANGELOG.md": "## Unreleased\n"}, "CHANGELOG.md has no heading '## 1.2.3 - YYYY-MM-DD'"),
        ({"CITATION.cff": "version: 1.2\n"}, "CITATION.cff has not the version 1.2.3"),
        ({"version": "1.2.4"}, "the tag is v1.2.3, and the version in pyproject.toml is 1.2.4"),
        ({"pyproject.toml": "https://example.invalid/maskbridge"}, "pyproject.toml has the placeholder example.invalid"),
    ],
)
def test_release_is_refused(changed, problem, check_release, tmp_path, monkeypatch, capsys):
    write_release(tmp_path, check_release, **changed)
    assert run(check_release, tmp_path, monkeypatch, capsys)[0] == 0  # no release: these may be so
    status, printed = run(check_release, tmp_path, monkeypatch, capsys, "--tag", "v1.2.3")
    assert status == 1
    assert problem in printed


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"description": "[a](docs/a.md)"}, "the description has the relative link docs/a.md"),
        ({"packages": ("bridge", "torch_api")}, "has no maskbridge/py.typed"),
        ({"packages": ("bridge", "maskbridge", "tests", "torch_api")}, "installs tests"),
    ],
)
def test_incomplete_files_are_refused(changed, problem, check_release, tmp_path, monkeypatch, capsys):
    write_release(tmp_path, check_release, **changed)
    status, printed = run(check_release, tmp_path, monkeypatch, capsys)
    assert status == 1
    assert problem in printed


def test_missing_and_stray_files_are_refused(check_release, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SOURCES, "docs/b.md", "")
    write_release(tmp_path, check_release)
    monkeypatch.setitem(SOURCES, "docs/c.md", "")
    assert "has no docs/c.md" in run(check_release, tmp_path, monkeypatch, capsys)[1]
    monkeypatch.delitem(SOURCES, "docs/b.md")
    assert "has docs/b.md, which is not under version control" in run(check_release, tmp_path, monkeypatch, capsys)[1]
    (tmp_path / "maskbridge-1.2.3.tar.gz").unlink()
    assert "1 wheels and 0 source distributions" in run(check_release, tmp_path, monkeypatch, capsys)[1]


def test_versions_and_addresses_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PYPROJECT['project']['version']}\n" in citation
    assert f'\nrepository-code: "{HOOKS["custom"]["repository"]}"\n' in citation


def test_versions_of_the_commit_hooks_are_those_of_the_lint_group():
    pins = dict(re.findall(r"([\w-]+)==([\w.]+)", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert {"import-linter", "ruff"} <= pins.keys()
    lint = dict(each.split("==") for each in PYPROJECT["dependency-groups"]["lint"])
    assert {name: pins[name] for name in pins.keys() & lint.keys()} == {name: lint[name] for name in pins.keys() & lint.keys()}


def test_changelog_keeps_the_form_of_keep_a_changelog():
    headings = re.findall(r"^(##+) (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [text for level, text in headings if level == "##"]
    assert versions
    assert [text for text in versions if not re.fullmatch(r"Unreleased|\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", text)] == []
    assert {text for level, text in headings if level == "###"} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_reports_of_problems_ask_for_the_installation():
    assert "python -m bridge" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text()
