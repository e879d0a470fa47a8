"""Which statistics of a step its programs compute, and which the stage before them: `bridge._runtime.stats_stage`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import torch

from bridge._compiler.plan import StatsPlan, UpdatePlan
from bridge._runtime.executable import StatsExecutable
from bridge._runtime.stats_stage import StatsStage
from bridge._runtime.streaming_stats import StreamingStats, streaming_stats_executable
from bridge._xla.compile import LazyExecutable
from torch_api._params.sharding import ShardGroups, sum_over_processes

from .bound_executable import ProgramOperand


@dataclass(frozen=True)
class StatsLayout:
    """How the statistics of the gradients on one device are computed.

    chunks: the operands of each executable.
    own_weights: for each executable its `UpdatePlan.stats_weights`.
    stage_weights: for each group of the stage and each executable the `StatsPlan.weights`. A gradient that has a weight neither here nor
      in `own_weights` is streamed.
    reductions: as in `StatsStage`.
    """

    chunks: Sequence[Sequence[ProgramOperand]]
    own_weights: Sequence[tuple[float, ...]]
    stage_weights: Sequence[Sequence[tuple[float, ...]]]
    reductions: Sequence[Callable[[torch.Tensor], None] | None]

    @property
    def streamed_grads(self) -> list[tuple[int, int, str]]:
        """Position in the step, elements and dtype of each gradient that is streamed."""
        found: list[tuple[int, int, str]] = []
        for nth, chunk in enumerate(self.chunks):
            weights = [own[nth] for own in (self.own_weights, *self.stage_weights) if own[nth]]
            for operand, *each in zip(chunk, *weights, strict=True):
                plan = operand.leaf_plan
                found += [] if any(each) else [(position, plan.size, plan.grad_dtype) for position in operand.grad_positions]
        return found

    def stats_plans(self, plans: Sequence[UpdatePlan]) -> list[StatsPlan]:
        """Return the plans of all executables of the stage, from those of the updates."""
        return [
            StatsPlan(plan, weights, covers_found_inf=reduce is not None)
            for group, reduce in zip(self.stage_weights, self.reductions, strict=True)
            for plan, weights in zip(plans, group, strict=True)
            if any(weights)
        ]

    def streaming_executables(self, plan: UpdatePlan) -> list[LazyExecutable]:
        """Return what streams over gradients. `plan`: that of any update."""
        dtypes = dict.fromkeys(dtype for *_, dtype in self.streamed_grads)
        return [streaming_stats_executable(dtype, plan.clip, plan.has_loss_scale, plan.device) for dtype in dtypes]

    def stage(self, plan: UpdatePlan, executables: Iterator[StatsExecutable]) -> StatsStage | None:
        """Return the stage; None if the only program computes all statistics.

        Args:
          plan: the plan of any update.
          executables: those of `stats_plans`.
        """
        grads = self.streamed_grads
        if not grads and not self.stage_weights:
            return None
        streaming = StreamingStats(grads, plan.clip, plan.has_loss_scale, plan.device) if grads else None
        by_group = [[next(executables) if any(weights) else None for weights in group] for group in self.stage_weights]
        return StatsStage(streaming, by_group, self.reductions, sum(size * jnp.dtype(dtype).itemsize for _, size, dtype in grads))


def lay_out_stats(chunks: Sequence[Sequence[ProgramOperand]], streams: bool, groups: ShardGroups) -> StatsLayout:
    """Return the layout of the statistics on one device.

    Args:
      chunks: the operands of each executable.
      streams: whether large gradients are streamed, if there are no shards.
      groups: the device meshes of the shards.
    """
    nothing: list[tuple[float, ...]] = [() for _ in chunks]
    if groups.meshes:
        weights = [
            [tuple(groups.weight(operand.leaves[0].dtensor_layout, mesh) for operand in chunk) for chunk in chunks]
            for mesh in groups.meshes
        ]
        return StatsLayout(chunks, nothing, weights, [partial(sum_over_processes, mesh=mesh) for mesh in groups.meshes])
    weights = [tuple(0.0 if streams and operand.leaf_plan.can_stream_grad else 1.0 for operand in chunk) for chunk in chunks]
    return StatsLayout(chunks, weights, [], []) if len(chunks) == 1 else StatsLayout(chunks, nothing, [weights], [None])
