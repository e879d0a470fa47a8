"""Param groups, and what masks and labels decide of each parameter in them."""

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
from ._params.record import Leaf, check_leaves, followed
from ._params.selectors import Selectors
from ._rules import betas
from ._rules.decay_masks import refuse_decay_mask
from ._rules.optimizer_spec import Rule
from ._rules.types import MutableParamGroup, ParamGroup
from ._step.state_watch import Keeper

_OF_THE_CONSTRUCTOR = options.NAMES | {"decay_mask"}


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices that these are on, in the order of transactions."""
    return tuple(sorted({tensor.device for tensor in tensors}, key=str))


class GroupedOptimizer(Keeper, ABC):
    """A `torch.optim.Optimizer` that knows of each parameter, as a column beside the groups, what selectors decided of it."""

    _leaves: list[Leaf]
    _selectors: Selectors
    _constructed: bool
    _signature: list[object] | None  # of groups and options as they were prepared; None while what a step needs is not prepared
    by_label = False  # whether groups have a rule by their label
    _gave_lr: bool | Mapping[Hashable, bool]  # whether the default lr is the user's; where groups have a rule by their label, of each label
    _warned_of_lr_scale = False
    _unscales = False  # whether `step` does what a scaled loss asks for

    @abstractmethod
    def rule_of(self, group: ParamGroup) -> Rule:
        """The rule by which the parameters of a group are updated."""

    def _betas_of(self, rule: Rule) -> tuple[str, ...]:
        """The hyperparams of a rule that `betas` stands for in its groups."""
        return betas.named_by(rule.hyperparams, extended=self.by_label)

    def _with_betas(self, group: MutableParamGroup) -> MutableParamGroup:
        """The group, with `betas` for schedulers of momentum where the transformation has other names for it."""
        names = self._betas_of(self.rule_of(group))
        has_betas = names or (self.by_label and group.get("label") is None)
        return betas.Group(group, names) if has_betas and not isinstance(group, betas.Group) else group

    @abstractmethod
    def _place(self) -> None:
        """Take note that leaves or what was decided of them have changed."""

    def add_param_group(self, param_group: MutableParamGroup) -> None:
        """Add a group, as torch does; its `mask` key, any selector, speaks about the group's own parameters.

        Its `lr_scale` beside the default lr is taken out, as `initial_lr_scale`, and reads 1 from then on: so it acts once, whether or not
        the scheduler multiplies by it too. What is written there later is a further factor. Where the group has an lr of its own, other
        than the default one, `lr_scale` has no effect on the update, as in torch.optim.

        Selectors of the constructor decide about the new parameters as if they had been there from the start, but a pattern
        need not match any. A `mask` in the group, and `trainable=True`, take the place of the constructor's mask.

        Raises:
          ValueError, TypeError: as the constructor; the optimizer is then as before.
        """
        with self._transaction():
            self._add_group(param_group)

    def _transaction(self) -> Transaction:
        """On every device that parameters are on."""
        return Transaction(devices_of(p for group in self.param_groups for p in group["params"]))

    def _add_group(self, param_group: MutableParamGroup) -> None:
        owner = type(self).__name__
        self._leaves = self._followed()
        if isinstance(param_group, dict):
            rule = self.rule_of(param_group)
            for key in param_group.keys() & _OF_THE_CONSTRUCTOR:
                raise ValueError(f"{owner}: {key!r} is in a param group; expected it as an argument of the constructor, for all groups.")
            param_group = betas.spread(owner, param_group, self._betas_of(rule))
            param_groups.make_tuples(param_group, rule)
            param_groups.check_group(owner, self.defaults | param_group, rule)
            self._warn_of_lr_scale(param_groups.take_lr_scale(param_group, *self._default_lr(param_group)))
            param_group = self._with_betas(param_group)
        mask = param_group.pop("mask", None) if isinstance(param_group, dict) else None
        refuse_decay_mask(owner, mask)
        with self._all_or_nothing():
            super().add_param_group(param_groups.without_duplicates(owner, param_group))
            group, number = self.param_groups[-1], len(self.param_groups) - 1
            leaves = self._new_leaves(group)
            for leaf, decision in zip(leaves, selectors.column(mask, self._described(leaves), "mask"), strict=True):
                if mask is not None:
                    leaf.decide(decision._replace(rule=f"group {number} {decision.rule}"))
                elif group.get("trainable"):
                    leaf.rule = f"group {number} trainable=True"
                leaf.ignores_mask = mask is not None or bool(group.get("trainable"))
            if self._constructed:
                self._resolve(self._leaves, leaves)
            self._leaves = self._leaves + leaves
            if self._constructed:
                self._place()

    def _default_lr(self, group: ParamGroup) -> tuple[SupportsFloat, bool]:
        """The lr of a group that is given without one, and whether the user gave it."""
        return self.defaults["lr"], bool(self._gave_lr)

    def _warn_of_lr_scale(self, text: str | None) -> None:
        if text is not None and not self._warned_of_lr_scale:
            self._warned_of_lr_scale = True
            warnings.warn(f"{type(self).__name__}: {text}", stacklevel=stack_level())

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Groups, state, leaves and what was decided of them are as before if anything is raised inside."""
        listed, state = self.param_groups, vars(self).get("state")
        before = [(group, group.get(param_groups.TRAINABLE_PARAMS)) for group in listed]
        leaves = [(leaf, leaf.decided) for leaf in self._leaves]
        try:
            yield
        except BaseException:
            self._signature = None  # the next step prepares everything anew: here that might raise another error
            listed[:] = [group for group, _ in before]
            self.param_groups = listed
            if state is not None:
                self.state = state
            for group, column in before:
                if column is None:
                    group.pop(param_groups.TRAINABLE_PARAMS, None)
                else:
                    group[param_groups.TRAINABLE_PARAMS] = column
            self._leaves = [leaf for leaf, _ in leaves]
            for leaf, decided in leaves:
                leaf.decided = decided
            raise

    def _new_leaves(self, group: MutableParamGroup) -> list[Leaf]:
        leaves = []
        for name, p in zip(param_groups.names(group, len(self._leaves)), group["params"], strict=True):
            param_groups.check_initialized(type(self).__name__, name, p)
            leaves.append(Leaf(name, p, len(self.param_groups) - 1))
            leaves[-1].label = group.get("label")
        return leaves

    @property
    def leaves(self) -> list[Leaf]:
        """Each parameter with what was decided of it, in the order of the groups."""
        return self._leaves

    def _followed(self) -> list[Leaf]:
        """The leaves, where `param_groups` may have been edited by hand since the last step."""
        leaves, new = followed(self._leaves, self.names(), self.param_groups)
        if new:
            for leaf in new:
                group = self.param_groups[leaf.group]
                if not param_groups.is_named(group) and any("param_names" in each for each in self.param_groups):
                    self._selectors.refuse_nameless(leaf.name, leaf.group)
                leaf.ignores_mask = bool(group.get("trainable"))
            self._resolve([leaf for leaf in leaves if leaf not in new], new)
        return leaves

    def names(self) -> list[str]:
        """A name for each parameter, in the order of the groups: its own, or where there are none its position."""
        start, names = 0, []
        for group in self.param_groups:
            names += param_groups.names(group, start)
            start += len(group["params"])
        return names

    def _described(self, leaves: list[Leaf], resolved: int = 0) -> selectors.Leaves:
        named = all("param_names" in group for group in self.param_groups)
        nested = lambda: _names.nest((leaf.name, leaf.param) for leaf in leaves)  # noqa: E731
        return selectors.Leaves(
            [leaf.name for leaf in leaves], [leaf.param for leaf in leaves], nested, named, resolved, by_argument_name=True
        )

    def _resolve(self, known: list[Leaf], new: list[Leaf]) -> None:
        """Decide by the constructor's selectors about the `new` leaves, beside those that are `known`."""
        described = self._described(known + new, len(known))
        asked = [leaf for leaf in new if not leaf.ignores_mask]
        trained = self._selectors.column("mask", described) if asked else [None] * len(new)
        decays = self._selectors.column("decay_mask", described)
        scales = self._selectors.column("lr_scale", described)
        for leaf, is_trained, decay, scale in zip(new, trained, decays, scales, strict=True):
            if is_trained is not None and not leaf.ignores_mask:
                leaf.decide(is_trained)
            leaf.decay, leaf.lr_scale = decay, scale.value
        check_leaves(type(self).__name__, new, self.rule_of, self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales and skips: torch's name for it.

        GradScaler asks, looks at all gradients itself, and then calls `step`, which need not look again.
        """
        vars(self)["_looked"] = self._unscales
        return self._unscales

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._unscales = value

    def _follow_fused(self) -> None:
        """As torch's optimizers: GradScaler leaves unscaling and skipping to one with fused=True, without asking the device."""
        if any(group.get("fused") for group in self.param_groups):
            self._step_supports_amp_scaling = True

    def _is_active(self, leaf: Leaf) -> bool:
        return leaf.trained and self.param_groups[leaf.group].get("trainable", True)

    def set_trainable(self, selector: Selector, trainable: bool, *, keep_state: bool = True) -> None:
        """Train or freeze the selected parameters from the next step on, whatever the mask said of them.

        Args:
          selector: any selector of the README but arrays; only what it picks changes. True lifts a mask of elements.
          trainable: True to train, False to freeze.
          keep_state: when freezing, keep the moments and step count for later, or drop them.

        Raises:
          ValueError, TypeError: a selector that fits nothing, or a parameter that the update does not take; the optimizer is
            then as before.
        """
        with self._transaction():
            self._leaves = self._followed()
            picked = selectors.column(selector, self._described(self._leaves), "decay_mask", "set_trainable")  # bools only
            chosen = [(leaf, decision.rule) for leaf, decision in zip(self._leaves, picked, strict=True) if decision.value]
            if trainable:
                check_leaves(type(self).__name__, [leaf for leaf, _ in chosen], self.rule_of, self.param_groups, True)
            with self._all_or_nothing():
                for leaf, rule in chosen:
                    leaf.trained, leaf.rule = trainable, rule
                    leaf.elements = None if trainable else leaf.elements
                for index, group in enumerate(self.param_groups):
                    group[param_groups.TRAINABLE_PARAMS] = [leaf.trained for leaf in self._leaves if leaf.group == index]
                self._place()
                for leaf, _ in chosen if not (trainable or keep_state) else ():
                    self.state.pop(leaf.param, None)
