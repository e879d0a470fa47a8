"""The arguments of a train step: what of them is traced, what decides the program, and how the arrays get into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from bridge import storage
from bridge.backing import shortage
from bridge.containers import opened
from bridge.dlpack import host_view, to_jax

OWNER = "JaxTrainStep"
_STATIC = (bool, int, str, bytes, type(None), torch.dtype, torch.device)


class _Static:
    """Marks what decides the program by its value."""


class Batch:
    """The arguments of one call, flat.

    arrays: the traced ones as a program takes them: tensors on the CPU as views by numpy, which cost the least; floats as
    `real`. signature: all else; equal ones have one program. Ints, bools and strings are no arrays: they decide shapes and
    branches, so each value has its own program. A mapping that is no dict (UserDict, BatchEncoding) reaches loss_fn as one of its type.
    """

    def __init__(self, batch: Sequence[Any], device: torch.device, real: type[np.floating[Any]] = np.float32) -> None:
        leaves, self.tree = jax.tree.flatten(batch)
        self.arrays: list[Any] = []
        kinds = []
        for position, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                kinds.append((torch.Tensor, x.shape, x.dtype))
                self.arrays.append(_operand(x, device, position))
            elif isinstance(x, float):
                kinds.append((float,))
                self.arrays.append(real(x))
            elif isinstance(x, jax.Array | np.ndarray | np.generic):
                kinds.append((jax.Array, x.shape, str(x.dtype)))
                self.arrays.append(_checked(x, position))
            elif isinstance(x, _STATIC):
                kinds.append((_Static, x, type(x)))
            elif isinstance(x, Mapping):
                inner = Batch(opened(batch), device, real)
                self.arrays, self.tree, self.signature = inner.arrays, inner.tree, inner.signature
                return
            else:
                raise TypeError(
                    f"{OWNER}: item {position} of the batch is a {type(x).__name__}; expected tensors, arrays, numbers, strings, or lists, "
                    "tuples and mappings of them. Convert it before the call."
                )
        self.signature = self.tree, tuple(kinds)

    def rebuilt(self, traced: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with traced arrays in their places."""
        rest = iter(traced)
        _, kinds = self.signature
        return self.tree.unflatten([kind[1] if kind[0] is _Static else next(rest) for kind in kinds])


def _checked(x: Any, position: int) -> Any:
    if isinstance(x, Tracer):
        raise ValueError(f"{OWNER}: item {position} of the batch is a tracer ({x.aval}). Call the train step outside jit, grad and vmap.")
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(
            f"{OWNER}: item {position} of the batch was donated or deleted and has no memory. Keep the result, or pass a copy."
        )
    return x.copy() if isinstance(x, jax.Array | np.ndarray) and storage.shares_memory(x) else x  # else as in _operand


def _operand(x: torch.Tensor, device: torch.device, position: int) -> Any:
    if x.requires_grad or x.device != device or x.layout is not torch.strided:
        raise ValueError(f"{OWNER}: item {position} of the batch, of shape {tuple(x.shape)}, {_unfit(x, device)}")
    if why := shortage(x):
        raise ValueError(f"{OWNER}: item {position} of the batch, of shape {tuple(x.shape)}, cannot be read: {why}. Nothing was updated.")
    if storage.shares_memory(x):  # else the program would read what it writes
        x = x.clone()
    return to_jax(x, copy=None) if device.type != "cpu" else host_view(x)


def _unfit(x: torch.Tensor, device: torch.device) -> str:
    if x.requires_grad:
        return "requires grad, but the program gives gradients to the optimizer's parameters alone. Pass tensor.detach()."
    if x.device != device:
        return f"is on {x.device}, the module on {device}. Move it there first: tensor.to({str(device)!r})."
    return f"has layout {x.layout}; expected torch.strided. Convert it with to_dense()."
