"""A scaled loss: what `torch.amp.GradScaler` hands to an optimizer that unscales by itself."""

from __future__ import annotations

from typing import TypeAlias

import jax
import numpy as np
import torch

from bridge._interop.tensor_storage import shortage
from bridge._memory.call_arguments import operands

_Scalar: TypeAlias = torch.Tensor | float


def check(**given: object) -> None:
    """Raise for a tensor of GradScaler's whose storage was freed."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and (why := shortage(value)):
            raise ValueError(f"optimizer.{name} cannot be read: {why}. Nothing was updated: set it to a tensor whose storage is whole.")


class Scaling:
    """The loss scale of one step, and the count of the updates that were skipped on each device.

    GradScaler leaves the scale and its count of infinities as tensors in `optimizer.grad_scale` (None: the gradients are
    unscaled already) and `optimizer.found_inf`. They go into the program as they are; nothing is read on the host.
    """

    def __init__(self) -> None:
        self._skipped: dict[torch.device, jax.Array] = {}

    @property
    def skipped(self) -> int:
        """How many updates were skipped; reading it waits for the device."""
        return max((int(np.asarray(count)[0]) for count in self._skipped.values()), default=0)

    def arrays(self, device: torch.device, grad_scale: _Scalar | None, found_inf: _Scalar | None) -> list[jax.typing.ArrayLike]:
        """Loss scale, infinities found and updates skipped, as the program takes them."""
        count = self._skipped.get(device)
        if count is None:
            count = operands([torch.zeros((), dtype=torch.int32, device=device)], [None])[0]
        given = [_scalar(x, default, device) for x, default in ((grad_scale, 1.0), (found_inf, 0.0))]
        return [*operands(given, [None, None]), count]

    def keep(self, device: torch.device, count: jax.Array) -> None:
        """Take the new count of a program."""
        self._skipped[device] = count


def _scalar(value: _Scalar | None, default: float, device: torch.device) -> torch.Tensor:
    if value is None:
        return torch.full((), default, dtype=torch.float32, device=device)  # a number in `as_tensor` would make the host wait for the copy
    return torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(())
