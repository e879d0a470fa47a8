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
from itertools import islice
from operator import methodcaller
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from . import openmp, programs, step
from ._compat.torch import foreach_copy_
from ._compiler.plan import Plan, abstract
from ._compiler.spec import Spec, flatten, unflatten
from ._compiler.update import update
from ._interop.dlpack import behind_torch
from ._ir.queries import properties_of, reachable_inputs
from ._memory.call_arguments import operands, results
from ._memory.jax_buffers import Memory, leave_held, readable, taken
from ._memory.scalar_vectors import Number
from ._names import path_name
from ._process import calm, default_promotion, default_settings, x64
from ._tracing.jax_calls import callbacks_in_32_bits, in_32_bits
from ._tracing.materialize import together
from ._tracing.promotion import torch_dtype
from ._xla.compile import bytes_accessed, compiled
from ._xla.compile_options import of_training
from .half_sums import summed_in_float32
from .products import arranged
from .readers import stored_for_products

_NOTHING_MEASURED = np.zeros(2)
_is_deleted = methodcaller("is_deleted")
_ELEMENT = 28.0  # bytes that the update of an element moves


class Forward:
    """A traced loss, and what its program tells: `function(params, buffers, batch, seed)` to (loss, aux, buffers), all but the loss lists.

    function: traced with 64-bit types on.
    params, buffers: the shapes and dtypes of the module's tensors by name; `function` gets lists in their order.
    batch: arrays, or anything that has shape and dtype.
    narrow: whether code in jax in it sees types of 32 bits nevertheless.

    reaches: the parameters that the loss can have a gradient of. changed: the buffers that come back as others. random:
    whether the seed matters.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: Mapping[str, Spec],
        buffers: Mapping[str, Spec],
        batch: Sequence[Any],
        narrow: bool = False,
    ) -> None:
        self.function = function
        self.params, self.buffers = dict(params), dict(buffers)
        self.batch = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batch]
        given = [[jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs.values()] for specs in (params, buffers)]
        seed = jax.ShapeDtypeStruct((), np.int64)
        with default_settings():
            traced: Any = jax.make_jaxpr(function, return_shape=True)(*given, self.batch, seed)
        closed, (_, aux, _) = traced
        closed = closed.replace(jaxpr=in_32_bits(closed.jaxpr)) if narrow else closed
        self.aux, self.narrow = len(aux), narrow
        jaxpr: Any = closed.jaxpr
        self.calls_back = properties_of(jaxpr).has_callback
        count = len(self.params)
        self.reaches = frozenset(np.array(list(self.params))[sorted(i for i in reachable_inputs(jaxpr, [0]) if i < count)].tolist())
        own, new = jaxpr.invars[count : count + len(self.buffers)], jaxpr.outvars[1 + self.aux :]
        self.changed = tuple(name for name, before, after in zip(self.buffers, own, new, strict=True) if before is not after)
        self.random = len(jaxpr.invars) - 1 in reachable_inputs(jaxpr, range(len(jaxpr.outvars)), through_constants=True)
        self._evaluate: Any = jaxpr_as_fun(closed)
        self.jaxpr = closed

    def __call__(self, params: Sequence[Any], buffers: Sequence[Any], batch: Sequence[Any], seed: Any) -> tuple[Any, list[Any], list[Any]]:
        loss, *rest = self._evaluate(*params, *buffers, *batch, seed)
        return loss, rest[: self.aux], rest[self.aux :]


class Given(NamedTuple):
    """Where a program finds one tensor of the module.

    `column` of its arguments: "params" and "kept" as the plan has them, "buffers" that are donated, "copied" buffers that
    are not, "read": everything else, flat or a pack; `at` in there, `row` of a pack. `spec`: the tensor's own shape.
    """

    column: str
    at: int
    row: int | None
    spec: Spec

    def value(self, columns: Mapping[str, Sequence[Any]]) -> Any:
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

    def differentiated(self, columns: Mapping[str, Sequence[Any]], batch: Sequence[Any], seed: Any) -> tuple[Any, list[Any], Any, Any]:
        """Loss, aux, and by name all buffers and the gradients of the live parameters that the loss reaches."""
        values = {name: given.value(columns) for name, given in self.tensors.items()}
        buffers = [values[name] for name in self.forward.buffers]

        def loss_of(live: Mapping[str, Any]) -> tuple[Any, Any]:
            loss, *rest = self.forward([live.get(name, values[name]) for name in self.forward.params], buffers, batch, seed)
            return loss, rest

        live = {name: values[name] for leaves in self.live for name, _ in leaves if name in self.forward.reaches}
        (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(live)
        # torch's gradient of a real loss points uphill; jax's is its conjugate.
        grads = {name: jnp.conj(g) if jnp.iscomplexobj(g) else g for name, g in grads.items()}
        return loss, aux, dict(zip(self.forward.buffers, after, strict=True)), grads

    def loss_at_trial(self, columns: Mapping[str, Sequence[Any]], batch: Sequence[Any], seed: Any, trial: Any) -> Any:
        """The loss with the parameters in a tree by the optimizer's names in the places of the live ones."""
        values = {name: given.value(columns) for name, given in self.tensors.items()}
        for path, x in jax.tree_util.tree_flatten_with_path(trial)[0]:
            name = self.names[path_name(path)]
            values[name] = x.astype(self.tensors[name].spec.dtype)
        with x64():
            params, buffers = ([values[name] for name in names] for names in (self.forward.params, self.forward.buffers))
            loss, _, _ = self.forward(params, buffers, batch, seed)
        return loss

    def gathered(self, grads: Mapping[str, Any]) -> list[Any]:
        """The gradient of each leaf of the plan, as `update` takes them: flat, or the rows of a pack, with zeros where nothing is live."""
        return [
            self._rows(leaf.buffer[0], leaf.gradient_dtype, leaves, grads) for leaf, leaves in zip(self.plan.leaves, self.live, strict=True)
        ]

    def _rows(self, shape: tuple[int, ...], dtype: str, leaves: Sequence[tuple[str, int | None]], grads: Mapping[str, Any]) -> Any:
        own = {row: flatten(grads[name].astype(dtype), self.tensors[name].spec) for name, row in leaves}
        if len(shape) == 1:
            return own[None]
        count, width = shape
        zeros = jnp.zeros(width, dtype)
        return jnp.stack([jnp.pad(own[i], (0, width - own[i].size)) if i in own else zeros for i in range(count)])


