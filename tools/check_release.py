"""Check the files of a release before they are uploaded.

    python tools/check_release.py dist               # what holds for each commit
    python tools/check_release.py dist --tag v0.1.0  # also what a release needs

The script prints each problem and exits with 1 if there is one. It uses the standard library only.
"""

import argparse
import email
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "example.invalid"
# Files that may name the placeholder, because they are about it.
ABOUT_THE_PLACEHOLDER = ("CONTRIBUTING.md", "tools/check_release.py", "tests/repository/test_release.py")
PACKAGES = ("bridge", "maskbridge", "torch_api")


def read_wheel(path: Path) -> tuple[Message, list[str]]:
    """Return the metadata of a wheel and the names of its files."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(metadata)), names


def read_sdist(path: Path) -> dict[str, str]:
    """Return the text of each file of a source distribution, by its path below the first folder."""
    with tarfile.open(path) as sdist:
        files = [member for member in sdist.getmembers() if member.isfile()]
        return {member.name.split("/", 1)[1]: sdist.extractfile(member).read().decode(errors="replace") for member in files}


def relative_links(markdown: str) -> list[str]:
    """Return the targets of links and pictures that are not absolute. Code is left out."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", markdown, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)|\b(?:src|srcset|href)=\"([^\"]+)|^\[[^\]]+\]:\s+(\S+)", prose, flags=re.MULTILINE)
    return [target for found in targets for target in found if target and not re.match(r"(https?|mailto):", target)]


def problems_of_files(wheel: Path, sdist: Path, tracked: list[str]) -> list[str]:
    """Return what is wrong with the two files, whether or not they are released."""
    metadata, installed = read_wheel(wheel)
    sources = read_sdist(sdist)
    folders = {name.split("/")[0] for name in installed if ".dist-info/" not in name}
    stray = sources.keys() - {*tracked, "PKG-INFO"} if tracked else set()
    missing = [f"{package}/py.typed" for package in PACKAGES if f"{package}/py.typed" not in installed]
    return [
        *(f"{wheel.name}: the description has the relative link {target}" for target in relative_links(metadata.get_payload())),
        *(f"{wheel.name}: has no {name}" for name in missing),
        *(f"{wheel.name}: installs {name}, which is none of the packages" for name in sorted(folders - set(PACKAGES))),
        *(f"{sdist.name}: has no {name}" for name in tracked if name not in sources),
        *(f"{sdist.name}: has {name}, which is not under version control" for name in sorted(stray)),
    ]


def problems_of_release(wheel: Path, sdist: Path, tag: str) -> list[str]:
    """Return what forbids to publish the two files under a tag."""
    version = read_wheel(wheel)[0]["Version"]
    sources = read_sdist(sdist)
    heading = re.compile(rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d$", re.MULTILINE)
    cited = re.search(r"^version: \"?([^\s\"]+)", sources["CITATION.cff"], re.MULTILINE)
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and the version in pyproject.toml is {version}")
    if not heading.search(sources["CHANGELOG.md"]):
        found.append(f"CHANGELOG.md has no heading '## {version} - YYYY-MM-DD'")
    if cited is None or cited[1] != version:
        found.append(f"CITATION.cff has not the version {version}")
    named = [name for name, text in sources.items() if PLACEHOLDER in text and name not in ABOUT_THE_PLACEHOLDER]
    return found + [f"{name} has the placeholder {PLACEHOLDER} in place of the address of the repository" for name in named]


def list_tracked_files() -> list[str]:
    """Return the paths of the files under version control; an empty list outside a clone."""
    if not (ROOT / ".git").exists():
        return []
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def main(arguments: list[str] | None = None) -> int:
    """Print the problems of the files in a folder, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder with one wheel and one source distribution")
    parser.add_argument("--tag", help="the tag of the release, such as v0.1.0")
    options = parser.parse_args(arguments)
    files = sorted(options.folder.glob("*.whl")), sorted(options.folder.glob("*.tar.gz"))
    if [len(paths) for paths in files] != [1, 1]:
        problems = [f"{options.folder} has {len(files[0])} wheels and {len(files[1])} source distributions; expected one of each"]
    else:
        (wheel,), (sdist,) = files
        problems = problems_of_files(wheel, sdist, list_tracked_files())
        problems += problems_of_release(wheel, sdist, options.tag) if options.tag else []
    print("\n".join(problems) or f"{options.folder}: no problem found")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
