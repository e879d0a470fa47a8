"""The state of an optimizer's parameters: initialize or restore it, allocate its buffers, and show it in `optimizer.state`."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from operator import is_
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compat.types import Device
from bridge._compiler.apply_transform import UpdateArrays
from bridge._compiler.spec import AUX_FIELDS, LeafSpec, Signature, StateField, UpdateSpec, buffer_shape, may_cross_elements
from bridge._compiler.state_layout import state_layout
from bridge._interop.dlpack import device_of, to_torch
from bridge._memory import allocation, jax_buffers
from bridge._memory.jax_buffers import lost_like
from bridge._memory.scalar_vectors import reserve_scalars
from bridge._runtime.initial_state import init_buffers, uniform_initial_values
from torch_api._rules.optimizer_spec import OptimizerSpec
from torch_api._rules.types import MutableParamState, ParamState

from .bucket_state import BucketState
from .hyperparam_table import HyperparamTable
from .record import ParamRecord
from .record_state import InitialValue, StateTensors, allocate_scalars, allocate_state, has_state, mask_buffer, param_array

# Shape, dtype and fill value of a new array.
_ArrayKind: TypeAlias = tuple[tuple[int, ...], np.dtype, complex]


class SharedState:
    """State that belongs to the transformation and not to a parameter. The state of each parameter shows the same tensors."""

    __slots__ = ("state_buffers", "state_tensors")

    def __init__(self, state_buffers: tuple[jax_buffers.JaxBuffer, ...], state_tensors: StateTensors) -> None:
        self.state_buffers, self.state_tensors = state_buffers, state_tensors

    def recover_after_failure(self) -> None:
        """Allocate memory for the tensors if a failed call has donated theirs."""
        for memory, view in zip(self.state_buffers, self.state_tensors.views.values(), strict=True):
            if memory.is_lost:
                view.data = torch.zeros_like(view)

    def rebind(self) -> None:
        """Point the tensors at their buffers after results have moved."""
        self.state_buffers = tuple(map(jax_buffers.rebind_moved, self.state_buffers))
        for memory, view in zip(self.state_buffers, self.state_tensors.views.values(), strict=True):
            view.data = memory.alias_tensor(view.device, like=view)


_address = torch.Tensor.data_ptr


class StateStore:
    """The state of an optimizer's parameters. It is stored by record, by bucket (`bucket_states`) and by joint set (`shared_states`).

    Args:
      cls_name: class name for errors.
      trainable: the records of parameters that may be trained.
      hyperparam_table: their hyperparameters.
      optimizer_specs: the `OptimizerSpec` of each group.
      optimizer_state: `optimizer.state`. It shows all state, and holds saved state until `ensure_state`.
      initial_aux_value: gives the initial value of a field of auxiliary state.
    """

    def __init__(
        self,
        cls_name: str,
        trainable: Sequence[ParamRecord],
        hyperparam_table: HyperparamTable,
        optimizer_specs: Sequence[OptimizerSpec],
        optimizer_state: MutableMapping[torch.Tensor, MutableParamState],
        initial_aux_value: Callable[[ParamRecord, StateField], torch.Tensor],
    ) -> None:
        self.cls_name, self.trainable, self.hyperparam_table, self.optimizer_specs = cls_name, trainable, hyperparam_table, optimizer_specs
        self.optimizer_state, self._initial_aux_value = optimizer_state, initial_aux_value
        self._has_reserved_scalars = False
        self._scalar_owners: dict[int, ParamRecord] = {}  # the record that owns the scalar at an address, during `ensure_state`
        self.shared_states: dict[int, SharedState] = {}
        self.bucket_states: dict[jax_buffers.JaxBuffer, BucketState] = {}

    def init_eager_state(self, hyperparams: Callable[[], np.ndarray]) -> None:
        """Initialize the state of parameters whose optimizer has state from construction on.

        Auxiliary state (an average, master weights) is left out. The first update initializes it from the parameters, because a
        checkpoint may be loaded into the model before.
        """
        leaves = [leaf for leaf in self.trainable if leaf.spec is not None and self.optimizer_specs[leaf.group_index].eager_state]
        absent_aux_names = [(leaf, AUX_FIELDS - self.optimizer_state.get(leaf.param, {}).keys()) for leaf in leaves]
        if leaves:
            self.ensure_state(leaves, self.hyperparam_table.values_by_row(hyperparams()))
        for leaf, names in absent_aux_names:
            if names & set(leaf.state_names):
                leaf.drop_state()
                for name in names:
                    self.optimizer_state[leaf.param].pop(name, None)

    def shared_tensors(self) -> Iterator[Iterable[torch.Tensor]]:
        """Return the tensors of shared state. They are in the state of several parameters."""
        shared_tensors = [shared.state_tensors for shared in self.shared_states.values()]
        return (part.values() for each in shared_tensors for part in (each.tensors, each.views))

    def recover_after_failure(self) -> list[ParamRecord]:
        """Allocate memory for tensors whose buffers a failed call has donated.

        Returns:
          The records that lost values: of the state, and of the parameter if it has a jax buffer.
        """
        for shared in self.shared_states.values():
            shared.recover_after_failure()
        lost_bucket_buffers = {
            memory
            for bucket_state in self.bucket_states.values()
            for memory in (bucket_state.jax_buffer, *bucket_state.state_buffers)
            if memory.is_lost
        }
        lost = [leaf for leaf in self.trainable if leaf.recover_after_failure()]
        for memory in lost_bucket_buffers:
            for tensor in memory.tensors():  # also rows that belong to other optimizers
                if jax_buffers.find_buffer(tensor)[0] is None and tensor.data_ptr() - memory.address in range(
                    memory.row_bytes * len(memory.rows)
                ):
                    tensor.data = lost_like(tensor)
        return lost

    def group_by_joint_set(self, leaves: Sequence[ParamRecord]) -> dict[int, list[ParamRecord]]:
        """Return the records that are in joint sets, by joint set."""
        joint_sets: dict[int, list[ParamRecord]] = {}
        for leaf in leaves:
            joint_set = self.joint_set_of(leaf)
            if joint_set is not None:
                joint_sets.setdefault(joint_set, []).append(leaf)
        return joint_sets

    def joint_set_of(self, leaf: ParamRecord) -> int | None:
        return self.hyperparam_table.transforms[leaf.hyperparam_row].joint_set

    def _update_spec(self, leaves: Sequence[ParamRecord]) -> UpdateSpec:
        return UpdateSpec(
            self.hyperparam_table.transforms[leaves[0].hyperparam_row],
            tuple(cast(LeafSpec, leaf.spec) for leaf in leaves),
            self.hyperparam_table.all_paths,
        )

    def _in_trace_order(self, joint_set: int, leaves: Sequence[ParamRecord]) -> list[ParamRecord]:
        """Sort records as they were when the transformation was traced, so that the trace is found again."""
        _, positions = self.hyperparam_table.joint_sets[joint_set]
        return sorted(leaves, key=lambda leaf: positions[id(leaf)])

    def fields(self, leaf: ParamRecord) -> tuple[StateField, ...]:
        return self.hyperparam_table.fields(leaf)[0]

    def shared_signature(self, joint_set: int, leaves: list[ParamRecord]) -> tuple[Signature, ...]:
        signature = tuple(
            (buffer_shape(field), field.dtype)
            for field in state_layout(self._update_spec(self._in_trace_order(joint_set, leaves))).shared_fields
        )
        known = self.shared_states.get(joint_set)
        if known is not None and signature != tuple((tuple(m.array.shape), str(m.array.dtype)) for m in known.state_buffers):
            raise ValueError(
                f"{self.cls_name}: the state of this transformation depends on which parameters have a gradient, and these have changed "
                f"since the first step ({len(leaves)} now). Give every parameter a gradient at each step, or freeze it by the mask."
            )
        return signature

    def ensure_bucket_state(self, leaf: ParamRecord, row_values: Sequence[float]) -> BucketState:
        """Return the state of the parameter's bucket. It is allocated at the first call."""
        assert leaf.jax_buffer is not None
        if leaf.jax_buffer not in self.bucket_states:
            everyone = [other for other in self.trainable if other.jax_buffer is leaf.jax_buffer and other.bucket_row is not None]
            members = [(other.bucket_row or 0, self.optimizer_state.get(other.param, {})) for other in everyone]
            initial_constants: Sequence[complex | None] = [None] * len(self.fields(leaf))  # a joint set gives each parameter its own values
            if self.joint_set_of(leaf) is None:
                initial_constants = uniform_initial_values(self.hyperparam_table.problem(leaf), tuple(row_values))
            fields, hidden, addressed = (
                self.fields(leaf),
                self.optimizer_specs[leaf.group_index].hidden_state,
                self.hyperparam_table.may_address_grad(leaf),
            )
            self.bucket_states[leaf.jax_buffer] = BucketState(
                leaf, fields, hidden, initial_constants, members, self._buffers_in_use(), addressed
            )
        return self.bucket_states[leaf.jax_buffer]

    def _buffers_in_use(self) -> set[jax_buffers.JaxBuffer]:
        """Return the buffers of all parameters and of all state."""
        buffers = {memory for leaf in self.trainable for memory in (leaf.jax_buffer, *(leaf.state_buffers or ())) if memory is not None}
        buffers |= {memory for shared in self.shared_states.values() for memory in shared.state_buffers}
        return buffers | {memory for pack in self.bucket_states.values() for memory in pack.state_buffers}

    def prefetch_initial_state(
        self, leaves: Iterable[ParamRecord], values_by_row: Sequence[Sequence[float]], deferred_bytes: int = 0
    ) -> dict[ParamRecord, list[InitialValue]]:
        """Start to compute the initial state of parameters that are in no bucket, no joint set and have none yet.

        Args:
          values_by_row: the numbers of each row of the table.
          deferred_bytes: leave out the smallest parameters, up to so many bytes of state.

        Returns:
          Numbers and arrays by record. jax may still be writing the arrays.
        """
        new = [leaf for leaf in leaves if leaf.state_buffers is None and leaf.bucket_row is None and self.joint_set_of(leaf) is None]
        if deferred_bytes:
            new.sort(key=self._state_bytes)
            new = new[bisect(list(accumulate(map(self._state_bytes, new))), deferred_bytes) + 1 :]
        initial_values: dict[ParamRecord, list[InitialValue]] = {}
        places: dict[Device, list[tuple[list[InitialValue], int, _ArrayKind]]] = {}
        for leaf in new:
            fields = self.fields(leaf)
            if has_state(fields, self.optimizer_state.get(leaf.param, {})):
                continue
            known = uniform_initial_values(problem := self.hyperparam_table.problem(leaf), tuple(values_by_row[leaf.hyperparam_row]))
            own = [(field, value) for field, value in zip(fields, known, strict=True) if field.state_index is not None]
            numbers = [value for _, value in own if value is not None]
            if len(numbers) < len(own):
                initial_values[leaf] = list(_initial_buffers(problem, values_by_row[leaf.hyperparam_row], [leaf]).leaf_state[0])
                continue
            column: list[InitialValue] = [*numbers]
            initial_values[leaf] = column
            kinds = [(buffer_shape(f, leaf.spec), jnp.dtype(f.dtype), value) for (f, _), value in zip(own, numbers, strict=True)]
            arrays = [(i, kind) for i, ((f, _), kind) in enumerate(zip(own, kinds, strict=True)) if f.shape != ()]
            places.setdefault(device_of(leaf.param), []).extend((column, i, kind) for i, kind in arrays)
        for device, on_device in places.items():
            for (column, i, _), array in zip(on_device, allocation.full_many([kind for *_, kind in on_device], device), strict=True):
                column[i] = array
        return initial_values

    def _state_bytes(self, leaf: ParamRecord) -> int:
        return sum(math.prod(buffer_shape(field, leaf.spec)) * jnp.dtype(field.dtype).itemsize for field in self.fields(leaf))

    def moved_bytes(self, leaf: ParamRecord) -> int:
        """Return how many bytes an update of the parameter moves: it reads and writes parameter and state, and reads the gradient."""
        return 3 * leaf.local_tensor.nbytes + 2 * self._state_bytes(leaf)

    def ensure_state(
        self,
        leaves: Sequence[ParamRecord],
        values_by_row: Sequence[Sequence[float]],
        prefetched: Mapping[ParamRecord, Sequence[InitialValue]] | None = None,
    ) -> bool:
        """Initialize or restore the state of records that have none, and return whether there were any.

        Args:
          values_by_row: the numbers of each row of the table.
          prefetched: the result of `prefetch_initial_state`.
        """
        if all(leaf.state_buffers is not None for leaf in leaves):
            return False
        buffers_in_use = self._buffers_in_use()
        self._scalar_owners = {tensor.data_ptr(): leaf for leaf in self.trainable for tensor in leaf.scalar_state.values()}
        with torch.inference_mode(False), torch.no_grad():
            self._reserve_scalars()
            for joint_set, part in self.group_by_joint_set(leaves).items():
                self._init_joint_state(joint_set, part, values_by_row[part[0].hyperparam_row], buffers_in_use)
            initial_values = dict(prefetched or {})
            initial_values |= self.prefetch_initial_state((leaf for leaf in leaves if leaf not in initial_values), values_by_row)
            for leaf in leaves:
                if leaf.state_buffers is None:
                    self._init_leaf_state(leaf, values_by_row[leaf.hyperparam_row], buffers_in_use, initial_values.pop(leaf, None))
            jax.block_until_ready([memory.array for leaf in leaves for memory in leaf.state_buffers or ()])
        return True

    def _reserve_scalars(self) -> None:
        """Reserve the scalar state of all parameters outside buckets in one vector for each dtype and device, in program order."""
        if self._has_reserved_scalars:
            return
        self._has_reserved_scalars = True
        wanted: dict[tuple[torch.dtype, torch.device], list[tuple[ParamRecord, str]]] = {}
        for leaf in self.trainable:
            if leaf.spec is not None and leaf.bucket_row is None and leaf.state_buffers is None:
                for field in self.fields(leaf):
                    if field.shape == ():
                        wanted.setdefault((getattr(torch, field.dtype), leaf.device), []).append((leaf, field.name))
        for (dtype, device), places in wanted.items():
            for (leaf, name), tensor in zip(places, reserve_scalars(len(places), dtype, device), strict=True):
                leaf.reserved_scalars[name] = tensor

    def _init_leaf_state(
        self,
        leaf: ParamRecord,
        row_values: Sequence[float],
        buffers_in_use: set[jax_buffers.JaxBuffer],
        initial_values: Sequence[InitialValue] | None = None,
    ) -> None:
        fields, hidden, saved = (
            self.fields(leaf),
            self.optimizer_specs[leaf.group_index].hidden_state,
            self.optimizer_state.get(leaf.param, {}),
        )
        begins = initial_values is None and not has_state(fields, saved)
        if leaf.bucket_row is not None:
            bucket_state = self.ensure_bucket_state(leaf, row_values)
            if begins:
                initial_values = self._initial_values(leaf, row_values)
            elif initial_values is None:
                initial_values = [None] * len(fields)
            else:
                initial_values = _as_tensors(initial_values, fields)
            leaf.state_buffers, state_tensors = (
                bucket_state.state_buffers,
                bucket_state.init_row(leaf, hidden, initial_values, saved, self._initial_aux_value),
            )
            leaf.scalar_state = {}
        else:
            leaf.state_buffers, state_tensors = self._allocate_own_state(
                leaf, fields, hidden, initial_values, leaf.local_values(saved), buffers_in_use
            )
        joint_set = self.joint_set_of(leaf)
        leaf.mirrors = state_tensors.mirrors
        state_tensors = state_tensors if joint_set is None else state_tensors.merge(self.shared_states[joint_set].state_tensors)
        leaf.state_names, leaf.state_tensors = tuple(state_tensors.tensors), tuple(state_tensors.tensors.values())
        views = tuple(leaf.local_values(state_tensors.views).values())
        leaf.local_state = (
            leaf.state_tensors if all(map(is_, views, leaf.state_tensors)) else views
        )  # one reference to each, as `_is_externally_referenced` counts
        leaf.state_addresses = list(map(_address, leaf.local_state))
        if leaf.state_names:
            self.optimizer_state.setdefault(leaf.param, {}).update(state_tensors.tensors)  # keep the dict: the user may hold it

    def _allocate_own_state(
        self,
        leaf: ParamRecord,
        fields: Sequence[StateField],
        hidden: Mapping[str, float],
        initial_values: Sequence[InitialValue] | None,
        saved: ParamState,
        buffers_in_use: set[jax_buffers.JaxBuffer],
    ) -> tuple[tuple[jax_buffers.JaxBuffer, ...], StateTensors]:
        """Allocate the state of a parameter outside buckets: buffers for arrays, and scalars in a `ScalarVector`."""
        numbers, arrays = ([field for field in fields if (field.shape == ()) is scalar] for scalar in (True, False))
        values_by_field = (
            None
            if initial_values is None
            else {f.name: x for f, x in zip(fields, initial_values, strict=False) if f.state_index is not None}
        )
        leaf.scalar_state, shown_scalars = allocate_scalars(leaf, numbers, hidden, values_by_field, saved, self._scalar_owners)
        self._scalar_owners |= {tensor.data_ptr(): leaf for tensor in leaf.scalar_state.values()}
        memories, shown = allocate_state(leaf, arrays, hidden, values_by_field, saved, buffers_in_use, self._initial_aux_value)
        return memories, shown.merge(shown_scalars, [field.name for field in fields])

    def _initial_values(self, leaf: ParamRecord, row_values: Sequence[float]) -> list[complex | torch.Tensor | None]:
        """Return the initial value of each field of a parameter: a number or a flat tensor, or None for auxiliary state."""
        fields, problem = self.fields(leaf), self.hyperparam_table.problem(leaf)
        known = uniform_initial_values(problem, tuple(row_values))
        if all(value is not None or field.state_index is None for field, value in zip(fields, known, strict=True)):
            return list(known)
        return _as_tensors(_initial_buffers(problem, row_values, [leaf]).leaf_state[0], fields)

    def _init_joint_state(
        self, joint_set: int, leaves: list[ParamRecord], row_values: Sequence[float], buffers_in_use: set[jax_buffers.JaxBuffer]
    ) -> None:
        """Initialize the state of a joint set. Records without saved state get the result of one `init` of all of them."""
        leaves = self._in_trace_order(joint_set, leaves)
        new = [
            leaf
            for leaf in leaves
            if leaf.state_buffers is None and not has_state(self.fields(leaf), self.optimizer_state.get(leaf.param, {}))
        ]
        if new or joint_set not in self.shared_states:
            problem = self._update_spec(new or leaves)
            known = (
                self.hyperparam_table.joint_initial_state.get(joint_set)
                if problem == self.hyperparam_table.joint_sets[joint_set][0]
                else None
            )
            fresh = _initial_buffers(problem, row_values, new or leaves, known)
            if joint_set not in self.shared_states:
                self._show_shared_state(joint_set, leaves, fresh.shared_state, buffers_in_use)
            for position, leaf in enumerate(new):
                self._init_leaf_state(leaf, row_values, buffers_in_use, fresh.leaf_state[position])

    def _show_shared_state(
        self, joint_set: int, leaves: list[ParamRecord], initial_arrays: Sequence[jax.Array], buffers_in_use: set[jax_buffers.JaxBuffer]
    ) -> None:
        """Create the shared state of a joint set, and show it in the state of each parameter that had one.

        The values are those that the user edited, else the latest saved ones, else `initial_arrays`.
        """
        fields = state_layout(self._update_spec(leaves)).shared_fields
        names = {field.name for field in fields}
        everyone = [
            leaf
            for leaf in self.trainable
            if leaf.spec is not None and self.hyperparam_table.transforms[leaf.hyperparam_row].joint_set == joint_set
        ]
        saved = [leaf for leaf in everyone if names and names <= self.optimizer_state.get(leaf.param, {}).keys()]
        edited = [
            leaf
            for leaf in saved
            if any(self.optimizer_state[leaf.param][name] is not view for name, view in _visible_tensors(leaf, names))
        ]
        # A parameter that was frozen for a while shows an older state. The latest state has the highest counts.
        counts = [f.name for f in fields if f.shape == () and "int" in f.dtype]
        last = max(edited or saved, key=lambda leaf: sum(int(self.optimizer_state[leaf.param][n]) for n in counts), default=None)
        source = {} if last is None else self.optimizer_state[last.param]
        for field in fields if source else ():
            shape = tuple(source[field.name].shape)
            if shape != field.shape:
                raise ValueError(
                    f"{self.cls_name}: state {field.name!r}, which all parameters share, has shape {shape}, expected {field.shape}. It was "
                    "saved with other parameters, or other parameters have a gradient now."
                )
        values_by_field = None if source else {field.name: x for field, x in zip(fields, initial_arrays, strict=True)}
        self.shared_states[joint_set] = SharedState(
            *allocate_state(leaves[0], fields, {}, values_by_field, source, buffers_in_use, self._initial_aux_value)
        )
        for leaf in saved:
            self.optimizer_state[leaf.param].update(self.shared_states[joint_set].state_tensors.tensors)


