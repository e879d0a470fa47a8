"""Draw the pictures of docs/performance from the results files: the growth curves, and the few rows of the summary as bars.

python benchmarks/plots.py [--results FOLDER] [--images FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no window, because a build machine has no screen

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from report import SUMMARY_OF, SummaryRow, summary_rows
from sections import number

FOLDER = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
INK, GREY, PALE = "#22272e", "#6b7280", "#e5e7eb"
OURS_COLOUR, BLUE, PALE_BLUE = "#d1495b", "#2c6e91", "#a9c6d6"
COLOURS = {"maskbridge": OURS_COLOUR, "torch fused": BLUE, "torch foreach": "#7fa88b", "optax in pure JAX": "#c28a2b"}
STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "text.color": INK,
    "figure.facecolor": "white",
}
FONTS = ["DejaVu Sans", "Verdana", "Arial"]  # of the text in SVG, which the browser draws
HEIGHT = 0.28  # of a bar of the summary
APART = 0.19  # least distance between two labels, in decades


def size_of(count: float) -> str:
    """The size in bytes of that many float32 numbers, in a unit that keeps the number short."""
    value, unit = 4 * count, "B"
    for larger in ("KB", "MB", "GB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}"


def duration(ms: float, _: Any = None) -> str:
    if ms >= 1000:
        return f"{ms / 1000:g} s"
    return f"{ms:g} ms" if ms >= 1 else f"{ms * 1000:g} µs"


def spaced(values: dict[str, float]) -> dict[str, float]:
    """Heights for the labels at the ends of the curves: at the end of its curve, or higher if it would overlap the label below."""
    from math import log10

    found: dict[str, float] = {}
    floor = -99.0
    for name, value in sorted(values.items(), key=lambda pair: pair[1]):
        floor = max(log10(value), floor + APART)
        found[name] = 10**floor
    return found


def panel(axes: Axes, points: list[dict[str, Any]], key: str, limit: Any) -> None:
    """A curve for each candidate, labelled at its end, and a line for the limit that memory bandwidth sets."""
    at = [point[key] for point in points]
    bound = [limit(point["parameters"]) for point in points]
    ends: dict[str, float] = {}
    for name, colour in COLOURS.items():
        ms = [point["rows"][name]["median ms"] for point in points]
        ours = name == "maskbridge"
        axes.plot(at, ms, color=colour, lw=2.4 if ours else 1.6, marker="o", ms=4.5 if ours else 3.5, zorder=3 if ours else 2)
        ends[name] = ms[-1]
    low = min(min(point["rows"][name]["median ms"] for name in COLOURS) for point in points) / 2
    axes.plot(at, bound, color=GREY, lw=1.1, ls=(0, (5, 3)), zorder=1)
    ends["limit of memory"] = bound[-1]
    for name, height in spaced(ends).items():
        axes.annotate(
            name,
            (at[-1], height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS.get(name, GREY),
            fontweight="bold" if name == "maskbridge" else "normal",
            annotation_clip=False,
        )
    axes.set(xscale="log", yscale="log", ylim=(low, None))
    axes.grid(color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(duration))
    axes.minorticks_off()


def growth(figures: dict[str, Any], path: Path) -> None:
    """Draw both curves of one results file."""
    about, speed = figures["environment"], figures["copy bytes per second"]
    moved = figures["bytes per parameter"]
    with plt.rc_context(STYLE):
        picture, (left, right) = plt.subplots(1, 2, figsize=(13.5, 5.6), dpi=130)

        def limit(parameters: int) -> float:
            return moved * parameters / speed * 1e3

        panel(left, figures["by leaves"], "leaves", limit)
        panel(right, figures["by size"], "elements", limit)
        left.set_title(f"Number of parameters, each of {figures['elements of a leaf']:,} elements", loc="left", fontsize=11, pad=10)
        right.set_title("Size of one parameter", loc="left", fontsize=11, pad=10)
        left.set_xlabel("parameters")
        right.set_xlabel("bytes of the parameter, float32")
        left.set_ylabel("time of one AdamW step (median)")
        left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        sizes = [point["elements"] for point in figures["by size"]][:: 1 if len(figures["by size"]) < 6 else 2]
        right.set_xticks(sizes, [size_of(count) for count in sizes])
        versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "jax", "optax"))
        picture.suptitle("One AdamW step on " + about["machine"], x=0.065, ha="left", fontsize=14, fontweight="bold")
        bound = f"Limit of memory: {moved} bytes an element at the {speed / 1e9:.0f} GB/s of a copy; what a cache holds can be faster"
        note = f"{versions}, float32. {bound}."
        picture.text(0.065, 0.905, note, ha="left", fontsize=9.5, color=GREY)
        picture.subplots_adjust(left=0.065, right=0.875, top=0.80, bottom=0.11, wspace=0.48)
        picture.savefig(path)
        plt.close(picture)


def bars(rows: list[SummaryRow], about: dict[str, Any], path: Path) -> None:
    """Draw the summary: for each row the times of torch's default, of its fused optimizer and of maskbridge, relative to torch."""
    with plt.rc_context(STYLE | {"svg.fonttype": "none", "svg.hashsalt": "maskbridge", "font.sans-serif": FONTS}):
        picture, axes = plt.subplots(figsize=(9, 0.56 * len(rows) + 1.4))
        for at, row in enumerate(rows):
            drawn = [(row.default_ratio or 1.0, row.default, PALE_BLUE), (1.0, row.fused, BLUE), (row.ratio, row.ours, OURS_COLOUR)]
            drawn = [each for each in drawn if each[1] is not None]
            for nth, (ratio, ms, colour) in enumerate(drawn):
                _bar(axes, at + HEIGHT * (nth - (len(drawn) - 1) / 2), ratio, ms, colour)
        axes.axvline(1, color=GREY, lw=0.8, ls=(0, (2, 3)), zorder=1)
        axes.set(xlim=(0, 1.1 * max(max(row.ratio, row.default_ratio or 1) for row in rows)), ylim=(len(rows) - 0.4, -0.6))
        axes.set_yticks(range(len(rows)), [row.title for row in rows])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_xlabel("time relative to torch's fused optimizer, or to its default where it has no fused one")
        axes.spines["left"].set_visible(False)
        versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "jax", "optax"))
        picture.suptitle("Time of a step: shorter is faster", x=0.02, y=0.985, ha="left", fontsize=13, fontweight="bold")
        picture.text(0.02, 0.92, f"{about['machine']}; {versions}; numbers are ms", ha="left", fontsize=9, color=GREY)
        keys = {"torch default": PALE_BLUE, "torch fused=True": BLUE, "maskbridge": OURS_COLOUR}
        handles = [Patch(color=colour, label=name) for name, colour in keys.items()]
        picture.legend(handles=handles, loc="upper right", bbox_to_anchor=(0.985, 0.995), ncols=3, frameon=False, fontsize=9)
        picture.subplots_adjust(left=0.34, right=0.985, top=0.89, bottom=0.10)
        picture.savefig(path, metadata={"Date": None})
        plt.close(picture)


def _bar(axes: Axes, at: float, ratio: float, ms: float | None, colour: str) -> None:
    weight = "bold" if colour == OURS_COLOUR else "normal"
    axes.barh(at, ratio, height=HEIGHT - 0.02, color=colour, zorder=3)
    axes.annotate(number(ms), (ratio, at), (4, -0.5), textcoords="offset points", va="center", fontsize=8, fontweight=weight, zorder=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--images", type=Path, default=IMAGES)
    given = parser.parse_args()
    for path in sorted(given.results.glob("*.json")):
        figures = json.loads(path.read_text())
        if "growth" in figures:
            growth(figures["growth"], given.images / f"{path.stem}-growth.png")
        rows = summary_rows(figures) if path.stem == SUMMARY_OF else []
        if rows:
            bars(rows, figures["large"]["environment"], given.images / "step_times.svg")


if __name__ == "__main__":
    main()
