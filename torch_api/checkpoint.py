"""A saved state_dict, checked against the optimizer that loads it and put into that optimizer's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bridge.masks import near
from bridge.precision import BESIDE
from bridge.problem import Field

from . import wrapper_state
from .betas import take_betas
from .groups import FLAGS, TAKEN_LR_SCALE, TRAINABLE_PARAMS, check_types, lr_scale, make_plain, make_tuples
from .plan import Leaf, has_state
from .shards import laid

FROZEN = "step"  # all that the state of a frozen parameter was in the state_dict of 0.1


class _Saved:
    """State of one parameter on its way through torch's loader, which would cast every tensor to the parameter's dtype
    (https://github.com/pytorch/pytorch/issues/43706)."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


@contextmanager
def hooked(register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> Iterator[None]:
    """A hook of torch's for the time of one call."""
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def unwrap(state: dict[Any, Any], leaves: Iterable[Leaf]) -> None:
    """Undo `prepare` in the loaded state, which is no edit by hand of what the leaves showed before."""
    for leaf in leaves:
        leaf.fields = leaf.shown = leaf.views = ()
    for key, value in list(state.items()):
        if isinstance(value, _Saved):
            state[key] = value.fields


def prepare(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state_dict that torch may load by position, or the error that says why it does not fit. Changes nothing."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"load_state_dict: there is no {key!r} in it; expected 'state' and 'param_groups', got {sorted(map(str, state_dict))}."
            )
    groups = _aligned(optimizer, _in_order(optimizer.param_groups, [dict(group) for group in state_dict["param_groups"]]))
    saved = dict(state_dict["state"])
    indices = {index for group in groups for index in group["params"]}
    state = {key: value for key, value in saved.items() if key not in indices}
    names = iter(optimizer.names())
    optimizer._follow()
    leaves = {id(leaf.param): leaf for leaf in optimizer.leaves}
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
            fields = optimizer.state_fields(leaves[id(param)], group)
            strict = optimizer.rule_of(own).scaled
            mine, others = wrapper_state.split(saved.get(index) or {}, () if fields is None else fields)
            state |= _checked_state(index, mine, fields, param, next(names), strict)
            if others:
                kept = state[index].fields if index in state else {}
                state[index] = _Saved(kept | {key: wrapper_state.copied(value, param) for key, value in others.items()})
    return {**state_dict, "state": state, "param_groups": groups}


def _in_order(own: Sequence[Mapping[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups in the optimizer's order: with the same names, or else the same labels, where both sides have the same."""
    for key in (lambda group: sorted(group.get("param_names", ())), lambda group: repr(group.get("label"))):
        mine, theirs = list(map(key, own)), list(map(key, saved))
        if sorted(mine) == sorted(theirs) and all(mine):
            rest = list(zip(theirs, saved, strict=True))
            return [rest.pop(next(i for i, (name, _) in enumerate(rest) if name == wanted))[1] for wanted in mine]
    return saved


def complete(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Complete torch's state_dict of the optimizer: an entry for frozen parameters, `lr_scale` in its place, tuples for sequences."""
    leaves = optimizer._followed()
    mark_frozen(state_dict, [leaf.param.requires_grad and not optimizer._is_active(leaf) for leaf in leaves])
    update_trainable_params(state_dict["param_groups"], leaves)
    for group in state_dict["param_groups"]:
        if len(group.get("param_names", group["params"])) != len(group["params"]):
            del group["param_names"]  # parameters were added or removed by hand, their names not
    _put_back_lr_scale(state_dict)
    for group in state_dict["param_groups"]:
        make_tuples(group, optimizer.rule_of(group))  # weights_only=True loads no other sequence, and no array of jax or NumPy
        make_plain(group, optimizer.rule_of(group))


def settle(param_groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any], leaves: Sequence[Leaf]) -> None:
    """Give loaded groups what they lack of the defaults, and `leaves` what the groups say of which are trained."""
    columns = {index: iter(group[TRAINABLE_PARAMS]) for index, group in enumerate(param_groups) if TRAINABLE_PARAMS in group}
    for group in param_groups:
        for name, default in defaults.items():
            group.setdefault(name, default)
    for leaf in leaves:
        if leaf.group in columns:
            leaf.trained = next(columns[leaf.group])


def update_trainable_params(param_groups: Sequence[dict[str, Any]], leaves: Sequence[Leaf]) -> None:
    """Write into groups that say which of their parameters are trained what is true now: parameters may have come and gone by hand."""
    for index, group in enumerate(param_groups):
        if TRAINABLE_PARAMS in group:
            group[TRAINABLE_PARAMS] = [leaf.trained for leaf in leaves if leaf.group == index]


def _put_back_lr_scale(state_dict: dict[str, Any]) -> None:
    """Save the lr_scale that was taken from a group where torch's optimizers have it."""
    for group in state_dict["param_groups"]:
        if "lr_scale" in group and group.setdefault(TAKEN_LR_SCALE, 1.0) is not None:
            group["lr_scale"] = lr_scale(group)


def _take_lr_scale(own: Mapping[str, Any], saved: dict[str, Any]) -> None:
    """Undo `_put_back_lr_scale`. In a group of torch's, lr_scale means what it means in the own one; without one there, nothing."""
    if "lr_scale" in saved:
        taken = saved.setdefault(TAKEN_LR_SCALE, own.get(TAKEN_LR_SCALE))
        if taken:
            saved["lr_scale"] = saved["lr_scale"] / taken


def mark_frozen(state_dict: dict[str, Any], frozen: Sequence[bool]) -> None:
    """Give each frozen parameter that requires grad an empty entry in `state`: torch.distributed.checkpoint loads strictly."""
    positions = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, is_frozen in zip(positions, frozen, strict=True):
        if is_frozen and index not in state_dict["state"]:
            state_dict["state"][index] = {}


def _aligned(optimizer: Any, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups with `params` in the optimizer's order: by name where both sides have names, else as they are."""
    own = optimizer.param_groups
    for position, group in enumerate(saved):
        if len(group.get("param_names", group["params"])) != len(group["params"]):
            raise ValueError(
                f"load_state_dict: group {position} of the loaded state dict has {len(group['params'])} parameters, but "
                f"{len(group['param_names'])} param_names. It is damaged."
            )
    if len(own) != len(saved):
        raise ValueError(
            f"load_state_dict: loaded state dict has a different number of parameter groups: {len(saved)}, expected {len(own)}."
        )
    if all(len(group.get("param_names", ())) == len(group["params"]) for group in [*own, *saved]):
        index = _by_name(saved, "params")
        names = [name for group in own for name in group["param_names"]]
        if len(set(names)) == len(names) and len(index) == sum(len(group["params"]) for group in saved):
            _same_names(names, index)
            columns = {"params": index}
            if all(TRAINABLE_PARAMS in group for group in saved):
                columns[TRAINABLE_PARAMS] = _by_name(saved, TRAINABLE_PARAMS)
            return [
                group
                | {key: [c[n] for n in mine["param_names"]] for key, c in columns.items()}
                | {"param_names": list(mine["param_names"])}
                for mine, group in zip(own, saved, strict=True)
            ]
    for position, (mine, group) in enumerate(zip(own, saved, strict=True)):
        if not len(mine["params"]) == len(group["params"]) == len(group.get(TRAINABLE_PARAMS, group["params"])):
            raise ValueError(
                f"load_state_dict: group {position} of the loaded state dict has {len(group['params'])} parameters, expected "
                f"{len(mine['params'])}: a parameter group that doesn't match the size of optimizer's group. Were layers frozen or added?"
            )
    return saved


def _by_name(groups: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {name: value for group in groups for name, value in zip(group["param_names"], group[key], strict=True)}


def _same_names(own: list[str], saved: Mapping[str, Any]) -> None:
    known = set(own)
    missing = [name for name in own if name not in saved]
    extra = [name for name in saved if name not in known]
    if missing:
        hint = near(missing[0], saved)
        raise ValueError(f"load_state_dict: the loaded state dict has no parameter {missing[0]!r} ({len(missing)} are missing). {hint}")
    if extra:
        raise ValueError(
            f"load_state_dict: the loaded state dict has a parameter {extra[0]!r} that this optimizer has not ({len(extra)} such)."
        )


def _checked_state(
    index: Any, saved: Mapping[str, Any] | None, fields: Mapping[str, Field] | None, param: torch.Tensor, name: str, strict: bool
) -> dict[Any, _Saved]:
    """The entry of one parameter, copied; nothing where there is none, or only a scalar that stands for none.

    `strict`: no other fields; torch.optim's own classes keep those of options that are off now (amsgrad).
    """
    idle = BESIDE - (BESIDE if fields is None else fields.keys())  # kept by the optimizer that was saved, not by this one
    given = {key: value for key, value in (saved or {}).items() if value is not None and key not in idle}
    if given.keys() == {FROZEN} and not has_state((fields or {}).values(), given):
        given = {}
    if fields is None and given:  # frozen: it is looked at when it is thawed
        tensors = {key: laid(torch.as_tensor(value), param) for key, value in given.items()}
        return {index: _Saved({key: tensor.detach().to(param.device, copy=True) for key, tensor in tensors.items()})}
    only_scalars = fields is not None and given.keys() <= fields.keys() - BESIDE and not has_state(fields.values(), given)
    if fields is None or not given or only_scalars:
        return {}
    needed = {key for key, field in fields.items() if field.position is not None}
    if (given.keys() - BESIDE and not needed <= given.keys()) or (strict and given.keys() - fields.keys()):
        raise ValueError(
            f"load_state_dict: state of {name!r} has the fields {sorted(given)}, expected {sorted(fields)}. It was saved by another "
            "optimizer, or with another option such as amsgrad or momentum."
        )
    for key in fields.keys() & given.keys():
        field = fields[key]
        shape = tuple(given[key].shape) if torch.is_tensor(given[key]) else ()
        expected = tuple(param.shape if field.shape is None else field.shape)
        if expected and shape != expected and field.position != -1:
            raise ValueError(f"load_state_dict: state {key!r} of {name!r} has shape {shape}, expected {expected}.")
    return {index: _Saved({key: _copied(value, param, fields[key]) if key in fields else value for key, value in given.items()})}


def _copied(value: Any, param: torch.Tensor, field: Field) -> torch.Tensor:
    """The value on the parameter's device in the field's type, or in float32 if it was saved so and no type is asked for."""
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
    """The type that arithmetic with a dtype runs in."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
