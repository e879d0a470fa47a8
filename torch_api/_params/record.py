"""The record of each parameter: mask decision, memory and state; and checks of parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
import torch

from bridge._compiler.spec import Spec
from bridge._interop.dlpack import with_memory
from bridge._interop.tensor_storage import first_short, shortage
from bridge._memory import adoption, jax_buffers
from bridge._memory.jax_buffers import lost_like
from bridge._memory.overlaps import first_overlap
from bridge._transforms import selectors
from torch_api._rules.optimizer_spec import Rule
from torch_api._rules.types import ParamGroup, ParamState

from . import sharding
from .param_groups import check_parameter, check_parameter_fits

# Pairs of a tensor that the user put into `optimizer.state` and that cannot move, and the view that is updated instead of it.
Mirrors: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
# What the selectors decided of a parameter: trained, decided_by, element_mask, decay, label, lr_scale. Pickled with the optimizer.
Decided: TypeAlias = tuple[bool, str, np.ndarray | None, selectors.Decision, Hashable, float]


class Leaf:
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
        "address", "apart", "decay", "device", "dtype", "elements", "fields", "gradient_dtype", "group", "ignores_mask", "label", "layout",
        "local", "lr_scale", "memory", "mirrors", "name", "order", "param", "row", "rule", "scalars", "seen", "shape", "shown", "slot",
        "spare", "spec", "state", "strides", "trained", "views", "why",
    )  # fmt: skip

    def __init__(self, name: str, param: torch.Tensor, group: int) -> None:
        self.name, self.param, self.group = name, param, group
        self.trained, self.rule = True, "mask=None"
        self.ignores_mask = False  # whether flags of its group replace the constructor's mask
        self.elements: np.ndarray | None = None  # a boolean mask of the local tensor's shape; None: all elements
        self.decay = selectors.Decision(True, "decay_mask=None")
        self.label: Hashable = None
        self.lr_scale = 1.0
        self.row = 0
        self.spec: Spec | None = None
        self.memory: jax_buffers.Memory | None = None
        self.slot: int | None = None
        self.apart = False  # whether it keeps a buffer of its own because its bucket was dissolved
        self.order: tuple[int, ...] | None = None
        self.address: int | None = None  # the last known data_ptr; None before adoption
        self.why = "from the first step on"
        self.state: tuple[jax_buffers.Memory, ...] | None = None
        self.scalars: dict[str, torch.Tensor] = {}  # in the memory of `bridge._memory.scalar_vectors`
        self.spare: dict[str, torch.Tensor] = {}  # tensors that are reserved for scalar state and not yet in use
        self.fields: tuple[str, ...] = ()
        self.shown: tuple[torch.Tensor, ...] = ()
        self.views: tuple[torch.Tensor, ...] = ()
        self.seen: list[int] = []  # the addresses of `local_state` after the last update
        self.dtype = self.gradient_dtype = param.dtype
        self.mirrors: Mirrors = []
        self.look()

    def decide(self, decision: selectors.Decision) -> None:
        """Combine the decision of one more mask. An element is trained if all masks train it; `decided_by` is the one that froze it."""
        if not self.trained:
            return
        value, rule = decision
        if isinstance(value, np.ndarray):
            value = value if self.layout is None else self.layout.cut(torch.from_numpy(value)).numpy()
            self.elements = value if self.elements is None else self.elements & value
            self.rule = rule
        elif not value or self.rule == "mask=None":
            self.trained, self.rule = bool(value), rule

    def place(self, writeback: str, alone: bool = False, ahead: adoption.Ahead | None = None) -> None:
        """Move the parameter into a jax-owned buffer, or set `copy_reason`. Called at construction and after `p.data` has changed.

        Args:
          writeback: the optimizer's option "inplace" or "copy".
          own_buffer: do not share a buffer with other parameters.
          prefetcher: where the copy of the parameter may already be in progress.
        """
        self.look()
        back = None if self.memory is None or self.slot is None else (self.memory, self.slot)
        placement = adoption.place(self.local, writeback if self.layout is None else "copy", alone=alone, back=back, ahead=ahead)
        self.memory, self.order, why, self.slot = placement
        self.why = why if self.layout is None else sharding.WHY_COPY
        self.address = None if shortage(self.local) else self.local.data_ptr()  # None: the next step adopts it again, or raises

    def look(self) -> None:
        """Read shape, dtype, device, strides and DTensor layout from the parameter."""
        self.layout = sharding.layout_of(self.param)
        p = self.local = self.param if self.layout is None else self.layout.local(self.param)
        if p.dtype is not self.dtype or self.address is None:
            declared = getattr(self.param, "grad_dtype", None) if self.param.is_leaf else None
            self.gradient_dtype = declared if declared is not None and _are_combined(p.dtype, declared) else p.dtype
        self.shape, self.dtype, self.device = p.shape, p.dtype, p.device
        self.strides = p.stride() if p.layout is torch.strided else ()  # a frozen parameter may be sparse

    def takes(self, grad: torch.Tensor) -> bool:
        """Return whether a dense gradient fits the parameter. Its dtype may differ from `grad_dtype`."""
        return grad.shape == self.shape and grad.device == self.device and _are_combined(self.dtype, grad.dtype)

    @property
    def alone(self) -> bool:
        """Whether no other parameter is in its buffer. The buffer may be a padded row, longer than the parameter."""
        return self.slot is None or (self.memory is not None and len(self.memory.rows) == 1)

    @property
    def decided(self) -> Decided:
        """All decisions of selectors about the parameter."""
        return self.trained, self.rule, self.elements, self.decay, self.label, self.lr_scale

    @decided.setter
    def decided(self, decided: Decided) -> None:
        self.trained, self.rule, self.elements, self.decay, self.label, self.lr_scale = decided

    @classmethod
    def restored(cls, name: str, param: torch.Tensor, group: int, decided: Decided) -> Leaf:
        """Return a record with decisions made before: in a copied optimizer, or about a parameter that this one replaces.

        An element mask of another shape is dropped.
        """
        leaf = cls(name, param, group)
        leaf.decided = decided
        leaf.elements = leaf.elements if leaf.elements is not None and leaf.elements.shape == tuple(leaf.shape) else None
        return leaf

    def follow(self) -> None:
        """Point the tensors of parameter and state at their buffers after results have moved. Tensors over a bucket's rows move with it."""
        if self.memory is not None:
            memory = jax_buffers.renewed(self.memory)
            if self.slot is None:
                self.param.data = memory.tensor(self.device, like=self.param)
            self.address = self.param.data_ptr()
        self.state = None if self.state is None else tuple(map(jax_buffers.renewed, self.state))
        for memory, view in self._looking() if self.slot is None else ():
            view.data = memory.tensor(self.device, like=view)
        self.seen = [view.data_ptr() for view in self.views]

    def forget(self) -> None:
        """Forget the state buffers, so that the next update reads the parameter's entry of `optimizer.state` again."""
        self.state, self.fields, self.shown, self.views, self.seen, self.mirrors = None, (), (), (), [], []

    def salvage(self) -> bool:
        """Allocate memory for parameter and state if a failed call has donated theirs, and return whether values are lost."""
        lost = self.memory is not None and self.memory.is_gone
        if lost:
            self.param.data = torch.full_like(self.param, torch.nan)
        for memory, view in self._looking():
            if memory.is_gone:
                view.data = lost_like(view)
                lost = True
        return lost

    def _looking(self) -> Iterator[tuple[jax_buffers.Memory, torch.Tensor]]:
        """Yield each buffer of the parameter's own state with the tensor that aliases it. Hidden state has no tensor."""
        views = [view for name, view in zip(self.fields, self.views, strict=True) if name not in self.scalars]
        return zip(self.state or (), views, strict=False)  # `strict` is off because the tensors of shared state follow

    @property
    def signature(self) -> tuple[object, ...] | None:
        """What a bound executable depends on: buffer or address, shape, strides, dtype, device. None before adoption."""
        if self.address is None:
            return None
        held = None if self.layout is None else self.address  # a bound executable holds the local tensor
        where = self.memory is None if self.slot is None else (id(self.memory), self.slot)
        return where, self.order, self.shape, self.strides, self.dtype, self.device, held

    def held(self, state: ParamState) -> ParamState:
        """Return the state of the parameter with local tensors in place of DTensors."""
        return state if self.layout is None else self.layout.held(state)

    @property
    def buffer_shape(self) -> tuple[int]:
        return (self.shape.numel(),)


