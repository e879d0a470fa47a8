"""What the hyperparams and the state of a transformation mean to a torch optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import optax
import torch

from .types import Hyperparams, ParamGroup
from .validators import Check


class Rule(NamedTuple):
    """A factory of transformations, and what its hyperparams and state mean to a torch optimizer.

    `structural` hyperparams take None for "none of it", which a 0 in a param group stands for: they decide which state
    exists. `static` ones are no numbers, or decide the program by their value: a change of one compiles. `hidden` state
    is not part of torch's state_dict; restored state begins with the value given here. `eager`: a parameter has its
    state from construction on, as in torch, not from its first gradient.

    `shaped`: the equation needs the leaf in its own shape and looks across its elements; else leaves are flat. `typed`:
    the factory also takes `dtype`, the type that the leaf is kept in, where arithmetic is in float32.

    `checks` and `leaf_checks` are torch's conditions in torch's order.

    `scaled`: any optax transformation, not one of this package's equations: it is evaluated as in pure JAX, and its
    update is multiplied by the group's `lr` unless `lr` is among its own hyperparams. Those with defaults are `given`,
    and only the `traceable` of them may be traced. `ready`: one transformation for all groups, not one for each.
    `takes_extra`: it reads further arguments of `step`.
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
        """The hyperparams whose very value decides the program, where that of others is whether they are 0 or True."""
        return self.hyperparams if self.scaled else self.static

    @property
    def hyperparams(self) -> Hyperparams:
        """The hyperparams and options by name with their defaults, None for structural ones being 0 in a group."""
        if self.given is not None:
            return self.given
        parameters = inspect.signature(self.factory).parameters.values()
        named = [p for p in parameters if not (self.typed and p.name == "dtype")]
        return {p.name: 0.0 if p.name in self.structural and p.default is None else p.default for p in named}
