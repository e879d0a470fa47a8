"""The state of the parameters of a bucket, and the buffer into which their gradients are gathered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compiler.spec import Field, buffer_shape
from bridge._interop.dlpack import device_of
from bridge._interop.dtypes import numpy_dtype
from bridge._memory import allocation, jax_buffers
from torch_api._rules.types import ParamState

from .buckets import GATHERED, GATHERED_PACK, SINGLY_ON
from .record import Leaf
from .record_state import Shown, has_state, is_like, is_wider, may_move


class Pack:
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

    __slots__ = ("_addressed", "_constants", "_device", "_fields", "_gradients", "memory", "state")

    def __init__(
        self,
        leaf: Leaf,
        fields: Sequence[Field],
        hidden: Mapping[str, float],
        constants: Sequence[complex | None],
        members: Sequence[tuple[int, ParamState]],
        taken: set[jax_buffers.Memory],
        addressed: bool,
    ) -> None:
        assert leaf.memory is not None
        self._addressed = addressed
        self.memory, self._fields, self._device = leaf.memory, fields, leaf.device.type
        self._gradients: torch.Tensor | None = None
        saved = [(row, state) for row, state in members if has_state(fields, state)]
        dtypes = [_dtype(field, hidden, [state for _, state in saved]) for field in fields]
        kept = self._as_saved(saved, dtypes, hidden, taken)
        self._constants = constants if kept is None else None  # the content of rows until `init_row`
        self.state = kept or self._begun(leaf, dtypes, constants)
        taken.update(self.state)

    @property
    def singly(self) -> bool:
        """Whether each gradient is an argument of its own."""
        return len(self.memory.rows) == 1 or (not self.small and self._device in SINGLY_ON)

    @property
    def addressed(self) -> bool:
        """Whether gradients may be read by address. Small buckets with small rows are gathered instead."""
        return self._addressed and not self.singly and (not self.small or len(self.memory.rows) * self.memory.row_bytes > GATHERED_PACK)

    @property
    def small(self) -> bool:
        """Whether rows are small enough to gather gradients."""
        return self.memory.row_bytes <= GATHERED.get(self._device, 0)

    def _begun(self, leaf: Leaf, dtypes: Sequence[str], constants: Sequence[complex | None]) -> tuple[jax_buffers.Memory, ...]:
        """Allocate the buffers of all fields, filled with their constants, or with 0 if a field has none."""
        count, width = self.memory.array.shape
        inner = [(width,) if field.shape is None else buffer_shape(field) for field in self._fields]
        kinds = [
            ((count, *shape), jnp.dtype(dtype), 0 if constant is None else constant)
            for shape, dtype, constant in zip(inner, dtypes, constants, strict=True)
        ]
        arrays = jax.block_until_ready(allocation.filled(kinds, device_of(leaf.param)))
        return tuple(
            jax_buffers.register(array, self.memory.lengths if field.shape is None else [int(np.prod(shape))] * count)
            for field, shape, array in zip(self._fields, inner, arrays, strict=True)
        )

    def _as_saved(
        self,
        saved: Sequence[tuple[int, ParamState]],
        dtypes: Sequence[str],
        hidden: Mapping[str, float],
        taken: set[jax_buffers.Memory],
    ) -> tuple[jax_buffers.Memory, ...] | None:
        """Return the buffers that hold the saved state already, or None.

        Each saved tensor must be in its parameter's row of one unused buffer per field, and no other tensor may alias the other rows.
        """
        memories = []
        for field, dtype in zip(self._fields, dtypes, strict=True):
            if field.name in hidden or not all(isinstance(state.get(field.name), torch.Tensor) for _, state in saved):
                return None
            found = {(jax_buffers.located(state[field.name]), row) for row, state in saved}
            homes = {memory for (memory, at), row in found if at == row}
            memory = homes.pop() if len(homes) == 1 and all(at == row for (_, at), row in found) else None
            if memory is None or memory in taken or memory in memories or len(memory.rows) != len(self.memory.rows):
                return None
            if str(memory.array.dtype) != dtype or set(memory.windows) - {row for row, _ in saved}:
                return None
            if field.shape is None and memory.array.shape != self.memory.array.shape:
                return None  # saved with parameters of another dtype, whose rows have another length
            memories.append(memory)
        return tuple(memories) or None

    def give(
        self,
        leaf: Leaf,
        hidden: Mapping[str, float],
        values: Sequence[complex | torch.Tensor | None],
        saved: ParamState,
        begin: Callable[[Leaf, Field], torch.Tensor],
    ) -> Shown:
        """Write the initial state of one parameter into its rows, and return the tensors over them.

        Args:
          values: the initial value of each field, a number or a flat tensor. Saved state has precedence.
          saved: the parameter's entry of `optimizer.state`.
          initial_aux_value: gives the initial value of auxiliary state.
        """
        shown = Shown()
        is_given = has_state(self._fields, saved)
        for position, (field, memory, value) in enumerate(zip(self._fields, self.state, values, strict=True)):
            like = leaf.local.detach() if field.shape is None else None
            looked_at = leaf.slot in memory.windows
            known = saved.get(field.name) if is_given or field.position is None else None
            moves = may_move(leaf, field.name, known)
            view = memory.tensor(leaf.device, like, leaf.slot)
            view = view.view(field.shape) if field.shape and like is None else view
            if field.name in hidden:
                view.fill_(hidden[field.name] if is_given else float(cast(float, value)))
                continue
            if field.position is None or is_given:
                source = torch.as_tensor(begin(leaf, field) if known is None else known, device=leaf.device)
                source = source.reshape(view.shape) if like is None else source
                if source.data_ptr() != view.data_ptr():
                    view.copy_(source)
                elif source.stride() != view.stride():  # saved with another order of dimensions
                    view.copy_(source.clone())
            elif isinstance(value, torch.Tensor):
                view.copy_(value.reshape(view.shape) if like is None else value.as_strided(view.shape, view.stride()))
            elif looked_at or self._constants is None or self._constants[position] != value:
                view.fill_(cast(complex, value))
            if known is not None and is_like(known, view) and known.data_ptr() == view.data_ptr():
                known.data = view  # so that tensor and view are one alias of the row
            shown.add(field.name, view, known, moves)
            memory.holders[leaf.slot or 0] = weakref.ref(shown.views[field.name])
        return shown

    def gradient(self, leaf: Leaf) -> torch.Tensor:
        """Return the place of the parameter's gradient in `gathered_grads`."""
        rows, start = self.gradients(leaf), (leaf.slot or 0) * self.memory.array.shape[1]
        size, strides = leaf.shape, leaf.strides
        return rows.as_strided(size, strides, start)

    def whole(self, leaves: Sequence[Leaf]) -> torch.Tensor | None:
        """Return `gathered_grads` as the `out` of one `torch.cat` of the parameters' gradients, or None if that cannot fill it.

        All parameters of the bucket must have a gradient, have one shape and fill their rows.
        """
        shape = leaves[0].shape
        filled = bool(shape) and shape.numel() == self.memory.array.shape[1] and [leaf.slot for leaf in leaves] == list(self.memory.rows)
        if not filled or any(leaf.shape != shape or leaf.order is not None for leaf in leaves):
            return None
        return self.gradients(leaves[0]).view(-1, *shape[1:])

    def gradients(self, leaf: Leaf) -> torch.Tensor:
        """Return the buffer for gathered gradients, with one row for each parameter. It is allocated at the first call."""
        if self._gradients is None:
            with torch.inference_mode(False):
                self._gradients = torch.zeros(self.memory.array.shape, dtype=leaf.gradient_dtype, device=leaf.device)
        return self._gradients


def _dtype(field: Field, hidden: Mapping[str, float], saved: Iterable[ParamState]) -> str:
    """Return the dtype of a field's rows: the transformation's, or the widest in which a member's state was saved."""
    types = {str(numpy_dtype(state[field.name].dtype)) for state in saved if is_wider(field, hidden, state)} - {field.dtype}
    return max(types, key=lambda name: jnp.dtype(name).itemsize) if types else field.dtype
