"""Columns and launches: what is decided of each parameter, and the compiled update of each set of live ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bridge import masks, step, storage
from bridge.dlpack import numpy_dtype
from bridge.rules import Rule


class Leaf:
    """One parameter as the engine sees it: what was decided of it, and where its bytes are."""

    __slots__ = (
        "address", "decay", "device", "dtype", "elements", "group", "label", "memory", "name", "order", "param", "row",
        "rule", "shape", "state", "trained", "views", "why",
    )  # fmt: skip

    def __init__(self, name: str, param: torch.Tensor, group: int) -> None:
        self.name, self.param, self.group = name, param, group
        self.trained, self.rule = True, "mask=None"
        self.elements: np.ndarray | None = None  # a boolean mask of the parameter's own shape
        self.decay = masks.Decision(True, "decay_mask=None")
        self.label: Any = None
        self.row = 0
        self.memory: storage.Memory | None = None
        self.order: tuple[int, ...] | None = None
        self.address: int | None = None  # where the bytes were last seen; None before placement
        self.why = "not placed: frozen"
        self.state: tuple[storage.Memory, ...] | None = None
        self.views: tuple[torch.Tensor, ...] = ()  # what optimizer.state shows of it
        self.shape, self.dtype, self.device = param.shape, param.dtype, param.device

    def decide(self, decision: masks.Decision) -> None:
        """Add a mask's decision; a leaf is trained where all agree, and the rule that froze it is the one to show."""
        if not self.trained:
            return
        value, rule = decision
        if isinstance(value, np.ndarray):
            self.elements = value if self.elements is None else self.elements & value
            self.rule = rule
        elif not value or self.rule == "mask=None":
            self.trained, self.rule = bool(value), rule

    def place(self, writeback: str) -> None:
        """Move the parameter into jax-owned memory, or note why its results are copied; once, or after p.data changed."""
        placement = storage.place(self.param, writeback)
        self.memory, self.order, self.why = placement
        self.address = self.param.data_ptr()
        self.shape, self.dtype, self.device = self.param.shape, self.param.dtype, self.param.device

    @classmethod
    def restored(cls, param: torch.Tensor, name: str, group: int, trained: bool, rule: str, elements: Any, decay: Any, label: Any) -> Leaf:
        """A leaf with the decisions of the optimizer that it was copied from."""
        leaf = cls(name, param, group)
        leaf.trained, leaf.rule, leaf.elements, leaf.decay, leaf.label = trained, rule, elements, decay, label
        return leaf

    @property
    def signature(self) -> tuple[Any, ...] | None:
        """All of a placement that a launch depends on; None before the first."""
        return None if self.address is None else (self.memory is None, self.order, self.shape, self.dtype, self.device)

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        return tuple(self.shape) if self.order is None else tuple(self.shape[d] for d in self.order)


class Launch:
    """The compiled update of one set of live leaves on one device, with all that a call needs at hand."""

    __slots__ = ("inplace", "kept", "kept_order", "leaves", "masks", "order", "params", "part", "program", "state")

    def __init__(self, leaves: Sequence[Leaf], part: slice, program: step.Program) -> None:
        self.leaves, self.part, self.program = leaves, part, program
        self.inplace = [leaf for leaf in leaves if leaf.memory is not None]
        self.params = [leaf.param for leaf in self.inplace]
        kept = [leaf for leaf in leaves if leaf.memory is None]
        self.kept, self.kept_order = [leaf.param for leaf in kept], [leaf.order for leaf in kept]
        self.order = [leaf.order for leaf in leaves]
        self.state = [memory for leaf in leaves for memory in leaf.state or ()]
        self.masks = [_in_order(leaf.elements, leaf.order) for leaf in leaves if leaf.elements is not None]


def _in_order(elements: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    return np.ascontiguousarray(elements if order is None else elements.transpose(order))


def sort_key(leaf: Leaf) -> tuple[Any, ...]:
    """Leaves in this order give equal programs for equal sets of shapes, whichever parameters they are."""
    return (str(leaf.device), leaf.row, str(leaf.dtype), leaf.buffer_shape, leaf.elements is not None, leaf.memory is not None)


def describe(leaf: Leaf, row: step.Row, values: tuple[float, ...], saved: Mapping[str, Any]) -> step.Leaf:
    """What the compiled update must know of a leaf; its state need not exist yet, so that compiling comes before it.

    Raises:
      ValueError: the saved state has another shape than the parameter.
    """
    dtype = str(numpy_dtype(leaf.dtype))
    if leaf.state is not None:
        state = tuple((tuple(memory.array.shape), str(memory.array.dtype)) for memory in leaf.state)
    else:
        state = step.state_signature(row, values, leaf.buffer_shape, dtype)
        if _is_saved(row, saved):
            fields = step.state_fields(row)
            state = tuple(_saved_signature(leaf, f, saved) if f in saved and fields[f] else s for f, s in zip(fields, state, strict=True))
    return step.Leaf(leaf.row, leaf.buffer_shape, dtype, state, leaf.memory is not None, leaf.elements is not None)


def _is_saved(row: step.Row, saved: Mapping[str, Any]) -> bool:
    """Whether there is state to go on from; a lone scalar is not (a checkpoint may hold one for a frozen parameter)."""
    return bool(saved) and {name for name, shaped in step.state_fields(row).items() if shaped} <= saved.keys()


def _saved_signature(leaf: Leaf, field: str, saved: Mapping[str, torch.Tensor]) -> tuple[tuple[int, ...], str]:
    if saved[field].shape != leaf.shape:
        raise ValueError(
            f"state {field!r} of parameter {leaf.name!r} has shape {tuple(saved[field].shape)}, but the parameter has "
            f"{tuple(leaf.shape)}. Delete optimizer.state[param], or load a state_dict that fits."
        )
    return leaf.buffer_shape, str(numpy_dtype(saved[field].dtype))


def allocate_state(leaf: Leaf, rule: Rule, row: step.Row, values: tuple[float, ...], saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Give a leaf its state memories, begun by the rule or from saved tensors, and the torch view of them.

    Returns:
      Field name to tensor over the state's memory, with the parameter's shape and strides where the field has its shape.
    """
    fields = step.state_fields(row)
    fresh = None if _is_saved(row, saved) else step.init_state(row, values, _param_array(leaf))
    memories, views = [], {}
    for position, (field, shaped) in enumerate(fields.items()):
        if fresh is not None:
            memory = storage.register(fresh[position])
        elif field in rule.hidden:
            memory = storage.own(torch.full((), rule.hidden[field], device=leaf.device))
        else:
            tensor = torch.as_tensor(saved[field], device=leaf.device)
            tensor = _permuted(tensor, leaf.order) if shaped else tensor.to(torch.float32)
            memory = storage.memory_of(tensor) or storage.own(tensor)
        memories.append(memory)
        if field not in rule.hidden:
            views[field] = memory.tensor(leaf.device, leaf.param.detach() if shaped else None)
    leaf.state, leaf.views = tuple(memories), tuple(views.values())
    return views


def _param_array(leaf: Leaf) -> Any:
    return leaf.memory.array if leaf.memory is not None else storage.own(_permuted(leaf.param.detach(), leaf.order)).array


def _permuted(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return tensor if order is None else tensor.permute(order)
