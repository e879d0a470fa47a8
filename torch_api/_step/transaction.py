"""One step of an optimizer, from the checks before it until its results are kept or undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bridge._runtime.transaction import Transaction
from torch_api._params.hyperparam_table import HyperparamTable
from torch_api._params.record import ParamRecord
from torch_api._params.swap import ParameterSwap

from .bound_executable import BoundExecutable
from .extra_args import ExtraArgs
from .guards import Guards
from .launch_cache import LaunchCache
from .state_watch import StateAccess


class Optimizer(Protocol):
    """What a step needs of an optimizer."""

    _devices: tuple[torch.device, ...]
    _guards: Guards
    _hyperparam_table: HyperparamTable
    _launch_cache: LaunchCache
    _prepared_signature: list[object] | None
    _state_access: StateAccess
    _swap: ParameterSwap
    _trainable: list[ParamRecord]

    def _rebuild_layout(self) -> None: ...
    def _recompile_signature(self) -> list[object]: ...
    def _state_is_unmodified(self) -> bool: ...
    def _stop_watching_if_unreferenced(self, access_count: int) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class StepTransaction:
    """One step of an optimizer, as `OptaxOptimizer.step` and `JaxTrainStep` run it.

    They call `begin`, read the gradients or trace the loss, look for bound executables in the launch cache or make them inside
    `preparing`, and call them. Then comes `commit`, or `rollback` after an error.

    optimizer: the optimizer.
    caller: the name of the step in errors.
    locks: the transaction that holds the locks of the devices.
    snapshots: tensors, and copies with their values before the step.
    completed: the bound executables whose results are in the tensors.
    """

    optimizer: Optimizer
    caller: str
    locks: Transaction
    snapshots: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    completed: list[BoundExecutable] = field(default_factory=list)
    _access_count: int = 0

    def begin(self, make_extra_args: Callable[[], ExtraArgs | None] | None = None) -> ExtraArgs | None:
        """Follow what user code has changed since the last step: param groups, options, and the optimizer's state.

        Args:
          make_extra_args: makes the extra arguments of the transformation; None if the step has none.

        Returns:
          The extra arguments.

        Raises:
          RuntimeError: the parameters hold other weights than the trained ones.
        """
        optimizer = self.optimizer
        if optimizer._swap.swapped_by:  # another thread may have swapped the weights
            optimizer._swap.raise_swapped_error(self.caller)
        extra_args = None if make_extra_args is None else make_extra_args()
        if optimizer._recompile_signature() != optimizer._prepared_signature:
            optimizer._rebuild_layout()
        self._access_count = optimizer._state_access.access_count
        if optimizer._state_access.may_be_referenced and not optimizer._state_is_unmodified():
            optimizer._rebuild_layout()  # user code edited the state: continue from the edited values
        return extra_args

    def records(self, positions: Iterable[int]) -> list[ParamRecord]:
        """Return the records of trainable parameters."""
        return [self.optimizer._trainable[i] for i in positions]

    @contextmanager
    def preparing(self, with_grad: Iterable[int]) -> Iterator[LaunchCache]:
        """Make bound executables in this context. The next step rebuilds the layout after an error or an interrupt in it.

        Yields:
          The launch cache. `is_outdated` tells afterwards whether the step must start over.
        """
        optimizer = self.optimizer
        launch_cache, signature, optimizer._prepared_signature = optimizer._launch_cache, optimizer._prepared_signature, None
        with optimizer._hyperparam_table.explain_missing_leaves(self.records(with_grad)):
            yield launch_cache
        if not self.is_outdated(launch_cache):
            optimizer._guards.invalidate(launch_cache.has_new_state)
            optimizer._prepared_signature = signature

    def is_outdated(self, launch_cache: LaunchCache) -> bool:
        """Return whether a signal handler has changed the optimizer while a program was traced or compiled."""
        return launch_cache.is_outdated or bool(self.optimizer._swap.swapped_by)

    def commit(self) -> None:
        """Finish a step whose results are in the tensors, if `optimizer.state` may be referenced: find out whether it still is."""
        self.optimizer._stop_watching_if_unreferenced(self._access_count)

    def rollback(self, error: BaseException) -> None:
        """Undo a step that has failed, as far as possible: all tensors get valid memory, and those with a snapshot their old values.

        The error gets a note with the parameters that are updated nevertheless, and with those whose values are lost.
        """
        optimizer = self.optimizer
        optimizer._launch_cache.rebind(self.completed)
        if optimizer._launch_cache.recover_after_failure(error, self.snapshots, self.completed):
            optimizer._rebuild_layout()
