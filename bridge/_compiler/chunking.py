"""Chunking: which leaves share an executable, and for which lengths XLA's CPU compiler generates slow loops."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from bridge import _process

MIN_LARGE_ELEMENTS = 1 << 14  # elements from which the loops of an array matter; smaller arrays run on one core, from its cache


# ------------------------------------------------------------------ loops of an odd length


def splits_unevenly(size: int) -> bool:
    """Return whether XLA splits a loop over this many elements unevenly, which makes the loop slow.

    jaxlib 0.10.2 splits a loop into two parts for two to four cores. If the second part is shorter, the loop checks its bound at each
    element, and LLVM does not vectorize it. XLA does not do this with three parts or more.
    """
    return 2 <= _process.CORES <= 4 and size % 2 == 1 and size >= MIN_LARGE_ELEMENTS


T = TypeVar("T")

MAX_SHARED_LOOPS = 64  # loops (one for each leaf or bucket) up to which all leaves are one program, whose loops overlap
MAX_EQUAL_LEAVES = 24  # equal leaves in one program, at most


def chunk_sizes() -> list[int]:
    """Return the sizes of chunks in descending order: few sizes that serve any number of equal leaves, the last of them 1."""
    return list(dict.fromkeys((MAX_EQUAL_LEAVES, math.isqrt(MAX_EQUAL_LEAVES), 1)))


def min_equal_leaves(loops: int) -> float:
    """Return how many equal leaves are worth programs of their own in an update with this many loops."""
    return math.inf if loops <= MAX_SHARED_LOOPS else math.isqrt(MAX_EQUAL_LEAVES)


def chunk_leaves(leaf_keys: Sequence[Hashable], equal_counts: Sequence[int], sets_keep_changing: bool) -> Iterator[Sequence[int]]:
    """Yield the positions of the leaves of each program. All leaves outside chunks are one program.

    Args:
      leaf_keys: a key for each leaf with a gradient; a bucket is one leaf. Leaves with equal keys may share a chunk. None
        keeps a leaf out of chunks.
      equal_counts: for each leaf, how many trainable leaves equal it; 0 if they are not worth programs of their own.
      sets_keep_changing: whether the set of leaves with a gradient changes so often that no set gets a program of its own.
    """
    rest: list[int] = []
    alike: dict[Hashable, list[int]] = {}
    for position, (kind, count) in enumerate(zip(leaf_keys, equal_counts, strict=True)):
        if kind is None or not (sets_keep_changing or count):
            rest.append(position)
        else:
            alike.setdefault(kind, []).append(position)
    if rest:
        yield rest
    for positions in alike.values():
        is_complete = not sets_keep_changing and len(positions) == equal_counts[positions[0]]
        yield from equal_chunks(positions) if is_complete else fixed_size_chunks(positions)


def equal_chunks(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield equal leaves, all of which have a gradient, in as few chunks as possible: all of one size except for the last."""
    size = -(-len(members) // -(-len(members) // MAX_EQUAL_LEAVES))
    yield from (members[start : start + size] for start in range(0, len(members), size))


def fixed_size_chunks(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield equal leaves in chunks of the sizes from `chunk_sizes`."""
    start = 0
    for size in chunk_sizes():
        while len(members) - start >= size:
            yield members[start : start + size]
            start += size
