"""Forward, backward and update as one donated program: what `torch_api.JaxTrainStep` runs.

A loss is traced once, to a jaxpr over all parameters and buffers of a module, the batch and a seed (`Forward`). It is
differentiated with respect to the live parameters alone, whose gradients go straight into `bridge._compiler.update`; nothing but
the new values leaves the program (`Program`).
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
_ELEMENT = 28.0  # bytes that the update of an element moves


Columns: TypeAlias = Mapping[str, Sequence[jax.Array]]  # arguments of a program by name


class Differentiated(NamedTuple):
    """The loss and aux of a traced loss, and by name all new buffers and the gradients of the live parameters that it reaches."""

    loss: jax.Array
    aux: list[jax.Array]
    buffers: dict[str, jax.Array]
    grads: dict[str, jax.Array]


class Given(NamedTuple):
    """Where a program finds one tensor of the module.

    `column` of its arguments: "params" and "kept" as the plan has them, "buffers" that are donated, "copied" buffers that
    are not, "read": everything else, flat or a pack; `at` in there, `row` of a pack. `spec`: the tensor's own shape.
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
    """All that is static about one program.

    live: for each leaf of the plan the names of its live parameters, with their rows where it is a pack.
    tensors: of each parameter and buffer of the module.
    read: the shape and dtype of each array in that column.
    accumulate: over how many calls gradients are summed up, in `sums`: the parameters that have one, with its dtype.
    loss_at: the position, among the further arguments of the plan, at which the loss itself is passed; None for nowhere.
    names: what the optimizer calls a parameter, and what the module does, where a transformation may ask for the loss (`VALUE_FN`).
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
        """The names of the buffers that come back in a column, in its order."""
        mine = [name for name in self.forward.changed if self.tensors[name].column == column]
        return sorted(mine, key=lambda name: self.tensors[name].at)

    def differentiated(self, columns: Columns, batch: Sequence[jax.Array], seed: jax.Array) -> Differentiated:
        """Loss, aux, and by name all buffers and the gradients of the live parameters that the loss reaches."""
        values = {name: given.value(columns) for name, given in self.tensors.items()}
        buffers = [values[name] for name in self.forward.buffers]

        def loss_of(live: Mapping[str, jax.Array]) -> tuple[jax.Array, list[list[jax.Array]]]:
            loss, *rest = self.forward([live.get(name, values[name]) for name in self.forward.params], buffers, batch, seed)
            return loss, rest

        live = {name: values[name] for leaves in self.live for name, _ in leaves if name in self.forward.reaches}
        (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(live)
        # torch's gradient of a real loss points uphill; jax's is its conjugate.
        grads = {name: jnp.conj(g) if jnp.iscomplexobj(g) else g for name, g in grads.items()}
        return Differentiated(loss, aux, dict(zip(self.forward.buffers, after, strict=True)), grads)

    def loss_at_trial(self, columns: Columns, batch: Sequence[jax.Array], seed: jax.Array, trial: optax.Params) -> jax.Array:
        """The loss with the parameters in a tree by the optimizer's names in the places of the live ones."""
        values = {name: given.value(columns) for name, given in self.tensors.items()}
        for path, x in jax.tree_util.tree_flatten_with_path(trial)[0]:
            name = self.names[path_name(path)]
            values[name] = x.astype(self.tensors[name].spec.dtype)
        with x64():
            params, buffers = ([values[name] for name in names] for names in (self.forward.params, self.forward.buffers))
            loss, _, _ = self.forward(params, buffers, batch, seed)
        return loss

    def gathered(self, grads: Mapping[str, jax.Array]) -> list[jax.Array]:
        """The gradient of each leaf of the plan, as `update` takes them: flat, or the rows of a pack, with zeros where nothing is live."""
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
    """While an update is traced in here, `VALUE_FN` is the loss of this task."""
    before = _trial.set(functools.partial(task.loss_at_trial, columns, batch, seed))
    try:
        yield
    finally:
        _trial.reset(before)


def _value(params: optax.Params, **_: object) -> jax.Array:
    loss, leaves = _trial.get(), jax.tree.leaves(params)
    wide = any(x.dtype in (np.float64, np.complex128) for x in leaves)
    # Outside a program it is only asked what depends on what: here all on all.
    value = sum(jnp.sum(jnp.real(x)) for x in leaves) if loss is None else loss(params)
    return jnp.asarray(value).astype(np.float64 if wide else np.float32)


# The loss as a function of the live parameters, for transformations that search along a line; the same for all programs.
VALUE_FN = jax.tree_util.Partial(_value)


def _train(task: Task, donated: Sequence[list[jax.Array]], arguments: Sequence[Any]) -> tuple[PyTree, ...]:
    """New parameters, state and buffers, then what has no memory of its own: kept leaves, copied buffers, loss, aux, a token."""
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
        grads = together(grads)  # else a donated parameter is copied that the gradient of its layer's input reads
    with _searching(task, columns, batch, seed):
        plain = params, state, scalars, kept, grads, masks, numbers, offsets, live, further
        with default_promotion():
            new = update(task.plan, *plain, [], _NOTHING_MEASURED, fused=False)
    new_params, new_state, new_scalars, new_kept, _, [token] = new
    return new_params, new_state, _flat(task, after, "buffers"), new_scalars, new_kept, _flat(task, after, "copied"), loss, aux, token


def _accumulate(task: Task, donated: Sequence[list[jax.Array]], arguments: Sequence[Any]) -> tuple[PyTree, ...]:
    """New sums of gradients and buffers, then what has no memory of its own: copied buffers, loss, aux, a token."""
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
    """The new buffers of a column as they lie in memory."""
    specs = [(task.tensors[name].spec, buffers[name]) for name in task.changed(column)]
    return [flatten(x, spec).astype(spec.dtype) for spec, x in specs]


class Program:
    """A compiled task: one call with an update or, of one that accumulates, one without.

    Whether a call of Python is in there (`calls_back`) says whether it may fail half-way.
    """

    def __init__(self, task: Task, updates: bool) -> None:
        self.task, self.plan, self.updates = task, task.plan, updates
        donated, arguments = _abstract_arguments(task, updates)
        with default_settings():
            function = functools.partial(_train if updates else _accumulate, task)
            # An argument that is not used would be dropped, and what replaces it (a buffer that is only written) lie elsewhere.
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
    """Another program of the same arguments and results as a function."""
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
