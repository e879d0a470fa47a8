"""References to the original module while jax traces its proxy: they reach the proxy, and no traced value stays in the original.

Lambdas, hooks, weak references and helper objects refer to the module that the user made. When they read, set or delete an attribute of
that module on the tracing thread, they get the proxy's attribute. They may also refer to a container or an object in an attribute, without
the module. Its contents are restored after the trace.
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

from .context import context
from .patches import register_redirects
from .tensor import TracedTensor

_T = TypeVar("_T")
UNNAMED = "?"  # the name of a module that an attribute holds but that is no submodule


def _redirected_get(theirs: Callable[..., _T]) -> Callable[[object, str], _T]:
    return lambda self, name: theirs(context.proxies.get(id(self), self), name)


def _redirected_set(theirs: Callable[..., _T]) -> Callable[[object, str, object], _T]:
    return lambda self, name, value: theirs(context.proxies.get(id(self), self), name, value)


def _redirected_call(theirs: Callable[..., _T]) -> Callable[..., _T]:
    def called(self: nn.Module, *args: object, **kwargs: object) -> _T:
        """Call a module. Raise an error if code outside all modules calls an original with trained parameters instead of the proxy."""
        if context.dispatch is None:
            return theirs(self, *args, **kwargs)
        proxy = None if context.in_module_call else context.proxies.get(id(self))
        name = UNNAMED if proxy is None else proxy.__dict__["forward"].name
        if proxy is not None and name != UNNAMED and any(p.requires_grad for p in proxy.parameters()):
            raise _add_user_line(
                ValueError(
                    f"The original module {f'{name!r} ' if name else ''}({type(self).__name__}) is called, but its parameters are torch "
                    "tensors, not those of the traced program. Call the model that loss_fn receives as its first argument, or a part of it."
                )
            )
        before, context.in_module_call = context.in_module_call, True
        try:
            return theirs(self, *args, **kwargs)
        finally:
            context.in_module_call = before

    return called


register_redirects(
    {"__getattribute__": _redirected_get, "__setattr__": _redirected_set, "__delattr__": _redirected_get, "__call__": _redirected_call}
)


@contextmanager
def without_redirects() -> Iterator[None]:
    """Return a context in which references to modules and tensors are not redirected, also within a trace."""
    before = context.proxies, context.traced_tensors
    context.proxies, context.traced_tensors = {}, {}
    try:
        yield
    finally:
        context.proxies, context.traced_tensors = before


def _add_user_line(error: Exception) -> Exception:
    """Add a note to the error with the innermost line of code outside torch, jax and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "bridge", "jax"):
        frame = frame.f_back
    error.add_note(f"Called at {frame.f_code.co_filename}:{frame.f_lineno}.")
    return error


# Types whose attributes are not inspected: their objects are shared between modules, or they are tensors and arrays.
_OPAQUE_TYPES = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, torch.Tensor, jax.Array, np.ndarray)
_MAX_VISITED = 1000  # how many values are inspected of one object in an attribute, and of one container
_CONTAINER_TYPES = (list, deque, set, dict)
_LIBRARIES = "torch", "torchvision", "torchaudio", "builtins"  # packages whose classes store no traced values
_ABSENT = object()


