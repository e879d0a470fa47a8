"""The record of each parameter: mask decision, memory and state; and checks of parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
import torch

from bridge._compiler.spec import LeafSpec
from bridge._interop.dlpack import with_dense_storage
from bridge._interop.tensor_storage import first_unreadable, why_unreadable
from bridge._memory import adoption, jax_buffers
from bridge._memory.jax_buffers import lost_like
from bridge._memory.overlaps import first_overlap
from bridge._transforms import selectors
from torch_api._rules.optimizer_spec import OptimizerSpec
from torch_api._rules.types import ParamGroup, ParamState

from . import sharding
from .param_groups import check_parameter, check_parameter_fits

# Pairs of a tensor that the user put into `optimizer.state` and that cannot move, and the view that is updated instead of it.
Mirrors: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
# What the selectors decided of a parameter: trained, decided_by, element_mask, decay, label, lr_scale. Pickled with the optimizer.
ParamDecision: TypeAlias = tuple[bool, str, np.ndarray | None, selectors.Decision, Hashable, float]


class ParamRecord:
    """One torch parameter: what masks decided of it, and where its bytes, its state and its hyperparameters are.

    trained, decided_by: whether some element is trained, and the selector that decided it.
    decay, label, lr_scale: the other decisions of selectors.
    group_index: the index of its param group. hyperparam_row: its row in the `HyperparamTable`.
    spec: the `LeafSpec` by which its transformation sees it; None without one.
    local_tensor: the tensor that is updated: the parameter, or the local tensor of a DTensor, whose mesh is in `dtensor_layout`.
    jax_buffer: the jax-owned buffer that the parameter aliases; None if results are copied into torch memory, for `copy_reason`.
    bucket_row: its row, if the buffer is a bucket. dim_order: the order of its dimensions in memory; None for row-major.
    state_buffers: the buffers of its state. scalar_state: the 0-d fields of a parameter outside buckets, which have no buffer of their own.
    state_names, state_tensors: the entries of `optimizer.state` for it. local_state: their local tensors, which alias the buffers.
    mirrors: the state tensors that cannot move.
    """

    __slots__ = (
        "address",
        "bucket_row",
        "copy_reason",
        "decay",
        "decided_by",
        "device",
        "dim_order",
        "dtensor_layout",
        "dtype",
        "element_mask",
        "grad_dtype",
        "group_index",
        "hyperparam_row",
        "ignores_mask",
        "jax_buffer",
        "label",
        "left_bucket",
        "local_state",
        "local_tensor",
        "lr_scale",
        "mirrors",
        "name",
        "param",
        "reserved_scalars",
        "scalar_state",
        "shape",
        "spec",
        "state_addresses",
        "state_buffers",
        "state_names",
        "state_tensors",
        "strides",
        "trained",
    )  # fmt: skip

    def __init__(self, name: str, param: torch.Tensor, group_index: int) -> None:
        self.name, self.param, self.group_index = name, param, group_index
        self.trained, self.decided_by = True, "mask=None"
        self.ignores_mask = False  # whether flags of its group replace the constructor's mask
        self.element_mask: np.ndarray | None = None  # a boolean mask of the local tensor's shape; None: all elements
        self.decay = selectors.Decision(True, "decay_mask=None")
        self.label: Hashable = None
        self.lr_scale = 1.0
        self.hyperparam_row = 0
        self.spec: LeafSpec | None = None
        self.jax_buffer: jax_buffers.JaxBuffer | None = None
        self.bucket_row: int | None = None
        self.left_bucket = False  # whether it keeps a buffer of its own because its bucket was dissolved
        self.dim_order: tuple[int, ...] | None = None
        self.address: int | None = None  # the last known data_ptr; None before adoption
        self.copy_reason = "from the first step on"
        self.state_buffers: tuple[jax_buffers.JaxBuffer, ...] | None = None
        self.scalar_state: dict[str, torch.Tensor] = {}  # in the memory of `bridge._memory.scalar_vectors`
        self.reserved_scalars: dict[str, torch.Tensor] = {}  # tensors that are reserved for scalar state and not yet in use
        self.state_names: tuple[str, ...] = ()
        self.state_tensors: tuple[torch.Tensor, ...] = ()
        self.local_state: tuple[torch.Tensor, ...] = ()
        self.state_addresses: list[int] = []  # the addresses of `local_state` after the last update
        self.dtype = self.grad_dtype = param.dtype
        self.mirrors: Mirrors = []
        self.refresh_metadata()

    def apply_decision(self, decision: selectors.Decision) -> None:
        """Combine the decision of one more mask. An element is trained if all masks train it; `decided_by` is the one that froze it."""
        if not self.trained:
            return
        value, rule = decision
        if isinstance(value, np.ndarray):
            value = value if self.dtensor_layout is None else self.dtensor_layout.local_slice(torch.from_numpy(value)).numpy()
            self.element_mask = value if self.element_mask is None else self.element_mask & value
            self.decided_by = rule
        elif not value or self.decided_by == "mask=None":
            self.trained, self.decided_by = bool(value), rule

    def adopt(self, writeback: str, own_buffer: bool = False, prefetcher: adoption.CopyPrefetcher | None = None) -> None:
        """Move the parameter into a jax-owned buffer, or set `copy_reason`. Called at construction and after `p.data` has changed.

        Args:
          writeback: the optimizer's option "inplace" or "copy".
          own_buffer: do not share a buffer with other parameters.
          prefetcher: where the copy of the parameter may already be in progress.
        """
        self.refresh_metadata()
        previous_row = None if self.jax_buffer is None or self.bucket_row is None else (self.jax_buffer, self.bucket_row)
        placement = adoption.adopt(
            self.local_tensor,
            writeback if self.dtensor_layout is None else "copy",
            needs_own_buffer=own_buffer,
            previous_row=previous_row,
            prefetcher=prefetcher,
        )
        self.jax_buffer, self.dim_order, why, self.bucket_row = placement
        self.copy_reason = why if self.dtensor_layout is None else sharding.COPY_REASON
        self.address = (
            None if why_unreadable(self.local_tensor) else self.local_tensor.data_ptr()
        )  # None: the next step adopts it again, or raises

    def refresh_metadata(self) -> None:
        """Read shape, dtype, device, strides and DTensor layout from the parameter."""
        self.dtensor_layout = sharding.dtensor_layout_of(self.param)
        p = self.local_tensor = self.param if self.dtensor_layout is None else self.dtensor_layout.to_local(self.param)
        if p.dtype is not self.dtype or self.address is None:
            declared = getattr(self.param, "grad_dtype", None) if self.param.is_leaf else None
            self.grad_dtype = declared if declared is not None and _can_combine_dtypes(p.dtype, declared) else p.dtype
        self.shape, self.dtype, self.device = p.shape, p.dtype, p.device
        self.strides = p.stride() if p.layout is torch.strided else ()  # a frozen parameter may be sparse

    def accepts_grad(self, grad: torch.Tensor) -> bool:
        """Return whether a dense gradient fits the parameter. Its dtype may differ from `grad_dtype`."""
        return grad.shape == self.shape and grad.device == self.device and _can_combine_dtypes(self.dtype, grad.dtype)

    @property
    def has_own_buffer(self) -> bool:
        """Whether no other parameter is in its buffer. The buffer may be a padded row, longer than the parameter."""
        return self.bucket_row is None or (self.jax_buffer is not None and len(self.jax_buffer.rows) == 1)

    @property
    def decision(self) -> ParamDecision:
        """All decisions of selectors about the parameter."""
        return self.trained, self.decided_by, self.element_mask, self.decay, self.label, self.lr_scale

    @decision.setter
    def decision(self, decided: ParamDecision) -> None:
        self.trained, self.decided_by, self.element_mask, self.decay, self.label, self.lr_scale = decided

    @classmethod
    def from_decision(cls, name: str, param: torch.Tensor, group_index: int, decided: ParamDecision) -> ParamRecord:
        """Return a record with decisions made before: in a copied optimizer, or about a parameter that this one replaces.

        An element mask of another shape is dropped.
        """
        leaf = cls(name, param, group_index)
        leaf.decision = decided
        leaf.element_mask = leaf.element_mask if leaf.element_mask is not None and leaf.element_mask.shape == tuple(leaf.shape) else None
        return leaf

    def rebind(self) -> None:
        """Point the tensors of parameter and state at their buffers after results have moved. Tensors over a bucket's rows move with it."""
        if self.jax_buffer is not None:
            memory = jax_buffers.rebind_moved(self.jax_buffer)
            if self.bucket_row is None:
                self.param.data = memory.alias_tensor(self.device, like=self.param)
            self.address = self.param.data_ptr()
        self.state_buffers = None if self.state_buffers is None else tuple(map(jax_buffers.rebind_moved, self.state_buffers))
        for memory, view in self._aliased_state() if self.bucket_row is None else ():
            view.data = memory.alias_tensor(self.device, like=view)
        self.state_addresses = [view.data_ptr() for view in self.local_state]

    def drop_state(self) -> None:
        """Forget the state buffers, so that the next update reads the parameter's entry of `optimizer.state` again."""
        self.state_buffers, self.state_names, self.state_tensors, self.local_state, self.state_addresses, self.mirrors = (
            None,
            (),
            (),
            (),
            [],
            [],
        )

    def recover_after_failure(self) -> bool:
        """Allocate memory for parameter and state if a failed call has donated theirs, and return whether values are lost."""
        lost = self.jax_buffer is not None and self.jax_buffer.is_lost
        if lost:
            self.param.data = torch.full_like(self.param, torch.nan)
        for memory, view in self._aliased_state():
            if memory.is_lost:
                view.data = lost_like(view)
                lost = True
        return lost

    def _aliased_state(self) -> Iterator[tuple[jax_buffers.JaxBuffer, torch.Tensor]]:
        """Yield each buffer of the parameter's own state with the tensor that aliases it. Hidden state has no tensor."""
        views = [view for name, view in zip(self.state_names, self.local_state, strict=True) if name not in self.scalar_state]
        return zip(self.state_buffers or (), views, strict=False)  # `strict` is off because the tensors of shared state follow

    @property
    def placement_signature(self) -> tuple[object, ...] | None:
        """What a bound executable depends on: buffer or address, shape, strides, dtype, device. None before adoption."""
        if self.address is None:
            return None
        local_address = None if self.dtensor_layout is None else self.address  # a bound executable holds the local tensor
        where = self.jax_buffer is None if self.bucket_row is None else (id(self.jax_buffer), self.bucket_row)
        return where, self.dim_order, self.shape, self.strides, self.dtype, self.device, local_address

    def local_values(self, state: ParamState) -> ParamState:
        """Return the state of the parameter with local tensors in place of DTensors."""
        return state if self.dtensor_layout is None else self.dtensor_layout.local_state(state)

    @property
    def buffer_shape(self) -> tuple[int]:
        return (self.shape.numel(),)


