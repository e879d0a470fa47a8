"""Match the groups of a saved state_dict to those of an optimizer: by parameter name if both sides have names, else by position."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import torch

from bridge._names import did_you_mean, without_wrappers
from torch_api._rules import torch_rules
from torch_api._rules.types import Hyperparams, MutableParamGroup, ParamGroup, ParamState, StateDict

from .param_groups import TRAINABLE_PARAMS, restore_lr_scale
from .record import ParamRecord


def copy_and_check(state_dict: StateDict) -> tuple[dict[Hashable, ParamState], list[MutableParamGroup]]:
    """Return copies of `state` and `param_groups`.

    Raises:
      ValueError: the state_dict is damaged. The text says where.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"load_state_dict: there is no {key!r} in it; expected 'state' and 'param_groups', as in an optimizer's state_dict(), got "
                f"{_describe_other_dict(state_dict)}."
            )
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        raise ValueError(f"load_state_dict: 'state' is {state!r}; expected a dict from parameter to the dict of its state. It is damaged.")
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError(f"load_state_dict: 'param_groups' is {groups!r}; expected a list of dicts. It is damaged.")
    for position, group in enumerate(groups):
        title = f"load_state_dict: group {position} of the loaded state dict"
        for key in ("params", "param_names", TRAINABLE_PARAMS):
            column = group.get(key, () if key != "params" else None)
            if not isinstance(column, Sequence) or isinstance(column, str):
                raise ValueError(f"{title} has {column!r} for {key!r}; expected a list. It is damaged.")
        if len(group.get("param_names", group["params"])) != len(group["params"]):
            raise ValueError(f"{title} has {len(group['params'])} parameters, but {len(group['param_names'])} param_names. It is damaged.")
    indices = [index for group in groups for index in group["params"]]
    if len(set(indices)) != len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ValueError(f"load_state_dict: the loaded state dict has the parameter {twice!r} in two places of its groups. It is damaged.")
    return dict(state), [dict(group) for group in groups]


def check_is_dict(state_dict: object) -> None:
    """Raise TypeError for the argument of `load_state_dict` if it is no dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_state_dict: got a {type(state_dict).__name__}; expected a dict, as an optimizer's state_dict() gives it. "
            "torch.load(path) reads a file, and torch_api.load_optax_state(optimizer, state) takes a state of optax."
        )


def _describe_other_dict(state_dict: StateDict) -> str:
    """Return what a dict is that is no optimizer's state_dict."""
    keys = sorted(map(str, state_dict))
    listed = f"{keys[:8]}{' and more' if len(keys) > 8 else ''}"
    if keys and all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        return f"tensors by name, {listed}: a state_dict of a model, which model.load_state_dict() takes"
    inside = _index_of_optimizer(state_dict)
    return f"{listed}; give the entry {inside} of it" if inside else listed


def _index_of_optimizer(checkpoint: StateDict) -> str:
    """Return how to index the first optimizer's state_dict in a checkpoint; '' if there is none."""
    for key, value in checkpoint.items():
        is_list = isinstance(value, list) and bool(value)  # as in a checkpoint of Lightning
        part = value[0] if is_list else value
        if isinstance(part, Mapping) and "param_groups" in part:
            return f"[{key!r}]{'[0]' if is_list else ''}"
    return ""


def check_optimizer(cls_name: str, own: ParamGroup, saved: ParamGroup, hyperparams: Hyperparams) -> None:
    """Raise if a group was saved by an optimizer with other hyperparameters.

    A key that is missing is no error alone, because older versions of torch have saved fewer keys.

    Args:
      own: the optimizer's group.
      saved: the saved group.
      hyperparams: the hyperparameters of the optimizer that loads it, with their defaults.
    """
    foreign = sorted((saved.keys() & _hyperparams_of_torch()) - hyperparams.keys() - own.keys())
    missing = [name for name, default in hyperparams.items() if name not in saved and not isinstance(default, bool)]
    if foreign and missing:
        known = {name: spec.hyperparams.keys() for name, spec in torch_rules.SPECS_BY_CLASS.items()}
        likely = max((name for name, keys in known.items() if keys <= saved.keys()), key=lambda name: len(known[name]), default=None)
        likely = "AdamW" if likely == "Adam" and saved["decoupled_weight_decay"] else likely
        by = "another optimizer" if likely is None else f"an optimizer of the kind {likely}"
        raise ValueError(
            f"load_state_dict: the loaded state dict was saved by {by}: its groups have {', '.join(map(repr, foreign))}, and lack "
            f"{', '.join(map(repr, missing))} of this {cls_name}. Load it into an optimizer of its own kind. To go on with another one, "
            "load the model only."
        )


