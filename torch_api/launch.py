"""Launches: the compiled update of each set of live parameters, with all that a call needs at hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from bridge import step, storage
from bridge.dlpack import device_of
from bridge.evaluate import begin_buffers
from bridge.precision import BESIDE
from bridge.problem import Extra, Field, Problem, buffer_shape, layout
from bridge.rules import Rule

from .plan import Leaf, allocate, describe, has_state, param_array
from .rows import Rows

_address = torch.Tensor.data_ptr
# Sets of live leaves whose launch is at hand; an older one is put together again from its compiled program.
_KEPT = 64
_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(function: _Function) -> _Function:
    """A function at which torch.compile breaks its graph: dynamo cannot follow addresses and jax, and failed half-way.

    torch's own decorator waits for the first call, and any optimizer has imported dynamo by then; the public one would
    import it here, which takes as long as torch itself.
    """
    disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return disable(function)


class Launch:
    """The compiled update of one set of live leaves on one device."""

    __slots__ = (
        "device", "inplace", "kept", "kept_order", "leaves", "masks", "order", "params", "part", "program", "seen", "shared", "state",
        "views",
    )  # fmt: skip

    def __init__(self, leaves: Sequence[Leaf], part: slice, program: step.Program, shared: Sequence[Shared]) -> None:
        self.leaves, self.part, self.program, self.shared = leaves, part, program, shared
        self.device = leaves[0].device
        self.inplace = [leaf for leaf in leaves if leaf.memory is not None]
        self.params = [leaf.param for leaf in leaves if leaf.memory is not None or leaf.layout is not None]
        kept = [leaf for leaf in leaves if leaf.memory is None]
        self.kept, self.kept_order = [leaf.local for leaf in kept], [leaf.order for leaf in kept]
        self.order = [leaf.order for leaf in leaves]
        self.state = [memory for leaf in leaves for memory in leaf.state or ()] + [m for part in shared for m in part.memories]
        self.views = [view for leaf in leaves for view in leaf.views]
        self.seen = [address for leaf in leaves for address in leaf.seen]
        self.masks = [_in_order(leaf.elements, leaf.order) for leaf in leaves if leaf.elements is not None]

    def follow(self) -> None:
        """Look at the new places after results came to lie elsewhere."""
        for part in (*self.leaves, *self.shared):
            part.follow()

    def copied(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor that the update may change, and a copy of it, for `restore`."""
        return [(tensor, tensor.detach().clone()) for tensor in (*(leaf.local for leaf in self.leaves), *self.views)]

    def salvage(self) -> list[str]:
        """After a call that failed with its donated arguments gone: give all tensors valid memory; the names whose values are lost."""
        for shared in self.shared:
            shared.salvage()
        return [leaf.name for leaf in self.leaves if leaf.salvage()]


