"""Execution streams: run several programs of one step at the same time on the CPU.

XLA runs the executions of one stream one after the other. Each begins and ends on one core, with scalar arithmetic, waking the other cores
and waiting for them. With several streams, other programs use the cores during that time.
"""

from __future__ import annotations

import functools
import threading

import jax
import numpy as np

from bridge._compat.jax import stream_calls
from bridge._compat.types import Device
from bridge._process import jax_context

STREAM_COUNT = 3  # more make nothing faster, and each may need memory for intermediate values


def _keep_stream(_: int) -> None:
    """Stay on the only stream."""


_stream_calls = stream_calls  # jaxlib's calls that read and set this thread's stream
set_stream = _keep_stream if _stream_calls is None else _stream_calls[1]


def has_streams() -> bool:
    """Return whether programs can run in several streams."""
    return _stream_calls is not None


@functools.lru_cache(64)
def _copy_program(width: int, device: Device) -> jax.stages.Compiled:
    """Return an executable that copies so many float64 numbers. It is compiled, because calling a jitted function takes longer."""
    scalars = jax.ShapeDtypeStruct((width,), np.float64, sharding=jax.sharding.SingleDeviceSharding(device))
    return jax.jit(lambda numbers: numbers * np.float64(1)).lower(scalars).compile()


def compile_fork(width: int, device: Device) -> None:
    """Compile the executable that `fork_streams` runs for so many numbers."""
    if _stream_calls is not None:
        with jax_context():
            _copy_program(width, device)


def fork_streams(scalars: np.ndarray, device: Device, count: int = STREAM_COUNT) -> tuple[np.ndarray | jax.Array, list[int]]:
    """Return the scalars as each program of a step takes them, and the ids of the streams.

    The scalars are the result of an execution in the thread's own stream. A program that takes them thus runs after everything that was
    dispatched there before, for example a read of a parameter that the program changes.
    """
    if _stream_calls is None:
        return scalars, [0, 0]
    first = threading.get_ident() + 1  # as in `stream_ids`, which would be one more frame of a step
    return _copy_program(len(scalars), device)(scalars), [_stream_calls[0](), *range(first, first + count)]


def stream_ids(count: int = STREAM_COUNT) -> list[int]:
    """Return the ids of this thread's current stream and of `count` streams of its own."""
    if _stream_calls is None:
        return [0, 0]
    first = threading.get_ident() + 1  # no other thread uses these streams
    return [_stream_calls[0](), *range(first, first + count)]
