"""Decide which parameters share a bucket, and give each parameter its buffer.

A bucket is one buffer whose rows are parameters of equal size. A program updates all its rows as one array. The gradients reach the
program in one of three ways: each as an argument, gathered into a second buffer, or read by address where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from bridge._compiler import chunking
from bridge._memory import address_space, adoption, jax_buffers
from bridge._memory.ownership import mappings_read_once
from bridge._process import uncollected
from bridge._xla import probes

from .record import Leaf

# By device type. Gathering reads and writes a gradient once more, but saves an argument, a loop and a view: worth it for small rows.
GATHERED = {"cpu": 1 << 17, "cuda": 1 << 20}
# Device types on which larger parameters are in buckets too, each gradient an argument: fewer arrays in a call cost the host of a GPU
# less time, and one kernel for equal parameters is faster than one for each.
SINGLY_ON = frozenset({"cuda"})
# Rows on the CPU whose gradients may be read by address. Arguments of larger rows cost little in comparison; gathering rows up to the
# second bound takes no longer than reading them by address.
ADDRESSED, SMALL = 1 << 20, 1 << 15
# For rows above that second bound: gathering is faster than reading by address, but needs this much memory.
GATHERED_PACK = 1 << 23
# Dtypes of parameters and state whose gradients may be read by address. XLA's CPU compiler computes other dtypes in float32.
ADDRESSED_TYPES = frozenset({"float32", "float64"})
# The fewest parameters that make a bucket, by how their gradients are passed. Fewer addressed rows are faster as single parameters of a
# larger program; the number depends on the bytes of a row.
FEWEST, FEWEST_LARGE = 4, 2
FEWEST_ADDRESSED, LONG, FEWEST_LONG = 40, 1 << 18, 64
# Moving parameters into or out of a bucket needs its bytes twice for that time.
LARGEST = 1 << 26
# The cost of one more parameter's arrays in a step, as the bytes that a core moves in that time.
ARRAYS = 1 << 20


class Key(NamedTuple):
    """Parameters with equal keys may be rows of one bucket. addressed: their gradients may be read by address."""

    kind: Hashable
    addressed: bool = False


def is_gathered(leaf: Leaf) -> bool:
    """Return whether the parameter's gradient would be gathered if it were in a bucket."""
    return _bytes(leaf) <= GATHERED.get(leaf.device.type, 0)


def _bytes(leaf: Leaf) -> int:
    return leaf.shape.numel() * leaf.dtype.itemsize


def is_addressed(leaf: Leaf) -> bool:
    """Return whether the parameter's gradient may be read by address if it is in a bucket."""
    return (
        address_space.SUPPORTED
        and not leaf.apart
        and leaf.device.type == "cpu"
        and leaf.device.type not in SINGLY_ON
        and leaf.gradient_dtype is leaf.dtype
        and min(SMALL, GATHERED["cpu"]) < _bytes(leaf) <= ADDRESSED
    )


def is_large_row(leaf: Leaf) -> bool:
    """Return whether a parameter is in a bucket only to save arrays: it is large enough for a loop of its own."""
    return not leaf.alone and is_addressed(leaf) and not is_gathered(leaf)


def is_sparse(rows: int, active: int, moved: int) -> bool:
    """Return whether a bucket costs more than its parameters with a gradient would outside it.

    Args:
      row_count: the number of rows of the bucket. Each step reads and writes all of them.
      rows_with_grad: how many rows have a gradient.
      row_moved_bytes: bytes that the update of one row moves.
    """
    return active * (moved + ARRAYS) < rows * moved


def is_padded(leaf: Leaf) -> bool:
    """Return whether the parameter is updated faster in a padded row of its own. Its gradient is then copied into a padded row."""
    return address_space.SUPPORTED and leaf.device.type == "cpu" and chunking.is_ragged(leaf.shape.numel())


@uncollected()
@mappings_read_once()
def place(leaves: Sequence[Leaf], key_of: Callable[[Leaf], Key | None], writeback: str) -> None:
    """Give each parameter its buffer: a row of a bucket for parameters with equal keys, a buffer of its own for others.

    A parameter that is already in a jax-owned buffer stays there. In a bucket it stays only if all parameters of the bucket have one key:
    else two programs would donate the same buffer.

    Args:
      key_of: the bucket key of a parameter; None for one outside buckets.
      writeback: the optimizer's option. With "copy" nothing is moved.
    """
    if writeback == "inplace":
        adoption.recall(leaf.local for leaf in leaves)
    key_by: dict[Leaf, Key | None] = {}
    ahead = adoption.Ahead(2 * max(map(_bytes, leaves), default=0))
    for leaf in sorted(leaves, key=_bytes, reverse=True):  # the largest are rarely in buckets: copy them while keys are computed
        leaf.look()
        key_by[leaf] = key_of(leaf) if writeback == "inplace" else None
        if key_by[leaf] is None and writeback == "inplace" and leaf.layout is None and leaf.slot is None:
            ahead.begin(leaf.local)
    keys: dict[jax_buffers.Memory, set[Key | None]] = {}
    found = []
    for leaf in leaves:
        key, (memory, row) = key_by[leaf], jax_buffers.located(leaf.local)
        if row is not None and memory is not None:
            keys.setdefault(memory, set()).add(key)
        found.append((leaf, key, memory, row))
    wanted: dict[Key, list[Leaf]] = {}
    for leaf, key, memory, row in found:
        at_home = memory is not None and (row is None or (key is not None and len(keys[memory]) == 1))
        goes_back = leaf.memory is not None and leaf.slot is not None and adoption.fits(leaf.local, leaf.memory, leaf.slot)
        if key is None or at_home or goes_back or adoption.cannot_own(leaf.local):
            leaf.place(writeback, alone=row is not None and not at_home, ahead=ahead)
        else:
            wanted.setdefault(key, []).append(leaf)
    lie: list[tuple[Leaf, bool]] = []
    for key, alike in wanted.items():
        gathered, size = is_gathered(alike[0]), _bytes(alike[0])
        many = len(alike) >= (FEWEST_ADDRESSED if size <= LONG else FEWEST_LONG)
        addressed = key.addressed and many and probes.several_results()
        enough = addressed or (len(alike) >= (FEWEST if gathered else FEWEST_LARGE) and (gathered or alike[0].device.type in SINGLY_ON))
        several = -(-size * len(alike) // LARGEST) if addressed else 1
        # Spread neighbors over the buckets. Then each bucket has some gradients, and programs do not differ in how many they update.
        # Few buckets at a time, because the bytes that are moved exist twice.
        groups = [[leaf.local for leaf in alike[nth::several]] for nth in range(several)]
        groups = groups if enough else [[leaf.local] for leaf in alike if is_padded(leaf)]
        at_once = max(2, len(groups) // 8)
        for start in range(0, len(groups), at_once):
            adoption.pack(groups[start : start + at_once])
        lie += [(leaf, not enough and not is_padded(leaf)) for leaf in alike]
    for leaf, alone in lie:
        if alone:
            ahead.begin(leaf.local)
    for leaf, alone in lie:
        leaf.place(writeback, alone=alone, ahead=ahead)


def copied_by_others(leaves: Iterable[Leaf]) -> list[str]:
    """Return the names of parameters that each step copies because their memory is not from torch's allocator and may have other users."""
    return [
        leaf.name
        for leaf in leaves
        if leaf.why in (adoption.FOREIGN, adoption.SHARED) and leaf.memory is None and not leaf.local.untyped_storage().resizable()
    ]
