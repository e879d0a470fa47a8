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
from bridge._compiler.apply_transform import Arrays
from bridge._compiler.spec import BESIDE, Field, Problem, Signature, Spec, buffer_shape, looks_across
from bridge._compiler.state_layout import layout
from bridge._interop.dlpack import device_of, to_torch
from bridge._memory import allocation, jax_buffers
from bridge._memory.jax_buffers import lost_like
from bridge._memory.scalar_vectors import reserve
from bridge._runtime.initial_state import begin_buffers, constants
from torch_api._rules.optimizer_spec import Rule
from torch_api._rules.types import MutableParamState, ParamState

from .bucket_state import Pack
from .hyperparam_table import Rows
from .record import Leaf
from .record_state import InitialValue, Shown, allocate, has_state, mask_buffer, param_array, scalars

# Shape, dtype and fill value of a new array.
_ArrayKind: TypeAlias = tuple[tuple[int, ...], np.dtype, complex]


class Shared:
    """State that belongs to the transformation and not to a parameter. The state of each parameter shows the same tensors."""

    __slots__ = ("memories", "shown")

    def __init__(self, memories: tuple[jax_buffers.Memory, ...], shown: Shown) -> None:
        self.memories, self.shown = memories, shown

    def salvage(self) -> None:
        """Allocate memory for the tensors if a failed call has donated theirs."""
        for memory, view in zip(self.memories, self.shown.views.values(), strict=True):
            if memory.is_gone:
                view.data = torch.zeros_like(view)

    def follow(self) -> None:
        """Point the tensors at their buffers after results have moved."""
        self.memories = tuple(map(jax_buffers.renewed, self.memories))
        for memory, view in zip(self.memories, self.shown.views.values(), strict=True):
            view.data = memory.tensor(view.device, like=view)


_address = torch.Tensor.data_ptr


