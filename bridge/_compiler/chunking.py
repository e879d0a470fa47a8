"""Which leaves share an executable, and which lengths XLA's CPU compiler writes bad loops for."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from bridge import _process

LARGE = 1 << 14  # elements of the smallest array whose loops matter: smaller ones are on one core, and in its cache


# ------------------------------------------------------------------ loops of an odd length


def is_ragged(size: int) -> bool:
    """Whether a loop over so many elements is written badly for want of one more.

    jaxlib 0.10.2 cuts a loop in parts: in two for two to four cores. Where the second is shorter it asks at each element whether it is
    past the end, and LLVM writes no vectors: AdamW took 5.4 to 6.2 times as long as torch's. Of three parts it does not.
    """
    return 2 <= _process.CORES <= 4 and size % 2 == 1 and size >= LARGE


T = TypeVar("T")

LOOPS = 64  # loops (of a leaf, or of a pack) that are one program, whatever they are: they overlap, and equal ones are compiled once
EQUAL = 24  # equal leaves that are one program at most


def sizes() -> list[int]:
    """Return how many equal leaves a program may take that serves any number of them: few sizes, the last 1."""
    return list(dict.fromkeys((EQUAL, math.isqrt(EQUAL), 1)))


def enough(loops: int) -> float:
    """Return how many equal leaves are worth programs of their own among so many loops."""
    return math.inf if loops <= LOOPS else math.isqrt(EQUAL)


def divided(kinds: Sequence[Hashable], counts: Sequence[int], restless: bool) -> Iterator[Sequence[int]]:
    """The positions of the leaves that each program takes.

    Args:
      kinds: of each live leaf (a pack counts as one) what it must have in common with others of its tile; None for one that has none.
      counts: how many leaves that may be live are like it, if they are worth programs of their own, else 0.
      restless: whether so many sets of live leaves were seen that none should have a program for itself.
    """
    rest: list[int] = []
    alike: dict[Hashable, list[int]] = {}
    for position, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        if kind is None or not (restless or count):
            rest.append(position)
        else:
            alike.setdefault(kind, []).append(position)
    if rest:
        yield rest
    for positions in alike.values():
        whole = not restless and len(positions) == counts[positions[0]]
        yield from evenly(positions) if whole else in_tiles(positions)


def evenly(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Equal leaves, of which all are live, in as few programs as there may be: of one size, but for the last."""
    size = -(-len(members) // -(-len(members) // EQUAL))
    yield from (members[start : start + size] for start in range(0, len(members), size))


def in_tiles(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Equal leaves, so many at a time as one program takes."""
    start = 0
    for size in sizes():
        while len(members) - start >= size:
            yield members[start : start + size]
            start += size
