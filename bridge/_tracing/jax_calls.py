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

from bridge._interop.dtypes import is_64bit
from bridge._ir.types import Eqn, Jaxpr, PyTree, ShapedArray, aval_of
from bridge._process import x64

from .context import context
from .patches import patch_while_tracing

_config: Any = jax.config
_jit: Any = jax.jit
_checkpoint: Any = jax.checkpoint
_call_jvp: Any = jax.custom_jvp.__call__
_call_vjp: Any = jax.custom_vjp.__call__
_T = TypeVar("_T")
_Custom = TypeVar("_Custom", jax.custom_jvp, jax.custom_vjp)


def _has_buffers_to_carry() -> bool:
    """Whether this thread traces a module with buffers."""
    return context.module_proxy is not None and context.module_proxy.has_buffers


_NUMERIC = (bool, int, float, complex, np.ndarray, np.generic)


def _as_jit_arguments(tree: PyTree) -> PyTree:
    """Return the tree with numbers and NumPy arrays as jax arrays. `jax.jit` converts its arguments and results in the same way."""
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, _NUMERIC) else x, tree)


def _static_arguments(function: Callable[..., object], options: Mapping[str, Any]) -> tuple[frozenset[int], frozenset[str]]:
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


def _jit_or_inline(*args: Any, **options: Any) -> Any:
    made = _jit(*args, **options)
    if not _has_buffers_to_carry():
        return made
    if not args:  # a decorator with options
        return functools.partial(_jit_or_inline, **options)
    (function,) = args
    numbers, names = _static_arguments(function, options)

    @functools.wraps(function, updated=())
    def call(*args: object, **kwargs: object) -> Any:
        if not _has_buffers_to_carry():
            return made(*args, **kwargs)
        given = [x if not numbers.isdisjoint((i, i - len(args))) else _as_jit_arguments(x) for i, x in enumerate(args)]
        named = {name: x if name in names else _as_jit_arguments(x) for name, x in kwargs.items()}
        return _as_jit_arguments(function(*given, **named))

    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        setattr(call, name, getattr(made, name, None))
    return call


def _checkpoint_with_buffers(*args: Any, **options: Any) -> Any:
    made = _checkpoint(*args, **options)
    if not args or not _has_buffers_to_carry():
        return made
    (function,) = args

    @functools.wraps(function, updated=())
    def call(*args: object, **kwargs: object) -> Any:
        if not _has_buffers_to_carry():
            return made(*args, **kwargs)
        return context.module_proxy.carry_buffers(functools.partial(_checkpoint, **options), function, args, kwargs)

    return call


patch_while_tracing(jax, "jit", _jit_or_inline)
patch_while_tracing(jax, "checkpoint", _checkpoint_with_buffers)
patch_while_tracing(jax, "remat", _checkpoint_with_buffers)


def _traced_jvp_call(self: jax.custom_jvp, *args: object, **kwargs: object) -> Any:
    return _call_jvp(_with_current_settings(self, "jvp"), *args, **kwargs)


def _traced_vjp_call(self: jax.custom_vjp, *args: object, **kwargs: object) -> Any:
    return _call_vjp(_with_current_settings(self, "fwd", "bwd"), *args, **kwargs)


patch_while_tracing(jax.custom_jvp, "__call__", _traced_jvp_call)
patch_while_tracing(jax.custom_vjp, "__call__", _traced_vjp_call)


def _with_current_settings(custom: _Custom, *rules: str) -> _Custom:
    """Return a copy of the function whose rules run with the present jax settings, if torch functions run with others."""
    if context.dispatch is None:
        return custom
    settings: list[Callable[[], AbstractContextManager[object]]] = []
    if context.jax_x64 is False and not _config.jax_enable_x64:
        settings.append(functools.partial(x64, False))
    if context.jax_rank_promotion not in (None, _config.jax_numpy_rank_promotion):
        settings.append(functools.partial(jax.numpy_rank_promotion, _config.jax_numpy_rank_promotion))
    if not settings:
        return custom
    twin = object.__new__(type(custom))
    vars(twin).update(vars(custom))
    for name in rules:
        rule = vars(custom).get(name)
        if rule is not None:
            setattr(twin, name, _under_settings(settings, rule))
    return twin


