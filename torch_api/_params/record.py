"""Columns: what is decided of each parameter, where its bytes and its state are."""

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

# Tensors that the user has put into the state and that stay where they are, each with the view that is updated in its place.
Mirrors: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
# All that was decided of a parameter, as a pickled optimizer has it: trained, rule, elements, decay, label and lr_scale.
Decided: TypeAlias = tuple[bool, str, np.ndarray | None, selectors.Decision, Hashable, float]


class Leaf:
    """One parameter as the engine sees it: what was decided of it, and where its bytes are."""

    __slots__ = (
        "address", "apart", "decay", "device", "dtype", "elements", "fields", "gradient_dtype", "group", "ignores_mask", "label", "layout",
        "local", "lr_scale", "memory", "mirrors", "name", "order", "param", "row", "rule", "scalars", "seen", "shape", "shown", "slot",
        "spare", "spec", "state", "strides", "trained", "views", "why",
    )  # fmt: skip

    def __init__(self, name: str, param: torch.Tensor, group: int) -> None:
        self.name, self.param, self.group = name, param, group
        self.trained, self.rule = True, "mask=None"
        self.ignores_mask = False  # whether its group's own flags take the place of the constructor's mask
        self.elements: np.ndarray | None = None  # a boolean mask of the local tensor's shape
        self.decay = selectors.Decision(True, "decay_mask=None")
        self.label: Hashable = None
        self.lr_scale = 1.0
        self.row = 0
        self.spec: Spec | None = None  # how its transformation sees it
        self.memory: jax_buffers.Memory | None = None
        self.slot: int | None = None  # its row, where the memory is a pack
        self.apart = False  # whether it stays by itself, since its pack was dissolved
        self.order: tuple[int, ...] | None = None
        self.address: int | None = None  # where the bytes were last seen; None before placement
        self.why = "from the first step on"
        self.state: tuple[jax_buffers.Memory, ...] | None = None
        self.scalars: dict[
            str, torch.Tensor
        ] = {}  # of its state, where it is updated by itself: in no memory, but as of `bridge._memory.scalar_vectors`
        self.spare: dict[str, torch.Tensor] = {}  # tensors for these that nobody has seen yet
        self.fields: tuple[str, ...] = ()  # what optimizer.state shows of it, and the tensors there
        self.shown: tuple[torch.Tensor, ...] = ()
        self.views: tuple[torch.Tensor, ...] = ()  # their local tensors: themselves, unless they are DTensors
        self.seen: list[int] = []  # the addresses of these
        self.dtype = self.gradient_dtype = param.dtype
        self.mirrors: Mirrors = []
        self.look()

    def decide(self, decision: selectors.Decision) -> None:
        """Add a mask's decision; a leaf is trained where all agree, and the rule that froze it is the one to show."""
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
        """Move the parameter into jax-owned memory, or note why its results are copied; once, or after p.data changed.

        `ahead`: where its copy may have been begun.
        """
        self.look()
        back = None if self.memory is None or self.slot is None else (self.memory, self.slot)
        placement = adoption.place(self.local, writeback if self.layout is None else "copy", alone=alone, back=back, ahead=ahead)
        self.memory, self.order, why, self.slot = placement
        self.why = why if self.layout is None else sharding.WHY_COPY
        self.address = None if shortage(self.local) else self.local.data_ptr()  # None: the next step places it anew, or raises

    def look(self) -> None:
        """Take note of how the parameter is now."""
        self.layout = sharding.layout_of(self.param)
        p = self.local = self.param if self.layout is None else self.layout.local(self.param)
        if p.dtype is not self.dtype or self.address is None:
            declared = getattr(self.param, "grad_dtype", None) if self.param.is_leaf else None
            self.gradient_dtype = declared if declared is not None and _are_combined(p.dtype, declared) else p.dtype
        self.shape, self.dtype, self.device = p.shape, p.dtype, p.device
        self.strides = p.stride() if p.layout is torch.strided else ()  # a frozen one may be sparse

    def takes(self, grad: torch.Tensor) -> bool:
        """Whether a dense gradient fits the parameter, perhaps in another dtype than is expected."""
        return grad.shape == self.shape and grad.device == self.device and _are_combined(self.dtype, grad.dtype)

    @property
    def alone(self) -> bool:
        """Whether no other is in its memory, which may then be one row that is longer."""
        return self.slot is None or (self.memory is not None and len(self.memory.rows) == 1)

    @property
    def decided(self) -> Decided:
        """All that was decided of the parameter."""
        return self.trained, self.rule, self.elements, self.decay, self.label, self.lr_scale

    @decided.setter
    def decided(self, decided: Decided) -> None:
        self.trained, self.rule, self.elements, self.decay, self.label, self.lr_scale = decided

    @classmethod
    def restored(cls, name: str, param: torch.Tensor, group: int, decided: Decided) -> Leaf:
        """A leaf with the decisions that were made of another: in a copied optimizer, or of a parameter that it replaces."""
        leaf = cls(name, param, group)
        leaf.decided = decided
        leaf.elements = leaf.elements if leaf.elements is not None and leaf.elements.shape == tuple(leaf.shape) else None
        return leaf

    def follow(self) -> None:
        """Look at the new place of parameter and state after results came to lie elsewhere; tensors in a pack follow it by themselves."""
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
        """No longer know of state: what the optimizer's has of the parameter is looked at anew before the next update."""
        self.state, self.fields, self.shown, self.views, self.seen, self.mirrors = None, (), (), (), [], []

    def salvage(self) -> bool:
        """Give parameter and state valid memory if a failed call took theirs; True if the values are lost."""
        lost = self.memory is not None and self.memory.is_gone
        if lost:
            self.param.data = torch.full_like(self.param, torch.nan)
        for memory, view in self._looking():
            if memory.is_gone:
                view.data = lost_like(view)
                lost = True
        return lost

    def _looking(self) -> Iterator[tuple[jax_buffers.Memory, torch.Tensor]]:
        """The memories of its own state, each with the tensor that looks there; of what is hidden there is none."""
        views = [view for name, view in zip(self.fields, self.views, strict=True) if name not in self.scalars]
        return zip(self.state or (), views, strict=False)  # shared state comes last

    @property
    def signature(self) -> tuple[object, ...] | None:
        """All of a placement that a launch depends on; None before the first."""
        if self.address is None:
            return None
        held = None if self.layout is None else self.address  # a launch holds on to the local tensor
        where = self.memory is None if self.slot is None else (id(self.memory), self.slot)
        return where, self.order, self.shape, self.strides, self.dtype, self.device, held

    def held(self, state: ParamState) -> ParamState:
        """State of the parameter, with what this process holds of each DTensor."""
        return state if self.layout is None else self.layout.held(state)

    @property
    def buffer_shape(self) -> tuple[int]:
        return (self.shape.numel(),)


