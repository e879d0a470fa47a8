"""Run the executables of one step on one device: (params, grads, state, hyperparams) -> (params, state).

Parameters and state are donated, and their new values have the same addresses. Gradients are only read.
"""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false
# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
import torch

from bridge._compat.torch import foreach_copy_
from bridge._compat.types import Device
from bridge._interop.dlpack import torch_stream_token
from bridge._memory.call_arguments import Argument
from bridge._memory.pending_results import CopiedResults, PendingCalls, PendingResults
from bridge._process import enable_x64, has_default_settings, overridden_settings, read_settings
from bridge._xla import streams

from . import openmp
from .in_flight import InFlight
from .launch import Launch, StepNumbers
from .stats_stage import NO_STATS, StatsStage

__all__ = ["DeviceStep", "StepInputs", "StepResult", "run"]

_jax_buffer, _elements, _has_callback, _read, _copied_result_bytes = (
    attrgetter("jax_buffer"),
    attrgetter("executable.elements"),
    attrgetter("executable.has_callback"),
    methodcaller("read"),
    attrgetter("copied_result_bytes"),
)


_L = TypeVar("_L", bound=Launch)


class DeviceStep(NamedTuple, Generic[_L]):
    """What a step on one device runs.

    launches: its executables in order, each with the buffers that it is called on.
    stats_stage: computes the statistics of all gradients before the first of them; None where the executables need none from it.
    """

    launches: Sequence[_L]
    stats_stage: StatsStage | None = None


class StepInputs(NamedTuple):
    """The values of one step, beside the buffers that its executables are bound to.

    grads: the gradients of all leaves that have one.
    hyperparams: float64 vector: `ONES` times 1.0, the norm bound, then the hyperparameter rows.
    extra_args: the arrays among the user's extra arguments, in the order of the plans' `extra`.
    loss_scale: with a loss scale the scale and the count of infinities found, float32, and the count of skipped updates, int32, all of
      shape (1,); else empty.
    """

    grads: Sequence[torch.Tensor]
    hyperparams: np.ndarray
    extra_args: Sequence[Argument]
    loss_scale: Sequence[jax.typing.ArrayLike] = ()


class StepResult(NamedTuple, Generic[_L]):
    """The result of a step on one device.

    moved: whether a result has another address than the buffer that was donated for it.
    skip_counts: with a loss scale the new count of skipped updates, else empty.
    numbers: what users log.
    """

    moved: bool
    skip_counts: list[jax.Array]
    numbers: StepNumbers[_L]


def run(device_step: DeviceStep[_L], inputs: StepInputs, completed: list[_L]) -> StepResult[_L]:
    """Call every executable of a step in order, wait for all results, and put them into the tensors. Call it within a transaction.

    Args:
      device_step: the executables.
      inputs: the values of the step.
      completed: receives each launch whose results are in the tensors, also if an error is raised.
    """
    launches, stats_stage = device_step
    device = launches[0].executable.plan.device
    room, may_fail = sum(map(_copied_result_bytes, launches)), any(map(_has_callback, launches))
    in_flight = InFlight(PendingCalls(device.platform == "cpu", may_fail, completed), room)
    # A norm over all gradients must be known before the first update; else an executable runs while the next call is prepared.
    batches = zip(launches) if stats_stage is None else (launches,)
    with in_flight, enable_x64(True) if has_default_settings(read_settings(jax.config)) else overridden_settings(), torch.no_grad():
        hyperparams, worker_streams = inputs.hyperparams, []
        if not in_flight.calls.on_cpu:
            hyperparams = _hyperparams_on_device(hyperparams.tobytes(), device)
        elif len(launches) > 1:
            hyperparams, (in_flight.saved_stream, *worker_streams) = streams.fork_streams(hyperparams, device)
        stats, loss_scale = NO_STATS, list(inputs.loss_scale)
        if stats_stage is not None and stats_stage.streaming is not None:
            stats = stats_stage.streaming(inputs.grads, loss_scale, in_flight.reads, in_flight.held)
        operands, elements = (list(inputs.extra_args), loss_scale), sum(map(_elements, launches))
        step = _Step(in_flight, device, len(launches) == 1, elements, inputs.grads, hyperparams, operands, stats, worker_streams)
        for batch in batches:
            arguments = step.prepare(batch)
            if stats_stage is not None:
                step.stats = stats_stage.finish(stats, batch, arguments, loss_scale, step.stream_events)
            for launch, gradients in zip(batch, arguments, strict=True):
                step.call(launch, gradients)
    stats_of_step = step.own_stats or ([] if stats_stage is None else [step.stats])
    return StepResult(in_flight.calls.moved, step.skip_counts, StepNumbers(stats_of_step, step.metrics))


