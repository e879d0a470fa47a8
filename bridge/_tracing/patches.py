"""Attributes of torch and jax that are replaced while any thread traces.

A replacement does the same as the original on a thread that does not trace. The original is restored when the last scope that needs the
replacement ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from bridge._compat.torch import DYNAMO

from .context import TRACE


class _Note(NamedTuple):
    """A replaced attribute: its owner and name, the original and the replacement."""

    owner: object
    name: str
    before: object
    now: object


_WANTED: list[tuple[object, str, object]] = []
_Make: TypeAlias = Callable[[Any], object]  # from an attribute's value to its replacement
_Change: TypeAlias = tuple[object, str, _Make]  # an attribute's owner and name, and how to make its replacement
_REDIRECTS: dict[str, _Make] = {}
_ABSENT = object()
_Key = tuple[int, str]  # id of an owner, the name of its attribute
_lock = threading.RLock()  # reentrant, because a signal handler may trace while this thread holds it
_going_on: dict[object, set[_Key]] = {}  # each active scope -> the attributes that it needs
_notes: dict[_Key, _Note] = {}  # the attributes that are replaced now
_stances: list[AbstractContextManager[object]] = []  # torch.compile stances that were set; leaving one restores the stance before it


def while_tracing(owner: object, name: str, value: object) -> None:
    """Register a replacement: `owner` has this attribute value while any thread traces."""
    _WANTED.append((owner, name, value))


def patched() -> AbstractContextManager[None]:
    """Return a context with all registered replacements, for one trace. Functions compiled by torch.compile run as their Python code."""
    return _changed([(owner, name, lambda _, value=value: value) for owner, name, value in _WANTED])


def redirects(methods: Mapping[str, _Make]) -> None:
    """Register methods for the classes of traced modules. Each is made from the class's own method of the same name."""
    _REDIRECTS.update(methods)


def redirected(doubles: Mapping[int, nn.Module]) -> AbstractContextManager[None]:
    """Return a context in which attribute access on the original modules reaches these proxies.

    Only the classes of these modules are changed, because Python updates every subclass of a changed class. A class whose metaclass
    refuses the change stays as it is.
    """
    classes = {id(type(double)): type(double) for double in doubles.values()}.values()
    return _changed([(kind, name, make) for kind in classes for name, make in _REDIRECTS.items()])


@contextmanager
def _changed(wanted: Sequence[_Change]) -> Iterator[None]:
    """Replace the attributes for the duration of the context.

    An interrupt may arrive at any line, also while the replacements are undone. They are therefore undone twice: the second time does what
    an interrupt of the first left.
    """
    time = object()
    try:
        try:
            _begin(time, wanted)
            yield
        finally:
            _end(time)
    finally:
        _end(time)


def _begin(time: object, wanted: Sequence[_Change]) -> None:
    """Replace attributes. Each original is recorded first, because a signal handler may enter and leave its own scope at any line."""
    with _lock:
        _going_on[time] = {(id(owner), name) for owner, name, _ in wanted}
        if DYNAMO in sys.modules and not _stances:
            _stances.append(torch.compiler.set_stance("force_eager"))
        for owner, name, make in wanted:
            key = id(owner), name
            if key not in _notes:
                now = make(getattr(owner, name, None))
                _notes.setdefault(key, _Note(owner, name, vars(owner).get(name, _ABSENT), now))
            _put(owner, name, _notes[key].now)


def _end(time: object) -> None:
    """Restore the attributes that no other scope needs. A second call for one scope does nothing."""
    with _lock:
        _going_on.pop(time, None)
        needed = set[_Key]().union(*_going_on.values())
        for key, note in list(_notes.items()):
            if key not in needed:
                _put(note.owner, note.name, note.before)
                _notes.pop(key, None)
        if not _going_on:
            for stance in reversed(_stances):
                stance.__exit__(None, None, None)
            _stances.clear()


def _put(owner: object, name: str, value: object) -> None:
    if vars(owner).get(name, _ABSENT) is value:
        return
    with suppress(AttributeError, TypeError):  # raised by a metaclass that refuses
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


_compile: Any = torch.compile


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """Do what `torch.compile` does; on a tracing thread, return the model or function uncompiled."""
    if TRACE.dispatch is None:
        return _compile(model, **options)
    return model if model is not None else lambda function: function


while_tracing(torch, "compile", _not_compiled)
