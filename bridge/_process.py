"""State of the process and of the thread: jax settings, 64-bit types, garbage collection, forks, cores, torch.compile."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._compat.jax import client_started
from ._compat.torch import DYNAMO, disable_dynamo

enable_x64: Callable[[bool], AbstractContextManager[object]] = jax.enable_x64  # a warm step calls this one, to save a frame


def x64(on: bool = True) -> AbstractContextManager[object]:
    """Return a context in which jax keeps 64-bit types, or does not. It is local to the thread and leaves the global flag alone."""
    return enable_x64(on)


_TRANSFER_GUARDS = "jax_transfer_guard", *(f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_host", "device_to_device"))
_config: Any = jax.config
read_settings = attrgetter("jax_debug_nans", "jax_debug_infs", "jax_disable_jit", *_TRANSFER_GUARDS)
has_default_settings = frozenset((False, None, "allow")).issuperset


def jax_context() -> AbstractContextManager[object]:
    """Return a context for calls in this thread: 64-bit types, no checks for NaN or infinity, no `disable_jit`, no transfer guard."""
    return enable_x64(True) if has_default_settings(read_settings(jax.config)) else overridden_settings()


@contextmanager
def overridden_settings(enable_64bit: bool = True) -> Iterator[None]:
    """Enter the context of `jax_context` without looking at the current settings."""
    with enable_x64(enable_64bit), jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


def has_nan_checks() -> bool:
    """Return whether jax checks results for NaN or infinity."""
    return _config.jax_debug_nans or _config.jax_debug_infs


def raise_if_not_finite(cls_name: str, values: Iterable[tuple[str, jax.Array | np.ndarray]], consequence: str = "") -> None:
    """Raise FloatingPointError if a named array has NaN under `jax_debug_nans`, or infinity under `jax_debug_infs`."""
    enabled_checks = [("NaN", jnp.isnan, "jax_debug_nans"), ("infinity", jnp.isinf, "jax_debug_infs")]
    enabled_checks = [kind for kind in enabled_checks if getattr(_config, kind[2])]
    for name, value in values if enabled_checks else ():
        for what, is_there, flag in enabled_checks:
            with overridden_settings():
                found = jnp.issubdtype(value.dtype, jnp.inexact) and bool(jnp.any(is_there(value)))
            if found:
                raise FloatingPointError(f"{cls_name}: {name} of shape {tuple(value.shape)} has {what}, and {flag} is on.{consequence}")


@contextmanager
def default_settings(enable_64bit: bool = True) -> Iterator[None]:
    """Set the context for tracing and compiling: 64-bit types or not, no `disable_jit`, no transfer guard, no mesh of `jax.set_mesh`."""
    with enable_x64(enable_64bit), jax.disable_jit(False), jax.transfer_guard("allow"), without_mesh():
        yield


@contextmanager
def default_promotion() -> Iterator[None]:
    """Set jax's default promotion of dtypes and ranks, which optax expects."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def without_mesh() -> AbstractContextManager[object]:
    """Return a context without the mesh of `jax.set_mesh`. Under the mesh, jax would spread new arrays over several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty:
        return nullcontext()
    try:
        return jax.set_mesh(None)  # pyright: ignore[reportArgumentType]
    except ValueError:  # jax refuses this inside a function that it traces
        return nullcontext()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector.

    What a trace creates stays alive, and the collector would walk all objects of the process again and again. If several threads are in
    this context, the first one that leaves resumes the collector.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()


_P = ParamSpec("_P")
_R = TypeVar("_R")


def disable_torch_compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function so that torch.compile breaks its graph there and runs the function uncompiled.

    torch's public decorator imports dynamo at once, which takes as long as importing torch. This one imports dynamo at the first call.
    """
    return disable_dynamo(function)


def disable_torch_compile_if_imported(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return what `disable_torch_compile` returns, but never import dynamo for it: unless dynamo is imported, nothing compiles."""
    uncompiled = disable_torch_compile(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return uncompiled(*args, **kwargs) if DYNAMO in sys.modules else function(*args, **kwargs)

    return call


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = client_started()


def was_forked() -> bool:
    """Return whether this process was forked from one in which jax had started."""
    return _forked


os.register_at_fork(after_in_child=_after_fork)


def raise_if_forked() -> None:
    """Raise RuntimeError if this process was forked after jax had started."""
    if _forked:
        raise RuntimeError("this process was forked after jax had started, and jax hangs in such a child. Start it with 'spawn'.")
