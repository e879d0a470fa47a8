"""Checks and converts state_dicts: a saved one is put into the order of the optimizer that loads it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from bridge._compiler.spec import BESIDE, Field

from ._params import saved_groups, wrapper_state
from ._params.hyperparam_table import Rows
from ._params.param_groups import FLAGS, TAKEN_LR_SCALE, TRAINABLE_PARAMS, check_types, make_plain, make_tuples, put_back_lr_scale
from ._params.record import Leaf
from ._params.record_state import has_state
from ._params.sharding import laid
from ._rules.betas import take_betas
from ._rules.optimizer_spec import Rule
from ._rules.types import MutableParamGroup, MutableParamState, ParamGroup, ParamState, StateDict

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

FROZEN = "step"  # state_dicts of version 0.1 have this single field for a frozen parameter


class Checkpointed(Protocol):
    """The attributes of an optimizer that saving and loading use."""

    param_groups: list[MutableParamGroup]
    defaults: MutableParamGroup
    by_label: bool
    arrangement: Rows
    _active: list[Leaf]

    @property
    def leaves(self) -> list[Leaf]: ...
    def names(self) -> list[str]: ...
    def rule_of(self, group: ParamGroup) -> Rule: ...
    def state_fields(self, leaf: Leaf, group: ParamGroup) -> dict[str, Field] | None: ...
    def _betas_of(self, rule: Rule) -> tuple[str, ...]: ...
    def _is_active(self, leaf: Leaf) -> bool: ...
    def _follow(self) -> None: ...
    def _followed(self) -> list[Leaf]: ...


class _Saved:
    """State of one parameter, wrapped so that torch's loader does not cast its tensors to the parameter's dtype
    (https://github.com/pytorch/pytorch/issues/43706).
    """

    def __init__(self, fields: MutableParamState) -> None:
        self.fields = fields


@contextmanager
def hooked(register: Callable[..., RemovableHandle], hook: Callable[..., object], **options: bool) -> Iterator[None]:
    """Register a torch hook for the duration of the block."""
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def unwrap(state: MutableMapping[torch.Tensor, MutableParamState], leaves: Iterable[Leaf]) -> None:
    """Unwrap the loaded state. The records forget their old tensors, so that the load does not count as an edit by user code."""
    for leaf in leaves:
        leaf.fields = leaf.shown = leaf.views = ()
    entries: list[tuple[torch.Tensor, MutableParamState | _Saved]] = list(state.items())
    for key, value in entries:
        if isinstance(value, _Saved):
            state[key] = value.fields


def prepare(optimizer: Checkpointed, state_dict: StateDict) -> StateDict:
    """Return a state_dict that torch can load by position. Raise an error that says why it does not fit. The optimizer is not changed."""
    saved, groups = saved_groups.checked(state_dict)
    optimizer._follow()
    trained = {id(leaf) for leaf in optimizer._active if leaf.param.requires_grad}
    groups = saved_groups.aligned(optimizer.param_groups, groups, optimizer.leaves, trained)
    indices = {index for group in groups for index in group["params"]}
    state: dict[Hashable, ParamState | _Saved] = {key: value for key, value in saved.items() if key not in indices}
    names = iter(optimizer.names())
    leaves = {id(leaf.param): leaf for leaf in optimizer.leaves}
    entries: dict[int, MutableParamState] = {}
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        _take_lr_scale(own, group)
        take_betas(group, optimizer._betas_of(optimizer.rule_of(own)))
        for key in (own.keys() & (FLAGS | {TRAINABLE_PARAMS}) | optimizer.defaults.keys()) - group.keys():
            group[key] = own.get(key, optimizer.defaults.get(key))
        if group.get("label") != own.get("label") and optimizer.by_label:
            raise ValueError(
                f"load_state_dict: a group of the loaded state dict has the label {group.get('label')!r}, expected {own.get('label')!r}. "
                "Give the optimizer the labels of the saved one."
            )
        missing = [key for key in optimizer.rule_of(own).hyperparams if key not in group]
        if missing:
            raise ValueError(f"load_state_dict: a group of the loaded state dict has no {missing[0]!r}, only {sorted(group)}.")
        make_tuples(group, optimizer.rule_of(own))
        check_types(type(optimizer).__name__, group, optimizer.rule_of(own), allowed=own)
        for param, index in zip(own["params"], group["params"], strict=True):
            leaf, strict, name = leaves[id(param)], optimizer.rule_of(own).scaled, next(names)
            entry = _checked_entry(saved.get(index), name)
            fields = optimizer.state_fields(leaf, group)
            guess = optimizer.arrangement.frozen_fields(leaf, group, optimizer.rule_of(own)) if fields is None and entry else {}
            mine, others = wrapper_state.split(entry, guess if fields is None else fields)
            checked = _checked_state(index, mine, fields, guess, param, name, strict)
            entries |= {id(leaf): kept.fields for kept in checked.values()}
            state |= checked
            if others:
                kept = checked[index].fields if index in checked else {}
                state[index] = _Saved(kept | {key: wrapper_state.copied(value, param) for key, value in others.items()})
    _check_shared(optimizer, entries)
    return {**state_dict, "state": state, "param_groups": groups}


def complete(optimizer: Checkpointed, state_dict: StateDict) -> None:
    """Complete torch's state_dict: add entries for frozen parameters, put `lr_scale` back, and make sequences tuples."""
    leaves = optimizer._followed()
    mark_frozen(state_dict, [leaf.param.requires_grad and not optimizer._is_active(leaf) for leaf in leaves])
    update_trainable_params(state_dict["param_groups"], leaves)
    for group in state_dict["param_groups"]:
        if len(group.get("param_names", group["params"])) != len(group["params"]):
            del group["param_names"]  # user code added or removed parameters, but not their names
    for group in state_dict["param_groups"]:
        put_back_lr_scale(group)
        make_tuples(group, optimizer.rule_of(group))  # with weights_only=True, torch loads no other sequence, and no jax or NumPy array
        make_plain(group, optimizer.rule_of(group))


def settle(param_groups: Sequence[MutableParamGroup], defaults: ParamGroup, leaves: Sequence[Leaf]) -> None:
    """Fill missing keys of loaded groups from the defaults, and set which of `leaves` are trained as the groups say."""
    columns = {index: iter(group[TRAINABLE_PARAMS]) for index, group in enumerate(param_groups) if TRAINABLE_PARAMS in group}
    for group in param_groups:
        for name, default in defaults.items():
            group.setdefault(name, default)
    for leaf in leaves:
        if leaf.group in columns:
            leaf.trained = next(columns[leaf.group])


def update_trainable_params(param_groups: Sequence[MutableParamGroup], leaves: Sequence[Leaf]) -> None:
    """Update the list of trained parameters in groups that have one: user code may have added or removed parameters."""
    for index, group in enumerate(param_groups):
        if TRAINABLE_PARAMS in group:
            group[TRAINABLE_PARAMS] = [leaf.trained for leaf in leaves if leaf.group == index]


def _take_lr_scale(own: ParamGroup, saved: MutableParamGroup) -> None:
    """Undo `put_back_lr_scale`. A group saved by torch has no taken `lr_scale`; it then means the same as in the optimizer's own group."""
    if "lr_scale" in saved:
        taken = saved.setdefault(TAKEN_LR_SCALE, own.get(TAKEN_LR_SCALE))
        if taken:
            saved["lr_scale"] = saved["lr_scale"] / taken


def mark_frozen(state_dict: StateDict, frozen: Sequence[bool]) -> None:
    """Give each frozen parameter that requires grad an empty entry in `state`, because torch.distributed.checkpoint loads strictly."""
    positions = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, is_frozen in zip(positions, frozen, strict=True):
        if is_frozen and index not in state_dict["state"]:
            state_dict["state"][index] = {}


def _checked_entry(saved: object, name: str) -> ParamState:
    if saved is not None and not isinstance(saved, Mapping):
        raise ValueError(f"load_state_dict: the state of {name!r} is {saved!r}; expected a dict from field to tensor. It is damaged.")
    return saved or {}


def _checked_state(
    index: Hashable,
    saved: ParamState,
    fields: Mapping[str, Field] | None,
    guess: Mapping[str, Field],
    param: torch.Tensor,
    name: str,
    strict: bool,
) -> dict[Hashable, _Saved]:
    """Return a copy of the saved entry of one parameter; an empty dict if it has none, or only a scalar that stands for none.

    Args:
      fields: the fields of the parameter; None if it is frozen and its fields are unknown.
      guessed_fields: the likely fields of such a frozen parameter.
      rejects_unknown: whether other fields are an error. torch.optim's own classes keep fields of options that are off now (amsgrad).
    """
    idle = BESIDE - (BESIDE if fields is None else fields.keys())  # the saved optimizer kept these fields, this one does not
    given = {key: value for key, value in saved.items() if value is not None and key not in idle}
    if given.keys() == {FROZEN} and fields is None:
        given = {}
    known = guess if fields is None else fields
    for key, value in given.items():
        if key in known or fields is None:
            _check_value(f"load_state_dict: state {key!r} of {name!r}", value, param, known.get(key))
    only_scalars = given.keys() <= known.keys() - BESIDE and not has_state(known.values(), given)
    if only_scalars and not any(map(torch.count_nonzero, map(torch.as_tensor, given.values()))):
        return {}  # a zero scalar stands for a parameter that was frozen when it was saved
    needed = {key for key, field in known.items() if field.position is not None}
    is_part = bool(given.keys() - BESIDE if fields is not None else given.keys() & needed)
    absent = sorted(needed - given.keys()) if is_part else []
    if absent or (fields is not None and strict and given.keys() - fields.keys()):
        lacks = f" {absent[0]!r} is {'None' if absent[0] in saved else 'missing'}." if absent else ""
        raise ValueError(
            f"load_state_dict: state of {name!r} has the fields {sorted(given)}, expected {sorted(known)}.{lacks} It was saved by another "
            "optimizer, or with another option such as amsgrad or momentum."
        )
    if not given:
        return {}
    if fields is None:  # frozen: its state is checked when the parameter is trained again
        tensors = {key: laid(torch.as_tensor(value), param) for key, value in given.items()}
        return {index: _Saved({key: tensor.detach().to(param.device, copy=True) for key, tensor in tensors.items()})}
    return {index: _Saved({key: _copied(value, param, fields[key]) if key in fields else value for key, value in given.items()})}


def _check_value(title: str, value: object, param: torch.Tensor, field: Field | None) -> None:
    """Raise if a saved value is no dense tensor or number, or does not fit the field. Any shape fits if the field's shape is unknown."""
    if not isinstance(value, torch.Tensor | numbers.Number | np.generic):
        raise ValueError(f"{title} is {value!r}; expected a tensor. It is damaged.")
    if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_nested):
        kind = "on the meta device, without values" if value.is_meta else f"of layout {value.layout} and dtype {value.dtype}"
        raise ValueError(f"{title} is a tensor {kind}; expected a dense one. It is damaged.")
    if field is None:
        return
    shape = _shape(value)
    expected = tuple(param.shape if field.shape is None else field.shape)
    fits = shape == expected or (field.position == -1 and expected) or (not expected and math.prod(shape) == 1)
    if not fits:
        raise ValueError(f"{title} has shape {shape}, expected {expected}.")
    is_complex = value.is_complex() if isinstance(value, torch.Tensor) else isinstance(value, complex)
    if is_complex and not getattr(torch, field.dtype).is_complex:
        raise ValueError(f"{title} is complex, expected a value of dtype {field.dtype}.")


