"""The optimizer class under all others: it updates torch parameters by compiled JAX programs, one or more for each device.

A change of param groups, parameters or options rebuilds the layout: records, hyperparameter table, buffers and caches. A step in between
compares guards and calls the bound executables.
"""

from __future__ import annotations

import functools
import gc
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch

from bridge import _logs, _process
from bridge._compiler import leaf_update
from bridge._compiler.spec import EMA_PARAM, GRADS_PLACEHOLDER, NO_EXTRA_ARGS, ById, StateField
from bridge._interop.dlpack import device_of
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.types import PyTree
from bridge._names import Path, accepts_learning_rate, tree_paths
from bridge._process import disable_torch_compile
from bridge._runtime import execute
from bridge._runtime.transaction import Transaction
from bridge._transforms.selectors import Selector
from bridge._warnings import stack_level

from . import explain, options, report
from . import state_dict as checkpoint
from ._params import buckets, param_groups, saved_groups
from ._params.hyperparam_table import HyperparamTable
from ._params.record import (
    ParamDecision,
    ParamRecord,
    check_has_storage,
    check_no_overlap,
    grad_error_text,
    grads_with_dense_storage,
)
from ._params.selectors import Selectors
from ._params.state import StateStore
from ._params.swap import ParameterSwap
from ._rules import betas, validators
from ._rules.from_optax import as_optimizer_spec, is_lr_explicit, lr_scales_update
from ._rules.inner_rates import InnerRates, inner_rates, trailing_factor
from ._rules.optimizer_spec import OptimizerSpec
from ._rules.types import Hyperparams, MutableParamGroup, ParamGroup, StateDict, Transformation
from ._step import grad_scaler, hooks
from ._step.bound_executable import BoundExecutable, restore_values
from ._step.closure import Closure, raise_for_closure
from ._step.extra_args import ExtraArgs
from ._step.grad_scaler import LossScale
from ._step.guards import Guards
from ._step.launch_cache import GradSet, LaunchCache
from ._step.recompile_reasons import CacheInfo, UsedExecutables, few_names
from ._step.state_watch import StateAccess
from ._step.step_metrics import LastStep, Numbers, sum_over_shards, sum_statistics
from ._step.summaries import describe_layout, describe_step_memory
from ._step.transaction import StepTransaction
from .optimizer_base import SelectorOptimizer, devices_of
from .options import Options, ValidatedAttribute, Writeback, show_shared_arguments

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_ONLY_SPEC = "all"  # the key of the only `OptimizerSpec`
_MAX_TRACED_LEAVES = 50  # with more leaves, only the first is traced to find a constant factor of the update
_ENGINE_ARGUMENTS = options.OPTION_NAMES | {"mask", "decay_mask", "lr_scale"}


