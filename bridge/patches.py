"""What of torch is another while jax traces, on whichever thread: each of them goes on as ever where its own thread does not trace."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
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


_compile: Any = torch.compile


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """torch.compile, which leaves what a traced forward gives it as it is."""
    if TRACE.dispatch is None:
        return _compile(model, **options)
    return model if model is not None else lambda function: function


while_tracing(torch, "compile", _not_compiled)
