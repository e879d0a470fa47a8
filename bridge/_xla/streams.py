"""Programs of one step side by side on the CPU.

XLA runs the executions that one thread asks for one after the other, and each begins and ends on one core: its arithmetic
of scalars, waking the other cores, waiting for them. With several orders of execution, lanes, others have them meanwhile.
"""

from __future__ import annotations

import functools
import threading

import jax
import numpy as np

from bridge._compat.jax import streams
from bridge._compat.types import Device
from bridge._process import calm

LANES = 3  # 0.96 times the time of two on GPT-2 small; more make nothing faster, and each may need memory for what it computes


def _stay(_: int) -> None:
    """There is one order only."""


_calls = streams  # those that read and set the order that this thread's executions are in
SEVERAL = _calls is not None
choose = _stay if _calls is None else _calls[1]


@functools.lru_cache(64)
def _ordered(width: int, device: Device) -> jax.stages.Compiled:
    """What gives so many float64 numbers on a device as they are: compiled, since a jitted function takes twice as long in cold caches."""
    numbers = jax.ShapeDtypeStruct((width,), np.float64, sharding=jax.sharding.SingleDeviceSharding(device))
    return jax.jit(lambda numbers: numbers * np.float64(1)).lower(numbers).compile()


def ready(width: int, device: Device) -> None:
    """Compile what `opened` runs for so many numbers, which takes 20 to 30 ms."""
    if _calls is not None:
        with calm():
            _ordered(width, device)


def opened(numbers: np.ndarray, device: Device, lanes: int = LANES) -> tuple[np.ndarray | jax.Array, list[int]]:
    """What each program of a step is given as `numbers`, and the `orders` to choose from.

    The numbers come from an execution on the programs' device in the thread's own order: whatever it was asked for there
    before, such as reading a parameter that the programs are about to change, has ended when they begin.
    """
    if _calls is None:
        return numbers, orders(lanes)
    return _ordered(len(numbers), device)(numbers), orders(lanes)


def orders(lanes: int = LANES) -> list[int]:
    """The orders to choose from: that in which this thread's executions are now, and so many lanes."""
    if _calls is None:
        return [0, 0]
    first = threading.get_ident() + 1  # no thread waits for the lanes of another
    return [_calls[0](), *range(first, first + lanes)]