def check_leaves(
    owner: str, leaves: Iterable[Leaf], rule_of: Callable[[ParamGroup], Rule], param_groups: Sequence[ParamGroup], thawed: bool = False
) -> None:
    """Raise for a leaf that is trained, or is to be `thawed`, but that no update can be written into, or that its rule does not take."""
    for leaf in leaves:
        group = param_groups[leaf.group]
        is_trained = leaf.trained and group.get("trainable", True) and leaf.param.requires_grad
        if is_trained or thawed:
            check_parameter(owner, leaf.name, leaf.param)
        if is_trained or (thawed and leaf.param.requires_grad):
            check_parameter_fits(rule_of(group), leaf.name, leaf.param)


def followed(leaves: Sequence[Leaf], names: Sequence[str], param_groups: Sequence[ParamGroup]) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of the groups as they are now, whatever was done to them by hand: parameters replaced, moved, removed, groups exchanged.

    A parameter that takes the name of one that is gone takes all that was decided of it too. Nothing is checked.

    Returns:
      All leaves, and those of them about which nothing is decided.
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
    """Raise where parameters on several devices have one norm, or are looked at `together`."""
    listed = ", ".join(map(str, devices))
    if clip:
        raise ValueError(
            f"{owner}: max_grad_norm needs one norm over all parameters, but they lie on {listed}. "
            "Clip with torch.nn.utils.clip_grad_norm_ instead."
        )
    if together:
        raise ValueError(
            f"{owner}: this transformation looks at all its parameters together, but they lie on {listed}. "
            "Use PartitionedOptimizer with a label for each device."
        )


def check_norm(owner: str, bound: float | None, leaves: Iterable[Leaf]) -> None:
    """Raise where a bound on the global norm is asked for, but this process holds only parts of the gradients."""
    sharded = next((leaf for leaf in leaves if leaf.layout is not None and leaf.layout.sharded and leaf.param.requires_grad), None)
    if bound is not None and sharded is not None:
        raise ValueError(
            f"{owner}: max_grad_norm is {bound}, but {sharding.described(sharded.param, sharded.name)}, and the norm over all of them "
            f"needs "
            "communication. Give max_grad_norm=None, and call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) before step()."
        )


# The dtypes that the arithmetic has in float32: of these a gradient may have another than its parameter (`p.grad_dtype` in torch).
_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


def _are_combined(dtype: torch.dtype, gradient_dtype: torch.dtype) -> bool:
    return dtype is gradient_dtype or (dtype in _IN_FLOAT32 and gradient_dtype in _IN_FLOAT32)


def bad_gradient(owner: str, leaf: Leaf, grad: torch.Tensor) -> str:
    """The text of the error for a gradient that does not fit its parameter."""
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
    """Raise where an element in memory is two elements of the parameters that are to be trained: one update of it would be lost."""
    trained = [leaf for leaf in leaves if leaf.param.requires_grad]
    found = first_overlap([leaf.local for leaf in trained])
    if found is None:
        return
    first, second = trained[found[0]], trained[found[1]]
    if first is second:
        raise ValueError(
            f"parameter {first.name!r} overlaps itself in memory: with shape {tuple(first.shape)} and strides {first.strides} several "
            "elements are one in memory, and no update can be written to them. Give param.clone()."
        )
    raise ValueError(
        f"{owner}: parameters {first.name!r} and {second.name!r} look into the same memory. Tie them by one Parameter object, or "
        "give each memory of its own: param.data = param.data.clone()."
    )


def with_elements(owner: str, leaves: Sequence[Leaf], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients; in place of those whose elements lie elsewhere than at their address (subclasses that wrap tensors), copies.

    Raises:
      ValueError: the elements of a gradient cannot be read; the text names its parameter.
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
    """Raise for a parameter that has no elements in memory to update."""
    if why := shortage(leaf.local):
        raise ValueError(
            f"{owner}: parameter {leaf.name!r} has a gradient, but cannot be updated: {why}. Nothing was updated: give its storage back "
            "before step(), or set param.grad to None."
        )
