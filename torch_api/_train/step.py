"""`JaxTrainStep`: forward, backward and the masked update of a torch module as one XLA program."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import methodcaller
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
import torch

from bridge import _process
from bridge._compat.torch import OPT_CALLED
from bridge._compiler.plan import Plan
from bridge._compiler.spec import GRADIENTS, NO_EXTRA, Extra, Same
from bridge._interop.dlpack import device_of, to_jax, to_torch
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.types import PyTree
from bridge._memory import adoption, allocation, jax_buffers
from bridge._memory.call_arguments import operands
from bridge._memory.jax_buffers import lost_like
from bridge._process import looks_for_nan, not_traced, refuse_not_finite, x64
from bridge._runtime.transaction import Transaction
from bridge._train import call, train_program
from bridge._warnings import CompilationWarning, stack_level
from torch_api._params.record import Leaf
from torch_api._step.bound_executable import Block, Launch
from torch_api._step.extra_args import Arguments, are_wide
from torch_api._step.launch_cache import Launches
from torch_api._step.recompile_reasons import CacheInfo
from torch_api.optimizer import OptaxOptimizer

from .arguments import (
    Parts,
    PerCallInput,
    ReadArray,
    check_arguments,
    check_fit,
    check_readable,
    check_whole,
    refuse_autocast,
    refuse_keywords,
)
from .batch import OWNER, Batch
from .loss import TracedForward, traced_loss
from .module_guard import Watch

_is_deleted = methodcaller("is_deleted")
_NO_SEED = np.int64(0)
# After this many compiled programs a warning says what to change.
_MANY = 9
_AGAIN = object()
_Result = TypeVar("_Result")


class Ready(NamedTuple):
    """A program with everything that one kind of call needs: the bound executable of the update, and the arrays of the other tensors.

    For donated_buffers, in_place_tensors, copied_buffers, copied_dim_orders, frozen_inputs and per_call_inputs see `ModuleTensorSources`.
    imported_arrays: the arrays in `frozen_inputs`. grad_accumulators: sums of gradients, if several calls make one update. params_reached:
    names of the trained parameters that the loss depends on.
    """

    program: train_program.Program
    launch: Launch
    buffers: list[jax_buffers.Memory]
    in_place: list[torch.Tensor]
    copied: list[torch.Tensor]
    copied_order: list[tuple[int, ...] | None]
    read: list[ReadArray]
    imported: list[jax.Array]
    looked_at: list[PerCallInput]
    sums: list[jax_buffers.Memory]
    names: list[str]


class JaxTrainStep:
    """A training step of a torch module as one compiled program: forward, backward and update.

    `loss = train_step(*batch)` runs forward, backward, the optimizer's update (with its mask, max_grad_norm, EMA and master weights) and
    the update of buffers. It writes into the memory of the parameters, state and buffers that torch sees. All state is the optimizer's, so
    calls may be mixed with `loss.backward(); optimizer.step()`, schedulers and checkpoints in any order.

    Args:
      module: a module on one device. Its parameters that require grad must be the optimizer's, and the optimizer's must be the module's.
        Freeze parameters by the optimizer's mask or by `requires_grad=False`. A frozen parameter's gradient is not computed.
      loss_fn: `loss_fn(model, *batch)`, in torch operations or in JAX operations on `model(x)`. It returns the loss, a real scalar. Python
        runs it once for each batch signature: the structure, shapes and dtypes of the batch, each int, bool and string in it, and the
        modules' plain attributes (`training`, `p` of a dropout).
      optimizer: an optimizer of torch_api. A transformation that takes extra arguments gets `value`, the loss, and `value_fn`, the loss as
        a function of the trained parameters (for L-BFGS and line searches), unless the call gives them.
      accumulate: the number of calls for one update. The last of these calls updates with the mean of their gradients. The others add their
        gradients up, in donated memory, in float32 for half types. Learning rates are read at the call that updates.
      has_aux: whether loss_fn returns `(loss, aux)`. aux is any pytree; its arrays are returned as tensors.

    A call returns the loss of its batch, a 0-d tensor without graph, or `(loss, aux)`. `p.grad` is neither read nor written. A parameter
    that the loss does not depend on, by the traced program, stays as it is, as in torch where its grad is None. Random operations draw from
    a key that each call takes from torch's default generator (`torch.manual_seed`). They repeat from run to run, but differ from eager
    torch's. Batch tensors on the CPU are read without a copy. Floats in the batch are traced, as 0-d tensors. A call inside torch.autocast
    raises, because the casts would have no effect on a traced program.

    The optimizer's hooks run around each update. Forward hooks of modules run when the loss is traced. Gradient hooks do not run.

    Raises:
      TypeError, ValueError: the module, loss or batch cannot be trained this way, see docs/errors.md. Parameters and state are unchanged.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss_fn: Callable[..., PyTree],
        optimizer: OptaxOptimizer,
        accumulate: int = 1,
        has_aux: bool = False,
    ) -> None:
        check_arguments(module, loss_fn, optimizer, accumulate)
        self.module, self.loss_fn, self.optimizer = module, loss_fn, optimizer
        self.accumulate, self.has_aux = accumulate, has_aux
        self._launches: Launches | None = None  # the optimizer's cache for which everything is bound
        self._forwards: dict[Hashable, TracedForward] = {}
        self._programs: dict[Hashable, train_program.Program] = {}
        self._sums: dict[str, jax_buffers.Memory] = {}
        self._pending, self._summed = 0, frozenset()
        # Which call updates is decided before its hooks run. So with several calls for one update, calls of other threads wait.
        self._turn: AbstractContextManager[object] = threading.RLock() if accumulate > 1 else nullcontext()
        self._hits = self._misses = self._compilations = 0
        self._loss_like: jax.Array | None = None
        with optimizer._transaction():
            self._look()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{OWNER} cannot be copied or pickled: its programs work on the memory of this module and optimizer. Copy the module, and make "
            "an optimizer and a train step for the copy; what to save are both state_dicts."
        )

    @property
    def pending(self) -> int:
        """The number of calls that have added up gradients since the last update."""
        return self._pending

    def cache_info(self) -> CacheInfo:
        """Return how many calls found their program in the cache, and how many programs were used and compiled."""
        return CacheInfo(self._hits, self._misses, len(self._programs), self._compilations)

    @not_traced
    def __call__(self, *batch: PyTree, **extra_args: PyTree) -> Any:
        """Run one step on this batch. `extra_args` are extra arguments of the transformation, as in `optimizer.step`."""
        refuse_autocast()
        if extra_args:
            are_taken = any(rule.takes_extra for rule in self.optimizer._rules.values())
            refuse_keywords(self.loss_fn, extra_args, are_taken, bool(batch))
        if self.optimizer._exchange.inside:
            self.optimizer._exchange.refuse(OWNER)
        _process.refuse_fork()  # before the lock, which another thread may have held at the fork
        result = _AGAIN
        while result is _AGAIN:  # a hook may have called the train step
            with self._turn:
                if self._pending + 1 >= self.accumulate:
                    result = _hooked(self.optimizer, self._step, batch, extra_args, True)
                else:
                    result = self._step(batch, extra_args, False)
        return result

    def flush(self, **extra_args: PyTree) -> None:
        """Update with the mean of the gradients of the `pending` calls, if there are any, for example at the end of an epoch."""
        with self._turn, self.optimizer._transaction():
            if not self._pending:
                return
            trained = {name: self._watch.params[name] for name in self._summed}
            before = [(p, p.grad) for group in self.optimizer.param_groups for p in group["params"]]
            try:
                for p, _ in before:
                    p.grad = None
                for name, p in trained.items():
                    total = self._sums[name].tensor(p.device).view(p.shape)
                    p.grad = torch.empty_like(p, dtype=getattr(p, "grad_dtype", None)).copy_(total / self._pending)
                self.optimizer.step(**extra_args)
            finally:
                for p, grad in before:
                    p.grad = grad
            self._pending, self._summed = 0, frozenset()

    # ------------------------------------------------------------------ one call

    def _step(self, batch: Sequence[PyTree], extra_args: dict[str, PyTree], updates: bool) -> object:
        """Run the call. Return `_RETRY` if other calls came first, so that it is open again whether this one updates."""
        result = _AGAIN
        while result is _AGAIN and updates is (self._pending + 1 >= self.accumulate):
            with Transaction(self.optimizer._devices) as transaction:
                result = self._update(transaction, batch, extra_args, updates)
        return result

    def _update(self, transaction: Transaction, batch: Sequence[PyTree], extra_args: dict[str, PyTree], updates: bool) -> object:
        """Run the call within a transaction.

        Return `_RETRY` if it must start over, because the optimizer changed while the call was prepared.
        """
        optimizer, devices = self.optimizer, self.optimizer._devices
        if optimizer._exchange.inside:  # another thread may have opened the context
            optimizer._exchange.refuse(OWNER)
        arguments = self._arguments(extra_args) if updates else None
        if optimizer._group_signature() != optimizer._signature:
            optimizer._place()
        asked = optimizer._asks.count
        if optimizer._asks.open and not optimizer._as_left():
            optimizer._place()  # user code edited the state: continue from the edited values
        if optimizer._launches is not self._launches or not self._watch.same():
            self._look()
        if optimizer._devices != devices:
            return _AGAIN
        items = Batch(batch, self._device, self._real)
        forward = self._forward(items, transaction)
        if forward is None:
            return _AGAIN
        live = self._live(forward, updates)
        extra, further = (NO_EXTRA, []) if arguments is None else arguments.of([optimizer._active[i] for i in live])
        numbers = optimizer._hyperparams()
        key = items.signature, live, extra, updates
        ready = self._ready.get(key)
        if ready is not None and any(map(_is_deleted, ready.imported)):
            ready = None  # user code deleted arrays of `jax.live_arrays()`
        self._hits += ready is not None
        if ready is None:
            loss_at = next((i for i, x in enumerate(further) if x is self._loss_like), None)
            ready = self._prepared(transaction, forward, live, extra, loss_at, updates, numbers)
            if ready is None:
                return _AGAIN
            self._ready[key] = ready
        launch = ready.launch
        held = []  # keeps the storages in place until the call has ended
        for position, tensor, order, view in ready.looked_at:
            if view is not None and adoption.align(tensor):
                self._watch.look()
            held.append(tensor.untyped_storage())
            tensor = tensor.clone() if view is None and jax_buffers.shares_memory(tensor) else tensor  # the program writes this memory
            (ready.read[position],) = operands([tensor], [order]) if view is None else view([tensor.data_ptr()])
        seed = np.int64(torch.empty((), dtype=torch.int64).random_()) if forward.random else _NO_SEED
        about = ready.buffers, ready.copied, ready.copied_order, ready.read, items.arrays, ready.sums
        written = [*ready.in_place, *launch.params] if updates else ready.in_place
        checked = looks_for_nan()
        before = [*launch.copied(), *((b, b.detach().clone()) for b in ready.in_place)] if ready.program.calls_back or checked else []
        if checked:
            before += [(x, x.detach().clone()) for x in _beside(ready, self._device)]
        landed: list[Launch] = []
        try:
            outcome = call.run(ready.program, launch, call.Arrays(*about, seed, numbers, further, not self._pending, written), landed)
            self._follow(ready, outcome)
            if checked:
                self._refuse_not_finite(ready, outcome, updates)
        except BaseException as error:
            self._salvage(error, before, ready, landed if updates and not checked else ())
            raise
        self._settle(ready, updates)
        if optimizer._asks.open:
            optimizer._take_back(asked)
        return (outcome.loss, forward.function.restored(to_torch(outcome.aux))) if self.has_aux else outcome.loss

    def _follow(self, ready: Ready, outcome: call.Outcome) -> None:
        """Bind to the new addresses after results moved."""
        if outcome.moved:
            self.optimizer._launches.follow([ready.launch])
            for memory, buffer in zip(ready.buffers, ready.in_place, strict=True):
                buffer.data = jax_buffers.renewed(memory).tensor(buffer.device, like=buffer)
            for memory in ready.sums:
                jax_buffers.renewed(memory)
            self._look()

    def _refuse_not_finite(self, ready: Ready, outcome: call.Outcome, updates: bool) -> None:
        """Raise if the loss, aux, a new parameter or a summed gradient has a value that `jax_debug_nans` or `jax_debug_infs` rejects."""
        named = [("the loss", outcome.loss), *((f"aux result {i}", x) for i, x in enumerate(outcome.aux))]
        if updates:
            named += [(f"the new value of {self._names[id(leaf.param)]!r}", leaf.param) for leaf in ready.launch.leaves]
        else:
            names = sorted(self._names[id(self.optimizer._active[i].param)] for i in self._candidates)
            named += [(f"the gradient of {name!r}", memory.array) for name, memory in zip(names, ready.sums, strict=True)]
        arrays = ((name, to_jax(x.detach(), copy=None) if isinstance(x, torch.Tensor) else x) for name, x in named)
        refuse_not_finite(OWNER, arrays, " Nothing was updated.")

    def _settle(self, ready: Ready, updates: bool) -> None:
        """Count the call, after its results are in memory."""
        if updates:
            self._pending, self._summed = 0, frozenset()
            vars(self.optimizer)[OPT_CALLED] = True  # schedulers check this
        else:
            self._pending, self._summed = self._pending + 1, self._summed | set(ready.names)

    def _salvage(
        self, error: BaseException, before: Sequence[tuple[torch.Tensor, torch.Tensor]], ready: Ready, landed: Sequence[Launch]
    ) -> None:
        """Give valid memory to all tensors whose memory is gone after a failed call, as the optimizer does after a failed step."""
        for memory, buffer in zip(ready.buffers, ready.in_place, strict=True):
            if memory.is_gone:
                buffer.data = lost_like(buffer)
        if self.optimizer._launches.salvage(error, before, landed):
            self.optimizer._place()
        if any(memory.is_gone for memory in ready.sums):
            if self._pending:
                error.add_note(f"The gradients of {self._pending} calls that waited for an update are lost.")
            self._sums.clear()
            self._pending, self._summed = 0, frozenset()
        self._launches = None

    def _arguments(self, given: dict[str, PyTree]) -> Arguments | None:
        """Return the extra arguments of the transformation, the loss among them; None if it takes none."""
        optimizer = self.optimizer
        if not any(rule.takes_extra for rule in optimizer._rules.values()):
            return optimizer._arguments(given) if given else None
        wide = are_wide(optimizer._leaves)
        if self._loss_like is None or (self._loss_like.dtype == np.float64) is not wide:
            with x64():
                self._loss_like = jax.numpy.zeros((), np.float64 if wide else np.float32)
        return optimizer._arguments({"grad": Same(GRADIENTS), "value": self._loss_like, "value_fn": train_program.VALUE_FN} | given)

    # ------------------------------------------------------------------ what a call needs

    def _look(self) -> None:
        """Read module and optimizer again after a change, and drop everything that was bound before."""
        optimizer, self._launches = self.optimizer, None  # None until the end, so that the call after an error reads everything again
        check_readable(self.module)
        self._watch = watch = Watch(self.module)
        self._device = check_fit(watch, optimizer)
        self._real = np.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in watch.params.values()) else np.float32
        if optimizer.dissolve(optimizer._active):  # XLA copies a bucket's row before it reads it as a matrix
            watch.look()
        elif any(_elsewhere(leaf) for leaf in optimizer._active if leaf.param.requires_grad):
            optimizer._place()
            watch.look()
        check_whole(watch)
        self._names = {id(p): name for name, p in watch.params.items()}
        self._candidates = [i for i, leaf in enumerate(optimizer._active) if leaf.param.requires_grad]
        self._ready, self._traced, self._lives = {}, {}, {}
        self._launches = optimizer._launches

    def _live(self, forward: TracedForward, updates: bool) -> tuple[int, ...]:
        """Return the positions of the parameters that this call trains.

        These are the parameters that the loss depends on, and those for which an earlier loss has accumulated a gradient.
        """
        summed = self._summed if updates else frozenset()
        live = self._lives.get((forward, summed))
        if live is not None:
            return live
        active, wanted = self.optimizer._active, forward.reaches | summed
        live = self._lives[forward, summed] = tuple(i for i in self._candidates if self._names[id(active[i].param)] in wanted)
        if not live:
            del self._lives[forward, summed]
            raise ValueError(
                f"{OWNER}: the loss depends on no parameter that is trained. Check that loss_fn calls the model, without torch.no_grad() "
                "or detach(), and what the optimizer's mask and requires_grad freeze."
            )
        return live

    def _forward(self, items: Batch, transaction: Transaction) -> TracedForward | None:
        """Return the jaxpr of the loss for this kind of batch, traced with the current values of captured tensors.

        Returns None if a signal handler has changed the optimizer during the trace.
        """
        found = self._traced.get(items.signature)
        if found is not None and found.function.stale():
            for known in (self._forwards, self._traced, self._programs, self._ready, self._lives):
                known.clear()
            found = None
        if found is None:
            key = items.signature, self._watch.signature
            found = self._forwards.get(key)
            if found is None or found.function.stale():
                with transaction.interruptible():
                    found = traced_loss(self.module, self.loss_fn, self.has_aux, self._watch, items)
                self._forwards[key] = found
                if self._was_changed():
                    return None
            self._traced[items.signature] = found
        return found

    def _prepared(
        self,
        transaction: Transaction,
        forward: TracedForward,
        live: tuple[int, ...],
        extra: Extra,
        loss_at: int | None,
        updates: bool,
        numbers: np.ndarray,
    ) -> Ready | None:
        """Compile and bind the program. Return None if a signal handler has changed optimizer or module during the compilation."""
        launches, active = self.optimizer._launches, self.optimizer._active
        parts = Parts(self._watch, forward.changed, [active[i] for i in live])
        names = sorted(self._names[id(active[i].param)] for i in self._candidates) if self.accumulate > 1 else []
        sums = [self._sum(name) for name in names]
        kinds = tuple((name, str(memory.array.dtype)) for name, memory in zip(names, sums, strict=True))

        def compiled(blocks: Sequence[Block], plan: Plan) -> train_program.Program:
            tensors, read = parts.given(blocks)
            trained = tuple(tuple((self._names[id(leaf.param)], leaf.slot) for leaf in block.leaves) for block in blocks)
            names = {} if extra is NO_EXTRA else self._optimizers_names()
            task = train_program.Task(forward, plan, trained, tensors, read, self.accumulate, kinds, loss_at, names)
            key = forward, plan, trained, tuple(tensors.items()), read, kinds, loss_at, tuple(names.items()), updates
            self._watch.look()  # adoption has moved buffers, and alignment has moved weights
            if key not in self._programs:
                with transaction.interruptible():
                    program = train_program.Program(task, updates)
                self._programs[key] = program
                self._compilations += 1
                self._warn()
            return self._programs[key]

        signature, self.optimizer._signature = self.optimizer._signature, None  # an error then leads to a rebuild
        with self.optimizer.arrangement.explaining([active[i] for i in live]):
            launch = launches.whole(live, extra, numbers, compiled)
        if launch is None or self._was_changed() or not self._watch.same():
            return None
        self.optimizer._sight.forget(launches.began)
        self.optimizer._signature = signature
        program: Any = launch.program
        self._misses += 1
        imported = [x for x in parts.read if isinstance(x, jax.Array)]
        own = parts.memories, parts.in_place, parts.copied, parts.copied_order, parts.read, imported, parts.looked_at, sums
        reached = [name for leaf in launch.leaves if (name := self._names[id(leaf.param)]) in forward.reaches]
        return Ready(program, launch, *own, reached)

    def _was_changed(self) -> bool:
        """Return whether a signal handler has changed the optimizer while a loss was traced or compiled."""
        assert self._launches is not None
        return self._launches.is_outdated or bool(self.optimizer._exchange.inside)

    def _optimizers_names(self) -> dict[str, str]:
        """Return the module's name of each parameter by the dotted path that the transformation sees."""
        pairs = zip(self.optimizer._leaves, self.optimizer.arrangement.skeleton, strict=True)
        return {".".join(path): self._names[id(leaf.param)] for leaf, path in pairs if id(leaf.param) in self._names}

    def _sum(self, name: str) -> jax_buffers.Memory:
        """Return the buffer for the sum of a parameter's gradients, in its dtype, or in float32 for half types."""
        p = self._watch.params[name]
        dtype = np.dtype(np.float32) if p.dtype in (torch.float16, torch.bfloat16) else numpy_dtype(p.dtype)
        known = self._sums.get(name)
        if known is None or known.array.shape != (p.numel(),) or known.array.dtype != dtype:
            self._sums[name] = jax_buffers.register(allocation.full((p.numel(),), dtype, 0, device_of(p)))
        return self._sums[name]

    def _warn(self) -> None:
        if self._compilations == _MANY:
            warnings.warn(
                f"{OWNER} has compiled {_MANY} programs: one for each structure, shape and dtype of batch, each int, bool and string in "
                "it, each set of plain attributes of the modules and each set of trained parameters; and another after each write into a "
                "tensor that loss_fn reads from outside. Pad batches to a few shapes, drop the last one of an epoch (drop_last=True), pass "
                "numbers that change as tensors, and make what loss_fn reads a buffer of the module.",
                CompilationWarning,
                stacklevel=stack_level(),
            )


def _beside(ready: Ready, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors that a call may change, apart from those in `BoundExecutable.snapshot` and buffers updated in place."""
    shared = [x for part in ready.launch.shared for x in part.shown.views.values()]
    scalars = [x for leaf in ready.launch.leaves for x in leaf.scalars.values()]
    return [*shared, *scalars, *(memory.tensor(device) for memory in ready.sums), *ready.copied]


def _elsewhere(leaf: Leaf) -> bool:
    """Return whether a parameter has other memory or metadata than the optimizer has recorded."""
    p = leaf.param
    now = p.data_ptr(), p.stride(), p.shape, p.dtype
    return leaf.spec is None or now != (leaf.address, leaf.strides, leaf.shape, leaf.dtype)


@OptaxOptimizer.profile_hook_step
def _hooked(_: OptaxOptimizer, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function within the hooks of the optimizer's step, and under the step's name in a profile."""
    return function(*arguments)
