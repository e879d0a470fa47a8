"""An executable bound to the buffers on which a step calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import jax
import numpy as np
import torch

from bridge._compat.torch import foreach_copy_
from bridge._compiler import plan as update
from bridge._compiler.passes.gather_rows import MAX_GATHERS
from bridge._memory import allocation, jax_buffers
from bridge._memory.address_space import RowAddresses
from bridge._memory.call_arguments import arguments_over
from bridge._memory.gradient_sources import AddressedGradients, GatheredGradients, GradientArguments, GradientSource, ViewedGradient
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
    def state_buffers(self) -> Sequence[jax_buffers.JaxBuffer]:
        return self.bucket.state_buffers if self.bucket is not None else self.leaves[0].state_buffers or ()

    @property
    def rows(self) -> Sequence[int | None]:
        return (None,) if self.bucket is None else self.bucket.jax_buffer.rows

    @property
    def grad_sources(self) -> list[GradientSource]:
        """Where the program's arguments for the gradients come from."""
        plan, bucket, first = self.leaf_plan, self.bucket, self.leaves[0]
        if bucket is None or plan.grads_as_arguments:
            if plan.valid_length is not None:
                return [_padded_gradient(first, self.grad_positions[0], plan.buffer[0][1])]
            by_row = {leaf.bucket_row: (position, leaf) for leaf, position in zip(self.leaves, self.grad_positions, strict=True)}
            # A row without a gradient repeats that of another row.
            given = [by_row.get(row) or (self.grad_positions[0], first) for row in self.rows]
            return [ViewedGradient(position, leaf.shape, leaf.grad_dtype, leaf.dim_order) for position, leaf in given]
        if plan.addresses_grads:
            rows, orders = [leaf.bucket_row or 0 for leaf in self.leaves], [leaf.dim_order for leaf in self.leaves]
            return [AddressedGradients(self.grad_positions, RowAddresses(len(self.rows), rows, first.dtype, orders, MAX_GATHERS))]
        cat_target = bucket.cat_target(self.leaves)
        views = [bucket.grad_row(leaf) for leaf in self.leaves] if cat_target is None else ()
        return [GatheredGradients(self.grad_positions, bucket.gathered_grads(first), views, cat_target)]


def _padded_gradient(leaf: ParamRecord, position: int, length: int) -> GatheredGradients:
    """Return the source of a gradient that is copied to a longer row, with zeros behind its elements."""
    with torch.inference_mode(False):  # a later step could not write to inference tensors
        row = torch.zeros(length, dtype=leaf.grad_dtype, device=leaf.device)
    return GatheredGradients((position,), row, [row.as_strided(leaf.shape, leaf.strides)])


@dataclass(frozen=True, eq=False, repr=False)
class BoundExecutable:
    """The executable of some operands, bound to the buffers on which a step calls it.

    executable: the executable.
    operands: its operands: first the parameters with their own buffers, then the buckets.
    shared: the shared state of the joint sets that it updates.
    hyperparam_offsets: where in the hyperparameters the numbers of each row of the table begin.
    gradients: turns the gradients of the step into arguments.
    """

    executable: executable.UpdateExecutable
    operands: Sequence[ProgramOperand]
    shared: Sequence[SharedState]
    hyperparam_offsets: Sequence[int]
    gradients: GradientArguments

    @cached_property
    def leaves(self) -> list[ParamRecord]:
        return [leaf for operand in self.operands for leaf in operand.leaves]

    @cached_property
    def row_positions(self) -> list[int]:
        """For each of `leaves` the position of its row among all parameters and bucket rows of the plan."""
        starts = accumulate((len(operand.rows) for operand in self.operands), initial=0)
        return [start + (leaf.bucket_row or 0) for start, operand in zip(starts, self.operands, strict=False) for leaf in operand.leaves]

    @cached_property
    def buckets(self) -> list[BucketState]:
        return [operand.bucket for operand in self.operands if operand.bucket is not None]

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device

    @cached_property
    def copied_result_bytes(self) -> int:
        """The bytes that a call allocates on a CPU for results which are copied."""
        copied = [leaf for leaf in self.leaves if leaf.jax_buffer is None and leaf.device.type == "cpu"]
        return sum(leaf.local_tensor.nbytes + in_flight.MAX_RESULT_PADDING for leaf in copied)

    @cached_property
    def arguments(self) -> launch.BoundArguments:
        """The buffers, views and arguments of each call. An interrupted first access starts over at the next one."""
        own = [operand.leaves[0] for operand in self.operands if operand.bucket is None]
        copied = [leaf for leaf in own if leaf.jax_buffer is None]
        copied_tensors, copied_orders = [leaf.local_tensor for leaf in copied], [leaf.dim_order for leaf in copied]
        shapes, dtypes = [leaf.shape for leaf in copied], [leaf.dtype for leaf in copied]
        scalars: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in (x for leaf in own for x in leaf.scalar_state.values()):
            scalars.setdefault(tensor.dtype, []).append(tensor)
        (row_offsets, active_rows, row_sizes), mirrors = self._rows(), self._mirrors
        return launch.BoundArguments(
            inplace=[operand.leaves[0] for operand in self.operands if operand.leaves[0].jax_buffer is not None],
            params=[leaf.param for leaf in self.leaves if leaf.jax_buffer is not None or leaf.dtensor_layout is not None],
            state=[buffer for part in (*self.operands, *self.shared) for buffer in part.state_buffers],
            scalars=list(map(ScalarVector, scalars.values())),
            copied_back=copied_tensors,
            copied_back_dim_order=copied_orders,
            copied_back_as_arguments=arguments_over(shapes, dtypes, copied_orders, self.device),
            gradients=self.gradients,
            mirrored=[tensor for tensor, _ in mirrors],
            mirrors=[view for _, view in mirrors],
            masks=[mask_buffer(leaf.element_mask, leaf.dim_order) for leaf in own if leaf.element_mask is not None],
            row_offsets=row_offsets,
            active_rows=active_rows,
            row_sizes=[row_sizes] if self.executable.plan.has_metrics else [],
        )

    def _rows(self) -> list[np.ndarray | jax.Array]:
        """Return arrays for the leaves and the rows of buckets.

        These are where the hyperparameters of each begin, whether each row of a bucket is updated, and how many elements a row has: 0 for a
        leaf with its own buffer.
        """
        offsets, active, sizes = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)], [np.zeros(0, np.int32)]
        for operand in self.operands:
            own = [self.hyperparam_offsets[leaf.hyperparam_row] for leaf in operand.leaves]
            offsets.append(np.full(len(operand.rows), own[0], np.int32))
            sizes.append(np.zeros(len(operand.rows), np.int32))
            if operand.bucket is not None:
                rows = [leaf.bucket_row or 0 for leaf in operand.leaves]
                active.append(np.zeros(len(operand.rows), np.bool_))
                offsets[-1][rows], active[-1][rows], sizes[-1][rows] = own, True, [leaf.shape.numel() for leaf in operand.leaves]
        return [allocation.constant_argument(np.concatenate(x), self.executable.plan.device) for x in (offsets, active, sizes)]

    @property
    def _mirrors(self) -> Mirrors:
        shared_states = [pair for part in self.shared for pair in part.state_tensors.mirrors]
        return [*(pair for leaf in self.leaves for pair in leaf.mirrors), *shared_states]

    def rebind(self) -> None:
        """Bind to the new addresses after results moved."""
        for part in (*self.leaves, *self.shared):
            part.rebind()
        if mirrors := self._mirrors:  # earlier copies were read at the old addresses
            foreach_copy_([tensor for tensor, _ in mirrors], [view for _, view in mirrors])

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
