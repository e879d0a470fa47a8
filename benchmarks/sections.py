"""Turn the sections of a results file into markdown: what `step.py` prints, and `report.py` writes into pages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

OURS, YARDSTICK = "maskbridge", "torch fused, as many bytes"
TITLES = {
    "large": "Large parameters",
    "small": "Many small parameters",
    "middle": "Many parameters of middle size, and a prime number of elements",
    "tail": "Clipping, averages and loss scaling",
    "unfused": "Optimizers without a fused kernel in torch",
    "types": "Other dtypes, and an odd number of elements",
    "loop": "Training loops: forward, backward, step",
    "pipelines": "Training steps as one program: JaxTrainStep",
    "first": "Time to the first step",
    "subsets": "Other parameters without a gradient at each step",
    "memory": "Memory",
    "growth": "Growth with the number and the size of parameters",
    "dlpack": "Converting a tensor",
    "functions": "Calling a small JAX function",
    "device": "On a GPU only",
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
    title = f"**{table['title']}** ({table['leaves']} tensors{size})"
    return [title, *grid(["", "ms", "ratio (quartiles)", "first step, s"], lines), *missing(table)]


def large(figures: dict[str, Any]) -> list[str]:
    if "bytes" not in figures:  # results of `--bound`
        return tabled(figures)
    counted = ([row["optimizer"], number(row["bytes"]), number(row["fewest"])] for row in figures["bytes"])
    text = (
        "Bytes that a step reads and writes for each float32 parameter, by XLA's count. At least: parameter and state are read and written "
        "once, and the gradient is read once, or twice if a norm must be known first."
    )
    return [*tabled(figures), text, *grid(["", "bytes", "at least"], counted)]


def tabled(figures: dict[str, Any]) -> list[str]:
    return [line for table in figures["tables"] for line in steps(table)]


def loop(figures: dict[str, Any]) -> list[str]:
    """The tables; after each one the results of candidates that had a process, and so the heap of the C library, to themselves."""
    found = []
    for table in figures["tables"]:
        found += steps(table)
        if "apart" in table:  # missing in older results, which come from one process
            lines = (
                [name, *(f"{number(statistics.median(runs[key]))} ({number(min(runs[key]))} to {number(max(runs[key]))})" for key in runs)]
                for name, runs in table["apart"].items()
            )
            count = len(next(iter(table["apart"].values()))["median ms"])
            head = f"Each in {count} processes of its own; median (lowest to highest):"
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
        "ms a step. torch has no LAMB and no Lion, so they are compared with pytorch_optimizer. torch has a fused Adagrad for the CPU, "
        'which is not in this table. Muon updates the matrices only. "torch fused, as many bytes" is a fused optimizer of torch that moves '
        "as many bytes: AdamW (28 bytes a parameter) or SGD with momentum (20). The last column says how many times faster that one is "
        "than torch default."
    )
    return [
        head,
        *grid(["ResNet-50", *columns, "maskbridge: times faster", "as many bytes: times faster"], lines),
        *missing({"missing": absent}),
    ]


def first(figures: dict[str, Any]) -> list[str]:
    """One line for each candidate of a set, with its second start beside the first."""
    lines = []
    for found in figures["sets"]:
        starts = found["starts"]
        lines += [
            [f"{found['title']}: {name}", total_of(start), total_of(starts.get(f"{name}, second start"))]
            for name, start in starts.items()
            if not name.endswith((", second start", ", filling the cache"))
        ]
    return [
        "Seconds from the construction of the optimizer to the end of its first step, in a fresh process and without imports. At a second "
        "start jax's compilation cache has the programs. In brackets: the shortest and the longest run.",
        *grid(["", "first start", "second start"], lines),
    ]


def total_of(start: dict[str, Any] | None) -> str:
    """The seconds of a start, with those of its shortest and longest run; "-" if there is none."""
    if start is None:
        return "-"
    total = start["construction s"] + start["first step s"]
    totals = start.get("totals s", [total])  # older results have one run
    return number(total) + (f" ({number(totals[0])} to {number(totals[-1])})" if len(totals) > 1 else "")


def subsets(figures: dict[str, Any]) -> list[str]:
    head = (
        f"{figures['leaves']} parameters ({figures['title']}), each without a gradient in {figures['absent']:.0%} of {figures['steps']} "
        f"steps. Programs compiled: {figures['programs compiled']}, and {figures['programs compiled in the second half']} of them in the "
        "second half."
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
        f"{peak['title']}: MiB beyond the imports. Parameters, gradients and state take {number(peak['smallest MiB'])} MiB.",
        *grid(["", "peak", "after five steps", "bytes of state"], peaks),
        f"Resident MiB of a process after so many steps of {endurance['title']}:",
        *grid(["", *(f"{int(count):,}" for count in counts)], growing),
        f"Resident MiB, and in brackets the number of jax arrays that are alive; {left['title']}. Last, after `malloc_trim`:",
        *grid(["", *marks], kept),
    ]


def growth(figures: dict[str, Any]) -> list[str]:
    found = [f"ms an AdamW step. A copy on this machine moves {figures['copy bytes per second'] / 1e9:.1f} GB/s.", ""]
    for key, what in (("by leaves", "leaves"), ("by size", "elements")):
        points = figures[key]
        if points:
            names = list(points[0]["rows"])
            lines = ([f"{point[what]:,}", *(number(point["rows"][name]["median ms"]) for name in names)] for point in points)
            title = f"parameters of {figures['elements of a leaf']:,} elements" if what == "leaves" else "elements of one parameter"
            found += grid([title, *names], lines)
    return found


def interop(figures: dict[str, Any]) -> list[str]:
    return grid(["", "microseconds"], ([name, number(value)] for name, value in figures["microseconds per call"].items()))


def device(figures: dict[str, Any]) -> list[str]:
    moved, stress = figures["bandwidth"], figures["stress"]
    lines = ([name, number(row["bytes per second"] / 1e9), f"{row['of a copy']:.0%}"] for name, row in moved["rows"].items())
    head = (
        f"{moved['title']}: the bytes that AdamW must move, over its time. A copy moves {moved['copy bytes per second'] / 1e9:,.0f} GB/s."
    )
    equal = "as torch" if stress["as torch"] else "NOT as torch"
    tail = f"Parameters after {stress['steps']} steps whose gradients are written by a slow kernel: {equal}."
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
