"""Launches: which programs update each set of live parameters, and the state that they update."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import step, storage, update
from bridge.cells import reserve
from bridge.dlpack import device_of, to_torch
from bridge.evaluate import begin_buffers, constants
from bridge.precision import BESIDE
from bridge.problem import Extra, Field, Problem, buffer_shape, layout
from bridge.rules import Rule

from . import tiles
from .cache import Cache, Situation
from .launch import Block, Launch, Shared, restore
from .packs import Pack
from .plan import Leaf, allocate, check_devices, check_saved, has_state, lost_like, param_array, scalars, state_signature
from .rows import Rows

_address, _name = torch.Tensor.data_ptr, attrgetter("name")
# Sets of live leaves whose launches are at hand; those of an older one are put together again from their programs.
_KEPT = 64


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
      cache: the programs that the optimizer has used.
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
        cache: Cache,
    ) -> None:
        self._owner, self._active, self._rows, self._rules = owner, active, rows, rules
        self.state, self._max_grad_norm, self._begin = state, max_grad_norm, begin
        self._cache = cache
        self._reserved = False
        self.began = False  # whether the last set of live leaves had some that were given state
        self.known: dict[Any, list[list[Launch]]] = {}
        self._shared: dict[int, Shared] = {}
        self._packs: dict[storage.Memory, Pack] = {}
        self._described: dict[Leaf, update.Leaf] = {}
        self._kinds: dict[update.Leaf, update.Leaf] = {}
        self._programs_of: dict[Any, step.Program] = {}
        trainable = [leaf for leaf in active if leaf.spec is not None]
        kinds = {leaf: rows.sort_key(leaf)[:-1] for leaf in trainable if leaf.slot is None}
        alike, packs = Counter(kinds.values()), {leaf.memory for leaf in trainable if leaf.slot is not None}
        frequent = tiles.equals(len(kinds) + len(packs))
        # On a GPU calling a program costs the host more than the device has to do in it.
        self._frequent = {leaf for leaf, kind in kinds.items() if alike[kind] >= frequent and leaf.device.type == "cpu"}

    @property
    def latest(self) -> list[Launch]:
        """The launches of the set of live leaves that was seen last."""
        return [launch for part in next(reversed(self.known.values()), []) for launch in part]

    def shared_tensors(self) -> Iterator[Iterable[torch.Tensor]]:
        """The tensors of the state that several parameters share, which is in the state of each."""
        return (shared.views.values() for shared in self._shared.values())

    def begin(self, hyperparams: Callable[[], np.ndarray]) -> None:
        """Give state to the leaves that have it from construction on.

        What is kept beside it (an average, a master) begins with the first update, at the weights of that time: a checkpoint
        may be loaded into the model meanwhile.
        """
        leaves = [leaf for leaf in self._active if leaf.spec is not None and self._rules[leaf.group].eager]
        begun = [(leaf, BESIDE - self.state.get(leaf.param, {}).keys()) for leaf in leaves]
        if leaves:
            self._give_state(leaves, self._rows.cut(hyperparams()))
        for leaf, names in begun:
            if names & set(leaf.fields):
                leaf.forget()
                for name in names:
                    self.state[leaf.param].pop(name, None)

    def build(self, live: tuple[int, ...], extra: Extra, scaled: bool, hyperparams: np.ndarray) -> list[list[Launch]]:
        """Launches for a set of live leaves, by device, with state for leaves that have none yet, begun with these numbers.

        `scaled`: the gradients are those of a scaled loss.
        """
        values = self._rows.cut(hyperparams)
        on_device: dict[torch.device, list[tuple[Leaf, int]]] = {}
        for position, i in enumerate(live):
            on_device.setdefault(self._active[i].device, []).append((self._active[i], position))
        if len(on_device) > 1:
            units = [unit for part in on_device.values() for unit in self._units([leaf for leaf, _ in part])]
            check_devices(self._owner, on_device, self._max_grad_norm is not None, len(units) > len(set(units)))
        divided = [list(self._divided(self._blocks(part, values, loops=not scaled), scaled)) for part in on_device.values()]
        early = {}
        if getattr(jax.config, "jax_compilation_cache_dir", None):  # else what compiling needs would lie beside it, at the peak of memory
            early = self._begun_early([leaf for part in on_device.values() for leaf, _ in part], values)
        before = self._cache.info.compilations
        programs = iter(self._programs([tile for part in divided for tile in part], divided, extra, scaled))
        blocks = [block for part in divided for tile in part for block in tile]
        described = [(list(map(_name, block.leaves)), block.described) for block in blocks]
        situation = Situation(described, self._max_grad_norm is not None, scaled, extra)
        self._cache.note(situation, self._cache.info.compilations - before)
        if self._cache.info.compilations > before or any(leaf.state is None for block in blocks for leaf in block.leaves):
            storage.return_freed()
        for part in on_device.values():
            self._give_state([leaf for leaf, _ in part], values, early)
        launches = [
            [Launch(tile, next(programs), [self._shared[unit] for unit in _units(tile)], self._rows.offsets) for tile in part]
            for part in divided
        ]
        if len(self.known) == _KEPT:
            del self.known[next(iter(self.known))]
        self.known[live, extra, scaled] = launches
        return launches

    def whole(
        self, live: Sequence[int], extra: Extra, hyperparams: np.ndarray, compiled: Callable[[Sequence[Block], update.Plan], Any]
    ) -> Launch:
        """One launch of these leaves, all on one device, as one program that does more than update them.

        `compiled` makes it, from the blocks and the plan of their update; state is given only when it has.
        """
        values = self._rows.cut(hyperparams)
        leaves = [self._active[i] for i in live]
        blocks = self._blocks([(leaf, position) for position, leaf in enumerate(leaves)], values, loops=False, singly=True)
        program = compiled(blocks, self._plan(blocks, extra, False, False))
        storage.return_freed()
        self._give_state(leaves, values)
        launch = Launch(blocks, program, [self._shared[unit] for unit in _units(blocks)], self._rows.offsets)
        launch.prepare()
        return launch

    def _blocks(
        self, leaves: Sequence[tuple[Leaf, int]], values: Sequence[Sequence[float]], loops: bool, singly: bool = False
    ) -> list[Block]:
        """The leaves, each with its position among the gradients, as programs take them: by themselves, then in packs.

        `loops`: whether rows may be updated in a loop; else their gradients are gathered, or arguments of their own if `singly`.
        """
        alone, packed = [], {}
        for leaf, position in leaves:
            if leaf.slot is None:
                block = Block(None)
                alone.append(block)
            else:
                block = packed.get(leaf.memory) or packed.setdefault(leaf.memory, Block(self._pack(leaf, values[leaf.row])))
            block.leaves.append(leaf)
            block.positions.append(position)
        blocks = [*alone, *sorted(packed.values(), key=lambda block: not block.pack.singly)]  # as a launch has their gradients
        for block in blocks:
            leaf = block.leaves[0]
            if leaf not in self._described:
                described = self._describe(block)
                block.described = self._kinds.setdefault(described, described)
                if leaf.state is not None:  # else what it begins with may still be changed
                    self._described[leaf] = block.described
            else:
                block.described = self._described[leaf]
            if block.described.looped and not loops:
                described = replace(block.described, looped=False, singly=singly)
                block.described = self._kinds.setdefault(described, described)
        return blocks

    def _describe(self, block: Block) -> update.Leaf:
        leaf, pack = block.leaves[0], block.pack
        fields, hidden, row = self._fields(leaf), self._rules[leaf.group].hidden, self._rows.static[leaf.row]
        for each in block.leaves if pack is not None else ():
            saved = self.state.get(each.param, {})
            if each.state is None and has_state(fields, saved):
                check_saved(each, fields, hidden, saved)
        if pack is None:
            state = state_signature(leaf, fields, hidden, leaf.held(self.state.get(leaf.param, {})))
            return update.Leaf(row, leaf.spec, state, leaf.memory is not None, leaf.elements is not None)
        count, width = pack.memory.array.shape
        state = tuple((tuple(memory.array.shape), str(memory.array.dtype)) for memory in pack.state)
        return update.Leaf(row, leaf.spec._replace(shape=(width,)), state, True, False, count, pack.singly, pack.looped)

    def _divided(self, blocks: list[Block], scaled: bool) -> Iterator[list[Block]]:
        """The blocks of each program."""
        if blocks[0].leaves[0].device.type != "cpu" and not scaled and self._max_grad_norm is None:
            alone = [block for block in blocks if block.described.row.unit is None]
            rows = [len(block.rows) for block in alone]
            elements = [block.leaves[0].shape.numel() * count for block, count in zip(alone, rows, strict=True)]
            first = [alone[i] for i in tiles.ahead(elements, rows)]
            yield from ([block] for block in first)
            blocks = [block for block in blocks if block not in first]
        yield from ([block] for block in blocks if block.described.looped)  # each in an order of its own
        blocks = [block for block in blocks if not block.described.looped]
        kinds = [None if block.described.row.unit is not None else id(block.described) for block in blocks]
        sizes = [block.leaves[0].shape.numel() if block.pack is None else 0 for block in blocks]
        frequent = [block.leaves[0] in self._frequent for block in blocks]
        for positions in tiles.divided(kinds, sizes, frequent, self._cache.restless):
            yield [blocks[position] for position in positions]

    def _programs(
        self, divided: Sequence[Sequence[Block]], on_device: Sequence[Sequence[Any]], extra: Extra, scaled: bool
    ) -> list[step.Program]:
        several = [len(part) > 1 for part in on_device for _ in part]
        plans: dict[Any, update.Plan] = {}
        keys = []
        for tile, is_part in zip(divided, several, strict=True):
            kinds = tuple(id(block.described) for block in tile)  # equal ones are one object
            keys.append((kinds, tile[0].leaves[0].device, extra, scaled, is_part))
            if keys[-1] not in self._programs_of or _units(tile):
                plans[keys[-1]] = self._plan(tile, extra, scaled, is_part)
        try:
            self._programs_of |= zip(plans, self._cache.programs(list(plans.values())), strict=True)
        except TypeError as error:
            missing = re.search(r"missing \d+ required .*argument", str(error))
            if missing is None:
                raise
            raise TypeError(
                f"{self._owner}: the transformation needs more than gradients ({error}). Pass it to step, as opt.step(value=loss), or give "
                "a closure that returns the loss."
            ) from error
        return [self._programs_of[key] for key in keys]

    def _plan(self, tile: Sequence[Block], extra: Extra, scaled: bool, is_part: bool) -> update.Plan:
        leaves = [block.leaves[0] for block in tile]
        shared = tuple(self._shared_signature(unit, [leaf for leaf in leaves if self._unit(leaf) == unit]) for unit in _units(tile))
        skeleton = self._rows.skeleton if any(leaf.spec.path is not None for leaf in leaves) else ()
        clip, described = self._max_grad_norm is not None, tuple(block.described for block in tile)
        measured = is_part and (clip or scaled)
        return update.Plan(described, clip, device_of(leaves[0].param), self._rows.width, skeleton, shared, extra, scaled, measured)

    def follow(self, launches: Sequence[Launch]) -> None:
        """Look at the new places after results came to lie elsewhere."""
        for launch in launches:
            launch.follow()
        self.known.clear()

    def salvage(self, error: BaseException, before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """After a call that failed with its donated arguments gone: give all tensors valid memory, and the values of `before`.

        Returns:
          Whether there were such; the error then names those whose values are lost.
        """
        for shared in self._shared.values():
            shared.salvage()
        packed = {memory for pack in self._packs.values() for memory in (pack.memory, *pack.state) if memory.array.is_deleted()}
        lost = [leaf.name for leaf in self._active if leaf.salvage()]
        for memory in packed:
            for tensor in memory.tensors():  # rows of others too
                if storage.located(tensor)[0] is None and tensor.data_ptr() - memory.address in range(memory.row_bytes * len(memory.rows)):
                    tensor.data = lost_like(tensor)
        restore(before)
        self.known.clear()  # some may not have come to their call
        if lost and not before:
            error.add_note(f"The update failed half-way; parameters and state of {lost} are lost and hold NaN. Load a checkpoint.")
        return bool(lost)

    def _units(self, leaves: Sequence[Leaf]) -> dict[int, list[Leaf]]:
        """The leaves that are evaluated together, by unit."""
        units: dict[int, list[Leaf]] = {}
        for leaf in leaves:
            unit = self._unit(leaf)
            if unit is not None:
                units.setdefault(unit, []).append(leaf)
        return units

    def _unit(self, leaf: Leaf) -> int | None:
        return self._rows.static[leaf.row].unit

    def _problem(self, leaves: Sequence[Leaf]) -> Problem:
        return Problem(self._rows.static[leaves[0].row], tuple(leaf.spec for leaf in leaves), self._rows.skeleton)

    def _fields(self, leaf: Leaf) -> tuple[Field, ...]:
        return self._rows.fields(leaf)[0]

    def _shared_signature(self, unit: int, leaves: list[Leaf]) -> tuple[Any, ...]:
        signature = tuple((buffer_shape(field), field.dtype) for field in layout(self._problem(leaves)).shared)
        known = self._shared.get(unit)
        if known is not None and signature != tuple((tuple(m.array.shape), str(m.array.dtype)) for m in known.memories):
            raise ValueError(
                f"{self._owner}: the state of this transformation depends on which parameters have a gradient, and at this step others "
                f"have one than at the first ({len(leaves)} now). Give every parameter a gradient at each step, or freeze it by the mask."
            )
        return signature

    def _pack(self, leaf: Leaf, values: Sequence[float]) -> Pack:
        """The pack that the leaf is in."""
        assert leaf.memory is not None
        if leaf.memory not in self._packs:
            everyone = [other for other in self._active if other.memory is leaf.memory and other.slot is not None]
            members = [(other.slot or 0, self.state.get(other.param, {})) for other in everyone]
            begun = constants(self._rows.problem(leaf), tuple(values))
            self._packs[leaf.memory] = Pack(leaf, self._fields(leaf), self._rules[leaf.group].hidden, begun, members, self._taken())
        return self._packs[leaf.memory]

    def _taken(self) -> set[storage.Memory]:
        """The memories of parameters and state that are in use."""
        taken = {memory for leaf in self._active for memory in (leaf.memory, *(leaf.state or ())) if memory is not None}
        taken |= {memory for shared in self._shared.values() for memory in shared.memories}
        return taken | {memory for pack in self._packs.values() for memory in pack.state}

    def _begun_early(self, leaves: Sequence[Leaf], values: Sequence[Sequence[float]]) -> dict[Leaf, list[Any]]:
        """What the state of leaves by themselves begins with, still being written while programs are traced and read."""
        new = [leaf for leaf in leaves if leaf.state is None and leaf.slot is None and self._unit(leaf) is None]
        new = [leaf for leaf in new if not has_state(self._fields(leaf), self.state.get(leaf.param, {}))]
        return {leaf: self._begun(leaf, values[leaf.row], in_memory=True) for leaf in new}

    def _give_state(self, leaves: Sequence[Leaf], values: Sequence[Sequence[float]], early: Mapping[Leaf, Any] | None = None) -> None:
        self.began = any(leaf.state is None for leaf in leaves)
        if not self.began:
            return
        taken = self._taken()
        with torch.inference_mode(False), torch.no_grad():
            self._reserve()
            for unit, part in self._units(leaves).items():
                self._give_unit_state(unit, part, values[part[0].row], taken)
            for leaf in leaves:
                if leaf.state is None:
                    self._give_leaf_state(leaf, values[leaf.row], taken, (early or {}).get(leaf))
            jax.block_until_ready([memory.array for leaf in leaves for memory in leaf.state or ()])

    def _reserve(self) -> None:
        """Scalars for all leaves that may come to be updated by themselves, side by side in the order of programs."""
        if self._reserved:
            return
        self._reserved = True
        wanted: dict[Any, list[tuple[Leaf, str]]] = {}
        for leaf in self._active:
            if leaf.spec is not None and leaf.slot is None and leaf.state is None:
                for field in self._fields(leaf):
                    if field.shape == ():
                        wanted.setdefault((getattr(torch, field.dtype), leaf.device), []).append((leaf, field.name))
        for (dtype, device), places in wanted.items():
            for (leaf, name), tensor in zip(places, reserve(len(places), dtype, device), strict=True):
                leaf.spare[name] = tensor

    def _give_leaf_state(self, leaf: Leaf, values: Sequence[float], taken: set[storage.Memory], fresh: Sequence[Any] | None = None) -> None:
        fields, hidden, saved = self._fields(leaf), self._rules[leaf.group].hidden, self.state.get(leaf.param, {})
        begins = fresh is None and not has_state(fields, saved)
        if leaf.slot is not None:
            pack = self._pack(leaf, values)
            fresh = self._begun(leaf, values) if begins else [None] * len(fields)
            leaf.state, views = pack.state, pack.give(leaf, hidden, fresh, saved, self._begin)
        else:
            fresh = self._begun(leaf, values, in_memory=True) if begins else fresh
            leaf.state, views = self._apart(leaf, fields, hidden, fresh, leaf.held(saved), taken)
        unit = self._unit(leaf)
        views |= {} if unit is None else self._shared[unit].views
        leaf.fields, leaf.shown = tuple(views), tuple(views.values())
        leaf.views = leaf.shown if leaf.layout is None else tuple(leaf.held(views).values())
        leaf.seen = list(map(_address, leaf.views))
        if views:
            self.state.setdefault(leaf.param, {}).update(views)  # the dict stays the one that a user may hold

    def _apart(
        self,
        leaf: Leaf,
        fields: Sequence[Field],
        hidden: Mapping[str, float],
        fresh: Sequence[Any] | None,
        saved: Mapping[str, Any],
        taken: set[storage.Memory],
    ) -> tuple[tuple[storage.Memory, ...], dict[str, torch.Tensor]]:
        """As `allocate`, for a leaf that is updated by itself: its scalars are in no memory."""
        numbers, arrays = ([field for field in fields if (field.shape == ()) is scalar] for scalar in (True, False))
        begun = None if fresh is None else {f.name: x for f, x in zip(fields, fresh, strict=False) if f.position is not None}
        leaf.scalars = scalars(leaf, numbers, hidden, begun, saved)
        memories, views = allocate(leaf, arrays, hidden, begun, saved, taken, self._begin)
        views |= {name: x.detach() for name, x in leaf.scalars.items() if name not in hidden}
        return memories, {field.name: views[field.name] for field in fields if field.name in views}

    def _begun(self, leaf: Leaf, values: Sequence[float], in_memory: bool = False) -> list[Any]:
        """What the state of a leaf that is updated by itself begins with, None for what is kept beside it.

        `in_memory`: as buffers that only jax holds; else each as one number or as a flat tensor.
        """
        fields, problem = self._fields(leaf), self._rows.problem(leaf)
        known = constants(problem, tuple(values))
        if any(value is None and field.position is not None for field, value in zip(fields, known, strict=True)):
            buffers = begin_buffers(problem, values, [param_array(leaf)]).own[0]
            return list(buffers) if in_memory else [*to_torch(list(buffers)), *(None for _ in fields[len(buffers) :])]
        if not in_memory:
            return list(known)
        device = device_of(leaf.param)
        begun = [(field, value) for field, value in zip(fields, known, strict=True) if field.position is not None]
        return [
            value if field.shape == () else storage.full(buffer_shape(field, leaf.spec), jnp.dtype(field.dtype), value, device, wait=False)
            for field, value in begun
        ]

    def _give_unit_state(self, unit: int, leaves: list[Leaf], values: Sequence[float], taken: set[storage.Memory]) -> None:
        """State of leaves that are updated together: what is new begins as `init` of all new leaves gives it."""
        new = [leaf for leaf in leaves if leaf.state is None and not has_state(self._fields(leaf), self.state.get(leaf.param, {}))]
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
        saved = [leaf for leaf in everyone if names and names <= self.state.get(leaf.param, {}).keys()]
        edited = [leaf for leaf in saved if any(self.state[leaf.param][name] is not view for name, view in _shown(leaf, names))]
        # A parameter that was frozen meanwhile shows what the others have left behind: the highest count is the last.
        counts = [f.name for f in fields if f.shape == () and "int" in f.dtype]
        last = max(edited or saved, key=lambda leaf: sum(int(self.state[leaf.param][n]) for n in counts), default=None)
        source = {} if last is None else self.state[last.param]
        for field in fields if source else ():
            shape = tuple(source[field.name].shape)
            if shape != field.shape:
                raise ValueError(
                    f"{self._owner}: state {field.name!r}, which all parameters share, has shape {shape}, expected {field.shape}. It was "
                    "saved with other parameters, or others have a gradient now."
                )
        begun = None if source else {field.name: x for field, x in zip(fields, fresh, strict=True)}
        self._shared[unit] = Shared(*allocate(leaves[0], fields, {}, begun, source, taken, self._begin))
        for leaf in saved:
            self.state[leaf.param].update(self._shared[unit].views)


def _units(blocks: Iterable[Block]) -> list[int]:
    """The units that are evaluated in a program of these blocks."""
    return sorted({block.described.row.unit for block in blocks if block.described.row.unit is not None})


def _shown(leaf: Leaf, names: set[str]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that the leaf's state last showed under these names."""
    return [(name, view) for name, view in zip(leaf.fields, leaf.shown, strict=True) if name in names]
