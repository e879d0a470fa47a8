"""What a train step needs of an optimizer, apart from the steps of a `StepTransaction`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from bridge._compat.torch import OPT_CALLED
from bridge._ir.types import PyTree
from bridge._names import Path
from bridge._runtime.transaction import Transaction
from torch_api._params.record import ParamRecord
from torch_api._rules.optimizer_spec import OptimizerSpec

from . import transaction
from .extra_args import ExtraArgs
from .launch_cache import LaunchCache
from .step_metrics import LastStep, Numbers


class Optimizer(transaction.Optimizer, Protocol):
    """The private members of an optimizer that `OptimizerAccess` reads and calls."""

    _optimizer_specs: dict[Hashable, OptimizerSpec]
    _records: list[ParamRecord]
    _last_step: LastStep | None
    max_grad_norm: float | None

    def _hyperparams(self) -> np.ndarray: ...
    def _make_extra_args(self, extra_args: dict[str, PyTree]) -> ExtraArgs: ...
    def _move_out_of_buckets(self, leaves: Iterable[ParamRecord]) -> bool: ...
    def _transaction(self) -> Transaction: ...


class OptimizerAccess:
    """The parameters, programs and numbers of an optimizer, for code that updates its parameters by a program of its own.

    It keeps nothing but the optimizer: a rebuild of the layout replaces most of the objects that the properties return.

    Args:
      optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def records(self) -> Sequence[ParamRecord]:
        """The records of all parameters, in the order of the param groups."""
        return self._optimizer._records

    @property
    def all_paths(self) -> Sequence[Path]:
        """The path of each of `records` in the tree that the transformation sees."""
        return self._optimizer._hyperparam_table.all_paths

    @property
    def trainable(self) -> Sequence[ParamRecord]:
        """The records that masks and groups let be trained. A position of a parameter in a step is an index of this list."""
        return self._optimizer._trainable

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of all parameters, in the order in which transactions lock them."""
        return self._optimizer._devices

    @property
    def launch_cache(self) -> LaunchCache:
        """The launch cache. Each rebuild of the layout makes another one."""
        return self._optimizer._launch_cache

    @property
    def takes_extra_args(self) -> bool:
        """Whether a transformation of the optimizer takes extra arguments."""
        return any(rule.takes_extra_args for rule in self._optimizer._optimizer_specs.values())

    @property
    def state_may_be_referenced(self) -> bool:
        """Whether somebody else may reference `optimizer.state`, so that a step ends with `StepTransaction.commit`."""
        return self._optimizer._state_access.may_be_referenced

    def transaction(self) -> Transaction:
        """Return a transaction on every device that has parameters of the param groups."""
        return self._optimizer._transaction()

    def raise_if_swapped(self, caller: str) -> None:
        """Raise if the parameters hold other weights than the trained ones. `caller`: the name of the step in the error."""
        if self._optimizer._swap.swapped_by:
            self._optimizer._swap.raise_swapped_error(caller)

    def hyperparams(self) -> np.ndarray:
        """Return the vector of hyperparameters, read from the param groups now."""
        return self._optimizer._hyperparams()

    def make_extra_args(self, extra_args: Mapping[str, PyTree]) -> ExtraArgs:
        """Return the extra arguments of a step. If their names differ from the last step's, the layout is rebuilt."""
        return self._optimizer._make_extra_args(dict(extra_args))

    def move_out_of_buckets(self) -> bool:
        """Move large rows out of buckets, into buffers of their own, for good. Return whether there were any.

        XLA copies a row of a bucket before it reads it as a matrix.
        """
        return self._optimizer._move_out_of_buckets(self._optimizer._trainable)

    def rebuild_layout(self) -> None:
        """Read groups and parameters again, and drop all bound executables."""
        self._optimizer._rebuild_layout()

    def record_update(self, numbers: Numbers) -> None:
        """Tell schedulers that the optimizer has updated its parameters, and keep the numbers that users log."""
        vars(self._optimizer)[OPT_CALLED] = True
        self._optimizer._last_step = LastStep(self._optimizer.max_grad_norm, [numbers])
