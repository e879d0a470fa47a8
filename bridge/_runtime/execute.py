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
from .launch import Launch

__all__ = ["StepInputs", "StepResult", "run"]

_jax_buffer, _elements, _has_callback, _read, _copied_result_bytes = (
    attrgetter("jax_buffer"),
    attrgetter("executable.elements"),
    attrgetter("executable.has_callback"),
    methodcaller("read"),
    attrgetter("copied_result_bytes"),
)


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


class StepResult(NamedTuple):
    """The result of a step on one device.

    moved: whether a result has another address than the buffer that was donated for it.
    skip_counts: with a loss scale the new count of skipped updates, else empty.
    """

    moved: bool
    skip_counts: list[jax.Array]


_NO_STATS = np.zeros(2)
_L = TypeVar("_L", bound=Launch)


def run(launches: Sequence[_L], inputs: StepInputs, completed: list[_L]) -> StepResult:
    """Call every executable of a step in order, wait for all results, and put them into the tensors. Call it within a transaction.

    Args:
      launches: the executables, each with the buffers that it is called on.
      inputs: the values of the step.
      completed: receives each launch whose results are in the tensors, also if an error is raised.
    """
    device = launches[0].executable.plan.device
    room, may_fail = sum(map(_copied_result_bytes, launches)), any(map(_has_callback, launches))
    in_flight = InFlight(PendingCalls(device.platform == "cpu", may_fail, completed), room)
    # A norm over all gradients must be known before the first update; else an executable runs while the next call is prepared.
    batches = (launches,) if launches[0].executable.plan.stats_precomputed else zip(launches)
    with in_flight, enable_x64(True) if has_default_settings(read_settings(jax.config)) else overridden_settings(), torch.no_grad():
        hyperparams, worker_streams = inputs.hyperparams, []
        if not in_flight.calls.on_cpu:
            hyperparams = _hyperparams_on_device(hyperparams.tobytes(), device)
        elif len(launches) > 1:
            hyperparams, (in_flight.saved_stream, *worker_streams) = streams.fork_streams(hyperparams, device)
        reader = launches[0].streaming_stats
        stats = _NO_STATS if reader is None else reader(inputs.grads, inputs.loss_scale, in_flight.reads, in_flight.held)
        operands, elements = (list(inputs.extra_args), list(inputs.loss_scale)), sum(map(_elements, launches))
        step = _Step(in_flight, device, len(launches) == 1, elements, inputs.grads, hyperparams, operands, stats, worker_streams)
        for batch in batches:
            for launch, gradients in zip(batch, step.prepare(batch), strict=True):
                step.call(launch, gradients)
    return StepResult(in_flight.calls.moved, step.skip_counts)


@dataclass(slots=True, eq=False, repr=False)
class _Step(Generic[_L]):
    """One step on one device: what its calls have in common, and what one call leaves for the next.

    is_inline: whether the only executable runs in this thread.
    elements: the number of elements that all executables update.
    trailing_operands: the extra arguments, and the loss scale.
    stats: the statistics of the gradients that have been read.
    worker_streams: the execution streams of several executables.
    stream_events: on a GPU what a program waits for.
    skip_counts: with a loss scale the new count of skipped updates.
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
            bound, stats_executable = launch.arguments, launch.executable.stats_executable
            chosen = list(map(available.__getitem__, bound.gradients.positions))
            arguments.append(bound.gradients.as_arguments(chosen, self.in_flight.held))
            if stats_executable is not None:
                loss_scale = self.trailing_operands[1]
                self.stats = stats_executable(arguments[-1], bound.masks, bound.active_rows, loss_scale, self.stats, self.stream_events)
        return arguments

    def call(self, launch: _L, gradients: Sequence[Argument]) -> None:
        """Call one executable, and note what to wait for."""
        in_flight, executable, bound = self.in_flight, launch.executable, launch.arguments
        read: Sequence[Argument] = bound.copied_back_as_arguments(bound.copied_back, in_flight.held) if bound.copied_back else []
        if self.worker_streams:
            streams.set_stream(self.worker_streams[len(in_flight.calls.results) % len(self.worker_streams)])
        common = self.hyperparams, bound.row_offsets, bound.active_rows, *self.trailing_operands, self.stats, self.stream_events
        buffers, arrays, others = in_flight.execute(
            (list(map(_jax_buffer, bound.inplace)), bound.state),
            executable.inline_executable if self.is_inline else executable.update,
            (list(map(_read, bound.scalars)), read, gradients, bound.masks, *common),
        )
        new_scalars, new_values, self.skip_counts, tokens = others
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
