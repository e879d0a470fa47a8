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
from operator import attrgetter, methodcaller
from typing import NamedTuple, TypeVar

import jax
import numpy as np
import torch

from bridge import _process
from bridge._compat.torch import foreach_copy_
from bridge._compat.types import Device
from bridge._interop.dlpack import torch_stream_token
from bridge._memory.call_arguments import Argument
from bridge._memory.jax_buffers import arrays_to_donate, detach_undonated
from bridge._process import enable_x64, has_default_settings, overridden_settings, raise_if_forked, read_settings
from bridge._xla import streams

from . import openmp
from .in_flight import InFlight, PendingResults, _is_deleted, _jax_buffer
from .launch import Launch

__all__ = ["StepResult", "run"]

_elements, _has_callback, _read, _copied_result_bytes = (
    attrgetter("executable.elements"),
    attrgetter("executable.has_callback"),
    methodcaller("read"),
    attrgetter("copied_result_bytes"),
)


class StepResult(NamedTuple):
    """The result of a step on one device.

    moved: whether a result has another address than the buffer that was donated for it.
    skip_counts: with a loss scale the new count of skipped updates, else empty.
    """

    moved: bool
    skip_counts: list[jax.Array]


_NO_STATS = np.zeros(2)
_L = TypeVar("_L", bound=Launch)


def run(
    launches: Sequence[_L],
    grads: Sequence[torch.Tensor],
    hyperparams: np.ndarray,
    extra: Sequence[Argument],
    scaling: Sequence[jax.typing.ArrayLike],
    completed: list[_L],
) -> StepResult:
    """Call every executable of a step in order, wait for all results, and put them into the tensors. Call it within a transaction.

    Args:
      launches: the executables, each with the buffers that it is called on.
      grads: the gradients of all leaves that have one.
      hyperparams: float64 vector: `ONES` times 1.0, the norm bound, then the hyperparameter rows.
      extra: the arrays among the user's extra arguments, in the order of the plans' `extra`.
      scaling: with a loss scale the scale and the count of infinities found, float32, and the count of skipped updates, int32, all of
        shape (1,); else empty.
      completed: receives each launch whose results are in the tensors, also if an error is raised.
    """
    if _process._forked:
        raise_if_forked()
    in_flight, skip_counts, worker_streams = InFlight(launches, completed), [], []
    in_flight.copied_result_bytes, in_flight.may_fail = sum(map(_copied_result_bytes, launches)), any(map(_has_callback, launches))
    # A norm over all gradients must be known before the first update; else an executable runs while the next call is prepared.
    batches = (launches,) if launches[0].executable.plan.stats_precomputed else zip(launches)
    trailing_operands, stream_events = (list(extra), list(scaling)), []
    device, streaming_stats, elements = launches[0].executable.plan.device, launches[0].streaming_stats, sum(map(_elements, launches))
    in_flight.on_cpu = on_cpu = device.platform == "cpu"
    with in_flight, enable_x64(True) if has_default_settings(read_settings(jax.config)) else overridden_settings(), torch.no_grad():
        hyperparams_on_device = hyperparams if on_cpu else _hyperparams_on_device(hyperparams.tobytes(), device)
        if on_cpu and len(launches) > 1:
            hyperparams_on_device, (in_flight.saved_stream, *worker_streams) = streams.fork_streams(hyperparams, device)
        in_flight.streaming_stats, stats = streaming_stats, _NO_STATS if streaming_stats is None else streaming_stats(grads, scaling)
        for batch in batches:
            for launch in batch:
                if not launch.is_prepared:
                    launch.prepare()
                if launch.mirrored:
                    foreach_copy_(launch.mirrors, launch.mirrored)
                for positions, rows in launch.cat_gathers:  # faster than a copy for each row
                    torch.cat(list(map(grads.__getitem__, positions)), out=rows)
                if launch.copy_gathers:
                    foreach_copy_(launch.copy_targets, list(map(grads.__getitem__, launch.copy_gathers)))
            if not on_cpu:
                if _collect_scalars(batch) or not stream_events:
                    stream_events = [torch_stream_token(device)]
            elif (
                not (in_flight.pending_results or streaming_stats)
                and openmp.pause
                and elements >= openmp.MIN_ELEMENTS_PER_THREAD * torch.get_num_threads()
            ):
                openmp.pause(openmp.PAUSE_SOFT)
            gradient_arguments: list[Sequence[Argument]] = []
            for launch in batch:
                if launch.executable.reads_grads_by_address:
                    in_flight.gradient_copies.append(launch.as_arguments.copies)  # pyright: ignore[reportFunctionMemberAccess]
                gradient_arguments.append(launch.as_arguments([*map(grads.__getitem__, launch.argument_positions), *launch.bucket_grads]))
                if launch.executable.stats_executable is not None:
                    stats = launch.executable.stats_executable(
                        gradient_arguments[-1], launch.masks, launch.active_rows, trailing_operands[1], stats, stream_events
                    )
            for launch, gradients in zip(batch, gradient_arguments, strict=True):
                memories = [*map(_jax_buffer, launch.inplace), *launch.state]
                split = len(launch.inplace)
                read: Sequence[Argument] = launch.copied_back_as_arguments(launch.copied_back) if launch.copied_back else []
                if worker_streams:
                    streams.set_stream(worker_streams[len(in_flight.pending_results) % len(worker_streams)])
                scalars = list(map(_read, launch.scalars))
                old = arrays_to_donate(memories)
                own = old[:split], old[split:], scalars, read, gradients, launch.masks
                call = launch.executable.update if len(launches) > 1 else launch.executable.inline_executable
                new_params, new_state, new_scalars, new_kept, skip_counts, tokens = call(
                    *own, hyperparams_on_device, launch.row_offsets, launch.active_rows, *trailing_operands, stats, stream_events
                )
                if not all(map(_is_deleted, old)):
                    detach_undonated(memories, old)
                copied = launch.copied_back, launch.copied_back_dim_order, new_kept, launch.mirrored, launch.mirrors
                arrays = [*new_params, *new_state]
                in_flight.pending_results.append(PendingResults(tokens, memories, arrays, (launch.scalars, new_scalars), copied))
                for memory, array in zip(memories, arrays, strict=True):
                    memory.array = array
                if not on_cpu and len(in_flight.pending_results) > 1 and not in_flight.may_fail:
                    in_flight.pending_results[-2][0].clear()  # torch's stream waits once, for the last executable
                torch.autograd.graph.increment_version(launch.params)
                del own, old  # the donated arrays are freed while the program runs
    return StepResult(in_flight.moved, skip_counts)


@functools.lru_cache(64)
def _hyperparams_on_device(hyperparam_bytes: bytes, device: Device) -> jax.Array:
    """Copy the float64 hyperparameters to a device. Most steps have those of the step before, which are cached."""
    return jax.device_put(np.frombuffer(hyperparam_bytes), device)


def _collect_scalars(launches: Sequence[Launch]) -> bool:
    """Collect the scalars of these launches. Return whether that, or a gather, has used a GPU's stream."""
    copies = [cells.gather() for launch in launches for cells in launch.scalars]
    return any(copies) or any(launch.bucket_grads or launch.mirrored for launch in launches)