def check_leaves(
    owner: str, leaves: Iterable[Leaf], rule_of: Callable[[ParamGroup], Rule], param_groups: Sequence[ParamGroup], thawed: bool = False
) -> None:
    """Raise for a trained parameter that cannot be written to, or that its `OptimizerSpec` does not accept.

    Args:
      is_unfreezing: also check parameters that are frozen now.
    """
    for leaf in leaves:
        group = param_groups[leaf.group]
        is_trained = leaf.trained and group.get("trainable", True) and leaf.param.requires_grad
        if is_trained or thawed:
            check_parameter(owner, leaf.name, leaf.param)
        if is_trained or (thawed and leaf.param.requires_grad):
            check_parameter_fits(rule_of(group), leaf.name, leaf.param)


def followed(leaves: Sequence[Leaf], names: Sequence[str], param_groups: Sequence[ParamGroup]) -> tuple[list[Leaf], list[Leaf]]:
    """Return the records that match `param_groups`, which the user may have edited: parameters or groups added, moved, replaced, removed.

    A new parameter with the name of a removed one takes over its decisions. Nothing is checked.

    Returns:
      All records, and the ones among them that have no decision yet.
    """
    known = {id(leaf.param): leaf for leaf in leaves}
    params = [(index, p) for index, group in enumerate(param_groups) for p in group["params"]]
    present = {id(p) for _, p in params}
    gone = {leaf.name: leaf for leaf in leaves if id(leaf.param) not in present}
    result: list[Leaf] = []
    new: list[Leaf] = []
    for name, (index, p) in zip(names, params, strict=True):
        leaf = known.get(id(p))
        if leaf is None and name in gone:
            leaf = Leaf.restored(name, p, index, gone[name].decided)
        elif leaf is None:
            leaf = Leaf(name, p, index)
            new.append(leaf)
        leaf.group = index
        result.append(leaf)
    return result, new


