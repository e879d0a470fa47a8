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
from bridge._interop.dlpack import order_torch_after
from bridge._interop.dtypes import TORCH_DTYPES, exists_in_torch
from bridge._ir.types import Atom, ClosedJaxpr, Literal, aval_of
from bridge._memory.call_arguments import TensorViews, as_call_arguments, results_as_tensors
from bridge._process import default_settings, enable_x64, has_default_settings, overridden_settings, raise_if_not_finite
from bridge._xla.compile import compile_lowered

from .fast_signature import can_view
from .residuals import input_dependencies, residual_sources

_config: Any = jax.config
_settings = attrgetter("jax_disable_jit", "jax_transfer_guard_host_to_device", "jax_debug_nans", "jax_debug_infs")
DimOrder = tuple[int, ...] | None
ArrayFunction = Callable[..., Any]
# An argument that is no tensor: its shape and dtype, or a Python number itself.
ArgumentSpec: TypeAlias = jax.ShapeDtypeStruct | complex
# A result: a jax array if torch does not have its dtype.
Result: TypeAlias = torch.Tensor | jax.Array
_T = TypeVar("_T")


class ExecutionTarget(NamedTuple):
    """The device of a program, and whether jax keeps 64-bit types in it."""

    device: Device
    keeps_64bit: bool


class CompiledCall:
    """A compiled function of tensors, whose dimensions are contiguous in given orders, and of other arguments."""

    def __init__(
        self,
        function: ArrayFunction,
        tensors: Sequence[jax.ShapeDtypeStruct],
        others: Sequence[ArgumentSpec],
        target: ExecutionTarget,
        orders: Sequence[DimOrder],
    ) -> None:
        self._target, self._dim_orders, self._on_cpu = target, list(orders), target.device.platform == "cpu"
        sharding = jax.sharding.SingleDeviceSharding(target.device)

        def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            given = list(map(_unflatten, arrays, tensors, orders))
            return tuple(function(*given, *arrays[len(given) :])) or (jnp.zeros(()),)  # one result at least, to wait for

        def spec(aval: ArgumentSpec) -> ArgumentSpec:
            if not isinstance(aval, jax.ShapeDtypeStruct):
                return aval
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=_is_weak(aval))

        flat = [jax.ShapeDtypeStruct((math.prod(aval.shape),), aval.dtype, sharding=sharding) for aval in tensors]
        with default_settings(target.keeps_64bit), jax.default_device(target.device):
            lowered = jax.jit(call).lower(*flat, *map(spec, others))
            self._compiled = compile_lowered(lowered, fuse_outputs=False)
        self._is_transferable = list(map(exists_in_torch, lowered.out_info))  # pyright: ignore[reportArgumentType]
        self._all_transferable = all(self._is_transferable)
        self._token_index = self._is_transferable.index(True) if any(self._is_transferable) else None
        self._views = TensorViews(tensors)
        self._tensor_specs = [(TORCH_DTYPES[str(aval.dtype)], math.prod(aval.shape)) for aval in tensors]
        self.takes_views = self._on_cpu and all(math.prod(aval.shape) for aval in tensors)
        self._may_view = self.takes_views and not any(orders)

    def __call__(self, tensors: Sequence[torch.Tensor], others: Sequence[ArrayLike]) -> Sequence[Result]:
        """Run the function. On the CPU it has ended when the call returns; on a GPU torch's stream waits for it.

        Returns:
          The results in memory that nothing else holds: tensors, and jax arrays for dtypes that torch does not have.
        """
        if self._may_view and can_view(tensors, self._tensor_specs):
            return self.call_with_views(tensors, others)
        return self._run(as_call_arguments([x.detach() for x in tensors], self._dim_orders), others)

    def call_with_views(self, tensors: Sequence[torch.Tensor], others: Sequence[ArrayLike]) -> Sequence[Result]:
        """Run the function on dense tensors with the given orders of dimensions. It needs `takes_views`.

        The caller has checked the storages, and holds them until the call returns.
        """
        return self._run(self._views(tensors), others)

    def _run(self, flat: Sequence[ArrayLike], others: Sequence[ArrayLike]) -> Sequence[Result]:
        config = _config
        if not has_default_settings(_settings(config)):
            with overridden_settings(self._target.keeps_64bit):
                found = self._compiled(*flat, *others)
            raise_if_not_finite("jax_function", [(f"result {i}", x) for i, x in enumerate(found)])
        elif config.jax_enable_x64 != self._target.keeps_64bit:
            with enable_x64(self._target.keeps_64bit):
                found = self._compiled(*flat, *others)
        else:
            found = self._compiled(*flat, *others)
        if self._token_index is None:
            jax.block_until_ready(found)
        elif self._on_cpu:
            found[self._token_index].block_until_ready()
        else:
            order_torch_after((found[self._token_index],))
        if self._all_transferable:
            return results_as_tensors(found, self._on_cpu)
        return [results_as_tensors((x,), self._on_cpu)[0] if yes else x for x, yes in zip(found, self._is_transferable, strict=True)]


