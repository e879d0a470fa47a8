"""DTensor parameters (FSDP2, tensor parallelism): what this process holds of a parameter, gradient or state, and back.

An update acts on the local tensors; the state shows DTensors that lie as the parameter does, as torch's own optimizers
make them by `zeros_like`, so that torch.distributed.checkpoint saves and reshards them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Local tensors are updated by a copy: FSDP gathers from a padded buffer that the local tensor is a view of.
WHY_COPY = "a DTensor's local part, which FSDP may look into"


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """How a DTensor lies on its mesh; None for any other tensor."""
    return None if type(tensor) in _PLAIN or not _is_distributed(tensor) else Layout(tensor)


def _is_distributed(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it; it is slow to import
    return module is not None and isinstance(tensor, module.DTensor)


class Layout:
    """Mesh, placements and whole shape of a DTensor parameter, and so of its gradient and of its state."""

    __slots__ = ("mesh", "placements", "shape", "stride")

    def __init__(self, tensor: Any) -> None:
        self.mesh, self.placements = tensor.device_mesh, tuple(tensor.placements)
        self.shape, self.stride = tensor.shape, tensor.stride()

    @property
    def sharded(self) -> bool:
        """Whether no process holds all of it."""
        return any(not placement.is_replicate() and self.mesh.size(dim) > 1 for dim, placement in enumerate(self.placements))

    def local(self, tensor: Any) -> torch.Tensor:
        """What this process holds of a DTensor; one that lies otherwise is brought here first, by a collective of all processes."""
        with torch.no_grad():
            if tuple(tensor.placements) != self.placements:
                tensor = tensor.redistribute(placements=self.placements)
            local = tensor.to_local()
            return local.wait() if hasattr(local, "wait") else local  # an AsyncCollectiveTensor

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """This process's part of a gradient; a plain tensor is one already."""
        return self.local(grad) if _is_distributed(grad) else grad

    def part(self, value: Any) -> Any:
        """What this process holds of saved state: of a DTensor, or of a tensor of the whole shape; all else as it is."""
        if _is_distributed(value):
            return self.local(value)
        return self.cut(value) if isinstance(value, torch.Tensor) and value.shape == self.shape else value

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the whole shape that lies where the parameter's local tensor does."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:  # a process outside the mesh
            return whole.new_empty(0)
        for dim, placement in enumerate(self.placements):
            if placement.is_replicate():
                continue
            if type(placement).__name__ != "Shard":
                raise ValueError(
                    f"a tensor of the whole shape {tuple(self.shape)} cannot be cut for the placements {self.placements}. Give a DTensor "
                    "that lies so: torch.distributed.tensor.distribute_tensor(tensor, param.device_mesh, param.placements)."
                )
            chunks = whole.chunk(self.mesh.size(dim), placement.dim)
            position = coordinate[dim]
            whole = chunks[position] if position < len(chunks) else whole.narrow(placement.dim, 0, 0)
        return whole

    def distributed(self, local: torch.Tensor) -> Any:
        """The DTensor, lying as the parameter, whose local tensor is over the memory of `local`."""
        made: Any = sys.modules["torch.distributed.tensor"].DTensor
        return made.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)

    def held(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The state of the parameter with this process's part of each tensor."""
        return {key: self.part(value) for key, value in state.items()}


def described(param: Any, name: str) -> str:
    """A sharded parameter for an error text."""
    return f"parameter {name!r} of shape {tuple(param.shape)} is sharded over processes as {tuple(param.placements)}"
