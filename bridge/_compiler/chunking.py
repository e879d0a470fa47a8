"""Chunking: which leaves share an executable."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from . import policy

T = TypeVar("T")


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
    size = -(-len(members) // -(-len(members) // policy.CHUNKING.max_equal_leaves))
    yield from (members[start : start + size] for start in range(0, len(members), size))


def fixed_size_chunks(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield equal leaves in chunks of the sizes in `ChunkingPolicy.chunk_sizes`."""
    start = 0
    for size in policy.CHUNKING.chunk_sizes:
        while len(members) - start >= size:
            yield members[start : start + size]
            start += size
