"""A traced JAX function of flat arrays, and the functions derived from it: the compiled call, its VJP, its JVP and its `vmap`.

The user's function runs once for each signature; all else comes from its jaxpr. On the CPU a call reads tensors in place and has ended when
it returns, so the tensors may change afterwards. Each result has its own memory: an argument that the function returns, or a value that it
returns twice, is copied.
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
# An argument that is no tensor: its shape and dtype, or a Python number itself.
Spec: TypeAlias = jax.ShapeDtypeStruct | complex
# A result: a jax array if torch does not have its dtype.
Result: TypeAlias = torch.Tensor | jax.Array
_T = TypeVar("_T")


class Place(NamedTuple):
    """The device of a program, and whether jax keeps 64-bit types in it."""

    device: Device
    wide: bool


class Call:
    """A compiled function of tensors, whose dimensions are contiguous in given orders, and of other arguments."""

    def __init__(
        self, function: Function, tensors: Sequence[jax.ShapeDtypeStruct], others: Sequence[Spec], place: Place, orders: Sequence[Order]
    ) -> None:
        self._place, self._orders, self._on_cpu = place, list(orders), place.device.platform == "cpu"
        sharding = jax.sharding.SingleDeviceSharding(place.device)

        def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            given = list(map(_unflattened, arrays, tensors, orders))
            return tuple(function(*given, *arrays[len(given) :])) or (jnp.zeros(()),)  # one result at least, to wait for

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
        """Run the function. On the CPU it has ended when the call returns; on a GPU torch's stream waits for it.

        Returns:
          The results in memory that nothing else holds: tensors, and jax arrays for dtypes that torch does not have.
        """
        addresses = addresses_of(tensors, self._specs) if self._looks_for_addresses else None
        if addresses is not None:
            return self.at(addresses, others)
        return self._run(operands([x.detach() for x in tensors], self._orders), others)

    def at(self, addresses: Iterable[int], others: Sequence[ArrayLike]) -> Sequence[Result]:
        """Run the function on dense tensors at these addresses, with the given orders of dimensions. It needs `reads_addresses`."""
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
    """A traced function of flat arrays: first the tensors, then the other arguments.

    Args:
      function: takes the arrays, and returns a sequence of arrays.
      tensor_specs: shapes and dtypes of the tensors.
      other_specs: shapes and dtypes of jax arrays, or Python floats and complex numbers, which are traced too.
      target: the device, and whether 64-bit types are kept.
      dim_orders: for each tensor the order in which its dimensions are contiguous; None for row-major order.
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
        self.outs_differ = list(map(differs, self.outs))  # which outputs have a gradient
        self.differentiable = any(self.outs_differ) and any(map(differs, self.tensors))
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    @property
    def avals(self) -> list[Spec]:
        return [*self.tensors, *self.others]

    def run(self, tensors: Sequence[torch.Tensor], others: Sequence[ArrayLike]) -> tuple[Result, ...]:
        """Return the outputs, and save no residuals."""
        return tuple(self.plain()(tensors, others)[: len(self.outs)])

    def plain(self) -> Call:
        """Return the compiled call that computes the outputs alone."""
        return self._made.get("run") or self._once("run", self._plain)

    def recording(self, wanted: tuple[int, ...]) -> Recording:
        """Return the forward that also returns the residuals for the gradients of these tensors."""
        return self._made.get(wanted) or self._once(wanted, lambda: Recording(self, wanted))

    def pullback(self, wanted: tuple[int, ...], given: tuple[int, ...], needed: tuple[int, ...]) -> Program:
        """Return the function (needed tensors, output gradients) -> input gradients. It computes the forward again.

        Gradients follow torch's convention: those of complex numbers are the conjugates of jax's
        (https://docs.pytorch.org/docs/stable/notes/autograd.html#autograd-for-complex-numbers).

        Args:
          grad_argnums: the positions of the tensors whose gradients are returned.
          grad_out_indices: the positions of the outputs whose gradients are passed; those of the others are zero.
          needed_argnums: the positions of the tensors that are passed; the gradients do not depend on the others.
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
        """Return the function (tensors, tangents of the tensors at `tangent_argnums`) -> tangents of the differentiable outputs."""
        count = len(self.tensors)

        def push(*arrays: jax.Array) -> list[jax.Array]:
            values, tangents, others = cut(arrays, count, count + len(given))
            function, chosen = self._of(given, [*values, *others])
            _, out, _ = jax.jvp(function, chosen, list(tangents), has_aux=True)
            return out

        tensors = [*self.tensors, *(self.tensors[i] for i in given)]
        return self._once(("push", given), lambda: Program(push, tensors, self.others, self.place))

    def batched(self, size: int, dims: tuple[int | None, ...]) -> Program:
        """Return the function under `jax.vmap`, over dimension `dims[i]` of tensor i; None: the tensor is not batched.

        Outputs have the batch dimension first. Outputs of dtypes that torch does not have, such as random keys, are not batched.
        """

        def shape(aval: jax.ShapeDtypeStruct, dim: int | None) -> jax.ShapeDtypeStruct:
            if dim is None:
                return aval
            return jax.ShapeDtypeStruct((*aval.shape[:dim], size, *aval.shape[dim:]), aval.dtype)

        out = [0 if crosses(aval) else None for aval in self.outs]
        function = jax.vmap(evaluated(self.closed), (*dims, *[None] * len(self.others)), out, axis_size=size)
        tensors = list(map(shape, self.tensors, dims))
        return self._once(("batch", size, dims), lambda: Program(function, tensors, self.others, self.place))

    def vjp(self, wanted: Sequence[int], arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], Function, list[jax.Array]]:
        """Apply `jax.vjp` with respect to the tensors at `grad_argnums`.

        Returns:
          The differentiable outputs, their VJP function, and the other outputs.
        """
        function, chosen = self._of(wanted, arrays)
        return jax.vjp(function, *chosen, has_aux=True)

    def pulled(self, back: Function, given: Sequence[int], grads: Sequence[jax.Array]) -> list[jax.Array]:
        """Return torch's input gradients from the output gradients `grads`. Gradients of outputs not in `grad_out_indices` are zero."""
        known = dict(zip(given, grads, strict=True))
        outs = [(i, aval) for i, aval in enumerate(self.outs) if self.outs_differ[i]]
        return list(map(jnp.conj, back([jnp.conj(known[i]) if i in known else jnp.zeros(a.shape, a.dtype) for i, a in outs])))

    def _of(self, chosen: Sequence[int], arrays: Sequence[jax.Array]) -> tuple[Function, list[jax.Array]]:
        """Return a function of the arrays at `argnums`, with the others fixed, and these arrays.

        The function returns the differentiable outputs and the other outputs.
        """

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
    """A compiled forward that also returns residuals, and the backward that reads them.

    A residual that is an input or an output is not saved a second time; torch's own check finds out whether it was changed. A residual that
    the backward rematerializes from the inputs is not saved at all (`residuals`).

    forward: the compiled call. It returns the outputs, `transferable` and `untransferable` in one list, which `split_points` splits.
    needed_argnums: the positions of the tensors on which the residuals depend; `saves_all_tensors`: whether these are all tensors.
    residual_out_indices: the positions of the outputs that are residuals.
    transferable, untransferable: the other residuals that are saved, as tensors and as jax arrays (dtypes that torch does not have).
    non_differentiable_outs: the positions of the outputs that are tensors without a gradient.
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
        """Return the gradients of the tensors at `grad_argnums`.

        Args:
          grad_out_indices: the positions of the outputs whose gradients are passed; those of the others are zero.
          tensors: the needed tensors, the outputs that are residuals, the transferable residuals, and the gradients.
          arrays: the untransferable residuals, and the arguments of the call that are no tensors.
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
    return getattr(aval, "weak_type", False)  # random keys have no weak_type


def _struct(variable: Atom) -> jax.ShapeDtypeStruct:
    aval = aval_of(variable)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def differs(aval: jax.ShapeDtypeStruct) -> bool:
    """Whether values of this dtype have gradients in torch."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact)) and crosses(aval)


def cut(values: Sequence[_T], *at: int) -> list[Sequence[_T]]:
    """Split the values at these positions."""
    return [values[start:end] for start, end in zip((0, *at), (*at, len(values)), strict=True)]


def evaluated(closed: ClosedJaxpr) -> Function:
    """Return the jaxpr as a function. It returns arrays also where jax returns Python numbers, for some constants."""
    call, outvars = jaxpr_as_fun(closed), closed.jaxpr.outvars
    return lambda *arrays: [
        x if hasattr(x, "dtype") else jnp.asarray(x, aval_of(v).dtype) for x, v in zip(call(*arrays), outvars, strict=True)
    ]


def fresh(closed: ClosedJaxpr, outs: Iterable[int] | None = None, kept: Sequence[int] = ()) -> Function:
    """Return the jaxpr as a function whose outputs at `outs` have their own memory. The outputs at `kept` follow, without a copy.

    jax would return an argument, or a value that is returned twice, in the same memory.
    """
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