def _shape(value: object) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _check_shared(optimizer: Checkpointed, entries: Mapping[int, ParamState]) -> None:
    """Raise if shared state has a wrong shape.

    The shape must fit the parameters with saved state, or all parameters.

    Args:
      entries: the saved fields, by id of the record.
    """
    for leaves, shapes in optimizer.arrangement.shared_shapes(entries.keys()):
        for leaf in leaves:
            for key, expected in shapes.items():
                shape = _shape(entries[id(leaf)][key]) if key in entries[id(leaf)] else None
                if shape is not None and shape not in expected:
                    raise ValueError(
                        f"load_state_dict: state {key!r} of {leaf.name!r}, which several parameters share, has shape {shape}, expected "
                        f"{' or '.join(map(str, sorted(expected)))}."
                    )


def _copied(value: object, param: torch.Tensor, field: Field) -> torch.Tensor:
    """Return the value on the parameter's device in the field's dtype. A float32 value stays float32 if the user asked for no dtype."""
    tensor = laid(torch.as_tensor(value).detach(), param)
    dtype = getattr(torch, field.dtype)
    if (
        field.shape is None
        and not field.asked
        and tensor.dtype == _wide(dtype)
        and torch.promote_types(tensor.dtype, dtype) == tensor.dtype
    ):
        dtype = tensor.dtype
    return tensor.to(device=param.device, dtype=dtype, copy=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic with a dtype uses."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
