"""The optimizer class under all others: it updates torch parameters by compiled JAX programs, one or more for each device.

A change of param groups, parameters or options rebuilds the layout: records, hyperparameter table, buffers and caches. A step in between
compares guards and calls the bound executables.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch

from bridge import _process
from bridge._compiler import leaf_update
from bridge._compiler.spec import AVERAGE, GRADIENTS, NO_EXTRA, Extra, Field, Same
from bridge._interop.dlpack import device_of
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.types import PyTree
from bridge._names import tree_paths
from bridge._process import not_traced
from bridge._runtime import execute
from bridge._runtime.transaction import Transaction
from bridge._transforms.selectors import Selector
from bridge._warnings import stack_level

from . import options, report
from . import state_dict as checkpoint
from ._params import buckets, param_groups
from ._params.hyperparam_table import Rows
from ._params.record import Decided, Leaf, bad_gradient, check_apart, check_norm, check_whole, with_elements
from ._params.selectors import Selectors
from ._params.state import States
from ._params.swap import Exchange
from ._rules import betas, validators
from ._rules.from_optax import as_rule, gives_lr, last_factor, multiplies
from ._rules.optimizer_spec import Rule
from ._rules.types import Hyperparams, MutableParamGroup, ParamGroup, StateDict
from ._step import grad_scaler, hooks
from ._step.bound_executable import Launch, restore
from ._step.closure import Closure
from ._step.extra_args import Arguments
from ._step.grad_scaler import Scaling
from ._step.guards import Sight
from ._step.launch_cache import Launches
from ._step.recompile_reasons import Cache, CacheInfo, few_names
from ._step.state_watch import Asks
from .optimizer_base import GroupedOptimizer, devices_of
from .options import Changeable, Options

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_ALL = "all"  # the key of the only `OptimizerSpec`
_FEW = 50  # with more leaves, only the first is traced to find a constant factor of the update
_ENGINE = options.NAMES | {"mask", "decay_mask", "lr_scale"}


class OptaxOptimizer(GroupedOptimizer):
    """A `torch.optim.Optimizer` whose update is one compiled JAX program that writes into the parameters' own memory.

    Args:
      params: everything that torch.optim takes: tensors, (name, tensor) pairs, or dict groups of either. Patterns need names.
      tx: an optax transformation (anything with `init` and `update`), a function that makes one from keyword arguments
        (`optax.adamw`, `bridge.rules.adam`), or a `bridge.OptimizerDef`. It sees the same tree as in pure JAX: the nested
        dict of the parameters, by their dotted names. A transformation updates all groups; a function makes one for each group.
      mask: which parameters are optimized, True = optimized; any selector of the README. A parameter with False is frozen:
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
      **hyperparams: the hyperparameters of a function or definition. Each number lives in `param_groups` and may change at
        any step at no cost. `lr` is the function's `learning_rate`. If the function has none, if its learning rate is a
        schedule, or if `tx` is a transformation, `lr` multiplies the update (default 1.0; 0 changes nothing).

    `step` waits for its results. Parameters with `requires_grad=False` are frozen even with a stale `.grad` (torch.optim
    would still update them). A parameter whose `.grad` is None keeps its value, state and step count, if the transformation
    updates each parameter separately. A transformation that looks at all parameters (a global norm inside it,
    `optax.MultiSteps`) has one state for all of them, which the state of every parameter shows.

    For a DTensor (FSDP2's `fully_shard`), each process updates its local shard, by a copy. `state` holds DTensors with the
    parameter's placements. A sharded parameter needs an elementwise transformation, and no `max_grad_norm`.

    Raises:
      ValueError, TypeError: empty or duplicate parameters, unknown arguments or group keys, values out of range, a selector
        that matches nothing, or an error of the transformation. Nothing has been changed then.
    """

    _overridden: Callable[..., AbstractContextManager[None]] | None = None  # sets `hyper_params` for one step, in classes that have them
    max_grad_norm: Any = Changeable()
    ema_decay: Any = Changeable()
    # The attributes that copies and pickles have in addition to torch's.
    _carried = ("_rules", "_options", "_selectors", "_gave_lr", "max_grad_norm", "ema_decay")

    def __init__(
        self,
        params: ParamsT,
        tx: object,
        *,
        mask: Selector = None,
        decay_mask: Selector = None,
        lr_scale: Selector = None,
        max_grad_norm: float | None = None,
        writeback: str = "inplace",
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        ema_decay: float | None = None,
        **hyperparams: Any,
    ) -> None:
        owner = type(self).__name__
        engine = {"max_grad_norm": max_grad_norm, "writeback": writeback, "state_dtype": state_dtype, "master_weights": master_weights}
        engine |= {"stochastic_rounding": stochastic_rounding, "rounding_seed": rounding_seed, "ema_decay": ema_decay}
        torch_options = {name: hyperparams.pop(name) for name in param_groups.TORCH_OPTIONS & hyperparams.keys()}
        rule, defaults = as_rule(owner, tx, hyperparams)
        self._gave_lr = gives_lr(type(self), tx, hyperparams)
        param_groups.make_tuples(defaults, rule)
        if not rule.scaled:
            param_groups.check_keywords(owner, hyperparams, rule.hyperparams.keys() | param_groups.TORCH_OPTIONS | _ENGINE)
        selectors = Selectors(owner, {"mask": mask, "decay_mask": decay_mask, "lr_scale": lr_scale})
        self._build(param_groups.listed(owner, params), {_ALL: rule}, defaults | torch_options, selectors, engine)

    def _build(
        self, params: ParamsT, rules: dict[Hashable, Rule], defaults: MutableParamGroup, selectors: Selectors, engine: Hyperparams
    ) -> None:
        """Construct with one `OptimizerSpec` for all groups, or one for each label."""
        owner = type(self).__name__
        self._rules, self._options = rules, Options.of(owner, engine)
        self.max_grad_norm, self.ema_decay = self._options.max_grad_norm, self._options.ema_decay
        if not self.by_label:
            param_groups.check_group(owner, defaults, rules[_ALL])
        if selectors["decay_mask"] is not None and not any("weight_decay" in rule.hyperparams for rule in rules.values()):
            raise ValueError(f"{owner}: decay_mask is given, but this rule has no weight_decay.")
        self._selectors = selectors
        self._leaves: list[Leaf] = []
        self._constructed = False
        self._begin()
        super().__init__(params, self._with_momentum(defaults))
        self._resolve([], self._leaves)
        self._warn_of_products()
        self._constructed = True
        self._place()
        self._follow_fused()

    def _begin(self) -> None:
        """Initialize the attributes that no copy or pickle has."""
        self._signature = []
        self._extra, self._argument_names, self._cache = NO_EXTRA, (), Cache(type(self).__name__)
        self._group_keys: list[tuple[str, ...]] = []  # the keys of each group at the last check
        self._scaling, self._exchange, self._sight, self._asks = Scaling(), Exchange(), Sight(), Asks()
        self._warned = self._warned_of_frozen = False

    def rule_of(self, group: ParamGroup) -> Rule:
        """Return the `OptimizerSpec` that updates the parameters of a group."""
        return self._rules[group.get("label") if self.by_label else _ALL]

    def _with_momentum(self, defaults: MutableParamGroup) -> MutableParamGroup:
        """Return the defaults of all groups. Schedulers find `betas` in them if every group has momenta, under this or another name."""
        if not self.by_label:
            return self._with_betas(defaults)
        everywhere = all(
            betas.BETAS in rule.hyperparams or self._betas_of(rule) for label, rule in self._rules.items() if label is not None
        )
        return betas.Group(defaults, ()) if everywhere else defaults

    # ------------------------------------------------------------------ placement

    def _place(self, move: bool = True) -> None:
        """Rebuild the layout: hyperparameter rows, buffers, state and caches of all parameters.

        `moves_params` False leaves the buffers to the first step, because an unpickler still references the tensors that it has made.

        Records, hyperparameter table and caches are consistent only when all of this is done. `_prepared_signature` is None until then, so
        the step after an error or an interrupt rebuilds the layout.
        """
        with self._transaction():
            self._arrange(move)

    def _arrange(self, move: bool) -> None:
        if self._signature is None:
            gc.collect()  # objects of an interrupted rebuild may still reference the parameters' memory
        self._signature = None
        if "_launches" in vars(self):
            self._launches.is_outdated = True  # first, because a step that compiles continues even if this raises in a signal handler
        _process.refuse_fork()
        for group in self.param_groups:  # user code may have added a plain dict
            betas.take_betas(group, self._betas_of(self.rule_of(group)))
        leaves = self._followed()
        for leaf in leaves:
            if self._is_active(leaf) and leaf.param.requires_grad:
                param_groups.check_parameter(type(self).__name__, leaf.name, leaf.param)
            leaf.look()  # model.to() may have changed the dtype
        self._leaves, self._devices = leaves, devices_of(leaf.param for leaf in leaves)
        checkpoint.update_trainable_params(self.param_groups, leaves)
        check_norm(type(self).__name__, self.max_grad_norm, filter(self._is_active, self._leaves))
        kept = self._options.kept(self.ema_decay is not None)
        self.arrangement = Rows(type(self).__name__, self._leaves, self._is_active, self.param_groups, self.rule_of, self._extra, kept)
        self._listed = [list(group["params"]) for group in self.param_groups]
        self._sight.forget()
        self._active = list(filter(self._is_active, self._leaves))
        for leaf in self._leaves:
            leaf.state = None
        trained = [leaf for leaf in self._active if leaf.param.requires_grad]
        for leaf in trained:
            device_of(leaf.param)  # raises for an unsupported device before any parameter is moved
        check_apart(type(self).__name__, self._active)
        if move:
            self._place_leaves(trained)
        self._active.sort(key=self.arrangement.sort_key)
        rules = list(map(self.rule_of, self.param_groups))
        states = States(type(self).__name__, self._active, self.arrangement, rules, vars(self)["state"], self._options.begin)
        self._launches = Launches(states, self.max_grad_norm, self._cache)
        states.begin_eager(self._hyperparams)
        self._signature = self._group_signature()
        self._warn_of_copies()

    def _warn_of_frozen(self) -> None:
        """Warn once about a step that updates nothing because every gradient belongs to a frozen parameter."""
        names = [] if self._warned_of_frozen else [leaf.name for leaf in self._leaves if leaf.param.grad is not None]
        if names:
            self._warned_of_frozen = True
            warnings.warn(
                f"{type(self).__name__}.step updated nothing: the only gradients are of frozen parameters ({few_names(names)}). report() "
                "says what froze each of them: the mask, trainable=False of its group, or requires_grad=False, maybe set after backward().",
                stacklevel=stack_level(),
            )

    def _warn_of_products(self) -> None:
        """Warn once if the given lr multiplies an update that a learning rate multiplies already.

        If one group has an lr of 1, the lr of each other group is a multiplier on purpose.
        """
        rates: dict[int, tuple[Rule, list[float]]] = {}
        for group in self.param_groups:
            rule = self.rule_of(group)
            rates.setdefault(id(rule), (rule, []))[1].append(float(group["lr"]))
        for rule, given in rates.values():
            if not multiplies(rule) or any(math.isclose(lr, 1.0, rel_tol=1e-3) for lr in given):
                continue
            seen = [leaf for leaf in self._leaves if self.rule_of(self.param_groups[leaf.group]) is rule and self._is_active(leaf)]
            seen = [leaf for leaf in seen if leaf.param.requires_grad]
            seen = seen if len(seen) <= _FEW else seen[:1]
            factor = last_factor(rule, self._tree_of(seen)) if seen else None
            if factor is not None:
                lr = given[0]
                warnings.warn(
                    f"{type(self).__name__}: lr is {lr:g}, and the transformation multiplies its update by {abs(factor):g} already, so "
                    f"parameters move with a learning rate of {lr * abs(factor):g}. Give the learning rate once: to the transformation, "
                    "or as lr=... beside the function that makes it (optax.adam, lr=1e-3) or beside optax.adam(1.0).",
                    stacklevel=stack_level(),
                )
                return

    def _tree_of(self, leaves: Sequence[Leaf]) -> PyTree:
        """Return the tree of shapes that a transformation sees for these records, with None in place of all others."""
        paths = tree_paths([leaf.name for leaf in self._leaves])
        kinds = {id(leaf): jax.ShapeDtypeStruct(tuple(leaf.param.shape), numpy_dtype(leaf.dtype)) for leaf in leaves}
        root: PyTree = {}
        for leaf, (*above, last) in zip(self._leaves, paths, strict=True):
            node = root
            for part in above:
                node = node.setdefault(part, {})
            node[last] = kinds.get(id(leaf))
        return root

    def _place_leaves(self, leaves: Sequence[Leaf]) -> None:
        with torch.inference_mode(False):  # otherwise the parameters would become inference tensors
            buckets.place(leaves, self.arrangement.pack_key, self._options.writeback)

    def _warn_of_copies(self) -> None:
        """Warn once about parameters that could be updated in place if nobody else referenced their memory.

        The layout is complete before this raises, if warnings are errors.
        """
        names = [] if self._warned or self._options.writeback != "inplace" else buckets.copied_by_others(self._active)
        if names:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: each step copies {few_names(names)}, because somebody else may hold their memory, which is not "
                "torch's own (torch.from_numpy, DLPack, a mapped file), and then sees the updates. If nobody needs to see them, give each "
                "parameter memory of its own (p.data = p.data.clone()), or delete the state_dict that was loaded with assign=True, before "
                "you make the optimizer: it then updates in place, which is faster. writeback='copy' copies without this warning.",
                stacklevel=stack_level(),
            )

    def dissolve(self, leaves: Iterable[Leaf]) -> bool:
        """Move parameters that are large rows of buckets, and their state, into buffers of their own. Return whether there were any.

        They stay there, so a later set of gradients finds them in the same place.
        """
        found = list(filter(buckets.is_large_row, leaves))
        if not found:
            return False
        begun = [leaf for leaf in found if leaf.state is not None]
        for leaf in found:
            leaf.apart = True
        self._place()
        states = self._launches.states
        states.give([leaf for leaf in begun if leaf.spec is not None], states.rows.cut(self._hyperparams()))
        return True

    def _follow(self) -> None:
        """Rebuild the layout, as a step would, if user code changed groups or options, or if the last rebuild failed."""
        if self._group_signature() != self._signature:
            self._place()

    def _group_signature(self) -> list[object]:
        """Return everything that decides which parameters exist and which program runs. A step rebuilds the layout when it changes.

        Raises:
          ValueError: a group has a new key that is almost a known one.
        """
        keys = list(map(tuple, self.param_groups))
        if keys != self._group_keys:
            for group in self.param_groups:
                param_groups.check_keys(type(self).__name__, group, self.rule_of(group))
            self._group_keys = keys
        get: Any = dict.get  # faster than the method of `betas.Group`
        signature: list[object] = [self.max_grad_norm is None, self.ema_decay is None, len(self.param_groups)]
        for group, listed in zip(self.param_groups, self._listed, strict=False):
            params = group["params"]
            signature += (id(group), get(group, "trainable", True), len(params) == len(listed) and all(map(is_, params, listed)))
            signature.append(get(group, betas.BETAS) is None)
        for group, name, decisive in self.arrangement.watched:
            signature.append(group[name] if decisive is None else decisive(group[name]))
        return signature

    # ------------------------------------------------------------------ the step

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step in hooks and a profiler mark, as torch does, but only if somebody observes it: both cost as much as a small step."""
        heard, found = torch.optim.Optimizer.profile_hook_step(func), hooks.FOUND

        @not_traced
        @functools.wraps(func)
        def step(self: OptaxOptimizer, *args: Any, **kwargs: Any) -> Any:
            if found.noted() or found.profiled() or found.before or self._optimizer_step_pre_hooks:
                return heard(self, *args, **kwargs)
            result = func(self, *args, **kwargs)
            for hook in (*self._optimizer_step_post_hooks.values(), *found.after.values()):
                hook(self, (self, *args), kwargs)
            return result

        return step

    @not_traced
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
          TypeError: the transformation takes no extra arguments, or a required one is missing.
        """
        numbers = extra_args.pop("hyper_params", None) if self._overridden is not None else None
        if self._exchange.inside:
            self._exchange.refuse(f"{type(self).__name__}.step")
        loss, looked = None, vars(self).pop("_looked", False)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        search = None
        if closure is not None and any(rule.takes_extra for rule in self._rules.values()):
            search = Closure(closure, self._leaves, self.arrangement.skeleton)
            offered = {"grad": Same(GRADIENTS), "value_fn": search.value_fn} | ({} if loss is None else {"value": loss})
            extra_args = offered | extra_args
        done = False
        while not done:
            with Transaction(self._devices) as transaction:
                if numbers is None or self._overridden is None:
                    done = self._update(transaction, extra_args, looked, search)
                else:
                    with self._overridden(numbers):
                        done = self._update(transaction, extra_args, looked, search)
        return loss

    def _update(self, transaction: Transaction, extra_args: dict[str, PyTree], looked: bool, search: Closure | None) -> bool:
        """Run the step within a transaction. Return False if it must start over, because the parameters are on other devices now.

        `grads_checked`: GradScaler has checked all gradients for infinities.
        """
        given, devices = vars(self), self._devices
        if self._exchange.inside:  # another thread may have opened the context
            self._exchange.refuse(f"{type(self).__name__}.step")
        arguments = self._arguments(extra_args) if extra_args else None
        if self._group_signature() != self._signature:
            self._place()
        asked = self._asks.count
        if self._asks.open and not self._as_left():
            self._place()  # user code edited the state: continue from the edited values
        live, grads = self._sight.glance() or self._look()
        if self._devices != devices or not live:
            if not live:
                self._warn_of_frozen()
            return self._devices == devices
        extra, further = (NO_EXTRA, ()) if arguments is None else arguments.of([self._active[i] for i in live])
        hyperparams = self._hyperparams()
        scaled = "found_inf" in given or given.get("grad_scale") is not None  # GradScaler sets and deletes them
        if scaled:
            grad_scaler.check(grad_scale=given.get("grad_scale"), found_inf=given.get("found_inf"))
        checked = scaled and looked
        on_device = self._launches.known.get((live, extra, scaled, checked))
        self._cache.hits += on_device is not None
        if on_device is None:
            on_device = self._build_launches(live, extra, scaled, hyperparams, checked, transaction)
            if not on_device:
                return False
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        for launch in itertools.chain.from_iterable(on_device):
            before += launch.copied() if launch.program.calls_back else ()
        landed: list[Launch] = []
        try:
            for launches in on_device:
                scales = self._scaling.arrays(launches[0].device, given.get("grad_scale"), given.get("found_inf")) if scaled else ()
                moved, skipped = execute.run(launches, grads, hyperparams, further, scales, landed)
                if scaled:
                    self._scaling.keep(launches[0].device, skipped[0])
                if moved:
                    self._launches.follow(launches)
        except BaseException as error:
            self._launches.follow(landed)
            if self._launches.salvage(error, before, landed):
                self._place()
            raise
        if self._asks.open:
            self._take_back(asked)
        if search is not None and search.error is not None:
            restore(before)
            raise search.error
        return True

    def _arguments(self, given: dict[str, PyTree]) -> Arguments:
        """Return the extra arguments of a step. If their names differ from the last step's, the layout is rebuilt."""
        if not any(rule.takes_extra for rule in self._rules.values()):
            raise TypeError(f"{type(self).__name__}.step: this transformation takes no extra arguments, but got {sorted(given)}.")
        arguments = Arguments(given, self._leaves, self.arrangement.skeleton)
        if arguments.names != self._argument_names:
            before = self._argument_names, self._extra
            try:
                self._extra, _ = arguments.of([leaf for leaf in self._active if leaf.param.requires_grad])
                self._argument_names = arguments.names
                self._place()
            except BaseException:
                self._argument_names, self._extra = before  # the next step may not have the rejected arguments
                raise
        return arguments

    def _build_launches(
        self, live: tuple[int, ...], extra: Extra, scaled: bool, hyperparams: np.ndarray, checked: bool, transaction: Transaction
    ) -> list[list[Launch]]:
        """Call `LaunchCache.prepare`. The next step rebuilds the layout after an error or an interrupt in it.

        Returns:
          The bound executables by device, or an empty list if the step must start over.
        """
        if self.dissolve(self._launches.sparse(live)):
            return []
        launches, signature, self._signature = self._launches, self._signature, None
        with self.arrangement.explaining([self._active[i] for i in live]):
            found = launches.build(live, extra, scaled, hyperparams, checked, transaction)
        if launches.is_outdated or self._exchange.inside:  # a signal handler has changed the optimizer during the compilation
            return []
        self._sight.forget(launches.began)
        self._signature = signature
        return found

    def _look(self) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        """Do the work of `Guards.check` parameter by parameter: check each gradient before any is used, and follow all changes.

        Returns:
          The positions of the records with a gradient, and the gradients.
        """
        live: list[int] = []
        grads: list[torch.Tensor] = []
        in_other_dtypes: list[tuple[Leaf, torch.dtype]] = []
        for i, leaf in enumerate(self._active):
            p = leaf.param
            g = p.grad
            if g is None or not p.requires_grad:
                continue
            if leaf.spec is None and self._placed_anew(leaf):
                return self._look()
            here = p
            if leaf.layout is not None:
                here, g = leaf.layout.local(p), leaf.layout.gradient(g)
            elsewhere = here.data_ptr() != leaf.address or here.stride() != leaf.strides or here.shape != leaf.shape
            if elsewhere and self._placed_anew(leaf):
                return self._look()
            if g.is_sparse or g.shape != leaf.shape or g.dtype is not leaf.gradient_dtype or g.device != leaf.device:
                if g.is_sparse or not leaf.takes(g):
                    raise ValueError(bad_gradient(type(self).__name__, leaf, g))
                in_other_dtypes.append((leaf, g.dtype))
            live.append(i)
            grads.append(g)
        if in_other_dtypes:
            self._signature = None  # an interrupt would leave executables for gradients of another dtype
            for leaf, dtype in in_other_dtypes:
                leaf.gradient_dtype = dtype
            self._place()
            return self._look()
        leaves = [self._active[i] for i in live]
        found = with_elements(type(self).__name__, leaves, grads)
        if found is grads:
            self._sight.remember(self._active, live, grads)
        else:
            self._sight.forget()  # each step must make its own copies
        return tuple(live), found

    def _placed_anew(self, leaf: Leaf) -> bool:
        """Adopt parameters whose `data` was replaced.

        Return True if the layout was rebuilt and the step must check all parameters again.
        """
        p, known = leaf.param, (leaf.shape, leaf.dtype, leaf.device)
        if leaf.spec is None or (leaf.layout is None and (p.shape, p.dtype, p.device) != known):
            self._place()  # it was frozen at the last rebuild, or had another shape or dtype
            return True
        check_whole(type(self).__name__, leaf)
        check_apart(type(self).__name__, self._active)
        others = [x for x in self._active if x is not leaf and x.spec is not None and x.layout is None and x.param.requires_grad]
        # Parameters without a gradient are included, because two may have been swapped. Parameters whose memory was freed are left out.
        elsewhere = [leaf, *(x for x in others if x.param.data_ptr() not in (x.address, 0))]
        before = [x.signature for x in elsewhere]
        signature, self._signature = self._signature, None  # as in `_rebuild_layout`
        self._place_leaves(elsewhere)  # together, so that rows of a bucket become rows of a bucket again
        if all(old in (None, x.signature) for old, x in zip(before, elsewhere, strict=True)):
            self._signature = signature
            return False
        self._place()
        return True

    def _hyperparams(self) -> np.ndarray:
        """Return all traced hyperparameters of this step. They are read from the groups, so the step uses what a scheduler wrote."""
        values = [1.0] * leaf_update.ONES
        values.append(self.max_grad_norm or 0.0)
        get: Any = dict.get  # faster than the method of `betas.Group`
        try:
            for source in self.arrangement.rows:
                group, row, scale = source.group, source.row, source.lr_scale
                taken = get(group, param_groups.TAKEN_LR_SCALE, 1.0)
                scale = scale if taken is None else scale * get(group, "lr_scale", 1.0) * taken  # `param_groups.lr_scale`, inlined
                for name, length in row.traced:
                    value = group[name]
                    if name == "lr" and not row.scaled:
                        values.append(float(value) * scale)
                    elif name == "weight_decay":
                        values.append(float(value) * get(group, "wd_scale", 1.0) if source.decays else 0.0)
                    elif length:
                        if len(value) != length or (type(value) is not tuple and not validators.is_sequence(value)):
                            raise ValueError(name)
                        values.extend(map(float, value))
                    else:
                        values.append(float(value))
                if row.kept.average:
                    values.append(float(self.ema_decay))
                if row.scaled:
                    values.append(scale if source.has_lr else scale * float(group["lr"]))
        except (TypeError, ValueError, RuntimeError):
            for group in self.param_groups:  # raises an error that names the key and its value
                param_groups.check_types(type(self).__name__, group, self.rule_of(group))
            raise
        values += [0.0] * (self.arrangement.width - len(values))
        return np.array(values)

    @property
    def skipped_steps(self) -> int:
        """The number of steps that programs skipped because of a gradient that was not finite. Reading it waits for the device."""
        return self._scaling.skipped

    def ema_params(self) -> AbstractContextManager[None]:
        """Swap the averages of the trained weights into the parameters while the context is open. It needs `ema_decay`.

        The swap is in place, and averages are rounded to the parameter's dtype. The trained bits return on exit, also after an
        exception. Parameters that were never updated, such as frozen ones, keep their values.

        Raises:
          RuntimeError: there is no average, or the context is open already. Nothing is changed then.
        """
        owner = type(self).__name__
        if self.ema_decay is None:
            raise RuntimeError(f"{owner}.ema_params: ema_decay is None, so there is no average. Construct with ema_decay=0.999, say.")
        return self._exchange.hold(owner, "ema_params", self._averages, self._transaction)

    def _averages(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, state[AVERAGE]) for p, state in self.state.items() if AVERAGE in state]

    # ------------------------------------------------------------------ checkpoints, copies, reports

    def state_dict(self) -> StateDict:
        """Return torch's state_dict, with an empty entry for each frozen parameter that still requires grad.

        torch.distributed.checkpoint loads strictly and needs this entry. After a load, the state of such a parameter is initialized at its
        first gradient.
        """

        with checkpoint.hooked(self.register_state_dict_post_hook, checkpoint.complete, prepend=True):  # before the user's hooks
            return super().state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state_dict of this class, or of the torch optimizer that it replaces.

        Differences from torch: parameters are matched by name if both sides have names, and the names may have other wrappers
        (`_orig_mod.`, `module.`). Frozen parameters may be missing. State keeps a dtype that is wider than its parameter's. Group flags
        that the saved groups lack keep their values. Tensors are copied, never shared.

        Raises:
          ValueError: groups, parameters, state fields or shapes do not match, or values are damaged. Parameters and state are then as
            before.
        """
        with self._transaction(), checkpoint.hooked(self.register_load_state_dict_pre_hook, checkpoint.prepare):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> StateDict:
        """Return the attributes for pickle and deepcopy."""
        own = {key: self.__dict__[key] for key in self._carried}
        return super().__getstate__() | own | {"_decided": [(leaf.name, leaf.group, leaf.decided) for leaf in self._followed()]}

    def __setstate__(self, state: StateDict) -> None:
        """Set state and groups that `state_dict.check_and_align` has checked, or all attributes of a copied or unpickled optimizer."""
        decided = state.pop("_decided", None)
        with self._all_or_nothing() if decided is None else nullcontext():
            self._set_state(state, decided)

    def _set_state(self, state: StateDict, decided: Sequence[tuple[str, int, Decided]] | None) -> None:
        defaults = dict(self.defaults if decided is None else state["defaults"])
        super().__setstate__(state)
        self.defaults = self._with_momentum(defaults)  # torch adds "differentiable", which must not get into loaded groups
        self.param_groups[:] = map(self._with_betas, self.param_groups)
        if decided is None:
            self._leaves = self._followed()
        else:
            self._begin()
            params = [p for group in self.param_groups for p in group["params"]]
            self._leaves = [Leaf.restored(name, p, group, columns) for p, (name, group, columns) in zip(params, decided, strict=True)]
            self._constructed = True
        checkpoint.unwrap(self.state, self._leaves)
        checkpoint.settle(self.param_groups, self.defaults, self._leaves if decided is None else ())
        self._place(move=decided is None)
        self._follow_fused()

    def state_fields(self, leaf: Leaf, group: ParamGroup) -> dict[str, Field] | None:
        """Return the state fields of a parameter by name, if it is in this group; None if it is frozen and its fields are unknown."""
        return self.arrangement.state_fields(leaf, group, self.rule_of(group))

    def bytes_accessed(self) -> float:
        """Return the bytes that one step moves, by the compiler's count, for the last set of gradients."""
        return sum(launch.program.bytes_accessed for launch in self._launches.latest)

    def cache_info(self) -> CacheInfo:
        """Return how many steps found their executables in the cache, and how many executables were used and compiled."""
        return self._cache.info

    def report(self) -> report.Report:
        """Return a report with one line for each parameter: text when printed, a table in a notebook, and `rows` for programs."""
        made_by_tx = [i for i, group in enumerate(self.param_groups) if multiplies(self.rule_of(group))]
        return report.Report(type(self).__name__, self._followed(), self.param_groups, self.state, made_by_tx)

    def __str__(self) -> str:
        return str(self.report())
