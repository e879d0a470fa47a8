"""Wait for the results of running executables, and put them where torch reads them."""

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


APART = 256  # the most bytes of padding between two results in memory


_L = TypeVar("_L", bound=Launch)


class Landing(NamedTuple):
    """The results of one call that are not in the tensors yet.

    tokens: arrays that are ready when the call has ended.
    buffers: the buffers that were donated for `arrays`, the results of the call.
    scalars: scalar vectors, and for each its array of new values.
    copied_back: the arguments of `write_back` for results that are copied into tensors.
    """

    tokens: list[jax.Array]
    memories: Sequence[Memory]
    arrays: Sequence[jax.Array]
    scalars: tuple[Sequence[Cells | Number], Sequence[jax.Array]]
    copied: tuple[
        Sequence[torch.Tensor], Sequence[tuple[int, ...] | None], Sequence[jax.Array], Sequence[torch.Tensor], Sequence[torch.Tensor]
    ]


class _Flight(Generic[_L]):
    """A context manager from the first donation until all results are where torch reads them."""

    __slots__ = ("copies", "landed", "landing", "launches", "may_fail", "moved", "on_cpu", "order", "reader", "results", "room")
    on_cpu: bool  # whether the executables run on a CPU
    may_fail: bool  # whether an executable may fail while it runs

    def __init__(self, launches: Sequence[_L], landed: list[_L]) -> None:
        self.launches, self.landed = launches, landed
        self.landing: list[Landing] = []
        self.results: tuple[list[Any], ...] = [], [], [], [], []  # the arguments of `write_back`
        self.copies: list[list[torch.Tensor]] = []  # copies of gradients that are read by address
        self.room = 0  # bytes that the calls allocate for results which are copied
        self.moved = False
        self.reader: Reader | None = None  # reads gradients, which must stay alive until it has finished
        self.order: int | None = None  # the thread's execution stream, to restore

    def __enter__(self) -> _Flight[_L]:
        if self.room:
            try:  # XLA allocates it only after donation; here a failure changes nothing
                np.empty(self.room, np.uint8)
            except MemoryError as error:
                error.add_note("The step needs this memory for its results, which are copied. Nothing was updated.")
                raise
        return self

    def __exit__(self, *_: object) -> None:
        landing, each = zip(self.launches, self.landing, strict=False), None
        try:
            # All results of one execution become ready together. Without this wait a call might read gradients while torch zeroes them.
            for each in landing:
                launch, (tokens, memories, arrays, scalars, copied) = each
                try:  # the addresses are known before the program ends, so compare them while it runs
                    self.moved |= elsewhere(memories, arrays)
                finally:
                    if self.on_cpu:  # as `wait_for` does, without its check of the device
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
        """Wait for the calls after a failed one, and delete results of all these that hold an error: later calls would pass it on."""
        for launch, (tokens, memories, arrays, scalars, copied) in (failed, *others):
            try:
                wait_for(tokens, self.may_fail)
                for cells, vector in zip(*scalars, strict=True):
                    cells.write(vector)
                self.landed.append(launch)
                for results, new in zip(self.results, copied, strict=True):
                    results += new
            except Exception:  # noqa: BLE001 - the first error is already being raised
                _delete_errors(arrays)
            self.moved |= elsewhere(
                [m for m, x in zip(memories, arrays, strict=True) if not x.is_deleted()], [x for x in arrays if not x.is_deleted()]
            )


def _delete_errors(arrays: Sequence[jax.Array]) -> None:
    """Delete arrays that hold the error of a failed execution: executables that take such an array fail with the same error."""
    for array in arrays:
        try:
            array.block_until_ready()
        except Exception:  # noqa: BLE001 - the error of the program, which is already being raised
            array.delete()


def flight(device: Device, launch: _L, room: int, may_fail: bool, landed: list[_L]) -> _Flight[_L]:
    """Make the context of one executable that is not only an update, with the values that `run` would compute from its launch."""
    if _process._forked:
        refuse_fork()
    alone = _Flight([launch], landed)
    alone.on_cpu, alone.room, alone.may_fail = device.platform == "cpu", room, may_fail
    return alone


def elsewhere(memories: Sequence[Memory], arrays: Sequence[jax.Array]) -> bool:
    """Return whether a result has another address than the buffer that was donated for it.

    XLA copies a donated buffer that somebody else references, such as a NumPy view of an array from `jax.live_arrays()`. Tensors over
    the buffer must then be rebound.
    """
    if list(map(_pointer, arrays)) == list(map(_address, memories)):
        return False
    return any(memory.address != _pointer(array) and array.size for memory, array in zip(memories, arrays, strict=True))
