"""Loss scaling: the tensors that `torch.amp.GradScaler` hands to an optimizer that unscales its own gradients."""

from __future__ import annotations

from typing import TypeAlias

import jax
import numpy as np
import torch

from bridge._interop.tensor_storage import why_unreadable
from bridge._memory.call_arguments import Argument, as_call_arguments

_Scalar: TypeAlias = torch.Tensor | float


def check_scaler_tensors(**scaler_tensors: object) -> None:
    """Raise if the storage of a tensor of GradScaler was freed."""
    for name, value in scaler_tensors.items():
        if isinstance(value, torch.Tensor) and (why := why_unreadable(value)):
            raise ValueError(f"optimizer.{name} cannot be read: {why}. Nothing was updated: set it to a tensor whose storage is whole.")


class LossScale:
    """The loss scale of a step, and the number of updates that each device has skipped.

    GradScaler sets `optimizer.grad_scale` (None if the gradients are unscaled already) and `optimizer.found_inf`. Both tensors are
    arguments of the program, so the host never reads them.
    """

    def __init__(self) -> None:
        self._skipped: dict[torch.device, Argument] = {}

    @property
    def skipped(self) -> int:
        """Return how many updates were skipped; this waits for the device."""
        return max((int(np.asarray(count)[0]) for count in self._skipped.values()), default=0)

    def program_arguments(self, device: torch.device, grad_scale: _Scalar | None, found_inf: _Scalar | None) -> list[jax.typing.ArrayLike]:
        """Return the arguments of a program: the loss scale, the number of infinities, and the number of updates skipped so far."""
        given = [_scalar(x, default, device) for x, default in ((grad_scale, 1.0), (found_inf, 0.0))]
        return [*as_call_arguments(given, [None, None]), self._count(device)]

    def count_skipped(self, device: torch.device) -> None:
        """Count an update that was skipped without a program on this device."""
        self._skipped[device] = _count_argument(int(np.asarray(self._count(device))[0]) + 1, device)

    def _count(self, device: torch.device) -> Argument:
        count = self._skipped.get(device)
        return _count_argument(0, device) if count is None else count

    def record_skipped(self, device: torch.device, count: jax.Array) -> None:
        """Record the number of skipped updates that a program returns."""
        self._skipped[device] = count


def _count_argument(count: int, device: torch.device) -> Argument:
    return as_call_arguments([torch.full((), count, dtype=torch.int32, device=device)], [None])[0]


def _scalar(value: _Scalar | None, default: float, device: torch.device) -> torch.Tensor:
    if value is None:
        return torch.full((), default, dtype=torch.float32, device=device)  # `as_tensor` of a number would make the host wait for a copy
    return torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(())
