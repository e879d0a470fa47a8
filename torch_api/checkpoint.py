"""A saved state_dict, checked against the optimizer that loads it and put into that optimizer's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bridge.masks import near

from .groups import FLAGS, TRAINABLE_PARAMS, check_group


class _Saved:
    """State of one parameter on its way through torch's loader, which would cast every tensor to the parameter's dtype
    (https://github.com/pytorch/pytorch/issues/43706)."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def unwrap(state: dict[Any, Any]) -> None:
    """Undo `prepare` in the loaded state."""
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
    groups = _aligned(optimizer, [dict(group) for group in state_dict["param_groups"]])
    saved = dict(state_dict["state"])
    indices = {index for group in groups for index in group["params"]}
    state = {key: value for key, value in saved.items() if key not in indices}
    names = iter(optimizer.names())
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for key in (own.keys() & (FLAGS | {TRAINABLE_PARAMS}) | optimizer.defaults.keys()) - group.keys():
            group[key] = own.get(key, optimizer.defaults.get(key))
        check_group(type(optimizer).__name__, group, optimizer.hyperparams, allowed=own)
        fields = optimizer.state_fields(group)
        for param, index in zip(own["params"], group["params"], strict=True):
            state |= _checked_state(index, saved.get(index), fields, param, next(names))
    return {**state_dict, "state": state, "param_groups": groups}


def _aligned(optimizer: Any, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups with `params` in the optimizer's order: by name where both sides have names, else as they are."""
    own = optimizer.param_groups
    if len(own) != len(saved):
        raise ValueError(
            f"load_state_dict: loaded state dict has a different number of parameter groups: {len(saved)}, expected {len(own)}."
        )
    if all("param_names" in group for group in [*own, *saved]):
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
    index: Any, saved: Mapping[str, Any] | None, fields: Mapping[str, bool], param: torch.Tensor, name: str
) -> dict[Any, _Saved]:
    """The entry of one parameter, copied; nothing where there is none, or only a scalar that stands for none."""
    given = {key: value for key, value in (saved or {}).items() if value is not None}
    if not any(fields.get(key, True) for key in given) and any(fields.values()):
        return {}
    if not given:
        return {}
    if not fields.keys() <= given.keys():
        raise ValueError(
            f"load_state_dict: state of {name!r} has the fields {sorted(given)}, expected {sorted(fields)}. It was saved by another "
            "optimizer, or with another option such as amsgrad or momentum."
        )
    for key, shaped in fields.items():
        shape = tuple(given[key].shape) if torch.is_tensor(given[key]) else ()
        if shaped and shape != tuple(param.shape):
            raise ValueError(f"load_state_dict: state {key!r} of {name!r} has shape {shape}, expected {tuple(param.shape)}.")
    return {index: _Saved({key: _copied(value, param, fields[key]) if key in fields else value for key, value in given.items()})}


def _copied(value: Any, param: torch.Tensor, shaped: bool) -> torch.Tensor:
    """The value on the parameter's device; a count as float32, a moment in the parameter's type, or in float32 if saved so."""
    tensor = torch.as_tensor(value).detach()
    if not shaped:
        dtype = torch.float32
    else:
        wider = tensor.dtype == _wide(param.dtype) and torch.promote_types(tensor.dtype, param.dtype) == tensor.dtype
        dtype = tensor.dtype if wider else param.dtype
    return tensor.to(device=param.device, dtype=dtype, copy=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type that arithmetic with a dtype runs in."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