_trial: contextvars.ContextVar[Any] = contextvars.ContextVar("trial", default=None)


@contextmanager
def _searching(task: Task, columns: Mapping[str, Sequence[Any]], batch: Sequence[Any], seed: Any) -> Iterator[None]:
    """While an update is traced in here, `VALUE_FN` is the loss of this task."""
    before = _trial.set(functools.partial(task.loss_at_trial, columns, batch, seed))
    try:
        yield
    finally:
        _trial.reset(before)


def _value(params: Any, **_: Any) -> Any:
    loss, leaves = _trial.get(), jax.tree.leaves(params)
    wide = any(x.dtype in (np.float64, np.complex128) for x in leaves)
    # Outside a program it is only asked what depends on what: here all on all.
    value = sum(jnp.sum(jnp.real(x)) for x in leaves) if loss is None else loss(params)
    return jnp.asarray(value).astype(np.float64 if wide else np.float32)


# The loss as a function of the live parameters, for transformations that search along a line; the same for all programs.
VALUE_FN = jax.tree_util.Partial(_value)


def _train(task: Task, donated: Sequence[Any], arguments: Sequence[Any]) -> Any:
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


def _accumulate(task: Task, donated: Sequence[Any], arguments: Sequence[Any]) -> Any:
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


def _flat(task: Task, buffers: Mapping[str, Any], column: str) -> list[Any]:
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
            self.call: Any = compiled(traced.lower(), False, options)
        self.elements = bytes_accessed(self.call) / _ELEMENT
        programs.count_compilation()

    @property
    def bytes_accessed(self) -> float:
        return bytes_accessed(self.call)


def _as(jaxpr: Any, traced: Any) -> Callable[..., Any]:
    """Another program of the same arguments and results as a function."""
    evaluate, results = jaxpr_as_fun(ClosedJaxpr(jaxpr, traced.jaxpr.consts)), jax.tree.structure(traced.out_info)

    def train_step(*arguments: Any) -> Any:
        return results.unflatten(evaluate(*jax.tree.leaves(arguments)))

    return train_step


