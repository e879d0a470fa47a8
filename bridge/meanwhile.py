"""What is done in another thread while this one goes on: compiling, and asking the compiler."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def meanwhile(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Begin a call in a thread, one of a few, which must not wait for another of these calls.

    The thread has jax's settings as they are for all threads. Where no thread can begin, since the interpreter ends, the call is over
    when this returns.
    """
    try:
        return _threads().submit(function, *arguments)
    except RuntimeError:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "compile")
