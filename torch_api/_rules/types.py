"""Types of transformations, and aliases for the dicts of torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from bridge._flax_optim.optimizer import OptimizerDef

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


class HasInitAndUpdate(Protocol):
    """An optax transformation, or anything else with its two functions."""

    @property
    def init(self) -> Callable[..., object]: ...
    @property
    def update(self) -> Callable[..., object]: ...


# What an `OptaxOptimizer` takes: a transformation, a function that makes one, or a definition.
Transformation: TypeAlias = HasInitAndUpdate | Callable[..., object] | OptimizerDef
