"""One call of a compiled train program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import methodcaller
from typing import NamedTuple, TypeVar

import jax
import numpy as np
import torch

from bridge._compat.torch import foreach_copy_
from bridge._interop.dlpack import behind_torch
from bridge._memory.call_arguments import Argument, operands, results
from bridge._memory.jax_buffers import Memory, leave_held, readable, taken
from bridge._memory.scalar_vectors import Number
from bridge._process import calm
from bridge._runtime import in_flight, openmp
from bridge._runtime import launch as step_launch

from .train_program import Program

_is_deleted = methodcaller("is_deleted")


_L = TypeVar("_L", bound=step_launch.Launch)


class Arrays(NamedTuple):
    """The arguments of one call of a program, in addition to those of its `BoundExecutable`.

    buffers: the `JaxBuffer` of each donated module buffer.
    copied_back, copied_back_order: the module buffers that are copied back, and the order of their dimensions.
    read_arrays: the arguments that the program only reads, as in `TensorSource`.
    grad_accumulators: the `JaxBuffer` of each gradient accumulator.
    hyperparams: the vector of hyperparams.
    is_first: whether this call starts the accumulation.
    written_tensors: the tensors over memory that the program changes.
    """

    buffers: Sequence[Memory]
    copied: Sequence[torch.Tensor]
    copied_order: Sequence[tuple[int, ...] | None]
    read: Sequence[Argument | Memory | None]
    batch: Sequence[Argument | np.generic]
    sums: Sequence[Memory]
    seed: np.integer
    numbers: np.ndarray
    further: Sequence[Argument]
    first: bool
    written: Sequence[torch.Tensor]


class Outcome(NamedTuple):
    """The results of a call: the loss as a tensor, the aux outputs, and `moved` as in `bridge._runtime.execute.StepResult`."""

    loss: torch.Tensor
    aux: list[jax.Array]
    moved: bool


def run(program: Program, launch: _L, arrays: Arrays, landed: list[_L]) -> Outcome:
    """Run a program and wait until its results are in the tensors. The caller has opened a transaction.

    `completed` is as in `bridge._runtime.execute.run`.
    """
    room = launch.room + sum(t.nbytes + in_flight.APART for t in arrays.copied if program.plan.device.platform == "cpu")
    flight, new_kept, new_scalars = in_flight.flight(program.plan.device, launch, room, program.calls_back, landed), [], []
    copied_loss = Number(program.loss) if program.plan.device.platform == "cpu" else None
    with flight, calm():
        params = [memory for leaf in launch.inplace if (memory := leaf.memory) is not None]
        kept = launch.kept_operands(launch.kept) if launch.kept else []
        copied = operands(arrays.copied, arrays.copied_order) if arrays.copied else []
        read = [readable(x) if isinstance(x, Memory) else x for x in arrays.read]
        for cells in launch.scalars:
            cells.collect()
        if launch.mirrored and program.updates:
            foreach_copy_(launch.mirrors, launch.mirrored)
        after = [] if program.plan.device.platform == "cpu" else [behind_torch(program.plan.device)]
        parts = (params, launch.state, arrays.buffers) if program.updates else (arrays.sums, arrays.buffers)
        memories = [memory for part in parts for memory in part]
        others = list(map(readable, arrays.sums if program.updates else params))
        first = np.bool_(arrays.first)
        if (
            program.plan.device.platform == "cpu"
            and openmp.pause
            and program.elements >= openmp.ELEMENTS_A_THREAD * torch.get_num_threads()
        ):
            openmp.pause(openmp.SOFT)
        old = taken(memories)
        left = iter(old)
        own = tuple(list(islice(left, len(part))) for part in parts)
        if program.updates:
            rest = launch.masks, arrays.numbers, launch.offsets, launch.live, list(arrays.further), first, after
            scalars = [cells.read() for cells in launch.scalars]
            arguments = scalars, kept, copied, read, list(arrays.batch), others, arrays.seed, *rest
            *donated, new_scalars, new_kept, new_copied, loss, aux, token = program.call(own, arguments)
        else:
            arguments = others, kept, copied, read, list(arrays.batch), arrays.seed, first, after
            *donated, new_copied, loss, aux, token = program.call(own, arguments)
        if not all(map(_is_deleted, old)):
            leave_held(memories, old)
        arrived = [array for part in donated for array in part]
        for memory, array in zip(memories, arrived, strict=True):
            memory.array = array
        own = old = left = None  # releasing the donated arrays takes time, during which the program runs
        numbers = launch.scalars if program.updates else (), new_scalars
        if copied_loss is not None:
            numbers = [*numbers[0], copied_loss], [*new_scalars, loss]
        into = [*(launch.kept if new_kept else ()), *arrays.copied]
        order = [*(launch.kept_order if new_kept else ()), *arrays.copied_order]
        mirrored, mirrors = (launch.mirrored, launch.mirrors) if program.updates else ([], [])
        flight.landing.append(
            in_flight.Landing([token], memories, arrived, numbers, (into, order, [*new_kept, *new_copied], mirrored, mirrors))
        )
        torch.autograd.graph.increment_version(arrays.written)
    loss = results([loss], False)[0] if copied_loss is None else copied_loss.tensor
    return Outcome(loss, aux, flight.moved)
