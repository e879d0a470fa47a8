"""torch.autograd.Function in traced code: its forward and backward become a `jax.custom_vjp` function.

torch's own `apply` would run the forward without a graph, and jax would not see the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.autograd.function import FunctionMeta
from torch.utils import checkpoint

from bridge._compat.torch import APPLY_IS_C, FUNCTION_BASE, sample_dirichlet, with_overrides

from .context import context, current_module_path, next_key
from .op_registry import TracingMode, iter_leaves, propagate_requires_grad, unsupported_op_error
from .patches import apply_patches, patch_while_tracing, redirect_to_proxies
from .tensor import TracedTensor, as_array, as_traced

_Keys: TypeAlias = tuple[jax.Array, ...] | tuple[None, None]  # keys for the draws of forward and of backward


@contextmanager
def trace_scope(**values: Any) -> Iterator[None]:
    """Trace torch code on this thread, with these values in `context`. An outer trace continues afterwards.

    Gradients are enabled, also in the forward of a Function, although jax does not differentiate it. Otherwise its results would look as
    if they depended on no input.
    """
    before = dict(context.__dict__)
    try:
        context.__dict__.update(values)
        with apply_patches(), redirect_to_proxies(context.proxies), torch.enable_grad(), with_overrides(), TracingMode():
            yield
    finally:
        context.__dict__.clear()
        context.__dict__.update(before)


def _is_traced(args: object) -> bool:
    return context.dispatch is not None and any(isinstance(x, TracedTensor) for x in iter_leaves(args))


def _trace(function: type[torch.autograd.Function], args: tuple[object, ...]) -> Any:
    out = _apply_traced(function, args)
    propagate_requires_grad(out, args)
    return out


def _apply_or_trace(function: type[torch.autograd.Function], *args: object, **kwargs: object) -> Any:
    return _trace(function, args) if _is_traced(args) else super(FUNCTION_BASE, function).apply(*args, **kwargs)


def _has_setup_context(function: type[torch.autograd.Function]) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def _forward_or_trace(function: type[torch.autograd.Function], forward: Any, *args: object) -> Any:
    """Do what the forward of a Function does for `apply` in C; for traced tensors, what `apply` does."""
    inputs = args if _has_setup_context(function) else args[1:]  # without the ctx
    if not _is_traced(inputs):
        return forward(*args)
    with torch.enable_grad():
        return _trace(function, inputs)


def _read_attribute(function: type[torch.autograd.Function], name: str) -> Any:
    """Return an attribute of a Function. An `apply` kept in a variable gets another forward.

    Such an `apply` is C code that nobody can replace. It reads `_backward_cls` of the class and then `forward`, which it calls.
    """
    found = type.__getattribute__(function, name)
    if context.dispatch is None:
        return found
    if name == "_backward_cls":
        context.applied_function = function
    elif name == "forward" and context.applied_function is function:
        context.applied_function = None
        return functools.partial(_forward_or_trace, function, found)
    return found


patch_while_tracing(FUNCTION_BASE, "apply", classmethod(_apply_or_trace))
if APPLY_IS_C:
    patch_while_tracing(FunctionMeta, "__getattribute__", _read_attribute)


class FunctionCtx:
    """torch's `ctx`: what forward stores for backward."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[object, ...] = ()
        self._non_differentiable: tuple[object, ...] = ()

    def save_for_backward(self, *tensors: object) -> None:
        """Store tensors for backward."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: object) -> None:
        """Do nothing: traced code has no forward mode."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: backward always gets zeros for a gradient that does not exist."""

    def mark_non_differentiable(self, *outputs: object) -> None:
        """Mark outputs that have no gradient."""
        self._non_differentiable = outputs

    def mark_dirty(self, *_: object) -> None:
        """Raise an error: an input that forward writes into is not supported."""
        raise NotImplementedError(
            f"ctx.mark_dirty is called {current_module_path()}, and a torch.autograd.Function that writes into its input has no "
            "implementation in jax. Return a new tensor from forward."
        )


