"""Compute the norm and the finite check of large gradients before an update, by reading each gradient at its address.

A core that reads one array from start to end waits for memory. It reads faster from eight places at once, which the sum of XLA's CPU
compiler does not do. So each core runs an executable that loops over parts of gradients, eight in each iteration. The executables serve
all gradients of a dtype: they receive the addresses as numbers, as `bridge._memory.address_space` describes.
"""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false
# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import _process
from bridge._compat.types import Device
from bridge._compiler import policy
from bridge._compiler.grad_stats import stats_by
from bridge._interop.dlpack import dense_order
from bridge._memory.address_space import first_element, first_elements, process_memory, read_slice
from bridge._process import default_promotion, default_settings
from bridge._xla import streams
from bridge._xla.compile import LazyExecutable
from bridge._xla.compile_options import update_options

from . import openmp

_is_contiguous = torch.Tensor.is_contiguous


@functools.cache
def streaming_stats_executable(dtype: str, clip: bool, scaled: bool, device: Device) -> LazyExecutable:
    """Compile the executable of one core: (memory, numbers, order, scaling, after) -> statistics as of `grad_stats`, float64 (2,).

    memory, numbers: the process-wide array as `dtype` and as int64.
    order: int64 (4,): where in `numbers` the parts begin, the number of iterations over eight parts, where the remainders begin, and
      their number. A part is an index into `memory`; the first parts of all iterations come first, then the second ones. A remainder is
      two numbers: a part, and how many of its first elements do not count.
    scaling: [float32 (1,)], the loss scale, if `scaled`.
    after: float64 (1,), which is ready when the executable may begin.
    """

    streaming = policy.STREAMING

    def program(memory: jax.Array, numbers: jax.Array, order: jax.Array, scaling: list[jax.Array], after: jax.Array) -> jax.Array:
        parts, turns, rests, count = (order + after.astype(np.int64)).astype(np.uint64)  # lax checks signed indices for negative ones

        def number(i: jax.Array) -> jax.Array:
            return read_slice(numbers, i, 1)[0].astype(np.uint64)

        def part(i: jax.Array) -> jax.Array:
            return read_slice(memory, number(i), streaming.chunk_elements)

        def sum_of(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
            def turn(i: jax.Array, sums: jax.Array) -> jax.Array:
                terms = [term(part(parts + np.uint64(n) * turns + i)) for n in range(streaming.concurrent_chunks)]
                while len(terms) > 1:  # in pairs, which do not depend on each other
                    terms = list(map(operator.add, terms[::2], terms[1::2]))
                return sums + terms[0]

            def rest(i: jax.Array, sums: jax.Array) -> jax.Array:
                at = rests + np.uint64(2) * i
                counts = jax.lax.iota(np.uint64, streaming.chunk_elements) >= number(at + np.uint64(1))
                return sums + jnp.where(counts, term(part(at)), jnp.zeros((), memory.dtype))

            sums = _repeat(count, rest, _repeat(turns, turn, jnp.zeros(streaming.chunk_elements, memory.dtype)))
            return jnp.sum(sums.astype(np.float64))

        return stats_by(sum_of, clip, scaling, device.platform)

    program.__name__ = program.__qualname__ = "gradients_read"
    array = functools.partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    memory, numbers = (array(process_memory(np.dtype(kind)).shape, np.dtype(kind)) for kind in (dtype, "int64"))
    scaling = [array((1,), np.float32)] if scaled else []
    with default_settings(), default_promotion():
        lowered = jax.jit(program).lower(memory, numbers, array((4,), np.int64), scaling, array((1,), np.float64))
    return LazyExecutable(lowered, update_options(device))


def _repeat(count: jax.Array, body: Callable[[jax.Array, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    first = count * np.uint64(0), start
    return jax.lax.while_loop(lambda carry: carry[0] < count, lambda carry: (carry[0] + np.uint64(1), body(*carry)), first)[1]


class StreamingStats:
    """Streams over the large gradients of a step, on each core with one executable, and sums up the statistics.

    The caller holds what the executables read until they have ended.

    Args:
      gradients: for each gradient its position in the step, its number of elements and its dtype.
      clip, scaled, device: as for `streaming_stats_executable`, which must be compiled before the first call.
    """

    def __init__(self, gradients: Sequence[tuple[int, int, str]], clip: bool, scaled: bool, device: Device) -> None:
        by_dtype = {
            kind: [(at, size) for at, size, dtype in gradients if dtype == kind] for kind in dict.fromkeys(d for *_, d in gradients)
        }
        self._device, self._numbers = device, process_memory(np.dtype(np.int64))
        self._per_dtype = [
            _PerDtypeStats(np.dtype(dtype), each, streaming_stats_executable(dtype, clip, scaled, device))
            for dtype, each in by_dtype.items()
        ]

    def __call__(
        self, grads: Sequence[torch.Tensor], scaling: Sequence[jax.typing.ArrayLike], reads: list[jax.Array], held: list[object]
    ) -> jax.Array:
        """Start reading after all that this thread has dispatched to jax, and return the statistics as an array.

        Args:
          grads: the gradients of the step. Those that are not dense are copied.
          scaling: the loss scale, if there is one.
          reads: receives an array for each executable, which is ready when the executable has ended.
          held: receives what the caller holds until then.
        """
        if openmp.pause:
            openmp.pause(openmp.PAUSE_SOFT)
        after, (before, *others) = streams.fork_streams(np.zeros(1), self._device, _process.CORES)
        try:
            for part in self._per_dtype:
                own = list(map(grads.__getitem__, part.positions))
                dim_orders = [] if all(map(_is_contiguous, own)) else list(map(dense_order, own))
                starts = first_elements(own, dim_orders, part.memory.itemsize, held)
                if not np.array_equal(starts, part.starts):
                    part.starts = starts
                    part.table[part.table_index] = starts[part.gradient_of_part] + part.offset_in_gradient
                for stream, share in zip(others, part.shares, strict=False):
                    streams.set_stream(stream)
                    reads.append(part.executable.compiled(part.memory, self._numbers, share, list(scaling[:1]), after))
            return _total(reads)
        finally:
            streams.set_stream(before)


def _sum(found: list[jax.Array]) -> jax.Array:
    return sum(found[1:], found[0])


_total: Callable[[list[jax.Array]], jax.Array] = jax.jit(_sum)


class _PerDtypeStats:
    """The gradients of one dtype, cut into parts that are distributed over the cores.

    Parts that do not fill an iteration, and the ends of gradients, are remainders.

    `table` has the numbers that the executables read: parts, then remainders. For each of them `gradient_of_part` has its gradient,
    `offset_in_gradient` where it begins there, and `table_index` its position in the table.
    """

    def __init__(self, dtype: np.dtype, gradients: Sequence[tuple[int, int]], executable: LazyExecutable) -> None:
        self.executable, self.memory = executable, process_memory(dtype)
        self.positions, sizes = [at for at, _ in gradients], np.array([size for _, size in gradients])
        self.starts = np.zeros(0, np.int64)
        streaming = policy.STREAMING
        cores = max(1, min(_process.CORES if streams.has_streams() else 1, int(sizes.sum()) // streaming.min_elements))
        whole, ragged = sizes // streaming.chunk_elements, np.flatnonzero(sizes % streaming.chunk_elements)
        turns = int(whole.sum()) // (streaming.concurrent_chunks * cores)
        count = turns * streaming.concurrent_chunks * cores
        # The end of a gradient is a part that overlaps the one before it.
        self.gradient_of_part = np.concatenate([cast(np.ndarray, np.repeat(np.arange(len(sizes)), whole)), ragged])
        starts: list[np.ndarray] = [np.arange(n) * streaming.chunk_elements for n in whole.tolist()]
        self.offset_in_gradient = np.concatenate([*starts, sizes[ragged] - streaming.chunk_elements])
        rests = np.arange(len(self.gradient_of_part) - count)
        self.table_index = np.concatenate([np.arange(count), count + 2 * rests])
        self.table = np.zeros(count + 2 * len(rests), np.int64)
        self.table[self.table_index[len(self.table_index) - len(ragged) :] + 1] = (
            streaming.chunk_elements - sizes[ragged] % streaming.chunk_elements
        )
        first = first_element(self.table)
        own = np.linspace(0, len(rests), cores + 1).astype(int)
        self.shares = [
            np.array([first + core * turns * streaming.concurrent_chunks, turns, first + count + 2 * own[core], own[core + 1] - own[core]])
            for core in range(cores)
        ]
