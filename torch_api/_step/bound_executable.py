"""An executable bound to the buffers on which a step calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from bridge._compat.torch import foreach_copy_
from bridge._compiler import plan as update
from bridge._compiler.passes.gather_rows import MAX_GATHERS
from bridge._interop.tensor_storage import bytes_needed
from bridge._memory import allocation, jax_buffers
from bridge._memory.address_space import BucketAddresses, RowAddresses
from bridge._memory.call_arguments import CpuArguments, GpuArguments, PaddedArguments, as_call_arguments
from bridge._memory.scalar_vectors import ScalarVector
from bridge._runtime import executable, in_flight, launch
from torch_api._params.bucket_state import BucketState
from torch_api._params.record import Mirrors, ParamRecord
from torch_api._params.record_state import mask_buffer
from torch_api._params.state import SharedState


class ProgramOperand:
    """One leaf of a program: a parameter, or the rows of a bucket whose parameters have a gradient.

    leaves: the records of the parameters. grad_positions: the position of each parameter's gradient among all gradients of the step.
    bucket: the `BucketState`, None for a parameter with its own buffer. leaf_plan: the leaf in the plan of the program.
    """

    __slots__ = ("bucket", "grad_positions", "leaf_plan", "leaves")

    def __init__(self, bucket: BucketState | None) -> None:
        self.leaves: list[ParamRecord] = []
        self.grad_positions: list[int] = []
        self.bucket = bucket
        self.leaf_plan: update.LeafPlan

    @property
    def state(self) -> Sequence[jax_buffers.JaxBuffer]:
        return self.bucket.state_buffers if self.bucket is not None else self.leaves[0].state_buffers or ()

    @property
    def rows(self) -> Sequence[int | None]:
        return (None,) if self.bucket is None else self.bucket.jax_buffer.rows

    @property
    def row_addresses(self) -> RowAddresses:
        """The addresses of the gradients, for a program that reads them by address."""
        rows, first = [leaf.bucket_row or 0 for leaf in self.leaves], self.leaves[0]
        return RowAddresses(len(self.rows), rows, first.dtype, [leaf.dim_order for leaf in self.leaves], MAX_GATHERS)

    @property
    def grad_arguments(self) -> list[tuple[int, tuple[int, ...] | None]]:
        """For each row the position of its gradient and the order of its dimensions.

        A row without gradient repeats those of another row.
        """
        if self.bucket is None:
            return [(self.grad_positions[0], self.leaves[0].dim_order)]
        by_row = {leaf.bucket_row: (position, leaf.dim_order) for leaf, position in zip(self.leaves, self.grad_positions, strict=True)}
        return [by_row.get(row) or (self.grad_positions[0], self.leaves[0].dim_order) for row in self.rows]


class BoundExecutable(launch.Launch):
    """The executable of some operands: first the parameters with their own buffers, then the buckets."""

    __slots__ = ("_operands", "_row_offsets", "buckets", "device", "leaves", "shared")

    def __init__(
        self,
        operands: Sequence[ProgramOperand],
        update_executable: executable.UpdateExecutable,
        shared_states: Sequence[SharedState],
        leaf_offsets: Sequence[int],
    ) -> None:
        self.executable, self.shared, self.streaming_stats, self.is_prepared = update_executable, shared_states, None, False
        self._operands, self._row_offsets = operands, leaf_offsets
        self.leaves = [leaf for block in operands for leaf in block.leaves]
        self.device = self.leaves[0].device
        self.copied_result_bytes = sum(
            leaf.local_tensor.nbytes + in_flight.MAX_RESULT_PADDING
            for leaf in self.leaves
            if leaf.jax_buffer is None and leaf.device.type == "cpu"
        )
        self.buckets = [block.bucket for block in operands if block.bucket is not None]
        self.bucket_grads, self.cat_gathers, self.copy_gathers, self.copy_targets = [], [], [], []
        for block in operands:
            if block.bucket is None or block.leaf_plan.grads_as_arguments or block.leaf_plan.addresses_grads:
                continue
            self.bucket_grads.append(block.bucket.gathered_grads(block.leaves[0]))
            cat_target = block.bucket.cat_target(block.leaves)
            if cat_target is not None:
                self.cat_gathers.append((block.grad_positions, cat_target))
            else:
                self.copy_gathers += block.grad_positions
                self.copy_targets += map(block.bucket.grad_row, block.leaves)

    @property
    def streamed_grads(self) -> list[tuple[int, int, str]]:
        """Position, elements and dtype of each gradient whose norm is computed before the program runs."""
        plan = self.executable.plan
        blocks = [block for block in self._operands if plan.is_streamed(block.leaf_plan)]
        return [(position, block.leaf_plan.size, block.leaf_plan.grad_dtype) for block in blocks for position in block.grad_positions]

    def prepare(self) -> None:
        """Look up all buffers, views and arguments that a call needs."""
        blocks, leaf_offsets, program, shared = self._operands, self._row_offsets, self.executable, self.shared
        own_buffer_leaves = [block.leaves[0] for block in blocks if block.bucket is None]
        addressed = [block for block in blocks if block.leaf_plan.addresses_grads]  # such buckets have a program of their own
        grad_arguments = [
            (block, each) for block in blocks if block.bucket is None or block.leaf_plan.grads_as_arguments for each in block.grad_arguments
        ]
        copied_leaves = [leaf for leaf in own_buffer_leaves if leaf.jax_buffer is None]
        self.inplace = [block.leaves[0] for block in blocks if block.leaves[0].jax_buffer is not None]
        self.params = [leaf.param for leaf in self.leaves if leaf.jax_buffer is not None or leaf.dtensor_layout is not None]
        scalars: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in (x for leaf in own_buffer_leaves for x in leaf.scalar_state.values()):
            scalars.setdefault(tensor.dtype, []).append(tensor)
        self.scalars = list(map(ScalarVector, scalars.values()))
        self.copied_back, self.copied_back_dim_order = (
            [leaf.local_tensor for leaf in copied_leaves],
            [leaf.dim_order for leaf in copied_leaves],
        )
        shapes, dtypes, needed = (
            [leaf.shape for leaf in copied_leaves],
            [leaf.dtype for leaf in copied_leaves],
            list(map(bytes_needed, self.copied_back)),
        )
        on_cpu = self.device.type == "cpu"
        self.copied_back_as_arguments = (
            CpuArguments(shapes, dtypes, self.copied_back_dim_order, needed)
            if on_cpu
            else partial(as_call_arguments, dim_orders=self.copied_back_dim_order)
        )
        self.argument_positions = [position for _, (position, _) in grad_arguments] or [
            position for block in addressed for position in block.grad_positions
        ]
        order = [*(order for _, (_, order) in grad_arguments), *(None for _ in self.bucket_grads)]
        padded_lengths = {
            at: block.leaf_plan.buffer[0][1] for at, (block, _) in enumerate(grad_arguments) if block.leaf_plan.valid_length is not None
        }
        if addressed:
            self.as_arguments = BucketAddresses([block.row_addresses for block in addressed])
        elif self.device.type == "cpu":
            shapes = [*(block.leaves[0].shape for block, _ in grad_arguments), *(rows.shape for rows in self.bucket_grads)]
            dtypes = [*(block.leaves[0].grad_dtype for block, _ in grad_arguments), *(rows.dtype for rows in self.bucket_grads)]
            self.as_arguments = (
                PaddedArguments(shapes, dtypes, order, padded_lengths) if padded_lengths else CpuArguments(shapes, dtypes, order)
            )
        else:
            self.as_arguments = GpuArguments(order, any(leaf.dtype.is_complex for leaf in self.leaves))
        self.mirrored, self.mirrors = [tensor for tensor, _ in self._mirrors], [view for _, view in self._mirrors]
        self.state = [memory for block in blocks for memory in block.state] + [m for part in shared for m in part.buffers]
        self.masks = [mask_buffer(leaf.element_mask, leaf.dim_order) for leaf in own_buffer_leaves if leaf.element_mask is not None]
        at, active = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)]
        for block in blocks:
            own = [leaf_offsets[leaf.hyperparam_row] for leaf in block.leaves]
            at.append(np.full(len(block.rows), own[0], np.int32))
            if block.bucket is not None:
                rows = [leaf.bucket_row or 0 for leaf in block.leaves]
                active.append(np.zeros(len(block.rows), np.bool_))
                at[-1][rows], active[-1][rows] = own, True
        self.row_offsets, self.active_rows = (allocation.constant_argument(np.concatenate(x), program.plan.device) for x in (at, active))
        self._operands, self.is_prepared = (), True  # last, so that an interrupted call starts over

    @property
    def _mirrors(self) -> Mirrors:
        shared_states = [pair for part in self.shared for pair in part.state_tensors.mirrors]
        return [*(pair for leaf in self.leaves for pair in leaf.mirrors), *shared_states]

    def rebind(self) -> None:
        """Bind to the new addresses after results moved."""
        for part in (*self.leaves, *self.shared):
            part.rebind()
        if self.mirrored:
            foreach_copy_(self.mirrored, self.mirrors)  # earlier copies were read at the old addresses

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor that the update may change, or that its failure may destroy, with a copy for `restore_values`."""
        packed = dict.fromkeys(memory for pack in self.buckets for memory in (pack.jax_buffer, *pack.state_buffers))
        alone = [leaf for leaf in self.leaves if leaf.bucket_row is None]
        own = [tensor for leaf in alone for tensor in (leaf.local_tensor, *leaf.local_state)] + [tensor for tensor, _ in self._mirrors]
        return [(tensor, tensor.detach().clone()) for tensor in (*own, *(x for memory in packed for x in memory.tensors()))]


def restore_values(snapshots: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the copied values back into the tensors, wherever these are now."""
    for tensor, copy in snapshots:
        tensor.detach().copy_(copy)
