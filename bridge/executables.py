"""Compiled programs in jax's persistent cache, found again by what they were written from.

jax finds a compiled program by its text: it must be traced and lowered first, which takes most of a second start. An update by this
package's own equations is known before that: by its plan, the source of this package, the versions, the settings of jax and XLA, and the
machine. What is kept is what `jax.experimental.serialize_executable` makes of the compiled program, in jax's own cache, and only of what
jax finds worth keeping itself (size, least time). Where any of it cannot be told, or what was kept cannot be read, nothing is found: the
program is traced as it is without.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import platform
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jax.monitoring
import jaxlib
import numpy as np
import optax
import torch
from jax.experimental.serialize_executable import serialize

from . import lanes
from .fusion import SWITCH
from .inline import loaded

_PACKAGE = __name__.partition(".")[0]
_NAME = "maskbridge_update"
_SWITCHES = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
# Settings that decide where and whether something is kept, and what is said of it.
_BESIDE = re.compile("compilation_cache|persistent_cache|_log_|logging|traceback|explain|pprint|dump_ir|source_url")
_DIGEST = hashlib.sha256().digest_size


class Entry:
    """The place in jax's cache of the program of one plan, a frozen dataclass; of none where nothing is kept of it.

    On a CPU alone: no other device has run what this finds.
    """

    def __init__(self, plan: Any) -> None:
        self._cache, self._key, self._device = None, "", plan.device
        if plan.device.platform != "cpu" or not all(getattr(jax.config, name, None) for name in _SWITCHES):
            return
        try:
            parts = _source(), _options(), text(dataclasses.replace(plan, device=None)), f"{plan.device.id} {plan.device.device_kind}"
            if None not in parts and not _is_patched():
                self._key = f"{_NAME}-{hashlib.sha256(chr(10).join([*map(str, parts), *_surroundings()]).encode()).hexdigest()}"
                self._cache = _cache(plan.device.client)
        except Exception:  # noqa: BLE001 - jax's private names, its folder, a user's rule: what cannot be told is not kept
            return

    def named(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function by a name that has the source of this package: another version's programs jax would find, and `put` leave out."""
        if self._cache is None:
            return function

        def program(*arguments: Any) -> Any:
            return function(*arguments)

        program.__name__ = program.__qualname__ = f"{_NAME}_{str(_source())[:16]}"
        return program

    def get(self) -> list[tuple[Any, Any]] | None:
        """The compiled programs that were put here, each as it is written and ready to be called; None where none can be read."""
        try:
            kept = self._cache.get(self._key) if self._cache is not None else None
            if kept is None or hashlib.sha256(kept[_DIGEST:]).digest() != kept[:_DIGEST]:
                return None
            return [(each, loaded(each, self._device)) for each in pickle.loads(zlib.decompress(kept[_DIGEST:]))]
        except Exception:  # noqa: BLE001 - whatever the file system, pickle or XLA raises: the program is made anew
            return None

    def put(self, compiled: Sequence[Any]) -> list[Any]:
        """Keep compiled programs, each of them `written` by jax; as they were written, or nothing where none is kept."""
        if self._cache is None:
            return []
        try:
            kept = [serialize(each) for each in compiled]
            content = zlib.compress(pickle.dumps(kept))
            self._cache.put(self._key, hashlib.sha256(content).digest() + content)
            return kept
        except Exception:  # noqa: BLE001 - a program that cannot be written, a full disk: the step has all it needs
            return []


class _Events(threading.local):
    written = 0
    read = 0


_events = _Events()


def _noted(event: str, **_: Any) -> None:
    _events.written += event == "/jax/compilation_cache/cache_misses"
    _events.read += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_noted)


def written() -> int:
    """How many programs jax has compiled in this thread and found worth its cache, by the event that it reports before it writes.

    What it has read there must not be put here: jaxlib 0.10.2 writes it without some of its functions, and the step that finds it again
    fails (NOT_FOUND).
    """
    return _events.written


def read() -> int:
    """How many programs jax has found in its cache in this thread."""
    return _events.read


