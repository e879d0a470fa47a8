"""Forward pass, backward pass and update as one program with donated buffers, for `torch_api.JaxTrainStep`.

The loss is traced once, to a jaxpr over all parameters and buffers of a module, the batch and a seed (`LossJaxpr`). A
`TrainProgram` differentiates it only with respect to the trained parameters and passes the gradients to
`bridge._compiler.update`. Only new values leave the program.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from bridge._compiler.plan import Plan, abstract
from bridge._compiler.spec import Spec, flatten, unflatten
from bridge._compiler.update import update
from bridge._ir.queries import properties_of
from bridge._ir.types import Jaxpr, PyTree
from bridge._names import path_name
from bridge._process import default_promotion, default_settings, x64
from bridge._runtime import cache
from bridge._tracing.jax_calls import callbacks_in_32_bits
from bridge._tracing.materialize import together
from bridge._tracing.promotion import torch_dtype
from bridge._xla.compile import bytes_accessed, compiled
from bridge._xla.compile_options import of_training

from .loss_jaxpr import Forward
from .passes.float32_sums import summed_in_float32
from .passes.materialize_operands import stored_for_products
from .passes.matmul_layout import arranged

_NOTHING_MEASURED = np.zeros(2)
_ELEMENT = 28.0  # bytes that the update of one element moves


Columns: TypeAlias = Mapping[str, Sequence[jax.Array]]  # arguments of a program by their kind


class Differentiated(NamedTuple):
    """The loss, the aux outputs, and by name all new buffers and the gradients of the trained parameters that the loss depends on."""

    loss: jax.Array
    aux: list[jax.Array]
    buffers: dict[str, jax.Array]
    grads: dict[str, jax.Array]


class Given(NamedTuple):
    """The argument of a program that holds one tensor of the module.

    kind: "params" and "kept" as in the plan, "buffers" that are donated, "copied" buffers that are copied back, "read" for all else
      that the program reads: flat arrays or buckets.
    position: the position among the arguments of this kind.
    bucket_row: the row of a bucket; None if the argument is the tensor alone.
    spec: the tensor's own shape.
    """

    column: str
    at: int
    row: int | None
    spec: Spec

    def value(self, columns: Columns) -> jax.Array:
        buffer = columns[self.column][self.at]
        flat = buffer if self.row is None else buffer[self.row, : math.prod(self.spec.shape)]
        return unflatten(flat, self.spec)


@dataclass(frozen=True)
class Task:
    """The static description of one train program.

    loss_jaxpr: the traced loss.
    plan: the plan of the update.
    params_with_grad: for each leaf of the plan, the names of its parameters with a gradient; for a bucket, with their rows.
    tensor_sources: the source of each parameter and buffer of the module.
    read_signatures: shape and dtype of each argument of the kind "read".
    accumulation_steps: the number of calls over which gradients are accumulated.
    grad_accumulators: the parameters that have an accumulator, with its dtype.
    loss_arg_index: the position of the loss among the extra arguments of the plan; None if it is not passed.
    module_names: from the optimizer's name of a parameter to the module's, if a transformation may evaluate the loss (`LOSS_OF_PARAMS`).
    """

    forward: Forward
    plan: Plan
    live: tuple[tuple[tuple[str, int | None], ...], ...]
    tensors: Mapping[str, Given]
    read: tuple[tuple[tuple[int, ...], str], ...] = ()
    accumulate: int = 1
    sums: tuple[tuple[str, str], ...] = ()
    loss_at: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def changed(self, column: str) -> list[str]:
        """Return the names of the buffers of one kind that the program returns, in the order of the arguments."""
        mine = [name for name in self.forward.changed if self.tensors[name].column == column]
        return sorted(mine, key=lambda name: self.tensors[name].at)

    def differentiated(self, columns: Columns, batch: Sequence[jax.Array], seed: jax.Array) -> Differentiated:
        """Return the loss, the aux outputs, all new buffers and the gradients of the trained parameters that the loss depends on."""
        values = {name: given.value(columns) for name, given in self.tensors.items()}
        buffers = [values[name] for name in self.forward.buffers]

        def loss_of(live: Mapping[str, jax.Array]) -> tuple[jax.Array, list[list[jax.Array]]]:
            loss, *rest = self.forward([live.get(name, values[name]) for name in self.forward.params], buffers, batch, seed)
            return loss, rest

        live = {name: values[name] for leaves in self.live for name, _ in leaves if name in self.forward.reaches}
        (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(live)
        # torch's gradient of a real loss is the conjugate of jax's.
        grads = {name: jnp.conj(g) if jnp.iscomplexobj(g) else g for name, g in grads.items()}
        return Differentiated(loss, aux, dict(zip(self.forward.buffers, after, strict=True)), grads)

    def loss_at_trial(self, columns: Columns, batch: Sequence[jax.Array], seed: jax.Array, trial: optax.Params) -> jax.Array:
        """Return the loss with the trained parameters replaced by those of a tree with the optimizer's names."""
        values = {name: given.value(columns) for name, given in self.tensors.items()}
        for path, x in jax.tree_util.tree_flatten_with_path(trial)[0]:
            name = self.names[path_name(path)]
            values[name] = x.astype(self.tensors[name].spec.dtype)
        with x64():
            params, buffers = ([values[name] for name in names] for names in (self.forward.params, self.forward.buffers))
            loss, _, _ = self.forward(params, buffers, batch, seed)
        return loss

    def gathered(self, grads: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Return the gradient of each leaf as `update` takes it: flat, or the rows of a bucket with zeros where a row has no gradient."""
        return [
            self._rows(leaf.buffer[0], leaf.gradient_dtype, leaves, grads) for leaf, leaves in zip(self.plan.leaves, self.live, strict=True)
        ]

    def _rows(
        self, shape: tuple[int, ...], dtype: str, leaves: Sequence[tuple[str, int | None]], grads: Mapping[str, jax.Array]
    ) -> jax.Array:
        own = {row: flatten(grads[name].astype(dtype), self.tensors[name].spec) for name, row in leaves}
        if len(shape) == 1:
            return own[None]
        count, width = shape
        zeros = jnp.zeros(width, dtype)
        return jnp.stack([jnp.pad(own[i], (0, width - own[i].size)) if i in own else zeros for i in range(count)])


_trial: contextvars.ContextVar[Callable[[optax.Params], jax.Array] | None] = contextvars.ContextVar("trial", default=None)


@contextmanager
def _searching(task: Task, columns: Columns, batch: Sequence[jax.Array], seed: jax.Array) -> Iterator[None]:
    """Make `LOSS_OF_PARAMS` the loss of this program while its update is traced."""
    before = _trial.set(functools.partial(task.loss_at_trial, columns, batch, seed))
    try:
        yield
    finally:
        _trial.reset(before)


def _value(params: optax.Params, **_: object) -> jax.Array:
    loss, leaves = _trial.get(), jax.tree.leaves(params)
    wide = any(x.dtype in (np.float64, np.complex128) for x in leaves)
    # Outside a program only dependencies are traced: the value depends on all parameters.
    value = sum(jnp.sum(jnp.real(x)) for x in leaves) if loss is None else loss(params)
    return jnp.asarray(value).astype(np.float64 if wide else np.float32)


# The loss as a function of the trained parameters, for transformations with a line search. All programs share this object.
VALUE_FN = jax.tree_util.Partial(_value)


def _train(task: Task, donated: Sequence[list[jax.Array]], arguments: Sequence[Any]) -> tuple[PyTree, ...]:
    """Return new parameters, state and buffers, then results without a donated buffer: scalars, copied-back arrays, loss, aux, a token."""
    params, state, buffers = donated
    scalars, kept, copied, read, batch, sums, seed, masks, numbers, offsets, live, further, *_ = arguments
    columns = {"params": params, "kept": kept, "buffers": buffers, "copied": copied, "read": read}
    loss, aux, after, grads = task.differentiated(columns, batch, seed)
    for (name, _), others in zip(task.sums, sums, strict=True):
        others = others.reshape(task.tensors[name].spec.shape)
        total = others + grads[name].astype(others.dtype) if name in grads else others
        grads[name] = total / task.accumulate
    if task.loss_at is not None:
        further = [loss.astype(x.dtype) if i == task.loss_at else x for i, x in enumerate(further)]
    grads = task.gathered(grads)
    if task.plan.device.platform == "cpu":
        grads = together(grads)  # otherwise XLA copies a donated parameter that the gradient of its layer's input reads
    with _searching(task, columns, batch, seed):
        plain = params, state, scalars, kept, grads, masks, numbers, offsets, live, further
        with default_promotion():
            new = update(task.plan, *plain, [], _NOTHING_MEASURED, fused=False)
    new_params, new_state, new_scalars, new_kept, _, [token] = new
    return new_params, new_state, _flat(task, after, "buffers"), new_scalars, new_kept, _flat(task, after, "copied"), loss, aux, token


def _accumulate(task: Task, donated: Sequence[list[jax.Array]], arguments: Sequence[Any]) -> tuple[PyTree, ...]:
    """Return new accumulators and buffers, then results without a donated buffer: copied-back buffers, loss, aux, a token."""
    sums, buffers = donated
    params, kept, copied, read, batch, seed, first, _ = arguments
    columns = {"params": params, "kept": kept, "buffers": buffers, "copied": copied, "read": read}
    loss, aux, after, grads = task.differentiated(columns, batch, seed)
    new = []
    for (name, _), before in zip(task.sums, sums, strict=True):
        before = jnp.where(first, jnp.zeros_like(before), before)
        new.append(before + grads[name].reshape(-1).astype(before.dtype) if name in grads else before)
    return new, _flat(task, after, "buffers"), _flat(task, after, "copied"), loss, aux, jnp.where(first, 1.0, 0.0)


def _flat(task: Task, buffers: Mapping[str, jax.Array], column: str) -> list[jax.Array]:
    """Return the new buffers of one kind as they lie in memory."""
    specs = [(task.tensors[name].spec, buffers[name]) for name in task.changed(column)]
    return [flatten(x, spec).astype(spec.dtype) for spec, x in specs]


class Program:
    """A compiled train program: one call with the update, or, if it accumulates gradients, one call without.

    has_callback: whether the program calls Python, so that it may fail half-way.
    """

    def __init__(self, task: Task, updates: bool) -> None:
        self.task, self.plan, self.updates = task, task.plan, updates
        donated, arguments = _abstract_arguments(task, updates)
        with default_settings():
            function = functools.partial(_train if updates else _accumulate, task)
            # jax would drop an unused argument. A buffer that is only written would then get new memory.
            jitted = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
            traced = jitted(function).trace(donated, arguments)
            better = summed_in_float32(traced.jaxpr.jaxpr)
            better = stored_for_products(arranged(better)) if self.plan.device.platform == "cpu" else better
            better = callbacks_in_32_bits(better) if task.forward.narrow else better
            if better is not traced.jaxpr.jaxpr:
                traced = jitted(_as(better, traced)).trace(donated, arguments)
            self.jaxpr = traced.jaxpr
            properties = properties_of(self.jaxpr)
            self.calls_back = properties.has_callback
            self.loss = torch_dtype(traced.out_info[-3])
            options = of_training(self.plan.device, properties)
            self.call = compiled(traced.lower(), False, options)
        self.elements = bytes_accessed(self.call) / _ELEMENT
        cache.count_compilation()

    @property
    def bytes_accessed(self) -> float:
        return bytes_accessed(self.call)


def _as(jaxpr: Jaxpr, traced: jax.stages.Traced) -> Callable[..., PyTree]:
    """Return a rewritten jaxpr as a function with the same arguments and results."""
    evaluate, results = jaxpr_as_fun(ClosedJaxpr(jaxpr, traced.jaxpr.consts)), jax.tree.structure(traced.out_info)

    def train_step(*arguments: PyTree) -> PyTree:
        return results.unflatten(evaluate(*jax.tree.leaves(arguments)))

    return train_step


def _abstract_arguments(task: Task, updates: bool) -> tuple[PyTree, PyTree]:
    plan = task.plan
    sharding = jax.sharding.SingleDeviceSharding(plan.device)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
    params, state, scalars, kept, _, masks, numbers, offsets, live, further, _, _, after = abstract(plan)
    columns = {name: [array((math.prod(s.shape),), s.dtype) for s in _specs(task, name)] for name in ("buffers", "copied")}
    read = [array(*signature) for signature in task.read]
    sums = [array((math.prod(task.tensors[name].spec.shape),), dtype) for name, dtype in task.sums]
    seed, first = jax.ShapeDtypeStruct((), np.int64), jax.ShapeDtypeStruct((), np.bool_)
    batch = task.forward.batch
    if not updates:
        return (sums, columns["buffers"]), (params, kept, columns["copied"], read, batch, seed, first, after)
    arguments = scalars, kept, columns["copied"], read, batch, sums, seed, masks, numbers, offsets, live, further, first, after
    return (params, state, columns["buffers"]), arguments


def _specs(task: Task, column: str) -> list[Spec]:
    return [task.tensors[name].spec for name in task.changed(column)]
