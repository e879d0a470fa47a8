"""Columns: what is decided of each parameter, where its bytes and its state are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import torch

from bridge._compiler.spec import Field, buffer_shape
from bridge._interop.dlpack import to_torch, with_memory
from bridge._interop.dtypes import numpy_dtype
from bridge._interop.tensor_storage import first_short, shortage
from bridge._memory import adoption, jax_buffers
from bridge._memory.jax_buffers import lost_like
from bridge._memory.overlaps import first_overlap
from bridge._transforms import selectors

from . import shards
from ._rules.optimizer_spec import Rule
from .groups import check_parameter, check_parameter_fits

# Tensors that the user has put into the state and that stay where they are, each with the view that is updated in its place.
Mirrors = list[tuple[torch.Tensor, torch.Tensor]]


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
        self.label: Any = None
        self.lr_scale = 1.0
        self.row = 0
        self.spec: Any = None  # how its transformation sees it
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
        self.why = why if self.layout is None else shards.WHY_COPY
        self.address = None if shortage(self.local) else self.local.data_ptr()  # None: the next step places it anew, or raises

    def look(self) -> None:
        """Take note of how the parameter is now."""
        self.layout = shards.layout_of(self.param)
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
    def decided(self) -> tuple[Any, ...]:
        """All that was decided of the parameter."""
        return self.trained, self.rule, self.elements, self.decay, self.label, self.lr_scale

    @decided.setter
    def decided(self, decided: tuple[Any, ...]) -> None:
        self.trained, self.rule, self.elements, self.decay, self.label, self.lr_scale = decided

    @classmethod
    def restored(cls, name: str, param: torch.Tensor, group: int, decided: tuple[Any, ...]) -> Leaf:
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
    def signature(self) -> tuple[Any, ...] | None:
        """All of a placement that a launch depends on; None before the first."""
        if self.address is None:
            return None
        held = None if self.layout is None else self.address  # a launch holds on to the local tensor
        where = self.memory is None if self.slot is None else (id(self.memory), self.slot)
        return where, self.order, self.shape, self.strides, self.dtype, self.device, held

    def held(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """State of the parameter, with what this process holds of each DTensor."""
        return state if self.layout is None else self.layout.held(state)

    @property
    def buffer_shape(self) -> tuple[int]:
        return (self.shape.numel(),)


def check_leaves(
    owner: str, leaves: Iterable[Leaf], rule_of: Callable[[Any], Rule], param_groups: Sequence[Mapping[str, Any]], thawed: bool = False
) -> None:
    """Raise for a leaf that is trained, or is to be `thawed`, but that no update can be written into, or that its rule does not take."""
    for leaf in leaves:
        group = param_groups[leaf.group]
        is_trained = leaf.trained and group.get("trainable", True) and leaf.param.requires_grad
        if is_trained or thawed:
            check_parameter(owner, leaf.name, leaf.param)
        if is_trained or (thawed and leaf.param.requires_grad):
            check_parameter_fits(rule_of(group), leaf.name, leaf.param)


def followed(leaves: Sequence[Leaf], names: Sequence[str], param_groups: Sequence[Mapping[str, Any]]) -> tuple[list[Leaf], list[Leaf]]:
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
            f"{owner}: max_grad_norm is {bound}, but {shards.described(sharded.param, sharded.name)}, and the norm over all of them needs "
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


def has_state(fields: Iterable[Field], saved: Mapping[str, Any]) -> bool:
    """Whether there is state to go on from; a lone scalar beside moments is not (a checkpoint may hold one for a frozen parameter)."""
    own = [field for field in fields if field.position is not None]
    moments = [field.name for field in own if field.shape != ()]
    return any(name in saved for name in moments or [field.name for field in own])


def is_wider(field: Field, hidden: Mapping[str, float], saved: Mapping[str, Any]) -> bool:
    """Whether a saved field of the parameter's shape keeps the type that it was saved in."""
    return field.name in saved and field.shape is None and field.name not in hidden


