"""Entries of `optimizer.state[p]` that belong to a wrapper of the optimizer, such as the slow weights of a look-ahead wrapper."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from bridge._compiler.spec import AUX_FIELDS
from torch_api._rules.types import MutableParamState, ParamState

from .sharding import redistribute_like

# Fields of torch.optim's classes and of optax's common transformations. In a loaded state they belong to this or another optimizer.
_OPTIMIZER_FIELDS = {
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "grad_avg", "sum", "prev",
    "step_size", "eta", "mu", "ax", "mu_product", "row_var", "col_var", "variance", "count", "nu", "nu_max", "trace", "e_g", "e_x",
    "sum_of_squares",
}  # fmt: skip


def split_wrapper_entries(saved: ParamState, fields: Collection[str]) -> tuple[MutableParamState, MutableParamState]:
    """Split the saved state of a parameter into entries of an optimizer and entries of wrappers.

    Args:
      saved: the saved state.
      fields: the fields of the parameter's own state.
    """
    own = {key: value for key, value in saved.items() if key in fields or key in AUX_FIELDS or _is_optimizer_field(key)}
    return own, {key: value for key, value in saved.items() if key not in own}


def may_have_wrapper_entries(state: Collection[object]) -> bool:
    """Return whether an entry may belong to a wrapper: its name is not that of a common field."""
    return not all(map(_is_optimizer_field, state))


def _is_optimizer_field(key: object) -> bool:
    """Return whether a key names a common field, also in a part of a transformation (`0.mu`)."""
    return isinstance(key, str) and not _OPTIMIZER_FIELDS.isdisjoint(key.split("."))


def copy_entry(value: Any, param: torch.Tensor) -> Any:
    """Copy a wrapper's entry, with copies of its tensors on the parameter's device. Dtypes do not change."""
    if isinstance(value, torch.Tensor):
        return redistribute_like(value, param).detach().to(param.device, copy=True)
    if type(value) is dict:
        return {key: copy_entry(each, param) for key, each in value.items()}
    return type(value)(copy_entry(each, param) for each in value) if type(value) in (list, tuple) else value
