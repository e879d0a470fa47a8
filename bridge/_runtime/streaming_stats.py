"""What must be known of large gradients before an update, read where they lie at the speed of memory.

A core that reads one place after the other waits for memory; from eight places at once it gets up to half as many bytes again, which the
library that XLA's CPU compiler hands sums to does not do. So each core has a program that loops over parts of gradients, eight at
a turn. The same few programs read all gradients, whichever they are: where they begin is given as numbers, as in
`bridge._memory.address_space`.
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
from bridge._compiler.grad_stats import found_by
from bridge._compiler.plan import _LEAST, _PLACES, PART
from bridge._interop.dlpack import dense_order
from bridge._memory.address_space import BASE, dense, everything
from bridge._process import default_promotion, default_settings
from bridge._xla import streams
from bridge._xla.compile import Piece
from bridge._xla.compile_options import of_update

from . import openmp

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


@functools.cache
def piece(dtype: str, clip: bool, scaled: bool, device: Device) -> Piece:
    """The program of one core: from (memory, numbers, order, scaling, after) to what `grad_stats.found_in` finds, float64 (2,).

    memory, numbers: all memory, as `dtype` and as int64. order: int64 (4,): where in `numbers` the parts begin, and how many turns take
    eight each; where the rests begin, and how many. The parts are places in `memory`, first those of the first place of each turn. A rest
    is two numbers: a part, and how many of its first elements do not count. scaling: [float32 (1,)] the scale of the loss, if `scaled`.
    after: float64 (1,), which is there when the program may begin.
    """

    def program(memory: jax.Array, numbers: jax.Array, order: jax.Array, scaling: list[jax.Array], after: jax.Array) -> jax.Array:
        parts, turns, rests, count = (order + after.astype(np.int64)).astype(np.uint64)  # of signed ones lax asks whether they are negative

        def number(i: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(numbers, (i,), (1,))[0].astype(np.uint64)

        def part(i: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(memory, (number(i),), (PART,))

        def sum_of(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
            def turn(i: jax.Array, sums: jax.Array) -> jax.Array:
                terms = [term(part(parts + np.uint64(n) * turns + i)) for n in range(_PLACES)]
                while len(terms) > 1:  # in pairs, whose sums wait for no other
                    terms = list(map(operator.add, terms[::2], terms[1::2]))
                return sums + terms[0]

            def rest(i: jax.Array, sums: jax.Array) -> jax.Array:
                at = rests + np.uint64(2) * i
                counts = jax.lax.iota(np.uint64, PART) >= number(at + np.uint64(1))
                return sums + jnp.where(counts, term(part(at)), jnp.zeros((), memory.dtype))

            sums = _times(count, rest, _times(turns, turn, jnp.zeros(PART, memory.dtype)))
            return jnp.sum(sums.astype(np.float64))

        return found_by(sum_of, clip, scaling, device.platform)

    program.__name__ = program.__qualname__ = "gradients_read"
    array = functools.partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    memory, numbers = (array(everything(np.dtype(kind)).shape, np.dtype(kind)) for kind in (dtype, "int64"))
    scaling = [array((1,), np.float32)] if scaled else []
    with default_settings(), default_promotion():
        lowered = jax.jit(program).lower(memory, numbers, array((4,), np.int64), scaling, array((1,), np.float64))
    return Piece(lowered, of_update(device))


def _times(count: jax.Array, body: Callable[[jax.Array, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    first = count * np.uint64(0), start
    return jax.lax.while_loop(lambda carry: carry[0] < count, lambda carry: (carry[0] + np.uint64(1), body(*carry)), first)[1]


class Reader:
    """The gradients of a step that are measured where they lie, by calls of one program for each core.

    What it reads, and what it tells the programs, it holds until `end`.

    Args:
      gradients: of each the position among those of the step, the elements and the dtype.
      clip, scaled, device: as of `piece`, which must be compiled when it is called.
    """

    def __init__(self, gradients: Sequence[tuple[int, int, str]], clip: bool, scaled: bool, device: Device) -> None:
        own = {kind: [(at, size) for at, size, dtype in gradients if dtype == kind] for kind in dict.fromkeys(d for *_, d in gradients)}
        self._device, self._numbers = device, everything(np.dtype(np.int64))
        self._kinds = [_Kind(np.dtype(dtype), each, piece(dtype, clip, scaled, device)) for dtype, each in own.items()]
        self._found: list[jax.Array] = []

    def __call__(self, grads: Sequence[torch.Tensor], scaling: Sequence[jax.typing.ArrayLike]) -> jax.Array:
        """Begin to read, behind whatever this thread has asked jax for before; what will be found."""
        if openmp.pause:
            openmp.pause(openmp.SOFT)
        after, (before, *others) = streams.opened(np.zeros(1), self._device, _process.CORES)
        try:
            for kind in self._kinds:
                for order, share in zip(others, kind.shares(grads), strict=False):
                    streams.choose(order)
                    self._found.append(kind.piece.compiled(kind.memory, self._numbers, share, list(scaling[:1]), after))
            return _total(self._found)
        except BaseException:  # raised again, when nothing is read any more
            self.end()
            raise
        finally:
            streams.choose(before)

    def end(self) -> None:
        """Wait until all is read."""
        for found in self._found:
            found.block_until_ready()
        self._found = []
        for kind in self._kinds:
            kind.copies = []


def _sum(found: list[jax.Array]) -> jax.Array:
    return sum(found[1:], found[0])


_total: Callable[[list[jax.Array]], jax.Array] = jax.jit(_sum)


class _Kind:
    """Gradients of one dtype: each cut in parts, the last of which may be a rest, and those dealt out to the cores.

    `_table` has the numbers that the programs read: parts, then rests. `_of` says whose each of them is, and `_within` where in that
    gradient it begins; `_at` is where it stands in the table.
    """

    def __init__(self, dtype: np.dtype, gradients: Sequence[tuple[int, int]], piece: Piece) -> None:
        self.piece, self.memory = piece, everything(dtype)
        self.copies: list[torch.Tensor] = []
        self._positions, sizes = [at for at, _ in gradients], np.array([size for _, size in gradients])
        self._starts: list[int] = []
        cores = max(1, min(_process.CORES if streams.SEVERAL else 1, int(sizes.sum()) // _LEAST))
        whole, ragged = sizes // PART, np.flatnonzero(sizes % PART)
        turns = int(whole.sum()) // (_PLACES * cores)
        count = turns * _PLACES * cores
        # The end of a gradient is a part that reaches back into the one before.
        self._of = np.concatenate([cast(np.ndarray, np.repeat(np.arange(len(sizes)), whole)), ragged])
        starts: list[np.ndarray] = [np.arange(n) * PART for n in whole.tolist()]
        self._within = np.concatenate([*starts, sizes[ragged] - PART])
        rests = np.arange(len(self._of) - count)
        self._at = np.concatenate([np.arange(count), count + 2 * rests])
        self._table = np.zeros(count + 2 * len(rests), np.int64)
        self._table[self._at[len(self._at) - len(ragged) :] + 1] = PART - sizes[ragged] % PART
        first = (self._table.ctypes.data - BASE) // self._table.itemsize
        own = np.linspace(0, len(rests), cores + 1).astype(int)
        self._shares = [
            np.array([first + core * turns * _PLACES, turns, first + count + 2 * own[core], own[core + 1] - own[core]])
            for core in range(cores)
        ]

    def shares(self, grads: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """What the program of each core is told, of these gradients of a step; those that are not dense are copied."""
        own = list(map(grads.__getitem__, self._positions))
        starts, size = list(map(_address, own)), self.memory.itemsize
        if not all(map(_is_contiguous, own)) or any(start % size for start in starts):
            own = self.copies = [dense(g, dense_order(g), size) for g in own]
            starts = list(map(_address, own))
        if starts != self._starts:
            self._starts = starts
            self._table[self._at] = (np.array(starts) - BASE)[self._of] // size + self._within
        return self._shares
