"""jax functions that are replaced while torch code is traced: `jax.checkpoint`, `jax.jit`, `jax.custom_jvp` and `jax.custom_vjp`.

A function that jax traces separately cannot write into buffers outside of it. A checkpointed function therefore returns new buffer values
among its results, and a jitted function runs as a part of the outer trace. jax runs derivative rules when it differentiates the program,
after the code that called the function has returned. The rules therefore get the jax settings of that code.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bridge._interop.dtypes import is_wide
from bridge._ir.types import Eqn, Jaxpr, PyTree, ShapedArray, aval_of
from bridge._process import x64

from .context import TRACE
from .patches import while_tracing

_config: Any = jax.config
_jit: Any = jax.jit
_checkpoint: Any = jax.checkpoint
_call_jvp: Any = jax.custom_jvp.__call__
_call_vjp: Any = jax.custom_vjp.__call__
_T = TypeVar("_T")
_Custom = TypeVar("_Custom", jax.custom_jvp, jax.custom_vjp)


def _writes_buffers() -> bool:
    """Whether this thread traces a module with buffers."""
    return TRACE.stand_in is not None and TRACE.stand_in.has_buffers


_NUMERIC = (bool, int, float, complex, np.ndarray, np.generic)


def _as_given_by_jit(tree: PyTree) -> PyTree:
    """Return the tree with numbers and NumPy arrays as jax arrays. `jax.jit` converts its arguments and results in the same way."""
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, _NUMERIC) else x, tree)


def _static(function: Callable[..., object], options: Mapping[str, Any]) -> tuple[frozenset[int], frozenset[str]]:
    """Return the positions and the names of a jitted function's static arguments. Each is inferred from the other, as in `jax.jit`."""
    numbers, names = options.get("static_argnums"), options.get("static_argnames")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positions = [i for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = frozenset([numbers] if isinstance(numbers, int) else numbers or ())
    called = frozenset([names] if isinstance(names, str) else names or ())
    if numbers is None:
        found = frozenset(i for i in positions if parameters[i].name in called)
    elif names is None:
        called = frozenset(parameters[i].name for i in positions if not found.isdisjoint((i, i - len(parameters))))
    return found, called


def _jitted(*args: Any, **options: Any) -> Any:
    made = _jit(*args, **options)
    if not _writes_buffers():
        return made
    if not args:  # a decorator with options
        return functools.partial(_jitted, **options)
    (function,) = args
    numbers, names = _static(function, options)

    @functools.wraps(function, updated=())
    def call(*args: object, **kwargs: object) -> Any:
        if not _writes_buffers():
            return made(*args, **kwargs)
        given = [x if not numbers.isdisjoint((i, i - len(args))) else _as_given_by_jit(x) for i, x in enumerate(args)]
        named = {name: x if name in names else _as_given_by_jit(x) for name, x in kwargs.items()}
        return _as_given_by_jit(function(*given, **named))

    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        setattr(call, name, getattr(made, name, None))
    return call


def _checkpointed(*args: Any, **options: Any) -> Any:
    made = _checkpoint(*args, **options)
    if not args or not _writes_buffers():
        return made
    (function,) = args

    @functools.wraps(function, updated=())
    def call(*args: object, **kwargs: object) -> Any:
        if not _writes_buffers():
            return made(*args, **kwargs)
        return TRACE.stand_in.carried(functools.partial(_checkpoint, **options), function, args, kwargs)

    return call


while_tracing(jax, "jit", _jitted)
while_tracing(jax, "checkpoint", _checkpointed)
while_tracing(jax, "remat", _checkpointed)


def _called_jvp(self: jax.custom_jvp, *args: object, **kwargs: object) -> Any:
    return _call_jvp(_in_same_settings(self, "jvp"), *args, **kwargs)


def _called_vjp(self: jax.custom_vjp, *args: object, **kwargs: object) -> Any:
    return _call_vjp(_in_same_settings(self, "fwd", "bwd"), *args, **kwargs)


while_tracing(jax.custom_jvp, "__call__", _called_jvp)
while_tracing(jax.custom_vjp, "__call__", _called_vjp)


def _in_same_settings(custom: _Custom, *rules: str) -> _Custom:
    """Return a copy of the function whose rules run with the present jax settings, if torch functions run with others."""
    if TRACE.dispatch is None:
        return custom
    settings: list[Callable[[], AbstractContextManager[object]]] = []
    if TRACE.x64 is False and not _config.jax_enable_x64:
        settings.append(functools.partial(x64, False))
    if TRACE.ranks not in (None, _config.jax_numpy_rank_promotion):
        settings.append(functools.partial(jax.numpy_rank_promotion, _config.jax_numpy_rank_promotion))
    if not settings:
        return custom
    twin = object.__new__(type(custom))
    vars(twin).update(vars(custom))
    for name in rules:
        rule = vars(custom).get(name)
        if rule is not None:
            setattr(twin, name, _within(settings, rule))
    return twin


def _within(settings: Iterable[Callable[[], AbstractContextManager[object]]], rule: Callable[..., _T]) -> Callable[..., _T]:
    @functools.wraps(rule, updated=())
    def run(*args: object, **kwargs: object) -> _T:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting())
            return rule(*args, **kwargs)

    return run


