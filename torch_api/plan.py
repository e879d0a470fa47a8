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
        "address", "decay", "device", "dtype", "elements", "fields", "group", "label", "memory", "name", "order", "param",
        "row", "rule", "shape", "state", "strides", "trained", "views", "why",
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
        self.fields: tuple[str, ...] = ()  # what optimizer.state shows of it, and the tensors there
        self.views: tuple[torch.Tensor, ...] = ()
        self._look()

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
        self._look()

    def _look(self) -> None:
        p = self.param
        self.shape, self.strides, self.dtype, self.device = p.shape, p.stride(), p.dtype, p.device

    @property
    def decided(self) -> tuple[Any, ...]:
        """All that was decided of the parameter, for `restored`."""
        return self.trained, self.rule, self.elements, self.decay, self.label

    @classmethod
    def restored(cls, name: str, param: torch.Tensor, group: int, decided: tuple[Any, ...]) -> Leaf:
        """A leaf with the decisions that were made of another: in a copied optimizer, or of a parameter that it replaces."""
        leaf = cls(name, param, group)
        leaf.trained, leaf.rule, elements, leaf.decay, leaf.label = decided
        leaf.elements = elements if elements is not None and elements.shape == tuple(param.shape) else None
        return leaf

    def follow(self) -> None:
        """Look at the new place of parameter and state after results came to lie elsewhere."""
        if self.memory is not None:
            self.memory = storage.renewed(self.memory)
            self.param.data = self.memory.tensor(self.device, like=self.param)
            self.address = self.param.data_ptr()
        self.state = tuple(map(storage.renewed, self.state or ()))
        for memory, view in zip(self.state, self.views, strict=False):  # hidden state comes last and has no view
            view.data = memory.tensor(self.device, like=view)

    def salvage(self) -> bool:
        """Give parameter and state valid memory if a failed call took theirs; True if the values are lost."""
        lost = self.memory is not None and self.memory.array.is_deleted()
        if lost:
            self.param.data = torch.full_like(self.param, torch.nan)
        for memory, view in zip(self.state or (), self.views, strict=False):
            if memory.array.is_deleted():
                view.data = torch.full_like(view, torch.nan)
                lost = True
        return lost

    @property
    def signature(self) -> tuple[Any, ...] | None:
        """All of a placement that a launch depends on; None before the first."""
        return None if self.address is None else (self.memory is None, self.order, self.shape, self.strides, self.dtype, self.device)

    @property
    def buffer_shape(self) -> tuple[int]:
        return (self.shape.numel(),)


class Launch:
    """The compiled update of one set of live leaves on one device, with all that a call needs at hand."""

    __slots__ = ("inplace", "kept", "kept_order", "leaves", "masks", "order", "params", "part", "program", "seen", "state", "views")

    def __init__(self, leaves: Sequence[Leaf], part: slice, program: step.Program) -> None:
        self.leaves, self.part, self.program = leaves, part, program
        self.inplace = [leaf for leaf in leaves if leaf.memory is not None]
        self.params = [leaf.param for leaf in self.inplace]
        kept = [leaf for leaf in leaves if leaf.memory is None]
        self.kept, self.kept_order = [leaf.param for leaf in kept], [leaf.order for leaf in kept]
        self.order = [leaf.order for leaf in leaves]
        self.state = [memory for leaf in leaves for memory in leaf.state or ()]
        self.views = [view for leaf in leaves for view in leaf.views]
        self.seen = [view.data_ptr() for view in self.views]
        self.masks = [_in_order(leaf.elements, leaf.order) for leaf in leaves if leaf.elements is not None]


