"""Turn results into markdown: what `step.py` prints, and the figures in README.md, which nobody types by hand.

    python benchmarks/report.py [--results FOLDER] [--readme PATH]

Replaces the text between the markers in the README by tables of all results files in the folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- figures: written by report.py -->", "<!-- end of figures -->"
OURS, YARDSTICK = "maskbridge", "torch fused, as many bytes"
TITLES = {
    "large": "Large leaves",
    "small": "Many small leaves",
    "middle": "Many leaves of middle size, and prime numbers",
    "tail": "The tail of a training step",
    "unfused": "What torch has no fused kernel for",
    "types": "Other types, and an odd length",
    "loop": "Whole loops: forward, backward, step",
    "pipelines": "Whole steps as one program: forward, backward and update by JaxTrainStep",
    "first": "Time to the first step, in a fresh process",
    "subsets": "Ever-changing subsets",
    "memory": "Memory",
    "growth": "Growth",
    "dlpack": "One tensor across the bridge",
    "functions": "A call of a small function of JAX",
    "device": "Only on a GPU",
}


def number(value: float | None) -> str:
    """A number with three significant digits, without exponent."""
    if value is None:
        return "-"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 4
    return f"{value:,.{digits}f}"


def grid(head: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["", *("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)), ""]


def spread(row: dict[str, Any]) -> str:
    """A ratio with its quartiles; just "1" for the baseline's ratio to itself."""
    if "ratio" not in row:
        return "-"
    low, high = row["ratio quartiles"]
    if low == high == 1:
        return "1"
    return f"{number(row['ratio'])} ({number(low)} to {number(high)})"


def missing(table: dict[str, Any]) -> list[str]:
    absent = table.get("missing") or {}
    return [f"Not measured: {', '.join(f'{name} ({why})' for name, why in absent.items())}.", ""] if absent else []


def steps(table: dict[str, Any]) -> list[str]:
    """The table of one set of candidates."""
    size = f", {table['parameters']:,} parameters" if "parameters" in table else ""
    lines = ([name, number(row["median ms"]), spread(row), number(row["first step s"])] for name, row in table["rows"].items())
    title = f"**{table['title']}** ({table['leaves']} leaves{size})"
    return [title, *grid(["", "ms", "ratio (quartiles)", "first step, s"], lines), *missing(table)]


def large(figures: dict[str, Any]) -> list[str]:
    if "bytes" not in figures:  # results of `--bound`
        return tabled(figures)
    counted = ([row["optimizer"], number(row["bytes"]), number(row["fewest"])] for row in figures["bytes"])
    text = "Bytes that a step moves per parameter by the compiler's count, and the fewest that there can be:"
    return [*tabled(figures), text, *grid(["", "bytes", "fewest"], counted)]


def tabled(figures: dict[str, Any]) -> list[str]:
    return [line for table in figures["tables"] for line in steps(table)]


def loop(figures: dict[str, Any]) -> list[str]:
    """The tables; after each one the results of candidates that had a process, and so the C library's heap, to themselves."""
    found = []
    for table in figures["tables"]:
        found += steps(table)
        if "apart" in table:  # missing in older results, which come from one process
            lines = (
                [name, *(f"{number(statistics.median(runs[key]))} ({number(min(runs[key]))} to {number(max(runs[key]))})" for key in runs)]
                for name, runs in table["apart"].items()
            )
            head = f"In processes of their own, medians of {len(next(iter(table['apart'].values()))['median ms'])} (lowest to highest):"
            found += [head, *grid(["", "ms", "page faults an iteration"], lines)]
    return found


def unfused(figures: dict[str, Any]) -> list[str]:
    """One line per optimizer."""
    columns = ["torch default", "torch foreach", "pytorch_optimizer", "optax in pure JAX", YARDSTICK, OURS]
    times_faster = lambda row: number(1 / row["ratio"]) if "ratio" in row else "-"  # noqa: E731
    lines = []
    for table in figures["tables"]:
        rows = table["rows"]
        times = [number(rows[name]["median ms"]) if name in rows else "-" for name in columns]
        faster = f"{times_faster(rows[OURS])} than {table['baseline']}" if "ratio" in rows[OURS] else "-"
        lines.append([table["title"].split(",")[0], *times, faster, times_faster(rows.get(YARDSTICK, {}))])
    absent = {name: why for table in figures["tables"] for name, why in (table.get("missing") or {}).items()}
    head = (
        "ms a step; LAMB and Lion are not in torch, so pytorch_optimizer is their measure. Muon: matrices only. As many bytes: torch's "
        "fused AdamW for those with 28 bytes a parameter, its fused SGD with momentum for those with 20; last, how much faster that is."
    )
    return [head, *grid(["ResNet-50", *columns, "times faster", "as many bytes"], lines), *missing({"missing": absent})]


