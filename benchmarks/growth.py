"""How the time of a step grows with the number of leaves, and with the size of a single leaf."""

from __future__ import annotations

from typing import Any

import candidates
from common import FLOAT, Maker, Settings, Shape, available, compare, copy_bandwidth, elements

LEAVES = [1, 3, 10, 30, 100, 300, 1000, 3000]
LEAF = 1024  # elements of each leaf
SIZES = [2**k for k in range(8, 29, 2)]  # elements of the single leaf: 1 KB to 1 GB
BYTES_PER_PARAMETER = 28  # for AdamW: three arrays are read and written, the gradient is read


def rounds_for(count: int, settings: Settings) -> int:
    """Many rounds where a step takes microseconds, few where it takes seconds."""
    return settings.count(min(15 * settings.rounds, max(7, int(3e8 / max(count, 1e6)))), 3)


def curve(point: str, values: list[int], shapes_of: Any, settings: Settings) -> list[dict[str, Any]]:
    makers = candidates.adamw(settings)[0]
    chosen: dict[str, Maker] = {name: makers[name] for name in (candidates.OURS, candidates.FUSED, candidates.FOREACH, candidates.OPTAX)}
    points = []
    for value in values:
        shapes: list[Shape] = shapes_of(value)
        count = elements(shapes)
        # For the largest sets, which run in pairs: two candidates with the temporaries of foreach, and the gradients.
        needed = (2 * 4 + 3) * FLOAT * count
        if settings.device == "cpu" and needed > available():
            print(f"  left out: {value} {point}, which needs {needed / 2**30:.0f} GiB of memory")
            continue
        rounds = rounds_for(count, settings)
        parts = [[name] for name in chosen if name != candidates.FUSED] if count > 5e7 else [list(chosen)]
        timed: dict[str, Any] = {}
        for part in parts:
            part_makers = {name: chosen[name] for name in dict.fromkeys([candidates.FUSED, *part])}
            timed = compare(f"{value} {point}", part_makers, shapes, settings, candidates.FUSED, rounds)["rows"] | timed
        points.append({point: value, "parameters": count, "rows": {name: timed[name] for name in chosen}})
    return points


def growth(settings: Settings) -> dict[str, Any]:
    """Both curves, and the bandwidth of a copy on this machine, which limits the speed for large sizes."""
    leaves = LEAVES[:2] if settings.quick else LEAVES
    sizes = SIZES[:2] if settings.quick else SIZES
    return {
        "copy bytes per second": copy_bandwidth(settings.device, settings.quick),
        "bytes per parameter": BYTES_PER_PARAMETER,
        "elements of a leaf": LEAF,
        "by leaves": curve("leaves", leaves, lambda n: [(LEAF,)] * n, settings),
        "by size": curve("elements", sizes, lambda n: [(n,)], settings),
    }