class States:
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
        owner: str,
        active: Sequence[Leaf],
        rows: Rows,
        rules: Sequence[Rule],
        shown: MutableMapping[torch.Tensor, MutableParamState],
        begin: Callable[[Leaf, Field], torch.Tensor],
    ) -> None:
        self.owner, self.active, self.rows, self.rules = owner, active, rows, rules
        self.shown, self._begin = shown, begin
        self._reserved = False
        self._cells: dict[int, Leaf] = {}  # the record that owns the scalar at an address, during `ensure_state`
        self.shared: dict[int, Shared] = {}
        self.packs: dict[jax_buffers.Memory, Pack] = {}

    def begin_eager(self, hyperparams: Callable[[], np.ndarray]) -> None:
        """Initialize the state of parameters whose optimizer has state from construction on.

        Auxiliary state (an average, master weights) is left out. The first update initializes it from the parameters, because a
        checkpoint may be loaded into the model before.
        """
        leaves = [leaf for leaf in self.active if leaf.spec is not None and self.rules[leaf.group].eager]
        begun = [(leaf, BESIDE - self.shown.get(leaf.param, {}).keys()) for leaf in leaves]
        if leaves:
            self.give(leaves, self.rows.cut(hyperparams()))
        for leaf, names in begun:
            if names & set(leaf.fields):
                leaf.forget()
                for name in names:
                    self.shown[leaf.param].pop(name, None)

    def tensors(self) -> Iterator[Iterable[torch.Tensor]]:
        """Return the tensors of shared state. They are in the state of several parameters."""
        shown = [shared.shown for shared in self.shared.values()]
        return (part.values() for each in shown for part in (each.tensors, each.views))

    def salvage(self) -> list[Leaf]:
        """Allocate memory for tensors whose buffers a failed call has donated.

        Returns:
          The records that lost values: of the state, and of the parameter if it has a jax buffer.
        """
        for shared in self.shared.values():
            shared.salvage()
        packed = {memory for pack in self.packs.values() for memory in (pack.memory, *pack.state) if memory.is_gone}
        lost = [leaf for leaf in self.active if leaf.salvage()]
        for memory in packed:
            for tensor in memory.tensors():  # also rows that belong to other optimizers
                if jax_buffers.located(tensor)[0] is None and tensor.data_ptr() - memory.address in range(
                    memory.row_bytes * len(memory.rows)
                ):
                    tensor.data = lost_like(tensor)
        return lost

    def units(self, leaves: Sequence[Leaf]) -> dict[int, list[Leaf]]:
        """Return the records that are in joint sets, by joint set."""
        units: dict[int, list[Leaf]] = {}
        for leaf in leaves:
            unit = self.unit(leaf)
            if unit is not None:
                units.setdefault(unit, []).append(leaf)
        return units

    def unit(self, leaf: Leaf) -> int | None:
        return self.rows.static[leaf.row].unit

    def _problem(self, leaves: Sequence[Leaf]) -> Problem:
        return Problem(self.rows.static[leaves[0].row], tuple(cast(Spec, leaf.spec) for leaf in leaves), self.rows.skeleton)

    def _in_order(self, unit: int, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Sort records as they were when the transformation was traced, so that the trace is found again."""
        _, positions = self.rows.units[unit]
        return sorted(leaves, key=lambda leaf: positions[id(leaf)])

    def fields(self, leaf: Leaf) -> tuple[Field, ...]:
        return self.rows.fields(leaf)[0]

    def shared_signature(self, unit: int, leaves: list[Leaf]) -> tuple[Signature, ...]:
        signature = tuple((buffer_shape(field), field.dtype) for field in layout(self._problem(self._in_order(unit, leaves))).shared)
        known = self.shared.get(unit)
        if known is not None and signature != tuple((tuple(m.array.shape), str(m.array.dtype)) for m in known.memories):
            raise ValueError(
                f"{self.owner}: the state of this transformation depends on which parameters have a gradient, and these have changed "
                f"since the first step ({len(leaves)} now). Give every parameter a gradient at each step, or freeze it by the mask."
            )
        return signature

    def pack(self, leaf: Leaf, values: Sequence[float]) -> Pack:
        """Return the state of the parameter's bucket. It is allocated at the first call."""
        assert leaf.memory is not None
        if leaf.memory not in self.packs:
            everyone = [other for other in self.active if other.memory is leaf.memory and other.slot is not None]
            members = [(other.slot or 0, self.shown.get(other.param, {})) for other in everyone]
            begun: Sequence[complex | None] = [None] * len(self.fields(leaf))  # a joint set gives each parameter its own values
            if self.unit(leaf) is None:
                begun = constants(self.rows.problem(leaf), tuple(values))
            fields, hidden, addressed = self.fields(leaf), self.rules[leaf.group].hidden, self.rows.is_addressed(leaf)
            self.packs[leaf.memory] = Pack(leaf, fields, hidden, begun, members, self._taken(), addressed)
        return self.packs[leaf.memory]

    def _taken(self) -> set[jax_buffers.Memory]:
        """Return the buffers of all parameters and of all state."""
        taken = {memory for leaf in self.active for memory in (leaf.memory, *(leaf.state or ())) if memory is not None}
        taken |= {memory for shared in self.shared.values() for memory in shared.memories}
        return taken | {memory for pack in self.packs.values() for memory in pack.state}

    def begun_early(self, leaves: Iterable[Leaf], values: Sequence[Sequence[float]], held_back: int = 0) -> dict[Leaf, list[InitialValue]]:
        """Start to compute the initial state of parameters that are in no bucket, no joint set and have none yet.

        Args:
          values_by_row: the numbers of each row of the table.
          deferred_bytes: leave out the smallest parameters, up to so many bytes of state.

        Returns:
          Numbers and arrays by record. jax may still be writing the arrays.
        """
        new = [leaf for leaf in leaves if leaf.state is None and leaf.slot is None and self.unit(leaf) is None]
        if held_back:
            new.sort(key=self._state_bytes)
            new = new[bisect(list(accumulate(map(self._state_bytes, new))), held_back) + 1 :]
        begun: dict[Leaf, list[InitialValue]] = {}
        places: dict[Device, list[tuple[list[InitialValue], int, _ArrayKind]]] = {}
        for leaf in new:
            fields = self.fields(leaf)
            if has_state(fields, self.shown.get(leaf.param, {})):
                continue
            known = constants(problem := self.rows.problem(leaf), tuple(values[leaf.row]))
            own = [(field, value) for field, value in zip(fields, known, strict=True) if field.position is not None]
            numbers = [value for _, value in own if value is not None]
            if len(numbers) < len(own):
                begun[leaf] = list(_begun_buffers(problem, values[leaf.row], [leaf]).own[0])
                continue
            column: list[InitialValue] = [*numbers]
            begun[leaf] = column
            kinds = [(buffer_shape(f, leaf.spec), jnp.dtype(f.dtype), value) for (f, _), value in zip(own, numbers, strict=True)]
            arrays = [(i, kind) for i, ((f, _), kind) in enumerate(zip(own, kinds, strict=True)) if f.shape != ()]
            places.setdefault(device_of(leaf.param), []).extend((column, i, kind) for i, kind in arrays)
        for device, on_device in places.items():
            for (column, i, _), array in zip(on_device, allocation.filled([kind for *_, kind in on_device], device), strict=True):
                column[i] = array
        return begun

    def _state_bytes(self, leaf: Leaf) -> int:
        return sum(math.prod(buffer_shape(field, leaf.spec)) * jnp.dtype(field.dtype).itemsize for field in self.fields(leaf))

    def moved_bytes(self, leaf: Leaf) -> int:
        """Return how many bytes an update of the parameter moves: it reads and writes parameter and state, and reads the gradient."""
        return 3 * leaf.local.nbytes + 2 * self._state_bytes(leaf)

    def give(
        self, leaves: Sequence[Leaf], values: Sequence[Sequence[float]], early: Mapping[Leaf, Sequence[InitialValue]] | None = None
    ) -> bool:
        """Initialize or restore the state of records that have none, and return whether there were any.

        Args:
          values_by_row: the numbers of each row of the table.
          prefetched: the result of `prefetch_initial_state`.
        """
        if all(leaf.state is not None for leaf in leaves):
            return False
        taken = self._taken()
        self._cells = {tensor.data_ptr(): leaf for leaf in self.active for tensor in leaf.scalars.values()}
        with torch.inference_mode(False), torch.no_grad():
            self._reserve()
            for unit, part in self.units(leaves).items():
                self._give_unit_state(unit, part, values[part[0].row], taken)
            begun = dict(early or {})
            begun |= self.begun_early((leaf for leaf in leaves if leaf not in begun), values)
            for leaf in leaves:
                if leaf.state is None:
                    self._give_leaf_state(leaf, values[leaf.row], taken, begun.pop(leaf, None))
            jax.block_until_ready([memory.array for leaf in leaves for memory in leaf.state or ()])
        return True

    def _reserve(self) -> None:
        """Reserve the scalar state of all parameters outside buckets in one vector for each dtype and device, in program order."""
        if self._reserved:
            return
        self._reserved = True
        wanted: dict[tuple[torch.dtype, torch.device], list[tuple[Leaf, str]]] = {}
        for leaf in self.active:
            if leaf.spec is not None and leaf.slot is None and leaf.state is None:
                for field in self.fields(leaf):
                    if field.shape == ():
                        wanted.setdefault((getattr(torch, field.dtype), leaf.device), []).append((leaf, field.name))
        for (dtype, device), places in wanted.items():
            for (leaf, name), tensor in zip(places, reserve(len(places), dtype, device), strict=True):
                leaf.spare[name] = tensor

    def _give_leaf_state(
        self, leaf: Leaf, values: Sequence[float], taken: set[jax_buffers.Memory], fresh: Sequence[InitialValue] | None = None
    ) -> None:
        fields, hidden, saved = self.fields(leaf), self.rules[leaf.group].hidden, self.shown.get(leaf.param, {})
        begins = fresh is None and not has_state(fields, saved)
        if leaf.slot is not None:
            pack = self.pack(leaf, values)
            if begins:
                fresh = self._begun(leaf, values)
            elif fresh is None:
                fresh = [None] * len(fields)
            else:
                fresh = _as_tensors(fresh, fields)
            leaf.state, shown = pack.state, pack.give(leaf, hidden, fresh, saved, self._begin)
            leaf.scalars = {}
        else:
            leaf.state, shown = self._apart(leaf, fields, hidden, fresh, leaf.held(saved), taken)
        unit = self.unit(leaf)
        leaf.mirrors = shown.mirrors
        shown = shown if unit is None else shown.joined(self.shared[unit].shown)
        leaf.fields, leaf.shown = tuple(shown.tensors), tuple(shown.tensors.values())
        views = tuple(leaf.held(shown.views).values())
        leaf.views = leaf.shown if all(map(is_, views, leaf.shown)) else views  # one reference to each, as `_is_held` counts
        leaf.seen = list(map(_address, leaf.views))
        if leaf.fields:
            self.shown.setdefault(leaf.param, {}).update(shown.tensors)  # keep the dict: the user may hold it

    def _apart(
        self,
        leaf: Leaf,
        fields: Sequence[Field],
        hidden: Mapping[str, float],
        fresh: Sequence[InitialValue] | None,
        saved: ParamState,
        taken: set[jax_buffers.Memory],
    ) -> tuple[tuple[jax_buffers.Memory, ...], Shown]:
        """Allocate the state of a parameter outside buckets: buffers for arrays, and scalars in a `ScalarVector`."""
        numbers, arrays = ([field for field in fields if (field.shape == ()) is scalar] for scalar in (True, False))
        begun = None if fresh is None else {f.name: x for f, x in zip(fields, fresh, strict=False) if f.position is not None}
        leaf.scalars, shown_scalars = scalars(leaf, numbers, hidden, begun, saved, self._cells)
        self._cells |= {tensor.data_ptr(): leaf for tensor in leaf.scalars.values()}
        memories, shown = allocate(leaf, arrays, hidden, begun, saved, taken, self._begin)
        return memories, shown.joined(shown_scalars, [field.name for field in fields])

    def _begun(self, leaf: Leaf, values: Sequence[float]) -> list[complex | torch.Tensor | None]:
        """Return the initial value of each field of a parameter: a number or a flat tensor, or None for auxiliary state."""
        fields, problem = self.fields(leaf), self.rows.problem(leaf)
        known = constants(problem, tuple(values))
        if all(value is not None or field.position is None for field, value in zip(fields, known, strict=True)):
            return list(known)
        return _as_tensors(_begun_buffers(problem, values, [leaf]).own[0], fields)

    def _give_unit_state(self, unit: int, leaves: list[Leaf], values: Sequence[float], taken: set[jax_buffers.Memory]) -> None:
        """Initialize the state of a joint set. Records without saved state get the result of one `init` of all of them."""
        leaves = self._in_order(unit, leaves)
        new = [leaf for leaf in leaves if leaf.state is None and not has_state(self.fields(leaf), self.shown.get(leaf.param, {}))]
        if new or unit not in self.shared:
            problem = self._problem(new or leaves)
            known = self.rows.begun.get(unit) if problem == self.rows.units[unit][0] else None
            fresh = _begun_buffers(problem, values, new or leaves, known)
            if unit not in self.shared:
                self._share(unit, leaves, fresh.shared, taken)
            for position, leaf in enumerate(new):
                self._give_leaf_state(leaf, values, taken, fresh.own[position])

    def _share(self, unit: int, leaves: list[Leaf], fresh: Sequence[jax.Array], taken: set[jax_buffers.Memory]) -> None:
        """Create the shared state of a joint set, and show it in the state of each parameter that had one.

        The values are those that the user edited, else the latest saved ones, else `initial_arrays`.
        """
        fields = layout(self._problem(leaves)).shared
        names = {field.name for field in fields}
        everyone = [leaf for leaf in self.active if leaf.spec is not None and self.rows.static[leaf.row].unit == unit]
        saved = [leaf for leaf in everyone if names and names <= self.shown.get(leaf.param, {}).keys()]
        edited = [leaf for leaf in saved if any(self.shown[leaf.param][name] is not view for name, view in _shown(leaf, names))]
        # A parameter that was frozen for a while shows an older state. The latest state has the highest counts.
        counts = [f.name for f in fields if f.shape == () and "int" in f.dtype]
        last = max(edited or saved, key=lambda leaf: sum(int(self.shown[leaf.param][n]) for n in counts), default=None)
        source = {} if last is None else self.shown[last.param]
        for field in fields if source else ():
            shape = tuple(source[field.name].shape)
            if shape != field.shape:
                raise ValueError(
                    f"{self.owner}: state {field.name!r}, which all parameters share, has shape {shape}, expected {field.shape}. It was "
                    "saved with other parameters, or other parameters have a gradient now."
                )
        begun = None if source else {field.name: x for field, x in zip(fields, fresh, strict=True)}
        self.shared[unit] = Shared(*allocate(leaves[0], fields, {}, begun, source, taken, self._begin))
        for leaf in saved:
            self.shown[leaf.param].update(self.shared[unit].shown.tensors)


def _begun_buffers(problem: Problem, values: Sequence[float], leaves: Sequence[Leaf], known: Arrays | None = None) -> Arrays:
    """Return the initial state of parameters.

    If the transformation looks across elements, `init` sees 0 outside an element mask, as `update` does. The state of elements outside
    the mask is initialized as without a mask, because the mask may be removed.
    """
    whole = [param_array(leaf) for leaf in leaves]
    fresh = begin_buffers(problem, values, whole, known)
    masks = [None if leaf.elements is None else mask_buffer(leaf.elements, leaf.order) for leaf in leaves]
    if known is not None or all(mask is None for mask in masks) or not looks_across(problem):
        return fresh
    zeros = [p if mask is None else jnp.where(mask, p, jnp.zeros_like(p)) for p, mask in zip(whole, masks, strict=True)]
    seen = begin_buffers(problem, values, zeros)
    own = [
        [
            jnp.where(mask, x, y) if mask is not None and field.shape is None else x
            for field, x, y in zip(fields, inside, outside, strict=False)
        ]
        for fields, mask, inside, outside in zip(layout(problem).own, masks, seen.own, fresh.own, strict=True)
    ]
    return seen._replace(own=own)


def _as_tensors(buffers: Sequence[InitialValue], fields: Sequence[Field]) -> list[complex | torch.Tensor | None]:
    """Return initial arrays as flat tensors, followed by None for each field of auxiliary state."""
    return [*to_torch(list(buffers)), *(None for _ in fields[len(buffers) :])]


def _shown(leaf: Leaf, names: set[str]) -> list[tuple[str, torch.Tensor]]:
    """Return name and tensor of the fields with these names, as `optimizer.state` last showed them."""
    return [(name, view) for name, view in zip(leaf.fields, leaf.shown, strict=True) if name in names]
