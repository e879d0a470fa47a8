"""What an executable is called with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bridge._memory.call_arguments import Argument
from bridge._memory.jax_buffers import Memory
from bridge._memory.scalar_vectors import Cells

from .executable import Program
from .streaming_stats import Reader


class HasMemory(Protocol):
    """What has the memory of an in-place leaf."""

    @property
    def memory(self) -> Memory | None: ...


class Launch(ABC):
    """A program over some of the live leaves, and where their arrays are: what stays the same from step to step.

    In plan order: leaves by themselves come before packs.

    room: bytes on a CPU that a call allocates for results which are copied.
    reader: what measures the large gradients of all launches of a step, at the first of them; None where nothing does.
    inplace: what has the `memory` of each in-place leaf; its array is donated and replaced.
    params: the tensors over those, whose version changes.
    state: the memories of the state of every leaf, then of the shared state; likewise.
    scalars: the scalars of leaves by themselves, by dtype.
    kept, kept_order: the tensors of the other leaves, which are only read, and the order of their dimensions in memory.
    kept_operands: from those tensors to arguments; a ValueError where the storage of one was freed or made smaller.
    positions: which of the step's gradients are arguments; `flat`: from those, and then `rows`, to arguments; `AllPlaces` where
      they are read where they lie.
    rows: the packs of gradients that are gathered. joined: of each that all its rows' gradients fill, one behind the other, which those
      are, and its rows as torch.cat wants them; gathered: which gradients belong into the others; `targets`: the place of each there.
    mirrored, mirrors: tensors of state that the user has put there and that stay where they are, and the tensors over `state` that are
      updated in their place: copied from them before the call, and back after it.
    masks: a boolean array per leaf with `elements`.
    offsets: int32 (leaves, those of packs one by one): where in the hyperparams the numbers of its row begin.
    live: boolean, one for each row of each pack: whether that row is updated.

    Program, packs and rows are there from the start; the rest is found when the first call is due, while those before it run.
    """

    __slots__ = (
        "flat", "gathered", "inplace", "joined", "kept", "kept_operands", "kept_order", "live", "masks", "mirrored", "mirrors",
        "offsets", "params", "positions", "program", "reader", "ready", "room", "rows", "scalars", "state", "targets",
    )  # fmt: skip

    program: Program
    reader: Reader | None
    ready: bool
    room: int
    inplace: Sequence[HasMemory]
    params: Sequence[torch.Tensor]
    state: Sequence[Memory]
    scalars: Sequence[Cells]
    kept: Sequence[torch.Tensor]
    kept_order: Sequence[tuple[int, ...] | None]
    kept_operands: Callable[[Sequence[torch.Tensor]], Sequence[Argument]]
    positions: Sequence[int]
    flat: Callable[[Sequence[torch.Tensor]], Sequence[Argument]]
    joined: Sequence[tuple[Sequence[int], torch.Tensor]]
    gathered: Sequence[int]
    targets: list[torch.Tensor]
    rows: list[torch.Tensor]
    mirrored: list[torch.Tensor]
    mirrors: list[torch.Tensor]
    masks: list[Argument]
    offsets: Argument
    live: Argument

    @abstractmethod
    def prepare(self) -> None:
        """Find all that a call needs."""