class OptaxOptimizer(SelectorOptimizer):
    """A `torch.optim.Optimizer` whose update is one compiled JAX program that writes into the parameters' own memory.

    Args:
      params: everything that torch.optim takes: tensors, (name, tensor) pairs, or dict groups of either. Patterns need names.
      tx: an optax transformation (anything with `init` and `update`), a function that makes one from keyword arguments
        (`optax.adamw`, `bridge.rules.adam`), or a `bridge.OptimizerDef`. It sees the same tree as in pure JAX: the nested
        dict of the parameters, by their dotted names. A transformation updates all groups; a function makes one for each group.
      mask: which parameters are optimized, True = optimized; any selector (docs/selectors.md). A parameter with False is frozen:
        its bits never change, it has no state and no decay, and its gradient is neither read nor part of a norm.
      decay_mask: which parameters decay, True = by the group's `weight_decay`; any selector.
      lr_scale: a selector whose values multiply the lr of each parameter (`layer_decay`); 1 for parameters that it does not select.
      max_grad_norm: bound on the global norm of the gradients that a step reads, over all groups; None for no bound. The
        effect is that of `torch.nn.utils.clip_grad_norm_` before the step, but the gradients are not changed.
      writeback: "inplace" moves each parameter that owns its storage into jax-owned memory, once. "copy" leaves all parameters
        in place and copies results into them. Both keep the tensors' identity. `report()` shows which one applies, and why.
      state_dtype: the floating torch.dtype of a parameter's state arrays, scalars excepted. None keeps the transformation's
        choice, which for torch's own optimizers is the parameter's dtype. Arithmetic is in float32 or wider in any case.
      master_weights: update a float32 copy of each float16 and bfloat16 parameter, `state[p]["master_param"]`, and round it
        into the parameter. Elements that user code has changed in the parameter are copied into the master weight.
      stochastic_rounding: round results for float16 and bfloat16 parameters up or down at random, without bias. The random
        bits follow from `rounding_seed` and the parameter's name; `state[p]["rounding_key"]` holds the generator's state.
      rounding_seed: the seed of `stochastic_rounding`.
      ema_decay: keep `state[p]["ema_param"]`, an average of the trained weights: ema += (1 - ema_decay) * (p - ema) after
        each update of p. It starts at the weights before the first update, and is in float32 for half types.
        `ema_params()` swaps it in.
      metrics: compute the numbers that `metrics()` returns, in the programs of the step.
      **hyperparams: the hyperparameters of a function or definition. Each number lives in `param_groups` and may change at
        any step at no cost. `lr` is the function's `learning_rate`, and may be given by this name. If the function has none, if
        its learning rate is a schedule, or if `tx` is a transformation, `lr` multiplies the update (default 1.0; 0 changes
        nothing).

    `step` waits for its results. Parameters with `requires_grad=False` are frozen even with a stale `.grad` (torch.optim
    would still update them). A parameter whose `.grad` is None keeps its value, state and step count, if the transformation
    updates each parameter separately. A transformation that looks at all parameters (a global norm inside it,
    `optax.MultiSteps`) has one state for all of them, which the state of every parameter shows.

    For a DTensor (FSDP2's `fully_shard`), each process updates its local shard, by a copy. `state` holds DTensors with the
    parameter's placements. A sharded parameter needs an elementwise transformation. `max_grad_norm`, `grad_norm` and the check of
    GradScaler then cover all processes, by one all_reduce for each dimension of the device mesh and step, so all processes must call
    `step`, also one whose gradients are all None. Other parameters must have the same gradient in each process.

    Raises:
      ValueError, TypeError: empty or duplicate parameters, unknown arguments or group keys, values out of range, a selector
        that matches nothing, or an error of the transformation. Nothing has been changed then.

    Example:
      >>> import optax, torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.OptaxOptimizer(model.named_parameters(), optax.adamw, lr=0.1, mask="weight", max_grad_norm=1.0)
      >>> model(torch.ones(1, 2)).sum().backward()
      >>> opt.step()
      >>> [(row["parameter"], row["status"]) for row in opt.report().rows]
      [('weight', 'trained'), ('bias', 'frozen')]
    """

    _temporary_hyper_params: Callable[..., AbstractContextManager[None]] | None = (
        None  # sets `hyper_params` for one step, in classes that have them
    )

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in cls.__dict__:
            show_shared_arguments(cls.__dict__["__init__"])
            cls.__init__ = accepts_learning_rate(cls.__dict__["__init__"])

    max_grad_norm: Any = ValidatedAttribute()
    ema_decay: Any = ValidatedAttribute()
    # The attributes that copies and pickles have in addition to torch's.
    _copied_attributes = ("_optimizer_specs", "_options", "_selectors", "_gave_lr", "max_grad_norm", "ema_decay")

    def __init__(
        self,
        params: ParamsT,
        tx: Transformation | OptimizerSpec,
        *,
        mask: Selector = None,
        decay_mask: Selector = None,
        lr_scale: Selector | float = None,
        max_grad_norm: float | None = Options.max_grad_norm,
        writeback: Writeback = Options.writeback,
        state_dtype: torch.dtype | None = Options.state_dtype,
        master_weights: bool = Options.master_weights,
        stochastic_rounding: bool = Options.stochastic_rounding,
        rounding_seed: int = Options.rounding_seed,
        ema_decay: float | None = Options.ema_decay,
        metrics: bool = Options.metrics,
        **hyperparams: Any,
    ) -> None:
        cls_name = type(self).__name__
        engine = {"max_grad_norm": max_grad_norm, "writeback": writeback, "state_dtype": state_dtype, "master_weights": master_weights}
        engine |= {"stochastic_rounding": stochastic_rounding, "rounding_seed": rounding_seed, "ema_decay": ema_decay}
        engine |= {"metrics": metrics}
        torch_options = {name: hyperparams.pop(name) for name in param_groups.TORCH_OPTIONS & hyperparams.keys()}
        rule, defaults = as_optimizer_spec(cls_name, tx, hyperparams)
        self._gave_lr = is_lr_explicit(type(self), tx, hyperparams)
        param_groups.convert_sequences(defaults, rule)
        if not rule.is_optax:
            param_groups.check_keywords(cls_name, hyperparams, rule.hyperparams.keys() | param_groups.TORCH_OPTIONS | _ENGINE_ARGUMENTS)
        selectors = Selectors(cls_name, {"mask": mask, "decay_mask": decay_mask, "lr_scale": lr_scale})
        self._build(param_groups.list_params(cls_name, params), {_ONLY_SPEC: rule}, defaults | torch_options, selectors, engine)

    def _build(
        self, params: ParamsT, rules: dict[Hashable, OptimizerSpec], defaults: MutableParamGroup, selectors: Selectors, engine: Hyperparams
    ) -> None:
        """Construct with one `OptimizerSpec` for all groups, or one for each label."""
        cls_name = type(self).__name__
        self._optimizer_specs, self._options = rules, Options.validate(cls_name, engine)
        self.max_grad_norm, self.ema_decay = self._options.max_grad_norm, self._options.ema_decay
        if not self._is_partitioned:
            param_groups.check_group(cls_name, defaults, rules[_ONLY_SPEC])
        if selectors["decay_mask"] is not None and not any("weight_decay" in rule.hyperparams for rule in rules.values()):
            raise ValueError(f"{cls_name}: decay_mask is given, but this rule has no weight_decay.")
        self._selectors = selectors
        self._records: list[ParamRecord] = []
        self._constructed = False
        self._init_uncopied()
        super().__init__(params, self._with_momentum(defaults))
        self._apply_selectors([], self._records)
        self._warn_of_multiplied_lr()
        self._constructed = True
        self._rebuild_layout()
        self._handle_loss_scale_if_fused()

    def _init_uncopied(self) -> None:
        """Initialize the attributes that no copy or pickle has."""
        self._prepared_signature = []
        self._extra_spec, self._extra_arg_names, self._used_executables = NO_EXTRA_ARGS, (), UsedExecutables(type(self).__name__)
        self._group_keys: list[tuple[str, ...]] = []  # the keys of each group at the last check
        self._loss_scale, self._swap, self._guards, self._state_access = LossScale(), ParameterSwap(), Guards(), StateAccess()
        self._warned_of_copies = self._warned_of_no_gradients = False
        self._last_step: LastStep | None = None

    def _optimizer_spec_of(self, group: ParamGroup) -> OptimizerSpec:
        """Return the `OptimizerSpec` that updates the parameters of a group."""
        return self._optimizer_specs[group.get("label") if self._is_partitioned else _ONLY_SPEC]

    def _with_momentum(self, defaults: MutableParamGroup) -> MutableParamGroup:
        """Return the defaults of all groups. Schedulers find `betas` in them if every group has momenta, under this or another name."""
        if not self._is_partitioned:
            return self._with_betas(defaults)
        everywhere = all(
            betas.BETAS in rule.hyperparams or self._betas_of(rule) for label, rule in self._optimizer_specs.items() if label is not None
        )
        return betas.BetasGroup(defaults, ()) if everywhere else defaults

    # ------------------------------------------------------------------ placement

    def _rebuild_layout(self, moves_params: bool = True) -> None:
        """Rebuild the layout: hyperparameter rows, buffers, state and caches of all parameters.

        `moves_params` False leaves the buffers to the first step, because an unpickler still references the tensors that it has made.

        Records, hyperparameter table and caches are consistent only when all of this is done. `_prepared_signature` is None until then, so
        the step after an error or an interrupt rebuilds the layout.
        """
        with self._transaction():
            self._rebuild_layout_now(moves_params)

    def _rebuild_layout_now(self, moves_params: bool) -> None:
        if self._prepared_signature is None:
            gc.collect()  # objects of an interrupted rebuild may still reference the parameters' memory
        self._prepared_signature = None
        if "_launch_cache" in vars(self):
            self._launch_cache.is_outdated = True  # first, because a step that compiles continues even if this raises in a signal handler
        _process.raise_if_forked()
        for group in self.param_groups:  # user code may have added a plain dict
            betas.expand_betas_entry(group, self._betas_of(self._optimizer_spec_of(group)))
        leaves = self._reconcile_records()
        for leaf in leaves:
            if self._is_trainable(leaf) and leaf.param.requires_grad:
                param_groups.check_parameter(type(self).__name__, leaf.name, leaf.param)
            leaf.refresh_metadata()  # model.to() may have changed the dtype
        self._records, self._devices = leaves, devices_of(leaf.param for leaf in leaves)
        checkpoint.update_trainable_params(self.param_groups, leaves)
        kept = self._options.aux_state(self.ema_decay is not None)
        self._hyperparam_table = HyperparamTable(
            type(self).__name__, self._records, self._is_trainable, self.param_groups, self._optimizer_spec_of, self._extra_spec, kept
        )
        self._params_by_group = [list(group["params"]) for group in self.param_groups]
        self._guards.invalidate()
        self._trainable = list(filter(self._is_trainable, self._records))
        for leaf in self._records:
            leaf.state_buffers = None
        trained = [leaf for leaf in self._trainable if leaf.param.requires_grad]
        for leaf in trained:
            device_of(leaf.param)  # raises for an unsupported device before any parameter is moved
        check_no_overlap(type(self).__name__, self._trainable)
        if moves_params:
            self._adopt_params(trained)
        self._trainable.sort(key=self._hyperparam_table.canonical_order)
        rules = list(map(self._optimizer_spec_of, self.param_groups))
        states = StateStore(
            type(self).__name__, self._trainable, self._hyperparam_table, rules, vars(self)["state"], self._options.initial_aux_value
        )
        self._launch_cache = LaunchCache(states, self.max_grad_norm, self._options.metrics, self._used_executables)
        states.init_eager_state(self._hyperparams)
        self._prepared_signature = self._recompile_signature()
        if _logs.is_on(_logs.MEMORY):
            _logs.MEMORY.info("%s: %s", self._subject, describe_layout(trained))
        self._warn_of_copies()

    def _warn_of_no_gradients(self) -> None:
        """Warn once about a step that updates nothing because no trained parameter has a gradient.

        There is no warning if that is no surprise: no parameter is trained and none has a gradient; a process may have no part of the
        gradients (FSDP: the parameters are DTensors, or have no elements here); or every lr is 0, as in the step by which
        torch.distributed.checkpoint makes the state.
        """
        if self._warned_of_no_gradients or not any(float(group["lr"]) for group in self.param_groups):
            return
        frozen = [leaf.name for leaf in self._records if leaf.param.grad is not None]
        trained = [leaf for leaf in self._trainable if leaf.param.requires_grad]
        is_sharded = any(leaf.dtensor_layout is not None for leaf in trained) or not any(leaf.param.numel() for leaf in trained)
        if frozen:
            why = (
                f"the only gradients are of frozen parameters ({few_names(frozen)}). report() says what froze each of them: the mask, "
                "trainable=False of its group, or requires_grad=False, maybe set after backward()."
            )
        elif not is_sharded:
            why = (
                "no parameter has a gradient. Call loss.backward() before step(), and zero_grad() not between the two. If the model was "
                "copied or moved, make the optimizer of its present parameters. (A JaxTrainStep updates without step().)"
            )
        else:
            return
        self._warned_of_no_gradients = True
        warnings.warn(f"{type(self).__name__}.step updated nothing: {why}", stacklevel=stack_level())

    def _warn_of_multiplied_lr(self) -> None:
        """Warn once if the given lr multiplies an update that a learning rate multiplies already.

        If one group has an lr of 1, the lr of each other group is a multiplier on purpose.
        """
        rates: dict[int, tuple[OptimizerSpec, list[float]]] = {}
        for group in self.param_groups:
            rule = self._optimizer_spec_of(group)
            rates.setdefault(id(rule), (rule, []))[1].append(float(group["lr"]))
        for rule, rates_of_groups in rates.values():
            if not lr_scales_update(rule) or any(math.isclose(lr, 1.0, rel_tol=1e-3) for lr in rates_of_groups):
                continue
            leaves = [
                leaf
                for leaf in self._records
                if self._optimizer_spec_of(self.param_groups[leaf.group_index]) is rule and self._is_trainable(leaf)
            ]
            leaves = [leaf for leaf in leaves if leaf.param.requires_grad]
            leaves = leaves if len(leaves) <= _MAX_TRACED_LEAVES else leaves[:1]
            factor = trailing_factor(rule, _shape_tree(self._records, leaves)) if leaves else None
            if factor is not None:
                lr = rates_of_groups[0]
                warnings.warn(
                    f"{type(self).__name__}: lr is {lr:g}, and the transformation multiplies its update by {abs(factor):g} already, so "
                    f"parameters move with a learning rate of {lr * abs(factor):g}. Give the learning rate once: to the transformation, "
                    "or as lr=... beside the function that makes it (optax.adam, lr=1e-3) or beside optax.adam(1.0).",
                    stacklevel=stack_level(),
                )
                return

    def _adopt_params(self, leaves: Sequence[ParamRecord]) -> None:
        with torch.inference_mode(False):  # otherwise the parameters would become inference tensors
            buckets.assign_buffers(leaves, self._hyperparam_table.bucket_key, self._options.writeback)

    def _warn_of_copies(self) -> None:
        """Warn once about parameters that could be updated in place if nobody else referenced their memory.

        The layout is complete before this raises, if warnings are errors.
        """
        names = [] if self._warned_of_copies or self._options.writeback != "inplace" else buckets.foreign_memory_params(self._trainable)
        if names:
            self._warned_of_copies = True
            warnings.warn(
                f"{type(self).__name__}: each step copies {few_names(names)}, because somebody else may hold their memory, which is not "
                "torch's own (torch.from_numpy, DLPack, a mapped file), and then sees the updates. If nobody needs to see them, give each "
                "parameter memory of its own (p.data = p.data.clone()), or delete the state_dict that was loaded with assign=True, before "
                "you make the optimizer: it then updates in place, which is faster. writeback='copy' copies without this warning.",
                stacklevel=stack_level(),
            )

    def _move_out_of_buckets(self, leaves: Iterable[ParamRecord]) -> bool:
        """Move parameters that are large rows of buckets, and their state, into buffers of their own. Return whether there were any.

        They stay there, so a later set of gradients finds them in the same place.
        """
        large_rows = list(filter(buckets.is_large_row, leaves))
        if not large_rows:
            return False
        with_state = [leaf for leaf in large_rows if leaf.state_buffers is not None]
        for leaf in large_rows:
            leaf.left_bucket = True
        self._rebuild_layout()
        states = self._launch_cache.states
        states.ensure_state(
            [leaf for leaf in with_state if leaf.spec is not None], states.hyperparam_table.values_by_row(self._hyperparams())
        )
        return True

    def _rebuild_if_outdated(self) -> None:
        """Rebuild the layout, as a step would, if user code changed groups or options, or if the last rebuild failed."""
        if self._recompile_signature() != self._prepared_signature:
            self._rebuild_layout()

    def _recompile_signature(self) -> list[object]:
        """Return everything that decides which parameters exist and which program runs. A step rebuilds the layout when it changes.

        Raises:
          ValueError: a group has a new key that is almost a known one, or that is an option of the constructor.
        """
        keys = list(map(tuple, self.param_groups))
        if keys != self._group_keys:
            for group in self.param_groups:
                self._refuse_options(group)
                param_groups.check_keys(type(self).__name__, group, self._optimizer_spec_of(group))
            self._group_keys = keys
        get: Any = dict.get  # faster than the method of `betas.BetasGroup`
        signature: list[object] = [self.max_grad_norm is None, self.ema_decay is None, len(self.param_groups)]
        for group, listed in zip(self.param_groups, self._params_by_group, strict=False):
            params = group["params"]
            signature += (id(group), get(group, "trainable", True), len(params) == len(listed) and all(map(is_, params, listed)))
            signature.append(get(group, betas.BETAS) is None)
        for group, name, decisive in self._hyperparam_table.recompile_keys:
            signature.append(group[name] if decisive is None else decisive(group[name]))
        return signature

    # ------------------------------------------------------------------ the step

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step in hooks and a profiler mark, as torch does, but only if somebody observes it: both cost as much as a small step."""
        with_torch_hooks, global_hooks = torch.optim.Optimizer.profile_hook_step(func), hooks.GLOBAL_HOOKS

        @disable_torch_compile
        @functools.wraps(func)
        def step(self: OptaxOptimizer, *args: Any, **kwargs: Any) -> Any:
            if (
                global_hooks.is_any_thread_profiled()
                or global_hooks.is_this_thread_profiled()
                or global_hooks.pre_hooks
                or self._optimizer_step_pre_hooks
            ):
                return with_torch_hooks(self, *args, **kwargs)
            result = func(self, *args, **kwargs)
            for hook in (*self._optimizer_step_post_hooks.values(), *global_hooks.post_hooks.values()):
                hook(self, (self, *args), kwargs)
            return result

        return step

    @disable_torch_compile
    def step(self, closure: Callable[[], Any] | None = None, **extra_args: PyTree) -> Any:
        """Update every trained parameter that has a gradient.

        Args:
          closure: reevaluates the model with gradients enabled and returns the loss.
          **extra_args: extra arguments of the transformation, such as `value=loss`: numbers, tensors, trees of them, or jax
            functions. A tree by the parameters' names, dotted or nested, becomes the nested dict of the parameters with a
            gradient. With a closure, `value` and `grad` are passed automatically, and so is `value_fn`, which runs the closure for a
            line search.

        Returns:
          The closure's loss, or None.

        Raises:
          ValueError: a gradient is sparse, its shape, dtype or device differs from its parameter's, or the storage of a gradient or
            parameter was freed. Nothing was updated.
          TypeError: the closure is no function, the transformation takes no extra arguments, or a required one is missing.
        """
        hyper_params = extra_args.pop("hyper_params", None) if self._temporary_hyper_params is not None else None
        if self._swap.swapped_by:
            self._swap.raise_swapped_error(f"{type(self).__name__}.step")
        loss, grads_checked = None, vars(self).pop("_grads_checked", False)
        if closure is not None:
            if not callable(closure):
                raise_for_closure(type(self).__name__, closure)
            with torch.enable_grad():
                loss = closure()
        search = None
        if closure is not None and any(rule.takes_extra_args for rule in self._optimizer_specs.values()):
            search = Closure(closure, self._records, self._hyperparam_table.all_paths)
            default_args = {"grad": ById(GRADS_PLACEHOLDER), "value_fn": search.value_fn} | ({} if loss is None else {"value": loss})
            extra_args = default_args | extra_args
        done = False
        while not done:
            with Transaction(self._devices) as locks:
                transaction = StepTransaction(self, f"{type(self).__name__}.step", locks)
                if hyper_params is None or self._temporary_hyper_params is None:
                    done = self._update(transaction, extra_args, grads_checked, search)
                else:
                    with self._temporary_hyper_params(hyper_params):
                        done = self._update(transaction, extra_args, grads_checked, search)
        return loss

    def _update(self, transaction: StepTransaction, extra_args: dict[str, PyTree], grads_checked: bool, search: Closure | None) -> bool:
        """Run the step within a transaction. Return False if it must start over, because the parameters are on other devices now.

        `grads_checked`: GradScaler has checked all gradients for infinities.
        """
        attributes = vars(self)
        arguments = transaction.begin(functools.partial(self._make_extra_args, extra_args) if extra_args else None)
        with_grad, grads = self._guards.check() or self._slow_path()
        if self._devices != transaction.locks.devices:
            return False
        scaled = "found_inf" in attributes or attributes.get("grad_scale") is not None  # GradScaler sets and deletes them
        if not with_grad:
            self._finish_without_gradients(GradSet((), NO_EXTRA_ARGS, scaled, scaled and grads_checked))
            return True
        extra, extra_arrays = (NO_EXTRA_ARGS, ()) if arguments is None else arguments.for_leaves(transaction.records(with_grad))
        hyperparams = self._hyperparams()
        if scaled:
            grad_scaler.check_scaler_tensors(grad_scale=attributes.get("grad_scale"), found_inf=attributes.get("found_inf"))
        grad_set = GradSet(with_grad, extra, scaled, scaled and grads_checked)
        on_device = self._launch_cache.bound_by_grad_set.get(grad_set)
        self._used_executables.hits += on_device is not None
        if on_device is None:
            on_device = self._prepare_launches(grad_set, hyperparams, transaction)
            if not on_device:
                return False
        self._launch_cache.last_grad_set = grad_set
        for device_step in on_device:
            for launch in device_step.launches:
                transaction.snapshots += launch.snapshot() if launch.executable.has_callback else ()
        numbers: list[Numbers] = []
        skip_counts: list[tuple[jax.typing.ArrayLike, jax.Array]] = []
        try:
            for device_step in on_device:
                launches = device_step.launches
                scales = (
                    self._loss_scale.program_arguments(launches[0].device, attributes.get("grad_scale"), attributes.get("found_inf"))
                    if scaled
                    else []
                )
                inputs = execute.StepInputs(grads, hyperparams, extra_arrays, scales)
                result = execute.run(device_step, inputs, transaction.completed)
                numbers.append(result.numbers)
                if scaled:
                    skip_counts.append((scales[2], result.skip_counts[0]))
                    self._loss_scale.record_skipped(launches[0].device, result.skip_counts[0])
                if result.moved:
                    self._launch_cache.rebind(launches)
        except BaseException as error:
            transaction.rollback(error)
            raise
        if self.max_grad_norm is not None or self._options.metrics:
            sums = self._sums_of_processes(numbers) if self._launch_cache.shard_groups.meshes else None
            self._last_step = LastStep(self.max_grad_norm, numbers, skip_counts, sums)
        if self._state_access.may_be_referenced:
            transaction.commit()
        if search is not None and search.error is not None:
            restore_values(transaction.snapshots)
            raise search.error
        return True

    def _finish_without_gradients(self, grad_set: GradSet) -> None:
        """Finish a step in which no trained parameter has a gradient. Other processes, which have other shards, may update theirs."""
        groups, numbers = self._launch_cache.shard_groups, Numbers()
        if self._launch_cache.needs_stats(grad_set):
            stats = sum_statistics(groups)
            numbers = Numbers(stats=[stats])
            if grad_set.has_loss_scale and not np.isfinite(stats[1]):
                self._loss_scale.count_skipped(self._devices[0])
        self._last_step = LastStep(self.max_grad_norm, [numbers], (), self._sums_of_processes([numbers]) if groups.meshes else None)
        self._warn_of_no_gradients()

    def _sums_of_processes(self, numbers: Sequence[Numbers]) -> dict[str, np.ndarray] | None:
        """Return the sums of squares of all processes, by label or group; None without metrics."""
        if not self._options.metrics:
            return None
        trained = [leaf for leaf in self._trainable if leaf.param.requires_grad]
        return sum_over_shards(numbers, trained, self._metrics_key, self._launch_cache.shard_groups)

    def _make_extra_args(self, extra_args: dict[str, PyTree]) -> ExtraArgs:
        """Return the extra arguments of a step. If their names differ from the last step's, the layout is rebuilt."""
        if not any(rule.takes_extra_args for rule in self._optimizer_specs.values()):
            raise TypeError(f"{type(self).__name__}.step: this transformation takes no extra arguments, but got {sorted(extra_args)}.")
        arguments = ExtraArgs(extra_args, self._records, self._hyperparam_table.all_paths)
        if arguments.names != self._extra_arg_names:
            before = self._extra_arg_names, self._extra_spec
            try:
                self._extra_spec, _ = arguments.for_leaves([leaf for leaf in self._trainable if leaf.param.requires_grad])
                self._extra_arg_names = arguments.names
                self._rebuild_layout()
            except BaseException:
                self._extra_arg_names, self._extra_spec = before  # the next step may not have the rejected arguments
                raise
        return arguments

    def _prepare_launches(
        self, grad_set: GradSet, hyperparams: np.ndarray, transaction: StepTransaction
    ) -> list[execute.DeviceStep[BoundExecutable]]:
        """Call `LaunchCache.prepare`. The next step rebuilds the layout after an error or an interrupt in it.

        Returns:
          The bound executables by device, or an empty list if the step must start over.
        """
        if self._move_out_of_buckets(self._launch_cache.leaves_of_sparse_buckets(grad_set.with_grad)):
            return []
        with transaction.preparing(grad_set.with_grad) as launches:
            bound = launches.prepare(grad_set, hyperparams, transaction.locks)
        if transaction.is_outdated(launches):
            return []
        self._log_prepared(bound)
        return bound

    def _log_prepared(self, steps: Sequence[execute.DeviceStep[BoundExecutable]]) -> None:
        """Log the executables of a set of gradients that is new."""
        if steps and _logs.is_on(_logs.PLAN):
            _logs.PLAN.info("%s", self._explain(steps, counts_bytes=False))
        if steps and _logs.is_on(_logs.MEMORY):
            _logs.MEMORY.info("%s: %s", self._subject, describe_step_memory([launch for step in steps for launch in step.launches]))

    def _slow_path(self) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        """Do the work of `Guards.check` parameter by parameter: check each gradient before any is used, and follow all changes.

        Returns:
          The positions of the records with a gradient, and the gradients.
        """
        with_grad: list[int] = []
        grads: list[torch.Tensor] = []
        in_other_dtypes: list[tuple[ParamRecord, torch.dtype]] = []
        for i, leaf in enumerate(self._trainable):
            p = leaf.param
            g = p.grad
            if g is None or not p.requires_grad:
                continue
            if leaf.spec is None and self._readopt(leaf):
                return self._slow_path()
            local_param = p
            if leaf.dtensor_layout is not None:
                local_param, g = leaf.dtensor_layout.to_local(p), leaf.dtensor_layout.local_grad(g)
            has_moved = local_param.data_ptr() != leaf.address or local_param.stride() != leaf.strides or local_param.shape != leaf.shape
            if has_moved and self._readopt(leaf):
                return self._slow_path()
            if g.is_sparse or g.shape != leaf.shape or g.dtype is not leaf.grad_dtype or g.device != leaf.device:
                if g.is_sparse or not leaf.accepts_grad(g):
                    raise ValueError(grad_error_text(type(self).__name__, leaf, g))
                in_other_dtypes.append((leaf, g.dtype))
            with_grad.append(i)
            grads.append(g)
        if in_other_dtypes:
            self._prepared_signature = None  # an interrupt would leave executables for gradients of another dtype
            for leaf, dtype in in_other_dtypes:
                leaf.grad_dtype = dtype
            self._rebuild_layout()
            return self._slow_path()
        leaves = [self._trainable[i] for i in with_grad]
        masked_grads = grads_with_dense_storage(type(self).__name__, leaves, grads)
        if masked_grads is grads:
            self._guards.record(self._trainable, with_grad, grads)
        else:
            self._guards.invalidate()  # each step must make its own copies
        return tuple(with_grad), masked_grads

    def _readopt(self, leaf: ParamRecord) -> bool:
        """Adopt parameters whose `data` was replaced.

        Return True if the layout was rebuilt and the step must check all parameters again.
        """
        p, known = leaf.param, (leaf.shape, leaf.dtype, leaf.device)
        if leaf.spec is None or (leaf.dtensor_layout is None and (p.shape, p.dtype, p.device) != known):
            self._rebuild_layout()  # it was frozen at the last rebuild, or had another shape or dtype
            return True
        check_has_storage(type(self).__name__, leaf)
        check_no_overlap(type(self).__name__, self._trainable)
        others = [x for x in self._trainable if x is not leaf and x.spec is not None and x.dtensor_layout is None and x.param.requires_grad]
        # Parameters without a gradient are included, because two may have been swapped. Parameters whose memory was freed are left out.
        moved = [leaf, *(x for x in others if x.param.data_ptr() not in (x.address, 0))]
        before = [x.placement_signature for x in moved]
        signature, self._prepared_signature = self._prepared_signature, None  # as in `_rebuild_layout`
        self._adopt_params(moved)  # together, so that rows of a bucket become rows of a bucket again
        if all(old in (None, x.placement_signature) for old, x in zip(before, moved, strict=True)):
            self._prepared_signature = signature
            return False
        self._rebuild_layout()
        return True

    def _hyperparams(self) -> np.ndarray:
        """Return all traced hyperparameters of this step. They are read from the groups, so the step uses what a scheduler wrote."""
        values = [1.0] * leaf_update.ONES
        values.append(self.max_grad_norm or 0.0)
        get: Any = dict.get  # faster than the method of `betas.BetasGroup`
        try:
            for source in self._hyperparam_table.rows:
                group, row, scale = source.group, source.transform, source.lr_scale
                taken = get(group, param_groups.INITIAL_LR_SCALE, 1.0)
                scale = scale if taken is None else scale * get(group, "lr_scale", 1.0) * taken  # `param_groups.lr_scale`, inlined
                for name, length in row.traced_hyperparams:
                    value = group[name]
                    if name == "lr" and not row.is_optax:
                        values.append(float(value) * scale)
                    elif name == "weight_decay":
                        values.append(float(value) * get(group, "wd_scale", 1.0) if source.decays else 0.0)
                    elif length:
                        if len(value) != length or (type(value) is not tuple and not validators.is_sequence(value)):
                            raise ValueError(name)
                        values.extend(map(float, value))
                    else:
                        values.append(float(value))
                if row.aux_state.average:
                    values.append(float(self.ema_decay))
                if row.is_optax:
                    values.append(scale if source.has_lr else scale * float(group["lr"]))
        except (TypeError, ValueError, RuntimeError):
            for group in self.param_groups:  # raises an error that names the key and its value
                param_groups.check_types(type(self).__name__, group, self._optimizer_spec_of(group))
            raise
        values += [0.0] * (self._hyperparam_table.vector_length - len(values))
        return np.array(values)

    @property
    def skipped_steps(self) -> int:
        """The number of steps that programs skipped because of a gradient that was not finite. Reading it waits for the device."""
        return self._loss_scale.skipped

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global norm of the gradients of the last step, a float64 tensor without dimensions.

        It is the norm over all trained parameters before clipping, of the unscaled gradients: what `torch.nn.utils.clip_grad_norm_`
        returns. Reading it does not wait for a GPU; `float(optimizer.grad_norm)` does. It is None before the first step, and where neither
        `max_grad_norm` nor `metrics=True` is set. A step without gradients has the norm 0.
        """
        is_known = self._last_step is not None and (self.max_grad_norm is not None or self._options.metrics)
        return self._last_step.grad_norm() if self._last_step is not None and is_known else None

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger, by name. The optimizer needs `metrics=True`.

        Reading them waits for the device. The names are:

        - `grad_norm`: the norm of the unscaled gradients before clipping, as `grad_norm` has it;
        - `update_norm`, `param_norm`: the norms of what the step added to the parameters, and of the parameters before it;
        - `update_ratio`: `update_norm` divided by `param_norm`;
        - `clip_factor`, with `max_grad_norm`: what the gradients were multiplied by, 1 where the norm is below the bound;
        - `skipped`: 1 if the step changed nothing because a gradient of a scaled loss was not finite, else 0; `skipped_steps`: how many
          steps did so.

        Where parameters have several labels, or else several param groups, each of the first four has an entry for each of them as well,
        such as `grad_norm/head` or `grad_norm/group_0`; a group with a `name` goes by its name. Only trained elements count. A norm is
        NaN or infinite where the gradients are. The result is empty before the first step.

        Raises:
          RuntimeError: the optimizer was made without `metrics=True`.
        """
        if not self._options.metrics:
            raise RuntimeError(f"{type(self).__name__}.metrics: no metrics are computed. Construct the optimizer with metrics=True.")
        if self._last_step is None:
            return {}
        return self._last_step.metrics_by_key(self._metrics_key) | {"skipped_steps": float(self.skipped_steps)}

    def _metrics_key(self, leaf: ParamRecord) -> str:
        """Return the name under which the metrics of a parameter are summed up."""
        if self._is_partitioned:
            return str(leaf.label)
        return str(self.param_groups[leaf.group_index].get("name", f"group_{leaf.group_index}"))

    def ema_params(self) -> AbstractContextManager[None]:
        """Swap the averages of the trained weights into the parameters while the context is open. It needs `ema_decay`.

        The swap is in place, and averages are rounded to the parameter's dtype. The trained bits return on exit, also after an
        exception. Parameters that were never updated, such as frozen ones, keep their values.

        Raises:
          RuntimeError: there is no average, or the context is open already. Nothing is changed then.
        """
        cls_name = type(self).__name__
        if self.ema_decay is None:
            raise RuntimeError(f"{cls_name}.ema_params: ema_decay is None, so there is no average. Construct with ema_decay=0.999, say.")
        return self._swap.swap_in(cls_name, "ema_params", self._averages, self._transaction)

    def _averages(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, state[EMA_PARAM]) for p, state in self.state.items() if EMA_PARAM in state]

    # ------------------------------------------------------------------ checkpoints, copies, reports

    def state_dict(self) -> StateDict:
        """Return torch's state_dict, with an empty entry for each frozen parameter that still requires grad.

        torch.distributed.checkpoint loads strictly and needs this entry. After a load, the state of such a parameter is initialized at its
        first gradient.
        """

        with checkpoint.temporary_hook(
            self.register_state_dict_post_hook, checkpoint.complete_state_dict, prepend=True
        ):  # before the user's hooks
            return super().state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state_dict of this class, or of the torch optimizer that it replaces.

        Differences from torch: parameters are matched by name if both sides have names, and the names may have other wrappers
        (`_orig_mod.`, `module.`). Frozen parameters may be missing. State keeps a dtype that is wider than its parameter's. Group flags
        that the saved groups lack keep their values. Tensors are copied, never shared.

        Raises:
          ValueError: groups, parameters, state fields or shapes do not match, or values are damaged. Parameters and state are then as
            before.
          TypeError: it is no dict.
        """
        saved_groups.check_is_dict(state_dict)
        with self._transaction(), checkpoint.temporary_hook(self.register_load_state_dict_pre_hook, checkpoint.check_and_align):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> StateDict:
        """Return the attributes for pickle and deepcopy."""
        own = {key: self.__dict__[key] for key in self._copied_attributes}
        return (
            super().__getstate__()
            | own
            | {"_decided": [(leaf.name, leaf.group_index, leaf.decision) for leaf in self._reconcile_records()]}
        )

    def __setstate__(self, state: StateDict) -> None:
        """Set state and groups that `state_dict.check_and_align` has checked, or all attributes of a copied or unpickled optimizer."""
        decided = state.pop("_decided", None)
        with self._restore_on_error() if decided is None else nullcontext():
            self._set_state(state, decided)

    def _set_state(self, state: StateDict, decisions: Sequence[tuple[str, int, ParamDecision]] | None) -> None:
        defaults = dict(self.defaults if decisions is None else state["defaults"])
        super().__setstate__(state)
        self.defaults = self._with_momentum(defaults)  # torch adds "differentiable", which must not get into loaded groups
        self.param_groups[:] = map(self._with_betas, self.param_groups)
        if decisions is None:
            self._records = self._reconcile_records()
        else:
            self._init_uncopied()
            params = [p for group in self.param_groups for p in group["params"]]
            self._records = [
                ParamRecord.from_decision(name, p, group, columns) for p, (name, group, columns) in zip(params, decisions, strict=True)
            ]
            self._constructed = True
        checkpoint.unwrap_state(self.state, self._records)
        checkpoint.fill_group_defaults(self.param_groups, self.defaults, self._records if decisions is None else ())
        self._rebuild_layout(moves_params=decisions is None)
        self._handle_loss_scale_if_fused()

    def _state_fields(self, leaf: ParamRecord, group: ParamGroup) -> dict[str, StateField] | None:
        """Return the state fields of a parameter by name, if it is in this group; None if it is frozen and its fields are unknown."""
        return self._hyperparam_table.state_fields(leaf, group, self._optimizer_spec_of(group))

    def bytes_accessed(self) -> float:
        """Return the bytes that one step moves, by the compiler's count, for the last set of gradients."""
        of_updates = sum(launch.executable.bytes_accessed for launch in self._launch_cache.last_used)
        return of_updates + _stats_bytes(self._launch_cache.last_steps)

    def cache_info(self) -> CacheInfo:
        """Return how many steps found their executables in the cache, and how many executables were used and compiled."""
        return self._used_executables.info

    def report(self, full: bool = False) -> report.Report:
        """Return a report of how each parameter is treated: text when printed, a table in a notebook, and `rows` for programs.

        Args:
          full: show one line for each parameter. By default, above 40 parameters, a line stands for the parameters of a module that have
            equal settings. `rows` has each parameter in both cases.
        """
        records = self._reconcile_records()
        return report.Report(type(self).__name__, records, self.param_groups, self.state, self._inner_rates(records), full)

    def _inner_rates(self, records: Sequence[ParamRecord]) -> dict[int, InnerRates]:
        """Return the rates inside the transformation, by id of the record, for each trained parameter whose lr multiplies an update."""
        by_transform: dict[Hashable, list[tuple[ParamRecord, Path]]] = {}
        for leaf, path in zip(records, tree_paths([leaf.name for leaf in records]), strict=True):
            rule = self._optimizer_spec_of(self.param_groups[leaf.group_index])
            if lr_scales_update(rule) and self._is_trainable(leaf) and leaf.param.requires_grad:
                by_transform.setdefault((id(rule), None if rule.is_instance else leaf.group_index), []).append((leaf, path))
        found: dict[int, InnerRates] = {}
        for own in by_transform.values():
            group, numbers = self.param_groups[own[0][0].group_index], dict[str, set[float]]()
            for leaf, _ in own:
                for name, value in self.state.get(leaf.param, {}).items():
                    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex():
                        numbers.setdefault(name, set()).add(value.item())
            alike: dict[Hashable, tuple[ParamRecord, Path]] = {}  # the first of parameters with the same update
            keys = [(leaf.shape, leaf.dtype) if leaf.spec is not None and leaf.spec.path is None else id(leaf) for leaf, _ in own]
            for key, each in zip(keys, own, strict=True):
                alike.setdefault(key, each)
            params = _shape_tree(records, [leaf for leaf, _ in alike.values()])
            rates = inner_rates(self._optimizer_spec_of(group), group, params, numbers)
            found |= {id(leaf): rates.get(alike[key][1], InnerRates()) for key, (leaf, _) in zip(keys, own, strict=True)}
        return found

    def explain(self) -> explain.Explanation:
        """Return what the last step ran: executables, kernel classes, buckets, bytes, copies, and why the last compilation happened.

        It prints as text, as tables in a notebook, and has fields (`explain().copies`). To count the bytes of gradients that are read by
        address, it compiles a program. The log `maskbridge.plan` (`MASKBRIDGE_LOGS=plan`) has the same text for each new set of gradients.
        """
        return self._explain(self._launch_cache.last_steps)

    def _explain(self, steps: Sequence[execute.DeviceStep[BoundExecutable]], counts_bytes: bool = True) -> explain.Explanation:
        trained = [leaf for leaf in self._trainable if leaf.spec is not None]
        launches, used = [launch for step in steps for launch in step.launches], self._used_executables
        return explain.Explanation(
            self._subject,
            launches,
            trained,
            used.last_compilation,
            used.info,
            counts_bytes=counts_bytes,
            stats_bytes=_stats_bytes(steps) if counts_bytes else 0,
        )

    @property
    def _subject(self) -> str:
        """The first words of logs and explanations."""
        return f"{type(self).__name__} on {', '.join(map(str, self._devices))}"

    def __str__(self) -> str:
        return str(self.report())


def _shape_tree(records: Sequence[ParamRecord], leaves: Sequence[ParamRecord]) -> PyTree:
    """Return the tree of shapes that a transformation sees for these leaves, with None in place of all other records."""
    paths = tree_paths([leaf.name for leaf in records])
    kinds = {id(leaf): jax.ShapeDtypeStruct(tuple(leaf.param.shape), numpy_dtype(leaf.dtype)) for leaf in leaves}
    root: PyTree = {}
    for leaf, (*above, last) in zip(records, paths, strict=True):
        node = root
        for part in above:
            node = node.setdefault(part, {})
        node[last] = kinds.get(id(leaf))
    return root


def _stats_bytes(steps: Sequence[execute.DeviceStep[BoundExecutable]]) -> float:
    """Return the bytes that the statistics of gradients read before the executables of a step, by the compiler's count."""
    return sum(step.stats_stage.bytes_accessed for step in steps if step.stats_stage is not None)
