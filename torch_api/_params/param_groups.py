"""Check the keys and values of param groups, and read the static part of the update from a group."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import numpy as np
import torch

from bridge._compiler.spec import TransformSpec
from bridge._names import did_you_mean_or_list
from bridge._warnings import stack_level
from torch_api._rules.optimizer_spec import OptimizerSpec
from torch_api._rules.types import MutableParamGroup, ParamGroup
from torch_api._rules.validators import Check, as_tuple, is_number, is_one_number, is_scalar_array, is_sequence, tuple_length

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_Group = TypeVar("_Group")

# The key to which a group's own lr_scale moves, because schedulers of timm and others multiply the lr by group["lr_scale"] too. The value
# is None if the lr_scale has no effect on the update.
INITIAL_LR_SCALE = "initial_lr_scale"
FLAGS = frozenset({"trainable", "label", "mask", "lr_scale", "wd_scale", INITIAL_LR_SCALE})
# Options of torch.optim that choose torch's implementation. They are ignored, but kept so that checkpoints have the same keys.
TORCH_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Keys that torch.optim.lr_scheduler and swa_utils write, and Lightning's monitor (`name`) and schedule-free optimizers (`train_mode`).
_SCHEDULER_KEYS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "name", "train_mode"})
TRAINABLE_PARAMS = "trainable_params"  # one bool for each parameter of the group; set by set_trainable
_PARAMS_KEYS = frozenset({"params", "param_names", TRAINABLE_PARAMS})

# Names of a key whose misspellings are recognized.
_SPELLINGS = {"lr": ("lr", "learning_rate")}
# Keys that users expect to have an effect. They are errors if the optax transformation has no such hyperparameter.
_EXPECTED_HYPERPARAMS = frozenset({"weight_decay", "momentum", "nesterov", "betas", "b1", "b2", "eps"})
_BETA_NAMES = frozenset({"b1", "beta1", "beta"})  # hyperparameters that `betas` may set

# Group keys that must not be negative, with their names in torch's errors.
_NON_NEGATIVE = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "momentum": "momentum value",
    "weight_decay": "weight_decay value",
    "lr_scale": "lr_scale",
    INITIAL_LR_SCALE: INITIAL_LR_SCALE,
    "wd_scale": "wd_scale",
}


def check_keywords(cls_name: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown constructor argument."""
    known = set(known)
    for name in arguments:
        if name not in known:
            raise TypeError(f"{cls_name}: unknown argument {name!r}. {did_you_mean_or_list(name, known)}")


def check_keys(cls_name: str, group: ParamGroup, optimizer_spec: OptimizerSpec, allowed: Iterable[str] = ()) -> None:
    """Raise for a group key that is probably a misspelling. Other unknown keys belong to the user, as in torch.optim."""
    hyperparams = set(optimizer_spec.hyperparams)
    known = FLAGS | TORCH_OPTIONS | _SCHEDULER_KEYS | _PARAMS_KEYS | {"lr"} | hyperparams
    for key in group.keys() - known - set(allowed):
        if not isinstance(key, str):
            continue
        meant = _misspelled(key, known)
        if meant:
            raise ValueError(
                f"{cls_name}: unknown key {key!r} in a param group. Did you mean {' or '.join(map(repr, meant))}? "
                "Your own keys are kept and ignored if their names do not resemble known ones."
            )
        if optimizer_spec.is_optax and key in _EXPECTED_HYPERPARAMS and not (key == "betas" and _BETA_NAMES & hyperparams):
            listed = ", ".join(map(repr, sorted(hyperparams))) or "none"
            raise ValueError(
                f"{cls_name}: {key!r} is in a param group, but this transformation does not read {key!r} from the groups, so it would have "
                f"no effect. It reads: {listed}."
            )


