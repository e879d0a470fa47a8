"""The state of one trace of torch code: its settings, its random keys, and errors that name the submodule that runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import torch
from jax.core import Tracer
from torch import nn


class TraceContext(threading.local):
    """The trace of one thread. Each thread has its own values; outside a trace they are the defaults."""

    module_path: tuple[tuple[str, str], ...] = ()  # (name, class name) of each submodule that was entered and not left
    device: torch.device = torch.device("cpu")
    rng: jax.Array | None = None
    draw_count: int = 0
    dispatch: Callable[..., Any] | None = None  # how torch functions are called on traced tensors; None: nothing is traced
    constants: dict[int, tuple[torch.Tensor, jax.Array]] | None = None
    jax_x64: bool | None = None  # jax_enable_x64 for jax code in a trace whose torch functions keep 64 bits; None: the same for both
    autocast_at_entry: bool = False  # whether torch.autocast was on when the trace began; the trace ignores it
    jax_rank_promotion: str | None = None  # jax_numpy_rank_promotion for jax code; torch functions always allow it
    module_proxy: Any = None  # the `ModuleProxy` of the module whose code runs
    buffer_trace_state: object = None  # the `trace_state` in which new buffer values are returned; None: they are dropped
    proxies: Mapping[int, nn.Module] = MappingProxyType({})  # id of an original module -> its proxy
    traced_tensors: Mapping[int, torch.Tensor] = MappingProxyType({})  # id of an original parameter or buffer -> its traced tensor
    applied_function: type[torch.autograd.Function] | None = None  # the Function whose `apply` in C has begun
    in_module_call: bool = False  # whether a module's call is running


context = TraceContext()


def current_module_path() -> str:
    """Return the name of the submodule that runs, as a phrase for errors."""
    if not context.module_path:
        return "outside any module"
    name, kind = context.module_path[-1]
    return f"in {name!r} ({kind})" if name else f"in the module itself ({kind})"


def no_autograd_graph_error(what: str) -> NotImplementedError:
    """Return the error for an operation that needs torch's autograd graph, which traced values do not have."""
    return NotImplementedError(
        f"{what} to torch's graph, and there is none {current_module_path()} for a value that jax traces. Take the gradient outside with "
        "jax.grad of a function of jnp.asarray(x), or give that code its own gradient with torch.autograd.Function."
    )


def data_dependent_error(what: str, tracer: Tracer) -> jax.errors.ConcretizationTypeError:
    """Return the error for torch code that needs a concrete value of a tracer. It has jax's type and names the torch function."""
    return jax.errors.ConcretizationTypeError(
        tracer,
        f"{what} {current_module_path()} asks for values, and jax traces this code once for all values. Use torch.where or a mask "
        "instead of `if`, return values to print or log (has_aux=True), and pass values that decide shapes or branches as an int, bool "
        "or string: as an argument (floats there are traced), as an attribute of the module, or with functools.partial.",
    )


def next_key(what: str) -> jax.Array:
    """Return the key of the next draw: the n-th draw of a trace folds n into the call's `rng`.

    Raises:
      ValueError: the call has no `rng`.
    """
    if context.rng is None:
        raise ValueError(
            f"{what} draws random numbers {current_module_path()}, but rng is None. Pass rng=jax.random.key(seed), or train=False."
        )
    context.draw_count += 1
    return jax.random.fold_in(context.rng, context.draw_count - 1)


class RngKeySource:
    """The key source that torch2jax's `mk_rng()` asks during a trace. Implementations that users registered there call `mk_rng()`."""

    def poop(self) -> jax.Array:
        return next_key("An implementation registered with torch2jax")