def check_devices(owner: str, devices: Iterable[torch.device], clip: bool, together: bool) -> None:
    """Raise for parameters on several devices that one program must see: to clip one norm, or as one joint set (`is_joint`)."""
    listed = ", ".join(map(str, devices))
    if clip:
        raise ValueError(
            f"{owner}: max_grad_norm needs one norm over all parameters, but they are on {listed}. "
            "Clip with torch.nn.utils.clip_grad_norm_ instead."
        )
    if together:
        raise ValueError(
            f"{owner}: this transformation needs all its parameters in one program, but they are on {listed}. "
            "Use PartitionedOptimizer with a label for each device."
        )


def check_norm(owner: str, bound: float | None, leaves: Iterable[Leaf]) -> None:
    """Raise if `max_grad_norm` is set and a parameter is sharded: this process cannot compute the global norm."""
    sharded = next((leaf for leaf in leaves if leaf.layout is not None and leaf.layout.sharded and leaf.param.requires_grad), None)
    if bound is not None and sharded is not None:
        raise ValueError(
            f"{owner}: max_grad_norm is {bound}, but {sharding.described(sharded.param, sharded.name)}, and the norm over all of them "
            f"needs "
            "communication. Give max_grad_norm=None, and call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) before step()."
        )


# The dtypes that are computed in float32. Gradient and parameter may have different ones of them (torch's `p.grad_dtype`).
_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


def _are_combined(dtype: torch.dtype, gradient_dtype: torch.dtype) -> bool:
    return dtype is gradient_dtype or (dtype in _IN_FLOAT32 and gradient_dtype in _IN_FLOAT32)


def bad_gradient(owner: str, leaf: Leaf, grad: torch.Tensor) -> str:
    """Return the error text for a gradient that does not fit its parameter."""
    title = f"{owner}: the gradient of {leaf.name!r}"
    if grad.layout is not torch.strided:
        return (
            f"{title} is sparse ({grad.layout}); expected a dense one. Use sparse=False in the embedding, or torch.optim.SparseAdam for it."
        )
    if why := shortage(grad):
        return (
            f"{title}, of shape {tuple(grad.shape)}, cannot be read: {why}. Nothing was updated: give it a gradient whose storage is "
            "whole, or set it to None."
        )
    part = "" if leaf.layout is None else f" here, a part of {tuple(leaf.param.shape)}: expected a DTensor"
    return (
        f"{title} has shape {tuple(grad.shape)}, dtype {grad.dtype} on {grad.device}; the parameter has shape {tuple(leaf.shape)}{part}, "
        f"dtype {leaf.dtype} on {leaf.device}. Nothing was updated: give it a gradient that fits, or set it to None."
    )


def check_apart(owner: str, leaves: Iterable[Leaf]) -> None:
    """Raise if trained parameters overlap in memory, or one overlaps itself: one of two updates of an element would be lost."""
    trained = [leaf for leaf in leaves if leaf.param.requires_grad]
    found = first_overlap([leaf.local for leaf in trained])
    if found is None:
        return
    first, second = trained[found[0]], trained[found[1]]
    if first is second:
        raise ValueError(
            f"parameter {first.name!r} overlaps itself in memory: with shape {tuple(first.shape)} and strides {first.strides} several "
            "elements have one address, and no update can be written to them. Pass param.clone()."
        )
    raise ValueError(
        f"{owner}: parameters {first.name!r} and {second.name!r} share memory. Use one Parameter object in both places, or "
        "give each its own memory: param.data = param.data.clone()."
    )


def with_elements(owner: str, leaves: Sequence[Leaf], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients, with copies of those that have no elements at `data_ptr()`: tensor subclasses that wrap other tensors.

    Raises:
      ValueError: a gradient cannot be read. The text names its parameter.
    """
    short = first_short(grads)
    if short is not None:
        raise ValueError(bad_gradient(owner, leaves[short], grads[short]))
    if all(grad.data_ptr() or not grad.numel() for grad in grads):
        return grads
    return list(map(_copied, repeat(owner), leaves, grads))


def _copied(owner: str, leaf: Leaf, grad: torch.Tensor) -> torch.Tensor:
    try:
        return with_memory(grad)
    except ValueError as error:
        raise ValueError(f"{owner}: the gradient of {leaf.name!r} cannot be read: {error} Nothing was updated.") from error


def check_whole(owner: str, leaf: Leaf) -> None:
    """Raise for a parameter whose storage is missing or too small."""
    if why := shortage(leaf.local):
        raise ValueError(
            f"{owner}: parameter {leaf.name!r} has a gradient, but cannot be updated: {why}. Nothing was updated: give its storage back "
            "before step(), or set param.grad to None."
        )