def restore(before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give the tensors the values that they had, wherever they lie now."""
    for tensor, copy in before:
        tensor.detach().copy_(copy)


class Shared:
    """The state of a transformation that belongs to no parameter; every parameter's state shows the same tensors."""

    __slots__ = ("memories", "views")

    def __init__(self, memories: tuple[storage.Memory, ...], views: dict[str, torch.Tensor]) -> None:
        self.memories, self.views = memories, views

    def salvage(self) -> None:
        """Give the tensors valid memory if a failed call took theirs."""
        for memory, view in zip(self.memories, self.views.values(), strict=True):
            if memory.array.is_deleted():
                view.data = torch.zeros_like(view)

    def follow(self) -> None:
        """Look at the new place of the memories after results came to lie elsewhere."""
        self.memories = tuple(map(storage.renewed, self.memories))
        for memory, view in zip(self.memories, self.views.values(), strict=True):
            view.data = memory.tensor(view.device, like=view)


class Launches:
    """The launches of an optimizer as it is now; whatever changes more than numbers makes a new one.

    Args:
      owner: class name for errors.
      active: the leaves that may be trained, in the order that live sets count.
      rows: their hyperparams.
      rules: the rule of each group.
      state: the optimizer's own.
      max_grad_norm: None for no clipping.
      begin: what a field begins with that is kept beside the transformation's state.
    """

    def __init__(
        self,
        owner: str,
        active: Sequence[Leaf],
        rows: Rows,
        rules: Sequence[Rule],
        state: MutableMapping[Any, Any],
        max_grad_norm: float | None,
        begin: Callable[[Leaf, Field], torch.Tensor],
    ) -> None:
        self._owner, self._active, self._rows, self._rules = owner, active, rows, rules
        self._state, self._max_grad_norm, self._begin = state, max_grad_norm, begin
        self.known: dict[Any, list[Launch]] = {}
        self._shared: dict[int, Shared] = {}

    @property
    def latest(self) -> list[Launch]:
        return next(reversed(self.known.values()), [])

    def begin(self, hyperparams: Callable[[], np.ndarray]) -> None:
        """Give state to the leaves that have it from construction on.

        What is kept beside it (an average, a master) begins with the first update, at the weights of that time: a checkpoint
        may be loaded into the model meanwhile.
        """
        leaves = [leaf for leaf in self._active if leaf.spec is not None and self._rules[leaf.group].eager]
        begun = [(leaf, BESIDE - self._state.get(leaf.param, {}).keys()) for leaf in leaves]
        if leaves:
            self._give_state(leaves, hyperparams())
        for leaf, names in begun:
            if names & set(leaf.fields):
                leaf.forget()
                for name in names:
                    self._state[leaf.param].pop(name, None)

    def build(self, live: tuple[int, ...], extra: Extra, scaled: bool, hyperparams: np.ndarray) -> list[Launch]:
        """Launches for a set of live leaves, with state for leaves that have none yet, begun with these numbers.

        `scaled`: the gradients are those of a scaled loss.
        """
        leaves = [self._active[i] for i in live]
        on_device = [list(part) for _, part in itertools.groupby(leaves, key=attrgetter("device"))]
        self._check_devices(on_device)
        programs = [self._program(part, extra, scaled) for part in on_device]
        storage.return_freed()
        for part in on_device:
            self._give_state(part, hyperparams)
        ends = list(itertools.accumulate(map(len, on_device)))
        launches = [
            Launch(part, slice(end - len(part), end), program, [self._shared[u] for u in sorted(self._units(part))])
            for part, end, program in zip(on_device, ends, programs, strict=True)
        ]
        if len(self.known) == _KEPT:
            del self.known[next(iter(self.known))]
        self.known[live, extra, scaled] = launches
        return launches

    def _check_devices(self, on_device: list[list[Leaf]]) -> None:
        if len(on_device) < 2:
            return
        devices = ", ".join(str(part[0].device) for part in on_device)
        if self._max_grad_norm is not None:
            raise ValueError(
                f"{self._owner}: max_grad_norm needs one norm over all parameters, but they lie on {devices}. "
                "Clip with torch.nn.utils.clip_grad_norm_ instead."
            )
        units = [unit for part in on_device for unit in self._units(part)]
        if len(units) > len(set(units)):
            raise ValueError(
                f"{self._owner}: this transformation looks at all its parameters together, but they lie on {devices}. "
                "Use PartitionedOptimizer with a label for each device."
            )

    def _units(self, leaves: Sequence[Leaf]) -> dict[int, list[Leaf]]:
        """The leaves that are evaluated together, by unit."""
        units: dict[int, list[Leaf]] = {}
        for leaf in leaves:
            unit = self._rows.static[leaf.row].unit
            if unit is not None:
                units.setdefault(unit, []).append(leaf)
        return units

    def _problem(self, leaves: Sequence[Leaf]) -> Problem:
        return Problem(self._rows.static[leaves[0].row], tuple(leaf.spec for leaf in leaves), self._rows.skeleton)

    def _fields(self, leaf: Leaf) -> tuple[Field, ...]:
        return self._rows.fields(leaf)[0]

    def _program(self, leaves: list[Leaf], extra: Extra, scaled: bool) -> step.Program:
        described = tuple(
            describe(leaf, self._fields(leaf), self._rules[leaf.group].hidden, leaf.held(self._state.get(leaf.param, {})))
            for leaf in leaves
        )
        units = sorted(self._units(leaves).items())
        shared = tuple(self._shared_signature(unit, part) for unit, part in units)
        skeleton = self._rows.skeleton if any(leaf.spec.path is not None for leaf in leaves) else ()
        device = device_of(leaves[0].param)
        plan = step.Plan(self._rows.static, described, self._max_grad_norm is not None, device, skeleton, shared, extra, scaled)
        try:
            return step.program(plan)
        except TypeError as error:
            missing = re.search(r"missing \d+ required .*argument", str(error))
            if missing is None:
                raise
            raise TypeError(
                f"{self._owner}: the transformation needs more than gradients ({error}). Pass it to step, as opt.step(value=loss), or give "
                "a closure that returns the loss."
            ) from error

    def _shared_signature(self, unit: int, leaves: list[Leaf]) -> tuple[Any, ...]:
        signature = tuple((buffer_shape(field), field.dtype) for field in layout(self._problem(leaves)).shared)
        known = self._shared.get(unit)
        if known is not None and signature != tuple((tuple(m.array.shape), str(m.array.dtype)) for m in known.memories):
            raise ValueError(
                f"{self._owner}: the state of this transformation depends on which parameters have a gradient, and at this step others "
                f"have one than at the first ({len(leaves)} now). Give every parameter a gradient at each step, or freeze it by the mask."
            )
        return signature

    def _give_state(self, leaves: list[Leaf], hyperparams: np.ndarray) -> None:
        values = self._rows.cut(hyperparams)
        taken = {memory for leaf in self._active for memory in (leaf.memory, *(leaf.state or ())) if memory is not None}
        taken |= {memory for shared in self._shared.values() for memory in shared.memories}
        with torch.inference_mode(False):
            for unit, part in self._units(leaves).items():
                self._give_unit_state(unit, part, values[part[0].row], taken)
            for leaf in leaves:
                if leaf.state is None:
                    self._give_leaf_state(leaf, values[leaf.row], taken)

    def _give_leaf_state(self, leaf: Leaf, values: Sequence[float], taken: set[storage.Memory], fresh: Sequence[Any] | None = None) -> None:
        fields, hidden, saved = self._fields(leaf), self._rules[leaf.group].hidden, self._state.get(leaf.param, {})
        if not has_state(fields, saved) and fresh is None:
            fresh = begin_buffers(self._rows.problem(leaf), values, [param_array(leaf)]).own[0]
        leaf.state, views = allocate(leaf, fields, hidden, fresh, leaf.held(saved), taken, self._begin)
        unit = self._rows.static[leaf.row].unit
        views |= {} if unit is None else self._shared[unit].views
        leaf.fields, leaf.shown = tuple(views), tuple(views.values())
        leaf.views = tuple(leaf.held(views).values())
        leaf.seen = list(map(_address, leaf.views))
        if views:
            self._state.setdefault(leaf.param, {}).update(views)  # the dict stays the one that a user may hold

    def _give_unit_state(self, unit: int, leaves: list[Leaf], values: Sequence[float], taken: set[storage.Memory]) -> None:
        """State of leaves that are updated together: what is new begins as `init` of all new leaves gives it."""
        new = [leaf for leaf in leaves if leaf.state is None and not has_state(self._fields(leaf), self._state.get(leaf.param, {}))]
        if new or unit not in self._shared:
            fresh = begin_buffers(self._problem(new or leaves), values, [param_array(leaf) for leaf in new or leaves])
            if unit not in self._shared:
                self._share(unit, leaves, fresh.shared, taken)
            for position, leaf in enumerate(new):
                self._give_leaf_state(leaf, values, taken, fresh.own[position])

    def _share(self, unit: int, leaves: list[Leaf], fresh: Sequence[Any], taken: set[storage.Memory]) -> None:
        """Give a unit its shared state: what was edited by hand or saved last, or else `fresh`; every parameter's state then shows it."""
        fields = layout(self._problem(leaves)).shared
        names = {field.name for field in fields}
        everyone = [leaf for leaf in self._active if leaf.spec is not None and self._rows.static[leaf.row].unit == unit]
        saved = [leaf for leaf in everyone if names and names <= self._state.get(leaf.param, {}).keys()]
        edited = [leaf for leaf in saved if any(self._state[leaf.param][name] is not view for name, view in _shown(leaf, names))]
        # A parameter that was frozen meanwhile shows what the others have left behind: the highest count is the last.
        counts = [f.name for f in fields if f.shape == () and "int" in f.dtype]
        last = max(edited or saved, key=lambda leaf: sum(int(self._state[leaf.param][n]) for n in counts), default=None)
        source = {} if last is None else self._state[last.param]
        for field in fields if source else ():
            shape = tuple(source[field.name].shape)
            if shape != field.shape:
                raise ValueError(
                    f"{self._owner}: state {field.name!r}, which all parameters share, has shape {shape}, expected {field.shape}. It was "
                    "saved with other parameters, or others have a gradient now."
                )
        self._shared[unit] = Shared(*allocate(leaves[0], fields, {}, None if source else fresh, source, taken, self._begin))
        for leaf in saved:
            self._state[leaf.param].update(self._shared[unit].views)


def _shown(leaf: Leaf, names: set[str]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that the leaf's state last showed under these names."""
    return [(name, view) for name, view in zip(leaf.fields, leaf.shown, strict=True) if name in names]


def _in_order(elements: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    return np.ascontiguousarray(elements if order is None else elements.transpose(order)).reshape(-1)