def first(figures: dict[str, Any]) -> list[str]:
    lines = []
    for found in figures["sets"]:
        for name, start in found["starts"].items():
            total = start["construction s"] + start["first step s"]
            totals = start.get("totals s", [total])  # older results have one run
            between = f" ({number(totals[0])} to {number(totals[-1])})" if len(totals) > 1 else ""
            lines.append(
                [f"{found['title']}: {name}", number(total) + between, *map(number, (start["construction s"], start["first step s"]))]
            )
    return [
        "Seconds, imports not counted; a second start finds its programs in jax's persistent cache. In brackets: shortest, longest run.",
        *grid(["", "all", "construction", "first step"], lines),
    ]


def subsets(figures: dict[str, Any]) -> list[str]:
    head = (
        f"{figures['leaves']} leaves ({figures['title']}), each without a gradient in {figures['absent']:.0%} of {figures['steps']} steps: "
        f"{figures['programs compiled']} programs compiled, {figures['programs compiled in the second half']} of them in the second half."
    )
    lines = [[name, *(number(figures[k][name]) for k in ("median ms", "slowest step ms", "total s"))] for name in figures["median ms"]]
    ratio = f"Ratio to torch fused: {spread(figures)}; in the second half {number(figures['ratio in the second half'])}."
    return [head, *grid(["", "median ms", "slowest ms", "all, s"], lines), ratio, ""]


def memory(figures: dict[str, Any]) -> list[str]:
    peak, endurance, left = figures["peak"], figures["endurance"], figures["leftovers"]
    peaks = (
        [name, *(number(row[k]) for k in ("peak MiB", "after five steps MiB")), f"{row['state bytes']:,}"]
        for name, row in peak["rows"].items()
    )
    counts = list(next(iter(endurance["rows"].values()))["resident MiB after steps"])
    growing = ([name, *map(number, row["resident MiB after steps"].values())] for name, row in endurance["rows"].items())
    marks = list(next(iter(left["rows"].values())))
    kept = ([name, *(f"{number(row[m]['resident MiB'])} ({row[m]['jax arrays']})" for m in marks)] for name, row in left["rows"].items())
    return [
        f"{peak['title']}, MiB above those of the imports; parameters, gradients and state are {number(peak['smallest MiB'])}.",
        *grid(["", "peak", "after five steps", "bytes of state"], peaks),
        f"Resident MiB of the process after so many steps of {endurance['title']}:",
        *grid(["", *(f"{int(count):,}" for count in counts)], growing),
        f"Resident MiB (arrays of jax alive), {left['title']}; last, when the C library has given back what is free in its heap:",
        *grid(["", *marks], kept),
    ]


def growth(figures: dict[str, Any]) -> list[str]:
    found = [f"A copy on this machine moves {figures['copy bytes per second'] / 1e9:.1f} GB/s. ms a step:", ""]
    for key, what in (("by leaves", "leaves"), ("by size", "elements")):
        points = figures[key]
        if points:
            names = list(points[0]["rows"])
            lines = ([f"{point[what]:,}", *(number(point["rows"][name]["median ms"]) for name in names)] for point in points)
            title = f"leaves of {figures['elements of a leaf']:,}" if what == "leaves" else "elements of one leaf"
            found += grid([title, *names], lines)
    return found


def interop(figures: dict[str, Any]) -> list[str]:
    return grid(["", "microseconds"], ([name, number(value)] for name, value in figures["microseconds per call"].items()))


