"""Packs: parameters of equal signature side by side in one memory, and so their state; and the gradients of small ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from bridge._compiler import chunking
from bridge._memory import address_space, adoption, jax_buffers
from bridge._memory.ownership import mappings_read_once
from bridge._process import uncollected
from bridge._xla import probes

from .record import Leaf

# Bytes of the largest parameter whose gradient is gathered beside those of others, by device: that costs one more reading and writing
# of it, and saves some microseconds for its own arguments, its own loop and its own views.
GATHERED = {"cpu": 1 << 17, "cuda": 1 << 20}
# The devices on which larger ones are packed too, their gradients each an argument: calling costs the host of a GPU 6 us for each
# array that is given and given back, and one kernel for equal leaves moves its bytes a tenth faster than one for each.
SINGLY_ON = frozenset({"cuda"})
# Bytes of the largest parameter on the CPU whose gradient may be read where it lies: the arguments of a larger one cost little beside it.
# And of the largest of which that takes as long as to gather it, however many there are.
ADDRESSED, SMALL = 1 << 20, 1 << 15
# Bytes of the largest pack whose gradients are gathered, of rows longer than that: it takes 0.75 to 0.9 times as long, and so much memory.
GATHERED_PACK = 1 << 23
# The types of parameters and state whose gradients may be read where they lie: others XLA's CPU compiler computes in float32.
ADDRESSED_TYPES = frozenset({"float32", "float64"})
# Fewer leaves of a kind stay by themselves; of those whose gradients are arguments, two save as much as any. Of those that may be read
# where they lie, fewer are faster among others in one program: up to so many bytes each, and larger ones.
FEWEST, FEWEST_LARGE = 4, 2
FEWEST_ADDRESSED, LONG, FEWEST_LONG = 40, 1 << 18, 64
# Bytes of the largest bucket whose gradients are read where they lie: what is moved into it, or out of it, is there twice meanwhile.
LARGEST = 1 << 26
# Bytes that a core moves while a step handles the arrays of one more leaf.
ARRAYS = 1 << 20


class Key(NamedTuple):
    """Equal for leaves that may be rows of one pack; `addressed`: their gradients may be read where they lie."""

    kind: Hashable
    addressed: bool = False


def is_gathered(leaf: Leaf) -> bool:
    """Whether in a pack its gradient would be gathered."""
    return _bytes(leaf) <= GATHERED.get(leaf.device.type, 0)


def _bytes(leaf: Leaf) -> int:
    return leaf.shape.numel() * leaf.dtype.itemsize


def is_addressed(leaf: Leaf) -> bool:
    """Whether in a pack its gradient may be read where it lies."""
    return (
        address_space.SUPPORTED
        and not leaf.apart
        and leaf.device.type == "cpu"
        and leaf.device.type not in SINGLY_ON
        and leaf.gradient_dtype is leaf.dtype
        and min(SMALL, GATHERED["cpu"]) < _bytes(leaf) <= ADDRESSED
    )


def is_large_row(leaf: Leaf) -> bool:
    """Return whether a leaf shares its memory with others although it is worth a loop of its own: for fewer arrays alone."""
    return not leaf.alone and is_addressed(leaf) and not is_gathered(leaf)


def is_sparse(rows: int, active: int, moved: int) -> bool:
    """Return whether a bucket costs more than its leaves would, each by itself.

    Args:
      rows: all rows of the bucket, which each step moves.
      active: those whose leaves have a gradient.
      moved: bytes that the update of one row moves.
    """
    return active * (moved + ARRAYS) < rows * moved


def is_padded(leaf: Leaf) -> bool:
    """Whether it is better updated in a row of its own that is longer. Its gradient is then copied to such a row."""
    return address_space.SUPPORTED and leaf.device.type == "cpu" and chunking.is_ragged(leaf.shape.numel())


@uncollected()
@mappings_read_once()
def place(leaves: Sequence[Leaf], key_of: Callable[[Leaf], Key | None], writeback: str) -> None:
    """Give each leaf its memory: the rows of a pack for those of equal key, for others a memory of their own.

    A leaf that is in jax-owned memory already stays there, in a pack as long as all leaves of that pack have one key:
    else two updates would want to have the one buffer.
    """
    if writeback == "inplace":
        adoption.recall(leaf.local for leaf in leaves)
    key_by: dict[Leaf, Key | None] = {}
    ahead = adoption.Ahead(2 * max(map(_bytes, leaves), default=0))
    for leaf in sorted(leaves, key=_bytes, reverse=True):  # the largest mostly have no key, and are copied while others are looked at
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
        # Neighbors in several packs: each is to have some with a gradient, since programs differ by how many packs they update.
        # Few packs at a time: what is moved is there twice.
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
    """The names of parameters that each step copies because somebody else may hold memory that torch's allocator has not given."""
    return [
        leaf.name
        for leaf in leaves
        if leaf.why in (adoption.FOREIGN, adoption.SHARED) and leaf.memory is None and not leaf.local.untyped_storage().resizable()
    ]
