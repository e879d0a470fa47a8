"""DTensor parameters (FSDP2, tensor parallelism): convert parameters, gradients and state to local tensors and back.

An update acts on local tensors. `optimizer.state` shows DTensors with the placements of the parameter, as torch's optimizers make them
by `zeros_like`, so that torch.distributed.checkpoint can save and reshard them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

from torch_api._rules.types import MutableParamState, ParamState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Results are copied into local tensors: a local tensor is a view of the padded buffer from which FSDP gathers.
COPY_REASON = "the local tensor of a DTensor, which FSDP may read"


def dtensor_layout_of(tensor: torch.Tensor) -> DTensorLayout | None:
    """Return the layout of a DTensor; None for any other tensor."""
    return None if type(tensor) in _PLAIN or not _is_distributed(tensor) else DTensorLayout(tensor)


def _is_distributed(tensor: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported where there is a DTensor
    return module is not None and isinstance(tensor, module.DTensor)


class DTensorLayout:
    """Mesh, placements, global shape and stride of a DTensor parameter. Its gradient and its state have the same."""

    __slots__ = ("mesh", "placements", "shape", "stride")

    def __init__(self, tensor: DTensor) -> None:
        self.mesh, self.placements = tensor.device_mesh, tuple(tensor.placements)
        self.shape, self.stride = tensor.shape, tensor.stride()

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole parameter."""
        return any(not placement.is_replicate() and self.mesh.size(dim) > 1 for dim, placement in enumerate(self.placements))

    @property
    def share(self) -> float:
        """The weight of a local element in a sum over all processes of the mesh: 1 divided by the number of processes that hold it."""
        copies = [self.mesh.size(dim) for dim, placement in enumerate(self.placements) if placement.is_replicate()]
        return 1 / math.prod(copies)

    def to_local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a DTensor. One with other placements is redistributed first, by a collective of all processes."""
        sharded = cast("DTensor", tensor)  # the class is not imported here
        with torch.no_grad():
            if tuple(sharded.placements) != self.placements:
                sharded = sharded.redistribute(placements=self.placements)
            local = sharded.to_local()
            wait = getattr(local, "wait", None)
            return local if wait is None else wait()  # an AsyncCollectiveTensor

    def local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a gradient; a plain tensor, which `backward` does not produce, as it is."""
        return self.to_local(grad) if _is_distributed(grad) else grad

    def local_slice(self, full_tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a full tensor that corresponds to the parameter's local tensor. Each process has the full tensor."""
        module = sys.modules["torch.distributed.tensor"]
        everywhere = [module.Replicate()] * self.mesh.ndim
        return self.to_local(module.DTensor.from_local(full_tensor, self.mesh, everywhere, run_check=False))  # no communication

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """Return a DTensor with the layout of the parameter. It aliases the local tensor."""
        made = sys.modules["torch.distributed.tensor"].DTensor
        return made.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)

    def local_state(self, state: ParamState) -> MutableParamState:
        """Return the state of the parameter with local tensors in place of DTensors."""
        return {key: self.to_local(value) if _is_distributed(value) else value for key, value in state.items()}


@dataclass(frozen=True)
class ShardGroups:
    """The device meshes of the sharded parameters of an optimizer, in the same order in each process.

    A sum over all parameters is a sum over all processes of each mesh. Each parameter counts in one of them.
    """

    meshes: Sequence[DeviceMesh] = ()

    @classmethod
    def of(cls, layouts: Iterable[DTensorLayout | None]) -> ShardGroups:
        """Return the groups of these parameters; none if no parameter is sharded."""
        meshes: list[DeviceMesh] = []
        for layout in layouts:
            if layout is not None and layout.is_sharded and layout.mesh not in meshes:
                meshes.append(layout.mesh)
        return cls(meshes)

    def weight(self, layout: DTensorLayout | None, mesh: DeviceMesh) -> float:
        """Return the weight of a parameter's local elements in the sum over a mesh; 0 if it counts in the sum over another.

        Each process of the first mesh holds all parameters that are not sharded.
        """
        if layout is not None and layout.mesh in self.meshes:
            return layout.share if layout.mesh == mesh else 0.0
        return 1 / mesh.size() if mesh == self.meshes[0] else 0.0


def sum_over_processes(values: torch.Tensor, mesh: DeviceMesh) -> None:
    """Replace values by their sum over all processes of a mesh. All of them must call this."""
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(values, group=mesh.get_group(dim))


def redistribute_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's global shape as a DTensor with the parameter's layout; any other tensor as it is."""
    layout = dtensor_layout_of(param)
    if layout is None or _is_distributed(value) or value.shape != param.shape:
        return value
    return layout.to_dtensor(layout.local_slice(value)) if value.is_floating_point() or value.is_complex() else value  # not a rounding key


def describe_sharding(param: torch.Tensor, name: str) -> str:
    """Describe a sharded parameter for an error text."""
    placements = cast("DTensor", param).placements
    return f"parameter {name!r} of shape {tuple(param.shape)} is sharded over processes as {tuple(placements)}"
