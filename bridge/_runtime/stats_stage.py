"""The stage of a step that computes statistics of all its gradients, before the first executable changes a parameter.

A step of one executable needs it only for large gradients that are streamed and for shards: the program computes all other statistics
itself. Several executables share what the stage computes.
"""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np
import torch

from bridge._compat.types import Device
from bridge._interop.dlpack import to_jax, to_torch
from bridge._memory.call_arguments import Argument

from .executable import StatsExecutable
from .streaming_stats import StreamingStats

if TYPE_CHECKING:
    from .launch import Launch

NO_STATS = np.zeros(2)


@dataclass(frozen=True, eq=False, repr=False)
class StatsStage:
    """Computes the statistics of the gradients of a step on one device, as `bridge._compiler.grad_stats` describes them.

    streaming: reads large gradients at their own addresses; None where there are none.
    executables: what reads the other gradients, for each group one executable for each launch, or None where it has nothing to read. All
      gradients are one group, or with shards those of one device mesh are.
    reductions: for each group what sums the statistics of all processes in place; None where each process has all gradients.
    streamed_bytes: the bytes that `streaming` reads.
    """

    streaming: StreamingStats | None
    executables: Sequence[Sequence[StatsExecutable | None]]
    reductions: Sequence[Callable[[torch.Tensor], None] | None]
    streamed_bytes: int = 0

    def finish(
        self,
        streamed: Argument,
        launches: Sequence[Launch],
        grads: Sequence[Sequence[Argument]],
        loss_scale: Sequence[jax.typing.ArrayLike],
        stream_event: Sequence[jax.Array],
    ) -> Argument:
        """Return the statistics of all gradients. With shards, all processes must call this.

        Args:
          streamed: the result of `streaming`, or zeros.
          launches: the executables of the step.
          grads: the gradients of each, as its program takes them.
          loss_scale, stream_event: as in `bridge._compiler.plan.UpdateArguments`.
        """
        total, device = streamed, launches[0].executable.plan.device
        for executables, reduce in zip(self.executables, self.reductions, strict=True):
            stats = total if reduce is None else NO_STATS
            for executable, launch, own in zip(executables, launches, grads, strict=True):
                if executable is not None:
                    bound = launch.arguments
                    stats = executable.call(own, bound.masks, bound.active_rows, loss_scale, stats, stream_event)
            total = stats if reduce is None else _add_reduced(total, stats, reduce, device)
        return total

    @property
    def bytes_accessed(self) -> float:
        """The bytes that the stage reads and writes, by the compiler's count."""
        return self.streamed_bytes + sum(each.bytes_accessed for group in self.executables for each in group if each is not None)


def _add_reduced(total: Argument, stats: Argument, reduce: Callable[[torch.Tensor], None], device: Device) -> Argument:
    """Return the sum of `total` and of the statistics of all processes. On a CPU this waits for the executables."""
    if device.platform == "cpu":
        summed = torch.from_numpy(np.array(stats))
        reduce(summed)
        return np.asarray(total) + summed.numpy()
    summed = to_torch(jax.device_put(stats, device)).clone()
    reduce(summed)
    return to_jax(summed) + total
