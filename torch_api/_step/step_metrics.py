"""The numbers of the last step that users log: the norm of its gradients, and metrics of each label or param group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
import torch

from bridge._compiler.metrics import GRAD, PARAM, UPDATE
from bridge._interop.dlpack import to_torch
from bridge._memory.call_arguments import Argument
from bridge._runtime.launch import StepNumbers
from torch_api._params.record import ParamRecord
from torch_api._params.sharding import ShardGroups, sum_over_processes

from .bound_executable import BoundExecutable

_COLUMNS = {"grad_norm": GRAD, "update_norm": UPDATE, "param_norm": PARAM}


Numbers: TypeAlias = StepNumbers[BoundExecutable]


class LastStep(NamedTuple):
    """The last step of an optimizer.

    max_norm: the bound on the norm; None for no clipping.
    numbers: those of each device.
    skip_counts: for each device with a loss scale the numbers of skipped updates before and after the step.
    sums_of_processes: with shards and metrics the sums of squares over all processes, by key.
    """

    max_norm: float | None
    numbers: Sequence[Numbers]
    skip_counts: Sequence[tuple[jax.typing.ArrayLike, jax.Array]] = ()
    sums_of_processes: dict[str, np.ndarray] | None = None

    def grad_norm(self) -> torch.Tensor:
        """Return the global norm of the gradients before clipping, a float64 scalar. A GPU may not have computed it yet."""
        if self.max_norm is not None:  # a step that clips is on one device
            squares = [_as_tensor(stats)[0] for each in self.numbers for stats in each.stats]
        elif self.sums_of_processes is not None:
            squares = [torch.tensor(each[GRAD]) for each in self.sums_of_processes.values()]
        else:
            squares = [to_torch(array)[:, GRAD].sum() for each in self.numbers for _, array in each.metrics]
        total = torch.zeros((), dtype=torch.float64, device=squares[0].device if squares else None)
        for x in squares:
            total = total + x.to(total.device)
        return total.sqrt()

    def metrics_by_key(self, key_of: Callable[[ParamRecord], str]) -> dict[str, float]:
        """Return the metrics by name, with one entry for each key where there are several. This waits for the device.

        Args:
          key_of: gives the label or the group of a parameter.
        """
        sums = sum_by_key(self.numbers, key_of) if self.sums_of_processes is None else self.sums_of_processes
        found = _named_metrics("", sum(sums.values(), _zeros())) | {"grad_norm": float(self.grad_norm())}
        if self.max_norm is not None:
            found["clip_factor"] = min(self.max_norm / (found["grad_norm"] + 1e-6), 1.0)  # as `clip_grad_norm_` computes it
        found["skipped"] = float(any(np.any(np.asarray(after) > np.asarray(before)) for before, after in self.skip_counts))
        for key in sorted(sums) if len(sums) > 1 else ():
            found |= _named_metrics(f"/{key}", sums[key])
        return found


def sum_by_key(
    numbers: Sequence[Numbers], key_of: Callable[[ParamRecord], str], weight_of: Callable[[ParamRecord], float] | None = None
) -> dict[str, np.ndarray]:
    """Return the sums of squares of all parameters with the same key, float64 (3,)."""
    sums: dict[str, np.ndarray] = {}
    for launch, array in (pair for each in numbers for pair in each.metrics):
        rows = np.asarray(array)
        for leaf, position in zip(launch.leaves, launch.row_positions, strict=True):
            key = key_of(leaf)
            sums[key] = sums.get(key, 0.0) + rows[position] * (1 if weight_of is None else weight_of(leaf))
    return sums


def sum_over_shards(
    numbers: Sequence[Numbers], leaves: Iterable[ParamRecord], key_of: Callable[[ParamRecord], str], groups: ShardGroups
) -> dict[str, np.ndarray]:
    """Return the sums of squares over all processes, by key. All processes must call this; it waits for the device.

    Args:
      numbers: those of each device.
      leaves: all parameters that may be trained, equal in each process.
      key_of: gives the label or the group of a parameter.
      groups: the device meshes of the shards.
    """
    total = {key: _zeros() for key in sorted({key_of(leaf) for leaf in leaves})}
    for mesh in groups.meshes:
        own = sum_by_key(numbers, key_of, lambda leaf, mesh=mesh: groups.weight(leaf.dtensor_layout, mesh))
        values = torch.tensor(np.array([own.get(key, _zeros()) for key in total]), device=mesh.device_type)
        sum_over_processes(values, mesh)
        total = {key: before + row for (key, before), row in zip(total.items(), values.cpu().numpy(), strict=True)}
    return total


def sum_statistics(groups: ShardGroups) -> np.ndarray:
    """Return the statistics of the gradients of all processes, in a step in which this process has none."""
    total = np.zeros(2)
    for mesh in groups.meshes:
        values = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
        sum_over_processes(values, mesh)
        total += values.cpu().numpy()
    return total


def _zeros() -> np.ndarray:
    return np.zeros(len(_COLUMNS))


def _as_tensor(array: Argument) -> torch.Tensor:
    return to_torch(array) if isinstance(array, jax.Array) else torch.as_tensor(array)


def _named_metrics(suffix: str, squares: np.ndarray) -> dict[str, float]:
    norms = {name: math.sqrt(squares[column]) for name, column in _COLUMNS.items()}
    ratio = norms["update_norm"] / norms["param_norm"] if norms["param_norm"] else 0.0
    return {f"{name}{suffix}": value for name, value in (norms | {"update_ratio": ratio}).items()}
