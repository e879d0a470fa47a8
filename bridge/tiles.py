"""Tiles: how the leaves of one step are divided among compiled programs.

A few leaves are one program. Of many, those that have equals are updated some at a time by a program for that many equal
leaves, which is compiled once and called for one after the other: compiling takes as long as there are kinds of leaves,
whichever of them have a gradient. What is left is one program more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

# So many loops (a leaf, or a pack) make one program, whatever they are: it compiles in a fraction of a second. Up to the
# second number one program is still faster than several (ResNet-50: 18 ms against 21), since its loops overlap: only what is
# there so often that compiling it again and again would take seconds has programs of its own.
FEW, SOME = 16, 64
# Equal leaves that are worth a program of their own, among SOME loops and among more.
EQUALS_OF_SOME, EQUALS = 12, 4
# Elements that one call should update at least; a call costs 0.2 ms and more in cold caches. With a quarter of them a step of GPT-2 small
# takes 1.05 times as long, with four times as many 0.96 times, but the first one 0.5 s more.
ELEMENTS = 1 << 22
_LEAVES_FIRST = 2  # with four a step of ResNet-50 gained nothing any more, without any it takes 1.02 times as long
_STEP = 4  # from one size of tile to the next


# Elements of a loop that is worth a program of its own ahead of the others on a GPU, which works on it while the host calls those.
AHEAD = 1 << 24
_PROGRAMS_AHEAD = 2  # more than these the host has no time for
_OTHERS = 4  # arrays of a loop beside its gradients: the parameter and what state it may have


def ahead(elements: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Which of some loops on a GPU should be called first, each by itself: those with few arguments for their elements first.

    Args:
      elements, rows: of each loop.
    """
    large = [i for i, count in enumerate(elements) if count >= AHEAD] if len(elements) > 1 else []
    return sorted(large, key=lambda i: -elements[i] / (rows[i] + _OTHERS))[:_PROGRAMS_AHEAD]


def equals(loops: int) -> float:
    """How many equal leaves are worth a program of their own where so many loops may be live."""
    return math.inf if loops <= FEW else EQUALS_OF_SOME if loops <= SOME else EQUALS


def divided(
    kinds: Sequence[Hashable], sizes: Sequence[int], frequent: Sequence[bool], restless: bool, early: bool = False
) -> Iterator[Sequence[int]]:
    """The positions of the leaves that each program takes.

    Args:
      kinds: of each live leaf (a pack counts as one) what it must have in common with others of its tile; None for one that has none.
      sizes: its elements.
      frequent: whether so many leaves that may be live are like it that they are worth programs of their own.
      restless: whether so many sets of live leaves were seen that none should have a program for itself.
      early: whether some of what is left may be called ahead of the others.
    """
    rest: list[int] = []
    alike: dict[Hashable, list[int]] = {}
    for position, (kind, is_frequent) in enumerate(zip(kinds, frequent, strict=True)):
        if kind is None or not (restless or is_frequent):
            rest.append(position)
        else:
            alike.setdefault(kind, []).append(position)
    if rest:
        first = _first(rest, sizes) if early else []
        yield from [first] if first else []
        yield [position for position in rest if position not in first]
    for positions in alike.values():
        yield from in_tiles(positions, sizes[positions[0]])


def _first(positions: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Which of some leaves on a CPU are worth a call of their own, on which its cores work while the host makes the others ready.

    The largest, if a few have elements enough, and where so many others are left that they take the host long.
    """
    largest = sorted(positions, key=lambda position: -sizes[position])[:_LEAVES_FIRST]
    if len(positions) - _LEAVES_FIRST <= FEW or sum(sizes[position] for position in largest) < ELEMENTS:
        return []
    return sorted(largest)


def in_tiles(members: Sequence[T], elements: int) -> Iterator[Sequence[T]]:
    """Equal leaves of so many elements, so many at a time as one program takes."""
    start = 0
    for size in tile_sizes(elements):
        while len(members) - start >= size:
            yield members[start : start + size]
            start += size


def tile_sizes(elements: int) -> list[int]:
    """How many leaves of so many elements a program may take: at most three sizes, the last 1."""
    largest = 1
    while largest < _STEP**2 and largest * elements < ELEMENTS:
        largest *= _STEP
    return [largest // _STEP**n for n in range(3) if largest >= _STEP**n]