@dataclass(slots=True, eq=False, repr=False)
class _Step(Generic[_L]):
    """One step on one device: what its calls have in common, and what one call leaves for the next.

    is_inline: whether the only executable runs in this thread.
    elements: the number of elements that all executables update.
    trailing_operands: the extra arguments, and the loss scale.
    stats: the statistics of all gradients, if the programs take them as an argument.
    worker_streams: the execution streams of several executables.
    stream_events: on a GPU what a program waits for.
    skip_counts: with a loss scale the new count of skipped updates.
    own_stats: the statistics of the gradients, if the only program computes them for a norm.
    metrics: for each program that has metrics its launch and its metrics.
    """

    in_flight: InFlight[_L]
    device: Device
    is_inline: bool
    elements: float
    grads: Sequence[torch.Tensor]
    hyperparams: Argument
    trailing_operands: tuple[list[Argument], list[jax.typing.ArrayLike]]
    stats: Argument
    worker_streams: list[int]
    stream_events: list[jax.Array] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    skip_counts: list[jax.Array] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    own_stats: list[jax.Array] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    metrics: list[tuple[_L, jax.Array]] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]

    def prepare(self, batch: Sequence[_L]) -> list[Sequence[Argument]]:
        """Make everything ready that the calls of a batch read. Return the gradients of each as arguments."""
        grads: list[Sequence[torch.Tensor]] = []
        for launch in batch:
            bound = launch.arguments
            if bound.mirrored:
                foreach_copy_(bound.mirrors, bound.mirrored)
            grads.append(bound.gradients.gather(self.grads) if bound.gradients.buffers else self.grads)
        if not self.in_flight.calls.on_cpu:
            if _collect_scalars(batch) or not self.stream_events:
                self.stream_events = [torch_stream_token(self.device)]
        elif (
            not (self.in_flight.calls.results or self.in_flight.reads)
            and openmp.pause
            and self.elements >= openmp.MIN_ELEMENTS_PER_THREAD * torch.get_num_threads()
        ):
            openmp.pause(openmp.PAUSE_SOFT)
        arguments: list[Sequence[Argument]] = []
        for launch, available in zip(batch, grads, strict=True):
            gradients = launch.arguments.gradients
            chosen = list(map(available.__getitem__, gradients.positions))
            arguments.append(gradients.as_arguments(chosen, self.in_flight.held))
        return arguments

    def call(self, launch: _L, gradients: Sequence[Argument]) -> None:
        """Call one executable, and note what to wait for."""
        in_flight, executable, bound = self.in_flight, launch.executable, launch.arguments
        read: Sequence[Argument] = bound.copied_back_as_arguments(bound.copied_back, in_flight.held) if bound.copied_back else []
        if self.worker_streams:
            streams.set_stream(self.worker_streams[len(in_flight.calls.results) % len(self.worker_streams)])
        rows = bound.row_offsets, bound.active_rows, bound.row_sizes
        common = self.hyperparams, *rows, *self.trailing_operands, self.stats, self.stream_events
        buffers, arrays, others = in_flight.execute(
            (list(map(_jax_buffer, bound.inplace)), bound.state),
            executable.inline_executable if self.is_inline else executable.update,
            (list(map(_read, bound.scalars)), read, gradients, bound.masks, *common),
        )
        new_scalars, new_values, self.skip_counts, self.own_stats, metrics, tokens = others
        if metrics:
            self.metrics.append((launch, metrics[0]))
        copied_back = CopiedResults(bound.copied_back, bound.copied_back_dim_order, new_values, bound.mirrored, bound.mirrors)
        pending = in_flight.calls.results
        pending.append(PendingResults(launch, tokens, buffers, arrays, (bound.scalars, new_scalars), copied_back))
        if not in_flight.calls.on_cpu and len(pending) > 1 and not in_flight.calls.may_fail:
            pending[-2].tokens.clear()  # torch's stream waits once, for the last executable
        torch.autograd.graph.increment_version(bound.params)


@functools.lru_cache(64)
def _hyperparams_on_device(hyperparam_bytes: bytes, device: Device) -> jax.Array:
    """Copy the float64 hyperparameters to a device. Most steps have those of the step before, which are cached."""
    return jax.device_put(np.frombuffer(hyperparam_bytes), device)


def _collect_scalars(launches: Sequence[Launch]) -> bool:
    """Collect the scalars of these launches. Return whether that, or a gather, has used a GPU's stream."""
    bound = [launch.arguments for launch in launches]
    copies = [cells.gather() for each in bound for cells in each.scalars]
    return any(copies) or any(each.gradients.buffers or each.mirrored for each in bound)
