"""Describe a transformation as a torch optimizer: which hyperparameters its groups have, and what its state is to torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import optax
import torch

from .types import Hyperparams, ParamGroup
from .validators import Check


class OptimizerSpec(NamedTuple):
    """A factory of transformations, and how its hyperparameters and state appear in a torch optimizer.

    factory: makes the transformation from keyword arguments.
    optional_hyperparams: the factory takes None for them, which decides that some state does not exist. 0 in a param group means None.
    static_hyperparams: not traced. A new value compiles a new program.
    hidden_state: fields that are not in torch's state_dict, with the value that they have after loading.
    eager_state: a parameter has its state from construction on, as in torch, and not from its first gradient.
    needs_shape: the equation needs a matrix in its shape, because it looks across elements. Otherwise parameters are flat.
    takes_dtype: the factory also takes `dtype`, the dtype in which a parameter is stored. Arithmetic may be in float32.
    checks, leaf_checks: torch's conditions on groups and on trained parameters, in torch's order.

    The other fields are for optax transformations that are not equations of this package.

    declared_hyperparams: the hyperparameters with their defaults. traceable_hyperparams: the ones that may be traced.
    is_optax: evaluate it as in pure JAX, and multiply its update by the group's `lr` unless `lr` is one of its hyperparameters.
    is_instance: all groups share one transformation.
    takes_extra_args: it reads extra arguments of `step`.
    """

    factory: Callable[..., optax.GradientTransformation]
    optional_hyperparams: frozenset[str] = frozenset()
    static_hyperparams: frozenset[str] = frozenset()
    hidden_state: dict[str, float] = {}  # noqa: RUF012
    eager_state: bool = False
    needs_shape: bool = False
    takes_dtype: bool = False
    checks: tuple[Check[ParamGroup], ...] = ()
    leaf_checks: tuple[Check[torch.Tensor], ...] = ()
    declared_hyperparams: Hyperparams | None = None
    traceable_hyperparams: frozenset[str] = frozenset()
    is_optax: bool = False
    is_instance: bool = False
    takes_extra_args: bool = False

    @property
    def static_by_value(self) -> frozenset[str] | Hyperparams:
        """The hyperparameters whose value selects the program. Of others only whether they are 0 or True may select it."""
        return self.hyperparams if self.is_optax else self.static_hyperparams

    @property
    def hyperparams(self) -> Hyperparams:
        """The hyperparameters and options by name, with their defaults. A default None of an optional hyperparameter reads 0."""
        if self.declared_hyperparams is not None:
            return self.declared_hyperparams
        parameters = inspect.signature(self.factory).parameters.values()
        named = [p for p in parameters if not (self.takes_dtype and p.name == "dtype")]
        return {p.name: 0.0 if p.name in self.optional_hyperparams and p.default is None else p.default for p in named}