@functools.cache
def _hyperparams_of_torch() -> frozenset[str]:
    return frozenset(name for spec in torch_rules.SPECS_BY_CLASS.values() for name in spec.hyperparams)


def align_groups(
    own: Sequence[ParamGroup], saved: list[MutableParamGroup], leaves: Sequence[ParamRecord], trained: Collection[int]
) -> list[MutableParamGroup]:
    """Return the saved groups in the order of the optimizer's groups, with `params` in the order of its parameters.

    Args:
      own: the optimizer's groups.
      saved: the groups of the state_dict.
      leaves: the records of the optimizer's parameters in the order of its groups.
      trained: the ids of the trained records. The others may be missing in `saved`; then they have no state.
    """
    if _is_named(own) and _is_named(saved):
        saved = _rename_params(own, saved)
        saved = _add_frozen_by_name(own, saved, leaves, trained) or _order_groups(own, saved)
    else:
        saved = _order_groups(own, saved)
        saved = _add_frozen_by_position(own, saved, leaves, trained) or saved
    if len(own) != len(saved):
        raise ValueError(
            f"load_state_dict: loaded state dict has a different number of parameter groups: {len(saved)}, expected {len(own)}."
        )
    if _is_named(own) and _is_named(saved):
        index = _by_name(saved, "params")
        names = _names(own)
        if len(set(names)) == len(names) and len(index) == sum(len(group["params"]) for group in saved):
            _check_same_names(names, index)
            columns = {"params": index}
            said = [group for group in saved if TRAINABLE_PARAMS in group]
            if said:  # groups that were added later may not have the key
                here = {name: leaf.trained for name, leaf in zip(names, leaves, strict=True)}
                columns[TRAINABLE_PARAMS] = here | _by_name(said, TRAINABLE_PARAMS)
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


# ------------------------------------------------------------------ names


def _is_named(groups: Sequence[ParamGroup]) -> bool:
    return all(len(group.get("param_names", ())) == len(group["params"]) for group in groups)


def _names(groups: Sequence[ParamGroup]) -> list[str]:
    return [name for group in groups for name in group["param_names"]]


def _by_name(groups: Sequence[ParamGroup], key: str) -> dict[str, object]:
    return {name: value for group in groups for name, value in zip(group["param_names"], group[key], strict=True)}


# Functions that may make the names of the two sides equal. The first that does most is used.
_NAME_FORMS: tuple[Callable[[Sequence[str]], list[str]], ...] = (list, without_wrappers)


def _rename_params(own: Sequence[ParamGroup], saved: list[MutableParamGroup]) -> list[MutableParamGroup]:
    """Return the saved groups with the optimizer's names for parameters whose names differ only by wrappers (torch.compile, DDP)."""
    mine, theirs = _names(own), _names(saved)
    names, most = theirs, 0
    for of_mine in _NAME_FORMS:
        for of_theirs in _NAME_FORMS:
            known, seen = dict(zip(of_mine(mine), mine, strict=True)), of_theirs(theirs)
            count = len(known.keys() & set(seen)) if len(known) == len(mine) and len(set(seen)) == len(seen) else 0
            if count > most:
                names, most = [known.get(name, given) for name, given in zip(seen, theirs, strict=True)], count
    rest = iter(names)
    return [group | {"param_names": [next(rest) for _ in group["params"]]} for group in saved]


def _check_same_names(own: list[str], saved: Collection[str]) -> None:
    known = set(own)
    missing = [name for name in own if name not in saved]
    extra = [name for name in saved if name not in known]
    if missing:
        hint = did_you_mean(missing[0], saved)
        raise ValueError(f"load_state_dict: the loaded state dict has no parameter {missing[0]!r} ({len(missing)} are missing). {hint}")
    if extra:
        raise ValueError(
            f"load_state_dict: the loaded state dict has a parameter {extra[0]!r} that this optimizer does not have ({len(extra)} in all)."
        )


