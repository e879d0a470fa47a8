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
# second number one program is still faster than several, since its loops overlap and a call costs 0.1 ms and more in cold caches (GPT-2
# small: 0.91 to 0.99 times the time of programs for four equal leaves each, the former where memory is fast), and it compiles as fast:
# XLA compiles equal loops of a program once.
FEW, SOME = 16, 64
# Equal leaves that are worth programs of their own among more loops. Equal calls of a traced program, which take longer to compile, are
# worth them: so many among SOME loops, and so many among more.
EQUALS_OF_SOME, EQUALS = 12, 4
# Where all equal leaves are live, as in most steps, so many are one program at most: a GPT-2 of 48 layers takes 0.89 to 0.98 times as
# long as with four in each, and its first step 0.13 s more.
MOST = 24
# Where some are not, one call should update so many elements at least, and any number of leaves be served by few programs.
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


def frequent(loops: int) -> float:
    """How many equal leaves are worth programs of their own where so many loops may be live."""
    return math.inf if loops <= SOME else EQUALS


def equals(loops: int) -> float:
    """How many equal calls in a traced program are worth programs of their own, if it has so many loops."""
    return math.inf if loops <= FEW else EQUALS_OF_SOME if loops <= SOME else EQUALS


def divided(
    kinds: Sequence[Hashable], sizes: Sequence[int], counts: Sequence[int], restless: bool, early: bool = False
) -> Iterator[Sequence[int]]:
    """The positions of the leaves that each program takes.

    Args:
      kinds: of each live leaf (a pack counts as one) what it must have in common with others of its tile; None for one that has none.
      sizes: its elements.
      counts: how many leaves that may be live are like it, if they are worth programs of their own, else 0.
      restless: whether so many sets of live leaves were seen that none should have a program for itself.
      early: whether some of what is left may be called ahead of the others.
    """
    rest: list[int] = []
    alike: dict[Hashable, list[int]] = {}
    for position, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        if kind is None or not (restless or count):
            rest.append(position)
        else:
            alike.setdefault(kind, []).append(position)
    if rest:
        first = _first(rest, sizes) if early else []
        yield from [first] if first else []
        yield [position for position in rest if position not in first]
    for positions in alike.values():
        whole = not restless and len(positions) == counts[positions[0]]
        yield from evenly(positions) if whole else in_tiles(positions, sizes[positions[0]])


def _first(positions: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Which of some leaves on a CPU are worth a call of their own, on which its cores work while the host makes the others ready.

    The largest, if a few have elements enough, and where so many others are left that they take the host long.
    """
    largest = sorted(positions, key=lambda position: -sizes[position])[:_LEAVES_FIRST]
    if len(positions) - _LEAVES_FIRST <= FEW or sum(sizes[position] for position in largest) < ELEMENTS:
        return []
    return sorted(largest)


def evenly(members: Sequence[T]) -> Iterator[Sequence[T]]:
    """Equal leaves, of which all are live, in as few programs as there may be: of one size, but for the last."""
    size = -(-len(members) // -(-len(members) // MOST))
    yield from (members[start : start + size] for start in range(0, len(members), size))


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
