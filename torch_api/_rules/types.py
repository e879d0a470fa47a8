"""Type aliases for the dicts of torch.optim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# An entry of `optimizer.param_groups`: hyperparameters, flags of this package, and keys of the user or of a scheduler.
ParamGroup: TypeAlias = Mapping[str, Any]
MutableParamGroup: TypeAlias = dict[str, Any]
# Hyperparameters or options by name.
Hyperparams: TypeAlias = Mapping[str, Any]
# `optimizer.state[p]`: tensors by field, and entries of wrappers.
ParamState: TypeAlias = Mapping[str, Any]
MutableParamState: TypeAlias = dict[str, Any]
# `optimizer.state_dict()`, or the pickled state of an optimizer.
StateDict: TypeAlias = dict[str, Any]
