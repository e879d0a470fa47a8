"""Checks and converts state_dicts: a saved one is put into the order of the optimizer that loads it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from bridge._compiler.spec import AUX_FIELDS, StateField

from ._params import saved_groups, wrapper_state
from ._params.hyperparam_table import HyperparamTable
from ._params.param_groups import (
    FLAGS,
    INITIAL_LR_SCALE,
    TRAINABLE_PARAMS,
    check_types,
    convert_scalar_arrays,
    convert_sequences,
    restore_lr_scale,
)
from ._params.record import ParamRecord
from ._params.record_state import has_state
from ._params.sharding import redistribute_like
from ._rules.betas import expand_betas_entry
from ._rules.optimizer_spec import OptimizerSpec
from ._rules.types import MutableParamGroup, MutableParamState, ParamGroup, ParamState, StateDict

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_FROZEN_FIELD = "step"  # state_dicts of version 0.1 have this single field for a frozen parameter


class Checkpointed(Protocol):
    """The attributes of an optimizer that saving and loading use."""

    param_groups: list[MutableParamGroup]
    defaults: MutableParamGroup
    _is_partitioned: bool
    _hyperparam_table: HyperparamTable
    _trainable: list[ParamRecord]

    @property
    def _records(self) -> list[ParamRecord]: ...
    def _param_names(self) -> list[str]: ...
    def _optimizer_spec_of(self, group: ParamGroup) -> OptimizerSpec: ...
    def _state_fields(self, leaf: ParamRecord, group: ParamGroup) -> dict[str, StateField] | None: ...
    def _betas_of(self, rule: OptimizerSpec) -> tuple[str, ...]: ...
    def _is_trainable(self, leaf: ParamRecord) -> bool: ...
    def _rebuild_if_outdated(self) -> None: ...
    def _reconcile_records(self) -> list[ParamRecord]: ...


class _SavedState:
    """State of one parameter, wrapped so that torch's loader does not cast its tensors to the parameter's dtype
    (https://github.com/pytorch/pytorch/issues/43706).
    """

    def __init__(self, fields: MutableParamState) -> None:
        self.fields = fields


@contextmanager
def temporary_hook(register: Callable[..., RemovableHandle], hook: Callable[..., object], **options: bool) -> Iterator[None]:
    """Register a torch hook for the duration of the block."""
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def unwrap_state(state: MutableMapping[torch.Tensor, MutableParamState], leaves: Iterable[ParamRecord]) -> None:
    """Unwrap the loaded state. The records forget their old tensors, so that the load does not count as an edit by user code."""
    for leaf in leaves:
        leaf.state_names = leaf.state_tensors = leaf.local_state = ()
    entries: list[tuple[torch.Tensor, MutableParamState | _SavedState]] = list(state.items())
    for key, value in entries:
        if isinstance(value, _SavedState):
            state[key] = value.fields


def check_and_align(optimizer: Checkpointed, state_dict: StateDict) -> StateDict:
    """Return a state_dict that torch can load by position. Raise an error that says why it does not fit. The optimizer is not changed."""
    saved, groups = saved_groups.copy_and_check(state_dict)
    optimizer._rebuild_if_outdated()
    trained = {id(leaf) for leaf in optimizer._trainable if leaf.param.requires_grad}
    groups = saved_groups.align_groups(optimizer.param_groups, groups, optimizer._records, trained)
    indices = {index for group in groups for index in group["params"]}
    state: dict[Hashable, ParamState | _SavedState] = {key: value for key, value in saved.items() if key not in indices}
    names = iter(optimizer._param_names())
    leaves = {id(leaf.param): leaf for leaf in optimizer._records}
    entries: dict[int, MutableParamState] = {}
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        _take_lr_scale(own, group)
        expand_betas_entry(group, optimizer._betas_of(optimizer._optimizer_spec_of(own)))
        saved_groups.check_optimizer(type(optimizer).__name__, own, group, optimizer._optimizer_spec_of(own).hyperparams)
        for key in (own.keys() & (FLAGS | {TRAINABLE_PARAMS}) | optimizer.defaults.keys()) - group.keys():
            group[key] = own.get(key, optimizer.defaults.get(key))
        if group.get("label") != own.get("label") and optimizer._is_partitioned:
            raise ValueError(
                f"load_state_dict: a group of the loaded state dict has the label {group.get('label')!r}, expected {own.get('label')!r}. "
                "Give the optimizer the labels of the saved one."
            )
        missing = [key for key in optimizer._optimizer_spec_of(own).hyperparams if key not in group]
        if missing:
            raise ValueError(f"load_state_dict: a group of the loaded state dict has no {missing[0]!r}, only {sorted(group)}.")
        convert_sequences(group, optimizer._optimizer_spec_of(own))
        check_types(type(optimizer).__name__, group, optimizer._optimizer_spec_of(own), allowed=own)
        for param, index in zip(own["params"], group["params"], strict=True):
            leaf, strict, name = leaves[id(param)], optimizer._optimizer_spec_of(own).is_optax, next(names)
            entry = _check_entry(saved.get(index), name)
            fields = optimizer._state_fields(leaf, group)
            guess = (
                optimizer._hyperparam_table.frozen_fields(leaf, group, optimizer._optimizer_spec_of(own))
                if fields is None and entry
                else {}
            )
            mine, others = wrapper_state.split_wrapper_entries(entry, guess if fields is None else fields)
            checked = _check_state(index, mine, fields, guess, param, name, strict)
            entries |= {id(leaf): kept.fields for kept in checked.values()}
            state |= checked
            if others:
                kept = checked[index].fields if index in checked else {}
                state[index] = _SavedState(kept | {key: wrapper_state.copy_entry(value, param) for key, value in others.items()})
    _check_shared_shapes(optimizer, entries)
    return {**state_dict, "state": state, "param_groups": groups}


def complete_state_dict(optimizer: Checkpointed, state_dict: StateDict) -> None:
    """Complete torch's state_dict: add entries for frozen parameters, put `lr_scale` back, and make sequences tuples."""
    leaves = optimizer._reconcile_records()
    add_frozen_entries(state_dict, [leaf.param.requires_grad and not optimizer._is_trainable(leaf) for leaf in leaves])
    update_trainable_params(state_dict["param_groups"], leaves)
    for group in state_dict["param_groups"]:
        if len(group.get("param_names", group["params"])) != len(group["params"]):
            del group["param_names"]  # user code added or removed parameters, but not their names
    for group in state_dict["param_groups"]:
        restore_lr_scale(group)
        convert_sequences(
            group, optimizer._optimizer_spec_of(group)
        )  # with weights_only=True, torch loads no other sequence, and no jax or NumPy array
        convert_scalar_arrays(group, optimizer._optimizer_spec_of(group))


def fill_group_defaults(param_groups: Sequence[MutableParamGroup], defaults: ParamGroup, leaves: Sequence[ParamRecord]) -> None:
    """Fill missing keys of loaded groups from the defaults, and set which of `leaves` are trained as the groups say."""
    columns = {index: iter(group[TRAINABLE_PARAMS]) for index, group in enumerate(param_groups) if TRAINABLE_PARAMS in group}
    for group in param_groups:
        for name, default in defaults.items():
            group.setdefault(name, default)
    for leaf in leaves:
        if leaf.group_index in columns:
            leaf.trained = next(columns[leaf.group_index])


def update_trainable_params(param_groups: Sequence[MutableParamGroup], leaves: Sequence[ParamRecord]) -> None:
    """Update the list of trained parameters in groups that have one: user code may have added or removed parameters."""
    for index, group in enumerate(param_groups):
        if TRAINABLE_PARAMS in group:
            group[TRAINABLE_PARAMS] = [leaf.trained for leaf in leaves if leaf.group_index == index]


def _take_lr_scale(own: ParamGroup, saved: MutableParamGroup) -> None:
    """Undo `restore_lr_scale`. A group saved by torch has no taken `lr_scale`; it then means the same as in the optimizer's own group."""
    if "lr_scale" in saved:
        taken = saved.setdefault(INITIAL_LR_SCALE, own.get(INITIAL_LR_SCALE))
        if taken:
            saved["lr_scale"] = saved["lr_scale"] / taken


def add_frozen_entries(state_dict: StateDict, frozen: Sequence[bool]) -> None:
    """Give each frozen parameter that requires grad an empty entry in `state`, because torch.distributed.checkpoint loads strictly."""
    positions = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, is_frozen in zip(positions, frozen, strict=True):
        if is_frozen and index not in state_dict["state"]:
            state_dict["state"][index] = {}


def _check_entry(saved: object, name: str) -> ParamState:
    if saved is not None and not isinstance(saved, Mapping):
        raise ValueError(f"load_state_dict: the state of {name!r} is {saved!r}; expected a dict from field to tensor. It is damaged.")
    return saved or {}


def _check_state(
    index: Hashable,
    saved: ParamState,
    fields: Mapping[str, StateField] | None,
    guessed_fields: Mapping[str, StateField],
    param: torch.Tensor,
    name: str,
    rejects_unknown: bool,
) -> dict[Hashable, _SavedState]:
    """Return a copy of the saved entry of one parameter; an empty dict if it has none, or only a scalar that stands for none.

    Args:
      fields: the fields of the parameter; None if it is frozen and its fields are unknown.
      guessed_fields: the likely fields of such a frozen parameter.
      rejects_unknown: whether other fields are an error. torch.optim's own classes keep fields of options that are off now (amsgrad).
    """
    unused_aux_fields = AUX_FIELDS - (
        AUX_FIELDS if fields is None else fields.keys()
    )  # the saved optimizer kept these fields, this one does not
    values = {key: value for key, value in saved.items() if value is not None and key not in unused_aux_fields}
    if values.keys() == {_FROZEN_FIELD} and fields is None:
        values = {}
    known = guessed_fields if fields is None else fields
    for key, value in values.items():
        if key in known or fields is None:
            _check_value(f"load_state_dict: state {key!r} of {name!r}", value, param, known.get(key))
    only_scalars = values.keys() <= known.keys() - AUX_FIELDS and not has_state(known.values(), values)
    if only_scalars and not any(map(torch.count_nonzero, map(torch.as_tensor, values.values()))):
        return {}  # a zero scalar stands for a parameter that was frozen when it was saved
    needed = {key for key, field in known.items() if field.state_index is not None}
    is_part = bool(values.keys() - AUX_FIELDS if fields is not None else values.keys() & needed)
    absent = sorted(needed - values.keys()) if is_part else []
    if absent or (fields is not None and rejects_unknown and values.keys() - fields.keys()):
        lacks = f" {absent[0]!r} is {'None' if absent[0] in saved else 'missing'}." if absent else ""
        raise ValueError(
            f"load_state_dict: state of {name!r} has the fields {sorted(values)}, expected {sorted(known)}.{lacks} It was saved by another "
            "optimizer, or with another option such as amsgrad or momentum."
        )
    if not values:
        return {}
    if fields is None:  # frozen: its state is checked when the parameter is trained again
        tensors = {key: redistribute_like(torch.as_tensor(value), param) for key, value in values.items()}
        return {index: _SavedState({key: tensor.detach().to(param.device, copy=True) for key, tensor in tensors.items()})}
    return {
        index: _SavedState({key: _copy_to_field(value, param, fields[key]) if key in fields else value for key, value in values.items()})
    }


def _check_value(title: str, value: object, param: torch.Tensor, field: StateField | None) -> None:
    """Raise if a saved value is no dense tensor or number, or does not fit the field. Each shape fits if the field's shape is unknown."""
    if not isinstance(value, torch.Tensor | numbers.Number | np.generic):
        raise ValueError(f"{title} is {value!r}; expected a tensor. It is damaged.")
    if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_nested):
        kind = "on the meta device, without values" if value.is_meta else f"of layout {value.layout} and dtype {value.dtype}"
        raise ValueError(f"{title} is a tensor {kind}; expected a dense one. It is damaged.")
    if field is None:
        return
    shape = _shape(value)
    expected = tuple(param.shape if field.shape is None else field.shape)
    fits = shape == expected or (field.state_index == -1 and expected) or (not expected and math.prod(shape) == 1)
    if not fits:
        raise ValueError(f"{title} has shape {shape}, expected {expected}.")
    is_complex = value.is_complex() if isinstance(value, torch.Tensor) else isinstance(value, complex)
    if is_complex and not getattr(torch, field.dtype).is_complex:
        raise ValueError(f"{title} is complex, expected a value of dtype {field.dtype}.")


