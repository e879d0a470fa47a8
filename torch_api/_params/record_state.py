"""Allocate the state of one parameter from initial or saved values, and make the tensors of `optimizer.state`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias, TypeGuard, cast

import jax
import numpy as np
import torch

from bridge._compiler.spec import Signature, StateField, buffer_shape
from bridge._interop.dlpack import to_torch
from bridge._interop.dtypes import numpy_dtype
from bridge._memory import adoption, jax_buffers
from torch_api._rules.types import ParamState

from .record import Mirrors, ParamRecord

# The initial value of a field: one number for all elements, or an array. None for auxiliary state, which has another source.
InitialValue: TypeAlias = complex | jax.Array | torch.Tensor | None


def has_state(fields: Iterable[StateField], saved: ParamState) -> bool:
    """Return whether saved state is enough to continue from.

    A scalar without the arrays is not: a checkpoint may hold one for a frozen parameter.
    """
    own = [field for field in fields if field.state_index is not None]
    moments = [field.name for field in own if field.shape != ()]
    return any(name in saved for name in moments or [field.name for field in own])


def keeps_saved_dtype(field: StateField, hidden: Mapping[str, float], saved: ParamState) -> bool:
    """Return whether a saved field keeps its dtype: fields of the parameter's shape do."""
    return field.name in saved and field.shape is None and field.name not in hidden


def state_signature(
    leaf: ParamRecord, fields: Sequence[StateField], hidden: Mapping[str, float], saved: ParamState
) -> tuple[Signature, ...]:
    """Return shape and dtype of each array of a parameter's state. The state need not exist yet, so that compilation can come first.

    Raises:
      ValueError: the saved state does not have the parameter's shape, or lacks a field.
    """
    if leaf.state_buffers is not None:
        memories = iter(leaf.state_buffers)
        arrays = [None if field.shape == () else next(memories).array for field in fields]
        return tuple(((), f.dtype) if x is None else (tuple(x.shape), str(x.dtype)) for f, x in zip(fields, arrays, strict=True))
    given = has_state(fields, saved)
    if given:
        check_saved_state(leaf, fields, hidden, saved)
    wider = lambda field: given and keeps_saved_dtype(field, hidden, saved)  # noqa: E731
    return tuple((buffer_shape(f, leaf.spec), str(numpy_dtype(saved[f.name].dtype)) if wider(f) else f.dtype) for f in fields)


def check_saved_state(leaf: ParamRecord, fields: Sequence[StateField], hidden: Mapping[str, float], saved: ParamState) -> None:
    """Raise for saved state that lacks a field or does not have the expected shape."""
    remedy = "Delete optimizer.state[param], or load a state_dict that fits."
    for field in fields:
        if field.name not in hidden and field.name not in saved and field.state_index is not None:
            raise ValueError(
                f"the state of parameter {leaf.name!r} has no {field.name!r}, only {sorted(saved)}. An option that needs it, such as "
                f"amsgrad, must be set before the first step. {remedy}"
            )
        if field.name in hidden or field.name not in saved:
            continue
        shape, expected = tuple(np.shape(saved[field.name])), tuple(leaf.shape if field.shape is None else field.shape)
        if shape != expected and field.shape != ():
            reference = "the parameter has" if field.shape is None else "expected is"
            raise ValueError(f"state {field.name!r} of parameter {leaf.name!r} has shape {shape}, but {reference} {expected}. {remedy}")


class StateTensors:
    """State by field name: `tensors` are in `optimizer.state`, `views` alias jax-owned buffers. Most fields have one tensor for both.

    They differ if the user put a tensor into the state that cannot move: one in shared memory, or a view into a flat buffer.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}

    def add(self, name: str, view: torch.Tensor, user_tensor: object = None, is_rebindable: bool = True) -> None:
        """Add a field. A `user_tensor` that matches the view is kept in `tensors`, so that its holder sees each update.

        If it `is_rebindable`, as `can_rebind` says, its data becomes the view; else it is a mirror.
        """
        self.tensors[name] = self.views[name] = view
        if not matches_view(user_tensor, view):
            return
        self.tensors[name] = user_tensor
        if (user_tensor.data_ptr(), user_tensor.stride()) != (view.data_ptr(), view.stride()):
            if not is_rebindable:
                return
            base = user_tensor._base
            user_tensor.data = view
            if base is not None and base.numel() == view.numel():  # else the base keeps the old memory alive
                base.data = view.as_strided((view.numel(),), (1,))
        self.views[name] = user_tensor

    def merge(self, other: StateTensors, order: Sequence[str] = ()) -> StateTensors:
        """Return the fields of both, those of `order` first."""
        result = StateTensors()
        tensors, views = self.tensors | other.tensors, self.views | other.views
        for name in dict.fromkeys((*(name for name in order if name in tensors), *tensors)):
            result.tensors[name], result.views[name] = tensors[name], views[name]
        return result

    @property
    def mirrors(self) -> Mirrors:
        """The tensors that cannot move, each with its view."""
        return [(self.tensors[name], view) for name, view in self.views.items() if self.tensors[name] is not view]


_metadata_of = attrgetter("shape", "dtype", "device", "layout")


def matches_view(value: object, view: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a plain tensor with the metadata of the view, so that it can be in `optimizer.state` instead."""
    if (
        not isinstance(value, torch.Tensor)
        or type(value) not in (torch.Tensor, torch.nn.Parameter)
        or _metadata_of(value) != _metadata_of(view)
    ):
        return False
    return not value.requires_grad and not value.is_inference()


