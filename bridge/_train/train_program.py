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
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from bridge import _logs
from bridge._compiler.plan import UpdateArguments, UpdatePlan, abstract_args
from bridge._compiler.spec import LeafSpec, flatten, unflatten
from bridge._compiler.update import update
from bridge._ir.queries import properties_of
from bridge._ir.types import Jaxpr, PyTree
from bridge._names import path_name
from bridge._process import default_promotion, default_settings, x64
from bridge._runtime import cache
from bridge._tracing.jax_calls import callbacks_in_32_bits
from bridge._tracing.materialize import barrier
from bridge._tracing.promotion import torch_dtype
from bridge._xla.compile import bytes_accessed, compile_lowered, scratch_bytes
from bridge._xla.compile_options import train_options

from .loss_jaxpr import LossJaxpr
from .passes.float32_sums import sum_in_float32
from .passes.materialize_operands import materialize_operands
from .passes.matmul_layout import arrange_matmuls

_NO_STATS = np.zeros(2)
_BYTES_PER_ELEMENT = 28.0  # bytes that the update of one element moves


ArraysByKind: TypeAlias = Mapping[str, Sequence[jax.Array]]  # arguments of a program by their kind


class LossAndGrads(NamedTuple):
    """The loss, the aux outputs, and by name all new buffers and the gradients of the trained parameters that the loss depends on."""

    loss: jax.Array
    aux: list[jax.Array]
    buffers: dict[str, jax.Array]
    grads: dict[str, jax.Array]


class TensorSource(NamedTuple):
    """The argument of a program that holds one tensor of the module.

    kind: "params" and "kept" as in the plan, "buffers" that are donated, "copied" buffers that are copied back, "read" for all else
      that the program reads: flat arrays or buckets.
    position: the position among the arguments of this kind.
    bucket_row: the row of a bucket; None if the argument is the tensor alone.
    spec: the tensor's own shape.
    """

    kind: str
    position: int
    bucket_row: int | None
    spec: LeafSpec

    def read(self, columns: ArraysByKind) -> jax.Array:
        buffer = columns[self.kind][self.position]
        flat = buffer if self.bucket_row is None else buffer[self.bucket_row, : math.prod(self.spec.shape)]
        return unflatten(flat, self.spec)


