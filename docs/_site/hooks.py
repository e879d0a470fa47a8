"""Hooks of mkdocs: links between pages and to files of the repository, and the check that no page loads anything from the internet."""

import re
import tomllib
from pathlib import Path

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]*)(?=[)#])")
NAMED = re.compile(r"\[`?[\w./-]+\.md`?\]\(([^):#]+\.md)(#[^)]*)?\)")
LOADED = re.compile(r"""<(?:(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc|link\b[^>]*\bhref)=["']?(?:https?:)?//[^>]*>""")

LOW_RANK = ("errors.md", "operators.md", "torchax.md", "internals/")  # lists of everything, and pages for contributors


def source_url():
    """Return the address of the repository: pyproject.toml has it once for everything."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


def on_page_markdown(markdown, *, page, config, **_):
    """Rank pages in the search, show titles in place of file names, and replace links that leave docs/ by links to the repository.

    A link to a file that does not exist stays, and mkdocs reports it. Pages have no metadata of their own, which GitHub would show.
    """
    docs = Path(config.docs_dir)
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith(LOW_RANK):
        page.meta["search"] = {"boost": 0.2}

    def target(link):
        return (docs / page.file.src_uri).parent.joinpath(link).resolve()

    def titled(match):
        path = target(match[1])
        if not path.is_relative_to(docs) or not path.exists():
            return match[0]
        title = re.search(r"^# (.+)$", path.read_text(), flags=re.MULTILINE)[1]
        return f"[{title}]({match[1]}{match[2] or ''})"

    def outside(match):
        path = target(match[1])
        if path.is_relative_to(docs) or not path.exists():
            return match[1]
        return f"{source_url()}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(ROOT).as_posix()}"

    return LINK.sub(outside, NAMED.sub(titled, markdown))


def on_post_page(output, *, page, **_):
    """Raise an error if a page loads something from the internet. The theme would load mermaid from there."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from the internet: {found[0]}")
    if 'class="mermaid"' in output:
        raise PluginError(f"{page.file.src_uri} has a mermaid diagram, whose script comes from the internet. Use an image.")
    return output