def can_rebind(leaf: ParamRecord, name: str, value: object) -> bool:
    """Return whether a tensor's data may be replaced: it is the only holder of its storage, or the optimizer's own tensor.

    Call this before jax copies the tensor: until the copy is done, jax is another holder.
    """
    known = leaf.scalar_state.get(name)
    return isinstance(value, torch.Tensor) and (
        jax_buffers.find_buffer(value)[0] is not None
        or (known is not None and _location(value) == _location(known))
        or not adoption.why_not_adoptable(value)
    )


def allocate_state(
    leaf: ParamRecord,
    fields: Sequence[StateField],
    hidden: Mapping[str, float],
    initial_values: Mapping[str, InitialValue] | None,
    saved: ParamState,
    buffers_in_use: set[jax_buffers.JaxBuffer],
    initial_aux_value: Callable[[ParamRecord, StateField], torch.Tensor],
) -> tuple[tuple[jax_buffers.JaxBuffer, ...], StateTensors]:
    """Allocate buffers for fields of state.

    Args:
      initial_values: arrays by field name; None if the state was saved.
      saved: the saved state; its tensors are adopted without a copy if possible.
      buffers_in_use: buffers of other state, which must not be donated twice. The new buffers are added.
      initial_aux_value: gives the initial value of auxiliary state.

    Returns:
      The buffers, and tensors over them, which have the parameter's shape and strides if the field has its shape.
    """
    memories, shown = [], StateTensors()
    for field in fields:
        like = leaf.local_tensor.detach() if field.shape is None else None
        given, moves = None, False
        if initial_values is not None and field.name in initial_values:
            memory = jax_buffers.register(cast(jax.Array, initial_values[field.name]))
        elif field.name in hidden:
            memory = adoption.copy_to_buffer(torch.full((), hidden[field.name], device=leaf.device))
        else:
            given = saved.get(field.name)  # None: `tensor` may be the parameter itself, whose buffer another optimizer may own
            moves = can_rebind(leaf, field.name, given)
            tensor = torch.as_tensor(initial_aux_value(leaf, field) if given is None else given, device=leaf.device)
            tensor = tensor if like is not None else tensor.to(getattr(torch, field.dtype)).reshape(field.shape or ()).contiguous()
            memory = (
                jax_buffers.find_unshared_buffer(tensor)
                if given is not None and (like is None or tensor.stride() == leaf.strides)
                else None
            )
            given = None if memory in buffers_in_use else given  # it belongs to another parameter
            if memory is None or memory in buffers_in_use:
                memory = adoption.copy_to_buffer(tensor, like=like)
        buffers_in_use.add(memory)
        memories.append(memory)
        if field.name not in hidden:
            view = memory.alias_tensor(leaf.device, like)
            view = view if like is None or leaf.dtensor_layout is None else leaf.dtensor_layout.to_dtensor(view)
            shown.add(field.name, view.view(field.shape) if field.shape else view, given if leaf.dtensor_layout is None else None, moves)
    return tuple(memories), shown


def allocate_scalars(
    leaf: ParamRecord,
    fields: Iterable[StateField],
    hidden: Mapping[str, float],
    initial_values: Mapping[str, InitialValue] | None,
    saved: ParamState,
    scalar_owners: Mapping[int, ParamRecord],
) -> tuple[dict[str, torch.Tensor], StateTensors]:
    """Return the tensors of 0-d fields by name, for a parameter outside buckets, and the tensors for `optimizer.state`.

    A saved tensor that is already the parameter's own stays in use. A tensor of the user that cannot move is used itself.

    Args:
      initial_values: numbers or arrays by field name; None if the state was saved.
      scalar_owners: the record that owns the scalar at an address.
    """
    tensors, shown = {}, StateTensors()
    for field in fields:
        dtype = getattr(torch, field.dtype)
        value = (
            initial_values[field.name] if initial_values is not None else hidden[field.name] if field.name in hidden else saved[field.name]
        )
        value = to_torch(value) if isinstance(value, jax.Array) else value
        known, reserved = leaf.scalar_state.get(field.name), leaf.reserved_scalars.pop(field.name, None)
        new = torch.zeros((), dtype=dtype, device=leaf.device) if reserved is None else reserved
        given = value if initial_values is None and matches_view(value, new) and scalar_owners.get(value.data_ptr(), leaf) is leaf else None
        if given is not None and known is not None and _location(given) == _location(known):
            new = known
        elif given is not None and not can_rebind(leaf, field.name, given) and not given.data_ptr() % given.itemsize:
            new = given
        else:
            new.copy_(torch.as_tensor(value).detach().reshape(()))
            if given is not None:
                given.data = new
        tensors[field.name] = new
        if field.name not in hidden:
            shown.add(field.name, new.detach(), given)
    return tensors, shown


def _location(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.data_ptr(), tensor.dtype, tensor.device


def mask_buffer(elements: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    """Return an element mask, flat, in the memory order of the parameter's buffer."""
    return np.ascontiguousarray(elements if order is None else elements.transpose(order)).reshape(-1)


def param_array(leaf: ParamRecord) -> jax.Array:
    """Return the array of the parameter's buffer, or a copy of the parameter in a bucket or in torch memory."""
    if leaf.jax_buffer is not None and leaf.bucket_row is None:
        return jax_buffers.readable_array(leaf.jax_buffer)
    return adoption.copy_to_buffer(leaf.local_tensor, like=leaf.local_tensor).array
