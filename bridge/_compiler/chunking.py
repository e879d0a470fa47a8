"""Chunking: which leaves share an executable, and for which lengths XLA's CPU compiler generates slow loops."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from bridge import _process

LARGE = 1 << 14  # elements from which the loops of an array matter; smaller arrays run on one core, from its cache


# ------------------------------------------------------------------ loops of an odd length


def is_ragged(size: int) -> bool:
    """Return whether XLA splits a loop over this many elements unevenly, which makes the loop slow.

    jaxlib 0.10.2 splits a loop into two parts for two to four cores. If the second part is shorter, the loop checks its bound at each
    element, and LLVM does not vectorize it. XLA does not do this with three parts or more.
    """
    return 2 <= _process.CORES <= 4 and size % 2 == 1 and size >= LARGE


T = TypeVar("T")

LOOPS = 64  # loops (one for each leaf or bucket) up to which all leaves are one program, whose loops overlap
EQUAL = 24  # equal leaves in one program, at most


def sizes() -> list[int]:
    """Return the sizes of chunks in descending order: few sizes that serve any number of equal leaves, the last of them 1."""
    return list(dict.fromkeys((EQUAL, math.isqrt(EQUAL), 1)))


def enough(loops: int) -> float:
    """Return how many equal leaves are worth programs of their own in an update with this many loops."""
    return math.inf if loops <= LOOPS else math.isqrt(EQUAL)


def divided(kinds: Sequence[Hashable], counts: Sequence[int], restless: bool) -> Iterator[Sequence[int]]:
    """Yield the positions of the leaves of each program. All leaves outside chunks are one program.

    Args:
      leaf_keys: a key for each leaf with a gradient; a bucket is one leaf. Leaves with equal keys may share a chunk. None
        keeps a leaf out of chunks.
      equal_counts: for each leaf, how many trainable leaves equal it; 0 if they are not worth programs of their own.
      sets_keep_changing: whether the set of leaves with a gradient changes so often that no set gets a program of its own.
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
    """Yield equal leaves, all of which have a gradient, in as few chunks as possible: all of one size except for the last."""
    size = -(-len(members) // -(-len(members) // EQUAL))
    yield from (members[start : start + size] for start in range(0, len(members), size))


def in_tiles(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield equal leaves in chunks of the sizes from `chunk_sizes`."""
    start = 0
    for size in sizes():
        while len(members) - start >= size:
            yield members[start : start + size]
            start += size
