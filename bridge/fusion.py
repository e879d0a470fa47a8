"""Several results from one loop: how XLA's CPU compiler is asked for it, for the programs that are ours alone.

With it Adam moves 28 bytes a parameter, without it 40; the numbers are the same.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

FUSION_FLAG = "xla_cpu_use_multi_output_fusion"
SWITCH = "MASKBRIDGE_XLA_FLAGS"
_MAP = "xla_backend_extra_options"

# Fields of the protocol buffers that jax's CompileOptions are, to that map: executable_build_options, debug_options (xla.proto).
_PATH = 3, 3, 500


def request() -> None:
    """Ask XLA for it when this package is imported, where that must be.

    Each program of ours asks for itself, and nothing else that jax compiles is touched. Only a jax without the private name which
    that takes, or MASKBRIDGE_XLA_FLAGS=1, which serves a user's own `jax.jit` as well, needs the whole process to ask:
    XLA reads XLA_FLAGS when jax starts its CPU client, so they are set before that, and only where they have no
    `--xla_backend_extra_options` of the user's. With MASKBRIDGE_XLA_FLAGS=0 nobody asks.
    """
    switch, flags = os.environ.get(SWITCH), os.environ.get("XLA_FLAGS", "")
    whole = switch == "1" or not by_program()
    if switch != "0" and whole and _MAP not in flags and not client_started():
        os.environ["XLA_FLAGS"] = f"{flags} --{_MAP}={FUSION_FLAG}".strip()


def requested() -> bool:
    """Whether programs of ours are compiled with it, as far as the environment tells."""
    return bool(without_it()) or (os.environ.get(SWITCH) != "0" and by_program())


def client_started() -> bool:
    """Whether jax has a client; a jax that no longer tells is taken to have none, and the flag then does nothing."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()


def compiled(lowered: Any, fused: bool, options: dict[str, Any] | None = None) -> Any:
    """`lowered.compile(compiler_options=options)`, with several results from one loop or, if not `fused`, surely without.

    A program with code that is not ours has it not, even where the process asks: jaxlib 0.10.2 ends the process where it looks
    for several results of one loop in some gradients of indexing (symbolic_map.cc:196, "Check failed").
    """
    if not fused:
        return lowered.compile(compiler_options=without_it() | (options or {}) or None)
    _asked.now = os.environ.get(SWITCH) != "0" and _installed()
    try:
        return lowered.compile(compiler_options=options or None)
    finally:
        _asked.now = False


def without_it() -> dict[str, Any]:
    """The compiler options that take back what the process asks for."""
    return {_MAP: ""} if FUSION_FLAG in os.environ.get("XLA_FLAGS", "") else {}


class _Asked(threading.local):
    now = False


_asked, _installing = _Asked(), threading.Lock()
_hooks: list[Any] = []


@functools.cache
def by_program() -> bool:
    """Whether a single program can ask: jax's public `compiler_options` take no entry of that map (0.6 to 0.10), a private name does."""
    try:
        from jax._src.compiler import get_compile_options
        from jax._src.interpreters.pxla import create_compile_options
        from jax._src.lib import xla_client

        return (
            callable(xla_client.CompileOptions.ParseFromString) and get_compile_options.__name__ in create_compile_options.__code__.co_names
        )
    except (ImportError, AttributeError):
        return False


def _installed() -> bool:
    """Have jax ask `_with_entry` for the options of what a thread compiles while `_asked.now`."""
    if not by_program():
        return False
    from jax._src import compiler

    with _installing:
        given = compiler.get_compile_options
        if given not in _hooks:

            @functools.wraps(given)
            def get_compile_options(*args: Any, **kwargs: Any) -> Any:
                options = given(*args, **kwargs)
                return _with_entry(options) if _asked.now else options

            _hooks.append(get_compile_options)
            compiler.get_compile_options = get_compile_options
    return True


def _with_entry(options: Any) -> Any:
    """jax's CompileOptions with the entry in their map, or as they are where they cannot be written and read."""
    entry = _field(1, FUSION_FLAG.encode()) + _field(2, b"")
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
