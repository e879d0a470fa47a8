"""Write the tables of three pages from the results files.

    python benchmarks/report.py [--results FOLDER] [--root FOLDER]

Replaces the text between the markers of these pages by tables of the results files in the folder:

    docs/performance/figures.md    all sections of all machines
    docs/performance/index.md      the few rows that `plots.py` draws
    benchmarks/README.md           the goals of this project
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sections import OURS, TITLES, grid, number, section, spread

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
WIDTH = 140
BEGIN, END = "<!-- figures: written by benchmarks/report.py -->", "<!-- end of figures -->"


class SummaryRow(NamedTuple):
    """A row of the summary.

    default, fused, ours: the times in ms of torch's default, of torch's fused optimizer and of maskbridge; None if not measured.
    ratio, quartiles: of the time of maskbridge to that of torch: fused where there is such an optimizer, else the default.
    default_ratio: the ratio of torch's default to torch fused, if both are measured.
    """

    title: str
    default: float | None
    fused: float | None
    ours: float
    ratio: float
    quartiles: tuple[float, float]
    default_ratio: float | None


class Chosen(NamedTuple):
    """Where a row of the summary has its times: the section, the title of the table there, and the rows of the table.

    The baseline of the table is `fused`, or `default` if there is no fused optimizer.
    """

    title: str
    section: str
    table: str
    default: str | None = "torch default"
    fused: str | None = "torch fused"
    ours: str = OURS


SUMMARY_OF = "cpu-2-cores-amd-epyc"
_TAIL = "torch clip_grad_norm_, fused, AveragedModel (multi_avg_fn)"
SUMMARY = [
    Chosen("AdamW, GPT-2 small", "large", "GPT-2 small"),
    Chosen("AdamW, 300 small parameters", "small", "150 of 64x64, 150 of 64"),
    Chosen("Clipping, AdamW and EMA, GPT-2 small", "tail", "clip, AdamW, average of the weights, GPT-2 small", None, _TAIL),
    Chosen("NAdam, ResNet-50", "unfused", "NAdam, ResNet-50", fused=None),
    Chosen("Adafactor, ResNet-50", "unfused", "Adafactor, ResNet-50", fused=None),
    Chosen("Training loop, tiny network", "pipelines", "digits job, 64 images of 8x8", None, ours=f"{OURS}, eager backward"),
    Chosen("JaxTrainStep, transformer encoder", "pipelines", "nn.TransformerEncoder of 4 layers, 8 x 64", None),
    Chosen("JaxTrainStep, convolutional network", "pipelines", "residual network of 8 blocks, 16 images of 32x32", None),
]


def summary_rows(results: dict[str, Any]) -> list[SummaryRow]:
    """The rows of the summary that a results file has."""
    found = []
    for title, part, table_title, default, fused, ours in SUMMARY:
        tables = {table["title"]: table["rows"] for table in results.get(part, {}).get("tables", ())}
        rows = tables.get(table_title, {})
        if ours in rows:
            theirs, best = (rows[name]["median ms"] if name in rows else None for name in (default, fused))
            slower = rows[default]["ratio"] if default is not None and fused is not None else None
            low, high = rows[ours]["ratio quartiles"]
            found.append(SummaryRow(title, theirs, best, rows[ours]["median ms"], rows[ours]["ratio"], (low, high), slower))
    return found


def summary(folder: Path) -> list[str]:
    """The table of the few rows that `plots.py` draws."""
    path = folder / f"{SUMMARY_OF}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    lines = [
        [
            row.title,
            number(row.default),
            number(row.fused),
            number(row.ours),
            spread({"ratio": row.ratio, "ratio quartiles": row.quartiles}),
        ]
        for row in summary_rows(results)
    ]
    if not lines:
        return ["None yet: `make bench` writes them.", ""]
    used = list(dict.fromkeys(chosen.section for chosen in SUMMARY if chosen.section in results))
    about = results[used[0]]["environment"]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("python", "torch", "jax", "optax"))
    return [
        "ms a step (last three rows: ms an iteration), and the time of maskbridge over that of torch with its quartiles:",
        *grid(["", "torch default", "torch `fused=True`", "maskbridge", "ratio (quartiles)"], lines),
        f"{about['machine']}; {versions}. The command:",
        "",
        f"`python benchmarks/step.py --sections {' '.join(used)} --rounds 20 --compiled`",
        "",
    ]


# How many times the bytes of ours the other package moves, by the operations that one step of it calls; see "Bytes" in README.md.
BY_BYTES = {"NAdam": "3.1", "RAdam": "4.0", "RMSprop": "2.6", "Adagrad": "2.2", "Adamax": "2.3", "Lion": "2.2", "LAMB": "2.2"}


def goals(results: dict[str, Any]) -> Iterator[tuple[str, float, str, str]]:
    """The goals of this project: text, figure, target, and the ratio of the bytes that both sides move."""
    for part, index, text, target in (
        ("large", 0, "AdamW, GPT-2 small: time against torch fused", "at most 1.05"),
        ("small", 0, "AdamW, 300 small parameters: time against torch fused", "at most 0.7"),
        ("small", 1, "AdamW, ResNet-50: time against torch fused", "at most 1.0"),
        ("middle", 1, "AdamW, 1000 of 256x256: time against torch fused", "at most 1.0"),
        ("tail", 1, "clipping, AdamW and EMA, GPT-2 small: time against torch", "at most 0.7"),
        ("loop", 0, "loop of a transformer: time against torch fused", "at most 1.0"),
        ("loop", 1, "loop of a convolutional network: time against torch fused", "at most 1.0"),
        ("pipelines", 0, "digits job as one program: time against eager torch", "at most 1.0"),
        ("pipelines", 1, "character model as one program: time against eager torch", "at most 1.0"),
    ):
        if part in results:
            by_bytes = {"large": "1", "small": "1", "middle": "1", "tail": "0.77"}.get(part, "-")  # tail: ours moves 40 bytes, torch 52
            yield text, results[part]["tables"][index]["rows"][OURS]["ratio"], target, by_bytes
    for text, table in zip(("transformer", "convolutional network"), results.get("loop", {}).get("tables", ()), strict=False):
        if "apart" in table:
            ours, theirs = (statistics.median(table["apart"][name]["median ms"]) for name in (OURS, table["baseline"]))
            yield f"loop of a {text}, a process for each: time against torch fused", ours / theirs, "at most 1.0", "-"
    bytes_ = {row["optimizer"]: row["bytes"] for row in results.get("large", {}).get("bytes", ())}
    for name, target in (("AdamW", "28"), ("NAdam", "28"), ("Lion", "20"), ("AdamW, clip", "at most 36")):
        if name in bytes_:
            yield f"{name}: bytes per parameter", bytes_[name], target, "-"
    for table in results.get("unfused", {}).get("tables", ()):
        if "ratio" in table["rows"][OURS]:
            name = table["title"].split(",")[0]
            yield (
                f"{name}, ResNet-50: times faster than {table['baseline']}",
                1 / table["rows"][OURS]["ratio"],
                "1" if name == "Muon" else "3",
                BY_BYTES.get(name, "-"),
            )
    if "functions" in results:
        calls = results["functions"]["microseconds per call"]
        for name in ("jax_function, no_grad", "jax_function, recording"):
            yield f"{name}: microseconds beyond the program alone", calls[name] - calls["program alone"], "below 60", "-"
    if "subsets" in results:
        yield "programs compiled for changing sets of 1000 parameters", results["subsets"]["programs compiled"], "at most 4", "-"
    for starts in results.get("first", {}).get("sets", ()):
        seconds = {name: each["construction s"] + each["first step s"] for name, each in starts["starts"].items()}
        what = f"{starts['title']}, {starts['leaves']} parameters: seconds to the first step"
        yield what, seconds[OURS], "at most 4" if starts["leaves"] >= 1000 else "at most 1.5", "-"


def goals_table(folder: Path) -> list[str]:
    """The goals, with a column for each machine."""
    reached: dict[tuple[str, str, str], dict[str, str]] = {}
    machines = []
    for _, results in results_of(folder):
        machine = next(iter(results.values()))["environment"]["machine"]
        machines.append(machine.split(", ")[0])
        for text, figure, target, by_bytes in goals(results):
            reached.setdefault((text, target, by_bytes), {})[machines[-1]] = number(figure)
    if not reached:
        return ["None yet: `make bench` writes them.", ""]
    lines = ([*goal, *(figures.get(machine, "-") for machine in machines)] for goal, figures in reached.items())
    return grid(["", "wanted", "by bytes", *machines], lines)[1:]


def machine_report(stem: str, results: dict[str, Any], folder: Path) -> list[str]:
    """All sections of one results file."""
    known = [name for name in TITLES if name in results]
    about = results[known[0]]["environment"]
    versions = {json.dumps(results[name]["environment"]["versions"]) for name in known}
    lines = [f"## {about['machine']}", ""]
    for each in sorted(versions):
        lines += [", ".join(f"{name} {version}" for name, version in json.loads(each).items()) + f"; {about['torch threads']} threads.", ""]
    for name in known:
        lines += section(name, results[name])
        picture = folder / f"{stem}-growth.png"
        if name == "growth" and picture.exists():
            alt = "Time of a step against the number of parameters and the size of one parameter"
            lines += [f"![{alt}](../images/{picture.name})", ""]
    return lines


def results_of(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The names and contents of all results files in the folder, but those of a developer's own machine (`*-local.json`)."""
    return [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json")) if not path.stem.endswith("-local")]


def all_figures(folder: Path) -> list[str]:
    """All sections of all machines."""
    lines = [line for stem, results in results_of(folder) for line in machine_report(stem, results, folder)]
    return lines or ["None yet: `make bench` writes them.", ""]


PAGES: dict[str, Callable[[Path], list[str]]] = {
    "docs/performance/figures.md": all_figures,
    "docs/performance/index.md": summary,
    "benchmarks/README.md": goals_table,
}


def written(text: str, lines: Iterable[str]) -> str:
    """The text of a page with these lines between its markers."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + "\n".join([BEGIN, "", *map(wrapped, lines)]) + END + after


def wrapped(line: str) -> str:
    """A paragraph in lines as wide as those of other pages; rows of tables and pictures as they are."""
    return line if line.startswith(("|", "!", "#", "`")) else textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of the pages' paths")
    given = parser.parse_args()
    for name, lines in PAGES.items():
        page = given.root / name
        page.write_text(written(page.read_text(), lines(given.results)))


if __name__ == "__main__":
    main()
