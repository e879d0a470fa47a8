"""References to the original module while jax traces its double: they reach the double, and nothing of the trace stays in the original.

Lambdas, hooks, weak references and helper objects refer to the module that the user made. Every attribute of that module which they
read, set or delete on the tracing thread is the double's. What they refer to without the module (a container or an object of its
attributes) is restored after the trace.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from jax.core import Tracer
from torch import nn

from bridge._compat.torch2jax import is_torchish

from .context import TRACE
from .patches import redirects
from .tensor import Traced

_T = TypeVar("_T")
UNNAMED = "?"  # a module that is held in an attribute and is no submodule


def _reading(theirs: Callable[..., _T]) -> Callable[[object, str], _T]:
    return lambda self, name: theirs(TRACE.doubles.get(id(self), self), name)


def _writing(theirs: Callable[..., _T]) -> Callable[[object, str, object], _T]:
    return lambda self, name, value: theirs(TRACE.doubles.get(id(self), self), name, value)


def _calling(theirs: Callable[..., _T]) -> Callable[..., _T]:
    def called(self: nn.Module, *args: object, **kwargs: object) -> _T:
        """Call a module. Code outside of all modules was given the double, and what it calls there should be that."""
        if TRACE.dispatch is None:
            return theirs(self, *args, **kwargs)
        double = None if TRACE.within else TRACE.doubles.get(id(self))
        name = UNNAMED if double is None else double.__dict__["forward"].name
        if double is not None and name != UNNAMED and any(p.requires_grad for p in double.parameters()):
            raise _with_line(
                ValueError(
                    f"The original module {f'{name!r} ' if name else ''}({type(self).__name__}) is called, and its parameters are those of "
                    "torch, not of the traced program. Call the model that loss_fn receives as its first argument, or a part of it."
                )
            )
        before, TRACE.within = TRACE.within, True
        try:
            return theirs(self, *args, **kwargs)
        finally:
            TRACE.within = before

    return called


redirects({"__getattribute__": _reading, "__setattr__": _writing, "__delattr__": _reading, "__call__": _calling})


@contextmanager
def not_redirected() -> Iterator[None]:
    """Refer to modules and tensors as they are, also to those of a trace that is going on."""
    before = TRACE.doubles, TRACE.tensors
    TRACE.doubles, TRACE.tensors = {}, {}
    try:
        yield
    finally:
        TRACE.doubles, TRACE.tensors = before


def _with_line(error: Exception) -> Exception:
    """The error with a note of the innermost line of code that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "bridge", "jax"):
        frame = frame.f_back
    error.add_note(f"Called at {frame.f_code.co_filename}:{frame.f_lineno}.")
    return error


# Objects whose attributes are not looked at: they belong to many modules, or they are tensors and arrays.
_NOT_LOOKED_INTO = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, torch.Tensor, jax.Array, np.ndarray)
_MANY = 1000  # values that are looked at for one object in an attribute, and in one container
_KINDS = (list, deque, set, dict)
_LIBRARIES = "torch", "torchvision", "torchaudio", "builtins"  # whose classes keep no value of a trace
_ABSENT = object()


