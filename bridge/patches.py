"""What of torch is another while jax traces, on whichever thread: each of them goes on as ever where its own thread does not trace."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .trace import TRACE

_WANTED: list[tuple[Any, str, Any]] = []
_lock = threading.Lock()
_tracing = 0
_undo = ExitStack()


def while_tracing(owner: Any, name: str, value: Any) -> None:
    """Have `owner` this attribute while any thread traces."""
    _WANTED.append((owner, name, value))


@contextmanager
def patched() -> Iterator[None]:
    """The time of one trace. What torch.compile has made runs as the Python that it was made of."""
    global _tracing
    with _lock:
        if not _tracing:
            if "torch._dynamo" in sys.modules:
                _undo.enter_context(torch.compiler.set_stance("force_eager"))
            for owner, name, value in _WANTED:
                if name in vars(owner):
                    _undo.callback(setattr, owner, name, vars(owner)[name])
                else:
                    _undo.callback(delattr, owner, name)
                setattr(owner, name, value)
        _tracing += 1
    try:
        yield
    finally:
        with _lock:
            _tracing -= 1
            if not _tracing:
                _undo.close()


_redirects: dict[str, Callable[[Any], Any]] = {}
_redirected: dict[type, tuple[int, ExitStack]] = {}  # a class -> in how many traces, and what undoes it


def redirects(methods: dict[str, Callable[[Any], Any]]) -> None:
    """Have methods of these names, made of a class's own, on the classes of modules that are traced."""
    _redirects.update(methods)


@contextmanager
def redirected(doubles: Mapping[int, Any]) -> Iterator[None]:
    """The time in which code may refer to the originals of these doubles.

    Only the classes of these modules are changed: Python updates each subclass of a class that is.
    """
    classes = set(map(type, doubles.values()))
    with _lock:
        for kind in classes:
            count, undo = _redirected.get(kind) or (0, _redirect(kind))
            _redirected[kind] = count + 1, undo
    try:
        yield
    finally:
        with _lock:
            for kind in classes:
                count, undo = _redirected.pop(kind)
                if count > 1:
                    _redirected[kind] = count - 1, undo
                else:
                    undo.close()


def _redirect(kind: type) -> ExitStack:
    undo = ExitStack()
    for name, make in _redirects.items():
        if name in vars(kind):
            undo.callback(setattr, kind, name, vars(kind)[name])
        else:
            undo.callback(delattr, kind, name)
        setattr(kind, name, make(getattr(kind, name)))
    return undo


_compile: Any = torch.compile


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """torch.compile, which leaves what a traced forward gives it as it is."""
    if TRACE.dispatch is None:
        return _compile(model, **options)
    return model if model is not None else lambda function: function


while_tracing(torch, "compile", _not_compiled)