def _initial_buffers(
    problem: UpdateSpec, row_values: Sequence[float], leaves: Sequence[ParamRecord], known: UpdateArrays | None = None
) -> UpdateArrays:
    """Return the initial state of parameters.

    If the transformation looks across elements, `init` sees 0 outside an element mask, as `update` does. The state of elements outside
    the mask is initialized as without a mask, because the mask may be removed.
    """
    param_arrays = [param_array(leaf) for leaf in leaves]
    fresh = init_buffers(problem, row_values, param_arrays, known)
    masks = [None if leaf.element_mask is None else mask_buffer(leaf.element_mask, leaf.dim_order) for leaf in leaves]
    if known is not None or all(mask is None for mask in masks) or not may_cross_elements(problem):
        return fresh
    zeros = [p if mask is None else jnp.where(mask, p, jnp.zeros_like(p)) for p, mask in zip(param_arrays, masks, strict=True)]
    seen = init_buffers(problem, row_values, zeros)
    own = [
        [
            jnp.where(mask, x, y) if mask is not None and field.shape is None else x
            for field, x, y in zip(fields, inside, outside, strict=False)
        ]
        for fields, mask, inside, outside in zip(state_layout(problem).leaf_fields, masks, seen.leaf_state, fresh.leaf_state, strict=True)
    ]
    return seen._replace(leaf_state=own)


def _as_tensors(buffers: Sequence[InitialValue], fields: Sequence[StateField]) -> list[complex | torch.Tensor | None]:
    """Return initial arrays as flat tensors, followed by None for each field of auxiliary state."""
    return [*to_torch(list(buffers)), *(None for _ in fields[len(buffers) :])]


def _visible_tensors(leaf: ParamRecord, names: set[str]) -> list[tuple[str, torch.Tensor]]:
    """Return name and tensor of the fields with these names, as `optimizer.state` last showed them."""
    return [(name, view) for name, view in zip(leaf.state_names, leaf.state_tensors, strict=True) if name in names]
