"""Packs: parameters of equal signature side by side in one memory, and so their state; and the gradients of small ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compiler import chunking
from bridge._compiler.spec import Field, buffer_shape
from bridge._interop.dlpack import device_of
from bridge._interop.dtypes import numpy_dtype
from bridge._memory import address_space, adoption, allocation, jax_buffers
from bridge._memory.ownership import mappings_read_once
from bridge._process import uncollected
from bridge._xla import probes

from .plan import Leaf, Shown, has_state, is_like, is_wider, may_move

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


class Pack:
    """The state of one pack in one optimizer, and the rows that its gradients are gathered in, unless those are taken `singly`.

    Args:
      leaf: any leaf of it.
      fields: the state of each.
      constants: what each field begins with, where that is one number.
      members: the row and the saved state of every leaf of the pack that may be trained.
      taken: the memories that others have; those of this state are added.
      addressed: whether gradients may be read where they lie.
    """

    __slots__ = ("_addressed", "_constants", "_device", "_fields", "_gradients", "memory", "state")

    def __init__(
        self,
        leaf: Leaf,
        fields: Sequence[Field],
        hidden: Mapping[str, float],
        constants: Sequence[Any],
        members: Sequence[tuple[int, Mapping[str, Any]]],
        taken: set[jax_buffers.Memory],
        addressed: bool,
    ) -> None:
        assert leaf.memory is not None
        self._addressed = addressed
        self.memory, self._fields, self._device = leaf.memory, fields, leaf.device.type
        self._gradients: torch.Tensor | None = None
        saved = [(row, state) for row, state in members if has_state(fields, state)]
        dtypes = [_dtype(field, hidden, [state for _, state in saved]) for field in fields]
        kept = self._as_saved(saved, dtypes, hidden, taken)
        self._constants = constants if kept is None else None  # what rows hold until their leaf has begun
        self.state = kept or self._begun(leaf, dtypes, constants)
        taken.update(self.state)

    @property
    def singly(self) -> bool:
        """Whether each row's gradient is an argument of its own."""
        return len(self.memory.rows) == 1 or (not self.small and self._device in SINGLY_ON)

    @property
    def addressed(self) -> bool:
        """Whether each row's gradient may be read where it lies; `small` ones are gathered instead, if they are few."""
        return self._addressed and not self.singly and (not self.small or len(self.memory.rows) * self.memory.row_bytes > GATHERED_PACK)

    @property
    def small(self) -> bool:
        """Whether gradients may be gathered."""
        return self.memory.row_bytes <= GATHERED.get(self._device, 0)

    def _begun(self, leaf: Leaf, dtypes: Sequence[str], constants: Sequence[Any]) -> tuple[jax_buffers.Memory, ...]:
        """New rows for each field, all begun with its constant."""
        count, width = self.memory.array.shape
        inner = [(width,) if field.shape is None else buffer_shape(field) for field in self._fields]
        kinds = [
            ((count, *shape), jnp.dtype(dtype), 0 if constant is None else constant)
            for shape, dtype, constant in zip(inner, dtypes, constants, strict=True)
        ]
        arrays = jax.block_until_ready(allocation.filled(kinds, device_of(leaf.param)))
        return tuple(
            jax_buffers.register(array, self.memory.lengths if field.shape is None else [int(np.prod(shape))] * count)
            for field, shape, array in zip(self._fields, inner, arrays, strict=True)
        )

    def _as_saved(
        self,
        saved: Sequence[tuple[int, Mapping[str, Any]]],
        dtypes: Sequence[str],
        hidden: Mapping[str, float],
        taken: set[jax_buffers.Memory],
    ) -> tuple[jax_buffers.Memory, ...] | None:
        """The rows that the saved state lies in, if all of it does, each tensor in the row of its leaf, and nobody looks into others."""
        memories = []
        for field, dtype in zip(self._fields, dtypes, strict=True):
            if field.name in hidden or not all(isinstance(state.get(field.name), torch.Tensor) for _, state in saved):
                return None
            found = {(jax_buffers.located(state[field.name]), row) for row, state in saved}
            homes = {memory for (memory, at), row in found if at == row}
            memory = homes.pop() if len(homes) == 1 and all(at == row for (_, at), row in found) else None
            if memory is None or memory in taken or memory in memories or len(memory.rows) != len(self.memory.rows):
                return None
            if str(memory.array.dtype) != dtype or set(memory.windows) - {row for row, _ in saved}:
                return None
            if field.shape is None and memory.array.shape != self.memory.array.shape:
                return None  # the parameters had another dtype, and rows of another length
            memories.append(memory)
        return tuple(memories) or None

    def give(
        self,
        leaf: Leaf,
        hidden: Mapping[str, float],
        values: Sequence[Any],
        saved: Mapping[str, Any],
        begin: Callable[[Leaf, Field], torch.Tensor],
    ) -> Shown:
        """The leaf's own rows, begun with `values` (flat tensors or numbers) or as they were saved, and what shows them."""
        shown = Shown()
        is_given = has_state(self._fields, saved)
        for position, (field, memory, value) in enumerate(zip(self._fields, self.state, values, strict=True)):
            like = leaf.local.detach() if field.shape is None else None
            looked_at = leaf.slot in memory.windows
            known = saved.get(field.name) if is_given or field.position is None else None
            moves = may_move(leaf, field.name, known)
            view = memory.tensor(leaf.device, like, leaf.slot)
            view = view.view(field.shape) if field.shape and like is None else view
            if field.name in hidden:
                view.fill_(hidden[field.name] if is_given else float(value))
                continue
            if field.position is None or is_given:
                source = torch.as_tensor(begin(leaf, field) if known is None else known, device=leaf.device)
                source = source.reshape(view.shape) if like is None else source
                if source.data_ptr() != view.data_ptr():
                    view.copy_(source)
                elif source.stride() != view.stride():  # the parameter's dimensions lie in another order now
                    view.copy_(source.clone())
            elif isinstance(value, torch.Tensor):
                view.copy_(value.reshape(view.shape) if like is None else value.as_strided(view.shape, view.stride()))
            elif looked_at or self._constants is None or self._constants[position] != value:
                view.fill_(value)
            if known is not None and is_like(known, view) and known.data_ptr() == view.data_ptr():
                known.data = view  # the window of the row is that of the view
            shown.add(field.name, view, known, moves)
            memory.holders[leaf.slot or 0] = weakref.ref(shown.views[field.name])
        return shown

    def gradient(self, leaf: Leaf) -> torch.Tensor:
        """Where the leaf's gradient goes."""
        rows, start = self.gradients(leaf), (leaf.slot or 0) * self.memory.array.shape[1]
        size, strides = leaf.shape, leaf.strides
        return rows.as_strided(size, strides, start)

    def whole(self, leaves: Sequence[Leaf]) -> torch.Tensor | None:
        """The rows of all gradients as the `out` of a torch.cat of those of the leaves; None where that would not fill them in order.

        So it does where all leaves of the pack are there, of one shape, with rows as long as they are.
        """
        shape = leaves[0].shape
        filled = bool(shape) and shape.numel() == self.memory.array.shape[1] and [leaf.slot for leaf in leaves] == list(self.memory.rows)
        if not filled or any(leaf.shape != shape or leaf.order is not None for leaf in leaves):
            return None
        return self.gradients(leaves[0]).view(-1, *shape[1:])

    def gradients(self, leaf: Leaf) -> torch.Tensor:
        """The rows of all gradients."""
        if self._gradients is None:
            with torch.inference_mode(False):
                self._gradients = torch.zeros(self.memory.array.shape, dtype=leaf.gradient_dtype, device=leaf.device)
        return self._gradients


def _dtype(field: Field, hidden: Mapping[str, float], saved: Iterable[Mapping[str, Any]]) -> str:
    """The type of a field's rows: that of the transformation, or the wider one that some leaf's was saved in."""
    types = {str(numpy_dtype(state[field.name].dtype)) for state in saved if is_wider(field, hidden, state)} - {field.dtype}
    return max(types, key=lambda name: jnp.dtype(name).itemsize) if types else field.dtype
