"""Describe a transformation as a torch optimizer: which hyperparameters its groups have, and what its state is to torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import optax
import torch

from .types import Hyperparams, ParamGroup
from .validators import Check


class Rule(NamedTuple):
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
    structural: frozenset[str] = frozenset()
    static: frozenset[str] = frozenset()
    hidden: dict[str, float] = {}  # noqa: RUF012
    eager: bool = False
    shaped: bool = False
    typed: bool = False
    checks: tuple[Check[ParamGroup], ...] = ()
    leaf_checks: tuple[Check[torch.Tensor], ...] = ()
    given: Hyperparams | None = None
    traceable: frozenset[str] = frozenset()
    scaled: bool = False
    ready: bool = False
    takes_extra: bool = False

    @property
    def whole(self) -> frozenset[str] | Hyperparams:
        """The hyperparameters whose value selects the program. Of others only whether they are 0 or True may select it."""
        return self.hyperparams if self.scaled else self.static

    @property
    def hyperparams(self) -> Hyperparams:
        """The hyperparameters and options by name, with their defaults. A default None of an optional hyperparameter reads 0."""
        if self.given is not None:
            return self.given
        parameters = inspect.signature(self.factory).parameters.values()
        named = [p for p in parameters if not (self.typed and p.name == "dtype")]
        return {p.name: 0.0 if p.name in self.structural and p.default is None else p.default for p in named}
