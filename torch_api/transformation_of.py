"""The update of a torch optimizer as one optax transformation over the nested dict of its parameters."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import optax
import torch

from bridge._compiler.spec import AUX_FIELDS, LeafSpec, StateField, TransformSpec, UpdateSpec
from bridge._compiler.state_layout import state_layout
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.types import PyTree
from bridge._names import Path, tree_paths

from ._params import sharding, wrapper_state
from ._params.param_groups import group_reader, param_names
from ._rules import torch_rules
from ._rules.optimizer_spec import OptimizerSpec
from ._rules.types import ParamGroup
from .optimizer import OptaxOptimizer

FROZEN_LABEL = "frozen"  # the label of parameters that are not trained


class Param(NamedTuple):
    """A parameter of an optimizer.

    fields: its state; empty if it has none or is frozen. has_no_state: its update never has state (SGD without momentum), so nothing
    counts its updates.
    """

    name: str
    path: Path
    tensor: torch.Tensor
    group: int
    trained: bool
    fields: dict[str, torch.Tensor]
    hidden: Mapping[str, float]
    has_no_state: bool = False


def list_params(what: str, optimizer: torch.optim.Optimizer, module: torch.nn.Module | None) -> list[Param]:
    """Return the parameters of any torch optimizer, named by the module, by the optimizer, or by position.

    Raises:
      ValueError: a parameter is not the module's, or its state is a DTensor.
    """
    if isinstance(optimizer, OptaxOptimizer):
        optimizer._rebuild_if_outdated()
    groups = optimizer.param_groups
    members = [(p, index) for index, group in enumerate(groups) for p in group["params"]]
    known = _names(optimizer) if module is None else _names_in_module(what, module, [p for p, _ in members])
    trained = _trained_ids(optimizer)
    found: list[Param] = []
    for name, path, (p, group) in zip(known, tree_paths(known), members, strict=True):
        rule = optimizer_spec_of(optimizer, groups[group])
        given = optimizer.state.get(p, {}) if id(p) in trained else {}
        if sharding.dtensor_layout_of(p) is not None:
            raise ValueError(
                f"{what}: {sharding.describe_sharding(p, name)}, and a process holds a part of its state only. Gather it first "
                "(torch.distributed.checkpoint.state_dict.get_optimizer_state_dict with full_state_dict=True)."
            )
        param = Param(name, path, p, group, id(p) in trained, {}, {} if rule is None else rule.hidden_state)
        if rule is not None and wrapper_state.may_have_wrapper_entries(given):
            given, _ = wrapper_state.split_wrapper_entries(given, expected_state(optimizer, param))
        fields = {key: torch.as_tensor(value).detach() for key, value in given.items() if value is not None and key not in AUX_FIELDS}
        param = param._replace(fields=fields)
        found.append(
            param._replace(has_no_state=rule is not None and param.trained and not fields and not expected_state(optimizer, param))
        )
    return found


def _names(optimizer: torch.optim.Optimizer) -> list[str]:
    found: list[str] = []
    for group in optimizer.param_groups:
        found += param_names(group, len(found))
    return found


def _names_in_module(what: str, module: torch.nn.Module, params: Sequence[torch.Tensor]) -> list[str]:
    name_of = {id(p): name for name, p in module.named_parameters()}
    for position, p in enumerate(params):
        if id(p) not in name_of:
            raise ValueError(
                f"{what}: the optimizer's parameter at position {position}, of shape {tuple(p.shape)}, is not of the module given. "
                "Give the module that the optimizer trains."
            )
    return [name_of[id(p)] for p in params]


def _trained_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    if isinstance(optimizer, OptaxOptimizer):
        return {id(leaf.param) for leaf in optimizer._records if optimizer._is_trainable(leaf) and leaf.param.requires_grad}
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def optimizer_spec_of(optimizer: torch.optim.Optimizer, group: ParamGroup) -> OptimizerSpec | None:
    """Return the `OptimizerSpec` that updates a group; None for a torch class that has none."""
    if isinstance(optimizer, OptaxOptimizer):
        return optimizer._optimizer_spec_of(group)
    named = (torch_rules.SPECS_BY_CLASS.get(cls.__name__) for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim"))
    return next((rule for rule in named if rule is not None), None)


def expected_state(optimizer: torch.optim.Optimizer, param: Param) -> dict[str, StateField]:
    """Return the state fields of a trained parameter after a step, by name. Fields that are not the transformation's are left out."""
    group = optimizer.param_groups[param.group]
    if isinstance(optimizer, OptaxOptimizer):
        leaf = next(leaf for leaf in optimizer._records if leaf.param is param.tensor)
        fields = optimizer._state_fields(leaf, group) or {}
    else:
        rule = optimizer_spec_of(optimizer, group)
        known = (
            ()
            if rule is None
            else state_layout(UpdateSpec(group_reader(rule, ())(_with_missing_options(rule, group)), (_spec(param),))).leaf_fields[0]
        )
        fields = {field.name: field for field in known}
    return {name: field for name, field in fields.items() if name not in AUX_FIELDS and name not in param.hidden}