def _in_order(elements: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    return np.ascontiguousarray(elements if order is None else elements.transpose(order)).reshape(-1)


def sort_key(leaf: Leaf) -> tuple[Any, ...]:
    """Leaves in this order give equal programs for equal sets of shapes, whichever parameters they are."""
    return (str(leaf.device), leaf.row, str(leaf.dtype), leaf.buffer_shape, leaf.elements is not None, leaf.memory is not None)


def bad_gradient(owner: str, leaf: Leaf, grad: torch.Tensor) -> str:
    """The text of the error for a gradient that does not fit its parameter."""
    title = f"{owner}: the gradient of {leaf.name!r}"
    if grad.layout is not torch.strided:
        return (
            f"{title} is sparse ({grad.layout}); expected a dense one. Use sparse=False in the embedding, or torch.optim.SparseAdam for it."
        )
    return (
        f"{title} has shape {tuple(grad.shape)}, dtype {grad.dtype} on {grad.device}; the parameter has shape {tuple(leaf.shape)}, "
        f"dtype {leaf.dtype} on {leaf.device}. Nothing was updated: give it a gradient that fits, or set it to None."
    )


def describe(leaf: Leaf, row: step.Row, hidden: Mapping[str, float], saved: Mapping[str, Any]) -> step.Leaf:
    """What the compiled update must know of a leaf; its state need not exist yet, so that compiling comes before it.

    Raises:
      ValueError: the saved state has another shape than the parameter, or lacks a field.
    """
    dtype = str(numpy_dtype(leaf.dtype))
    if leaf.state is not None:
        state = tuple((tuple(memory.array.shape), str(memory.array.dtype)) for memory in leaf.state)
    else:
        state = step.state_signature(row, leaf.buffer_shape, dtype)
        if _is_saved(row, saved):
            _check_saved(leaf, row, hidden, saved)
            fields = step.state_fields(row).items()
            state = tuple(
                (leaf.buffer_shape, str(numpy_dtype(saved[f].dtype))) if shaped else s for (f, shaped), s in zip(fields, state, strict=True)
            )
    return step.Leaf(leaf.row, leaf.buffer_shape, dtype, state, leaf.memory is not None, leaf.elements is not None)


def _is_saved(row: step.Row, saved: Mapping[str, Any]) -> bool:
    """Whether there is state to go on from; a lone scalar is not (a checkpoint may hold one for a frozen parameter)."""
    return any(shaped and field in saved for field, shaped in step.state_fields(row).items())


def _check_saved(leaf: Leaf, row: step.Row, hidden: Mapping[str, float], saved: Mapping[str, Any]) -> None:
    remedy = "Delete optimizer.state[param], or load a state_dict that fits."
    for field, shaped in step.state_fields(row).items():
        if field not in hidden and field not in saved:
            raise ValueError(f"the state of parameter {leaf.name!r} has no {field!r}, only {sorted(saved)}. {remedy}")
        if shaped and saved[field].shape != leaf.shape:
            shapes = f"{tuple(saved[field].shape)}, but the parameter has {tuple(leaf.shape)}"
            raise ValueError(f"state {field!r} of parameter {leaf.name!r} has shape {shapes}. {remedy}")


def allocate_state(
    leaf: Leaf, rule: Rule, row: step.Row, values: tuple[float, ...], saved: Mapping[str, Any], taken: set[storage.Memory]
) -> dict[str, torch.Tensor]:
    """Give a leaf its state memories, begun by the rule or from saved tensors, and the torch view of them.

    `taken` are the memories that other leaves have: nothing may be donated twice.

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
            tensor = tensor if shaped else tensor.to(torch.float32)
            memory = storage.memory_of(tensor) if not shaped or tensor.stride() == leaf.strides else None
            if memory is None or memory in taken:
                memory = storage.own(tensor, like=leaf.param.detach() if shaped else None)
        taken.add(memory)
        memories.append(memory)
        if field not in rule.hidden:
            views[field] = memory.tensor(leaf.device, leaf.param.detach() if shaped else None)
    leaf.state, leaf.fields, leaf.views = tuple(memories), tuple(views), tuple(views.values())
    return views


def _param_array(leaf: Leaf) -> Any:
    return leaf.memory.array if leaf.memory is not None else storage.own(leaf.param, like=leaf.param).array
