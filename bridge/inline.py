"""Compiled programs in another form: read from bytes, and so that the thread which calls one runs it itself.

jax hands what it executes on a CPU to a thread of XLA's. Whoever waits for the results then pays for waking that thread and for being
woken: of a small update, more than for the update. What may call Python XLA runs in the calling thread, since it could wait for itself
otherwise (openxla/xla, xla/python/pjrt_ifrt/pjrt_executable.cc); and so it runs a program that is loaded with a function of Python which
that never calls.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

import jax.monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize

# What jax, pickle and XLA raise of a program that cannot be written or read so, and a client that takes no functions (jaxlib 0.8).
_CANNOT = AttributeError, TypeError, ValueError, RuntimeError, pickle.PickleError


def loaded(kept: Any, device: Any, inline: bool = False) -> Any:
    """A compiled program for a device from what `serialize` gave; `inline`: the thread that calls it is to run it.

    Raises:
      TypeError: jaxlib's client takes no functions of Python with a program that it reads (0.8).
    """
    client = _Client(device.client) if inline else device.client
    return deserialize_and_load(*kept, backend=client, execution_devices=[device])


def serialized(compiled: Any) -> Any:
    """A compiled program as `loaded` takes it; None where it cannot be written.

    Not for a program that jax has read from its persistent cache (see `cache_hits`): jaxlib 0.10.2 writes that one without some of its
    functions, and the program that is loaded from it fails when it runs (NOT_FOUND).
    """
    try:
        return serialize(compiled)
    except _CANNOT:
        return None


def inline(kept: Any, device: Any) -> Any:
    """A program as `serialized` gives it, which the thread that calls it runs; None where that cannot be had."""
    try:
        return None if kept is None or device.platform != "cpu" else loaded(kept, device, True)
    except _CANNOT:  # it runs as jax runs it
        return None


class _Client:
    """A client of jaxlib, which loads programs with a function that they never call."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._client

    def __hash__(self) -> int:
        return hash(self._client)

    def deserialize_executable(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.deserialize_executable(*args, host_callbacks=[_never], **kwargs)


class _Hits(threading.local):
    count = 0


_hits = _Hits()


def _on_event(event: str, **_: Any) -> None:
    _hits.count += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_on_event)


def cache_hits() -> int:
    """Return how many programs jax has read from its persistent cache in this thread."""
    return _hits.count


def _never(*_: Any) -> Any:
    raise AssertionError("a program has called what it was only loaded with")