class AttributeSnapshot:
    """A snapshot of the containers and objects in a module's attributes, taken before a trace.

    The proxy has copies of some containers. Code that writes into the original of a copied container refers to it without the module. The
    proxy does not see the write, so it is an error. The proxy shares the other objects and containers with the original.
    """

    def __init__(self) -> None:
        # A container, a copy of it, and its attribute path; "" for a container that the proxy shares.
        self._containers: list[tuple[Any, Any, str]] = []
        self._slots: list[tuple[object, dict[str, object]]] = []  # an object and the values of its slots
        self._classes: dict[int, tuple[type, dict[str, object]]] = {}  # id of a class -> the class and its attributes
        self._visited: dict[int, object] = {}  # id -> object; holding the object keeps its id in use

    def record_copied(self, container: Any, place: str) -> None:
        """Record a container of which the proxy has a copy, or the attributes of a module."""
        before = _shallow_copy(container)
        if before is not None:
            self._containers.append((container, before, place))

    def record_shared(self, x: object) -> None:
        """Record an object that the proxy shares, and the objects in it."""
        pending = [x]
        for _ in range(_MAX_VISITED):
            if not pending:
                return
            x = pending.pop()
            if id(x) in self._visited or type(x) in weakref.ProxyTypes or isinstance(x, _OPAQUE_TYPES):
                continue
            own = getattr(x, "__dict__", None)
            parts = [*([x] if isinstance(x, _CONTAINER_TYPES) else []), *([own] if isinstance(own, dict) else [])]
            noted = [(part, before) for part in parts if (before := _shallow_copy(part)) is not None]
            slots = slot_values(x)
            if noted or slots is not None:
                self._visited[id(x)] = x
            if slots is not None:
                self._slots.append((x, slots))
                pending += slots.values()
            self._containers += [(part, before, "") for part, before in noted]
            for part in (*(before for _, before in noted), *([x] if isinstance(x, tuple | frozenset) else [])):
                pending += _elements(part) if len(part) <= _MAX_VISITED else ()

    def record_class(self, kind: type) -> None:
        """Record the attributes of a class and its bases, except classes of libraries."""
        for k in kind.__mro__:
            if id(k) not in self._classes and _is_user_class(k):
                self._classes[id(k)] = k, dict(vars(k))
                for value in self._classes[id(k)][1].values():
                    if isinstance(value, _CONTAINER_TYPES):
                        self.record_shared(value)

    def restore(self) -> list[str]:
        """Remove traced values from all recorded objects. Return the paths of copied containers that held one.

        An object that cannot be restored is skipped. So the others are restored, and an error of the traced code is not hidden.
        """
        found = []
        for container, before, place in self._containers:
            with suppress(Exception):
                known = set(map(id, _elements(before))) if container else ()
                now = _shallow_copy(container)
                new = [x for x in _elements(now) if id(x) not in known and _holds_traced_value(x)] if now else ()
                if new:
                    found += [place] if place else []
                    _restore_container(container, before, set(map(id, new)))
        for x, before in self._slots:
            _restore_attributes(x, before, slot_values(x) or {}, object.__setattr__, object.__delattr__)
        for kind, before in self._classes.values():
            _restore_attributes(kind, before, dict(vars(kind)), setattr, delattr)
        return found


def _is_user_class(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] not in _LIBRARIES


def slot_values(x: object) -> dict[str, object] | None:
    """Return the values in an object's slots; None if its class has none. Slots that a subclass hides are not included."""
    if not _is_user_class(type(x)):
        return None
    names = [name for kind in type(x).__mro__ for name, slot in vars(kind).items() if type(slot) is MemberDescriptorType]
    if not names:
        return None
    found = {}
    for name in names:
        with suppress(AttributeError):  # not assigned yet
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
            if value is before.get(name, _ABSENT) or not _holds_traced_value(value):
                continue
            if name in before:
                put(x, name, before[name])
            else:
                remove(x, name)


def _elements(container: Iterable[object]) -> Iterable[object]:
    return dict.values(container) if isinstance(container, dict) else container


def _shallow_copy(container: Any) -> Any:
    """Return a copy as a plain dict or list, without a subclass's own copy method. None if another thread changes it at every attempt."""
    for _ in range(_MAX_VISITED):
        with suppress(RuntimeError):  # another thread changed it during the copy
            return dict.copy(container) if isinstance(container, dict) else list(container)
    return None


def _restore_container(container: Any, before: Any, new: set[int]) -> None:
    """Restore a container: the entries of a dict whose value's id is in `new`, or all elements of another container."""
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


def _holds_traced_value(x: object, depth: int = 4) -> bool:
    """Whether `x` is or holds a traced value, down to `depth` levels."""
    if type(x) in weakref.ProxyTypes:
        return False
    if isinstance(x, TracedTensor | Tracer) or is_torchish(x):
        return True
    if not depth or isinstance(x, (*_OPAQUE_TYPES, str, bytes)):
        return False
    own = getattr(x, "__dict__", None)
    inner = list(x.values()) if isinstance(x, Mapping) else _shallow_copy(x) or () if isinstance(x, tuple | list | set | deque) else ()
    attributes = list(own.values()) if isinstance(own, dict) else []
    return any(_holds_traced_value(y, depth - 1) for y in (*inner, *attributes, *(slot_values(x) or {}).values()))