def device(figures: dict[str, Any]) -> list[str]:
    moved, stress = figures["bandwidth"], figures["stress"]
    lines = ([name, number(row["bytes per second"] / 1e9), f"{row['of a copy']:.0%}"] for name, row in moved["rows"].items())
    head = f"{moved['title']}: bytes that AdamW must move, against a copy at {moved['copy bytes per second'] / 1e9:,.0f} GB/s."
    tail = f"Gradients behind a slow kernel, {stress['steps']} steps: {'as' if stress['as torch'] else 'NOT as'} torch."
    return [*tabled(figures), head, *grid(["", "GB/s", "of a copy"], lines), tail, ""]


WRITERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "loop": loop,
    "large": large,
    "unfused": unfused,
    "first": first,
    "subsets": subsets,
    "memory": memory,
    "growth": growth,
    "dlpack": interop,
    "functions": interop,
    "device": device,
}


def section(name: str, figures: dict[str, Any]) -> list[str]:
    """One section as markdown."""
    about = figures["environment"]
    quick = ["", "Shrunken sets: these figures mean nothing."] if about["quick"] else []
    return [f"### {TITLES[name]}", *quick, "", *WRITERS.get(name, tabled)(figures), f"`{about['command']}`", ""]


# ------------------------------------------------------------------ all sections together


# How many times the bytes of ours the other package moves: see docs/performance.md.
BY_BYTES = {"NAdam": "3.1", "RAdam": "4.0", "RMSprop": "2.6", "Adagrad": "2.2", "Adamax": "2.3", "Lion": "2.2", "LAMB": "2.2"}


def goals(results: dict[str, Any]) -> Iterator[tuple[str, float, str, str]]:
    """The goals of this project: text, figure, target, and the ratio of the bytes that both sides move."""
    for part, index, text, target in (
        ("large", 0, "AdamW, GPT-2 small: time against torch fused", "at most 1.05"),
        ("small", 0, "AdamW, 300 tiny leaves: time against torch fused", "at most 0.7"),
        ("small", 1, "AdamW, ResNet-50: time against torch fused", "at most 1.0"),
        ("middle", 1, "AdamW, 1000 of 256x256: time against torch fused", "at most 1.0"),
        ("tail", 1, "clip, AdamW, average of the weights, GPT-2 small: time against torch", "at most 0.7"),
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
        yield "programs compiled for ever-changing subsets of 1000 leaves", results["subsets"]["programs compiled"], "at most 4", "-"
    for starts in results.get("first", {}).get("sets", ()):
        seconds = {name: each["construction s"] + each["first step s"] for name, each in starts["starts"].items()}
        what = f"{starts['title']}, {starts['leaves']} leaves: seconds to the first step"
        yield what, seconds[OURS], "at most 4" if starts["leaves"] >= 1000 else "at most 1.5", "-"


def machine_report(stem: str, results: dict[str, Any], folder: Path) -> list[str]:
    """All sections of one results file."""
    known = [name for name in TITLES if name in results]
    about = results[known[0]]["environment"]
    versions = {json.dumps(results[name]["environment"]["versions"]) for name in known}
    lines = [f"## {about['machine']}", ""]
    for each in sorted(versions):
        lines += [", ".join(f"{name} {version}" for name, version in json.loads(each).items()) + f"; {about['torch threads']} threads.", ""]
    met = ([text, number(figure), target, by_bytes] for text, figure, target, by_bytes in goals(results))
    lines += ["### At a glance", *grid(["", "measured", "wanted", "by bytes"], met)]
    for name in known:
        lines += section(name, results[name])
        picture = folder / f"{stem}-growth.png"
        if name == "growth" and picture.exists():
            lines += [f"![Time of a step against the number of leaves and the size of one leaf](results/{picture.name})", ""]
    return lines


def written(text: str, folder: Path) -> str:
    """The README with the figures of all results files in the folder, except those of a developer's own machine (`*-local.json`)."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    files = [path for path in sorted(folder.glob("*.json")) if not path.stem.endswith("-local")]
    lines = [line for path in files for line in machine_report(path.stem, json.loads(path.read_text()), folder)]
    return before + "\n".join([BEGIN, "", *(lines or ["None yet: `make bench` writes them.", ""])]) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--readme", type=Path, default=FOLDER / "README.md")
    given = parser.parse_args()
    given.readme.write_text(written(given.readme.read_text(), given.results))


if __name__ == "__main__":
    main()