@dataclass(frozen=True)
class TrainProgramSpec:
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

    loss_jaxpr: LossJaxpr
    plan: UpdatePlan
    params_with_grad: tuple[tuple[tuple[str, int | None], ...], ...]
    tensor_sources: Mapping[str, TensorSource]
    read_signatures: tuple[tuple[tuple[int, ...], str], ...] = ()
    accumulation_steps: int = 1
    grad_accumulators: tuple[tuple[str, str], ...] = ()
    loss_arg_index: int | None = None
    module_names: Mapping[str, str] = field(default_factory=dict)

    def changed_buffers(self, column: str) -> list[str]:
        """Return the names of the buffers of one kind that the program returns, in the order of the arguments."""
        mine = [name for name in self.loss_jaxpr.changed_buffers if self.tensor_sources[name].kind == column]
        return sorted(mine, key=lambda name: self.tensor_sources[name].position)

    def loss_and_grads(self, columns: ArraysByKind, batch: Sequence[jax.Array], seed: jax.Array) -> LossAndGrads:
        """Return the loss, the aux outputs, all new buffers and the gradients of the trained parameters that the loss depends on."""
        values = {name: given.read(columns) for name, given in self.tensor_sources.items()}
        buffers = [values[name] for name in self.loss_jaxpr.buffers]

        def loss_of(live: Mapping[str, jax.Array]) -> tuple[jax.Array, list[list[jax.Array]]]:
            loss, *rest = self.loss_jaxpr([live.get(name, values[name]) for name in self.loss_jaxpr.params], buffers, batch, seed)
            return loss, rest

        live = {name: values[name] for leaves in self.params_with_grad for name, _ in leaves if name in self.loss_jaxpr.params_reached}
        (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(live)
        # torch's gradient of a real loss is the conjugate of jax's.
        grads = {name: jnp.conj(g) if jnp.iscomplexobj(g) else g for name, g in grads.items()}
        return LossAndGrads(loss, aux, dict(zip(self.loss_jaxpr.buffers, after, strict=True)), grads)

    def loss_at(self, columns: ArraysByKind, batch: Sequence[jax.Array], seed: jax.Array, line_search_params: optax.Params) -> jax.Array:
        """Return the loss with the trained parameters replaced by those of a tree with the optimizer's names."""
        values = {name: given.read(columns) for name, given in self.tensor_sources.items()}
        for path, x in jax.tree_util.tree_flatten_with_path(line_search_params)[0]:
            name = self.module_names[path_name(path)]
            values[name] = x.astype(self.tensor_sources[name].spec.dtype)
        with x64():
            params, buffers = ([values[name] for name in names] for names in (self.loss_jaxpr.params, self.loss_jaxpr.buffers))
            loss, _, _ = self.loss_jaxpr(params, buffers, batch, seed)
        return loss

    def leaf_grads(self, grads: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Return the gradient of each leaf as `update` takes it: flat, or the rows of a bucket with zeros where a row has no gradient."""
        return [
            self._leaf_grad(leaf.buffer[0], leaf.grad_dtype, leaves, grads)
            for leaf, leaves in zip(self.plan.leaves, self.params_with_grad, strict=True)
        ]

    def _leaf_grad(
        self, shape: tuple[int, ...], dtype: str, leaves: Sequence[tuple[str, int | None]], grads: Mapping[str, jax.Array]
    ) -> jax.Array:
        own = {row: flatten(grads[name].astype(dtype), self.tensor_sources[name].spec) for name, row in leaves}
        if len(shape) == 1:
            return own[None]
        count, width = shape
        zeros = jnp.zeros(width, dtype)
        return jnp.stack([jnp.pad(own[i], (0, width - own[i].size)) if i in own else zeros for i in range(count)])


_line_search_loss: contextvars.ContextVar[Callable[[optax.Params], jax.Array] | None] = contextvars.ContextVar("trial", default=None)


@contextmanager
def _line_search(task: TrainProgramSpec, columns: ArraysByKind, batch: Sequence[jax.Array], seed: jax.Array) -> Iterator[None]:
    """Make `LOSS_OF_PARAMS` the loss of this program while its update is traced."""
    before = _line_search_loss.set(functools.partial(task.loss_at, columns, batch, seed))
    try:
        yield
    finally:
        _line_search_loss.reset(before)


def _loss_of_params(params: optax.Params, **_: object) -> jax.Array:
    loss, leaves = _line_search_loss.get(), jax.tree.leaves(params)
    wide = any(x.dtype in (np.float64, np.complex128) for x in leaves)
    # Outside a program only dependencies are traced: the value depends on all parameters.
    value = sum(jnp.sum(jnp.real(x)) for x in leaves) if loss is None else loss(params)
    return jnp.asarray(value).astype(np.float64 if wide else np.float32)


# The loss as a function of the trained parameters, for transformations with a line search. All programs share this object.
LOSS_OF_PARAMS = jax.tree_util.Partial(_loss_of_params)


def _train_step(task: TrainProgramSpec, donated: Sequence[list[jax.Array]], arguments: Sequence[Any]) -> tuple[PyTree, ...]:
    """Return new parameters, state and buffers, then results without a donated buffer.

    These are scalars, copied-back arrays, statistics, metrics, the loss, aux outputs and a token.
    """
    params, state, buffers = donated
    scalars, kept, copied, read, batch, sums, seed, masks, numbers, offsets, live, row_sizes, further, *_ = arguments
    columns = {"params": params, "kept": kept, "buffers": buffers, "copied": copied, "read": read}
    loss, aux, after, grads = task.loss_and_grads(columns, batch, seed)
    for (name, _), others in zip(task.grad_accumulators, sums, strict=True):
        others = others.reshape(task.tensor_sources[name].spec.shape)
        total = others + grads[name].astype(others.dtype) if name in grads else others
        grads[name] = total / task.accumulation_steps
    if task.loss_arg_index is not None:
        further = [loss.astype(x.dtype) if i == task.loss_arg_index else x for i, x in enumerate(further)]
    grads = task.leaf_grads(grads)
    if task.plan.device.platform == "cpu":
        grads = barrier(grads)  # otherwise XLA copies a donated parameter that the gradient of its layer's input reads
    with _line_search(task, columns, batch, seed):
        stats = cast(jax.Array, _NO_STATS)
        given = UpdateArguments(params, state, scalars, kept, [], masks, numbers, offsets, live, row_sizes, further, [], stats, [])
        with default_promotion():
            new = update(task.plan, given, grads, fused=False)
    new_params, new_state, new_scalars, new_kept, _, own_stats, metrics, [token] = new
    return (
        new_params,
        new_state,
        _flat_buffers(task, after, "buffers"),
        new_scalars,
        new_kept,
        _flat_buffers(task, after, "copied"),
        own_stats,
        metrics,
        loss,
        aux,
        token,
    )


def _accumulate_step(task: TrainProgramSpec, donated: Sequence[list[jax.Array]], arguments: Sequence[Any]) -> tuple[PyTree, ...]:
    """Return new accumulators and buffers, then results without a donated buffer: copied-back buffers, loss, aux, a token."""
    sums, buffers = donated
    params, kept, copied, read, batch, seed, first, _ = arguments
    columns = {"params": params, "kept": kept, "buffers": buffers, "copied": copied, "read": read}
    loss, aux, after, grads = task.loss_and_grads(columns, batch, seed)
    new = []
    for (name, _), before in zip(task.grad_accumulators, sums, strict=True):
        before = jnp.where(first, jnp.zeros_like(before), before)
        new.append(before + grads[name].reshape(-1).astype(before.dtype) if name in grads else before)
    return new, _flat_buffers(task, after, "buffers"), _flat_buffers(task, after, "copied"), loss, aux, jnp.where(first, 1.0, 0.0)


def _flat_buffers(task: TrainProgramSpec, buffers: Mapping[str, jax.Array], column: str) -> list[jax.Array]:
    """Return the new buffers of one kind as they lie in memory."""
    specs = [(task.tensor_sources[name].spec, buffers[name]) for name in task.changed_buffers(column)]
    return [flatten(x, spec).astype(spec.dtype) for spec, x in specs]


class TrainProgram:
    """A compiled train program: one call with the update, or, if it accumulates gradients, one call without.

    has_callback: whether the program calls Python, so that it may fail half-way.
    num_programs: 1, as of an `UpdateExecutable` that is not outlined.

    Args:
      spec: the static description.
      updates: whether it updates.
      cls_name: the class of the train step and of the optimizer, for logs.
    """

    num_programs = 1

    def __init__(self, spec: TrainProgramSpec, updates: bool, cls_name: str = "train step") -> None:
        self.spec, self.plan, self.updates = spec, spec.plan, updates
        donated, arguments = _abstract_arguments(spec, updates)
        with default_settings():
            function = functools.partial(_train_step if updates else _accumulate_step, spec)
            # jax would drop an unused argument. A buffer that is only written would then get new memory.
            jitted = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
            traced = jitted(function).trace(donated, arguments)
            better = sum_in_float32(traced.jaxpr.jaxpr)
            better = materialize_operands(arrange_matmuls(better)) if self.plan.device.platform == "cpu" else better
            better = callbacks_in_32_bits(better) if spec.loss_jaxpr.uses_32bit_jax else better
            if better is not traced.jaxpr.jaxpr:
                traced = jitted(_as_function(better, traced)).trace(donated, arguments)
            self.jaxpr = traced.jaxpr
            subject = _logs.subject(cls_name, self.plan.device)
            _logs.JAXPR.info("%s: jaxpr of the train program\n%s", subject, self.jaxpr)
            properties = properties_of(self.jaxpr)
            self.has_callback = properties.has_callback
            self.loss_dtype = torch_dtype(traced.out_info[-3])
            options = train_options(self.plan.device, properties)
            self.call = compile_lowered(traced.lower(), False, options)
            if _logs.is_on(_logs.HLO):
                _logs.HLO.info("%s: optimized HLO of the train program\n%s", subject, self.call.as_text())
        self.elements = bytes_accessed(self.call) / _BYTES_PER_ELEMENT
        cache.count_compilation()

    @property
    def bytes_accessed(self) -> float:
        return bytes_accessed(self.call)

    @property
    def scratch_bytes(self) -> int | None:
        return scratch_bytes(self.call)


def _as_function(jaxpr: Jaxpr, traced: jax.stages.Traced) -> Callable[..., PyTree]:
    """Return a rewritten jaxpr as a function with the same arguments and results."""
    evaluate, results = jaxpr_as_fun(ClosedJaxpr(jaxpr, traced.jaxpr.consts)), jax.tree.structure(traced.out_info)

    def train_step(*arguments: PyTree) -> PyTree:
        return results.unflatten(evaluate(*jax.tree.leaves(arguments)))

    return train_step


def _abstract_arguments(task: TrainProgramSpec, updates: bool) -> tuple[PyTree, PyTree]:
    plan = task.plan
    sharding = jax.sharding.SingleDeviceSharding(plan.device)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
    own = abstract_args(plan)
    columns = {name: [array((math.prod(s.shape),), s.dtype) for s in _specs(task, name)] for name in ("buffers", "copied")}
    read = [array(*signature) for signature in task.read_signatures]
    sums = [array((math.prod(task.tensor_sources[name].spec.shape),), dtype) for name, dtype in task.grad_accumulators]
    seed, first = jax.ShapeDtypeStruct((), np.int64), jax.ShapeDtypeStruct((), np.bool_)
    batch = task.loss_jaxpr.batch
    if not updates:
        return (sums, columns["buffers"]), (own.params, own.copied_back, columns["copied"], read, batch, seed, first, own.stream_event)
    of_update = own.masks, own.hyperparams, own.row_offsets, own.active_rows, own.row_sizes, own.extra
    arguments = own.scalar_vectors, own.copied_back, columns["copied"], read, batch, sums, seed, *of_update, first, own.stream_event
    return (own.params, own.state, columns["buffers"]), arguments


def _specs(task: TrainProgramSpec, column: str) -> list[LeafSpec]:
    return [task.tensor_sources[name].spec for name in task.changed_buffers(column)]
