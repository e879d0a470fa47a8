"""Make an `OptimizerSpec` of a transformation that a user passes: an optax instance, a factory with hyperparameters, an `OptimizerDef`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from bridge._compiler.spec import ById
from bridge._flax_optim.optimizer import OptimizerDef
from bridge._ir.types import PyTree
from bridge._names import did_you_mean_or_list, rename_learning_rate
from bridge._process import default_promotion
from bridge._transforms.lookahead import over_plain_params

from . import betas, torch_rules
from .optimizer_spec import OptimizerSpec
from .types import Hyperparams, MutableParamGroup
from .validators import as_tuple, is_number, is_sequence

_FLOAT_HYPERPARAMS = ("learning_rate", "lr", "weight_decay")  # traced even if the user gives an integer


@dataclass(frozen=True)
class _Factory:
    """A hashable factory. Equal factories make equal `TransformSpec`s, which share executables.

    tx: the transformation or function. fixed: arguments that stay outside the groups.
    renames_lr: its argument for `lr` is `learning_rate`. is_lookahead: it is an `optax.lookahead`, whose parameters are pairs of fast and
      slow ones.
    """

    tx: ById
    fixed: tuple[tuple[str, ById], ...] = ()
    renames_lr: bool = False
    is_lookahead: bool = False

    @property
    def __name__(self) -> str:
        """The name of the function; of a ready transformation, the name of the function that made it."""
        tx = self.tx.value
        if _is_transformation(tx) and not isinstance(tx, OptimizerDef):
            return getattr(tx.update, "__qualname__", type(tx).__name__).partition(".")[0]
        return getattr(tx, "__name__", type(tx).__name__)

    def __call__(self, **hyperparams: object) -> optax.GradientTransformation:
        transformation = self._transformation(hyperparams)
        return over_plain_params(transformation) if self.is_lookahead else transformation

    def _transformation(self, hyperparams: dict[str, object]) -> Any:
        tx = self.tx.value
        if not hyperparams and not self.fixed and _is_transformation(tx):
            return tx
        if self.renames_lr and "lr" in hyperparams:
            hyperparams["learning_rate"] = hyperparams.pop("lr")
        if isinstance(tx, OptimizerDef):
            return tx.with_hyper_params(**hyperparams)
        return tx(**{name: same.value for name, same in self.fixed}, **hyperparams)


def as_optimizer_spec(cls_name: str, tx: object, hyperparams: Hyperparams) -> tuple[OptimizerSpec, MutableParamGroup]:
    """Return the `OptimizerSpec` of a transformation and the initial hyperparameters of its param groups.

    Args:
      cls_name: class name for errors.
      tx: an `OptimizerSpec`, an optax transformation (anything with `init` and `update`), an `OptimizerDef`, or a function that makes one
        from keyword arguments.
      hyperparams: keyword arguments for a factory; `lr` stands for `learning_rate`. Numbers, bools and tuples of numbers go into the
        groups. Other values (schedules, masks, dtypes, keys) are fixed.

    Raises:
      TypeError: tx is of another kind, or an argument is unknown or missing.
    """
    if isinstance(tx, OptimizerSpec):
        return tx, {**tx.hyperparams, **hyperparams}
    if isinstance(tx, OptimizerDef):
        return _spec_of_definition(cls_name, tx, hyperparams)
    if _is_transformation(tx):
        hyperparams = rename_learning_rate(cls_name, hyperparams)
        _check_names(cls_name, hyperparams, {"lr"}, "a ready transformation has its hyperparams inside; `lr` multiplies its update")
        return _make_spec(_Factory(ById(tx)), {}, frozenset(), is_instance=True), {"lr": 1.0, **hyperparams}
    _refuse_torch_object(cls_name, tx)
    if callable(tx):
        return _spec_of_function(cls_name, tx, hyperparams)
    raise TypeError(
        f"{cls_name}: tx is {tx!r}; expected an optax transformation, a function that makes one (optax.adamw), or an OptimizerDef."
    )


def _refuse_torch_object(cls_name: str, tx: object) -> None:
    """Raise for an optimizer, an optimizer class or a module in place of a transformation. All of them may be callable."""
    given = tx.func if isinstance(tx, functools.partial) else tx
    cls = given if isinstance(given, type) else type(given)
    if not issubclass(cls, torch.optim.Optimizer | torch.nn.Module):
        return
    kind = "the class" if given is cls else "an object of the class"
    package = next((name for name in ("torch.optim", "torch.nn", "torch_api") if cls.__module__.startswith(f"{name}.")), cls.__module__)
    hint = ""
    if issubclass(cls, torch.optim.Optimizer):
        name = cls.__name__.removeprefix("Masked")
        function = name.lower() if hasattr(optax, name.lower()) else "adamw"
        is_known = name in torch_rules.SPECS_BY_CLASS or package == "torch_api"
        masked = f", and torch_api.Masked{name}(params, ...) is the optimizer itself, with masks" if is_known else ""
        hint = f" optax.{function} is such a function{masked}."
    raise TypeError(
        f"{cls_name}: tx is {kind} {package}.{cls.__name__}; expected an optax transformation, or a function that makes one.{hint}"
    )


def _is_lookahead(transformation: optax.GradientTransformation) -> bool:
    """Return whether the transformation is an `optax.lookahead`: its update reads `params.fast`."""

    def update(params: PyTree) -> PyTree:
        return transformation.update(params, transformation.init(optax.LookaheadParams.init_synced(params)), params)

    try:
        with default_promotion():
            jax.eval_shape(update, {"x": jax.ShapeDtypeStruct((2, 2), np.float32)})
    except AttributeError as error:
        return "'fast'" in str(error)
    except Exception:  # noqa: BLE001 - such as a mask for other parameters; the trace with the real ones raises errors
        return False
    return False


def _is_transformation(tx: object) -> bool:
    return not isinstance(tx, type) and callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))


def _spec_of_definition(cls_name: str, tx: OptimizerDef, given: Hyperparams) -> tuple[OptimizerSpec, MutableParamGroup]:
    values = {_group_name(name): value for name, value in tx.hyper_param_values().items()}
    given = betas.expand_betas(cls_name, given, betas.hyperparams_of_betas(values))
    given = {name: _to_python_value(value, values.get(name)) for name, value in rename_learning_rate(cls_name, given).items()}
    _check_names(cls_name, given, values.keys() | {"lr"}, f"the hyper_params of {type(tx).__name__}")
    plain = {name: value for name, value in (values | given).items() if _fits_param_group(value)}
    traceable = frozenset(name for name, value in plain.items() if _is_float(value) or (name in _FLOAT_HYPERPARAMS and is_number(value)))
    own = {name: plain[name] for name in plain if name in values}
    return _make_spec(_Factory(ById(tx), renames_lr="learning_rate" in tx.hyper_param_values()), own, traceable), {"lr": 1.0} | plain


def _spec_of_function(cls_name: str, function: Callable[..., object], given: Hyperparams) -> tuple[OptimizerSpec, MutableParamGroup]:
    parameters = inspect.signature(function).parameters
    title = getattr(function, "__name__", type(function).__name__)
    given = {name: _to_python_value(value, getattr(parameters.get(name), "default", None)) for name, value in given.items()}
    given = betas.expand_betas(cls_name, given, betas.hyperparams_of_betas(parameters))
    if "learning_rate" in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given = rename_learning_rate(cls_name, given)
    if "learning_rate" in parameters and "lr" in given:
        given["learning_rate"] = given.pop("lr")
    multiplier = {"lr": given.pop("lr")} if "lr" in given and "lr" not in parameters else {}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _check_names(cls_name, given, parameters.keys() | {"lr"}, f"the arguments of {title}")
    named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
    if missing:
        schedule = " A schedule is no transformation: give it as lr=... beside a function of optax." if missing == ["count"] else ""
        raise TypeError(
            f"{cls_name}: {title} needs {', '.join(map(repr, missing))}; give {'it' if len(missing) == 1 else 'them'} by keyword.{schedule}"
        )
    values = {name: p.default for name, p in named.items()} | given
    plain = {n: v for n, v in values.items() if _fits_param_group(v) and (v is not None or n in given or _takes_number(named.get(n)))}
    fixed = tuple((name, ById(value)) for name, value in given.items() if name not in plain)
    meant_float = lambda name: name in _FLOAT_HYPERPARAMS or _defaults_to_float(named.get(name))  # noqa: E731
    numeric = lambda value: is_number(value) or _is_tuple(value)  # noqa: E731
    traceable = frozenset(_group_name(n) for n, v in plain.items() if _is_float(v) or (numeric(v) and meant_float(n)))
    own = {_group_name(name): value for name, value in plain.items()}
    return _make_spec(_Factory(ById(function), fixed, renames_lr="learning_rate" in values), own, traceable), {"lr": 1.0} | own | multiplier


def _make_spec(factory: _Factory, values: Hyperparams, traceable: frozenset[str], is_instance: bool = False) -> OptimizerSpec:
    plain = {name: _without_tensors(value) for name, value in values.items()}
    transformation = factory(**plain)
    if _is_transformation(transformation) and _is_lookahead(transformation):
        factory = replace(factory, is_lookahead=True)
        transformation = factory(**plain)
    if isinstance(transformation, optax.GradientTransformation):
        takes_extra = isinstance(transformation, optax.GradientTransformationExtraArgs)
    elif _is_transformation(transformation):
        takes_extra = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(transformation.update).parameters.values())
    else:
        raise TypeError(f"tx gave {transformation!r}; expected an optax transformation, with init and update.")
    return OptimizerSpec(
        factory,
        declared_hyperparams=values,
        traceable_hyperparams=traceable,
        is_optax=True,
        is_instance=is_instance,
        takes_extra_args=takes_extra,
    )


def is_lr_explicit(optimizer_class: type, tx: object, hyperparams: Hyperparams) -> bool:
    """Return whether the user gave the initial lr of the groups. A class's default and the 1.0 of a ready transformation do not count.

    Args:
      optimizer_class: the optimizer's class. A class with a default for `lr` passes the default on in `hyperparams`.
      tx, hyperparams: the arguments of `as_optimizer_spec`.
    """
    lr = hyperparams.get("lr", hyperparams.get("learning_rate"))
    if lr is None:
        return isinstance(tx, OptimizerDef)
    constructors = (vars(cls).get("__init__") for cls in optimizer_class.__mro__)
    arguments = (inspect.signature(function).parameters.get("lr") for function in constructors if inspect.isfunction(function))
    return not any(argument is not None and argument.default is lr for argument in arguments)


def lr_scales_update(optimizer_spec: OptimizerSpec) -> bool:
    """Return whether the groups' `lr` multiplies the update because the transformation has no hyperparameter `lr`."""
    return optimizer_spec.is_optax and "lr" not in optimizer_spec.hyperparams