def _under_settings(settings: Iterable[Callable[[], AbstractContextManager[object]]], rule: Callable[..., _T]) -> Callable[..., _T]:
    @functools.wraps(rule, updated=())
    def run(*args: object, **kwargs: object) -> _T:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting())
            return rule(*args, **kwargs)

    return run


def rules_in_32_bits(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr with the derivative rules inside jitted functions set to trace with x64 off.

    A function that was jitted and traced before does not call the replacements of this module. A rule with 64-bit arguments or results is
    not changed, nor a rule that jax stores in an unknown form.
    """
    return _rewrite_jaxpr(jaxpr, _rule_params_in_32_bits, False)


def callbacks_in_32_bits(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr with callbacks that run with x64 off; the same object if there are none. 64-bit callbacks are not changed."""
    return _rewrite_jaxpr(jaxpr, _callback_param_in_32_bits, False)


_ChangedParams = Callable[[Eqn, bool], dict[str, object]]  # (equation, whether it is inside a jitted function) -> params to change


def _rewrite_jaxpr(jaxpr: Jaxpr, new: _ChangedParams, jitted: bool) -> Jaxpr:
    eqns = [_rewrite_eqn(eqn, new, jitted) for eqn in jaxpr.eqns]
    return jaxpr if all(map(operator.is_, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


def _rewrite_eqn(eqn: Eqn, new: _ChangedParams, jitted: bool) -> Eqn:
    inside = jitted or eqn.primitive.name in ("jit", "pjit")
    params = {name: _rewrite_param(value, new, inside) for name, value in eqn.params.items()} | new(eqn, jitted)
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _rewrite_param(value: Any, new: _ChangedParams, jitted: bool) -> Any:
    if hasattr(getattr(value, "jaxpr", None), "eqns"):  # a ClosedJaxpr
        body = _rewrite_jaxpr(value.jaxpr, new, jitted)
        return value if body is value.jaxpr else value.replace(jaxpr=body)
    if hasattr(value, "eqns"):
        return _rewrite_jaxpr(value, new, jitted)
    if isinstance(value, tuple):
        changed = tuple(_rewrite_param(x, new, jitted) for x in value)
        return value if all(map(operator.is_, changed, value)) else changed
    return value


# The parameters of a call equation that hold its rules, in jax 0.8 to 0.10.
_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")


def _rule_params_in_32_bits(eqn: Eqn, jitted: bool) -> dict[str, object]:
    if not jitted or any(map(is_64bit, _avals(eqn))):
        return {}
    rules = {name: eqn.params.get(name) for name in _RULES}
    return {name: rule.wrap(_call_in_32_bits, (), None) for name, rule in rules.items() if rule is not None and hasattr(rule, "wrap")}


def _call_in_32_bits(rule: Callable[..., _T], *args: object) -> _T:
    with x64(False):
        return rule(*args)


def _callback_param_in_32_bits(eqn: Eqn, jitted: bool) -> dict[str, object]:
    callback = eqn.params.get("callback")
    return (
        {"callback": functools.partial(_call_back_in_32_bits, callback)}
        if callable(callback) and not any(map(is_64bit, _avals(eqn)))
        else {}
    )


def _call_back_in_32_bits(callback: Callable[..., PyTree], *args: object) -> PyTree:
    """Call a callback with x64 off, and convert its results as jax does then."""
    with x64(False):
        return jax.tree.map(lambda x: np.asarray(x).astype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)), callback(*args))


def _avals(eqn: Eqn) -> Iterator[ShapedArray]:
    yield from (aval_of(v) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype"))
    body = getattr(eqn.params.get("call_jaxpr"), "jaxpr", None)
    for inner in getattr(body, "eqns", ()):
        yield from _avals(inner)