class Belongings:
    """The containers and objects in the attributes of a module as they were before a trace.

    The double has copies of some containers. Code that writes into the original of such a container refers to it without the module,
    and the double does not see what it writes: that is an error. The double shares the other objects and containers with the original.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any, str]] = []  # a container, a copy of it, where it is; "" for what the double shares
        self._slots: list[tuple[object, dict[str, object]]] = []  # an object with slots, their values
        self._classes: dict[int, tuple[type, dict[str, object]]] = {}  # a class by id, its attributes
        self._seen: dict[int, object] = {}  # the objects by id, which stays their own so

    def copied(self, container: Any, place: str) -> None:
        """Note a container that the double has a copy of, or the attributes of a module."""
        before = _shallow(container)
        if before is not None:
            self._before.append((container, before, place))

    def shared(self, x: object) -> None:
        """Note an object that is the double's as well, and what it holds."""
        pending = [x]
        for _ in range(_MANY):
            if not pending:
                return
            x = pending.pop()
            if id(x) in self._seen or type(x) in weakref.ProxyTypes or isinstance(x, _NOT_LOOKED_INTO):
                continue
            own = getattr(x, "__dict__", None)
            parts = [*([x] if isinstance(x, _KINDS) else []), *([own] if isinstance(own, dict) else [])]
            noted = [(part, before) for part in parts if (before := _shallow(part)) is not None]
            slots = slots_of(x)
            if noted or slots is not None:
                self._seen[id(x)] = x
            if slots is not None:
                self._slots.append((x, slots))
                pending += slots.values()
            self._before += [(part, before, "") for part, before in noted]
            for part in (*(before for _, before in noted), *([x] if isinstance(x, tuple | frozenset) else [])):
                pending += _elements(part) if len(part) <= _MANY else ()

    def classes(self, kind: type) -> None:
        """Note the attributes of a class and of those that it is derived from, of users alone."""
        for k in kind.__mro__:
            if id(k) not in self._classes and _is_of_a_user(k):
                self._classes[id(k)] = k, dict(vars(k))
                for value in self._classes[id(k)][1].values():
                    if isinstance(value, _KINDS):
                        self.shared(value)

    def restore(self) -> list[str]:
        """Take traced values out of what was noted; where the double has a copy of what held one.

        What cannot be restored is left, so that the rest is restored and an error of the traced code is the one that is raised.
        """
        found = []
        for container, before, place in self._before:
            with suppress(Exception):
                known = set(map(id, _elements(before))) if container else ()
                now = _shallow(container)
                new = [x for x in _elements(now) if id(x) not in known and _is_of_a_trace(x)] if now else ()
                if new:
                    found += [place] if place else []
                    _refill(container, before, set(map(id, new)))
        for x, before in self._slots:
            _restore_attributes(x, before, slots_of(x) or {}, object.__setattr__, object.__delattr__)
        for kind, before in self._classes.values():
            _restore_attributes(kind, before, dict(vars(kind)), setattr, delattr)
        return found


def _is_of_a_user(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] not in _LIBRARIES


def slots_of(x: object) -> dict[str, object] | None:
    """The values in the slots of an object; None where its class has none. A subclass may hide a slot, which is then not looked at."""
    if not _is_of_a_user(type(x)):
        return None
    names = [name for kind in type(x).__mro__ for name, slot in vars(kind).items() if type(slot) is MemberDescriptorType]
    if not names:
        return None
    found = {}
    for name in names:
        with suppress(AttributeError):  # nothing yet
            found[name] = object.__getattribute__(x, name)
    return found


def _restore_attributes(
    x: object,
    before: Mapping[str, object],
    now: Mapping[str, object],
    put: Callable[[Any, str, object], None],
    remove: Callable[[Any, str], None],
) -> None:
    for name, value in now.items():
        with suppress(Exception):
            if value is before.get(name, _ABSENT) or not _is_of_a_trace(value):
                continue
            if name in before:
                put(x, name, before[name])
            else:
                remove(x, name)


def _elements(container: Iterable[object]) -> Iterable[object]:
    return dict.values(container) if isinstance(container, dict) else container


def _shallow(container: Any) -> Any:
    """A plain copy; also of a subclass, whose own way of copying is not asked. None where another thread always changes it."""
    for _ in range(_MANY):
        with suppress(RuntimeError):  # changed by another thread while it was copied
            return dict.copy(container) if isinstance(container, dict) else list(container)
    return None


def _refill(container: Any, before: Any, new: set[int]) -> None:
    """Undo what a trace wrote: of a dict the entries with a value that is among `new`, else all elements."""
    if isinstance(container, dict):
        for key in [key for key, value in dict.items(container) if id(value) in new]:
            if key in before:
                dict.__setitem__(container, key, before[key])
            else:
                dict.__delitem__(container, key)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, before)
    else:
        container.clear()
        container.extend(before)


def _is_of_a_trace(x: object, depth: int = 4) -> bool:
    """Whether it is or holds a value that jax traces."""
    if type(x) in weakref.ProxyTypes:
        return False
    if isinstance(x, Traced | Tracer) or is_torchish(x):
        return True
    if not depth or isinstance(x, (*_NOT_LOOKED_INTO, str, bytes)):
        return False
    own = getattr(x, "__dict__", None)
    inner = list(x.values()) if isinstance(x, Mapping) else _shallow(x) or () if isinstance(x, tuple | list | set | deque) else ()
    attributes = list(own.values()) if isinstance(own, dict) else []
    return any(_is_of_a_trace(y, depth - 1) for y in (*inner, *attributes, *(slots_of(x) or {}).values()))
