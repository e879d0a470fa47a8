"""Execution streams: run several programs of one step at the same time on the CPU.

XLA runs the executions of one stream one after the other. Each begins and ends on one core, with scalar arithmetic, waking the other cores
and waiting for them. With several streams, other programs use the cores during that time.
"""

from __future__ import annotations

import functools
import threading

import jax
import numpy as np

from bridge._compat.jax import streams
from bridge._compat.types import Device
from bridge._process import calm

LANES = 3  # more make nothing faster, and each may need memory for intermediate values


def _stay(_: int) -> None:
    """Stay on the only stream."""


_calls = streams  # jaxlib's calls that read and set this thread's stream
SEVERAL = _calls is not None
choose = _stay if _calls is None else _calls[1]


@functools.lru_cache(64)
def _ordered(width: int, device: Device) -> jax.stages.Compiled:
    """Return an executable that copies so many float64 numbers. It is compiled, because calling a jitted function takes longer."""
    numbers = jax.ShapeDtypeStruct((width,), np.float64, sharding=jax.sharding.SingleDeviceSharding(device))
    return jax.jit(lambda numbers: numbers * np.float64(1)).lower(numbers).compile()


def ready(width: int, device: Device) -> None:
    """Compile the executable that `fork_streams` runs for so many numbers."""
    if _calls is not None:
        with calm():
            _ordered(width, device)


def opened(numbers: np.ndarray, device: Device, lanes: int = LANES) -> tuple[np.ndarray | jax.Array, list[int]]:
    """Return the scalars as each program of a step takes them, and the ids of the streams.

    The scalars are the result of an execution in the thread's own stream. A program that takes them thus runs after everything that was
    dispatched there before, for example a read of a parameter that the program changes.
    """
    if _calls is None:
        return numbers, orders(lanes)
    return _ordered(len(numbers), device)(numbers), orders(lanes)


def orders(lanes: int = LANES) -> list[int]:
    """Return the ids of this thread's current stream and of `count` streams of its own."""
    if _calls is None:
        return [0, 0]
    first = threading.get_ident() + 1  # no other thread uses these streams
    return [_calls[0](), *range(first, first + lanes)]
