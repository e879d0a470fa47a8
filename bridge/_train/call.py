"""One call of a compiled train program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
import torch

from bridge._compat.torch import foreach_copy_
from bridge._interop.dlpack import torch_stream_token
from bridge._memory.call_arguments import Argument, as_call_arguments, results_as_tensors
from bridge._memory.jax_buffers import JaxBuffer, readable_array
from bridge._memory.pending_results import CopiedResults, PendingCalls, PendingResults
from bridge._memory.scalar_vectors import ScalarResult
from bridge._process import jax_context
from bridge._runtime import in_flight, openmp
from bridge._runtime import launch as step_launch

from .train_program import TrainProgram

_L = TypeVar("_L", bound=step_launch.Launch)


class TrainArrays(NamedTuple):
    """The arguments of one call of a program, in addition to those of its `BoundExecutable`.

    buffers: the `JaxBuffer` of each donated module buffer.
    copied_back, copied_back_order: the module buffers that are copied back, and the order of their dimensions.
    read_arrays: the arguments that the program only reads, as in `TensorSource`.
    grad_accumulators: the `JaxBuffer` of each gradient accumulator.
    hyperparams: the vector of hyperparams.
    is_first: whether this call starts the accumulation.
    written_tensors: the tensors over memory that the program changes.
    """

    buffers: Sequence[JaxBuffer]
    copied_back: Sequence[torch.Tensor]
    copied_back_order: Sequence[tuple[int, ...] | None]
    read_arrays: Sequence[Argument | JaxBuffer | None]
    batch: Sequence[Argument | np.generic]
    grad_accumulators: Sequence[JaxBuffer]
    seed: np.integer
    hyperparams: np.ndarray
    extra_args: Sequence[Argument]
    is_first: bool
    written_tensors: Sequence[torch.Tensor]


class TrainResult(NamedTuple, Generic[_L]):
    """The results of a call: the loss as a tensor, the aux outputs, `moved` as in `bridge._runtime.execute.StepResult`, and `numbers`."""

    loss: torch.Tensor
    aux: list[jax.Array]
    moved: bool
    numbers: step_launch.StepNumbers[_L]


def run(program: TrainProgram, launch: _L, arrays: TrainArrays, completed: list[_L]) -> TrainResult[_L]:
    """Run a program and wait until its results are in the tensors. The caller has opened a transaction.

    `completed` is as in `bridge._runtime.execute.run`.
    """
    on_cpu = program.plan.device.platform == "cpu"
    room = launch.copied_result_bytes + sum(t.nbytes + in_flight.MAX_RESULT_PADDING for t in arrays.copied_back if on_cpu)
    flight = in_flight.InFlight(PendingCalls(on_cpu, program.has_callback, completed), room)
    copied_loss = ScalarResult(program.loss_dtype) if on_cpu else None
    bound = launch.arguments
    with flight, jax_context():
        params = [memory for leaf in bound.inplace if (memory := leaf.jax_buffer) is not None]
        kept = bound.copied_back_as_arguments(bound.copied_back, flight.held) if bound.copied_back else []
        copied = as_call_arguments(arrays.copied_back, arrays.copied_back_order) if arrays.copied_back else []
        read = [readable_array(x) if isinstance(x, JaxBuffer) else x for x in arrays.read_arrays]
        for scalar_vector in bound.scalars:
            scalar_vector.gather()
        if bound.mirrored and program.updates:
            foreach_copy_(bound.mirrors, bound.mirrored)
        stream_events = [] if on_cpu else [torch_stream_token(program.plan.device)]
        if on_cpu and openmp.pause and program.elements >= openmp.MIN_ELEMENTS_PER_THREAD * torch.get_num_threads():
            openmp.pause(openmp.PAUSE_SOFT)
        others = list(map(readable_array, arrays.grad_accumulators if program.updates else params))
        first = np.bool_(arrays.is_first)
        if program.updates:
            parts = params, bound.state, arrays.buffers
            scalars = [scalar_vector.read() for scalar_vector in bound.scalars]
            rows = bound.row_offsets, bound.active_rows, bound.row_sizes
            rest = bound.masks, arrays.hyperparams, *rows, list(arrays.extra_args), first, stream_events
            arguments = scalars, kept, copied, read, list(arrays.batch), others, arrays.seed, *rest
        else:
            parts = arrays.grad_accumulators, arrays.buffers
            arguments = others, kept, copied, read, list(arrays.batch), arrays.seed, first, stream_events
        call = lambda *given: program.call(given[: len(parts)], given[len(parts) :])  # noqa: E731
        buffers, new_arrays, results = flight.execute(parts, call, arguments)
        if program.updates:
            new_scalars, new_kept, new_copied, stats, metrics, *results = results
        else:
            new_copied, *results = results
            new_scalars, new_kept, stats, metrics = [], [], [], []
        loss, aux, token = results
        vectors = bound.scalars if program.updates else ()
        scalar_results = (vectors, new_scalars) if copied_loss is None else ([*vectors, copied_loss], [*new_scalars, loss])
        into = [*(bound.copied_back if new_kept else ()), *arrays.copied_back]
        order = [*(bound.copied_back_dim_order if new_kept else ()), *arrays.copied_back_order]
        mirrored, mirrors = (bound.mirrored, bound.mirrors) if program.updates else ([], [])
        copied_back = CopiedResults(into, order, [*new_kept, *new_copied], mirrored, mirrors)
        flight.calls.results.append(PendingResults(launch, [token], buffers, new_arrays, scalar_results, copied_back))
        torch.autograd.graph.increment_version(arrays.written_tensors)
    loss = results_as_tensors([loss], False)[0] if copied_loss is None else copied_loss.tensor
    return TrainResult(loss, aux, flight.calls.moved, step_launch.StepNumbers(stats, [(launch, each) for each in metrics]))