def _misspelled(key: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that the key probably means: with the same letters, or one different (two in a long hyperparameter)."""
    meant = []
    plain = _letters(key)
    for name in sorted(set(known) - _PARAMS_KEYS - {"name", INITIAL_LR_SCALE}):
        for spelled in _SPELLINGS.get(name, (name,)):
            letters = _letters(spelled)
            wrong = 0 if len(spelled) < 4 else 2 if len(spelled) >= 12 and name not in _SCHEDULER_KEYS else 1
            alike = len(spelled) >= 6 or key[:1].casefold() == spelled[:1]  # `task` is no `mask`
            if plain == letters or (alike and abs(len(plain) - len(letters)) <= wrong and _edits(plain, letters) <= wrong):
                meant.append(name)
                break
    return meant


def _letters(key: str) -> str:
    return key.casefold().replace("_", "").replace("-", "").replace(" ", "")


def _edits(a: str, b: str) -> int:
    """Return the edit distance: how many letters to insert, delete, replace or swap with the next one to turn `a` into `b`."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a):
        row = [i + 1]
        for j, y in enumerate(b):
            best = min(rows[i][j + 1] + 1, row[j] + 1, rows[i][j] + (x != y))
            if i and j and (x, a[i - 1]) == (b[j - 1], y):
                best = min(best, rows[i - 1][j - 1] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def check_group(cls_name: str, group: ParamGroup, optimizer_spec: OptimizerSpec, allowed: Iterable[str] = ()) -> None:
    """Check a group that is passed to a constructor or added: as `check_types`, and numbers must be in range."""
    _check_numbers(cls_name, group, optimizer_spec, allowed)
    _check_ranges(group, optimizer_spec.checks)
    for key in _keys_without_check(group, optimizer_spec):
        if not group[key] >= 0:
            raise ValueError(f"Invalid {_NON_NEGATIVE[key]}: {group[key]}")
    for index, beta in enumerate(group["betas"] if "betas" in optimizer_spec.hyperparams and not optimizer_spec.checks else ()):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    _check_flags(cls_name, group, optimizer_spec)


def check_types(cls_name: str, group: ParamGroup, optimizer_spec: OptimizerSpec, allowed: Iterable[str] = ()) -> None:
    """Raise for a misspelled key that is not `allowed`, or a value of a type that the update cannot use.

    Numbers may be out of range. As in torch.optim, a step uses what a schedule has written, and such a group can be saved and loaded.
    """
    _check_numbers(cls_name, group, optimizer_spec, allowed)
    _check_ranges(group, [check for check in optimizer_spec.checks if check.at_every_step])
    _check_flags(cls_name, group, optimizer_spec)


def _check_ranges(group: ParamGroup, checks: Iterable[Check]) -> None:
    for check in checks:
        if not check.holds(group):
            raise check.error(check.text.format(**group))


def _check_numbers(cls_name: str, group: ParamGroup, optimizer_spec: OptimizerSpec, allowed: Iterable[str]) -> None:
    check_keys(cls_name, group, optimizer_spec, allowed)
    for key, default in optimizer_spec.hyperparams.items():
        if not optimizer_spec.is_optax or (key in optimizer_spec.traceable_hyperparams and group[key] is not None):
            _check_type(cls_name, key, group[key], default, key in optimizer_spec.static_hyperparams)
    for key in _keys_without_check(group, optimizer_spec):
        _check_type(cls_name, key, group[key], 0.0)


def _keys_without_check(group: ParamGroup, optimizer_spec: OptimizerSpec) -> list[str]:
    """Return the non-negative keys of the group that `optimizer_spec.checks` does not cover."""
    checked = optimizer_spec.hyperparams if optimizer_spec.checks else ()
    known = [key for key in _NON_NEGATIVE if key in group and key not in checked]
    return [key for key in known if not (group[key] is None and (optimizer_spec.is_optax or key == INITIAL_LR_SCALE))]


def _check_flags(cls_name: str, group: ParamGroup, optimizer_spec: OptimizerSpec) -> None:
    if "wd_scale" in group and "weight_decay" not in optimizer_spec.hyperparams:
        raise ValueError(
            f"{cls_name}: wd_scale is {group['wd_scale']}, but this transformation has no weight_decay in the groups to scale."
        )
    if group.get("differentiable"):
        raise ValueError(f"{cls_name}: differentiable=True is not supported: the update runs outside torch's autograd graph.")
    _check_type(cls_name, "trainable", group.get("trainable", True), True)


def check_parameter_fits(optimizer_spec: OptimizerSpec, name: str, p: torch.Tensor) -> None:
    """Raise for a trained parameter that the equation does not support."""
    for check in optimizer_spec.leaf_checks:
        if not check.holds(p):
            raise check.error(check.text.format(size=p.size(), name=name))


def _check_type(cls_name: str, key: str, value: object, default: object, static: bool = False) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise TypeError(f"{cls_name}: {key!r} is {value!r}; expected True or False.")
    elif isinstance(default, tuple | list):
        fits = is_sequence(value) and len(value) == len(default) and all(map(_fits_default, value, default))
        if not fits:
            raise ValueError(f"{cls_name}: {key} is {value!r}; expected {len(default)} numbers.")
    elif static and default is None:
        if not isinstance(value, str | None):
            raise TypeError(f"{cls_name}: {key!r} is {value!r}; expected a name or None.")
    elif static and not (isinstance(value, int) and not isinstance(value, bool)):
        raise TypeError(f"{cls_name}: {key!r} is {value!r}; expected an integer.")
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor {key} must be 1-element")
    elif not (is_number(value) or is_scalar_array(value)):
        if key == "lr" and (callable(value) or isinstance(value, torch.optim.lr_scheduler.LRScheduler)):
            raise TypeError(
                f"{cls_name}: lr is a schedule ({_name_of(value)}); expected a number. Give a number, and a scheduler of "
                "torch.optim.lr_scheduler to the optimizer (LambdaLR takes a function of the step), or use a function of optax: "
                "OptaxOptimizer(params, optax.adamw, lr=schedule)."
            )
        raise TypeError(f"{cls_name}: {key!r} is {value!r}; expected a number.")


def _name_of(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _fits_default(value: object, default: object) -> bool:
    return is_one_number(value) or value is default is None


def convert_scalar_arrays(group: MutableParamGroup, optimizer_spec: OptimizerSpec) -> None:
    """Replace jax and NumPy scalars in the group by Python numbers, which every checkpoint can hold."""
    for key in optimizer_spec.hyperparams.keys() | {"lr"}:
        value = group.get(key)
        if is_scalar_array(value) or isinstance(value, np.generic):
            group[key] = value.item()


def convert_sequences(group: MutableParamGroup, optimizer_spec: OptimizerSpec) -> None:
    """Replace sequences in the group by tuples, for hyperparameters whose default is a tuple."""
    for key, default in optimizer_spec.hyperparams.items():
        if key in group and isinstance(default, tuple | list):
            group[key] = as_tuple(group[key])


def group_reader(optimizer_spec: OptimizerSpec, traceable: Iterable[str]) -> Callable[[ParamGroup], TransformSpec]:
    """Return a function that reads the `TransformSpec` of a group.

    Args:
      optimizer_spec: the spec of the group.
      traceable: for an optax transformation, the hyperparameters to trace. The others are static.
    """
    if optimizer_spec.is_optax:
        return lambda group: _optax_transform_spec(optimizer_spec, frozenset(traceable), group)
    options = [name for name, default in optimizer_spec.hyperparams.items() if isinstance(default, bool)]
    numeric = [name for name in optimizer_spec.hyperparams if name not in options and name not in optimizer_spec.static_hyperparams]

    def read(group: ParamGroup) -> TransformSpec:
        absent = [name for name in numeric if name in optimizer_spec.optional_hyperparams and float(group[name]) == 0.0]
        statics = {name: bool(group[name]) for name in options} | dict.fromkeys(absent)
        statics |= {name: hashable_value(group[name]) for name in sorted(optimizer_spec.static_hyperparams)}
        traced = ((name, tuple_length(group[name])) for name in numeric if name not in absent)
        return TransformSpec(
            optimizer_spec.factory,
            tuple(statics.items()),
            tuple(traced),
            needs_shape=optimizer_spec.needs_shape,
            takes_dtype=optimizer_spec.takes_dtype,
        )

    return read


def _optax_transform_spec(optimizer_spec: OptimizerSpec, traceable: frozenset[str], group: ParamGroup) -> TransformSpec:
    traced = {name: tuple_length(group[name]) for name in optimizer_spec.hyperparams if name in traceable and group[name] is not None}
    rest = {name: group[name] for name in optimizer_spec.hyperparams if name not in traced}
    statics = tuple((name, hashable_value(value)) for name, value in rest.items())
    return TransformSpec(optimizer_spec.factory, statics, tuple(traced.items()), is_optax=True)


def hashable_value(value: object) -> object:
    """Return the value of a static hyperparameter in a form that can be hashed and compared."""
    return tuple(x.tolist() if isinstance(x, torch.Tensor) else x for x in as_tuple(value)) if is_sequence(value) else value


def resolve_lr_scale(group: MutableParamGroup, default_lr: SupportsFloat, is_default_lr_explicit: bool) -> str | None:
    """Decide what the `lr_scale` of a new group means, and return the text of a warning if that is not clear.

    In a group with the default lr it scales the lr. It moves to `INITIAL_LR_SCALE` and reads 1 from then on, so that it acts once under
    any scheduler. In a group with another lr it has no effect, as in torch.optim, because code of the BEiT kind has scaled that lr already.

    Args:
      group: the group; changed in place.
      default_lr: the optimizer's lr.
      is_default_lr_explicit: whether the user gave the default lr. If so, a group whose lr is not the scaled default is not clear.
    """
    if "lr_scale" not in group:
        return None
    if INITIAL_LR_SCALE in group:  # a copy of a group in which this was decided
        if group[INITIAL_LR_SCALE] is not None:
            group[INITIAL_LR_SCALE], group["lr_scale"] = lr_scale(group), 1.0
        return None
    scale, lr = group["lr_scale"], float(group.get("lr", default_lr))
    if scale == 1 or lr == float(default_lr):
        group[INITIAL_LR_SCALE], group["lr_scale"] = scale, 1.0
        return None
    group[INITIAL_LR_SCALE] = None
    if not is_default_lr_explicit or math.isclose(lr, scale * float(default_lr), rel_tol=1e-6):
        return None
    return (
        f"a param group has lr {lr:g} and lr_scale {scale:g}, beside a default lr of {float(default_lr):g}. As in torch.optim, its lr is "
        "used as it is, and its lr_scale has no effect but on schedulers that read it. To scale the default lr, leave lr out of the group; "
        "to scale any lr, give lr_scale=... to the optimizer."
    )


def lr_scale(group: ParamGroup) -> float:
    """Return the factor of the group's lr: its initial scale times what was written to `lr_scale` since; 1 if it has no effect."""
    taken = group.get(INITIAL_LR_SCALE, 1.0)
    return 1.0 if taken is None else group.get("lr_scale", 1.0) * taken


def restore_lr_scale(group: MutableParamGroup) -> None:
    """Write the initial scale back to `lr_scale`, where torch's optimizers have it. The group is a copy that is to be saved."""
    if "lr_scale" in group and group.setdefault(INITIAL_LR_SCALE, 1.0) is not None:
        group["lr_scale"] = lr_scale(group)


def list_params(cls_name: str, params: ParamsT) -> ParamsT:
    """Return the parameters as a list. For an empty one raise torch's error with a possible cause. Warn of a set, as torch 2.15 does."""
    if isinstance(params, torch.Tensor):
        return params  # torch's own TypeError
    if isinstance(params, set):
        warnings.warn(
            f"{cls_name}: optimizer parameters need to be organized in ordered collections, but params is a set, whose order changes "
            "between runs. Give a list.",
            FutureWarning,
            stacklevel=stack_level(),
        )
    listed = _list_entries(f"{cls_name}: params", params)
    if not listed:
        raise ValueError(f"{cls_name}: optimizer got an empty parameter list. Was a generator such as model.parameters() used up before?")
    return listed


def _list_entries(title: str, params: Any) -> list[Any]:
    """Return the parameters as a list.

    Raises:
      TypeError: they are something that users confuse with parameters: a module, a dict, a function. torch refuses all else.
    """
    if isinstance(params, Mapping):
        if "params" in params:
            raise TypeError(f"{title} is a param group; expected a list of groups: [{{'params': ...}}].")
        raise TypeError(
            f"{title} is a dict by name ({type(params).__name__}); expected the parameters themselves: model.named_parameters(), or "
            "items() of a dict of parameters. (The tensors of model.state_dict() are detached from the parameters and get no gradients.)"
        )
    try:
        listed: list[Any] | None = list(iter(params))
    except TypeError:
        listed = None
    if listed is None or (isinstance(params, torch.nn.Module | str) and not all(isinstance(entry, torch.Tensor) for entry in listed)):
        call = f"{params.__name__}()" if inspect.ismethod(params) else "model.named_parameters()"
        raise TypeError(f"{title} is {_described(params)}; expected an iterable of tensors, such as {call}.")
    for position, entry in enumerate(listed):
        tensor = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if isinstance(tensor, torch.nn.Module | Iterator | list) or inspect.isroutine(tensor):
            raise TypeError(
                f"{title} has {_described(tensor)} at position {position}; expected tensors. Join the parameters of several modules by "
                "[*a.parameters(), *b.parameters()], or give a list of dict groups."
            )
    return listed


def _described(params: object) -> str:
    if isinstance(params, torch.nn.Module):
        return f"a module ({type(params).__name__})"
    if inspect.isroutine(params):
        return f"the function {params.__name__}, which was not called"
    return f"an iterator ({type(params).__name__})" if isinstance(params, Iterator) else repr(params)


def list_unique_params(cls_name: str, group: _Group) -> _Group:
    """Replace `params` of the group by a list, and return the group.

    Raises:
      ValueError: a parameter is given twice (torch only warns), or the group has no `params`.
    """
    if not isinstance(group, dict) or isinstance(group.get("params"), torch.Tensor | set):
        return group  # torch's own handling
    if "params" not in group:
        raise ValueError(f"{cls_name}: a param group has no 'params'; it has {sorted(group)}.")
    group["params"] = _list_entries(f"{cls_name}: 'params' of a param group", group["params"])
    tensors = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
    first: dict[int, int] = {}
    for position, p in enumerate(tensors):
        if first.setdefault(id(p), position) != position:
            raise ValueError(
                f"{cls_name}: the parameter at position {position} is the one at {first[id(p)]} again; give each parameter once."
            )
    return group


def param_names(group: MutableParamGroup, start: int) -> list[str]:
    """Return the names of the group's parameters, or "param<position>" if it does not have a name for each."""
    return group["param_names"] if has_param_names(group) else [f"param{start + i}" for i in range(len(group["params"]))]


def has_param_names(group: ParamGroup) -> bool:
    """Return whether the group has a name for each parameter. It may have fewer if the user appended parameters."""
    return "param_names" in group and len(group["param_names"]) == len(group["params"])


def check_initialized(cls_name: str, name: str, p: torch.Tensor) -> None:
    """Raise for a parameter of a lazy module that has no shape yet."""
    if isinstance(p, torch.nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{cls_name}: parameter {name!r} is not initialized yet (a lazy module). Run one forward pass before building the optimizer."
        )


def check_parameter(cls_name: str, name: str, p: torch.Tensor) -> None:
    """Raise for a trained parameter that cannot be updated in place. Frozen parameters are not checked."""
    check_initialized(cls_name, name, p)
    title = f"{cls_name}: parameter {name!r}"
    if p.is_meta or p.layout is not torch.strided:
        what = (
            "is on the meta device and has no memory; materialize the model first"
            if p.is_meta
            else f"has layout {p.layout}; expected torch.strided"
        )
        raise ValueError(f"{title} of shape {tuple(p.shape)} {what}.")
    if not (p.is_floating_point() or p.is_complex()):
        raise ValueError(f"{title} has dtype {p.dtype} and cannot be trained; expected a floating or complex type, or a frozen parameter.")
    if p.is_conj() or p.is_neg():
        raise ValueError(f"{title} is a lazy conjugate or negative; pass param.resolve_conj().resolve_neg().")