def _unflatten(flat: jax.Array, aval: jax.ShapeDtypeStruct, order: DimOrder) -> jax.Array:
    if order is None:
        return flat.reshape(aval.shape)
    return flat.reshape([aval.shape[d] for d in order]).transpose([order.index(d) for d in range(len(order))])


class TracedFunction:
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
        function: ArrayFunction,
        tensor_specs: Sequence[jax.ShapeDtypeStruct],
        other_specs: Sequence[ArgumentSpec],
        target: ExecutionTarget,
        dim_orders: Sequence[DimOrder] = (),
    ) -> None:
        self.target, self.tensor_specs, self.other_specs = target, list(tensor_specs), list(other_specs)
        self.dim_orders = list(dim_orders) or [None] * len(self.tensor_specs)
        with default_settings(target.keeps_64bit), jax.default_device(target.device):
            self.closed_jaxpr = jax.make_jaxpr(lambda *arrays: list(function(*arrays)))(*self.avals)
        self.out_specs = [_shape_dtype(v) for v in self.closed_jaxpr.jaxpr.outvars]
        self.outs_are_differentiable = list(map(is_differentiable, self.out_specs))  # which outputs have a gradient
        self.has_gradient = any(self.outs_are_differentiable) and any(map(is_differentiable, self.tensor_specs))
        self._cache: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    @property
    def avals(self) -> list[ArgumentSpec]:
        return [*self.tensor_specs, *self.other_specs]

    def run(self, tensors: Sequence[torch.Tensor], others: Sequence[ArrayLike]) -> tuple[Result, ...]:
        """Return the outputs, and save no residuals."""
        return tuple(self.forward_call()(tensors, others)[: len(self.out_specs)])

    def forward_call(self) -> CompiledCall:
        """Return the compiled call that computes the outputs alone."""
        return self._cache.get("run") or self._get_or_make("run", self._compile_forward)

    def with_residuals(self, grad_argnums: tuple[int, ...]) -> ForwardWithResiduals:
        """Return the forward that also returns the residuals for the gradients of these tensors."""
        return self._cache.get(grad_argnums) or self._get_or_make(grad_argnums, lambda: ForwardWithResiduals(self, grad_argnums))

    def vjp_function(
        self, grad_argnums: tuple[int, ...], grad_out_indices: tuple[int, ...], needed_argnums: tuple[int, ...]
    ) -> TracedFunction:
        """Return the function (needed tensors, output gradients) -> input gradients. It computes the forward again.

        Gradients follow torch's convention: those of complex numbers are the conjugates of jax's
        (https://docs.pytorch.org/docs/stable/notes/autograd.html#autograd-for-complex-numbers).

        Args:
          grad_argnums: the positions of the tensors whose gradients are returned.
          grad_out_indices: the positions of the outputs whose gradients are passed; those of the others are zero.
          needed_argnums: the positions of the tensors that are passed; the gradients do not depend on the others.
        """
        tensors = [*(self.tensor_specs[i] for i in needed_argnums), *(self.out_specs[i] for i in grad_out_indices)]

        def pull(*arrays: jax.Array) -> list[jax.Array]:
            values, grads, others = split_at(arrays, len(needed_argnums), len(needed_argnums) + len(grad_out_indices))
            known = dict(zip(needed_argnums, values, strict=True))
            full = [known[i] if i in known else jnp.zeros(t.shape, t.dtype) for i, t in enumerate(self.tensor_specs)]
            _, back, _ = self.vjp(grad_argnums, [*full, *others])
            return self.torch_grads(back, grad_out_indices, grads)

        return self._get_or_make(
            ("pull", grad_argnums, grad_out_indices, needed_argnums), lambda: TracedFunction(pull, tensors, self.other_specs, self.target)
        )

    def jvp_function(self, tangent_argnums: tuple[int, ...]) -> TracedFunction:
        """Return the function (tensors, tangents of the tensors at `tangent_argnums`) -> tangents of the differentiable outputs."""
        count = len(self.tensor_specs)

        def push(*arrays: jax.Array) -> list[jax.Array]:
            values, tangents, others = split_at(arrays, count, count + len(tangent_argnums))
            function, chosen = self._as_function_of(tangent_argnums, [*values, *others])
            _, out, _ = jax.jvp(function, chosen, list(tangents), has_aux=True)
            return out

        tensors = [*self.tensor_specs, *(self.tensor_specs[i] for i in tangent_argnums)]
        return self._get_or_make(("push", tangent_argnums), lambda: TracedFunction(push, tensors, self.other_specs, self.target))

    def vmap_function(self, size: int, dims: tuple[int | None, ...]) -> TracedFunction:
        """Return the function under `jax.vmap`, over dimension `dims[i]` of tensor i; None: the tensor is not batched.

        Outputs have the batch dimension first. Outputs of dtypes that torch does not have, such as random keys, are not batched.
        """

        def shape(aval: jax.ShapeDtypeStruct, dim: int | None) -> jax.ShapeDtypeStruct:
            if dim is None:
                return aval
            return jax.ShapeDtypeStruct((*aval.shape[:dim], size, *aval.shape[dim:]), aval.dtype)

        out = [0 if exists_in_torch(aval) else None for aval in self.out_specs]
        function = jax.vmap(jaxpr_function(self.closed_jaxpr), (*dims, *[None] * len(self.other_specs)), out, axis_size=size)
        tensors = list(map(shape, self.tensor_specs, dims))
        return self._get_or_make(("batch", size, dims), lambda: TracedFunction(function, tensors, self.other_specs, self.target))

    def vjp(self, grad_argnums: Sequence[int], arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], ArrayFunction, list[jax.Array]]:
        """Apply `jax.vjp` with respect to the tensors at `grad_argnums`.

        Returns:
          The differentiable outputs, their VJP function, and the other outputs.
        """
        function, chosen = self._as_function_of(grad_argnums, arrays)
        return jax.vjp(function, *chosen, has_aux=True)

    def torch_grads(self, back: ArrayFunction, grad_out_indices: Sequence[int], grads: Sequence[jax.Array]) -> list[jax.Array]:
        """Return torch's input gradients from the output gradients `grads`. Gradients of outputs not in `grad_out_indices` are zero."""
        known = dict(zip(grad_out_indices, grads, strict=True))
        outs = [(i, aval) for i, aval in enumerate(self.out_specs) if self.outs_are_differentiable[i]]
        return list(map(jnp.conj, back([jnp.conj(known[i]) if i in known else jnp.zeros(a.shape, a.dtype) for i, a in outs])))

    def _as_function_of(self, argnums: Sequence[int], arrays: Sequence[jax.Array]) -> tuple[ArrayFunction, list[jax.Array]]:
        """Return a function of the arrays at `argnums`, with the others fixed, and these arrays.

        The function returns the differentiable outputs and the other outputs.
        """

        def function(*values: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            full = list(arrays)
            for i, value in zip(argnums, values, strict=True):
                full[i] = value
            outs = jaxpr_function(self.closed_jaxpr)(*full)
            return [x for x, yes in zip(outs, self.outs_are_differentiable, strict=True) if yes], [
                x for x, yes in zip(outs, self.outs_are_differentiable, strict=True) if not yes
            ]

        return function, [arrays[i] for i in argnums]

    def _compile_forward(self) -> CompiledCall:
        return CompiledCall(with_fresh_outputs(self.closed_jaxpr), self.tensor_specs, self.other_specs, self.target, self.dim_orders)

    def _get_or_make(self, key: Hashable, make: Callable[[], _T]) -> _T:
        with self._lock:
            if key not in self._cache:
                self._cache[key] = make()
            return self._cache[key]


class ForwardWithResiduals:
    """A compiled forward that also returns residuals, and the backward that reads them.

    A residual that is an input or an output is not saved a second time; torch's own check finds out whether it was changed. A residual that
    the backward rematerializes from the inputs is not saved at all (`residuals`).

    forward: the compiled call. It returns the outputs, `transferable` and `untransferable` in one list, which `split_points` splits.
    needed_argnums: the positions of the tensors on which the residuals depend; `saves_all_tensors`: whether these are all tensors.
    residual_out_indices: the positions of the outputs that are residuals.
    transferable, untransferable: the other residuals that are saved, as tensors and as jax arrays (dtypes that torch does not have).
    non_differentiable_outs: the positions of the outputs that are tensors without a gradient.
    """

    def __init__(self, program: TracedFunction, grad_argnums: tuple[int, ...]) -> None:
        self.program, self.grad_argnums = program, grad_argnums
        self._tree: PyTreeDef | None = None
        self._backward_calls: dict[tuple[int, ...], CompiledCall] = {}
        self._lock = threading.Lock()
        place, count, width = program.target, len(program.tensor_specs), len(program.out_specs)

        def record(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            outs, back, rest = program.vjp(grad_argnums, arrays)
            leaves, self._tree = jax.tree_util.tree_flatten(back)
            outs, rest = iter(outs), iter(rest)
            return [next(outs if yes else rest) for yes in program.outs_are_differentiable], leaves

        with default_settings(place.keeps_64bit), jax.default_device(place.device):
            closed = jax.make_jaxpr(record)(*program.avals)
        self._closed, found = closed, residual_sources(closed, width)
        self._sources = found.by_residual
        self.needed_argnums = tuple(i for i in input_dependencies(closed.jaxpr, closed.jaxpr.outvars[width:]) if i < count)
        self.residual_out_indices = tuple(sorted({i for kind, i in found.by_residual if kind == "output"}))
        self.transferable, self.untransferable = list(map(_shape_dtype, found.transferable)), list(map(_shape_dtype, found.untransferable))
        at = {id(v): i for i, v in enumerate(closed.jaxpr.outvars)}
        self._rematerialized = [at[id(v)] for v in found.rematerialized]
        function = with_fresh_outputs(closed, range(width), [at[id(v)] for v in (*found.transferable, *found.untransferable)])
        self.forward = CompiledCall(function, program.tensor_specs, program.other_specs, place, program.dim_orders)
        self.split_points = width, width + len(self.transferable)
        self.saves_all_tensors = len(self.needed_argnums) == count
        self.non_differentiable_outs = [
            i for i, yes in enumerate(program.outs_are_differentiable) if not yes and exists_in_torch(program.out_specs[i])
        ]

    def backward(self, grad_out_indices: tuple[int, ...], tensors: Sequence[torch.Tensor], arrays: Sequence[ArrayLike]) -> Sequence[Result]:
        """Return the gradients of the tensors at `grad_argnums`.

        Args:
          grad_out_indices: the positions of the outputs whose gradients are passed; those of the others are zero.
          tensors: the needed tensors, the outputs that are residuals, the transferable residuals, and the gradients.
          arrays: the untransferable residuals, and the arguments of the call that are no tensors.
        """
        call = self._backward_calls.get(grad_out_indices) or self._compile(grad_out_indices)
        return call(tensors, arrays)

    def _compile(self, grad_out_indices: tuple[int, ...]) -> CompiledCall:
        program, count, width = self.program, len(self.program.tensor_specs), len(self.program.other_specs)
        tensors = [
            *(program.tensor_specs[i] for i in self.needed_argnums),
            *(program.out_specs[i] for i in self.residual_out_indices),
            *self.transferable,
        ]
        named = [("input", i) for i in self.needed_argnums] + [("output", i) for i in self.residual_out_indices]
        named += [("transferable", i) for i in range(len(self.transferable))] + [("grad", i) for i in grad_out_indices]
        named += [("untransferable", i) for i in range(len(self.untransferable))] + [("input", count + i) for i in range(width)]

        def back(*arrays: jax.Array) -> list[jax.Array]:
            place = dict(zip(named, arrays, strict=True))
            if self._rematerialized:
                full = [place.get(("input", i), jnp.zeros(aval.shape, aval.dtype)) for i, aval in enumerate(program.tensor_specs)]
                values = jaxpr_function(self._closed)(*full, *(place["input", count + i] for i in range(width)))
                place |= {("rematerialized", i): values[which] for i, which in enumerate(self._rematerialized)}
            leaves = [which if kind == "constant" else place[kind, which] for kind, which in self._sources]
            return program.torch_grads(
                jax.tree_util.tree_unflatten(self._tree, leaves), grad_out_indices, [place["grad", i] for i in grad_out_indices]
            )

        with self._lock:
            if grad_out_indices not in self._backward_calls:
                tensors += [program.out_specs[i] for i in grad_out_indices]
                orders = [program.dim_orders[i] for i in self.needed_argnums] + [None] * (len(tensors) - len(self.needed_argnums))
                self._backward_calls[grad_out_indices] = CompiledCall(
                    back, tensors, [*self.untransferable, *program.other_specs], program.target, orders
                )
            return self._backward_calls[grad_out_indices]


def _is_weak(aval: object) -> bool:
    return getattr(aval, "weak_type", False)  # random keys have no weak_type


def _shape_dtype(variable: Atom) -> jax.ShapeDtypeStruct:
    aval = aval_of(variable)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def is_differentiable(aval: jax.ShapeDtypeStruct) -> bool:
    """Whether values of this dtype have gradients in torch."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact)) and exists_in_torch(aval)


def split_at(values: Sequence[_T], *at: int) -> list[Sequence[_T]]:
    """Split the values at these positions."""
    return [values[start:end] for start, end in zip((0, *at), (*at, len(values)), strict=True)]


def jaxpr_function(closed: ClosedJaxpr) -> ArrayFunction:
    """Return the jaxpr as a function. It returns arrays also where jax returns Python numbers, for some constants."""
    call, outvars = jaxpr_as_fun(closed), closed.jaxpr.outvars
    return lambda *arrays: [
        x if hasattr(x, "dtype") else jnp.asarray(x, aval_of(v).dtype) for x, v in zip(call(*arrays), outvars, strict=True)
    ]


def with_fresh_outputs(closed: ClosedJaxpr, outs: Iterable[int] | None = None, kept: Sequence[int] = ()) -> ArrayFunction:
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
        found = jaxpr_function(closed)(*arrays)
        own = [jnp.copy(found[i]) if i in shared and exists_in_torch(found[i]) else found[i] for i in outs]
        return own + [found[i] for i in kept]

    return function
