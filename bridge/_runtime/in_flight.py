"""The context in which the executables of a step run, from the first donation until their results are in the tensors."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter, methodcaller
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from bridge import _process
from bridge._compat.lookup import SAFE_MODE
from bridge._memory.jax_buffers import JaxBuffer, copies_to_donate, detach_undonated, pinned_buffers, release_pins
from bridge._memory.pending_results import PendingCalls, write_back
from bridge._process import raise_if_forked
from bridge._xla import streams

from .launch import Launch

MAX_RESULT_PADDING = 256  # the most bytes of padding between two results in memory


_array, _is_deleted = attrgetter("array"), methodcaller("is_deleted")
_L = TypeVar("_L", bound=Launch)


@dataclass(slots=True, eq=False, repr=False)
class InFlight(Generic[_L]):
    """A context manager from the first donation until all results are where torch reads them.

    calls: the calls that are running.
    copied_result_bytes: the bytes that the calls allocate for results which are copied.
    held: the storages and copies that the calls read, until all have ended.
    reads: arrays that are ready when the gradients have been read for their statistics.
    saved_stream: the thread's execution stream, to restore.
    """

    calls: PendingCalls[_L]
    copied_result_bytes: int = 0
    held: list[object] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    reads: list[jax.Array] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
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

        The caller adds the `PendingResults` of the call to `calls`.

        Args:
          parts: the buffers, by argument of the program. These arguments come first.
          call: the program. Its first results are lists of arrays like `parts`.
          arguments: the other arguments.

        Returns:
          The buffers and their new arrays, each in one list, and the other results.
        """
        buffers = [*chain.from_iterable(parts)]
        if pinned_buffers and not pinned_buffers.isdisjoint(buffers):
            release_pins(buffers)
        donated = copies_to_donate(buffers) if SAFE_MODE else list(map(_array, buffers))
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
        try:
            self.calls.finish()
        finally:
            try:
                if self.saved_stream is not None:
                    streams.set_stream(self.saved_stream)
                for array in self.reads:
                    array.block_until_ready()
            finally:
                self.held.clear()
                if self.calls.copied_back:
                    write_back(self.calls.copied_back, self.calls.on_cpu)