def _shape(value: object) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _check_shared_shapes(optimizer: Checkpointed, entries: Mapping[int, ParamState]) -> None:
    """Raise if shared state has a wrong shape.

    The shape must fit the parameters with saved state, or all parameters.

    Args:
      entries: the saved fields, by id of the record.
    """
    for leaves, shapes in optimizer._hyperparam_table.shared_shapes(entries.keys()):
        for leaf in leaves:
            for key, expected in shapes.items():
                shape = _shape(entries[id(leaf)][key]) if key in entries[id(leaf)] else None
                if shape is not None and shape not in expected:
                    raise ValueError(
                        f"load_state_dict: state {key!r} of {leaf.name!r}, which several parameters share, has shape {shape}, expected "
                        f"{' or '.join(map(str, sorted(expected)))}."
                    )


def _copy_to_field(value: object, param: torch.Tensor, field: StateField) -> torch.Tensor:
    """Return the value on the parameter's device in the field's dtype. A float32 value stays float32 if the user asked for no dtype."""
    tensor = redistribute_like(torch.as_tensor(value).detach(), param)
    dtype = getattr(torch, field.dtype)
    if (
        field.shape is None
        and not field.dtype_requested
        and tensor.dtype == _compute_dtype(dtype)
        and torch.promote_types(tensor.dtype, dtype) == tensor.dtype
    ):
        dtype = tensor.dtype
    return tensor.to(device=param.device, dtype=dtype, copy=True)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic with a dtype uses."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
