"""References to the original module while jax traces its double: they reach the double, and nothing of the trace stays in the original.

Lambdas, hooks, weak references and helper objects refer to the module that the user made. Every attribute of that module which they
read, set or delete on the tracing thread is the double's. What they refer to without the module (a container or an object of its
attributes) is restored after the trace.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer
from torch import nn

from .patches import redirects
from .registered import is_torchish
from .trace import TRACE
from .traced import Traced

UNNAMED = "?"  # a module that is held in an attribute and is no submodule


def _reading(theirs: Any) -> Any:
    return lambda self, name: theirs(TRACE.doubles.get(id(self), self), name)


def _writing(theirs: Any) -> Any:
    return lambda self, name, value: theirs(TRACE.doubles.get(id(self), self), name, value)


def _calling(theirs: Any) -> Any:
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
    TRACE.doubles = TRACE.tensors = {}
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


# Whose attributes are no part of the module that holds them: what many modules share, and what has values of its own kind.
_NOT_LOOKED_INTO: Any = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, torch.Tensor, jax.Array, np.ndarray)
_MANY = 1000  # values that are looked at for one object in an attribute, and in one container
_KINDS = (list, deque, set, dict)


class Belongings:
    """The containers and objects in the attributes of a module as they were before a trace.

    A container of which the double has a copy is written into only by code that refers to it by another way than the module, and the
    double's code does not see this value. Objects and containers of other kinds are the double's too.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any, str]] = []  # a container, a copy of it, where it is; "" for what the double shares
        self._seen: dict[int, Any] = {}  # the objects by id, which stays their own so

    def copied(self, container: Any, place: str) -> None:
        """Note a container that the double has a copy of, or the attributes of a module."""
        self._before.append((container, _shallow(container), place))

    def shared(self, x: Any) -> None:
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
            if parts:
                self._seen[id(x)] = x
            self._before += [(part, _shallow(part), "") for part in parts]
            for part in (*parts, *([x] if isinstance(x, tuple | frozenset) else [])):
                pending += _elements(part) if len(part) <= _MANY else ()

    def restore(self) -> list[str]:
        """Take traced values out of what was noted; where the double has a copy of what held one."""
        found = []
        for container, before, place in self._before:
            known = set(map(id, _elements(before))) if container else ()
            new = [x for x in _elements(container) if id(x) not in known and _is_of_a_trace(x)]
            if new:
                _refill(container, before, set(map(id, new)))
                found += [place] if place else []
        return found


def _elements(container: Any) -> Iterable[Any]:
    return dict.values(container) if isinstance(container, dict) else container


def _shallow(container: Any) -> Any:
    """A plain copy; also of a subclass, whose own way of copying is not asked."""
    return dict.copy(container) if isinstance(container, dict) else list(container)


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


def _is_of_a_trace(x: Any, depth: int = 4) -> bool:
    """Whether it is or holds a value that jax traces."""
    if type(x) in weakref.ProxyTypes:
        return False
    if isinstance(x, Traced | Tracer) or is_torchish(x):
        return True
    if not depth or isinstance(x, (*_NOT_LOOKED_INTO, str, bytes)):
        return False
    own = getattr(x, "__dict__", None)
    inner = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list | set | deque) else ()
    return any(_is_of_a_trace(y, depth - 1) for y in (*inner, *(own.values() if isinstance(own, dict) else ())))
