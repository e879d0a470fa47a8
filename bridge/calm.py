"""What would disturb: settings of jax that users make for code of their own, and Python's collector while programs are traced.

Reading the settings costs less than overriding them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import jax

from .dlpack import X64

_GUARDS = "jax_transfer_guard", *(f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_host", "device_to_device"))
settings = attrgetter("jax_debug_nans", "jax_debug_infs", "jax_disable_jit", *_GUARDS)
undisturbed = frozenset((False, None, "allow")).issuperset


def calm() -> Any:
    """A context for this thread: 64-bit types on; no search for NaN and infinity, no `disable_jit`, no transfer guard."""
    return X64(True) if undisturbed(settings(jax.config)) else calmed()


@contextmanager
def calmed() -> Iterator[None]:
    """The context of `calm`, whatever the settings are."""
    with X64(True), jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's cyclic collector waits: what a trace makes stays, and it would look through all of the process's objects again and again.

    Where several threads are here, it goes on when the first that came leaves.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
