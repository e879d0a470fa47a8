"""Compare two versions against the speed bound: did any row or section of `step.py --bound` become slower?

    python benchmarks/bound.py --before B1.json B2.json ... --after A1.json A2.json ... [--again C1.json C2.json ...]

Each file is the result of one process. Files in the same position form a pair: run both versions, then both versions again for the next
pair. `--again` names the results of a second run of the old version in each turn (A/A): how far the ratios of this run to the first lie
from 1 shows how much a row varies without any change. The exit status is 1 if the bound is not met.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sections import OURS, grid

# A row is slower if its median ratio is above 1 by more than this and by more than its A/A spread, and its lower quartile is above 1.
SLOWER = 0.03
# The largest ratio allowed for a slower row, and the largest geometric mean allowed for the rows of a section.
ROW, SECTION = 1.08, 1.03

Key = tuple[str, str]  # section, row


class Row(NamedTuple):
    """The ratios after / before of one row over all pairs; `spread` is how far the quartiles of its A/A ratios lie from 1."""

    median: float
    low: float
    high: float
    spread: float

    @property
    def is_slower(self) -> bool:
        return self.median > 1 + max(SLOWER, self.spread) and self.low > 1

    @property
    def is_too_slow(self) -> bool:
        return self.is_slower and self.median > ROW


def times(results: dict[str, Any]) -> dict[Key, float]:
    """For each of our rows, the ratio to torch within a round, or the milliseconds if the table has no baseline."""
    found: dict[Key, float] = {}
    for section, figures in results.items():
        if "ratio" in figures:
            found[section, figures["title"]] = figures["ratio"]
        for table in figures.get("tables", ()):
            for name, row in table["rows"].items():
                if name.startswith(OURS):
                    found[section, f"{table['title']}: {name}"] = row.get("ratio") or row["median ms"]
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, middle, high


def ratios(numerators: Sequence[dict[Key, float]], denominators: Sequence[dict[Key, float]], key: Key) -> list[float]:
    """The ratio of a row for each pair in which both sides have that row."""
    return [over[key] / under[key] for over, under in zip(numerators, denominators, strict=True) if key in over and key in under]


def compared(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]] | None = None
) -> dict[Key, Row]:
    """Compare the rows that both versions have."""
    old, new, same = list(map(times, before)), list(map(times, after)), list(map(times, again or before))
    found: dict[Key, Row] = {}
    for key in dict.fromkeys(key for each in old for key in each):
        values = ratios(new, old, key)
        if values:
            low, middle, high = quartiles(values)
            least, _, most = quartiles(ratios(same, old, key) or [1.0])
            found[key] = Row(middle, low, high, max(abs(1 - least), abs(most - 1)))
    return found


def means(rows: dict[Key, Row]) -> dict[str, float]:
    """The geometric mean of each section."""
    sections: dict[str, list[float]] = {}
    for (section, _), row in rows.items():
        sections.setdefault(section, []).append(math.log(row.median))
    return {section: math.exp(statistics.fmean(logs)) for section, logs in sections.items()}


def verdict(rows: dict[Key, Row]) -> list[str]:
    """The rows and sections above the bound; empty if the bound is met."""
    too_slow = [f"{section}, {name}: {row.median:.3f} is above {ROW}" for (section, name), row in rows.items() if row.is_too_slow]
    return [
        *too_slow,
        *(f"{section}: the geometric mean {mean:.3f} is above {SECTION}" for section, mean in means(rows).items() if mean > SECTION),
    ]


def report(rows: dict[Key, Row]) -> Iterable[str]:
    """Yield rows and sections as markdown tables, then the verdict."""
    words = {key: "too slow" if row.is_too_slow else "slower" if row.is_slower else "" for key, row in rows.items()}
    yield from grid(
        ["section, row", "after / before", "quartiles", "A/A", ""],
        (
            [", ".join(key), f"{row.median:.3f}", f"{row.low:.3f} to {row.high:.3f}", f"{row.spread:.3f}", words[key]]
            for key, row in rows.items()
        ),
    )
    counts = {section: sum(key[0] == section for key in rows) for section, _ in rows}
    yield from grid(["section", "rows", "geometric mean"], ([name, str(counts[name]), f"{mean:.3f}"] for name, mean in means(rows).items()))
    above = verdict(rows)
    yield from [f"Above the bound: {line}" for line in above] or ["The bound is met."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, needed in (("--before", True), ("--after", True), ("--again", False)):
        parser.add_argument(name, nargs="+", type=Path, required=needed)
    given = parser.parse_args()
    lists = [files for files in (given.before, given.after, given.again) if files is not None]
    if len({len(files) for files in lists}) > 1:
        parser.error(f"files in the same position are a pair, but there are {', '.join(str(len(files)) for files in lists)} of them")
    rows = compared(*([json.loads(path.read_text()) for path in files] for files in lists))
    if not rows:
        parser.error("the files before and after have no row in common")
    print("\n".join(report(rows)))
    sys.exit(1 if verdict(rows) else 0)


if __name__ == "__main__":
    main()