def check_records(
    cls_name: str,
    leaves: Iterable[ParamRecord],
    spec_of_group: Callable[[ParamGroup], OptimizerSpec],
    param_groups: Sequence[ParamGroup],
    is_unfreezing: bool = False,
) -> None:
    """Raise for a trained parameter that cannot be written to, or that its `OptimizerSpec` does not accept.

    Args:
      is_unfreezing: also check parameters that are frozen now.
    """
    for leaf in leaves:
        group = param_groups[leaf.group_index]
        is_trained = leaf.trained and group.get("trainable", True) and leaf.param.requires_grad
        if is_trained or is_unfreezing:
            check_parameter(cls_name, leaf.name, leaf.param)
        if is_trained or (is_unfreezing and leaf.param.requires_grad):
            check_parameter_fits(spec_of_group(group), leaf.name, leaf.param)


def reconcile_records(
    leaves: Sequence[ParamRecord], names: Sequence[str], param_groups: Sequence[ParamGroup]
) -> tuple[list[ParamRecord], list[ParamRecord]]:
    """Return the records that match `param_groups`, which the user may have edited: parameters or groups added, moved, replaced, removed.

    A new parameter with the name of a removed one takes over its decisions. Nothing is checked.

    Returns:
      All records, and the ones among them that have no decision yet.
    """
    known = {id(leaf.param): leaf for leaf in leaves}
    params = [(index, p) for index, group in enumerate(param_groups) for p in group["params"]]
    present = {id(p) for _, p in params}
    gone = {leaf.name: leaf for leaf in leaves if id(leaf.param) not in present}
    result: list[ParamRecord] = []
    new: list[ParamRecord] = []
    for name, (index, p) in zip(names, params, strict=True):
        leaf = known.get(id(p))
        if leaf is None and name in gone:
            leaf = ParamRecord.from_decision(name, p, index, gone[name].decision)
        elif leaf is None:
            leaf = ParamRecord(name, p, index)
            new.append(leaf)
        leaf.group_index = index
        result.append(leaf)
    return result, new


