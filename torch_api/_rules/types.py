"""Names for the dicts that torch.optim leaves open, for annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# One of `optimizer.param_groups`: hyperparams, flags of this package, and whatever the user or a scheduler has put there.
ParamGroup: TypeAlias = Mapping[str, Any]
MutableParamGroup: TypeAlias = dict[str, Any]
# Hyperparams or options by name, as they are given.
Hyperparams: TypeAlias = Mapping[str, Any]
# `optimizer.state[p]`: tensors by field, and whatever a wrapper keeps beside them.
ParamState: TypeAlias = Mapping[str, Any]
MutableParamState: TypeAlias = dict[str, Any]
# `optimizer.state_dict()`, or all that a pickle has of an optimizer.
StateDict: TypeAlias = dict[str, Any]
