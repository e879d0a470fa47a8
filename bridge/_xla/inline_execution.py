"""Serialize executables and load them again, optionally such that the calling thread runs them.

jax passes an execution on the CPU to a thread of XLA. The caller then pays for waking that thread and for being woken, which in a small
update takes longer than the update. XLA runs a program that may call Python in the calling thread, because it could wait for itself
otherwise (openxla/xla, xla/python/pjrt_ifrt/pjrt_executable.cc). So a program is loaded with a Python function that it never calls.
"""

from __future__ import annotations

import pickle
from typing import TypeAlias

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from bridge._compat.jax import InlineClient
from bridge._compat.types import Device, PyTreeDef

# What jax, pickle and XLA raise if a program cannot be serialized or loaded, or if the client takes no functions (jaxlib 0.8).
_SERIALIZATION_ERRORS = AttributeError, TypeError, ValueError, RuntimeError, pickle.PickleError


Serialized: TypeAlias = tuple[bytes, PyTreeDef, PyTreeDef]  # a program, and the trees of its arguments and results


def load_executable(serialized: Serialized, device: Device, run_inline: bool = False) -> jax.stages.Compiled:
    """Return a compiled program for a device from its serialized form.

    Args:
      serialized: What `serialize_executable` returned.
      device: The device.
      run_inline: Whether the calling thread is to run the program.

    Raises:
      TypeError: run_inline is True and jaxlib's client takes no Python functions with a program (0.8).
    """
    client = InlineClient(device.client) if run_inline else device.client
    return deserialize_and_load(*serialized, backend=client, execution_devices=[device])


def serialize_executable(compiled: jax.stages.Compiled) -> Serialized | None:
    """Return the serialized form of a compiled program; None if it cannot be serialized.

    The program must not come from jax's persistent cache (see `cache_hits`). jaxlib 0.10.2 would leave out some of its functions, and the
    loaded program would fail when it runs (NOT_FOUND).
    """
    try:
        return serialize(compiled)
    except _SERIALIZATION_ERRORS:
        return None


def load_inline(serialized: Serialized | None, device: Device) -> jax.stages.Compiled | None:
    """Return the program such that the calling thread runs it; None if that is not possible."""
    try:
        return None if serialized is None or device.platform != "cpu" else load_executable(serialized, device, True)
    except _SERIALIZATION_ERRORS:  # the caller then uses the program that jax compiled
        return None
