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

from .context import context


class _Patch(NamedTuple):
    """A replaced attribute: its owner and name, the original and the replacement."""

    owner: object
    name: str
    original: object
    replacement: object


_REGISTERED: list[tuple[object, str, object]] = []
_MakeReplacement: TypeAlias = Callable[[Any], object]  # from an attribute's value to its replacement
_PatchRequest: TypeAlias = tuple[object, str, _MakeReplacement]  # an attribute's owner and name, and how to make its replacement
_REDIRECTS: dict[str, _MakeReplacement] = {}
_ABSENT = object()
_Key = tuple[int, str]  # id of an owner, the name of its attribute
_lock = threading.RLock()  # reentrant, because a signal handler may trace while this thread holds it
_active_scopes: dict[object, set[_Key]] = {}  # each active scope -> the attributes that it needs
_applied_patches: dict[_Key, _Patch] = {}  # the attributes that are replaced now
_compile_stances: list[
    AbstractContextManager[object]
] = []  # torch.compile stances that were set; leaving one restores the stance before it


def patch_while_tracing(owner: object, name: str, value: object) -> None:
    """Register a replacement: `owner` has this attribute value while any thread traces."""
    _REGISTERED.append((owner, name, value))


def apply_patches() -> AbstractContextManager[None]:
    """Return a context with all registered replacements, for one trace. Functions compiled by torch.compile run as their Python code."""
    return _patch_scope([(owner, name, lambda _, value=value: value) for owner, name, value in _REGISTERED])


def register_redirects(methods: Mapping[str, _MakeReplacement]) -> None:
    """Register methods for the classes of traced modules. Each is made from the class's own method of the same name."""
    _REDIRECTS.update(methods)


def redirect_to_proxies(proxies: Mapping[int, nn.Module]) -> AbstractContextManager[None]:
    """Return a context in which attribute access on the original modules reaches these proxies.

    Only the classes of these modules are changed, because Python updates every subclass of a changed class. A class whose metaclass
    refuses the change stays as it is.
    """
    classes = {id(type(proxy)): type(proxy) for proxy in proxies.values()}.values()
    return _patch_scope([(kind, name, make) for kind in classes for name, make in _REDIRECTS.items()])


@contextmanager
def _patch_scope(requests: Sequence[_PatchRequest]) -> Iterator[None]:
    """Replace the attributes for the duration of the context.

    An interrupt may arrive at any line, also while the replacements are undone. They are therefore undone twice: the second time does what
    an interrupt of the first left.
    """
    scope = object()
    try:
        try:
            _enter_scope(scope, requests)
            yield
        finally:
            _exit_scope(scope)
    finally:
        _exit_scope(scope)


def _enter_scope(scope: object, requests: Sequence[_PatchRequest]) -> None:
    """Replace attributes. Each original is recorded first, because a signal handler may enter and leave its own scope at any line."""
    with _lock:
        _active_scopes[scope] = {(id(owner), name) for owner, name, _ in requests}
        if DYNAMO in sys.modules and not _compile_stances:
            _compile_stances.append(torch.compiler.set_stance("force_eager"))
        for owner, name, make in requests:
            key = id(owner), name
            if key not in _applied_patches:
                now = make(getattr(owner, name, None))
                _applied_patches.setdefault(key, _Patch(owner, name, vars(owner).get(name, _ABSENT), now))
            _set_or_delete(owner, name, _applied_patches[key].replacement)


def _exit_scope(scope: object) -> None:
    """Restore the attributes that no other scope needs. A second call for one scope does nothing."""
    with _lock:
        _active_scopes.pop(scope, None)
        needed = set[_Key]().union(*_active_scopes.values())
        for key, note in list(_applied_patches.items()):
            if key not in needed:
                _set_or_delete(note.owner, note.name, note.original)
                _applied_patches.pop(key, None)
        if not _active_scopes:
            for stance in reversed(_compile_stances):
                stance.__exit__(None, None, None)
            _compile_stances.clear()


def _set_or_delete(owner: object, name: str, value: object) -> None:
    if vars(owner).get(name, _ABSENT) is value:
        return
    with suppress(AttributeError, TypeError):  # raised by a metaclass that refuses
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


_torch_compile: Any = torch.compile


def _compile_unless_tracing(model: Any = None, **options: Any) -> Any:
    """Do what `torch.compile` does; on a tracing thread, return the model or function uncompiled."""
    if context.dispatch is None:
        return _torch_compile(model, **options)
    return model if model is not None else lambda function: function


patch_while_tracing(torch, "compile", _compile_unless_tracing)