def in_32_bits(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr with the derivative rules inside jitted functions set to trace with x64 off.

    A function that was jitted and traced before does not call the replacements of this module. A rule with 64-bit arguments or results is
    not changed, nor a rule that jax stores in an unknown form.
    """
    return _rewritten(jaxpr, _rules_in_32_bits, False)


def callbacks_in_32_bits(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr with callbacks that run with x64 off; the same object if there are none. 64-bit callbacks are not changed."""
    return _rewritten(jaxpr, _callback_in_32_bits, False)


_New = Callable[[Eqn, bool], dict[str, object]]  # (equation, whether it is inside a jitted function) -> params to change


def _rewritten(jaxpr: Jaxpr, new: _New, jitted: bool) -> Jaxpr:
    eqns = [_rewritten_eqn(eqn, new, jitted) for eqn in jaxpr.eqns]
    return jaxpr if all(map(operator.is_, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


def _rewritten_eqn(eqn: Eqn, new: _New, jitted: bool) -> Eqn:
    inside = jitted or eqn.primitive.name in ("jit", "pjit")
    params = {name: _rewritten_param(value, new, inside) for name, value in eqn.params.items()} | new(eqn, jitted)
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _rewritten_param(value: Any, new: _New, jitted: bool) -> Any:
    if hasattr(getattr(value, "jaxpr", None), "eqns"):  # a ClosedJaxpr
        body = _rewritten(value.jaxpr, new, jitted)
        return value if body is value.jaxpr else value.replace(jaxpr=body)
    if hasattr(value, "eqns"):
        return _rewritten(value, new, jitted)
    if isinstance(value, tuple):
        changed = tuple(_rewritten_param(x, new, jitted) for x in value)
        return value if all(map(operator.is_, changed, value)) else changed
    return value


# The parameters of a call equation that hold its rules, in jax 0.8 to 0.10.
_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")


def _rules_in_32_bits(eqn: Eqn, jitted: bool) -> dict[str, object]:
    if not jitted or any(map(is_wide, _avals(eqn))):
        return {}
    rules = {name: eqn.params.get(name) for name in _RULES}
    return {name: rule.wrap(_narrow, (), None) for name, rule in rules.items() if rule is not None and hasattr(rule, "wrap")}


def _narrow(rule: Callable[..., _T], *args: object) -> _T:
    with x64(False):
        return rule(*args)


def _callback_in_32_bits(eqn: Eqn, jitted: bool) -> dict[str, object]:
    callback = eqn.params.get("callback")
    return {"callback": functools.partial(_called_back, callback)} if callable(callback) and not any(map(is_wide, _avals(eqn))) else {}


def _called_back(callback: Callable[..., PyTree], *args: object) -> PyTree:
    """Call a callback with x64 off, and convert its results as jax does then."""
    with x64(False):
        return jax.tree.map(lambda x: np.asarray(x).astype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)), callback(*args))


def _avals(eqn: Eqn) -> Iterator[ShapedArray]:
    yield from (aval_of(v) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype"))
    body = getattr(eqn.params.get("call_jaxpr"), "jaxpr", None)
    for inner in getattr(body, "eqns", ()):
        yield from _avals(inner)
