"""What a param group may hold, and how its numbers reach the compiled update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bridge.masks import near
from bridge.rules import Rule
from bridge.step import Row

FLAGS = frozenset({"trainable", "label", "mask", "lr_scale", "wd_scale"})
# Options of torch.optim that say how torch computes: kept, so that checkpoints look the same, and otherwise ignored.
TORCH_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Written into groups by torch.optim.lr_scheduler and swa_utils, and `name` by Lightning's monitor.
_SCHEDULER_KEYS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "name"})
_PARAMS_KEYS = frozenset({"params", "param_names", "trainable_params"})

_NAMES = {"lr": "learning rate", "eps": "epsilon value", "momentum": "momentum value", "weight_decay": "weight_decay value"}


def hyperparam_defaults(rule: Rule) -> dict[str, Any]:
    """The rule's hyperparams and options with their defaults, None for structural ones being 0 in a group."""
    parameters = inspect.signature(rule.factory).parameters.values()
    return {p.name: 0 if p.name in rule.structural and p.default is None else p.default for p in parameters}


def check_keywords(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a constructor argument that nothing reads."""
    known = set(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{owner}: unknown argument {name!r}. {near(name, known)} Known: {', '.join(sorted(known))}.")


def check_group(owner: str, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for an unknown group key, or a value that the update cannot take."""
    known = FLAGS | TORCH_OPTIONS | _SCHEDULER_KEYS | _PARAMS_KEYS | set(defaults)
    for key in group:
        if key not in known:
            raise ValueError(f"{owner}: unknown key {key!r} in a param group. {near(key, known)} Known: {', '.join(sorted(known))}.")
    for key, value in group.items():
        _check_value(owner, key, value, defaults)
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


def _check_value(owner: str, key: str, value: Any, defaults: Mapping[str, Any]) -> None:
    if key == "differentiable" and value:
        raise ValueError(f"{owner}: differentiable=True is not supported: the update runs outside torch's autograd graph.")
    if key == "trainable" and not isinstance(value, bool):
        raise TypeError(f"{owner}: group flag 'trainable' is {value!r}; expected True or False. Use 'mask' to choose parameters.")
    if key in _NAMES and not value >= 0:
        raise ValueError(f"Invalid {_NAMES[key]}: {value}")
    if key in ("lr_scale", "wd_scale") and not value >= 0:
        raise ValueError(f"Invalid {key}: {value}")
    if key == "lr" and getattr(value, "ndim", 0) and value.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if key == "betas":
        for index, beta in enumerate(value):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if isinstance(defaults.get(key), bool) and not isinstance(value, bool):
        raise TypeError(f"{owner}: {key!r} is {value!r}; expected True or False.")


def group_reader(rule: Rule, defaults: Mapping[str, Any]) -> tuple[Callable[[Mapping[str, Any]], Row], list[str]]:
    """How to read a group: a function to its static `Row`, and the names that decide the row besides tuple lengths."""
    hyperparams = [name for name in inspect.signature(rule.factory).parameters if name in defaults]
    options = [name for name in hyperparams if isinstance(defaults[name], bool)]
    numbers = [name for name in hyperparams if name not in options]

    def read(group: Mapping[str, Any]) -> Row:
        absent = [name for name in numbers if name in rule.structural and float(group[name]) == 0.0]
        statics = {name: group[name] for name in options} | dict.fromkeys(absent)
        traced = ((name, len(group[name]) if isinstance(group[name], tuple | list) else 0) for name in numbers if name not in absent)
        return Row(rule.factory, tuple(statics.items()), tuple(traced))

    return read, options + sorted(rule.structural)