def _group_name(name: str) -> str:
    return "lr" if name == "learning_rate" else name


def _check_names(cls_name: str, given: Collection[str], known: Collection[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{cls_name}: unknown argument {name!r} ({what}). {did_you_mean_or_list(name, known)}")


def _to_python_value(value: object, default: object) -> object:
    """Return an array scalar as a float, and a sequence of numbers as a tuple. An array becomes a tuple only if the default is one."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic | torch.Tensor)
    if is_sequence(value) and (_is_tuple(default) or not is_array):
        elements = as_tuple(value)
        return elements if all(map(is_number, elements)) else value
    if isinstance(value, jax.Array | np.ndarray | np.generic) and value.size == 1 and jnp.issubdtype(value.dtype, jnp.floating):
        return float(value)
    return value


def _without_tensors(value: object) -> object:
    """Replace 0-d tensors by Python numbers, also in a tuple."""
    if isinstance(value, tuple | list):
        return type(value)(map(_without_tensors, value))
    return value.item() if isinstance(value, torch.Tensor) else value


def _fits_param_group(value: object) -> bool:
    """Return whether a param group may hold the value: a checkpoint can hold it without code."""
    if isinstance(value, tuple | list):
        return bool(value) and all(map(is_number, value))
    return value is None or isinstance(value, bool | str) or is_number(value)


def _is_float(value: object) -> bool:
    return (
        isinstance(value, float)
        or (isinstance(value, torch.Tensor) and value.is_floating_point())
        or (isinstance(value, tuple | list) and all(isinstance(v, float) for v in value) and bool(value))
    )


def _takes_number(parameter: inspect.Parameter | None) -> bool:
    """Return whether the parameter is annotated as a number, so that None means a number that is not used."""
    return parameter is not None and "float" in str(parameter.annotation) and "Callable" not in str(parameter.annotation)


def _defaults_to_float(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and _is_float(parameter.default)


def _is_tuple(value: object) -> bool:
    """Return whether a value or default is a tuple of numbers."""
    return isinstance(value, tuple | list) and bool(value) and all(map(is_number, value))
