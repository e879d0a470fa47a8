"""THE compiled update: (params, grads, state, hyperparams) -> (params, state), as one XLA program or, of many leaves, a few.

Parameters and state are donated and come back at their own addresses; gradients are only read.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from . import _process, openmp
from ._compat.torch import foreach_copy_
from ._interop.dlpack import behind_torch, wait_for
from ._memory.jax_buffers import Memory, leave_held, taken, write_back
from ._memory.scalar_vectors import Cells
from ._process import X64, calmed, refuse_fork, settings, undisturbed
from ._xla import streams
from .programs import Program
from .reading import Reader

__all__ = ["Launch", "Outcome", "elsewhere", "run"]

_elements, _calls_back, _read, _room = (
    attrgetter("program.elements"),
    attrgetter("program.calls_back"),
    methodcaller("read"),
    attrgetter("room"),
)
_memory, _address, _pointer, _is_deleted = (
    attrgetter("memory"),
    attrgetter("address"),
    methodcaller("unsafe_buffer_pointer"),
    methodcaller("is_deleted"),
)


class Launch(ABC):
    """A program over some of the live leaves, and where their arrays are: what stays the same from step to step.

    In plan order: leaves by themselves come before packs.

    room: bytes on a CPU that a call allocates for results which are copied.
    reader: what measures the large gradients of all launches of a step, at the first of them; None where nothing does.
    inplace: what has the `memory` of each in-place leaf; its array is donated and replaced.
    params: the tensors over those, whose version changes.
    state: the memories of the state of every leaf, then of the shared state; likewise.
    scalars: the scalars of leaves by themselves, by dtype.
    kept, kept_order: the tensors of the other leaves, which are only read, and the order of their dimensions in memory.
    kept_operands: from those tensors to arguments; a ValueError where the storage of one was freed or made smaller.
    positions: which of the step's gradients are arguments; `flat`: from those, and then `rows`, to arguments; `AllPlaces` where
      they are read where they lie.
    rows: the packs of gradients that are gathered. joined: of each that all its rows' gradients fill, one behind the other, which those
      are, and its rows as torch.cat wants them; gathered: which gradients belong into the others; `targets`: the place of each there.
    mirrored, mirrors: tensors of state that the user has put there and that stay where they are, and the tensors over `state` that are
      updated in their place: copied from them before the call, and back after it.
    masks: a boolean array per leaf with `elements`.
    offsets: int32 (leaves, those of packs one by one): where in the hyperparams the numbers of its row begin.
    live: boolean, one for each row of each pack: whether that row is updated.

    Program, packs and rows are there from the start; the rest is found when the first call is due, while those before it run.
    """

    __slots__ = (
        "flat", "gathered", "inplace", "joined", "kept", "kept_operands", "kept_order", "live", "masks", "mirrored", "mirrors",
        "offsets", "params", "positions", "program", "reader", "ready", "room", "rows", "scalars", "state", "targets",
    )  # fmt: skip

    program: Program
    reader: Reader | None
    ready: bool
    room: int
    inplace: Sequence[Any]
    params: Sequence[torch.Tensor]
    state: Sequence[Memory]
    scalars: Sequence[Cells]
    kept: Sequence[torch.Tensor]
    kept_order: Sequence[Any]
    kept_operands: Any
    positions: Sequence[int]
    flat: Any  # of tensors to a list of arguments
    joined: Sequence[tuple[Sequence[int], torch.Tensor]]
    gathered: Sequence[int]
    targets: list[torch.Tensor]
    rows: list[torch.Tensor]
    mirrored: list[torch.Tensor]
    mirrors: list[torch.Tensor]
    masks: list[Any]
    offsets: Any
    live: Any

    @abstractmethod
    def prepare(self) -> None:
        """Find all that a call needs."""


class Outcome(NamedTuple):
    """What a step leaves behind: whether a memory came to lie elsewhere; of scaled gradients the new count of skipped updates, else an
    empty list."""

    moved: bool
    skipped: list[Any]


_NOTHING_MEASURED = np.zeros(2)


def run(
    launches: Sequence[Launch],
    grads: Sequence[torch.Tensor],
    hyperparams: np.ndarray,
    extra: Sequence[Any],
    scaling: Sequence[Any],
    landed: list[Any],
) -> Outcome:
    """One step on one device: every program, in order, then a wait for all of their results, which are then in the tensors.

    To be called within a transaction.

    Args:
      launches: what is updated.
      grads: the gradients of all live leaves.
      hyperparams: float64 (width,): ONES times 1.0, the norm bound, then the rows.
      extra: the arrays among the further arguments, in the order of the plans' `extra`.
      scaling: of `scaled` plans the loss scale and the count of infinities found, float32, and the count of skipped
        updates, int32; all of shape (1,).
      landed: gets each launch whose results are in the tensors, also where an error is raised.
    """
    if _process._forked:
        refuse_fork()
    flight, skipped, side_by_side = _Flight(launches, landed), [], []
    flight.room, flight.may_fail = sum(map(_room, launches)), any(map(_calls_back, launches))
    # A norm over all must be known before the first program begins; else each begins while the next is made ready.
    waves = (launches,) if launches[0].program.plan.measured else zip(launches)
    further, after = (list(extra), list(scaling)), []
    device, reader, elements = launches[0].program.plan.device, launches[0].reader, sum(map(_elements, launches))
    flight.on_cpu = on_cpu = device.platform == "cpu"
    with flight, X64(True) if undisturbed(settings(jax.config)) else calmed(), torch.no_grad():
        numbers: Any = hyperparams if on_cpu else _on_device(hyperparams.tobytes(), device)
        if on_cpu and len(launches) > 1:
            numbers, (flight.order, *side_by_side) = streams.opened(hyperparams, device)
        flight.reader, measure = reader, _NOTHING_MEASURED if reader is None else reader(grads, scaling)
        for wave in waves:
            for launch in wave:
                if not launch.ready:
                    launch.prepare()
                if launch.mirrored:
                    foreach_copy_(launch.mirrors, launch.mirrored)
                for positions, rows in launch.joined:  # in half the time of a copy of each
                    torch.cat(list(map(grads.__getitem__, positions)), out=rows)
                if launch.gathered:
                    foreach_copy_(launch.targets, list(map(grads.__getitem__, launch.gathered)))
            if not on_cpu:
                if _collected(wave) or not after:
                    after = [behind_torch(device)]
            elif not (flight.landing or reader) and openmp.pause and elements >= openmp.ELEMENTS_A_THREAD * torch.get_num_threads():
                openmp.pause(openmp.SOFT)
            given = []
            for launch in wave:
                if launch.program.scattered:
                    flight.copies.append(launch.flat.copies)
                given.append(launch.flat([*map(grads.__getitem__, launch.positions), *launch.rows]))
                if launch.program.measure is not None:
                    measure = launch.program.measure(given[-1], launch.masks, launch.live, further[1], measure, after)
            for launch, gradients in zip(wave, given, strict=True):
                memories = [*map(_memory, launch.inplace), *launch.state]
                split = len(launch.inplace)
                read = launch.kept_operands(launch.kept) if launch.kept else []
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
                flight.landing.append((tokens, memories, arrays := [*new_params, *new_state], (launch.scalars, new_scalars), copied))
                for memory, array in zip(memories, arrays, strict=True):
                    memory.array = array
                if not on_cpu and len(flight.landing) > 1 and not flight.may_fail:
                    flight.landing[-2][0].clear()  # torch's stream waits once, for the last
                torch.autograd.graph.increment_version(launch.params)
                del own, old  # arrays that were donated: gone while the program runs, not behind it
    return Outcome(flight.moved, skipped)


@functools.lru_cache(64)
def _on_device(numbers: bytes, device: Any) -> jax.Array:
    """float64 numbers on a device: most steps have those of the step before."""
    return jax.device_put(np.frombuffer(numbers), device)


def _collected(launches: Sequence[Launch]) -> bool:
    """Collect the numbers of these launches; whether the stream of a GPU was then asked for anything that they read."""
    copies = [cells.collect() for launch in launches for cells in launch.scalars]
    return any(copies) or any(launch.rows or launch.mirrored for launch in launches)


APART = 256  # bytes between two results in memory, at most


class _Flight:
    """The time from the first donation until all results are where torch looks."""

    __slots__ = ("copies", "landed", "landing", "launches", "may_fail", "moved", "on_cpu", "order", "reader", "results", "room")
    on_cpu: bool  # whether the programs run there
    may_fail: bool  # whether some may fail while they run

    def __init__(self, launches: Sequence[Launch], landed: list[Any]) -> None:
        self.launches, self.landed = launches, landed
        # Of each call what to wait for, and where its results belong: those in memories, those of scalars, those that are copied.
        self.landing: list[tuple[list[Any], list[Memory], list[Any], tuple[Sequence[Cells], list[Any]], tuple[Any, ...]]] = []
        self.results: tuple[list[Any], list[Any], list[Any], list[Any], list[Any]] = [], [], [], [], []  # as of `write_back`
        self.copies: list[list[Any]] = []  # of gradients that are read where they lie
        self.room = 0  # bytes that the calls allocate for results which are copied
        self.moved = False
        self.reader: Reader | None = None  # of gradients that must stay until it has read them
        self.order: int | None = None  # of this thread's executions, to go back to

    def __enter__(self) -> _Flight:
        if self.room:
            try:  # while nothing has changed: XLA asks for it when it has taken what is donated
                np.empty(self.room, np.uint8)
            except MemoryError as error:
                error.add_note("The step needs this memory for its results, which are copied. Nothing was updated.")
                raise
        return self

    def __exit__(self, *_: Any) -> None:
        landing, each = zip(self.launches, self.landing, strict=False), None
        try:
            # All results of one execution become ready together. Without this wait a call may still be reading the
            # gradients while torch zeroes them: seen with large operands, never with small ones.
            for each in landing:
                launch, (tokens, memories, arrays, scalars, copied) = each
                try:  # the addresses are known from the beginning, and looking at them costs nothing while the program runs
                    self.moved |= elsewhere(memories, arrays)
                finally:
                    if self.on_cpu:  # as wait_for, which would ask them
                        for token in tokens:
                            token.block_until_ready()
                    else:
                        wait_for(tokens, self.may_fail)
                for cells, vector in zip(*scalars, strict=True):
                    if cells.length:
                        ctypes.memmove(cells.address, _pointer(vector), cells.length)
                    else:
                        cells.write(vector)
                self.landed.append(launch)
                for results, new in zip(self.results, copied, strict=True):
                    results += new
        except BaseException:
            if each is not None:
                self._land_after(each, landing)
            raise
        finally:
            try:
                if self.order is not None:
                    streams.choose(self.order)
                for copies in self.copies:
                    copies.clear()
                if self.reader is not None:
                    self.reader.end()
            finally:
                if self.results[0] or self.results[3]:
                    write_back(*self.results, self.on_cpu)

    def _land_after(self, failed: Any, others: Iterable[Any]) -> None:
        """Of a call that failed delete what holds the error, not values: it would be passed on; see those behind it to their end."""
        for launch, (tokens, memories, arrays, scalars, copied) in (failed, *others):
            try:
                wait_for(tokens, self.may_fail)
                for cells, vector in zip(*scalars, strict=True):
                    cells.write(vector)
                self.landed.append(launch)
                for results, new in zip(self.results, copied, strict=True):
                    results += new
            except Exception:  # noqa: BLE001 - the first is being raised
                _delete_errors(arrays)
            self.moved |= elsewhere(
                [m for m, x in zip(memories, arrays, strict=True) if not x.is_deleted()], [x for x in arrays if not x.is_deleted()]
            )


def _delete_errors(arrays: Sequence[jax.Array]) -> None:
    """Delete those that hold the error of a failed execution, not values: they would pass it on to whatever takes them."""
    for array in arrays:
        try:
            array.block_until_ready()
        except Exception:  # noqa: BLE001 - whatever the program failed with, which is being raised
            array.delete()


def flight(device: Any, launch: Launch, room: int, may_fail: bool, landed: list[Any]) -> _Flight:
    """The flight of one program that is no update alone; `room`: as of a launch; `may_fail`: while it runs; `landed`: as of `run`."""
    if _process._forked:
        refuse_fork()
    alone = _Flight([launch], landed)
    alone.on_cpu, alone.room, alone.may_fail = device.platform == "cpu", room, may_fail
    return alone


def elsewhere(memories: Sequence[Memory], arrays: Sequence[jax.Array]) -> bool:
    """Whether a result of a donated call lies elsewhere than the memory that it was computed in.

    So it is where something outside held a buffer (a numpy view of one of `jax.live_arrays()`, say) and XLA copied it.
    Tensors over that memory must then look again: see `jax_buffers.renewed`.
    """
    if list(map(_pointer, arrays)) == list(map(_address, memories)):
        return False
    return any(memory.address != _pointer(array) and array.size for memory, array in zip(memories, arrays, strict=True))
