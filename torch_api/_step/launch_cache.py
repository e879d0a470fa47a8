"""Cache of the bound executables that update each set of parameters with a gradient."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import jax
import numpy as np
import torch

from bridge._compiler import chunking
from bridge._compiler import plan as update
from bridge._compiler.plan import is_worth, takes
from bridge._compiler.spec import Extra
from bridge._interop.dlpack import device_of
from bridge._interop.dtypes import numpy_dtype
from bridge._memory import allocation
from bridge._process import uncollected
from bridge._runtime import executable
from bridge._runtime.executable import ON_ONE_CORE
from bridge._runtime.streaming_stats import Reader
from bridge._runtime.transaction import Transaction
from bridge._xla import streams
from bridge._xla.compile import meanwhile
from torch_api._params.buckets import is_large_row, is_sparse
from torch_api._params.record import Leaf, check_devices
from torch_api._params.record_state import InitialValue, check_saved, has_state, state_signature
from torch_api._params.state import States

from .bound_executable import Block, Launch, restore
from .recompile_reasons import Cache, Situation

_name = attrgetter("name")
# The number of sets of gradients whose bound executables are kept. An older set is bound again from its executables.
_KEPT = 64
# Memory that compiling a step may take for a while.
_COMPILING = 256 << 20
# The ids of the plans of the leaves, their device, and the other inputs of an `UpdatePlan`.
_ProgramKey: TypeAlias = tuple[tuple[int, ...], torch.device, Extra, bool, bool, bool]


class Launches:
    """The bound executables of an optimizer. Any change of more than numbers replaces the cache.

    Args:
      states: the trainable parameters, with their transformations and state. Sets of gradients are positions among them.
      max_grad_norm: None for no clipping.
      cache: the executables that the optimizer has used.
    """

    def __init__(self, states: States, max_grad_norm: float | None, cache: Cache) -> None:
        self.states, self._max_grad_norm, self._cache = states, max_grad_norm, cache
        self._owner, self._active, self._rows, self._rules = states.owner, states.active, states.rows, states.rules
        self._stores = False  # whether XLA materializes the values of all rows of addressed buckets
        self.began = False  # whether preparing the last set of gradients made state
        self.is_outdated = False  # whether the optimizer has a newer cache
        self.known: dict[tuple[tuple[int, ...], Extra, bool, bool], list[list[Launch]]] = {}
        self._described: dict[Leaf, update.Leaf] = {}
        self._kinds: dict[update.Leaf, update.Leaf] = {}
        self._programs_of: dict[_ProgramKey, executable.Program] = {}
        trainable = [leaf for leaf in self._active if leaf.spec is not None]
        kinds = {leaf: self._rows.sort_key(leaf)[:-1] for leaf in trainable if leaf.alone}
        alike, packs = Counter(kinds.values()), {leaf.memory for leaf in trainable if not leaf.alone}
        frequent = chunking.enough(len(kinds) + len(packs))
        # On a GPU, a call costs the host more than the work of a small program costs the device.
        self._equals = {leaf: alike[kind] for leaf, kind in kinds.items() if alike[kind] >= frequent and leaf.device.type == "cpu"}
        self._large: dict[tuple[object, ...], list[Leaf]] = {}  # large rows of buckets, by kind; they may leave their bucket
        for leaf in filter(is_large_row, trainable):
            self._large.setdefault(self._rows.sort_key(leaf)[:-1], []).append(leaf)

        # These two count all trainable parameters, so that the set of gradients does not change the plans. For few elements, gathering the
        # gradients is cheaper than calling one more program.
        self._are_few = sum(leaf.shape.numel() for leaf in trainable) <= ON_ONE_CORE
        lie = [leaf for leaf in trainable if leaf.elements is None and (leaf.alone or self._rows.is_addressed(leaf))]
        sizes = [(str(numpy_dtype(leaf.gradient_dtype)), leaf.shape.numel()) for leaf in lie]
        self._readable = sum(size for dtype, size in sizes if takes(dtype, size))

    @property
    def latest(self) -> list[Launch]:
        """The bound executables of the last set of gradients."""
        return [launch for part in next(reversed(self.known.values()), []) for launch in part]

    def sparse(self, live: Iterable[int]) -> list[Leaf]:
        """Return the records in buckets whose rows without a gradient cost more than an own buffer for each other row.

        All records of a kind are returned, with or without a gradient, because the set of gradients changes from step to step.
        """
        active = {self._active[i] for i in live} if self._large else set()
        found: list[Leaf] = []
        for leaves in self._large.values():
            own = active.intersection(leaves)
            rows = sum(len(memory.rows) for memory in {leaf.memory for leaf in own} if memory is not None)
            if self._stores or is_sparse(rows, len(own), self.states.moved_bytes(leaves[0])):
                found += leaves
        return found

    def build(
        self, live: tuple[int, ...], extra: Extra, scaled: bool, hyperparams: np.ndarray, checked: bool, transaction: Transaction
    ) -> list[list[Launch]]:
        """Return the bound executables for a set of gradients, by device. Parameters without state get their initial state.

        Compiling may be interrupted, the rest of the `transaction` not.

        Args:
          with_grad: the positions of the parameters with a gradient.
          extra: the static description of the extra arguments.
          scaled: whether the gradients are those of a scaled loss.
          hyperparams: the hyperparameters of this step. Initial state may depend on them.
          finite_check_done: whether GradScaler has checked all gradients for infinities.
          transaction: the transaction of the step.

        Returns:
          The bound executables, or an empty list if the step must start over: a signal handler has changed the optimizer, or XLA
          materializes the values of rows whose gradients are read by address.
        """
        values, key = self._rows.cut(hyperparams), (live, extra, scaled, checked)
        checked = checked and self._max_grad_norm is None  # a norm shows infinities too, so one program serves both
        on_device: dict[torch.device, list[tuple[Leaf, int]]] = {}
        for position, i in enumerate(live):
            on_device.setdefault(self._active[i].device, []).append((self._active[i], position))
        if len(on_device) > 1:
            units = [unit for part in on_device.values() for unit in self.states.units([leaf for leaf, _ in part])]
            check_devices(self._owner, on_device, self._max_grad_norm is not None, len(units) > len(set(units)))
        apart = self._max_grad_norm is None and (checked or not scaled)
        addressed = not self._are_few and (apart or is_worth(self._readable))
        leaves = [leaf for part in on_device.values() for leaf, _ in part]
        early = self._begun_early(leaves, values)
        divided = [list(self._divided(self._blocks(part, values, addressed))) for part in on_device.values()]
        firsts = [part[0][0].leaves[0] for part in divided if len(part) > 1]
        opening = [meanwhile(streams.ready, len(hyperparams), device_of(leaf.param)) for leaf in firsts if leaf.device.type == "cpu"]
        before = self._cache.info.compilations
        with uncollected(), transaction.interruptible():
            found = self._programs([tile for part in divided for tile in part], divided, extra, scaled, checked)
        if self.is_outdated:
            return []
        if not self._stores and any(program.stores for program in found):
            self._stores = True
            return []
        programs = iter(found)
        self._rows.looked_at.clear()
        blocks = [block for part in divided for tile in part for block in tile]
        described = [(list(map(_name, block.leaves)), block.described) for block in blocks]
        situation = Situation(described, self._max_grad_norm is not None, scaled, checked, extra)
        self._cache.note(situation, self._cache.info.compilations - before)
        if self._cache.info.compilations > before or not self.known:
            allocation.return_freed()
        wait(opening)
        with uncollected():
            given = [self.states.give([leaf for leaf, _ in part], values, early) for part in on_device.values()]
        self.began = any(given)
        launches = [
            [Launch(tile, next(programs), [self.states.shared[unit] for unit in _units(tile)], self._rows.offsets) for tile in part]
            for part in divided
        ]
        for part in launches:
            self._read_ahead(part)
        if len(self.known) == _KEPT:
            del self.known[next(iter(self.known))]
        self.known[key] = launches
        return launches

    def _begun_early(self, leaves: Sequence[Leaf], values: Sequence[Sequence[float]]) -> dict[Leaf, list[InitialValue]]:
        """Start to write initial state while executables are compiled or read.

        It uses memory held back for compiling, so the peak stays the same.
        """
        if getattr(jax.config, "jax_compilation_cache_dir", None):  # jax most likely reads the executables from its cache
            return self.states.begun_early(leaves, values)
        return self.states.begun_early([leaf for leaf in leaves if leaf.device.type == "cpu"], values, held_back=_COMPILING)

    def whole(
        self, live: Sequence[int], extra: Extra, hyperparams: np.ndarray, compiled: Callable[[Sequence[Block], update.Plan], Any]
    ) -> Launch | None:
        """Return one bound executable for all parameters with a gradient, which are on one device. Its program does more than update them.

        Args:
          compile_program: makes the program from the operands and the plan of their update. State is made only after it returns.

        Returns:
          The bound executable, or None if a signal handler has changed the optimizer.
        """
        values = self._rows.cut(hyperparams)
        leaves = [self._active[i] for i in live]
        blocks = self._blocks([(leaf, position) for position, leaf in enumerate(leaves)], values, addressed=False, singly=True)
        with uncollected():
            program = compiled(blocks, self._plan(blocks, extra, False, False, False, ahead=False))
        if self.is_outdated:
            return None
        self._rows.looked_at.clear()
        allocation.return_freed()
        with uncollected():
            self.began = self.states.give(leaves, values)
        launch = Launch(blocks, program, [self.states.shared[unit] for unit in _units(blocks)], self._rows.offsets)
        launch.prepare()
        return launch

    def _blocks(
        self, leaves: Sequence[tuple[Leaf, int]], values: Sequence[Sequence[float]], addressed: bool, singly: bool = False
    ) -> list[Block]:
        """Return the parameters as operands of programs: first those with their own buffers, then buckets.

        Args:
          leaves: each record with the position of its gradient.
          values: the hyperparameters by row.
          addressed: whether programs may read gradients of buckets by address.
          grads_as_arguments: whether gradients that no program reads by address are arguments of their own; they are gathered otherwise.
        """
        alone, packed = [], {}
        for leaf, position in leaves:
            if leaf.slot is None:
                block = Block(None)
                alone.append(block)
            else:
                block = packed.get(leaf.memory) or packed.setdefault(leaf.memory, Block(self.states.pack(leaf, values[leaf.row])))
            block.leaves.append(leaf)
            block.positions.append(position)
        blocks = [*alone, *sorted(packed.values(), key=lambda block: not block.pack.singly)]  # the order in a `BoundExecutable`
        for block in blocks:
            leaf = block.leaves[0]
            if leaf not in self._described:
                described = self._describe(block)
                block.described = self._kinds.setdefault(described, described)
                if leaf.state is not None:  # before, its initial state may still change
                    self._described[leaf] = block.described
            else:
                block.described = self._described[leaf]
            described = block.described
            if described.at_once and block.pack is not None:
                described = self._read(described, block.pack.small, addressed, singly)
            if described.row.unit is not None and block.pack is not None:
                described = replace(described, members=tuple((each.slot, each.spec) for each in block.leaves))
            if described is not block.described:
                block.described = self._kinds.setdefault(described, described)
        return blocks

    def _read(self, described: update.Leaf, small: bool, addressed: bool, singly: bool) -> update.Leaf:
        """Return the plan of a bucket with the way in which the program reads its gradients: by address, as arguments, or gathered."""
        lie = addressed and not self._stores and (self._max_grad_norm is None or takes(described.spec.dtype, described.size))
        return replace(described, singly=singly and not lie and not small, at_once=lie)

    def _describe(self, block: Block) -> update.Leaf:
        leaf, pack = block.leaves[0], block.pack
        assert leaf.spec is not None
        fields, hidden, row = self.states.fields(leaf), self._rules[leaf.group].hidden, self._rows.static[leaf.row]
        for each in block.leaves if pack is not None else ():
            saved = self.states.shown.get(each.param, {})
            if each.state is None and has_state(fields, saved):
                check_saved(each, fields, hidden, saved)
        other = None if leaf.gradient_dtype is leaf.dtype else str(numpy_dtype(leaf.gradient_dtype))
        if pack is None:
            state = state_signature(leaf, fields, hidden, leaf.held(self.states.shown.get(leaf.param, {})))
            return update.Leaf(row, leaf.spec, state, leaf.memory is not None, leaf.elements is not None, other_gradient=other)
        count, width = pack.memory.array.shape
        state = tuple((tuple(memory.array.shape), str(memory.array.dtype)) for memory in pack.state)
        length = leaf.shape.numel() if leaf.alone else None
        spec = leaf.spec._replace(shape=(width,))
        return update.Leaf(row, spec, state, True, False, count, pack.singly, length=length, at_once=pack.addressed, other_gradient=other)

    def _divided(self, blocks: list[Block]) -> Iterator[list[Block]]:
        """Yield the operands of each program."""
        at_once: dict[str, list[Block]] = {}  # by dtype: one array over all memory is the argument
        for block in blocks:
            if block.described.at_once:
                at_once.setdefault(block.described.spec.dtype, []).append(block)
        yield from at_once.values()
        blocks = [block for block in blocks if not block.described.at_once]
        kinds = [None if block.described.row.unit is not None else id(block.described) for block in blocks]
        counts = [self._equals.get(block.leaves[0], 0) for block in blocks]
        for positions in chunking.divided(kinds, counts, self._cache.restless):
            yield [blocks[position] for position in positions]

    def _programs(
        self, divided: Sequence[Sequence[Block]], on_device: Sequence[Sequence[object]], extra: Extra, scaled: bool, checked: bool
    ) -> list[executable.Program]:
        several = [len(part) > 1 for part in on_device for _ in part]
        plans: dict[_ProgramKey, update.Plan] = {}
        keys = []
        for tile, is_part in zip(divided, several, strict=True):
            kinds = tuple(id(block.described) for block in tile)  # equal plans are one object
            keys.append((kinds, tile[0].leaves[0].device, extra, scaled, checked, is_part))
            if keys[-1] not in self._programs_of or _units(tile):
                plans[keys[-1]] = self._plan(tile, extra, scaled, checked, is_part)
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

    def _read_ahead(self, launches: Sequence[Launch]) -> None:
        """Let the first executable of a device compute the statistics of large gradients of all executables, before any of them runs."""
        plan, far = launches[0].program.plan, [each for launch in launches for each in launch.far]
        launches[0].reader = Reader(far, plan.clip, plan.scaled, plan.device) if far else None

    def _plan(self, tile: Sequence[Block], extra: Extra, scaled: bool, checked: bool, is_part: bool, ahead: bool = True) -> update.Plan:
        leaves = [leaf for block in tile for leaf in block.leaves]
        shared = tuple(
            self.states.shared_signature(unit, [leaf for leaf in leaves if self.states.unit(leaf) == unit]) for unit in _units(tile)
        )
        skeleton = self._rows.skeleton if any(leaf.spec is not None and leaf.spec.path is not None for leaf in leaves) else ()
        clip, described = self._max_grad_norm is not None, tuple(block.described for block in tile)
        plan = update.Plan(described, clip, device_of(leaves[0].param), self._rows.width, skeleton, shared, extra, scaled, checked)
        ahead = ahead and plan.decisive and plan.device.platform == "cpu" and is_worth(self._readable)
        return replace(plan, measured=is_part and plan.decisive, ahead=ahead)

    def follow(self, launches: Sequence[Launch]) -> None:
        """Bind all executables to the new addresses after results moved."""
        for launch in launches:
            launch.follow()
        self.known.clear()

    def salvage(self, error: BaseException, before: Sequence[tuple[torch.Tensor, torch.Tensor]], landed: Sequence[Launch] = ()) -> bool:
        """Give all tensors valid memory after a failed call, whose donated buffers are gone, and restore the copied values.

        A note on the error names the parameters that were updated nevertheless, and those whose values are lost.

        Args:
          error: the error of the call.
          snapshots: tensors with copies of their values before the call.
          completed: the executables whose results are in place.

        Returns:
          Whether any values are lost.
        """
        lost = self.states.salvage()
        restore(before)
        self.known.clear()  # some executables may not have been called
        if lost and not before:
            alone, both = ([leaf.name for leaf in lost if (leaf.memory is None) is is_alone] for is_alone in (True, False))
            parts = ([f"parameters and state of {both}"] if both else []) + ([f"the state of {alone}"] if alone else [])
            error.add_note(f"The update failed half-way; {' and '.join(parts)} are lost and hold NaN. Load a checkpoint.")
        updated = [leaf.name for launch in landed if not (before and launch.program.calls_back) for leaf in launch.leaves]
        if updated:
            error.add_note(f"This step has updated {updated} and no other parameter.")
        return bool(lost)


def _units(blocks: Iterable[Block]) -> list[int]:
    """Return the joint sets that a program with these operands evaluates."""
    return sorted({block.described.row.unit for block in blocks if block.described.row.unit is not None})
