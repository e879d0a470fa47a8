"""Private names of jax and jaxlib."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import jax.core
import jax.extend.core
import jax.monitoring
import numpy as np
from jax.core import Tracer

from .lookup import private

# Whether jax has started a client. Without it "no" (what `bool()` is): XLA_FLAGS may then be set when XLA has read them, which does
# nothing, and a process that was forked from one in which jax runs is not recognized.
client_started: Callable[[], bool] = private("jax._src.xla_bridge.backends_are_initialized", bool)


# ------------------------------------------------------------------ an entry of `xla_backend_extra_options` for one program
#
# jax's public `compiler_options` take no entry of that map (0.8 to 0.10). Without these names XLA_FLAGS ask for the whole process, or,
# where they are the user's own, XLA writes each result from a loop of its own: Adam then moves 40 bytes a parameter instead of 28.

# Fields of the protocol buffers that jax's CompileOptions are, to that map: executable_build_options, debug_options (xla.proto).
_PATH = 3, 3, 500
_COMPILER, _HOOK = "jax._src.compiler", "get_compile_options"


class _Asked(threading.local):
    option: str | None = None


_asked, _installing = _Asked(), threading.Lock()
_hooks: list[Callable[..., Any]] = []


@functools.cache
def by_program() -> bool:
    """Whether a single program can be compiled with an entry of the map."""
    created = private("jax._src.interpreters.pxla.create_compile_options.__code__.co_names", ())
    read = private("jax._src.lib.xla_client.CompileOptions.ParseFromString", None)
    return callable(private(f"{_COMPILER}.{_HOOK}", None)) and callable(read) and _HOOK in created


@contextmanager
def extra_option(option: str | None) -> Iterator[None]:
    """A context in which this thread compiles with an entry of the map, where that can be; without one for None."""
    _asked.option = option if option is not None and _installed() else None
    try:
        yield
    finally:
        _asked.option = None


def _installed() -> bool:
    """Have jax ask `_with_entry` for the options of what a thread compiles in `extra_option`."""
    if not by_program():
        return False
    compiler = sys.modules[_COMPILER]
    with _installing:
        given = getattr(compiler, _HOOK)
        if given not in _hooks:

            @functools.wraps(given)
            def get_compile_options(*args: Any, **kwargs: Any) -> Any:
                options = given(*args, **kwargs)
                return options if _asked.option is None else _with_entry(options, _asked.option)

            _hooks.append(get_compile_options)
            setattr(compiler, _HOOK, get_compile_options)
    return True


def _with_entry(options: Any, option: str) -> Any:
    """jax's CompileOptions with the entry in their map, or as they are where they cannot be written and read."""
    entry = _field(1, option.encode()) + _field(2, b"")
    for number in reversed(_PATH):
        entry = _field(number, entry)
    try:
        return type(options).ParseFromString(options.SerializeAsString() + entry)
    except (AttributeError, RuntimeError, ValueError, TypeError):
        return options


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes in the encoding of protocol buffers (https://protobuf.dev/programming-guides/encoding)."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


# ------------------------------------------------------------------ arrays

# An array over a DLPack capsule (capsule, device, stream, copy), and a capsule over an array (array, stream). Without them
# `bridge._interop.dlpack` calls `jax.dlpack.from_dlpack` and `torch.from_dlpack`, in five times the time.
array_from_capsule: Callable[..., jax.Array] | None = private("jaxlib._jax.dlpack_managed_tensor_to_buffer", None)
capsule_from_array: Callable[[jax.Array, None], object] | None = private("jaxlib._jax.buffer_to_dlpack_managed_tensor", None)

# A numpy array over an array on the CPU, and whether it is a copy. Without it `numpy.asarray`, which may keep its result in the array: the
# array can then not be donated, and the next step copies it.
uncached_numpy: Callable[[jax.Array], object] = private("jax._src.array.ArrayImpl._single_device_array_to_np_array_did_copy", np.asarray)


# ------------------------------------------------------------------ executions

Streams = tuple[Callable[[], int], Callable[[int], None]]


def _streams() -> Streams | None:
    """jaxlib's calls that read and set the order that this thread's executions are in; None where they do not work as expected."""
    read = private("jaxlib._jax.get_execution_stream_id", None)
    choose = private("jaxlib._jax.set_execution_stream_id", None)
    try:
        before = read()
        choose(before + 1)
        found = read() == before + 1
        choose(before)
    except TypeError:
        return None
    return (read, choose) if found else None


# Without them the programs of a step run one after the other, each of which begins and ends on one core.
streams: Streams | None = _streams()


class CallingClient:
    """A client of jaxlib that loads programs with a function of Python which they never call: the thread that calls them runs them.

    Loading raises TypeError where `deserialize_executable` takes no `host_callbacks` (jaxlib 0.8). XLA's threads then run the programs, and
    a small update waits for them to wake.
    """

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


def _never(*_: object) -> NoReturn:
    raise AssertionError("a program has called what it was only loaded with")


class _Hits(threading.local):
    count = 0


_hits = _Hits()


def _on_event(event: str, **_: object) -> None:
    _hits.count += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_on_event)


def cache_hits() -> int:
    """Return how many programs jax has read from its persistent cache in this thread.

    Where jax names the event otherwise, 0: such a program may be written again without some of its functions, and fails when it runs.
    """
    return _hits.count


# ------------------------------------------------------------------ traces


_state: Callable[..., object] | None = private("jax.extend.core.get_opaque_trace_state", None) or private(
    "jax.core.get_opaque_trace_state", None
)


def trace_state() -> object:
    """What tells the function that jax traces now from those that it traces within it, by `==`; None where jax does not say."""
    return None if _state is None else _state(convention=None)


def ends_before(value: object, state: object) -> bool:
    """Whether a value belongs to a function that jax traces within that of the state, and is of no use when that has ended.

    False where jax does not say so: it then raises an error of its own, later.
    """
    own, traces = getattr(value, "_trace", None), list(_traces(state))
    return isinstance(value, Tracer) and own is not None and bool(traces) and all(own is not trace for trace in traces)


def _traces(state: object) -> Iterator[object]:
    """The trace of a state, and those around it where they are known."""
    trace = getattr(state, "_trace_ref", lambda: None)()
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)
