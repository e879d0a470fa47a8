"""The attributes of torch and jax that are replaced while any thread traces. Each does as before on a thread that does not trace."""

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
    """An attribute that is replaced: what it was, and what it is now."""

    owner: object
    name: str
    before: object
    now: object


_WANTED: list[tuple[object, str, object]] = []
_Make: TypeAlias = Callable[[Any], object]  # from what an attribute is to what it becomes
_Change: TypeAlias = tuple[object, str, _Make]  # the owner of an attribute, its name, and what it becomes
_REDIRECTS: dict[str, _Make] = {}
_ABSENT = object()
_Key = tuple[int, str]  # id of an owner, the name of its attribute
_lock = threading.RLock()  # reentrant: a signal handler that arrives while it is held may trace
_going_on: dict[object, set[_Key]] = {}  # each time that has begun -> the attributes that it needs
_notes: dict[_Key, _Note] = {}  # the attributes that are replaced now
_stances: list[AbstractContextManager[object]] = []  # each has set the stance of torch.compile, and knows which was before


def while_tracing(owner: object, name: str, value: object) -> None:
    """Have `owner` this attribute while any thread traces."""
    _WANTED.append((owner, name, value))


def patched() -> AbstractContextManager[None]:
    """The time of one trace. What torch.compile has made runs as the Python that it was made of."""
    return _changed([(owner, name, lambda _, value=value: value) for owner, name, value in _WANTED])


def redirects(methods: Mapping[str, _Make]) -> None:
    """Have methods of these names, made of a class's own, on the classes of modules that are traced."""
    _REDIRECTS.update(methods)


def redirected(doubles: Mapping[int, nn.Module]) -> AbstractContextManager[None]:
    """The time in which code may refer to the originals of these doubles.

    Only the classes of these modules are changed: Python updates each subclass of a class that is. A class whose metaclass refuses the
    change stays as it is.
    """
    classes = {id(type(double)): type(double) for double in doubles.values()}.values()
    return _changed([(kind, name, make) for kind in classes for name, make in _REDIRECTS.items()])


@contextmanager
def _changed(wanted: Sequence[_Change]) -> Iterator[None]:
    """The time in which these attributes are what is made of them.

    An interrupt may arrive at any line. It is undone twice, because the first may be interrupted; the second then has the rest to do.
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
    """Change attributes, each when it is noted what it was; at any line a signal handler may begin and end a time of its own."""
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
    """Undo what no other time needs; nothing where that has been done."""
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
    with suppress(AttributeError, TypeError):  # of a metaclass
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


_compile: Any = torch.compile


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """torch.compile, which leaves what a traced forward gives it as it is."""
    if TRACE.dispatch is None:
        return _compile(model, **options)
    return model if model is not None else lambda function: function


while_tracing(torch, "compile", _not_compiled)