def _apply_traced(function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """Return what `function.apply(*args)` returns, with the gradient that its backward computes."""
    if function is checkpoint.CheckpointFunction:  # XLA decides what is stored for the backward
        run, _, *rest = args
        return run(*rest)
    if function.__module__ == "torch.distributions.dirichlet":  # its backward is C++ code of torch
        return sample_dirichlet(*args)
    if any(isinstance(x, TracedTensor) for x in iter_leaves([x for x in args if not isinstance(x, TracedTensor)])):
        raise unsupported_op_error(function.apply, f" ({function.__name__} is given traced tensors within a container)")
    traced_positions = [i for i, x in enumerate(args) if isinstance(x, TracedTensor)]
    # jax runs the backward, and may run the forward again, after the code that called the function has returned.
    call, resumed = (
        _FunctionCall(function, args, traced_positions),
        functools.partial(trace_scope, **context.__dict__ | {"draw_count": 0, "constants": {}}),
    )
    keys = (None, None) if context.rng is None else tuple(jax.random.split(next_key(f"{function.__name__}.apply")))

    @jax.custom_vjp
    def run(keys: _Keys, *given: jax.Array) -> list[jax.Array]:
        with resumed(rng=keys[0]):
            return call.forward(given)[0]

    def forward(keys: _Keys, *given: jax.Array) -> tuple[list[jax.Array], tuple[_Keys, list[jax.Array]]]:
        with resumed(rng=keys[0]):
            results, kept = call.forward(given)
        return results, (keys, kept)

    def backward(kept: tuple[_Keys, list[jax.Array]], grads: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        keys, arrays = kept
        with resumed(rng=keys[1]):
            return None, *call.backward(arrays, grads)

    run.defvjp(forward, backward)
    return call.outputs(run(keys, *(args[i].value for i in traced_positions)))


class _FunctionCall:
    """One call of a Function, as functions of the arrays of its traced tensors."""

    def __init__(self, function: type[torch.autograd.Function], args: tuple[Any, ...], places: list[int]) -> None:
        self._function, self._args, self._positions = function, args, places
        self._needs_input_grad = tuple(isinstance(x, TracedTensor) and jnp.issubdtype(x.value.dtype, jnp.inexact) for x in args)
        self._returns_single = False
        self._outputs: list[object] = []
        self._is_non_differentiable: list[bool] = []
        self._ctx_tree: tuple[Any, list[object]] = None, []

    def forward(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the arrays among the results, and the arrays that backward needs."""
        args, function, ctx = list(self._args), self._function, FunctionCtx(self._needs_input_grad)
        for i, x in zip(self._positions, arrays, strict=True):
            args[i] = TracedTensor(x)
        if _has_setup_context(function):
            out = function.forward(*args)
            function.setup_context(ctx, tuple(args), out)
        else:
            out = function.forward(ctx, *args)
        self._returns_single = not isinstance(out, tuple)
        self._outputs = [out] if self._returns_single else list(out)
        tensors = [x for x in self._outputs if isinstance(x, torch.Tensor)]
        self._is_non_differentiable = [any(x is y for y in ctx._non_differentiable) for x in tensors]
        self._outputs = [_ARRAY_SLOT if isinstance(x, torch.Tensor) else x for x in self._outputs]
        flat, tree = jax.tree.flatten({name: x for name, x in vars(ctx).items() if name != "_non_differentiable"})
        self._ctx_tree = tree, [_ARRAY_SLOT if isinstance(x, jax.Array) else x for x in flat]
        return [as_array(x) for x in tensors], [x for x in flat if isinstance(x, jax.Array)]

    def backward(self, residuals: list[jax.Array], grads: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        """Return the gradient of each array argument; None for an argument without a gradient."""
        tree, flat = self._ctx_tree
        rest, ctx = iter(residuals), FunctionCtx(self._needs_input_grad)
        vars(ctx).update(as_traced(tree.unflatten([next(rest) if x is _ARRAY_SLOT else x for x in flat])))
        arrays = (None if x.dtype == jax.dtypes.float0 else TracedTensor(x) for x in grads)
        input_grads = self._function.backward(ctx, *(next(arrays) if x is _ARRAY_SLOT else None for x in self._outputs))
        input_grads = input_grads if isinstance(input_grads, tuple) else (input_grads,)
        if any(x is not None for x in input_grads[len(self._args) :]) or len(input_grads) < len(self._args):
            raise RuntimeError(
                f"{self._function.__name__}.backward returned {len(input_grads)} gradients; expected {len(self._args)}, one for each "
                "argument of forward. Return None for an argument without a gradient."
            )
        return tuple(self._gradient(i, input_grads[i]) for i in self._positions)

    def outputs(self, results: Sequence[jax.Array]) -> object:
        """Return what `apply` returns, given the arrays among the results."""
        marked = zip(results, self._is_non_differentiable, strict=True)
        tensors = iter([TracedTensor(jax.lax.stop_gradient(x) if constant else x) for x, constant in marked])
        out = [next(tensors) if x is _ARRAY_SLOT else x for x in self._outputs]
        return out[0] if self._returns_single else tuple(out)

    def _gradient(self, i: int, grad: Any) -> jax.Array | None:
        like = self._args[i].value
        if grad is None or not self._needs_input_grad[i]:
            return None
        grad = as_array(grad)
        if grad.shape != like.shape:
            raise RuntimeError(
                f"{self._function.__name__}.backward returned a gradient of shape {tuple(grad.shape)} for argument {i}, which has shape "
                f"{tuple(like.shape)}."
            )
        return grad.astype(like.dtype)


_ARRAY_SLOT = object()