def _cache(client: Any) -> Any:
    """jax's cache, with its `get` and `put`, by a name that is private; None where it keeps nothing."""
    from jax._src.compilation_cache import _get_cache

    return _get_cache(client)


# ------------------------------------------------------------------ what a program is written from


_PLAIN = bool, int, float, str, bytes, type(None)


def text(x: Any) -> str | None:
    """All that a static value is, equal in each process: plain values, and those of this package's classes and functions.

    None where it holds anything else: a closure, say, or a transformation of the user's.
    """
    found = list(_words(x))
    return None if None in found else " ".join(map(str, found))


def _words(x: Any) -> Iterator[str | None]:
    kind = type(x)
    if kind in _PLAIN:
        yield repr(x)
    elif kind is FunctionType:
        known = _is_ours(x) and getattr(sys.modules.get(x.__module__), x.__qualname__, None) is x  # functools.wraps copies names
        yield f"{x.__module__}.{x.__qualname__}" if known else None
    elif kind is type(_NO_ARGUMENTS):
        yield "no arguments" if x == _NO_ARGUMENTS else None
    else:
        parts = _parts(x)
        yield None if parts is None else f"{kind.__qualname__}("
        for part in parts or ():
            yield from _words(part)
        yield ")"


def _parts(x: Any) -> Iterable[Any] | None:
    """What a value consists of; None where that is not all that it is."""
    kind = type(x)
    if kind in (tuple, list):
        return x
    if kind in (set, frozenset):
        return sorted(x, key=str)
    if kind is dict:
        return x.items()
    if kind is functools.partial:
        return x.func, x.args, x.keywords
    if _is_ours(kind) and dataclasses.is_dataclass(x):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    return x if _is_ours(kind) and isinstance(x, tuple) else None


_NO_ARGUMENTS = jax.tree.structure({})


def _is_ours(x: Any) -> bool:
    return str(getattr(x, "__module__", "")).partition(".")[0] == _PACKAGE


def _files() -> dict[Path, tuple[int, int]]:
    """The files of this package, and what tells whether one was written since."""
    return {file: ((stat := file.stat()).st_mtime_ns, stat.st_size) for file in sorted(Path(__file__).parent.glob("*.py"))}


_imported = _files()


@functools.cache
def _source() -> str | None:
    """The hash of all files of this package; None where they are not there to be read, or not those that were imported."""
    found = hashlib.sha256()
    for file in _imported:
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest() if _imported and _files() == _imported else None


_functions: dict[str, dict[str, Any]] = {}


def remember() -> None:
    """Take note of the functions and classes of all modules of this package, once they are imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_PACKAGE}.") and name != __name__:
            _functions[name] = {key: value for key, value in vars(module).items() if callable(value)}


def _is_patched() -> bool:
    """Whether somebody has put another function in the place of one: the source does not tell then what is traced."""
    return not _functions or any(
        vars(sys.modules[name]).get(key) is not value for name, known in _functions.items() for key, value in known.items()
    )


def _options() -> str:
    """XLA's options as this process reads them, by a private name: from XLA_FLAGS as it was first, or the file which that names."""
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    _ = options.executable_build_options.debug_options  # read now, if they were not
    return options.SerializeAsString().hex()


def _surroundings() -> list[str]:
    """What else decides what is traced and compiled: versions, the machine, the environment, jax's settings but those of its messages."""
    environment = [os.environ.get(name, "") for name in ("XLA_FLAGS", SWITCH)]
    known = ((name, value) for name, value in sorted(jax.config.values.items()) if not _BESIDE.search(name))
    settings = [f"{name}={getattr(jax.config, name, value)!r}" for name, value in known]  # of a thread, where it has its own
    return [*_machine(), *environment, *settings]


@functools.cache
def _machine() -> list[str]:
    versions = jax.__version__, jaxlib.__version__, np.__version__, optax.__version__, torch.__version__, sys.version
    return [*versions, platform.platform(), platform.machine(), _processor(), f"{lanes.CORES} of {os.cpu_count()}"]


def _processor() -> str:
    """What the processor can do, for whose instructions programs are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))
