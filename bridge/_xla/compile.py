"""Compile lowered programs: with XLA's options for ours, in other threads, and what the compiler says of the result."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar, TypeVarTuple

import jax

from bridge._compat.jax import cache_hits, extra_option
from bridge._process import x64

from .multi_output_fusion import FUSION_FLAG, SWITCH, without_it

CompilerOptions: TypeAlias = dict[str, Any]  # strings, booleans and integers, by XLA's names
_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class Executable(Protocol):
    """A compiled program, as `jax.stages.Compiled` is one."""

    def __call__(self, *arguments: Any) -> Any: ...

    def as_text(self) -> str | None: ...

    def cost_analysis(self) -> Any: ...


def compiled(lowered: jax.stages.Lowered, fused: bool, options: CompilerOptions | None = None) -> jax.stages.Compiled:
    """`lowered.compile(compiler_options=options)`, with several results from one loop or, if not `fused`, surely without.

    A program with code that is not ours has it not, even where the process asks: jaxlib 0.10.2 ends the process where it looks
    for several results of one loop in some gradients of indexing (symbolic_map.cc:196, "Check failed").
    """
    if not fused:
        return lowered.compile(compiler_options=without_it() | (options or {}) or None)
    with extra_option(None if os.environ.get(SWITCH) == "0" else FUSION_FLAG):
        return lowered.compile(compiler_options=options or None)


def bytes_accessed(compiled: Executable) -> float:
    """Bytes that one call of a compiled program moves, by the compiler's count."""
    return float(compiled.cost_analysis().get("bytes accessed", 0.0))  # absent where nothing is computed


def meanwhile(function: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> Future[_Result]:
    """Begin a call in a thread, one of a few, which must not wait for another of these calls.

    The thread has jax's settings as they are for all threads. Where no thread can begin, since the interpreter ends, the call is over
    when this returns.
    """
    try:
        return _threads().submit(function, *arguments)
    except RuntimeError:
        done: Future[_Result] = Future()
        done.set_result(function(*arguments))
        return done


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "compile")


class Piece:
    """A lowered program, compiled with these options when asked; `from_cache`: jax has read it from its persistent cache."""

    def __init__(self, lowered: jax.stages.Lowered, options: CompilerOptions) -> None:
        self._lowered: jax.stages.Lowered | None = lowered
        self._options = options
        self.compiled: Any = None
        self.from_cache = False

    def compile(self) -> None:
        """Make it ready to be called; several may be compiled at once, each in a thread."""
        lowered = self._lowered
        if lowered is not None:  # else it is, since another thread took it as well
            hits = cache_hits()
            with x64():
                self.compiled = compiled(lowered, True, self._options)
            self.from_cache = cache_hits() > hits
            self._lowered = None
