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
from bridge._interop.dlpack import behind_torch
from bridge._memory.call_arguments import Argument
from bridge._memory.jax_buffers import leave_held, taken
from bridge._process import X64, calmed, refuse_fork, settings, undisturbed
from bridge._xla import streams

from . import openmp
from .in_flight import Landing, _Flight, _is_deleted, _memory
from .launch import Launch

__all__ = ["Outcome", "run"]

_elements, _calls_back, _read, _room = (
    attrgetter("program.elements"),
    attrgetter("program.calls_back"),
    methodcaller("read"),
    attrgetter("room"),
)


class Outcome(NamedTuple):
    """The result of a step on one device.

    moved: whether a result has another address than the buffer that was donated for it.
    skip_counts: with a loss scale the new count of skipped updates, else empty.
    """

    moved: bool
    skipped: list[jax.Array]


_NOTHING_MEASURED = np.zeros(2)
_L = TypeVar("_L", bound=Launch)


def run(
    launches: Sequence[_L],
    grads: Sequence[torch.Tensor],
    hyperparams: np.ndarray,
    extra: Sequence[Argument],
    scaling: Sequence[jax.typing.ArrayLike],
    landed: list[_L],
) -> Outcome:
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
        refuse_fork()
    flight, skipped, side_by_side = _Flight(launches, landed), [], []
    flight.room, flight.may_fail = sum(map(_room, launches)), any(map(_calls_back, launches))
    # A norm over all gradients must be known before the first update; else an executable runs while the next call is prepared.
    waves = (launches,) if launches[0].program.plan.measured else zip(launches)
    further, after = (list(extra), list(scaling)), []
    device, reader, elements = launches[0].program.plan.device, launches[0].reader, sum(map(_elements, launches))
    flight.on_cpu = on_cpu = device.platform == "cpu"
    with flight, X64(True) if undisturbed(settings(jax.config)) else calmed(), torch.no_grad():
        numbers = hyperparams if on_cpu else _on_device(hyperparams.tobytes(), device)
        if on_cpu and len(launches) > 1:
            numbers, (flight.order, *side_by_side) = streams.opened(hyperparams, device)
        flight.reader, measure = reader, _NOTHING_MEASURED if reader is None else reader(grads, scaling)
        for wave in waves:
            for launch in wave:
                if not launch.ready:
                    launch.prepare()
                if launch.mirrored:
                    foreach_copy_(launch.mirrors, launch.mirrored)
                for positions, rows in launch.joined:  # faster than a copy for each row
                    torch.cat(list(map(grads.__getitem__, positions)), out=rows)
                if launch.gathered:
                    foreach_copy_(launch.targets, list(map(grads.__getitem__, launch.gathered)))
            if not on_cpu:
                if _collected(wave) or not after:
                    after = [behind_torch(device)]
            elif not (flight.landing or reader) and openmp.pause and elements >= openmp.ELEMENTS_A_THREAD * torch.get_num_threads():
                openmp.pause(openmp.SOFT)
            given: list[Sequence[Argument]] = []
            for launch in wave:
                if launch.program.scattered:
                    flight.copies.append(launch.flat.copies)  # pyright: ignore[reportFunctionMemberAccess]
                given.append(launch.flat([*map(grads.__getitem__, launch.positions), *launch.rows]))
                if launch.program.measure is not None:
                    measure = launch.program.measure(given[-1], launch.masks, launch.live, further[1], measure, after)
            for launch, gradients in zip(wave, given, strict=True):
                memories = [*map(_memory, launch.inplace), *launch.state]
                split = len(launch.inplace)
                read: Sequence[Argument] = launch.kept_operands(launch.kept) if launch.kept else []
                if side_by_side:
                    streams.choose(side_by_side[len(flight.landing) % len(side_by_side)])
                scalars = list(map(_read, launch.scalars))
                old = taken(memories)
                own = old[:split], old[split:], scalars, read, gradients, launch.masks
                call = launch.program.update if len(launches) > 1 else launch.program.alone
                new_params, new_state, new_scalars, new_kept, skipped, tokens = call(
                    *own, numbers, launch.offsets, launch.live, *further, measure, after
                )
                if not all(map(_is_deleted, old)):
                    leave_held(memories, old)
                copied = launch.kept, launch.kept_order, new_kept, launch.mirrored, launch.mirrors
                arrays = [*new_params, *new_state]
                flight.landing.append(Landing(tokens, memories, arrays, (launch.scalars, new_scalars), copied))
                for memory, array in zip(memories, arrays, strict=True):
                    memory.array = array
                if not on_cpu and len(flight.landing) > 1 and not flight.may_fail:
                    flight.landing[-2][0].clear()  # torch's stream waits once, for the last executable
                torch.autograd.graph.increment_version(launch.params)
                del own, old  # the donated arrays are freed while the program runs
    return Outcome(flight.moved, skipped)


@functools.lru_cache(64)
def _on_device(numbers: bytes, device: Device) -> jax.Array:
    """Copy the float64 hyperparameters to a device. Most steps have those of the step before, which are cached."""
    return jax.device_put(np.frombuffer(numbers), device)


def _collected(launches: Sequence[Launch]) -> bool:
    """Collect the scalars of these launches. Return whether that, or a gather, has used a GPU's stream."""
    copies = [cells.collect() for launch in launches for cells in launch.scalars]
    return any(copies) or any(launch.rows or launch.mirrored for launch in launches)
