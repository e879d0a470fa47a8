"""The state of the parameters of a bucket, and the buffer into which their gradients are gathered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compiler import policy
from bridge._compiler.spec import StateField, buffer_shape
from bridge._interop.dlpack import device_of
from bridge._interop.dtypes import numpy_dtype
from bridge._memory import allocation, jax_buffers
from torch_api._rules.types import ParamState

from .record import ParamRecord
from .record_state import StateTensors, can_rebind, has_state, keeps_saved_dtype, matches_view


class BucketState:
    """The state of one bucket in one optimizer: for each field one buffer with a row for each parameter.

    Args:
      leaf: any parameter of the bucket.
      fields: the state of each parameter.
      hidden: the values of hidden state by field name.
      initial_constants: the initial value of each field, if it is one number.
      members: row and saved state of each parameter of the bucket that may be trained.
      buffers_in_use: buffers of other state. The new buffers are added.
      may_address_grads: whether gradients may be read by address.
    """

    __slots__ = ("_device", "_fields", "_gathered_grads", "_initial_constants", "_may_address_grads", "jax_buffer", "state_buffers")

    def __init__(
        self,
        leaf: ParamRecord,
        fields: Sequence[StateField],
        hidden: Mapping[str, float],
        initial_constants: Sequence[complex | None],
        members: Sequence[tuple[int, ParamState]],
        buffers_in_use: set[jax_buffers.JaxBuffer],
        may_address_grads: bool,
    ) -> None:
        assert leaf.jax_buffer is not None
        self._may_address_grads = may_address_grads
        self.jax_buffer, self._fields, self._device = leaf.jax_buffer, fields, leaf.device.type
        self._gathered_grads: torch.Tensor | None = None
        saved = [(row, state) for row, state in members if has_state(fields, state)]
        dtypes = [_row_dtype(field, hidden, [state for _, state in saved]) for field in fields]
        adopted = self._adopt_saved(saved, dtypes, hidden, buffers_in_use)
        self._initial_constants = initial_constants if adopted is None else None  # the content of rows until `init_row`
        self.state_buffers = adopted or self._allocate_initial(leaf, dtypes, initial_constants)
        buffers_in_use.update(self.state_buffers)

    @property
    def grads_as_arguments(self) -> bool:
        """Whether each gradient is an argument of its own."""
        return len(self.jax_buffer.rows) == 1 or (not self.gathers_grads and self._device in policy.BUCKETING.grads_as_arguments_on)

    @property
    def addresses_grads(self) -> bool:
        """Whether gradients may be read by address. Small buckets with small rows are gathered instead."""
        return (
            self._may_address_grads
            and not self.grads_as_arguments
            and (
                not self.gathers_grads or len(self.jax_buffer.rows) * self.jax_buffer.row_bytes > policy.BUCKETING.max_gathered_bucket_bytes
            )
        )

    @property
    def gathers_grads(self) -> bool:
        """Whether rows are small enough to gather gradients."""
        return policy.BUCKETING.gathers_row(self.jax_buffer.row_bytes, self._device)

    def _allocate_initial(
        self, leaf: ParamRecord, dtypes: Sequence[str], initial_constants: Sequence[complex | None]
    ) -> tuple[jax_buffers.JaxBuffer, ...]:
        """Allocate the buffers of all fields, filled with their constants, or with 0 if a field has none."""
        count, width = self.jax_buffer.array.shape
        inner = [(width,) if field.shape is None else buffer_shape(field) for field in self._fields]
        kinds = [
            ((count, *shape), jnp.dtype(dtype), 0 if constant is None else constant)
            for shape, dtype, constant in zip(inner, dtypes, initial_constants, strict=True)
        ]
        arrays = jax.block_until_ready(allocation.full_many(kinds, device_of(leaf.param)))
        return tuple(
            jax_buffers.register(array, self.jax_buffer.row_lengths if field.shape is None else [int(np.prod(shape))] * count)
            for field, shape, array in zip(self._fields, inner, arrays, strict=True)
        )

    def _adopt_saved(
        self,
        saved: Sequence[tuple[int, ParamState]],
        dtypes: Sequence[str],
        hidden: Mapping[str, float],
        buffers_in_use: set[jax_buffers.JaxBuffer],
    ) -> tuple[jax_buffers.JaxBuffer, ...] | None:
        """Return the buffers that hold the saved state already, or None.

        Each saved tensor must be in its parameter's row of one unused buffer per field, and no other tensor may alias the other rows.
        """
        memories = []
        for field, dtype in zip(self._fields, dtypes, strict=True):
            if field.name in hidden or not all(isinstance(state.get(field.name), torch.Tensor) for _, state in saved):
                return None
            found = {(jax_buffers.find_buffer(state[field.name]), row) for row, state in saved}
            homes = {memory for (memory, at), row in found if at == row}
            memory = homes.pop() if len(homes) == 1 and all(at == row for (_, at), row in found) else None
            if memory is None or memory in buffers_in_use or memory in memories or len(memory.rows) != len(self.jax_buffer.rows):
                return None
            if str(memory.array.dtype) != dtype or set(memory.aliases) - {row for row, _ in saved}:
                return None
            if field.shape is None and memory.array.shape != self.jax_buffer.array.shape:
                return None  # saved with parameters of another dtype, whose rows have another length
            memories.append(memory)
        return tuple(memories) or None

    def init_row(
        self,
        leaf: ParamRecord,
        hidden: Mapping[str, float],
        values: Sequence[complex | torch.Tensor | None],
        saved: ParamState,
        initial_aux_value: Callable[[ParamRecord, StateField], torch.Tensor],
    ) -> StateTensors:
        """Write the initial state of one parameter into its rows, and return the tensors over them.

        Args:
          values: the initial value of each field, a number or a flat tensor. Saved state has precedence.
          saved: the parameter's entry of `optimizer.state`.
          initial_aux_value: gives the initial value of auxiliary state.
        """
        shown = StateTensors()
        is_given = has_state(self._fields, saved)
        for position, (field, memory, value) in enumerate(zip(self._fields, self.state_buffers, values, strict=True)):
            like = leaf.local_tensor.detach() if field.shape is None else None
            looked_at = leaf.bucket_row in memory.aliases
            known = saved.get(field.name) if is_given or field.state_index is None else None
            moves = can_rebind(leaf, field.name, known)
            view = memory.alias_tensor(leaf.device, like, leaf.bucket_row)
            view = view.view(field.shape) if field.shape and like is None else view
            if field.name in hidden:
                view.fill_(hidden[field.name] if is_given else float(cast(float, value)))
                continue
            if field.state_index is None or is_given:
                source = torch.as_tensor(initial_aux_value(leaf, field) if known is None else known, device=leaf.device)
                source = source.reshape(view.shape) if like is None else source
                if source.data_ptr() != view.data_ptr():
                    view.copy_(source)
                elif source.stride() != view.stride():  # saved with another order of dimensions
                    view.copy_(source.clone())
            elif isinstance(value, torch.Tensor):
                view.copy_(value.reshape(view.shape) if like is None else value.as_strided(view.shape, view.stride()))
            elif looked_at or self._initial_constants is None or self._initial_constants[position] != value:
                view.fill_(cast(complex, value))
            if known is not None and matches_view(known, view) and known.data_ptr() == view.data_ptr():
                known.data = view  # so that tensor and view are one alias of the row
            shown.add(field.name, view, known, moves)
            memory.tensor_refs[leaf.bucket_row or 0] = weakref.ref(shown.views[field.name])
        return shown

    def grad_row(self, leaf: ParamRecord) -> torch.Tensor:
        """Return the place of the parameter's gradient in `gathered_grads`."""
        rows, start = self.gathered_grads(leaf), (leaf.bucket_row or 0) * self.jax_buffer.array.shape[1]
        size, strides = leaf.shape, leaf.strides
        return rows.as_strided(size, strides, start)

    def cat_target(self, leaves: Sequence[ParamRecord]) -> torch.Tensor | None:
        """Return `gathered_grads` as the `out` of one `torch.cat` of the parameters' gradients, or None if that cannot fill it.

        All parameters of the bucket must have a gradient, have one shape and fill their rows.
        """
        shape = leaves[0].shape
        filled = (
            bool(shape)
            and shape.numel() == self.jax_buffer.array.shape[1]
            and [leaf.bucket_row for leaf in leaves] == list(self.jax_buffer.rows)
        )
        if not filled or any(leaf.shape != shape or leaf.dim_order is not None for leaf in leaves):
            return None
        return self.gathered_grads(leaves[0]).view(-1, *shape[1:])

    def gathered_grads(self, leaf: ParamRecord) -> torch.Tensor:
        """Return the buffer for gathered gradients, with one row for each parameter. It is allocated at the first call."""
        if self._gathered_grads is None:
            with torch.inference_mode(False):
                self._gathered_grads = torch.zeros(self.jax_buffer.array.shape, dtype=leaf.grad_dtype, device=leaf.device)
        return self._gathered_grads


def _row_dtype(field: StateField, hidden: Mapping[str, float], saved: Iterable[ParamState]) -> str:
    """Return the dtype of a field's rows: the transformation's, or the widest in which a member's state was saved."""
    types = {str(numpy_dtype(state[field.name].dtype)) for state in saved if keeps_saved_dtype(field, hidden, state)} - {field.dtype}
    return max(types, key=lambda name: jnp.dtype(name).itemsize) if types else field.dtype