def check_devices(cls_name: str, devices: Iterable[torch.device], clip: bool, is_joint: bool) -> None:
    """Raise for parameters on several devices that one program must see: to clip one norm, or as one joint set (`is_joint`)."""
    listed = ", ".join(map(str, devices))
    if clip:
        raise ValueError(
            f"{cls_name}: max_grad_norm needs one norm over all parameters, but they are on {listed}. "
            "Clip with torch.nn.utils.clip_grad_norm_ instead."
        )
    if is_joint:
        raise ValueError(
            f"{cls_name}: this transformation needs all its parameters in one program, but they are on {listed}. "
            "Use PartitionedOptimizer with a label for each device."
        )


# The dtypes that are computed in float32. Gradient and parameter may have different ones of them (torch's `p.grad_dtype`).
_FLOAT32_COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _can_combine_dtypes(dtype: torch.dtype, gradient_dtype: torch.dtype) -> bool:
    return dtype is gradient_dtype or (dtype in _FLOAT32_COMPUTE_DTYPES and gradient_dtype in _FLOAT32_COMPUTE_DTYPES)


def grad_error_text(cls_name: str, leaf: ParamRecord, grad: torch.Tensor) -> str:
    """Return the error text for a gradient that does not fit its parameter."""
    title = f"{cls_name}: the gradient of {leaf.name!r}"
    if grad.layout is not torch.strided:
        return (
            f"{title} is sparse ({grad.layout}); expected a dense one. Use sparse=False in the embedding, or torch.optim.SparseAdam for it."
        )
    if why := why_unreadable(grad):
        return (
            f"{title}, of shape {tuple(grad.shape)}, cannot be read: {why}. Nothing was updated: give it a gradient whose storage is "
            "whole, or set it to None."
        )
    part = "" if leaf.dtensor_layout is None else f" here, a part of {tuple(leaf.param.shape)}: expected a DTensor"
    return (
        f"{title} has shape {tuple(grad.shape)}, dtype {grad.dtype} on {grad.device}; the parameter has shape {tuple(leaf.shape)}{part}, "
        f"dtype {leaf.dtype} on {leaf.device}. Nothing was updated: give it a gradient that fits, or set it to None."
    )