def _order_groups(own: Sequence[ParamGroup], saved: list[MutableParamGroup]) -> list[MutableParamGroup]:
    """Return the saved groups in the optimizer's order, if both sides have the same sets of names, or else the same labels."""
    for key in (lambda group: sorted(group.get("param_names", ())), lambda group: repr(group.get("label"))):
        mine, theirs = list(map(key, own)), list(map(key, saved))
        if sorted(mine) == sorted(theirs) and all(mine):
            rest = list(zip(theirs, saved, strict=True))
            return [rest.pop(next(i for i, (name, _) in enumerate(rest) if name == wanted))[1] for wanted in mine]
    return saved


# ------------------------------------------------------------------ frozen parameters that were not saved


def _add_frozen_by_name(
    own: Sequence[ParamGroup], saved: Sequence[ParamGroup], leaves: Sequence[ParamRecord], trained: Collection[int]
) -> list[MutableParamGroup] | None:
    """Return the saved groups with the frozen parameters that they lack.

    Returns:
      None if no parameter is missing, a trained one is missing, or names do not say which group is which.
    """
    home = {name: group for group in saved for name in group["param_names"]}
    names = _names(own)
    missing = [leaf for name, leaf in zip(names, leaves, strict=True) if name not in home]
    if not missing or any(id(leaf) in trained for leaf in missing) or len(set(names)) < len(names) or not home.keys() <= set(names):
        return None
    found, used, rest = [], [], iter(leaves)
    for group in own:
        members = [next(rest) for _ in group["params"]]
        homes = {id(home[name]): home[name] for name in group["param_names"] if name in home}
        if len(homes) > 1:
            return None
        used += homes
        known = next(iter(homes.values()), None)
        place = {} if known is None else {name: i for i, name in enumerate(known["param_names"])}
        found.append(_complete_group(group, known, members, [place.get(name) for name in group["param_names"]]))
    return found if len(set(used)) == len(used) else None


def _add_frozen_by_position(
    own: Sequence[ParamGroup], saved: Sequence[ParamGroup], leaves: Sequence[ParamRecord], trained: Collection[int]
) -> list[MutableParamGroup] | None:
    """As `_add_frozen_by_name`, if a side has no names. The saved parameters must be the trained ones, in their order."""
    rest = iter(leaves)
    members = [[next(rest) for _ in group["params"]] for group in own]
    if len(own) == len(saved):
        homes: list[ParamGroup | None] = list(saved)
    else:
        some = [any(id(leaf) in trained for leaf in group) for group in members]
        if sum(some) != len(saved):
            return None
        given = iter(saved)
        homes = [next(given) if is_some else None for is_some in some]
    found = []
    for group, home, mine in zip(own, homes, members, strict=True):
        if home is not None and len(home["params"]) == len(mine):
            found.append(dict(home))
            continue
        present = [id(leaf) in trained for leaf in mine]
        if home is not None and sum(present) != len(home["params"]):
            return None
        count = iter(range(len(mine)))
        found.append(_complete_group(group, home, mine, [next(count) if is_present else None for is_present in present]))
    return found


def _complete_group(
    own: ParamGroup, saved: ParamGroup | None, members: Sequence[ParamRecord], places: Sequence[int | None]
) -> MutableParamGroup:
    """Return a saved group with all parameters of the optimizer's group.

    Args:
      own: the optimizer's group.
      saved: the saved group; None if there is none.
      members: the records of the optimizer's group.
      places: the position of each in the saved group; None if it was not saved.
    """
    if saved is None:
        group = dict(own)
        restore_lr_scale(group)
    else:
        group = dict(saved)
    pairs = list(zip(members, places, strict=True))
    columns: dict[str, list[object]] = {"params": [("not saved", id(leaf)) if at is None else group["params"][at] for leaf, at in pairs]}
    if TRAINABLE_PARAMS in group:
        column = group[TRAINABLE_PARAMS]
        columns[TRAINABLE_PARAMS] = [leaf.trained if at is None else column[at] for leaf, at in pairs]
    group.pop("param_names", None)
    return group | columns | ({"param_names": list(own["param_names"])} if "param_names" in own else {})
