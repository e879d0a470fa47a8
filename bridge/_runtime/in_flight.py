"""The time from the first donation until all results are where torch looks."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import torch

from bridge import _process
from bridge._compat.types import Device
from bridge._interop.dlpack import wait_for
from bridge._memory.jax_buffers import Memory, write_back
from bridge._memory.scalar_vectors import Cells, Number
from bridge._process import refuse_fork
from bridge._xla import streams

from .launch import Launch
from .streaming_stats import Reader

_memory, _address, _pointer, _is_deleted = (
    attrgetter("memory"),
    attrgetter("address"),
    methodcaller("unsafe_buffer_pointer"),
    methodcaller("is_deleted"),
)


APART = 256  # bytes between two results in memory, at most


_L = TypeVar("_L", bound=Launch)


class Landing(NamedTuple):
    """What to wait for after one call, and where its results belong.

    tokens: arrays that are there when the call has ended.
    memories: those that `arrays`, results of the call, lie in.
    scalars: the cells, and for each of them the vector of its new values.
    copied: the arguments of `write_back`: results that are copied into tensors.
    """

    tokens: list[jax.Array]
    memories: Sequence[Memory]
    arrays: Sequence[jax.Array]
    scalars: tuple[Sequence[Cells | Number], Sequence[jax.Array]]
    copied: tuple[
        Sequence[torch.Tensor], Sequence[tuple[int, ...] | None], Sequence[jax.Array], Sequence[torch.Tensor], Sequence[torch.Tensor]
    ]


class _Flight(Generic[_L]):
    """The time from the first donation until all results are where torch looks."""

    __slots__ = ("copies", "landed", "landing", "launches", "may_fail", "moved", "on_cpu", "order", "reader", "results", "room")
    on_cpu: bool  # whether the programs run there
    may_fail: bool  # whether some may fail while they run

    def __init__(self, launches: Sequence[_L], landed: list[_L]) -> None:
        self.launches, self.landed = launches, landed
        self.landing: list[Landing] = []
        self.results: tuple[list[Any], ...] = [], [], [], [], []  # as of `write_back`
        self.copies: list[list[torch.Tensor]] = []  # of gradients that are read where they lie
        self.room = 0  # bytes that the calls allocate for results which are copied
        self.moved = False
        self.reader: Reader | None = None  # of gradients that must stay until it has read them
        self.order: int | None = None  # of this thread's executions, to go back to

    def __enter__(self) -> _Flight[_L]:
        if self.room:
            try:  # while nothing has changed: XLA asks for it when it has taken what is donated
                np.empty(self.room, np.uint8)
            except MemoryError as error:
                error.add_note("The step needs this memory for its results, which are copied. Nothing was updated.")
                raise
        return self

    def __exit__(self, *_: object) -> None:
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
                    write_back(*self.results, on_cpu=self.on_cpu)

    def _land_after(self, failed: tuple[_L, Landing], others: Iterable[tuple[_L, Landing]]) -> None:
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


def flight(device: Device, launch: _L, room: int, may_fail: bool, landed: list[_L]) -> _Flight[_L]:
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