def check_no_overlap(cls_name: str, leaves: Iterable[ParamRecord]) -> None:
    """Raise if trained parameters overlap in memory, or one overlaps itself: one of two updates of an element would be lost."""
    trained = [leaf for leaf in leaves if leaf.param.requires_grad]
    found = first_overlap([leaf.local_tensor for leaf in trained])
    if found is None:
        return
    first, second = trained[found[0]], trained[found[1]]
    if first is second:
        raise ValueError(
            f"parameter {first.name!r} overlaps itself in memory: with shape {tuple(first.shape)} and strides {first.strides} several "
            "elements have one address, and no update can be written to them. Pass param.clone()."
        )
    raise ValueError(
        f"{cls_name}: parameters {first.name!r} and {second.name!r} share memory. Use one Parameter object in both places, or "
        "give each its own memory: param.data = param.data.clone()."
    )


def grads_with_dense_storage(cls_name: str, leaves: Sequence[ParamRecord], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients, with copies of those that have no elements at `data_ptr()`: tensor subclasses that wrap other tensors.

    Raises:
      ValueError: a gradient cannot be read. The text names its parameter.
    """
    short = first_unreadable(grads)
    if short is not None:
        raise ValueError(grad_error_text(cls_name, leaves[short], grads[short]))
    if all(grad.data_ptr() or not grad.numel() for grad in grads):
        return grads
    return list(map(_with_dense_storage, repeat(cls_name), leaves, grads))


def _with_dense_storage(cls_name: str, leaf: ParamRecord, grad: torch.Tensor) -> torch.Tensor:
    try:
        return with_dense_storage(grad)
    except ValueError as error:
        raise ValueError(f"{cls_name}: the gradient of {leaf.name!r} cannot be read: {error} Nothing was updated.") from error


def check_has_storage(cls_name: str, leaf: ParamRecord) -> None:
    """Raise for a parameter whose storage is missing or too small."""
    if why := why_unreadable(leaf.local_tensor):
        raise ValueError(
            f"{cls_name}: parameter {leaf.name!r} has a gradient, but cannot be updated: {why}. Nothing was updated: give its storage back "
            "before step(), or set param.grad to None."
        )
