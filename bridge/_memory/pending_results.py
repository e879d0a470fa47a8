"""The results of calls that are running: wait for them, and put them where torch reads them."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import Generic, NamedTuple, TypeVar

import jax
import torch

from bridge._compat.lookup import SAFE_MODE
from bridge._compat.torch import foreach_copy_
from bridge._interop.dlpack import order_torch_after

from .call_arguments import results_as_tensors
from .jax_buffers import JaxBuffer, copy_results
from .scalar_vectors import ScalarResult, ScalarVector

_address, _pointer = attrgetter("address"), methodcaller("unsafe_buffer_pointer")
_L = TypeVar("_L")


class CopiedResults(NamedTuple):
    """The results of a call that are copied into tensors that torch owns.

    tensors, dim_orders: the tensors, and the order of their dimensions in memory.
    arrays: their new values, flat.
    mirrored, mirrors: tensors of state that the user has assigned, and the tensors that have their new values.
    """

    tensors: Sequence[torch.Tensor]
    dim_orders: Sequence[tuple[int, ...] | None]
    arrays: Sequence[jax.Array]
    mirrored: Sequence[torch.Tensor]
    mirrors: Sequence[torch.Tensor]


def write_back(copied: Sequence[CopiedResults], on_cpu: bool) -> None:
    """Copy the results of several calls into the tensors, all in one fused call."""
    into: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for tensors, dim_orders, arrays, mirrored, mirrors in copied:
        own = list(map(torch.Tensor.detach, tensors))
        for i, dims in enumerate(dim_orders):
            own[i] = own[i] if dims is None else own[i].permute(dims)
        into += [*own, *mirrored]
        values += [*map(torch.Tensor.view_as, results_as_tensors(arrays, on_cpu), own), *mirrors]
    foreach_copy_(into, values)


class PendingResults(NamedTuple, Generic[_L]):
    """The results of one call that are not in the tensors yet.

    launch: what was called.
    tokens: arrays that are ready when the call has ended.
    buffers: the buffers that were donated for `arrays`, the results of the call.
    scalars: scalar vectors, and for each its array of new values.
    copied_back: the results that are copied into tensors.
    """

    launch: _L
    tokens: list[jax.Array]
    buffers: Sequence[JaxBuffer]
    arrays: Sequence[jax.Array]
    scalars: tuple[Sequence[ScalarVector | ScalarResult], Sequence[jax.Array]]
    copied_back: CopiedResults


@dataclass(slots=True, eq=False, repr=False)
class PendingCalls(Generic[_L]):
    """The calls of a step that are running, in order.

    on_cpu: whether the executables run on a CPU.
    may_fail: whether an executable may fail while it runs.
    completed: receives each launch whose results are in the tensors, also if an error is raised.
    results: the results of each call.
    copied_back: for each call that has ended, the results that `write_back` copies, if there are any.
    moved: whether a result has another address than the buffer that was donated for it.
    """

    on_cpu: bool
    may_fail: bool
    completed: list[_L]
    results: list[PendingResults[_L]] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    copied_back: list[CopiedResults] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    moved: bool = False

    def finish(self) -> None:
        """Wait for all results of each call, and put them where torch reads them."""
        calls, current = iter(self.results), None
        try:
            # All results of one execution become ready together. Without this wait a call might read gradients while torch zeroes them.
            for current in calls:
                launch, tokens, buffers, arrays, scalars, copied = current
                try:  # the addresses are known before the program ends, so compare them while it runs
                    if list(map(_pointer, arrays)) != list(map(_address, buffers)):
                        self.moved |= has_moved(buffers, arrays)
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
                if SAFE_MODE:
                    copy_results(buffers)
                self.completed.append(launch)
                if copied.tensors or copied.mirrored:
                    self.copied_back.append(copied)
        except BaseException:
            if current is not None:
                self._finish_after_failure(current, calls)
            raise

    def _finish_after_failure(self, failed: PendingResults[_L], others: Iterable[PendingResults[_L]]) -> None:
        """Wait for the calls after a failed one, and delete results of all these that hold an error: later calls would pass it on."""
        for launch, tokens, memories, arrays, scalars, copied in (failed, *others):
            try:
                order_torch_after(tokens, self.may_fail)
                for cells, vector in zip(*scalars, strict=True):
                    cells.write(vector)
                copy_results(memories)
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
    """Return whether a result has another address than the buffer that was donated for it; never in the safe mode.

    XLA copies a donated buffer that somebody else references, such as a NumPy view of an array from `jax.live_arrays()`. Tensors over
    the buffer must then be rebound.
    """
    if SAFE_MODE:
        return False
    return any(memory.address != _pointer(array) and array.size for memory, array in zip(memories, arrays, strict=True))
