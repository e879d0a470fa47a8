"""Compiled programs in another form: read from bytes, and so that the thread which calls one runs it itself.

jax hands what it executes on a CPU to a thread of XLA's. Whoever waits for the results then pays for waking that thread and for being
woken: of a small update, more than for the update. What may call Python XLA runs in the calling thread, since it could wait for itself
otherwise (openxla/xla, xla/python/pjrt_ifrt/pjrt_executable.cc); and so it runs a program that is loaded with a function of Python which
that never calls.
"""

from __future__ import annotations

import pickle
from typing import TypeAlias

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from bridge._compat.jax import CallingClient
from bridge._compat.types import Device, PyTreeDef

# What jax, pickle and XLA raise of a program that cannot be written or read so, and a client that takes no functions (jaxlib 0.8).
_CANNOT = AttributeError, TypeError, ValueError, RuntimeError, pickle.PickleError


Serialized: TypeAlias = tuple[bytes, PyTreeDef, PyTreeDef]  # a program, the trees of its arguments and results


def loaded(kept: Serialized, device: Device, inline: bool = False) -> jax.stages.Compiled:
    """A compiled program for a device from what `serialize` gave; `inline`: the thread that calls it is to run it.

    Raises:
      TypeError: jaxlib's client takes no functions of Python with a program that it reads (0.8).
    """
    client = CallingClient(device.client) if inline else device.client
    return deserialize_and_load(*kept, backend=client, execution_devices=[device])


def serialized(compiled: jax.stages.Compiled) -> Serialized | None:
    """A compiled program as `loaded` takes it; None where it cannot be written.

    Not for a program that jax has read from its persistent cache (see `cache_hits`): jaxlib 0.10.2 writes that one without some of its
    functions, and the program that is loaded from it fails when it runs (NOT_FOUND).
    """
    try:
        return serialize(compiled)
    except _CANNOT:
        return None


def inline(kept: Serialized | None, device: Device) -> jax.stages.Compiled | None:
    """A program as `serialized` gives it, which the thread that calls it runs; None where that cannot be had."""
    try:
        return None if kept is None or device.platform != "cpu" else loaded(kept, device, True)
    except _CANNOT:  # it runs as jax runs it
        return None
