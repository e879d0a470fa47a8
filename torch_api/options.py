"""The options of every optimizer apart from selectors and hyperparameters, with their checks."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch

from bridge._compiler import spec
from bridge._compiler.spec import StateField
from bridge._interop.dtypes import numpy_dtype
from bridge._transforms.selectors import Selector

from ._params.param_groups import check_keywords
from ._params.record import ParamRecord
from ._rules.types import Hyperparams
from ._rules.validators import is_number

Writeback: TypeAlias = Literal["inplace", "copy"]


class OptionArguments(TypedDict, total=False):
    """The keyword arguments of every optimizer apart from selectors and hyperparameters. `OptaxOptimizer` explains them."""

    max_grad_norm: float | None
    writeback: Writeback
    state_dtype: torch.dtype | None
    master_weights: bool
    stochastic_rounding: bool
    rounding_seed: int
    ema_decay: float | None
    metrics: bool


class SelectorArguments(OptionArguments, total=False):
    """The keyword arguments of every optimizer apart from hyperparameters. `OptaxOptimizer` explains them."""

    mask: Selector
    decay_mask: Selector
    lr_scale: Selector | float


class SharedArguments(SelectorArguments, total=False):
    """The keyword arguments that every class for one transformation shares. `OptaxOptimizer` explains them.

    `learning_rate` is another name of `lr`: type checkers accept it where `lr` has a default, and signatures do not show it.
    """

    learning_rate: float


class OptaxArguments(SharedArguments, total=False):
    """The shared keyword arguments of the classes for optax's optimizers, which also take the switches of torch.optim."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


class BetasArguments(OptaxArguments, total=False):
    """`OptaxArguments` of a class that has `b1`, `b2` and so on: `betas` may replace them."""

    betas: tuple[float, ...]


@dataclass(frozen=True)
class Options:
    """The keyword arguments of every optimizer, with their defaults. The docstring of `OptaxOptimizer` explains them."""

    max_grad_norm: float | None = None
    writeback: Writeback = "inplace"
    state_dtype: torch.dtype | None = None
    master_weights: bool = False
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    ema_decay: float | None = None
    metrics: bool = False

    @classmethod
    def validate(cls, cls_name: str, values: Hyperparams) -> Options:
        """Return the options of a dict by name. Raise an error that says what is wrong with one."""
        check_keywords(cls_name, values, OPTION_NAMES)
        options = cls(**values)
        for name in _CHECKS:
            _check_option(cls_name, name, getattr(options, name))
        if options.master_weights and options.stochastic_rounding:
            raise ValueError(
                f"{cls_name}: master_weights and stochastic_rounding are both asked for. With a float32 master nothing is lost in "
                "rounding: expected one of them."
            )
        return options

    def aux_state(self, has_average: bool) -> spec.AuxState:
        """Return the description of the state beside the transformation's. Whether there is an average may change between steps."""
        dtype = None if self.state_dtype is None else str(numpy_dtype(self.state_dtype))
        return spec.AuxState(dtype, self.master_weights, self.stochastic_rounding, has_average)

    def initial_aux_value(self, leaf: ParamRecord, field: StateField) -> torch.Tensor:
        """Return the initial value of a state field that is not the transformation's."""
        if field.name != spec.ROUNDING_KEY:
            return leaf.local_tensor.detach().to(getattr(torch, field.dtype))
        # The seed depends on the name, so parameters round independently, and equally in every process that gives them the same names.
        words = np.random.SeedSequence([self.rounding_seed, zlib.crc32(leaf.name.encode())]).generate_state(2)
        return torch.from_numpy(words.view(np.int32)).to(leaf.device)


class ValidatedAttribute:
    """An option that is also an attribute. User code may set it between steps; it is then checked as in the constructor.

    There is no `__get__`: reading finds the instance attribute directly, at no cost.
    """

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __set__(self, optimizer: object, value: object) -> None:
        _check_option(type(optimizer).__name__, self._name, value)
        optimizer.__dict__[self._name] = value


def _check_option(cls_name: str, name: str, value: object) -> None:
    fits, expected = _CHECKS[name]
    if not fits(value):
        raise ValueError(f"{cls_name}: {name} is {value!r}; expected {expected}.")


_ARGUMENT_CLASSES = {each.__name__: each for each in (OptionArguments, SelectorArguments, SharedArguments, OptaxArguments, BetasArguments)}
_SWITCHES = {"capturable": False, "differentiable": False}
_OTHER_NAMES = {"learning_rate"}


def show_shared_arguments(init: Callable[..., None]) -> None:
    """Give a constructor that ends in `**engine: Unpack[SharedArguments]`, or the like, a signature that names each of these arguments.

    `inspect.signature`, `help` and notebooks then show them. Type checkers read the annotation itself.
    """
    *own, last = inspect.signature(init).parameters.values()
    found = re.fullmatch(r"Unpack\[(\w+)\]", str(last.annotation))
    if found is None or found[1] not in _ARGUMENT_CLASSES:
        return
    present = {parameter.name for parameter in own} | _OTHER_NAMES
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default_of(name), annotation=kind.__forward_arg__)
        for name, kind in _ARGUMENT_CLASSES[found[1]].__annotations__.items()
        if name not in present
    ]
    init.__signature__ = inspect.Signature([*own, *shared], return_annotation=None)  # pyright: ignore[reportFunctionMemberAccess]


def _default_of(name: str) -> object:
    return getattr(Options, name, _SWITCHES.get(name))


OPTION_NAMES = frozenset(field.name for field in fields(Options))
_is_flag = lambda value: isinstance(value, bool)  # noqa: E731
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_grad_norm": (lambda v: v is None or (is_number(v) and v > 0), "a positive number, or None for no bound"),
    "writeback": (lambda v: v in ("inplace", "copy"), "'inplace' or 'copy'"),
    "state_dtype": (lambda v: v is None or (isinstance(v, torch.dtype) and v.is_floating_point), "a floating torch.dtype, or None"),
    "master_weights": (_is_flag, "True or False"),
    "stochastic_rounding": (_is_flag, "True or False"),
    "rounding_seed": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "an integer, 0 or more"),
    "metrics": (_is_flag, "True or False"),
    "ema_decay": (lambda v: v is None or (is_number(v) and 0 <= v < 1), "a number from 0 to below 1, or None for no average"),
}
