"""What one thread is tracing of torch code, the keys of its draws, and errors in words of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import torch
from jax.core import Tracer
from torch import nn


class Trace(threading.local):
    """What one thread is tracing: the submodules entered, the keys to draw, what else a call needs to know."""

    path: tuple[tuple[str, str], ...] = ()
    device: torch.device = torch.device("cpu")
    rng: jax.Array | None = None
    drawn: int = 0
    dispatch: Callable[..., Any] | None = None
    constants: dict[int, tuple[torch.Tensor, jax.Array]] | None = None
    x64: bool | None = None  # the flag of code in jax, where torch functions keep 64 bits; None: the same
    autocast: bool = False  # whether it began within torch.autocast, of which it sees nothing
    ranks: str | None = None  # how code in jax may promote ranks, where torch functions promote them all
    stand_in: Any = None  # the `StandIn` of the module whose code runs
    home: object = None  # as of `trace_state`: where the values of the stand-in's buffers must be of use
    doubles: Mapping[int, nn.Module] = MappingProxyType({})  # id of a module that is traced -> its double
    tensors: Mapping[int, torch.Tensor] = MappingProxyType({})  # id of a parameter or buffer of that module -> the traced value
    within: bool = False  # whether a module's call is running


TRACE = Trace()


def where_now() -> str:
    """The submodule that is running, for errors."""
    if not TRACE.path:
        return "outside any module"
    name, kind = TRACE.path[-1]
    return f"in {name!r} ({kind})" if name else f"in the module itself ({kind})"


def no_graph(what: str) -> NotImplementedError:
    """The error for what needs the graph that torch records, and traced values have not."""
    return NotImplementedError(
        f"{what} to torch's graph, and there is none {where_now()} for a value that jax traces. Take the gradient outside, by jax.grad of "
        "a function of jnp.asarray(x), or give that code its own by torch.autograd.Function."
    )


def value_needed(what: str, tracer: Tracer) -> jax.errors.ConcretizationTypeError:
    """The error for torch code that asks for a value which jax does not know while it traces: jax's, in torch's words."""
    return jax.errors.ConcretizationTypeError(
        tracer,
        f"{what} {where_now()} asks for values, and jax traces this code once for all values. Choose by torch.where or a mask in the "
        "place of `if`, return what is to be printed or logged (has_aux=True), and give what decides shapes or branches as an int, bool "
        "or string: in the arguments (floats there are traced), in an attribute of the module, or by functools.partial.",
    )


def next_key(what: str) -> jax.Array:
    """A fresh key for one draw, of the call's `rng`: the n-th draw of a trace has the n-th key.

    Raises:
      ValueError: the call has no `rng`.
    """
    if TRACE.rng is None:
        raise ValueError(f"{what} draws random numbers {where_now()}, but rng is None. Pass rng=jax.random.key(seed), or train=False.")
    TRACE.drawn += 1
    return jax.random.fold_in(TRACE.rng, TRACE.drawn - 1)


class Keys:
    """torch2jax's source of keys within our traces, for implementations registered with it that call its `mk_rng()`."""

    def poop(self) -> jax.Array:
        return next_key("An implementation registered with torch2jax")
