"""Whether code that jax traces draws from a generator of NumPy or Python: the number is a constant of the compiled program."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from bridge.patches import while_tracing
from bridge.trace import TRACE


class _Made(threading.local):
    """Whether this thread's trace has made a generator without a seed."""

    without_seed = False


_MADE = _Made()
_DEPTH = 2  # how many functions deep generators are looked for


class Draws:
    """The states of the generators that a loss can reach, from before it is traced.

    These are the global ones of `numpy.random` and `random`, and those in attributes of the module and in variables that the loss's code
    names. A generator that the loss makes without a seed is noted while it traces.
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
        generators = {id(x): (name, x) for name, x in (*_held(module), *_named(loss_fn))}.values()
        self._states = [("numpy.random", np.random.get_state), ("random", random.getstate)]
        self._states += [(f"{name}, a generator of {_kind(x)},", lambda x=x: _state(x)) for name, x in generators]
        self._before = [repr_of() for _, repr_of in self._states]
        _MADE.without_seed = False

    def sources(self) -> list[str]:
        """The names of the generators that have drawn since."""
        found = [name for (name, now), before in zip(self._states, self._before, strict=True) if not _equal(now(), before)]
        return found + ["numpy.random.default_rng()"] * _MADE.without_seed


def _held(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, m in module.named_modules():
        yield from ((f"{path}.{name}".lstrip("."), x) for name, x in vars(m).items() if _is_generator(x))


def _named(function: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The generators in variables that a function's code names: free ones, global ones, those of functions among them; and of a method."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        own = getattr(function.__self__, "__dict__", {})
        yield from ((name, x) for name, x in own.items() if _is_generator(x))
        function = function.__func__
    if not isinstance(function, FunctionType):
        return
    variables = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # nothing yet
            continue
    for name, x in variables.items():
        if _is_generator(x):
            yield name, x
        elif depth:
            yield from _named(x, depth - 1)


def _names(code: CodeType) -> set[str]:
    """The names that a code reads, also within functions that it defines."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_generator(x: Any) -> bool:
    return isinstance(x, np.random.Generator | np.random.RandomState) or type(x) is random.Random


def _kind(x: Any) -> str:
    return "Python" if isinstance(x, random.Random) else "NumPy"


def _state(x: Any) -> Any:
    if isinstance(x, random.Random):
        return x.getstate()
    return x.bit_generator.state if isinstance(x, np.random.Generator) else x.get_state()


def _equal(one: Any, other: Any) -> bool:
    """Whether two states are equal, arrays in them too."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


_default_rng: Any = np.random.default_rng


def _noted(seed: Any = None, **keywords: Any) -> Any:
    """numpy.random.default_rng, which tells of a generator without a seed in code that jax traces."""
    if TRACE.dispatch is not None and seed is None:
        _MADE.without_seed = True
    return _default_rng(seed, **keywords)


while_tracing(np.random, "default_rng", _noted)
