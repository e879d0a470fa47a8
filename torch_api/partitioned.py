"""Optimizers with several transformations: one for each label, or one for each selector as in flax's MultiOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, Unpack

import numpy as np
import optax
import torch

from bridge import _names
from bridge._names import did_you_mean, did_you_mean_or_list
from bridge._transforms import selectors as masks
from bridge._transforms.selectors import Selector

from ._params import param_groups
from ._params.record import ParamRecord
from ._params.selectors import Selectors
from ._rules import betas
from ._rules.decay_masks import refuse_decay_mask
from ._rules.from_optax import as_optimizer_spec, is_lr_explicit
from ._rules.types import Hyperparams, MutableParamGroup, ParamGroup
from ._rules.validators import Check
from .optimizer import OptaxOptimizer
from .options import OptionArguments, SelectorArguments

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

# A group, a key in it, and the value that it had.
_Change: TypeAlias = tuple[MutableParamGroup, str, object]
_NO_LABEL = None  # the label of a parameter that no selector labels, or that no pair of a MultiOptimizer selects


def _never(_: object) -> bool:
    return False


class PartitionedOptimizer(OptaxOptimizer):
    """An optimizer that updates parameters by different transformations, with one state_dict and one scheduler.

    Each label has param groups of its own. A given group is split by label. Each part has its label under "label", and the
    hyperparameters of the label's transformation. `max_grad_norm` bounds one norm over all labels.

    Args:
      params: as in `OptaxOptimizer`.
      transforms: label -> transformation, or label -> (function, dict of its hyperparameters), or label -> function. Each
        transformation sees the nested dict of all parameters, with None in place of parameters with other labels.
      labels: any selector (docs/selectors.md) that gives each parameter a label. A frozen parameter needs none.
      mask, decay_mask, lr_scale: as in `OptaxOptimizer`.
      **engine: max_grad_norm, writeback, state_dtype, master_weights, stochastic_rounding, rounding_seed and ema_decay, as in
        `OptaxOptimizer`.

    A key of a given group (such as `lr`) applies to the parts that know it. A transformation that is no function has its learning
    rate inside it; `lr` in its groups multiplies the update.

    Parameters without a label are in a group of their own, with the label None.

    Raises:
      ValueError: a label has no transformation, a transformation has no parameter, or a trained parameter has no label. The text
        names it. (optax.partition accepts the second case.)

    Example:
      >>> import optax, torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> transforms = {"matrix": (optax.lion, {"lr": 0.1}), "rest": optax.sgd(0.01)}
      >>> opt = torch_api.PartitionedOptimizer(model.named_parameters(), transforms, labels={"weight": "matrix", "bias": "rest"})
      >>> model(torch.ones(1, 2)).sum().backward()
      >>> opt.step()
      >>> [(group["label"], group["lr"]) for group in opt.param_groups]
      [('matrix', 0.1), ('rest', 1.0)]
    """

    _is_partitioned = True
    _copied_attributes = (*OptaxOptimizer._copied_attributes, "_defaults_by_label")
    _no_label_message = (
        "labels: no rule gives {name!r} a label, and it is to be trained. Add a rule for it, or ('*', label) last; only what the mask or "
        "requires_grad=False freezes needs no label."
    )

    def __init__(
        self,
        params: ParamsT,
        transforms: Mapping[Any, object],
        labels: Selector,
        *,
        mask: Selector = None,
        decay_mask: Selector = None,
        lr_scale: Selector | float = None,
        **engine: Unpack[OptionArguments],
    ) -> None:
        cls_name = type(self).__name__
        if not isinstance(transforms, Mapping) or not transforms:
            raise TypeError(f"{cls_name}: transforms is {transforms!r}; expected a dict from label to transformation.")
        rules = {label: as_optimizer_spec(f"{cls_name}[{label!r}]", *_split_entry(given)) for label, given in transforms.items()}
        self._gave_lr = {label: is_lr_explicit(type(self), *_split_entry(given)) for label, given in transforms.items()}
        no_label_spec, nothing = as_optimizer_spec(cls_name, optax.set_to_zero, {})
        rules[_NO_LABEL] = no_label_spec._replace(leaf_checks=(Check(_never, self._no_label_message),)), nothing
        self._defaults_by_label = {label: defaults for label, (_, defaults) in rules.items()}
        given = _named_groups(cls_name, param_groups.list_params(cls_name, params))
        selectors = Selectors(cls_name, {"labels": labels, "mask": mask, "decay_mask": decay_mask, "lr_scale": lr_scale})
        labels_by_group = self._assign_labels(selectors, given, set(rules))
        split = [part for group, own in zip(given, labels_by_group, strict=True) for part in self._split_group(group, own)]
        self._build(split, {label: rule for label, (rule, _) in rules.items()}, {}, selectors, engine)
        self._show_label_rules()

    _label_rules: Mapping[str, str] = MappingProxyType({})  # by parameter name, from the last time that a selector gave labels

    def _default_lr(self, group: ParamGroup) -> tuple[SupportsFloat, bool]:
        gave = isinstance(self._gave_lr, Mapping) and self._gave_lr.get(group["label"], False)
        return self._defaults_by_label[group["label"]]["lr"], gave

    def _show_label_rules(self) -> None:
        """Let `report()` show what gave each parameter its label, unless a mask has decided about the parameter."""
        for leaf in self._records:
            leaf.decided_by = self._label_rules.get(leaf.name, leaf.decided_by) if leaf.decided_by == "mask=None" else leaf.decided_by

    def _assign_labels(self, selectors: Selectors, given: Sequence[MutableParamGroup], known: Collection[Hashable]) -> list[list[Hashable]]:
        """Return the label of each parameter of each group."""
        found = self._labels_of(selectors, [], given)
        unused = [label for label in known if label not in found and label is not _NO_LABEL]
        if unused:
            seen = ", ".join(sorted(map(repr, set(found))))
            raise ValueError(f"{type(self).__name__}: no parameter has the label {unused[0]!r} of transforms. Labels given: {seen}.")
        rest = iter(found)
        return [[next(rest) for _ in group["params"]] for group in given]

    def _labels_of(self, selectors: Selectors, before: Sequence[ParamRecord], given: Sequence[MutableParamGroup]) -> list[Hashable]:
        """Return the labels of the parameters in the given groups. `before` are the records of the optimizer, which come first."""
        named = all("param_names" in group for group in (*vars(self).get("param_groups", ()), *given))
        params, names = [leaf.param for leaf in before], [leaf.name for leaf in before]
        for group in given:
            names += param_groups.param_names(group, len(params))
            params += group["params"]
        nested = lambda: _names.nest(zip(names, params, strict=True))  # noqa: E731
        leaves = masks.NamedLeaves(names, params, nested, named, len(before), by_argument_name=True)
        found = selectors.resolve_with("labels", leaves, self._resolve_labels)
        for name, label in zip(names[len(before) :], found, strict=True):
            if label not in self._defaults_by_label:
                hint = did_you_mean(str(label), (str(label) for label in self._defaults_by_label if label is not _NO_LABEL))
                raise ValueError(
                    f"{type(self).__name__}: parameter {name!r} has the label {label!r}, for which there is no transformation. {hint}"
                )
        return found

    def _resolve_labels(self, labels: Selector, leaves: masks.NamedLeaves, _: str) -> list[Hashable]:
        decided = masks.resolve_selector(labels, leaves, "labels_or_none")
        self._label_rules = {name: decision.rule for name, decision in zip(leaves.names[leaves.resolved_count :], decided, strict=True)}
        return [decision.value for decision in decided]

    def _split_group(self, group: MutableParamGroup, labels: Sequence[Hashable]) -> list[MutableParamGroup]:
        """Return one part of the group for each label, in the order of their first parameters."""
        parts = []
        if group.get("mask") is not None and len(set(labels)) > 1:
            group = group | {"mask": self._mask_of(group)}
        keys_of_labels = {key for defaults in self._defaults_by_label.values() for key in defaults} | {"param_names"}
        keys_of_labels |= {betas.BETAS for defaults in self._defaults_by_label.values() if betas.hyperparams_of_betas(defaults)}
        for label in dict.fromkeys(labels):
            own = self._defaults_by_label[label]
            positions = [i for i, other in enumerate(labels) if other == label]
            given = betas.expand_betas(type(self).__name__, group, betas.hyperparams_of_betas(own))
            part = {key: value for key, value in given.items() if key in own or key not in keys_of_labels}
            names = group.get("param_names")
            part["params"] = [(names[i], group["params"][i]) if names else group["params"][i] for i in positions]
            parts.append(own | part | {"label": label})
        known = {key for part in parts for key in part} | {"param_names"} | (keys_of_labels if _NO_LABEL in labels else set())
        known |= {betas.BETAS for part in parts if betas.hyperparams_of_betas(part)}
        for key in group.keys() - known:
            raise ValueError(
                f"{type(self).__name__}: no transformation of this param group takes {key!r}; it has the labels "
                f"{', '.join(map(repr, dict.fromkeys(labels)))}. {did_you_mean_or_list(key, known)}"
            )
        return parts

    def _mask_of(self, group: MutableParamGroup) -> Callable[[str, torch.Tensor], bool | np.ndarray]:
        """Return the mask of a group as a function of the parameter.

        A part of the group can use it, because no pattern has to match in each part.
        """
        refuse_decay_mask(type(self).__name__, group["mask"])
        params, names = group["params"], param_groups.param_names(group, 0)
        nested = lambda: _names.nest(zip(names, params, strict=True))  # noqa: E731
        leaves = masks.NamedLeaves(names, params, nested, "param_names" in group, by_argument_name=True)
        decided = masks.resolve_selector(group["mask"], leaves, "mask")
        values = {id(p): decision.value for p, decision in zip(params, decided, strict=True)}

        def of_the_group(_: str, param: torch.Tensor) -> bool | np.ndarray:
            return values[id(param)]

        return of_the_group

    def add_param_group(self, param_group: MutableParamGroup) -> None:
        """Add a group with its label under "label", or without label; the constructor's selector then labels its parameters.

        Raises:
          ValueError, TypeError: a parameter has no label, or a label has no transformation. The optimizer is then as before.
        """
        if not self._constructed:
            super().add_param_group(param_group)
            return
        cls_name = type(self).__name__
        (group,) = _named_groups(cls_name, [param_group])
        label = group.get("label")
        if label is None:
            labels = self._labels_of(self._selectors, self._reconcile_records(), [group])
        elif label in self._optimizer_specs:
            labels = [label] * len(group["params"])
        else:
            known = (str(label) for label in self._optimizer_specs if label is not _NO_LABEL)
            raise ValueError(f"{cls_name}: label {label!r} has no transformation. {did_you_mean(str(label), known)}")
        with self._transaction(), self._restore_on_error():
            for part in self._split_group(group, labels):
                super().add_param_group(part)
            self._show_label_rules()


class MultiOptimizer(PartitionedOptimizer):
    """flax.optim's MultiOptimizer for torch: `MultiOptimizer(params, (selector, definition), ...)`.

    Args:
      params: as in `OptaxOptimizer`.
      *pairs: pairs of a selector and what updates the parameters that it selects: a `bridge.OptimizerDef`, an optax transformation, or
        (function, hyperparameters). The label of the n-th pair is n.
      **engine: as in `PartitionedOptimizer`, with `mask`, which freezes further parameters, decay_mask and lr_scale.

    Parameters that no selector selects are frozen and have no state. `step(hyper_params=[...])` sets other hyperparameters for one
    step: for each pair None, a dict, or an object with attributes (such as a definition's `hyper_params`).

    Raises:
      ValueError: two selectors select one parameter, or a selector selects none. The text names it.
      TypeError: there is no pair, or a pair is none.

    Example:
      >>> import bridge, torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> pairs = ("weight", bridge.Momentum(lr=0.1)), ("bias", bridge.Momentum(lr=0.01))
      >>> opt = torch_api.MultiOptimizer(model.named_parameters(), *pairs)
      >>> model(torch.ones(1, 2)).sum().backward()
      >>> opt.step(hyper_params=[{"lr": 0.2}, None])
      >>> [(group["label"], group["lr"]) for group in opt.param_groups]
      [(0, 0.1), (1, 0.01)]
    """

    _no_label_message = "MultiOptimizer: no pair's selector picks {name!r}, so it cannot be trained. Add a pair for it."

    def __init__(self, params: ParamsT, *pairs: tuple[Selector, object], **engine: Unpack[SelectorArguments]) -> None:
        cls_name = type(self).__name__
        if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError(f"{cls_name}: expected pairs (selector, definition) after the parameters, got {pairs!r}.")
        transforms = {number: definition for number, (_, definition) in enumerate(pairs)}
        selectors = [selector for selector, _ in pairs]
        super().__init__(params, transforms, selectors, **engine)

    def _split_group(self, group: MutableParamGroup, labels: Sequence[Hashable]) -> list[MutableParamGroup]:
        parts = super()._split_group(group, labels)
        return [part | {"trainable": False} if part["label"] is _NO_LABEL else part for part in parts]

    def _resolve_labels(self, labels: Any, leaves: masks.NamedLeaves, _: str) -> list[Hashable]:
        picked = [masks.resolve_selector(selector, leaves, "decay_mask", f"pair {n}") for n, selector in enumerate(labels)]
        names = leaves.names[leaves.resolved_count :]
        pairs_by_param = [[n for n, column in enumerate(picked) if column[i].value] for i in range(len(names))]
        for name, own in zip(names, pairs_by_param, strict=True):
            if len(own) > 1:
                rules = " and ".join(f"{labels[n]!r} (pair {n})" for n in own)
                raise ValueError(
                    f"{type(self).__name__}: parameter {name!r} has more than one owner: {rules}. Make the selectors disjoint."
                )
        rules = [picked[own[0]][i].rule if own else "no pair's selector" for i, own in enumerate(pairs_by_param)]
        self._label_rules = dict(zip(names, rules, strict=True))
        return [own[0] if own else _NO_LABEL for own in pairs_by_param]

    def set_trainable(self, selector: Selector, trainable: bool, *, keep_state: bool = True) -> None:
        """Train or freeze parameters as in `OptaxOptimizer`.

        A parameter that no pair selects has no transformation and cannot be trained.
        """
        picked = masks.resolve_selector(selector, self._name_leaves(self._records), "decay_mask", "set_trainable") if trainable else []
        idle = [leaf.name for leaf, decision in zip(self._records, picked, strict=False) if decision.value and leaf.label is _NO_LABEL]
        if idle:
            raise ValueError(f"{type(self).__name__}: no pair's selector picks {idle[0]!r}, so it cannot be trained. Add a pair for it.")
        super().set_trainable(selector, trainable, keep_state=keep_state)

    @contextmanager
    def _temporary_hyper_params(self, hyper_params: Sequence[object]) -> Iterator[None]:
        """Set hyperparameters for one step. The entries are those of `step(hyper_params=[...])`."""
        changes: list[_Change] = []
        try:
            self._write_hyper_params(hyper_params, changes)
            yield
        finally:
            for group, key, value in reversed(changes):
                group[key] = value

    def _write_hyper_params(self, hyper_params: Sequence[object], changes: list[_Change]) -> None:
        cls_name = type(self).__name__
        if not isinstance(hyper_params, list | tuple):
            raise TypeError(f"{cls_name}: hyper_params is {hyper_params!r}; expected a list with one entry or None for each pair.")
        if len(hyper_params) != len(self._optimizer_specs) - 1:
            pairs = len(self._optimizer_specs) - 1
            raise ValueError(f"{cls_name}: {len(hyper_params)} hyper_params are given, expected one or None for each of {pairs} pairs.")
        for group in self.param_groups:
            given = None if group["label"] is _NO_LABEL else hyper_params[group["label"]]
            if given is None:
                continue
            if not (isinstance(given, Mapping) or hasattr(given, "_fields") or hasattr(given, "__dict__")):
                raise TypeError(
                    f"{cls_name}: hyper_params of pair {group['label']} is {given!r}; expected None, a dict, or an object with attributes."
                )
            title = f"{cls_name}: hyper_params of pair {group['label']}"
            values = given if isinstance(given, Mapping) else {name: getattr(given, name) for name in _fields(given)}
            for key, value in _names.rename_learning_rate(title, values).items():
                known = self._defaults_by_label[group["label"]]
                if key not in group or key not in known:
                    raise ValueError(f"{cls_name}: unknown hyper_param {key!r} of pair {group['label']}. {did_you_mean(key, known)}")
                changes.append((group, key, group[key]))
                group[key] = value
            param_groups.check_group(cls_name, group, self._optimizer_spec_of(group), allowed=group)


def _split_entry(entry: object) -> tuple[object, Hyperparams]:
    """Return (transformation, hyperparameters) of one entry of `transforms`."""
    if type(entry) is tuple and len(entry) == 2 and isinstance(entry[1], Mapping):
        return entry
    return entry, {}


def _fields(given: object) -> Sequence[str]:
    return getattr(given, "_fields", None) or list(getattr(given, "__dataclass_fields__", None) or vars(given))


def _named_groups(cls_name: str, params: ParamsT) -> list[MutableParamGroup]:
    """Return the groups that torch would make, with names and parameters in separate lists."""
    listed: list[Any] = list(params)
    given = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    result = []
    for group in given:
        group = param_groups.list_unique_params(cls_name, _names.rename_learning_rate(f"{cls_name}: a param group", group))
        entries = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        if entries and all(isinstance(entry, tuple) for entry in entries):
            group["param_names"], entries = [name for name, _ in entries], [p for _, p in entries]
        result.append(group | {"params": entries})
    return result