def scalar_device(optimizer: torch.optim.Optimizer, param: Param) -> torch.device:
    """Return the device of the parameter's step count. torch keeps it on the host, except in fused and capturable updates."""
    group = optimizer.param_groups[param.group]
    on_device = isinstance(optimizer, OptaxOptimizer) or group.get("fused") or group.get("capturable")
    return param.tensor.device if on_device else torch.device("cpu")


def transformation(what: str, optimizer: torch.optim.Optimizer, params: Sequence[Param]) -> optax.GradientTransformation:
    """Return the optax transformation that the optimizer runs: its own one if that trains all parameters, otherwise an `optax.partition`.

    The labels are those of a partitioned optimizer, or "trained", or "group0", "group1", ...; and "frozen" for all other parameters.

    Raises:
      ValueError: no `OptimizerSpec` belongs to the optimizer's class.
    """
    rows = _transforms_by_label(what, optimizer, params)
    if len(rows) == 1 and all(param.trained for param in params):
        return next(iter(rows.values()))[0]
    label_of = {id(param.tensor): label for label, (_, own) in rows.items() for param in own}
    transforms: dict[Hashable, optax.GradientTransformation] = {label: tx for label, (tx, _) in rows.items()}
    if len(label_of) < len(params):
        transforms[FROZEN_LABEL] = optax.set_to_zero()
    return optax.partition(transforms, nest_by_path((param.path, label_of.get(id(param.tensor), FROZEN_LABEL)) for param in params))


def nest_by_path(leaves: Iterable[tuple[Path, object]]) -> PyTree:
    """Return leaves, given by their paths, as a nested dict."""
    root: PyTree = {}
    for path, leaf in leaves:
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    return root


def _transforms_by_label(
    what: str, optimizer: torch.optim.Optimizer, params: Sequence[Param]
) -> dict[str, tuple[optax.GradientTransformation, list[Param]]]:
    """Return label -> (transformation, the parameters that it trains)."""
    parts: dict[str, tuple[optax.GradientTransformation, list[Param]]] = {}
    values_by_row = optimizer._hyperparam_table.values_by_row(optimizer._hyperparams()) if isinstance(optimizer, OptaxOptimizer) else []
    leaves = {id(leaf.param): leaf for leaf in optimizer._records} if isinstance(optimizer, OptaxOptimizer) else {}
    for param in params:
        group = optimizer.param_groups[param.group]
        if not param.trained:
            continue
        rule = optimizer_spec_of(optimizer, group)
        if rule is None:
            raise ValueError(
                f"{what}: no transformation stands for {type(optimizer).__name__}. Give tx, the optax transformation that is to go on."
            )
        label = _label(optimizer, rule, param)
        if label not in parts:
            leaf = leaves.get(id(param.tensor))
            if leaf is not None:
                row, values = optimizer._hyperparam_table.transforms[leaf.hyperparam_row], values_by_row[leaf.hyperparam_row]  # pyright: ignore
            else:
                row, values = _spec_and_scalars(rule, group)
            parts[label] = row.build(values, str(numpy_dtype(param.tensor.dtype))), []
        parts[label][1].append(param)
    return parts


def _label(optimizer: torch.optim.Optimizer, rule: OptimizerSpec, param: Param) -> str:
    groups = optimizer.param_groups
    if not getattr(optimizer, "_is_partitioned", False):
        return "trained" if rule.is_instance or len(groups) == 1 else f"group{param.group}"
    label = str(groups[param.group]["label"])
    alike = [index for index, group in enumerate(groups) if str(group["label"]) == label]
    return label if rule.is_instance or len(alike) == 1 else f"{label}#{alike.index(param.group)}"


def _spec_and_scalars(rule: OptimizerSpec, group: ParamGroup) -> tuple[TransformSpec, list[float]]:
    """Return the `TransformSpec` of a group of torch's own optimizers, and its hyperparameters."""
    row = group_reader(rule, ())(_with_missing_options(rule, group))
    scalars: list[float] = []
    for name, length in row.traced_hyperparams:
        value = _with_missing_options(rule, group)[name]
        scalars += map(float, value) if length else [float(value)]
    return row, scalars


def _with_missing_options(rule: OptimizerSpec, group: ParamGroup) -> ParamGroup:
    """Return the group with the options that this version of torch lacks."""
    return {**rule.hyperparams, **group}


def _spec(param: Param) -> LeafSpec:
    return LeafSpec(None, tuple(param.tensor.shape), str(numpy_dtype(param.tensor.dtype)))