def state_signature(leaf: Leaf, fields: Sequence[Field], hidden: Mapping[str, float], saved: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shape and dtype of each buffer of a leaf's state; it need not exist yet, so that compiling comes before it.

    Raises:
      ValueError: the saved state has another shape than the parameter, or lacks a field.
    """
    if leaf.state is not None:
        memories = iter(leaf.state)
        arrays = [None if field.shape == () else next(memories).array for field in fields]
        return tuple(((), f.dtype) if x is None else (tuple(x.shape), str(x.dtype)) for f, x in zip(fields, arrays, strict=True))
    given = has_state(fields, saved)
    if given:
        check_saved(leaf, fields, hidden, saved)
    wider = lambda field: given and is_wider(field, hidden, saved)  # noqa: E731
    return tuple((buffer_shape(f, leaf.spec), str(numpy_dtype(saved[f.name].dtype)) if wider(f) else f.dtype) for f in fields)


def check_saved(leaf: Leaf, fields: Sequence[Field], hidden: Mapping[str, float], saved: Mapping[str, Any]) -> None:
    """Raise for saved state of another shape than the parameter's, or without a field."""
    remedy = "Delete optimizer.state[param], or load a state_dict that fits."
    for field in fields:
        if field.name not in hidden and field.name not in saved and field.position is not None:
            raise ValueError(f"the state of parameter {leaf.name!r} has no {field.name!r}, only {sorted(saved)}. {remedy}")
        if field.name in hidden or field.name not in saved:
            continue
        shape, expected = tuple(np.shape(saved[field.name])), tuple(leaf.shape if field.shape is None else field.shape)
        if shape != expected and field.shape != ():
            owner = "the parameter has" if field.shape is None else "expected is"
            raise ValueError(f"state {field.name!r} of parameter {leaf.name!r} has shape {shape}, but {owner} {expected}. {remedy}")


class Shown:
    """State by field name: the `tensors` that `optimizer.state` has, and those over jax-owned memory, `views`, mostly the same.

    They differ where the user has put a tensor there that must stay where it is: shared memory, a view into a flat buffer.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}

    def add(self, name: str, view: torch.Tensor, given: Any = None, moves: bool = True) -> None:
        """Show the tensor that was `given` for a field rather than a new view, so that whoever holds it sees each update.

        It comes to look where the view does if it `moves`, as of `may_move`.
        """
        self.tensors[name] = self.views[name] = view
        if not is_like(given, view):
            return
        self.tensors[name] = given
        if (given.data_ptr(), given.stride()) != (view.data_ptr(), view.stride()):
            if not moves:
                return
            base = given._base
            given.data = view
            if base is not None and base.numel() == view.numel():  # else it keeps alive the memory that the tensor has left
                base.data = view.as_strided((view.numel(),), (1,))
        self.views[name] = given

    def joined(self, other: Shown, order: Sequence[str] = ()) -> Shown:
        """What shows both, the fields of `order` first."""
        result = Shown()
        tensors, views = self.tensors | other.tensors, self.views | other.views
        for name in dict.fromkeys((*(name for name in order if name in tensors), *tensors)):
            result.tensors[name], result.views[name] = tensors[name], views[name]
        return result

    @property
    def mirrors(self) -> Mirrors:
        """The tensors that stay where they are, each with its view."""
        return [(self.tensors[name], view) for name, view in self.views.items() if self.tensors[name] is not view]


_kind = attrgetter("shape", "dtype", "device", "layout")


def is_like(given: Any, view: torch.Tensor) -> bool:
    """Whether a value of a field is a tensor that can be shown in the place of a view of the same kind."""
    plain = type(given) in (torch.Tensor, torch.nn.Parameter) and _kind(given) == _kind(view)
    return plain and not given.requires_grad and not given.is_inference()


def may_move(leaf: Leaf, name: str, given: Any) -> bool:
    """Whether a tensor in the place of a field may move: it owns its storage alone, or it is the optimizer's.

    To be asked before the tensor is read: a copy that jax makes of it holds it for a while.
    """
    known = leaf.scalars.get(name)
    return isinstance(given, torch.Tensor) and (
        jax_buffers.located(given)[0] is not None
        or (known is not None and _place(given) == _place(known))
        or not adoption.cannot_own(given)
    )


def allocate(
    leaf: Leaf,
    fields: Sequence[Field],
    hidden: Mapping[str, float],
    fresh: Mapping[str, Any] | None,
    saved: Mapping[str, Any],
    taken: set[jax_buffers.Memory],
    begin: Callable[[Leaf, Field], torch.Tensor],
) -> tuple[tuple[jax_buffers.Memory, ...], Shown]:
    """Memories for fields of state, begun from `fresh` buffers by name or from saved tensors, and what shows each.

    `taken` are the memories that others have: nothing may be donated twice. `begin` has what `fresh` has not: the fields
    that are kept beside the transformation's state.

    Returns:
      The memories, and what shows them, with the parameter's shape and strides where the field has its shape.
    """
    memories, shown = [], Shown()
    for field in fields:
        like = leaf.local.detach() if field.shape is None else None
        given, moves = None, False
        if fresh is not None and field.name in fresh:
            memory = jax_buffers.register(fresh[field.name])
        elif field.name in hidden:
            memory = adoption.own(torch.full((), hidden[field.name], device=leaf.device))
        else:
            given = saved.get(field.name)  # else it may be the parameter itself, which another optimizer may have put into jax's memory
            moves = may_move(leaf, field.name, given)
            tensor = torch.as_tensor(begin(leaf, field) if given is None else given, device=leaf.device)
            tensor = tensor if like is not None else tensor.to(getattr(torch, field.dtype)).reshape(field.shape or ()).contiguous()
            memory = jax_buffers.memory_of(tensor) if given is not None and (like is None or tensor.stride() == leaf.strides) else None
            given = None if memory in taken else given  # it is that of another parameter
            if memory is None or memory in taken:
                memory = adoption.own(tensor, like=like)
        taken.add(memory)
        memories.append(memory)
        if field.name not in hidden:
            view = memory.tensor(leaf.device, like)
            view = view if like is None or leaf.layout is None else leaf.layout.distributed(view)
            shown.add(field.name, view.view(field.shape) if field.shape else view, given if leaf.layout is None else None, moves)
    return tuple(memories), shown


def scalars(
    leaf: Leaf,
    fields: Iterable[Field],
    hidden: Mapping[str, float],
    fresh: Mapping[str, Any] | None,
    saved: Mapping[str, Any],
    taken: Mapping[int, Leaf],
) -> tuple[dict[str, torch.Tensor], Shown]:
    """The 0-d fields of a leaf that is updated by itself, by name: `fresh` numbers or arrays, or as they were saved; and what shows them.

    A tensor that was the leaf's own before goes on being it, by whatever views others see it. One that the user has put there and that
    must stay where it is becomes it. `taken`: the addresses of scalars, and whose they are.
    """
    found, shown = {}, Shown()
    for field in fields:
        dtype = getattr(torch, field.dtype)
        value: Any = fresh[field.name] if fresh is not None else hidden[field.name] if field.name in hidden else saved[field.name]
        value = to_torch(value) if isinstance(value, jax.Array) else value
        known, spare = leaf.scalars.get(field.name), leaf.spare.pop(field.name, None)
        new: torch.Tensor = torch.zeros((), dtype=dtype, device=leaf.device) if spare is None else spare
        given: Any = value if fresh is None and is_like(value, new) and taken.get(value.data_ptr(), leaf) is leaf else None
        if given is not None and known is not None and _place(given) == _place(known):
            new = known
        elif given is not None and not may_move(leaf, field.name, given) and not given.data_ptr() % given.itemsize:
            new = given
        else:
            new.copy_(torch.as_tensor(value).detach().reshape(()))
            if given is not None:
                given.data = new
        found[field.name] = new
        if field.name not in hidden:
            shown.add(field.name, new.detach(), given)
    return found, shown


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.data_ptr(), tensor.dtype, tensor.device


def mask_buffer(elements: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    """Return a mask of elements in the order of the parameter's buffer."""
    return np.ascontiguousarray(elements if order is None else elements.transpose(order)).reshape(-1)


def param_array(leaf: Leaf) -> Any:
    """The parameter's buffer as jax has it, or a copy."""
    if leaf.memory is not None and leaf.slot is None:
        return jax_buffers.readable(leaf.memory)
    return adoption.own(leaf.local, like=leaf.local).array
