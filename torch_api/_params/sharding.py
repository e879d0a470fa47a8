"""DTensor parameters (FSDP2, tensor parallelism): what this process holds of a parameter, gradient or state, and back.

An update acts on the local tensors; the state shows DTensors that lie as the parameter does, as torch's own optimizers
make them by `zeros_like`, so that torch.distributed.checkpoint saves and reshards them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

from torch_api._rules.types import MutableParamState, ParamState

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Local tensors are updated by a copy: FSDP gathers from a padded buffer that the local tensor is a view of.
WHY_COPY = "a DTensor's local part, which FSDP may look into"


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """How a DTensor lies on its mesh; None for any other tensor."""
    return None if type(tensor) in _PLAIN or not _is_distributed(tensor) else Layout(tensor)


def _is_distributed(tensor: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it; it is slow to import
    return module is not None and isinstance(tensor, module.DTensor)


class Layout:
    """Mesh, placements and whole shape of a DTensor parameter, and so of its gradient and of its state."""

    __slots__ = ("mesh", "placements", "shape", "stride")

    def __init__(self, tensor: DTensor) -> None:
        self.mesh, self.placements = tensor.device_mesh, tuple(tensor.placements)
        self.shape, self.stride = tensor.shape, tensor.stride()

    @property
    def sharded(self) -> bool:
        """Whether no process holds all of it."""
        return any(not placement.is_replicate() and self.mesh.size(dim) > 1 for dim, placement in enumerate(self.placements))

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this process holds of a DTensor; one that lies otherwise is brought here first, by a collective of all processes."""
        sharded = cast("DTensor", tensor)  # whose class is not imported here
        with torch.no_grad():
            if tuple(sharded.placements) != self.placements:
                sharded = sharded.redistribute(placements=self.placements)
            local = sharded.to_local()
            wait = getattr(local, "wait", None)
            return local if wait is None else wait()  # an AsyncCollectiveTensor

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """What this process holds of the gradient; a plain tensor, which backward never leaves, as it is."""
        return self.local(grad) if _is_distributed(grad) else grad

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the whole shape, which every process has, that lies where the parameter's local tensor does."""
        module = sys.modules["torch.distributed.tensor"]
        everywhere = [module.Replicate()] * self.mesh.ndim
        return self.local(module.DTensor.from_local(whole, self.mesh, everywhere, run_check=False))  # chunks, and says nothing to others

    def distributed(self, local: torch.Tensor) -> DTensor:
        """The DTensor, lying as the parameter, whose local tensor is over the memory of `local`."""
        made = sys.modules["torch.distributed.tensor"].DTensor
        return made.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)

    def held(self, state: ParamState) -> MutableParamState:
        """The state of the parameter, with what this process holds of each DTensor."""
        return {key: self.local(value) if _is_distributed(value) else value for key, value in state.items()}


def laid(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's whole shape as the DTensor that lies as the parameter does; any other tensor as it is."""
    layout = layout_of(param)
    if layout is None or _is_distributed(value) or value.shape != param.shape:
        return value
    return layout.distributed(layout.cut(value)) if value.is_floating_point() or value.is_complex() else value  # no rounding key


def described(param: torch.Tensor, name: str) -> str:
    """A sharded parameter for an error text."""
    placements = cast("DTensor", param).placements
    return f"parameter {name!r} of shape {tuple(param.shape)} is sharded over processes as {tuple(placements)}"
