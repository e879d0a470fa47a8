"""An executable bound to the buffers on which a step calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from bridge._compat.torch import foreach_copy_
from bridge._compiler import plan as update
from bridge._compiler.passes.gather_rows import READS
from bridge._interop.tensor_storage import bytes_needed
from bridge._memory import allocation, jax_buffers
from bridge._memory.address_space import AllPlaces, Places
from bridge._memory.call_arguments import Borrowed, Operands, PaddedOperands, operands
from bridge._memory.scalar_vectors import Cells
from bridge._runtime import executable, in_flight, launch
from torch_api._params.bucket_state import Pack
from torch_api._params.record import Leaf, Mirrors
from torch_api._params.record_state import mask_buffer
from torch_api._params.state import Shared


class Block:
    """One leaf of a program: a parameter, or the rows of a bucket whose parameters have a gradient.

    leaves: the records of the parameters. grad_positions: the position of each parameter's gradient among all gradients of the step.
    bucket: the `BucketState`, None for a parameter with its own buffer. leaf_plan: the leaf in the plan of the program.
    """

    __slots__ = ("described", "leaves", "pack", "positions")

    def __init__(self, pack: Pack | None) -> None:
        self.leaves: list[Leaf] = []
        self.positions: list[int] = []
        self.pack = pack
        self.described: update.Leaf

    @property
    def state(self) -> Sequence[jax_buffers.Memory]:
        return self.pack.state if self.pack is not None else self.leaves[0].state or ()

    @property
    def rows(self) -> Sequence[int | None]:
        return (None,) if self.pack is None else self.pack.memory.rows

    @property
    def places(self) -> Places:
        """The addresses of the gradients, for a program that reads them by address."""
        rows, first = [leaf.slot or 0 for leaf in self.leaves], self.leaves[0]
        return Places(len(self.rows), rows, first.dtype, [leaf.order for leaf in self.leaves], READS)

    @property
    def singly(self) -> list[tuple[int, tuple[int, ...] | None]]:
        """For each row the position of its gradient and the order of its dimensions.

        A row without gradient repeats those of another row.
        """
        if self.pack is None:
            return [(self.positions[0], self.leaves[0].order)]
        given = {leaf.slot: (position, leaf.order) for leaf, position in zip(self.leaves, self.positions, strict=True)}
        return [given.get(row) or (self.positions[0], self.leaves[0].order) for row in self.rows]


class Launch(launch.Launch):
    """The executable of some operands: first the parameters with their own buffers, then the buckets."""

    __slots__ = ("_blocks", "_offsets", "device", "leaves", "packs", "shared")

    def __init__(self, blocks: Sequence[Block], program: executable.Program, shared: Sequence[Shared], offsets: Sequence[int]) -> None:
        self.program, self.shared, self.reader, self.ready = program, shared, None, False
        self._blocks, self._offsets = blocks, offsets
        self.leaves = [leaf for block in blocks for leaf in block.leaves]
        self.device = self.leaves[0].device
        self.room = sum(leaf.local.nbytes + in_flight.APART for leaf in self.leaves if leaf.memory is None and leaf.device.type == "cpu")
        self.packs = [block.pack for block in blocks if block.pack is not None]
        self.rows, self.joined, self.gathered, self.targets = [], [], [], []
        for block in blocks:
            if block.pack is None or block.described.singly or block.described.at_once:
                continue
            self.rows.append(block.pack.gradients(block.leaves[0]))
            whole = block.pack.whole(block.leaves)
            if whole is not None:
                self.joined.append((block.positions, whole))
            else:
                self.gathered += block.positions
                self.targets += map(block.pack.gradient, block.leaves)

    @property
    def far(self) -> list[tuple[int, int, str]]:
        """Position, elements and dtype of each gradient whose norm is computed before the program runs."""
        plan = self.program.plan
        blocks = [block for block in self._blocks if plan.far(block.described)]
        return [(position, block.described.size, block.described.gradient_dtype) for block in blocks for position in block.positions]

    def prepare(self) -> None:
        """Look up all buffers, views and arguments that a call needs."""
        blocks, offsets, program, shared = self._blocks, self._offsets, self.program, self.shared
        alone = [block.leaves[0] for block in blocks if block.pack is None]
        scattered = [block for block in blocks if block.described.at_once]  # such buckets have a program of their own
        singly = [(block, each) for block in blocks if block.pack is None or block.described.singly for each in block.singly]
        kept = [leaf for leaf in alone if leaf.memory is None]
        self.inplace = [block.leaves[0] for block in blocks if block.leaves[0].memory is not None]
        self.params = [leaf.param for leaf in self.leaves if leaf.memory is not None or leaf.layout is not None]
        scalars: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in (x for leaf in alone for x in leaf.scalars.values()):
            scalars.setdefault(tensor.dtype, []).append(tensor)
        self.scalars = list(map(Cells, scalars.values()))
        self.kept, self.kept_order = [leaf.local for leaf in kept], [leaf.order for leaf in kept]
        shapes, dtypes, needed = [leaf.shape for leaf in kept], [leaf.dtype for leaf in kept], list(map(bytes_needed, self.kept))
        on_cpu = self.device.type == "cpu"
        self.kept_operands = Operands(shapes, dtypes, self.kept_order, needed) if on_cpu else partial(operands, order=self.kept_order)
        self.positions = [position for _, (position, _) in singly] or [position for block in scattered for position in block.positions]
        order = [*(order for _, (_, order) in singly), *(None for _ in self.rows)]
        longer = {at: block.described.buffer[0][1] for at, (block, _) in enumerate(singly) if block.described.length is not None}
        if scattered:
            self.flat = AllPlaces([block.places for block in scattered])
        elif self.device.type == "cpu":
            shapes = [*(block.leaves[0].shape for block, _ in singly), *(rows.shape for rows in self.rows)]
            dtypes = [*(block.leaves[0].gradient_dtype for block, _ in singly), *(rows.dtype for rows in self.rows)]
            self.flat = PaddedOperands(shapes, dtypes, order, longer) if longer else Operands(shapes, dtypes, order)
        else:
            self.flat = Borrowed(order, any(leaf.dtype.is_complex for leaf in self.leaves))
        self.mirrored, self.mirrors = [tensor for tensor, _ in self._mirrors], [view for _, view in self._mirrors]
        self.state = [memory for block in blocks for memory in block.state] + [m for part in shared for m in part.memories]
        self.masks = [mask_buffer(leaf.elements, leaf.order) for leaf in alone if leaf.elements is not None]
        at, live = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)]
        for block in blocks:
            own = [offsets[leaf.row] for leaf in block.leaves]
            at.append(np.full(len(block.rows), own[0], np.int32))
            if block.pack is not None:
                rows = [leaf.slot or 0 for leaf in block.leaves]
                live.append(np.zeros(len(block.rows), np.bool_))
                at[-1][rows], live[-1][rows] = own, True
        self.offsets, self.live = (allocation.constant(np.concatenate(x), program.plan.device) for x in (at, live))
        self._blocks, self.ready = (), True  # last, so that an interrupted call starts over

    @property
    def _mirrors(self) -> Mirrors:
        shared = [pair for part in self.shared for pair in part.shown.mirrors]
        return [*(pair for leaf in self.leaves for pair in leaf.mirrors), *shared]

    def follow(self) -> None:
        """Bind to the new addresses after results moved."""
        for part in (*self.leaves, *self.shared):
            part.follow()
        if self.mirrored:
            foreach_copy_(self.mirrored, self.mirrors)  # earlier copies were read at the old addresses

    def copied(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor that the update may change, or that its failure may destroy, with a copy for `restore_values`."""
        packed = dict.fromkeys(memory for pack in self.packs for memory in (pack.memory, *pack.state))
        alone = [leaf for leaf in self.leaves if leaf.slot is None]
        own = [tensor for leaf in alone for tensor in (leaf.local, *leaf.views)] + [tensor for tensor, _ in self._mirrors]
        return [(tensor, tensor.detach().clone()) for tensor in (*own, *(x for memory in packed for x in memory.tensors()))]


def restore(before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the copied values back into the tensors, wherever these are now."""
    for tensor, copy in before:
        tensor.detach().copy_(copy)
