"""Wait for the results of running executables, and put them where torch reads them."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter, methodcaller
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import torch

from bridge import _process
from bridge._interop.dlpack import order_torch_after
from bridge._memory.jax_buffers import CopiedResults, JaxBuffer, detach_undonated, pinned_buffers, release_pins, write_back
from bridge._memory.scalar_vectors import ScalarResult, ScalarVector
from bridge._process import raise_if_forked
from bridge._xla import streams

from .launch import Launch
from .streaming_stats import StreamingStats

_array, _address, _pointer, _is_deleted = (
    attrgetter("array"),
    attrgetter("address"),
    methodcaller("unsafe_buffer_pointer"),
    methodcaller("is_deleted"),
)


MAX_RESULT_PADDING = 256  # the most bytes of padding between two results in memory


_L = TypeVar("_L", bound=Launch)


class PendingResults(NamedTuple):
    """The results of one call that are not in the tensors yet.

    tokens: arrays that are ready when the call has ended.
    buffers: the buffers that were donated for `arrays`, the results of the call.
    scalars: scalar vectors, and for each its array of new values.
    copied_back: the results that are copied into tensors.
    """

    tokens: list[jax.Array]
    buffers: Sequence[JaxBuffer]
    arrays: Sequence[jax.Array]
    scalars: tuple[Sequence[ScalarVector | ScalarResult], Sequence[jax.Array]]
    copied_back: CopiedResults


@dataclass(slots=True, eq=False, repr=False)
class InFlight(Generic[_L]):
    """A context manager from the first donation until all results are where torch reads them.

    launches: what is called, in order.
    completed: receives each launch whose results are in the tensors, also if an error is raised.
    on_cpu: whether the executables run on a CPU.
    copied_result_bytes: the bytes that the calls allocate for results which are copied.
    may_fail: whether an executable may fail while it runs.
    pending_results: the results of each call.
    copied_back: for each call that has ended, the results that are copied into tensors, if there are any.
    gradient_copies: copies of gradients that are read by address.
    moved: whether a result has another address than the buffer that was donated for it.
    streaming_stats: reads gradients, which must stay alive until it has finished.
    saved_stream: the thread's execution stream, to restore.
    """

    launches: Sequence[_L]
    completed: list[_L]
    on_cpu: bool
    copied_result_bytes: int = 0
    may_fail: bool = False
    pending_results: list[PendingResults] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    copied_back: list[CopiedResults] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    gradient_copies: list[list[torch.Tensor]] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    moved: bool = False
    streaming_stats: StreamingStats | None = None
    saved_stream: int | None = None

    def __enter__(self) -> InFlight[_L]:
        if _process._forked:
            raise_if_forked()
        if self.copied_result_bytes:
            try:  # XLA allocates it only after donation; here a failure changes nothing
                np.empty(self.copied_result_bytes, np.uint8)
            except MemoryError as error:
                error.add_note("The step needs this memory for its results, which are copied. Nothing was updated.")
                raise
        return self

    def execute(
        self, parts: Sequence[Sequence[JaxBuffer]], call: Callable[..., Sequence[Any]], arguments: Sequence[object]
    ) -> tuple[list[JaxBuffer], list[jax.Array], Sequence[Any]]:
        """Donate the arrays of buffers to a program, and put the arrays that it returns for them into the buffers.

        The caller adds the `PendingResults` of the call.

        Args:
          parts: the buffers, by argument of the program. These arguments come first.
          call: the program. Its first results are lists of arrays like `parts`.
          arguments: the other arguments.

        Returns:
          The buffers and their new arrays, each in one list, and the other results.
        """
        buffers = [*chain.from_iterable(parts)]
        if pinned_buffers:
            release_pins(buffers)
        donated = list(map(_array, buffers))
        left = iter(donated)
        by_part: list[list[jax.Array]] = []
        for part in parts:
            by_part.append(list(islice(left, len(part))))
        results = call(*by_part, *arguments)
        del by_part, left  # the donated arrays are freed while the program runs
        if not all(map(_is_deleted, donated)):
            detach_undonated(buffers, donated)
        arrays = [*chain.from_iterable(results[: len(parts)])]
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer.array = array
        return buffers, arrays, results[len(parts) :]

    def __exit__(self, *_: object) -> None:
        pending, current = zip(self.launches, self.pending_results, strict=False), None
        try:
            # All results of one execution become ready together. Without this wait a call might read gradients while torch zeroes them.
            for current in pending:
                launch, (tokens, memories, arrays, scalars, copied) = current
                try:  # the addresses are known before the program ends, so compare them while it runs
                    self.moved |= has_moved(memories, arrays)
                finally:
                    if self.on_cpu:  # as `order_torch_after` does, without its check of the device
                        for token in tokens:
                            token.block_until_ready()
                    else:
                        order_torch_after(tokens, self.may_fail)
                for cells, vector in zip(*scalars, strict=True):
                    if cells.length:
                        ctypes.memmove(cells.address, _pointer(vector), cells.length)
                    else:
                        cells.write(vector)
                self.completed.append(launch)
                if copied.tensors or copied.mirrored:
                    self.copied_back.append(copied)
        except BaseException:
            if current is not None:
                self._finish_after_failure(current, pending)
            raise
        finally:
            try:
                if self.saved_stream is not None:
                    streams.set_stream(self.saved_stream)
                for copies in self.gradient_copies:
                    copies.clear()
                if self.streaming_stats is not None:
                    self.streaming_stats.finish_reading()
            finally:
                if self.copied_back:
                    write_back(self.copied_back, self.on_cpu)

    def _finish_after_failure(self, failed: tuple[_L, PendingResults], others: Iterable[tuple[_L, PendingResults]]) -> None:
        """Wait for the calls after a failed one, and delete results of all these that hold an error: later calls would pass it on."""
        for launch, (tokens, memories, arrays, scalars, copied) in (failed, *others):
            try:
                order_torch_after(tokens, self.may_fail)
                for cells, vector in zip(*scalars, strict=True):
                    cells.write(vector)
                self.completed.append(launch)
                if copied.tensors or copied.mirrored:
                    self.copied_back.append(copied)
            except Exception:  # noqa: BLE001 - the first error is already being raised
                _delete_errors(arrays)
            self.moved |= has_moved(
                [m for m, x in zip(memories, arrays, strict=True) if not x.is_deleted()], [x for x in arrays if not x.is_deleted()]
            )


def _delete_errors(arrays: Sequence[jax.Array]) -> None:
    """Delete arrays that hold the error of a failed execution: executables that take such an array fail with the same error."""
    for array in arrays:
        try:
            array.block_until_ready()
        except Exception:  # noqa: BLE001 - the error of the program, which is already being raised
            array.delete()


def has_moved(memories: Sequence[JaxBuffer], arrays: Sequence[jax.Array]) -> bool:
    """Return whether a result has another address than the buffer that was donated for it.

    XLA copies a donated buffer that somebody else references, such as a NumPy view of an array from `jax.live_arrays()`. Tensors over
    the buffer must then be rebound.
    """
    if list(map(_pointer, arrays)) == list(map(_address, memories)):
        return False
    return any(memory.address != _pointer(array) and array.size for memory, array in zip(memories, arrays, strict=True))
