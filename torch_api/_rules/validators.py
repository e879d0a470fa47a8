"""Checks of hyperparameters and parameters, with torch's error texts."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import jax
import numpy as np
import torch

from .types import ParamGroup

_Subject = TypeVar("_Subject")
# Types that a user may give for a tuple of numbers.
Numbers: TypeAlias = Sequence[Any] | torch.Tensor | np.ndarray | jax.Array


class Check(NamedTuple, Generic[_Subject]):
    """A condition on a param group (`OptimizerSpec.checks`) or on a trained parameter (`OptimizerSpec.leaf_checks`), and torch's error.

    holds: the condition.
    text: a format string over the keys of the group; for a parameter, over `size` and `name`.
    error: the class of the error.
    at_every_step: check at each step too. Other numbers may be out of range then, because a schedule may write them.
    """

    holds: Callable[[_Subject], bool]
    text: str
    error: type[Exception] = ValueError
    at_every_step: bool = False


def non_negative_checks(**texts: str) -> tuple[Check[ParamGroup], ...]:
    """Return a check for each hyperparameter that it is at least 0.

    Args:
      **texts: the error text of each hyperparameter.
    """
    return tuple(Check(functools.partial(_at_least, name, 0), text) for name, text in texts.items())


def beta_checks() -> tuple[Check[ParamGroup], ...]:
    """Return checks that both betas are in [0, 1)."""
    return tuple(Check(functools.partial(_is_valid_beta, i), f"Invalid beta parameter at index {i}: {{betas[{i}]}}") for i in (0, 1))


def _at_least(name: str, bound: float, group: ParamGroup) -> bool:
    return bool(group[name] >= bound)


def _is_valid_beta(index: int, group: ParamGroup) -> bool:
    return bool(0 <= group["betas"][index] < 1)


def _is_tensor(x: object) -> bool:
    return hasattr(x, "numel")


def _fits_foreach(value: object, group: ParamGroup) -> bool:
    return not (_is_tensor(value) and group.get("foreach") and not group.get("capturable"))


def lr_fits_foreach(group: ParamGroup) -> bool:
    """Return whether lr is not a tensor, which foreach does not support."""
    return _fits_foreach(group["lr"], group)


def betas_fit_foreach(group: ParamGroup) -> bool:
    """Return whether betas are not tensors, which foreach does not support."""
    return _fits_foreach(group["betas"][0], group)


def betas_have_one_type(group: ParamGroup) -> bool:
    """Return whether both betas are tensors, or none is."""
    return _is_tensor(group["betas"][0]) == _is_tensor(group["betas"][1])


def _are_exclusive(one: str, other: str, group: ParamGroup) -> bool:
    return not (group.get(one) and group.get(other))


def fused_checks() -> tuple[Check[ParamGroup], ...]:
    """Return checks that `fused`, which decides how GradScaler unscales, is not combined with differentiable or foreach."""
    return (
        Check(functools.partial(_are_exclusive, "fused", "differentiable"), "`fused` does not support `differentiable`", RuntimeError),
        Check(functools.partial(_are_exclusive, "fused", "foreach"), "`fused` and `foreach` cannot be `True` together.", RuntimeError),
    )


def nesterov_has_momentum(group: ParamGroup) -> bool:
    """Return whether nesterov, if set, has a momentum and no dampening."""
    return not group["nesterov"] or bool(group["momentum"] > 0 and group["dampening"] == 0)


def rho_in_unit_interval(group: ParamGroup) -> bool:
    """Return whether rho is in [0, 1]."""
    return bool(0 <= group["rho"] <= 1)


def etas_enclose_one(group: ParamGroup) -> bool:
    """Return whether the first eta is between 0 and 1 and the second is above 1."""
    return bool(0 < group["etas"][0] < 1 < group["etas"][1])


def is_real(p: torch.Tensor) -> bool:
    """Return whether the parameter is not complex."""
    return not p.is_complex()


def is_matrix(p: torch.Tensor) -> bool:
    """Return whether the parameter has two dimensions."""
    return p.ndim == 2


def adjust_lr_fn_is_known(group: ParamGroup) -> bool:
    """Return whether adjust_lr_fn is None or one of torch's names."""
    return group["adjust_lr_fn"] in (None, "original", "match_rms_adamw", "spectral_unclamped")


def ns_steps_in_range(group: ParamGroup) -> bool:
    """Return whether ns_steps is in [0, 100)."""
    return 0 <= group["ns_steps"] < 100


def not_positive(name: str, group: ParamGroup) -> bool:
    """Return whether a hyperparameter is at most 0."""
    return bool(group[name] <= 0)


def at_least_one(name: str, group: ParamGroup) -> bool:
    """Return whether a hyperparameter is at least 1."""
    return bool(group[name] >= 1)


def eps_not_negative(index: int, group: ParamGroup) -> bool:
    """Return whether one of the two eps is at least 0. The first may be None."""
    eps = group["eps"][index]
    return index == 0 if eps is None else bool(eps >= 0)


def is_number(value: object) -> bool:
    """Return whether the value is a number, or a tensor, which torch accepts for an lr. A bool is not a number."""
    return isinstance(value, numbers.Real | np.number | torch.Tensor) and not isinstance(value, bool)


def is_scalar_array(value: object) -> TypeGuard[jax.Array | np.ndarray]:
    """Return whether the value is a 0-d array of jax, such as an optax schedule returns, or of NumPy."""
    return isinstance(value, jax.Array | np.ndarray) and value.ndim == 0


def is_one_number(value: object) -> bool:
    return is_number(value) and (not isinstance(value, torch.Tensor) or value.numel() == 1)


def is_sequence(value: object) -> TypeGuard[Numbers]:
    """Return whether the value may stand for a tuple of numbers: any sequence except a string, or an array with one dimension."""
    if isinstance(value, torch.Tensor | np.ndarray | jax.Array):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def as_tuple(value: Any) -> Any:
    """Return a sequence of numbers as a tuple that a checkpoint can hold. A list stays a list; other values are returned as they are.

    The elements of a tensor are views of it.
    """
    if not is_sequence(value):
        return value
    elements = value.unbind() if isinstance(value, torch.Tensor) else value.tolist() if isinstance(value, np.ndarray | jax.Array) else value
    return (list if isinstance(value, list) else tuple)(x.item() if isinstance(x, np.generic) else x for x in elements)


def tuple_length(value: object) -> int:
    return len(value) if is_sequence(value) else 0
