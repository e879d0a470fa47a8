"""Compile lowered programs with XLA's options for them, in this thread or others, and read what the compiler says of the result."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar, TypeVarTuple

import jax

from bridge._compat.jax import cache_hits, extra_option
from bridge._process import x64

from .multi_output_fusion import FUSION_FLAG, FUSION_VARIABLE, disabling_options

CompilerOptions: TypeAlias = dict[str, Any]  # strings, booleans and integers, by XLA's option names
_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class Executable(Protocol):
    """A compiled program, such as `jax.stages.Compiled`."""

    def __call__(self, *arguments: Any) -> Any: ...

    def as_text(self) -> str | None: ...

    def cost_analysis(self) -> Any: ...


def compile_lowered(lowered: jax.stages.Lowered, fuse_outputs: bool, options: CompilerOptions | None = None) -> jax.stages.Compiled:
    """Return `lowered.compile(compiler_options=options)`, with or without multi-output fusion.

    A program with code from users must not have it, even if the process flag asks for it: on some gradients of indexing, jaxlib 0.10.2 then
    crashes (symbolic_map.cc:196, "Check failed").

    Args:
      lowered: The program.
      fuse_outputs: Whether XLA may write several results from one loop.
      options: Further compiler options.
    """
    if not fuse_outputs:
        return lowered.compile(compiler_options=disabling_options() | (options or {}) or None)
    with extra_option(None if os.environ.get(FUSION_VARIABLE) == "0" else FUSION_FLAG):
        return lowered.compile(compiler_options=options or None)


def bytes_accessed(compiled: Executable) -> float:
    """Return the bytes that one call of a compiled program moves, by the compiler's count."""
    return float(compiled.cost_analysis().get("bytes accessed", 0.0))  # a program without operations has no entry


def scratch_bytes(compiled: Executable) -> int | None:
    """Return the bytes that one call of a compiled program takes for intermediate values; None if the compiler does not say."""
    analyze = getattr(compiled, "memory_analysis", None)
    found = None if analyze is None else analyze()
    return None if found is None else int(found.temp_size_in_bytes)


def submit(function: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> Future[_Result]:
    """Start a call in the pool of compile threads. The call must not wait for another of these calls.

    The thread has jax's global settings. If no thread can start, because the interpreter ends, the call has ended when this returns.
    """
    try:
        return _compile_pool().submit(function, *arguments)
    except RuntimeError:
        done: Future[_Result] = Future()
        done.set_result(function(*arguments))
        return done


@functools.cache
def _compile_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "compile")


class LazyExecutable:
    """A lowered program that is compiled on request. `from_cache` says whether jax has read it from its persistent cache."""

    def __init__(self, lowered: jax.stages.Lowered, options: CompilerOptions) -> None:
        self._lowered: jax.stages.Lowered | None = lowered
        self._options = options
        self.compiled: Any = None
        self.from_cache = False

    def compile(self) -> None:
        """Compile the program unless that is done. Several programs may be compiled at once, each in a thread."""
        lowered = self._lowered
        if lowered is not None:  # another thread may have compiled it
            hits = cache_hits()
            with x64():
                self.compiled = compile_lowered(lowered, True, self._options)
            self.from_cache = cache_hits() > hits
            self._lowered = None
