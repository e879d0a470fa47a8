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

# Whether jax has started a client. Without it "no", which is what `bool()` returns. XLA_FLAGS may then be set too late, which has no
# effect, and a process that was forked after jax had started is not recognized.
client_started: Callable[[], bool] = private("jax._src.xla_bridge.backends_are_initialized", bool, needed=True)


# ------------------------------------------------------------------ an entry of `xla_backend_extra_options` for one program
#
# jax's public `compiler_options` take no entry of that map. Without these names, XLA_FLAGS set the option for the whole process. If the
# user has set the map there, updates are compiled without multi-output fusion.

# The path of protocol buffer fields from CompileOptions to that map: executable_build_options, debug_options (xla.proto).
_OPTIONS_PATH = 3, 3, 500
_COMPILER, _HOOK = "jax._src.compiler", "get_compile_options"


class _ThreadOption(threading.local):
    option: str | None = None


_thread_option, _installing = _ThreadOption(), threading.Lock()
_hooks: list[Callable[..., Any]] = []


@functools.cache
def has_per_program_flag() -> bool:
    """Return whether a single program can be compiled with an entry of the map."""
    created = private("jax._src.interpreters.pxla.create_compile_options.__code__.co_names", ())
    read = private("jax._src.lib.xla_client.CompileOptions.ParseFromString", None)
    return callable(private(f"{_COMPILER}.{_HOOK}", None)) and callable(read) and _HOOK in created


@contextmanager
def extra_option(option: str | None) -> Iterator[None]:
    """Compile in this thread with an entry of the map, if that is possible; without one for None."""
    try:
        _thread_option.option = option if option is not None and _install_hook() else None
        yield
    finally:
        _thread_option.option = None


def _install_hook() -> bool:
    """Have jax ask `_with_entry` for the options of programs that a thread compiles inside `extra_option`. Return whether it does."""
    if not has_per_program_flag():
        return False
    compiler = sys.modules[_COMPILER]
    with _installing:
        original = getattr(compiler, _HOOK)
        if original not in _hooks:

            @functools.wraps(original)
            def get_compile_options(*args: Any, **kwargs: Any) -> Any:
                options = original(*args, **kwargs)
                return options if _thread_option.option is None else _with_entry(options, _thread_option.option)

            _hooks.append(get_compile_options)
            setattr(compiler, _HOOK, get_compile_options)
    return True


def _with_entry(options: Any, option: str) -> Any:
    """Return jax's CompileOptions with the entry in their map; unchanged if they cannot be serialized and parsed."""
    entry = _field(1, option.encode()) + _field(2, b"")
    for number in reversed(_OPTIONS_PATH):
        entry = _field(number, entry)
    try:
        return type(options).ParseFromString(options.SerializeAsString() + entry)
    except (AttributeError, RuntimeError, ValueError, TypeError):
        return options


def _field(number: int, content: bytes) -> bytes:
    """Return a bytes field in the encoding of protocol buffers (https://protobuf.dev/programming-guides/encoding)."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


# ------------------------------------------------------------------ arrays

# An array over a DLPack capsule (capsule, device, stream, copy), and a capsule over an array (array, stream). Without them
# `bridge._interop.dlpack` calls `jax.dlpack.from_dlpack` and `torch.from_dlpack`, which are slower.
array_from_capsule: Callable[..., jax.Array] | None = private("jaxlib._jax.dlpack_managed_tensor_to_buffer", None)
capsule_from_array: Callable[[jax.Array, None], object] | None = private("jaxlib._jax.buffer_to_dlpack_managed_tensor", None)

# A numpy array over a CPU array, and whether it is a copy. Without it `numpy.asarray`, which may keep its result in the array: the array
# can then not be donated, and the next step copies it.
uncached_numpy: Callable[[jax.Array], object] = private("jax._src.array.ArrayImpl._single_device_array_to_np_array_did_copy", np.asarray)


# ------------------------------------------------------------------ executions

StreamCalls = tuple[Callable[[], int], Callable[[int], None]]


def _find_stream_calls() -> StreamCalls | None:
    """Return jaxlib's calls that read and set this thread's execution stream; None if they do not work as expected.

    A call that is missing, or takes other arguments, raises TypeError. One that refuses the number of a stream raises ValueError, one that
    only reports its removal RuntimeError, and a deprecated one DeprecationWarning where warnings are errors.
    """
    read = private("jaxlib._jax.get_execution_stream_id", None)
    choose = private("jaxlib._jax.set_execution_stream_id", None)
    try:
        before = read()
        choose(before + 1)
        found = read() == before + 1
        choose(before)
    except (TypeError, ValueError, RuntimeError, DeprecationWarning):
        return None
    return (read, choose) if found else None


# Without them the programs of a step run one after the other, and each begins and ends on one core.
stream_calls: StreamCalls | None = _find_stream_calls()


class InlineClient:
    """A jaxlib client that loads programs with a Python function that they never call, so that the calling thread runs them.

    Loading raises TypeError if `deserialize_executable` takes no `host_callbacks` (jaxlib 0.8). XLA's threads then run the programs, and a
    small update waits for them to wake.
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

    It is 0 if jax renames the event. A program from the cache may then be serialized without some of its functions, and fails when it runs.
    """
    return _hits.count


# ------------------------------------------------------------------ traces


_get_trace_state: Callable[..., object] | None = private("jax.extend.core.get_opaque_trace_state", None, needed=True) or private(
    "jax.core.get_opaque_trace_state", None, needed=True
)


def trace_state() -> object:
    """Return an object that identifies the function that jax traces now, by `==`; None if jax does not tell."""
    return None if _get_trace_state is None else _get_trace_state(convention=None)


def is_from_inner_trace(value: object, state: object) -> bool:
    """Return whether a value belongs to a function that jax traces inside the one of `state`. The value is useless once that trace ends.

    It is False if jax does not tell. jax then raises an error of its own later.
    """
    own, traces = getattr(value, "_trace", None), list(_enclosing_traces(state))
    return isinstance(value, Tracer) and own is not None and bool(traces) and all(own is not trace for trace in traces)


def _enclosing_traces(state: object) -> Iterator[object]:
    """Yield the trace of a state and, as far as jax tells, the traces around it."""
    trace = getattr(state, "_trace_ref", lambda: None)()
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)
