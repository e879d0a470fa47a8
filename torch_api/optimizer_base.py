"""The base class of all optimizers: param groups, and what selectors decide about each parameter."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import SupportsFloat

import torch

from bridge import _names
from bridge._runtime.transaction import Transaction
from bridge._transforms import selectors
from bridge._transforms.selectors import Selector
from bridge._warnings import stack_level

from . import options
from ._params import param_groups
from ._params.record import ParamRecord, check_records, reconcile_records
from ._params.selectors import Selectors
from ._rules import betas
from ._rules.decay_masks import refuse_decay_mask
from ._rules.optimizer_spec import OptimizerSpec
from ._rules.types import MutableParamGroup, ParamGroup
from ._step.state_watch import StateWatchingOptimizer

_CONSTRUCTOR_OPTIONS = options.OPTION_NAMES | {"decay_mask"}


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Return the devices of these tensors, in the order in which transactions lock them."""
    return tuple(sorted({tensor.device for tensor in tensors}, key=str))


class SelectorOptimizer(StateWatchingOptimizer, ABC):
    """A `torch.optim.Optimizer` with a `ParamRecord` for each parameter, which holds what selectors decided about it."""

    _records: list[ParamRecord]
    _selectors: Selectors
    _constructed: bool
    _prepared_signature: list[object] | None  # of groups and options at the last rebuild of the layout; None if it must be rebuilt
    _is_partitioned = False  # whether the label of a group selects its `OptimizerSpec`
    _gave_lr: bool | Mapping[Hashable, bool]  # whether the user gave the default lr; by label, if groups have labels
    _warned_of_lr_scale = False
    _handles_loss_scale = False  # whether `step` unscales gradients and skips updates

    @abstractmethod
    def _optimizer_spec_of(self, group: ParamGroup) -> OptimizerSpec:
        """Return the `OptimizerSpec` that updates the parameters of a group."""

    def _betas_of(self, rule: OptimizerSpec) -> tuple[str, ...]:
        """Return the hyperparameters that `betas` stands for in the groups of an `OptimizerSpec`."""
        return betas.hyperparams_of_betas(rule.hyperparams, include_momentum=self._is_partitioned)

    def _with_betas(self, group: MutableParamGroup) -> MutableParamGroup:
        """Return the group, with `betas` for momentum schedulers if the transformation has other names for its momenta."""
        names = self._betas_of(self._optimizer_spec_of(group))
        has_betas = names or (self._is_partitioned and group.get("label") is None)
        return betas.BetasGroup(group, names) if has_betas and not isinstance(group, betas.BetasGroup) else group

    @abstractmethod
    def _rebuild_layout(self) -> None:
        """Rebuild the layout after records or their decisions have changed."""

    def add_param_group(self, param_group: MutableParamGroup) -> None:
        """Add a group, as torch does. Its `mask` key, any selector, decides about the group's own parameters.

        If the group has the default lr, its `lr_scale` is stored as `initial_lr_scale` and then reads 1, so that it acts once, whether or
        not the scheduler multiplies by it too. A value written later is a further factor. If the group has an lr of its own, other than the
        default, `lr_scale` has no effect on the update, as in torch.optim.

        The constructor's selectors decide about the new parameters as if these had been there from the start, but a pattern need not match
        any of them. A `mask` in the group, or `trainable=True`, replaces the constructor's mask.

        Raises:
          ValueError, TypeError: as the constructor. The optimizer is then as before.
        """
        with self._transaction():
            self._add_group(param_group)

    def _transaction(self) -> Transaction:
        """Return a transaction on every device that has parameters."""
        return Transaction(devices_of(p for group in self.param_groups for p in group["params"]))

    def _refuse_options(self, group: ParamGroup) -> None:
        for key in group.keys() & _CONSTRUCTOR_OPTIONS:
            raise ValueError(
                f"{type(self).__name__}: {key!r} is in a param group; expected it as an argument of the constructor, for all groups."
            )

    def _add_group(self, param_group: MutableParamGroup) -> None:
        cls_name = type(self).__name__
        self._records = self._reconcile_records()
        if isinstance(param_group, dict):
            rule = self._optimizer_spec_of(param_group)
            self._refuse_options(param_group)
            param_group = _names.rename_learning_rate(f"{cls_name}: a param group", param_group)
            param_group = betas.expand_betas(cls_name, param_group, self._betas_of(rule))
            param_groups.convert_sequences(param_group, rule)
            param_groups.check_group(cls_name, self.defaults | param_group, rule)
            self._warn_of_lr_scale(param_groups.resolve_lr_scale(param_group, *self._default_lr(param_group)))
            param_group = self._with_betas(param_group)
        mask = param_group.pop("mask", None) if isinstance(param_group, dict) else None
        refuse_decay_mask(cls_name, mask)
        with self._restore_on_error():
            super().add_param_group(param_groups.list_unique_params(cls_name, param_group))
            group, number = self.param_groups[-1], len(self.param_groups) - 1
            leaves = self._make_records(group)
            for leaf, decision in zip(leaves, selectors.resolve_selector(mask, self._name_leaves(leaves), "mask"), strict=True):
                if mask is not None:
                    leaf.apply_decision(decision._replace(rule=f"group {number} {decision.rule}"))
                elif group.get("trainable"):
                    leaf.decided_by = f"group {number} trainable=True"
                leaf.ignores_mask = mask is not None or bool(group.get("trainable"))
            if self._constructed:
                self._apply_selectors(self._records, leaves)
            self._records = self._records + leaves
            if self._constructed:
                self._rebuild_layout()

    def _default_lr(self, group: ParamGroup) -> tuple[SupportsFloat, bool]:
        """Return the lr of a group that has none of its own, and whether the user gave it."""
        return self.defaults["lr"], bool(self._gave_lr)

    def _warn_of_lr_scale(self, text: str | None) -> None:
        if text is not None and not self._warned_of_lr_scale:
            self._warned_of_lr_scale = True
            warnings.warn(f"{type(self).__name__}: {text}", stacklevel=stack_level())

    @contextmanager
    def _restore_on_error(self) -> Iterator[None]:
        """Restore groups, state, records and decisions if the block raises."""
        group_list, state = self.param_groups, vars(self).get("state")
        before = [(group, group.get(param_groups.TRAINABLE_PARAMS)) for group in group_list]
        leaves = [(leaf, leaf.decision) for leaf in self._records]
        try:
            yield
        except BaseException:
            self._prepared_signature = None  # the next step rebuilds the layout; a rebuild here might raise another error
            group_list[:] = [group for group, _ in before]
            self.param_groups = group_list
            if state is not None:
                self.state = state
            for group, column in before:
                if column is None:
                    group.pop(param_groups.TRAINABLE_PARAMS, None)
                else:
                    group[param_groups.TRAINABLE_PARAMS] = column
            self._records = [leaf for leaf, _ in leaves]
            for leaf, decided in leaves:
                leaf.decision = decided
            raise

    def _make_records(self, group: MutableParamGroup) -> list[ParamRecord]:
        leaves = []
        for name, p in zip(param_groups.param_names(group, len(self._records)), group["params"], strict=True):
            param_groups.check_initialized(type(self).__name__, name, p)
            leaves.append(ParamRecord(name, p, len(self.param_groups) - 1))
            leaves[-1].label = group.get("label")
        return leaves

    def _reconcile_records(self) -> list[ParamRecord]:
        """Return the records of the present param groups, which user code may have edited since the last step."""
        leaves, new = reconcile_records(self._records, self._param_names(), self.param_groups)
        if new:
            for leaf in new:
                group = self.param_groups[leaf.group_index]
                if not param_groups.has_param_names(group) and any("param_names" in each for each in self.param_groups):
                    self._selectors.check_nameless_param(leaf.name, leaf.group_index)
                leaf.ignores_mask = bool(group.get("trainable"))
            self._apply_selectors([leaf for leaf in leaves if leaf not in new], new)
        return leaves

    def _param_names(self) -> list[str]:
        """Return a name for each parameter, in the order of the groups: its own name, or one made from its position."""
        start, names = 0, []
        for group in self.param_groups:
            names += param_groups.param_names(group, start)
            start += len(group["params"])
        return names

    def _name_leaves(self, leaves: list[ParamRecord], resolved: int = 0) -> selectors.NamedLeaves:
        named = all("param_names" in group for group in self.param_groups)
        nested = lambda: _names.nest((leaf.name, leaf.param) for leaf in leaves)  # noqa: E731
        return selectors.NamedLeaves(
            [leaf.name for leaf in leaves], [leaf.param for leaf in leaves], nested, named, resolved, by_argument_name=True
        )

    def _apply_selectors(self, known: list[ParamRecord], new: list[ParamRecord]) -> None:
        """Let the constructor's selectors decide about the `new` records. The `known` ones are decided already."""
        described = self._name_leaves(known + new, len(known))
        follows_mask = [leaf for leaf in new if not leaf.ignores_mask]
        trained = self._selectors.resolve("mask", described) if follows_mask else [None] * len(new)
        decays = self._selectors.resolve("decay_mask", described)
        scales = self._selectors.resolve("lr_scale", described)
        for leaf, is_trained, decay, scale in zip(new, trained, decays, scales, strict=True):
            if is_trained is not None and not leaf.ignores_mask:
                leaf.apply_decision(is_trained)
            leaf.decay, leaf.lr_scale = decay, scale.value
        check_records(type(self).__name__, new, self._optimizer_spec_of, self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales gradients and skips updates; the name is torch's.

        GradScaler reads it, checks all gradients itself, and then calls `step`, which need not check them again.
        """
        vars(self)["_grads_checked"] = self._handles_loss_scale
        return self._handles_loss_scale

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._handles_loss_scale = value

    def _handle_loss_scale_if_fused(self) -> None:
        """Let `step` unscale and skip if a group has fused=True, as torch's optimizers do. GradScaler then does not wait for the device."""
        if any(group.get("fused") for group in self.param_groups):
            self._step_supports_amp_scaling = True

    def _is_trainable(self, leaf: ParamRecord) -> bool:
        return leaf.trained and self.param_groups[leaf.group_index].get("trainable", True)

    def set_trainable(self, selector: Selector, trainable: bool, *, keep_state: bool = True) -> None:
        """Train or freeze the selected parameters from the next step on, regardless of the mask.

        Args:
          selector: any selector (docs/selectors.md) except arrays. Parameters that it does not select keep their setting. Training
            removes a mask of elements.
          trainable: True to train, False to freeze.
          keep_state: when freezing, whether to keep the moments and step count for later.

        Raises:
          ValueError, TypeError: the selector matches nothing, or the update does not support a parameter. The optimizer is then as before.
        """
        with self._transaction():
            self._records = self._reconcile_records()
            picked = selectors.resolve_selector(
                selector, self._name_leaves(self._records), "decay_mask", "set_trainable"
            )  # allows bools only
            selected = [(leaf, decision.rule) for leaf, decision in zip(self._records, picked, strict=True) if decision.value]
            if trainable:
                check_records(type(self).__name__, [leaf for leaf, _ in selected], self._optimizer_spec_of, self.param_groups, True)
            with self._restore_on_error():
                for leaf, rule in selected:
                    leaf.trained, leaf.decided_by = trainable, rule
                    leaf.element_mask = None if trainable else leaf.element_mask
                for index, group in enumerate(self.param_groups):
                    group[param_groups.TRAINABLE_PARAMS] = [leaf.trained for leaf in self._records if leaf.group_index == index]
                self._rebuild_layout()
                for leaf, _ in selected if not (trainable or keep_state) else ():
                    self.state.pop(leaf.param, None)
