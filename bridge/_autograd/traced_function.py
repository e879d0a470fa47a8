"""One traced JAX function of flat arrays, and what is made of it: the call, what a backward needs, pullback, pushforward, batch.

The user's function runs once for each signature; all else is made of its jaxpr. A program reads tensors where they lie
and has ended when the call returns, so the tensors may change right after. No result lies in memory that anything else
holds: what a function hands through, or returns twice, is copied.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun
from jax.typing import ArrayLike

from bridge._compat.types import Device, PyTreeDef
from bridge._interop.dlpack import wait_for
from bridge._interop.dtypes import IN_TORCH, crosses
from bridge._ir.types import Atom, ClosedJaxpr, Literal, aval_of
from bridge._memory.call_arguments import Views, operands, results
from bridge._process import X64, calmed, default_settings, refuse_not_finite, undisturbed
from bridge._xla.compile import compiled

from .fast_signature import addresses_of
from .residuals import reached, sources

_config: Any = jax.config
_settings = attrgetter("jax_disable_jit", "jax_transfer_guard_host_to_device", "jax_debug_nans", "jax_debug_infs")
Order = tuple[int, ...] | None
Function = Callable[..., Any]
# The shape and dtype of an argument that is no tensor; a Python number stands for itself.
Spec: TypeAlias = jax.ShapeDtypeStruct | complex
# A result: as an array if torch has no type for it.
Result: TypeAlias = torch.Tensor | jax.Array
_T = TypeVar("_T")


class Place(NamedTuple):
    """Where a program runs, and whether jax keeps 64-bit types there."""

    device: Device
    wide: bool


class Call:
    """A compiled function of tensors, each with its dimensions in the order given, and of other arrays."""

    def __init__(
        self, function: Function, tensors: Sequence[jax.ShapeDtypeStruct], others: Sequence[Spec], place: Place, orders: Sequence[Order]
    ) -> None:
        self._place, self._orders, self._on_cpu = place, list(orders), place.device.platform == "cpu"
        sharding = jax.sharding.SingleDeviceSharding(place.device)

        def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            given = list(map(_unflattened, arrays, tensors, orders))
            return tuple(function(*given, *arrays[len(given) :])) or (jnp.zeros(()),)  # something to wait for

        def spec(aval: Spec) -> Spec:
            if not isinstance(aval, jax.ShapeDtypeStruct):
                return aval
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=_is_weak(aval))

        flat = [jax.ShapeDtypeStruct((math.prod(aval.shape),), aval.dtype, sharding=sharding) for aval in tensors]
        with default_settings(place.wide), jax.default_device(place.device):
            lowered = jax.jit(call).lower(*flat, *map(spec, others))
            self._compiled = compiled(lowered, fused=False)
        self._cross = list(map(crosses, lowered.out_info))  # pyright: ignore[reportArgumentType]
        self._all_cross = all(self._cross)
        self._token = self._cross.index(True) if any(self._cross) else None
        self._views = Views(tensors)
        self._specs = [(IN_TORCH[str(aval.dtype)], math.prod(aval.shape)) for aval in tensors]
        self.reads_addresses = self._on_cpu and all(math.prod(aval.shape) for aval in tensors)
        self._looks_for_addresses = self.reads_addresses and not any(orders)

    def __call__(self, tensors: Sequence[torch.Tensor], others: Sequence[ArrayLike]) -> Sequence[Result]:
        """Run to the end: on the CPU the tensors may be overwritten afterwards, elsewhere by what torch's stream does next.

        Returns tensors over results that nobody else holds, and as arrays what torch has no type for.
        """
        addresses = addresses_of(tensors, self._specs) if self._looks_for_addresses else None
        if addresses is not None:
            return self.at(addresses, others)
        return self._run(operands([x.detach() for x in tensors], self._orders), others)

    def at(self, addresses: Iterable[int], others: Sequence[ArrayLike]) -> Sequence[Result]:
        """The same of tensors that lie at these addresses, dense and in the order of dimensions given (`reads_addresses`)."""
        return self._run(self._views(addresses), others)

    def _run(self, flat: Sequence[ArrayLike], others: Sequence[ArrayLike]) -> Sequence[Result]:
        config = _config
        if not undisturbed(_settings(config)):
            with calmed(self._place.wide):
                found = self._compiled(*flat, *others)
            refuse_not_finite("jax_function", [(f"result {i}", x) for i, x in enumerate(found)])
        elif config.jax_enable_x64 != self._place.wide:
            with X64(self._place.wide):
                found = self._compiled(*flat, *others)
        else:
            found = self._compiled(*flat, *others)
        if self._token is None:
            jax.block_until_ready(found)
        elif self._on_cpu:
            found[self._token].block_until_ready()
        else:
            wait_for((found[self._token],))
        if self._all_cross:
            return results(found, self._on_cpu)
        return [results((x,), self._on_cpu)[0] if yes else x for x, yes in zip(found, self._cross, strict=True)]


def _unflattened(flat: jax.Array, aval: jax.ShapeDtypeStruct, order: Order) -> jax.Array:
    if order is None:
        return flat.reshape(aval.shape)
    return flat.reshape([aval.shape[d] for d in order]).transpose([order.index(d) for d in range(len(order))])


class Program:
    """A function of flat arrays, traced: first some tensors, in the order of dimensions given, then what is not a tensor.

    Args:
      function: of the arrays, to a sequence of arrays.
      tensors: their shapes and dtypes.
      others: shapes and dtypes of jax arrays, or Python floats and complex numbers, which are traced.
      place: where it runs.
      orders: for each tensor, the order in which its dimensions are contiguous; None where they are as they come.
    """

    def __init__(
        self,
        function: Function,
        tensors: Sequence[jax.ShapeDtypeStruct],
        others: Sequence[Spec],
        place: Place,
        orders: Sequence[Order] = (),
    ) -> None:
        self.place, self.tensors, self.others = place, list(tensors), list(others)
        self.orders = list(orders) or [None] * len(self.tensors)
        with default_settings(place.wide), jax.default_device(place.device):
            self.closed = jax.make_jaxpr(lambda *arrays: list(function(*arrays)))(*self.avals)
        self.outs = [_struct(v) for v in self.closed.jaxpr.outvars]
        self.outs_differ = list(map(differs, self.outs))  # of which outputs a gradient comes
        self.differentiable = any(self.outs_differ) and any(map(differs, self.tensors))
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    @property
    def avals(self) -> list[Spec]:
        return [*self.tensors, *self.others]

    def run(self, tensors: Sequence[torch.Tensor], others: Sequence[ArrayLike]) -> tuple[Result, ...]:
        """The outputs alone; nothing is kept."""
        return tuple(self.plain()(tensors, others)[: len(self.outs)])

    def plain(self) -> Call:
        """The call that gives the outputs alone."""
        return self._made.get("run") or self._once("run", self._plain)

    def recording(self, wanted: tuple[int, ...]) -> Recording:
        """The call that also keeps what the gradients of the wanted tensors need."""
        return self._made.get(wanted) or self._once(wanted, lambda: Recording(self, wanted))

    def pullback(self, wanted: tuple[int, ...], given: tuple[int, ...], needed: tuple[int, ...]) -> Program:
        """(needed tensors, gradients of the given outputs) -> gradients of the wanted tensors; computes all anew.

        Gradients are torch's: of complex numbers the conjugate of jax's
        (https://docs.pytorch.org/docs/stable/notes/autograd.html#autograd-for-complex-numbers).
        """
        tensors = [*(self.tensors[i] for i in needed), *(self.outs[i] for i in given)]

        def pull(*arrays: jax.Array) -> list[jax.Array]:
            values, grads, others = cut(arrays, len(needed), len(needed) + len(given))
            known = dict(zip(needed, values, strict=True))
            full = [known[i] if i in known else jnp.zeros(t.shape, t.dtype) for i, t in enumerate(self.tensors)]
            _, back, _ = self.vjp(wanted, [*full, *others])
            return self.pulled(back, given, grads)

        return self._once(("pull", wanted, given, needed), lambda: Program(pull, tensors, self.others, self.place))

    def pushforward(self, given: tuple[int, ...]) -> Program:
        """(tensors, tangents of the given ones) -> tangents of those outputs that have one."""
        count = len(self.tensors)

        def push(*arrays: jax.Array) -> list[jax.Array]:
            values, tangents, others = cut(arrays, count, count + len(given))
            function, chosen = self._of(given, [*values, *others])
            _, out, _ = jax.jvp(function, chosen, list(tangents), has_aux=True)
            return out

        tensors = [*self.tensors, *(self.tensors[i] for i in given)]
        return self._once(("push", given), lambda: Program(push, tensors, self.others, self.place))

    def batched(self, size: int, dims: tuple[int | None, ...]) -> Program:
        """Over one more dimension of the tensors where `dims` says; all outputs have it first, random keys cannot."""

        def shape(aval: jax.ShapeDtypeStruct, dim: int | None) -> jax.ShapeDtypeStruct:
            if dim is None:
                return aval
            return jax.ShapeDtypeStruct((*aval.shape[:dim], size, *aval.shape[dim:]), aval.dtype)

        out = [0 if crosses(aval) else None for aval in self.outs]
        function = jax.vmap(evaluated(self.closed), (*dims, *[None] * len(self.others)), out, axis_size=size)
        tensors = list(map(shape, self.tensors, dims))
        return self._once(("batch", size, dims), lambda: Program(function, tensors, self.others, self.place))

    def vjp(self, wanted: Sequence[int], arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], Function, list[jax.Array]]:
        """`jax.vjp` by the wanted tensors: outputs that have a gradient, the pullback, the other outputs."""
        function, chosen = self._of(wanted, arrays)
        return jax.vjp(function, *chosen, has_aux=True)

    def pulled(self, back: Function, given: Sequence[int], grads: Sequence[jax.Array]) -> list[jax.Array]:
        """Gradients of the wanted tensors, torch's, by those of the given outputs; of the other outputs they are zero."""
        known = dict(zip(given, grads, strict=True))
        outs = [(i, aval) for i, aval in enumerate(self.outs) if self.outs_differ[i]]
        return list(map(jnp.conj, back([jnp.conj(known[i]) if i in known else jnp.zeros(a.shape, a.dtype) for i, a in outs])))

    def _of(self, chosen: Sequence[int], arrays: Sequence[jax.Array]) -> tuple[Function, list[jax.Array]]:
        """As a function of the chosen arrays, to what has a gradient and what has none; and those arrays."""

        def function(*values: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            full = list(arrays)
            for i, value in zip(chosen, values, strict=True):
                full[i] = value
            outs = evaluated(self.closed)(*full)
            return [x for x, yes in zip(outs, self.outs_differ, strict=True) if yes], [
                x for x, yes in zip(outs, self.outs_differ, strict=True) if not yes
            ]

        return function, [arrays[i] for i in chosen]

    def _plain(self) -> Call:
        return Call(fresh(self.closed), self.tensors, self.others, self.place, self.orders)

    def _once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


class Recording:
    """A program that keeps residuals: what its outputs and their pullback have in common.

    A residual that is an input or an output is not kept a second time, and torch watches for changes of those; nor is
    what the backward makes anew of the inputs (`residuals`).

    needed: the tensors on which the residuals depend; `outputs`: the outputs that are residuals; `kept`: residuals that are
    neither; `rest`: those of them that torch has no type for. `forward` gives outputs, kept and rest in one list, which
    `ends` cuts. `saves_all_tensors`: all are needed. `without_gradient`: which outputs are tensors that have none.
    """

    def __init__(self, program: Program, wanted: tuple[int, ...]) -> None:
        self.program, self.wanted = program, wanted
        self._tree: PyTreeDef | None = None
        self._backward: dict[tuple[int, ...], Call] = {}
        self._lock = threading.Lock()
        place, count, width = program.place, len(program.tensors), len(program.outs)

        def record(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            outs, back, rest = program.vjp(wanted, arrays)
            leaves, self._tree = jax.tree_util.tree_flatten(back)
            outs, rest = iter(outs), iter(rest)
            return [next(outs if yes else rest) for yes in program.outs_differ], leaves

        with default_settings(place.wide), jax.default_device(place.device):
            closed = jax.make_jaxpr(record)(*program.avals)
        self._closed, found = closed, sources(closed, width)
        self._sources = found.of
        self.needed = tuple(i for i in reached(closed.jaxpr, closed.jaxpr.outvars[width:]) if i < count)
        self.outputs = tuple(sorted({i for kind, i in found.of if kind == "output"}))
        self.kept, self.rest = list(map(_struct, found.kept)), list(map(_struct, found.rest))
        at = {id(v): i for i, v in enumerate(closed.jaxpr.outvars)}
        self._anew = [at[id(v)] for v in found.anew]
        function = fresh(closed, range(width), [at[id(v)] for v in (*found.kept, *found.rest)])
        self.forward = Call(function, program.tensors, program.others, place, program.orders)
        self.ends = width, width + len(self.kept)
        self.saves_all_tensors = len(self.needed) == count
        self.without_gradient = [i for i, yes in enumerate(program.outs_differ) if not yes and crosses(program.outs[i])]

    def backward(self, given: tuple[int, ...], tensors: Sequence[torch.Tensor], arrays: Sequence[ArrayLike]) -> Sequence[Result]:
        """The gradients of the wanted tensors.

        Args:
          given: of which outputs there is a gradient; of the others it is zero.
          tensors: needed, outputs, kept, and the gradients given.
          arrays: rest, and the call's arguments that are no tensors.
        """
        call = self._backward.get(given) or self._compile(given)
        return call(tensors, arrays)

    def _compile(self, given: tuple[int, ...]) -> Call:
        program, count, width = self.program, len(self.program.tensors), len(self.program.others)
        tensors = [*(program.tensors[i] for i in self.needed), *(program.outs[i] for i in self.outputs), *self.kept]
        named = [("input", i) for i in self.needed] + [("output", i) for i in self.outputs]
        named += [("kept", i) for i in range(len(self.kept))] + [("grad", i) for i in given]
        named += [("rest", i) for i in range(len(self.rest))] + [("input", count + i) for i in range(width)]

        def back(*arrays: jax.Array) -> list[jax.Array]:
            place = dict(zip(named, arrays, strict=True))
            if self._anew:
                full = [place.get(("input", i), jnp.zeros(aval.shape, aval.dtype)) for i, aval in enumerate(program.tensors)]
                values = evaluated(self._closed)(*full, *(place["input", count + i] for i in range(width)))
                place |= {("anew", i): values[which] for i, which in enumerate(self._anew)}
            leaves = [which if kind == "constant" else place[kind, which] for kind, which in self._sources]
            return program.pulled(jax.tree_util.tree_unflatten(self._tree, leaves), given, [place["grad", i] for i in given])

        with self._lock:
            if given not in self._backward:
                tensors += [program.outs[i] for i in given]
                orders = [program.orders[i] for i in self.needed] + [None] * (len(tensors) - len(self.needed))
                self._backward[given] = Call(back, tensors, [*self.rest, *program.others], program.place, orders)
            return self._backward[given]


def _is_weak(aval: object) -> bool:
    return getattr(aval, "weak_type", False)  # random keys have no such thing


def _struct(variable: Atom) -> jax.ShapeDtypeStruct:
    aval = aval_of(variable)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def differs(aval: jax.ShapeDtypeStruct) -> bool:
    """Whether numbers of this type have gradients."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact)) and crosses(aval)


def cut(values: Sequence[_T], *at: int) -> list[Sequence[_T]]:
    """The values, cut at these positions."""
    return [values[start:end] for start, end in zip((0, *at), (*at, len(values)), strict=True)]


def evaluated(closed: ClosedJaxpr) -> Function:
    """The traced function; jax gives some constants as Python numbers, and here they are arrays."""
    call, outvars = jaxpr_as_fun(closed), closed.jaxpr.outvars
    return lambda *arrays: [
        x if hasattr(x, "dtype") else jnp.asarray(x, aval_of(v).dtype) for x, v in zip(call(*arrays), outvars, strict=True)
    ]


def fresh(closed: ClosedJaxpr, outs: Iterable[int] | None = None, kept: Sequence[int] = ()) -> Function:
    """The traced function, each of its outputs in memory of its own, whatever jax hands through; those in `kept` as they are."""
    outvars, outs = closed.jaxpr.outvars, range(len(closed.jaxpr.outvars)) if outs is None else outs
    seen = {id(v) for v in (*closed.jaxpr.invars, *closed.jaxpr.constvars)}
    shared = set()
    for i in outs:
        if isinstance(outvars[i], Literal) or id(outvars[i]) in seen:
            shared.add(i)
        seen.add(id(outvars[i]))

    def function(*arrays: jax.Array) -> list[jax.Array]:
        found = evaluated(closed)(*arrays)
        own = [jnp.copy(found[i]) if i in shared and crosses(found[i]) else found[i] for i in outs]
        return own + [found[i] for i in kept]

    return function
