"""`JaxTrainStep`: forward, backward and the masked update of a torch module as one XLA program."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, overload

import jax
import numpy as np
import torch

from bridge import _logs, _process
from bridge._compiler.plan import UpdatePlan
from bridge._compiler.spec import GRADS_PLACEHOLDER, NO_EXTRA_ARGS, ById, ExtraArgsSpec
from bridge._interop.dlpack import device_of, to_jax, to_torch
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.types import PyTree
from bridge._memory import adoption, allocation, jax_buffers
from bridge._memory.call_arguments import as_call_arguments
from bridge._memory.jax_buffers import lost_like
from bridge._process import disable_torch_compile, has_nan_checks, raise_if_not_finite, x64
from bridge._runtime.transaction import Transaction
from bridge._train import call, train_program
from bridge._warnings import CompilationWarning, stack_level
from torch_api._params.record import ParamRecord
from torch_api._step.bound_executable import BoundExecutable, ProgramOperand
from torch_api._step.extra_args import ExtraArgs, are_64bit
from torch_api._step.launch_cache import LaunchCache
from torch_api._step.optimizer_access import OptimizerAccess
from torch_api._step.recompile_reasons import CacheInfo, RecompileInputs
from torch_api._step.summaries import describe_step_memory
from torch_api._step.transaction import StepTransaction
from torch_api.explain import Explanation
from torch_api.optimizer import OptaxOptimizer

from .arguments import (
    ModuleTensorSources,
    PerCallInput,
    ReadArray,
    check_arguments,
    check_module_storages,
    check_readable,
    check_same_params,
    refuse_autocast,
    refuse_keywords,
    summarize_copies_of_module,
)
from .batch import CLS_NAME, Batch
from .compile_reasons import CompiledPrograms, CompileInputs
from .loss import ModuleLossJaxpr, trace_loss
from .module_guard import ModuleGuard

_is_deleted = methodcaller("is_deleted")
_NO_SEED = np.int64(0)
# After this many compiled programs a warning says what to change.
_MANY_PROGRAMS = 9
_RETRY = object()
_Result = TypeVar("_Result")
_Loss = TypeVar("_Loss", covariant=True)  # what a call returns: the loss, or the loss and aux


class BoundTrainProgram(NamedTuple):
    """A program with everything that one kind of call needs: the bound executable of the update, and the arrays of the other tensors.

    For donated_buffers, in_place_tensors, copied_buffers, copied_dim_orders, frozen_inputs and per_call_inputs see `ModuleTensorSources`.
    imported_arrays: the arrays in `frozen_inputs`. grad_accumulators: sums of gradients, if several calls make one update. params_reached:
    names of the trained parameters that the loss depends on.
    """

    program: train_program.TrainProgram
    launch: BoundExecutable
    donated_buffers: list[jax_buffers.JaxBuffer]
    in_place_tensors: list[torch.Tensor]
    copied_buffers: list[torch.Tensor]
    copied_dim_orders: list[tuple[int, ...] | None]
    frozen_inputs: list[ReadArray]
    imported_arrays: list[jax.Array]
    per_call_inputs: list[PerCallInput]
    grad_accumulators: list[jax_buffers.JaxBuffer]
    params_reached: list[str]


class PreparedCall(NamedTuple):
    """A call whose program is compiled and bound.

    forward: the loss. bound: the program. batch, hyperparams, extra_arrays: the arguments of this call; `extra_arrays` are those of the
    transformation.
    """

    forward: ModuleLossJaxpr
    bound: BoundTrainProgram
    batch: Batch
    hyperparams: np.ndarray
    extra_arrays: Sequence[jax.Array | np.ndarray]


class JaxTrainStep(Generic[_Loss]):
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

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
      >>> loss_fn = lambda model, x, y: torch.nn.functional.mse_loss(model(x), y)
      >>> train_step = torch_api.JaxTrainStep(model, loss_fn, opt)
      >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
      >>> losses = [train_step(x, y).item() for _ in range(3)]
      >>> losses[0] > losses[1] > losses[2]
      True
    """

    @overload
    def __init__(
        self: JaxTrainStep[torch.Tensor],
        module: torch.nn.Module,
        loss_fn: Callable[..., PyTree],
        optimizer: OptaxOptimizer,
        accumulate: int = 1,
        has_aux: Literal[False] = False,
    ) -> None: ...
    @overload
    def __init__(
        self: JaxTrainStep[tuple[torch.Tensor, PyTree]],
        module: torch.nn.Module,
        loss_fn: Callable[..., PyTree],
        optimizer: OptaxOptimizer,
        accumulate: int = 1,
        *,
        has_aux: Literal[True],
    ) -> None: ...
    @overload
    def __init__(
        self: JaxTrainStep[PyTree],
        module: torch.nn.Module,
        loss_fn: Callable[..., PyTree],
        optimizer: OptaxOptimizer,
        accumulate: int = 1,
        has_aux: bool = False,
    ) -> None: ...
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
        self._launch_cache: LaunchCache | None = None  # the optimizer's cache for which everything is bound
        self._loss_jaxprs: dict[Hashable, ModuleLossJaxpr] = {}
        self._programs: dict[Hashable, train_program.TrainProgram] = {}
        self._grad_accumulators: dict[str, jax_buffers.JaxBuffer] = {}
        self._accumulated_calls, self._accumulated_names = 0, frozenset()
        # Which call updates is decided before its hooks run. So with several calls for one update, calls of other threads wait.
        self._call_lock: AbstractContextManager[object] = threading.RLock() if accumulate > 1 else nullcontext()
        self._hits = self._misses = self._compilations = 0
        self._compiled, self._last_key = CompiledPrograms(), None  # `_last_key`: that of the last call in `_bound_programs`
        self._loss_placeholder: jax.Array | None = None
        with self._access.transaction():
            self._refresh()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{CLS_NAME} cannot be copied or pickled: its programs work on the memory of this module and optimizer. Copy the module, and "
            "make an optimizer and a train step for the copy; what to save are both state_dicts."
        )

    @property
    def optimizer(self) -> OptaxOptimizer:
        """The optimizer. The call after an assignment binds everything to the new one."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: OptaxOptimizer) -> None:
        self._optimizer, self._access = optimizer, OptimizerAccess(optimizer)

    @property
    def pending(self) -> int:
        """The number of calls that have added up gradients since the last update."""
        return self._accumulated_calls

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global norm of the gradients of the last update, before clipping: `optimizer.grad_norm`."""
        return self._optimizer.grad_norm

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last update for a logger: `optimizer.metrics()`."""
        return self._optimizer.metrics()

    def cache_info(self) -> CacheInfo:
        """Return how many calls found their program in the cache, and how many programs were used and compiled."""
        return CacheInfo(self._hits, self._misses, len(self._programs), self._compilations)

    def explain(self) -> Explanation:
        """Return what the last call ran: its program, kernel classes, buckets, bytes, copies, and why the last compilation happened.

        It prints as text, as tables in a notebook, and has fields (`explain().copies`), as that of the optimizer. `MASKBRIDGE_LOGS=plan`
        logs the same text for each new kind of call.
        """
        return self._explain(self._bound_programs.get(self._last_key))

    def _explain(self, bound: BoundTrainProgram | None, counts_bytes: bool = True) -> Explanation:
        copies = [] if bound is None else summarize_copies_of_module(self._module_guard, bound.copied_buffers, bound.per_call_inputs)
        return Explanation(
            self._subject,
            [] if bound is None else [bound.launch],
            [leaf for leaf in self._access.trainable if leaf.spec is not None],
            self._compiled.last,
            self.cache_info(),
            counts_bytes=counts_bytes,
            computes_grads=True,
            copies=copies,
        )

    @property
    def _subject(self) -> str:
        """The first words of logs and explanations."""
        return f"{self._title} on {self._device}"

    @property
    def _title(self) -> str:
        return f"{CLS_NAME} of {type(self._optimizer).__name__}"

    @disable_torch_compile
    def __call__(self, *batch: PyTree, **extra_args: PyTree) -> _Loss:
        """Run one step on this batch. `extra_args` are extra arguments of the transformation, as in `optimizer.step`."""
        refuse_autocast()
        if extra_args:
            refuse_keywords(self.loss_fn, extra_args, self._access.takes_extra_args, bool(batch))
        self._access.raise_if_swapped(CLS_NAME)
        _process.raise_if_forked()  # before the lock, which another thread may have held at the fork
        result: Any = _RETRY
        while result is _RETRY:  # a hook may have called the train step
            with self._call_lock:
                if self._accumulated_calls + 1 >= self.accumulate:
                    result = _call_with_step_hooks(self._optimizer, self._step, batch, extra_args, True)
                else:
                    result = self._step(batch, extra_args, False)
        return result

    def flush(self, **extra_args: PyTree) -> None:
        """Update with the mean of the gradients of the `pending` calls, if there are any, for example at the end of an epoch."""
        with self._call_lock, self._access.transaction():
            if not self._accumulated_calls:
                return
            trained = {name: self._module_guard.params[name] for name in self._accumulated_names}
            before = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"]]
            try:
                for p, _ in before:
                    p.grad = None
                for name, p in trained.items():
                    total = self._grad_accumulators[name].alias_tensor(p.device).view(p.shape)
                    p.grad = torch.empty_like(p, dtype=getattr(p, "grad_dtype", None)).copy_(total / self._accumulated_calls)
                self._optimizer.step(**extra_args)
            finally:
                for p, grad in before:
                    p.grad = grad
            self._accumulated_calls, self._accumulated_names = 0, frozenset()

    # ------------------------------------------------------------------ one call

    def _step(self, batch: Sequence[PyTree], extra_args: dict[str, PyTree], updates: bool) -> object:
        """Run the call. Return `_RETRY` if other calls came first, so that it is open again whether this one updates."""
        result = _RETRY
        while result is _RETRY and updates is (self._accumulated_calls + 1 >= self.accumulate):
            with Transaction(self._access.devices) as locks:
                transaction = StepTransaction(self._optimizer, CLS_NAME, locks)
                result = self._update(transaction, batch, extra_args, updates)
        return result

    def _update(self, transaction: StepTransaction, batch: Sequence[PyTree], extra_args: dict[str, PyTree], updates: bool) -> object:
        """Run the call within a transaction.

        Return `_RETRY` if it must start over, because the optimizer changed while the call was prepared.
        """
        prepared = self._prepare(transaction, batch, extra_args, updates)
        if prepared is None:
            return _RETRY
        result = self._run(transaction, prepared, updates)
        self._finish(prepared.bound, updates, result)
        if self._access.state_may_be_referenced:
            transaction.commit()
        return (result.loss, prepared.forward.function.rebuild_aux(to_torch(result.aux))) if self.has_aux else result.loss

    def _prepare(
        self, transaction: StepTransaction, batch: Sequence[PyTree], extra_args: dict[str, PyTree], updates: bool
    ) -> PreparedCall | None:
        """Find the program of this call, or trace, compile and bind it. Return None if the call must start over."""
        arguments = transaction.begin(partial(self._make_extra_args, extra_args) if updates else None)
        if self._access.launch_cache is not self._launch_cache or not self._module_guard.is_unchanged():
            self._refresh()
        if self._access.devices != transaction.locks.devices:
            return None
        items = Batch(batch, self._device, self._float_dtype)
        forward = self._get_loss_jaxpr(items, transaction)
        if forward is None:
            return None
        with_grad = self._find_with_grad(forward, updates)
        extra, extra_arrays = (NO_EXTRA_ARGS, ()) if arguments is None else arguments.for_leaves(transaction.records(with_grad))
        hyperparams = self._access.hyperparams()
        key = items.signature, with_grad, extra, updates
        bound = self._get_bound_program(key)
        if bound is None:
            loss_at = next((i for i, x in enumerate(extra_arrays) if x is self._loss_placeholder), None)
            bound = self._bind_program(transaction, forward, with_grad, extra, loss_at, updates, hyperparams)
            if bound is None:
                return None
            self._bound_programs[key] = bound
            self._log_prepared(bound)
        self._last_key = key
        return PreparedCall(forward, bound, items, hyperparams, extra_arrays)

    def _run(self, transaction: StepTransaction, prepared: PreparedCall, updates: bool) -> call.TrainResult[BoundExecutable]:
        """Call the program, and follow results that have moved. Undo the call if it fails."""
        bound, checks_finite = prepared.bound, has_nan_checks()
        storages = self._read_inputs(bound)
        arrays = self._arrays(prepared, updates)
        if bound.program.has_callback or checks_finite:
            transaction.snapshots += self._snapshot(bound, checks_finite)
        try:
            result = call.run(bound.program, bound.launch, arrays, transaction.completed)
            self._rebind(bound, result)
            if checks_finite:
                self._refuse_not_finite(bound, result, updates)
        except BaseException as error:
            if checks_finite or not updates:
                transaction.completed.clear()  # their parameters get their old values, or have kept them
            self._rollback(transaction, error, bound)
            raise
        del storages  # the program read them until here
        return result

    def _arrays(self, prepared: PreparedCall, updates: bool) -> call.TrainArrays:
        """Return the arguments of the call. If the loss draws random numbers, torch's default generator gives their seed."""
        bound = prepared.bound
        seed = np.int64(torch.empty((), dtype=torch.int64).random_()) if prepared.forward.uses_seed else _NO_SEED
        return call.TrainArrays(
            buffers=bound.donated_buffers,
            copied_back=bound.copied_buffers,
            copied_back_order=bound.copied_dim_orders,
            read_arrays=bound.frozen_inputs,
            batch=prepared.batch.arrays,
            grad_accumulators=bound.grad_accumulators,
            seed=seed,
            hyperparams=prepared.hyperparams,
            extra_args=prepared.extra_arrays,
            is_first=not self._accumulated_calls,
            written_tensors=[*bound.in_place_tensors, *bound.launch.arguments.params] if updates else bound.in_place_tensors,
        )

    def _get_bound_program(self, key: Hashable) -> BoundTrainProgram | None:
        """Return the bound program of this kind of call; None if there is none yet, or user code deleted arrays of `jax.live_arrays()`."""
        bound = self._bound_programs.get(key)
        if bound is not None and any(map(_is_deleted, bound.imported_arrays)):
            bound = None
        self._hits += bound is not None
        return bound

    def _read_inputs(self, bound: BoundTrainProgram) -> list[torch.UntypedStorage]:
        """Set the inputs that are read anew in each call. Return their storages, which must live until the call has ended."""
        storages = []
        for position, tensor, order, view in bound.per_call_inputs:
            if view is not None and adoption.align_storage(tensor):
                self._module_guard.refresh()
            storages.append(tensor.untyped_storage())
            tensor = tensor.clone() if view is None and jax_buffers.is_over_jax_buffer(tensor) else tensor  # the program writes this memory
            (bound.frozen_inputs[position],) = as_call_arguments([tensor], [order]) if view is None else view([tensor])
        return storages

    def _snapshot(self, bound: BoundTrainProgram, all_written: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tensors that the call writes, with copies of their values. `all_written`: not only those of the optimizer and buffers."""
        others = [*bound.in_place_tensors, *(_other_written_tensors(bound, self._device) if all_written else ())]
        return [*bound.launch.snapshot(), *((x, x.detach().clone()) for x in others)]

    def _rebind(self, bound: BoundTrainProgram, outcome: call.TrainResult[BoundExecutable]) -> None:
        """Bind to the new addresses after results moved."""
        if outcome.moved:
            self._access.launch_cache.rebind([bound.launch])
            for memory, buffer in zip(bound.donated_buffers, bound.in_place_tensors, strict=True):
                buffer.data = jax_buffers.rebind_moved(memory).alias_tensor(buffer.device, like=buffer)
            for memory in bound.grad_accumulators:
                jax_buffers.rebind_moved(memory)
            self._refresh()

    def _refuse_not_finite(self, bound: BoundTrainProgram, outcome: call.TrainResult[BoundExecutable], updates: bool) -> None:
        """Raise if the loss, aux, a new parameter or a summed gradient has a value that `jax_debug_nans` or `jax_debug_infs` rejects."""
        named = [("the loss", outcome.loss), *((f"aux result {i}", x) for i, x in enumerate(outcome.aux))]
        if updates:
            named += [(f"the new value of {self._names[id(leaf.param)]!r}", leaf.param) for leaf in bound.launch.leaves]
        else:
            names = sorted(self._names[id(self._access.trainable[i].param)] for i in self._candidate_positions)
            named += [(f"the gradient of {name!r}", memory.array) for name, memory in zip(names, bound.grad_accumulators, strict=True)]
        arrays = ((name, to_jax(x.detach(), copy=None) if isinstance(x, torch.Tensor) else x) for name, x in named)
        raise_if_not_finite(CLS_NAME, arrays, " Nothing was updated.")

    def _finish(self, bound: BoundTrainProgram, updates: bool, result: call.TrainResult[BoundExecutable]) -> None:
        """Count the call, after its results are in memory."""
        if updates:
            self._accumulated_calls, self._accumulated_names = 0, frozenset()
            self._access.record_update(result.numbers)
        else:
            self._accumulated_calls, self._accumulated_names = (
                self._accumulated_calls + 1,
                self._accumulated_names | set(bound.params_reached),
            )

    def _rollback(self, transaction: StepTransaction, error: BaseException, bound: BoundTrainProgram) -> None:
        """Undo a call that has failed, as far as possible. Tensors whose memory is gone get other memory."""
        for memory, buffer in zip(bound.donated_buffers, bound.in_place_tensors, strict=True):
            if memory.is_lost:
                buffer.data = lost_like(buffer)
        transaction.rollback(error)
        if any(memory.is_lost for memory in bound.grad_accumulators):
            if self._accumulated_calls:
                error.add_note(f"The gradients of {self._accumulated_calls} calls that waited for an update are lost.")
            self._grad_accumulators.clear()
            self._accumulated_calls, self._accumulated_names = 0, frozenset()
        self._launch_cache = None

    def _make_extra_args(self, extra_args: dict[str, PyTree]) -> ExtraArgs | None:
        """Return the extra arguments of the transformation, the loss among them; None if it takes none."""
        if not self._access.takes_extra_args:
            return self._access.make_extra_args(extra_args) if extra_args else None
        is_64bit = are_64bit(self._access.records)
        if self._loss_placeholder is None or (self._loss_placeholder.dtype == np.float64) is not is_64bit:
            with x64():
                self._loss_placeholder = jax.numpy.zeros((), np.float64 if is_64bit else np.float32)
        return self._access.make_extra_args(
            {"grad": ById(GRADS_PLACEHOLDER), "value": self._loss_placeholder, "value_fn": train_program.LOSS_OF_PARAMS} | extra_args
        )

    # ------------------------------------------------------------------ what a call needs

    def _refresh(self) -> None:
        """Read module and optimizer again after a change, and drop everything that was bound before."""
        access, self._launch_cache = self._access, None  # None until the end, so that the call after an error reads everything again
        check_readable(self.module)
        self._module_guard = watch = ModuleGuard(self.module)
        self._device = check_same_params(watch, access)
        self._float_dtype = np.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in watch.params.values()) else np.float32
        if access.move_out_of_buckets():
            watch.refresh()
        elif any(_has_moved(leaf) for leaf in access.trainable if leaf.param.requires_grad):
            access.rebuild_layout()
            watch.refresh()
        check_module_storages(watch)
        self._names = {id(p): name for name, p in watch.params.items()}
        self._candidate_positions = [i for i, leaf in enumerate(access.trainable) if leaf.param.requires_grad]
        self._bound_programs, self._loss_by_signature, self._with_grad_by_loss = {}, {}, {}
        self._launch_cache = access.launch_cache

    def _find_with_grad(self, forward: ModuleLossJaxpr, updates: bool) -> tuple[int, ...]:
        """Return the positions of the parameters that this call trains.

        These are the parameters that the loss depends on, and those for which an earlier loss has accumulated a gradient.
        """
        accumulated_names = self._accumulated_names if updates else frozenset()
        with_grad = self._with_grad_by_loss.get((forward, accumulated_names))
        if with_grad is not None:
            return with_grad
        active, wanted = self._access.trainable, forward.params_reached | accumulated_names
        with_grad = self._with_grad_by_loss[forward, accumulated_names] = tuple(
            i for i in self._candidate_positions if self._names[id(active[i].param)] in wanted
        )
        if not with_grad:
            del self._with_grad_by_loss[forward, accumulated_names]
            raise ValueError(
                f"{CLS_NAME}: the loss depends on no parameter that is trained. Check that loss_fn calls the model, without "
                "torch.no_grad() or detach(), and what the optimizer's mask and requires_grad freeze."
            )
        return with_grad

    def _get_loss_jaxpr(self, batch: Batch, transaction: StepTransaction) -> ModuleLossJaxpr | None:
        """Return the jaxpr of the loss for this kind of batch, traced with the current values of captured tensors.

        Returns None if a signal handler has changed the optimizer during the trace.
        """
        loss_jaxpr = self._loss_by_signature.get(batch.signature)
        if loss_jaxpr is not None and loss_jaxpr.function.is_stale():
            for known in (self._loss_jaxprs, self._loss_by_signature, self._programs, self._bound_programs, self._with_grad_by_loss):
                known.clear()
            loss_jaxpr = None
        if loss_jaxpr is None:
            key = batch.signature, self._module_guard.signature
            loss_jaxpr = self._loss_jaxprs.get(key)
            if loss_jaxpr is None or loss_jaxpr.function.is_stale():
                with transaction.locks.interruptible():
                    loss_jaxpr = trace_loss(self.module, self.loss_fn, self.has_aux, self._module_guard, batch)
                self._loss_jaxprs[key] = loss_jaxpr
                if self._launch_cache is None or transaction.is_outdated(self._launch_cache):
                    return None
            self._loss_by_signature[batch.signature] = loss_jaxpr
        return loss_jaxpr

    def _bind_program(
        self,
        transaction: StepTransaction,
        forward: ModuleLossJaxpr,
        with_grad: tuple[int, ...],
        extra: ExtraArgsSpec,
        loss_at: int | None,
        updates: bool,
        hyperparams: np.ndarray,
    ) -> BoundTrainProgram | None:
        """Compile and bind the program. Return None if a signal handler has changed optimizer or module during the compilation."""
        tensor_sources = ModuleTensorSources(self._module_guard, forward.changed_buffers, transaction.records(with_grad))
        candidates = transaction.records(self._candidate_positions) if self.accumulate > 1 else []
        names = sorted(self._names[id(leaf.param)] for leaf in candidates)
        grad_accumulators = [self._grad_accumulator(name) for name in names]
        kinds = tuple((name, str(memory.array.dtype)) for name, memory in zip(names, grad_accumulators, strict=True))

        def compile_program(operands: Sequence[ProgramOperand], plan: UpdatePlan) -> train_program.TrainProgram:
            tensors, read = tensor_sources.find_sources(operands)
            trained_names = tuple(tuple((self._names[id(leaf.param)], leaf.bucket_row) for leaf in block.leaves) for block in operands)
            names = {} if extra is NO_EXTRA_ARGS else self._module_names_by_path()
            task = train_program.TrainProgramSpec(forward, plan, trained_names, tensors, read, self.accumulate, kinds, loss_at, names)
            key = forward, plan, trained_names, tuple(tensors.items()), read, kinds, loss_at, tuple(names.items()), updates
            self._module_guard.refresh()  # adoption has moved buffers, and alignment has moved weights
            if key not in self._programs:
                with transaction.locks.interruptible():
                    program = train_program.TrainProgram(task, updates, self._title)
                self._programs[key] = program
                self._compilations += 1
                names_and_plans = [([leaf.name for leaf in block.leaves], block.leaf_plan) for block in operands]
                inputs = RecompileInputs(names_and_plans, plan.clip, plan.has_loss_scale, plan.finite_check_done, plan.extra)
                traced = forward.function
                compiled_for = CompileInputs(traced.batch_signature, traced.module_signature, inputs, updates)
                self._compiled.record(self._subject, self._hits + self._misses + 1, compiled_for)
                self._warn_of_many_programs()
            return self._programs[key]

        with transaction.preparing(with_grad) as launches:
            launch = launches.prepare_single(with_grad, extra, hyperparams, compile_program)
        if launch is None or transaction.is_outdated(launches) or not self._module_guard.is_unchanged():
            return None
        program: Any = launch.executable
        self._misses += 1
        imported = [x for x in tensor_sources.frozen_inputs if isinstance(x, jax.Array)]
        own = (
            tensor_sources.donated_buffers,
            tensor_sources.in_place_tensors,
            tensor_sources.copied_buffers,
            tensor_sources.copied_dim_orders,
            tensor_sources.frozen_inputs,
            imported,
            tensor_sources.per_call_inputs,
            grad_accumulators,
        )
        params_reached = [name for leaf in launch.leaves if (name := self._names[id(leaf.param)]) in forward.params_reached]
        return BoundTrainProgram(program, launch, *own, params_reached)

    def _log_prepared(self, bound: BoundTrainProgram) -> None:
        """Log the program of a kind of call that is new."""
        if _logs.is_on(_logs.PLAN):
            _logs.PLAN.info("%s", self._explain(bound, counts_bytes=False))
        if _logs.is_on(_logs.MEMORY):
            _logs.MEMORY.info("%s: %s", self._subject, describe_step_memory([bound.launch], computes_grads=True))

    def _module_names_by_path(self) -> dict[str, str]:
        """Return the module's name of each parameter by the dotted path that the transformation sees."""
        pairs = zip(self._access.records, self._access.all_paths, strict=True)
        return {".".join(path): self._names[id(leaf.param)] for leaf, path in pairs if id(leaf.param) in self._names}

    def _grad_accumulator(self, name: str) -> jax_buffers.JaxBuffer:
        """Return the buffer for the sum of a parameter's gradients, in its dtype, or in float32 for half types."""
        p = self._module_guard.params[name]
        dtype = np.dtype(np.float32) if p.dtype in (torch.float16, torch.bfloat16) else numpy_dtype(p.dtype)
        accumulator = self._grad_accumulators.get(name)
        if accumulator is None or accumulator.array.shape != (p.numel(),) or accumulator.array.dtype != dtype:
            self._grad_accumulators[name] = jax_buffers.register(allocation.full((p.numel(),), dtype, 0, device_of(p)))
        return self._grad_accumulators[name]

    def _warn_of_many_programs(self) -> None:
        if self._compilations == _MANY_PROGRAMS:
            warnings.warn(
                f"{CLS_NAME} has compiled {_MANY_PROGRAMS} programs: one for each structure, shape and dtype of batch, each int, bool "
                "and string in it, each set of plain attributes of the modules and each set of trained parameters; and another after "
                "each write into a tensor that loss_fn reads from outside. Pad batches to a few shapes, drop the last one of an epoch "
                "(drop_last=True), pass numbers that change as tensors, and make what loss_fn reads a buffer of the module.",
                CompilationWarning,
                stacklevel=stack_level(),
            )


def _other_written_tensors(bound: BoundTrainProgram, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors that a call may change, apart from those in `BoundExecutable.snapshot` and buffers updated in place."""
    shared = [x for part in bound.launch.shared for x in part.state_tensors.views.values()]
    scalars = [x for leaf in bound.launch.leaves for x in leaf.scalar_state.values()]
    return [*shared, *scalars, *(memory.alias_tensor(device) for memory in bound.grad_accumulators), *bound.copied_buffers]


def _has_moved(leaf: ParamRecord) -> bool:
    """Return whether a parameter has other memory or metadata than the optimizer has recorded."""
    p = leaf.param
    now = p.data_ptr(), p.stride(), p.shape, p.dtype
    return leaf.spec is None or now != (leaf.address, leaf.strides, leaf.shape, leaf.dtype)


@OptaxOptimizer.profile_hook_step
def _call_with_step_hooks(_: OptaxOptimizer, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function within the hooks of the optimizer's step, and under the step's name in a profile."""
    return function(*arguments)
