"""Detect whether a traced loss draws from a generator of NumPy or Python. The number would be a constant of the compiled program."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, ParamSpec, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch

from bridge._compat.python import code_of
from bridge._tracing.context import context
from bridge._tracing.patches import patch_while_tracing

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random


class _TraceRecord(threading.local):
    """What the trace in this thread did.

    made_unseeded_generator: it called `numpy.random.default_rng()` without a seed. modules_that_drew: it called drawing functions of these
    modules.
    """

    made_unseeded_generator = False
    modules_that_drew: frozenset[str] = frozenset()


_TRACE_RECORD = _TraceRecord()
_MAX_DEPTH = 2  # how many nested functions are searched for generators


class GeneratorStates:
    """The states, before tracing, of the generators that a loss can reach.

    These are the global generators of `numpy.random` and `random`, and the generators in attributes of the module and in variables that the
    loss's code names. A generator that the loss makes without a seed is recorded during the trace. Other threads may draw from the global
    generators at the same time. So if there are other threads, a global generator counts only if the loss called a function of its module,
    such as `numpy.random.rand`.
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[..., object]) -> None:
        generators = {id(x): (name, x) for name, x in (*_generators_of_module(module), *_generators_of_code(loss_fn))}.values()
        self._states = [("numpy.random", np.random.get_state), ("random", random.getstate)]
        self._states += [(f"{name}, a generator of {_kind(x)},", lambda x=x: _state(x)) for name, x in generators]
        self._states_before = [repr_of() for _, repr_of in self._states]
        _TRACE_RECORD.made_unseeded_generator, _TRACE_RECORD.modules_that_drew = False, frozenset()

    def changed_generators(self) -> list[str]:
        """Return the names of the generators that have drawn since."""
        ignored_modules = frozenset(_GLOBAL_GENERATORS) - _TRACE_RECORD.modules_that_drew if threading.active_count() > 1 else ()
        pairs = [pair for pair in zip(self._states, self._states_before, strict=True) if pair[0][0] not in ignored_modules]
        found = [name for (name, now), before in pairs if not _equal(now(), before)]
        return found + ["numpy.random.default_rng()"] * _TRACE_RECORD.made_unseeded_generator


def _generators_of_module(module: torch.nn.Module) -> Iterator[tuple[str, _Generator]]:
    for path, m in module.named_modules():
        yield from ((f"{path}.{name}".lstrip("."), x) for name, x in vars(m).items() if _is_generator(x))


def _generators_of_code(function: object, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, _Generator]]:
    """Yield the generators in variables that a function's code names.

    The variables are free and global ones, those of functions among them, and the attributes of a method's object.
    """
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        own = getattr(function.__self__, "__dict__", {})
        yield from ((name, x) for name, x in own.items() if _is_generator(x))
        function = function.__func__
    code = code_of(function)
    if not isinstance(function, FunctionType) or code is None:
        return
    variables = {name: function.__globals__[name] for name in _names_in_code(code) if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # a cell without a value yet
            continue
    for name, x in variables.items():
        if _is_generator(x):
            yield name, x
        elif depth:
            yield from _generators_of_code(x, depth - 1)


def _names_in_code(code: CodeType) -> set[str]:
    """Return the names that a code object reads, also in functions that it defines."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*map(_names_in_code, inner))


def _is_generator(x: object) -> TypeGuard[_Generator]:
    return isinstance(x, np.random.Generator | np.random.RandomState) or type(x) is random.Random


def _kind(x: _Generator) -> str:
    return "Python" if isinstance(x, random.Random) else "NumPy"


def _state(x: _Generator) -> object:
    if isinstance(x, random.Random):
        return x.getstate()
    return x.bit_generator.state if isinstance(x, np.random.Generator) else x.get_state()


def _equal(one: Any, other: Any) -> bool:
    """Return whether two generator states are equal, including arrays in them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


_default_rng = np.random.default_rng


def _recording_default_rng(seed: Any = None, **keywords: Any) -> np.random.Generator:
    """Call `numpy.random.default_rng`, and record a generator without a seed in traced code."""
    if context.dispatch is not None and seed is None:
        _TRACE_RECORD.made_unseeded_generator = True
    return _default_rng(seed, **keywords)


patch_while_tracing(np.random, "default_rng", _recording_default_rng)


_GLOBAL_GENERATORS = {"numpy.random": (np.random, np.random.RandomState), "random": (random, random.Random)}


def _recording_draw(module: str, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a function of a module's global generator that records its calls in traced code."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        if context.dispatch is not None:
            _TRACE_RECORD.modules_that_drew |= {module}
        return function(*args, **keywords)

    return call


for _module, (_owner, _generator) in _GLOBAL_GENERATORS.items():
    for _name, _function in list(vars(_owner).items()):
        if isinstance(getattr(_function, "__self__", None), _generator):
            patch_while_tracing(_owner, _name, _recording_draw(_module, _function))