def _abstract_arguments(task: Task, updates: bool) -> tuple[Any, Any]:
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


class Arrays(NamedTuple):
    """What one call of a program is given beside its launch.

    buffers: the memories of those that are donated. copied, read: as of `Given`, arrays or memories. sums: memories.
    written: the tensors over memories that the program changes.
    """

    buffers: Sequence[Memory]
    copied: Sequence[torch.Tensor]
    copied_order: Sequence[Any]
    read: Sequence[Any]
    batch: Sequence[Any]
    sums: Sequence[Memory]
    seed: Any
    numbers: np.ndarray
    further: Sequence[Any]
    first: bool
    written: Sequence[torch.Tensor]


class Outcome(NamedTuple):
    """What a call leaves behind: the loss as a tensor, aux; `moved` as of `step.Outcome`."""

    loss: torch.Tensor
    aux: list[Any]
    moved: bool


def run(program: Program, launch: step.Launch, arrays: Arrays, landed: list[Any]) -> Outcome:
    """One call, and a wait for its results, which are then in the tensors. To be called within a transaction; `landed` as of `step.run`."""
    room = launch.room + sum(t.nbytes + step.APART for t in arrays.copied if program.plan.device.platform == "cpu")
    flight, new_kept, new_scalars = step.flight(program.plan.device, launch, room, program.calls_back, landed), [], []
    copied_loss = Number(program.loss) if program.plan.device.platform == "cpu" else None
    with flight, calm():
        params = [leaf.memory for leaf in launch.inplace]
        kept = launch.kept_operands(launch.kept) if launch.kept else []
        copied = operands(arrays.copied, arrays.copied_order) if arrays.copied else []
        read = [readable(x) if isinstance(x, Memory) else x for x in arrays.read]
        for cells in launch.scalars:
            cells.collect()
        if launch.mirrored and program.updates:
            foreach_copy_(launch.mirrors, launch.mirrored)
        after = [] if program.plan.device.platform == "cpu" else [behind_torch(program.plan.device)]
        parts = (params, launch.state, arrays.buffers) if program.updates else (arrays.sums, arrays.buffers)
        memories = [memory for part in parts for memory in part]
        others = list(map(readable, arrays.sums if program.updates else params))
        first = np.bool_(arrays.first)
        if (
            program.plan.device.platform == "cpu"
            and openmp.pause
            and program.elements >= openmp.ELEMENTS_A_THREAD * torch.get_num_threads()
        ):
            openmp.pause(openmp.SOFT)
        old = taken(memories)
        left = iter(old)
        own = tuple(list(islice(left, len(part))) for part in parts)
        if program.updates:
            rest = launch.masks, arrays.numbers, launch.offsets, launch.live, list(arrays.further), first, after
            scalars = [cells.read() for cells in launch.scalars]
            arguments = scalars, kept, copied, read, list(arrays.batch), others, arrays.seed, *rest
            *donated, new_scalars, new_kept, new_copied, loss, aux, token = program.call(own, arguments)
        else:
            arguments = others, kept, copied, read, list(arrays.batch), arrays.seed, first, after
            *donated, new_copied, loss, aux, token = program.call(own, arguments)
        if not all(map(_is_deleted, old)):
            leave_held(memories, old)
        arrived = [array for part in donated for array in part]
        for memory, array in zip(memories, arrived, strict=True):
            memory.array = array
        own = old = left = None  # to let go of what was donated takes a while, in which the program runs
        numbers = launch.scalars if program.updates else (), new_scalars
        if copied_loss is not None:
            numbers = [*numbers[0], copied_loss], [*new_scalars, loss]
        into = [*(launch.kept if new_kept else ()), *arrays.copied]
        order = [*(launch.kept_order if new_kept else ()), *arrays.copied_order]
        mirrors = (launch.mirrored, launch.mirrors) if program.updates else ((), ())
        flight.landing.append(([token], memories, arrived, numbers, (into, order, [*new_kept, *new_copied], *mirrors)))
        torch.autograd.graph.increment_version(arrays.written)
    loss = results([loss], False)[0] if copied_loss is None else copied_loss.tensor
    return Outcome(loss, aux, flight.moved)
