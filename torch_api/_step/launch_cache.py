"""Cache of the bound executables that update each set of parameters with a gradient."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import torch

from bridge._compiler import chunking, policy
from bridge._compiler import plan as update
from bridge._compiler.spec import NO_EXTRA_ARGS, ExtraArgsSpec
from bridge._interop.dlpack import device_of
from bridge._interop.dtypes import numpy_dtype
from bridge._memory import allocation
from bridge._memory.gradient_sources import GradientArguments
from bridge._memory.jax_buffers import JaxBuffer
from bridge._process import gc_paused
from bridge._runtime import executable
from bridge._runtime.execute import DeviceStep
from bridge._runtime.transaction import Transaction
from bridge._xla import streams
from bridge._xla.compile import LazyExecutable, submit
from torch_api._params.buckets import is_large_row
from torch_api._params.record import ParamRecord, check_devices
from torch_api._params.record_state import InitialValue, check_saved_state, has_state, state_signature
from torch_api._params.sharding import ShardGroups
from torch_api._params.state import StateStore

from .bound_executable import BoundExecutable, ProgramOperand, restore_values
from .recompile_reasons import RecompileInputs, UsedExecutables
from .stats_layout import StatsLayout, lay_out_stats

_name = attrgetter("name")
# The number of sets of gradients whose bound executables are kept. An older set is bound again from its executables.
_MAX_GRAD_SETS = 64
# Memory that compiling a step may take for a while.
_COMPILE_BYTES = 256 << 20
# The ids of the plans of the leaves, their device, and the other inputs of an `UpdatePlan`.
_ExecutableKey: TypeAlias = tuple[tuple[int, ...], torch.device, ExtraArgsSpec, bool, bool, tuple[float, ...]]


class GradSet(NamedTuple):
    """A set of gradients, and what else decides which executables a step needs.

    with_grad: the positions of the parameters with a gradient, among the trainable ones.
    extra: what programs must know of the extra arguments.
    has_loss_scale: whether the gradients are those of a scaled loss.
    finite_check_done: whether GradScaler has checked all of them for infinities.
    """

    with_grad: tuple[int, ...]
    extra: ExtraArgsSpec = NO_EXTRA_ARGS
    has_loss_scale: bool = False
    finite_check_done: bool = False


class LaunchCache:
    """The bound executables of an optimizer. A change of more than numbers replaces the cache.

    Args:
      states: the trainable parameters, with their transformations and state. Sets of gradients are positions among them.
      max_grad_norm: None for no clipping.
      has_metrics: whether programs return the metrics of each parameter.
      cache: the executables that the optimizer has used.
    """

    def __init__(self, states: StateStore, max_grad_norm: float | None, has_metrics: bool, cache: UsedExecutables) -> None:
        self.states, self._max_grad_norm, self._has_metrics, self._cache = states, max_grad_norm, has_metrics, cache
        self._cls_name, self._trainable, self._hyperparam_table, self._rules = (
            states.cls_name,
            states.trainable,
            states.hyperparam_table,
            states.optimizer_specs,
        )
        self._materializes_rows = False  # whether XLA materializes the values of all rows of addressed buckets
        self.has_new_state = False  # whether preparing the last set of gradients made state
        self.is_outdated = False  # whether the optimizer has a newer cache
        self.bound_by_grad_set: dict[GradSet, list[DeviceStep[BoundExecutable]]] = {}
        self.last_grad_set: GradSet | None = None  # that of the last step
        self._leaf_plans: dict[ParamRecord, update.LeafPlan] = {}
        self._interned_plans: dict[update.LeafPlan, update.LeafPlan] = {}
        self._executables: dict[_ExecutableKey, executable.UpdateExecutable] = {}
        self._stats_executables: dict[update.StatsPlan, executable.StatsExecutable] = {}
        trainable = [leaf for leaf in self._trainable if leaf.spec is not None]
        kinds = {leaf: self._hyperparam_table.canonical_order(leaf)[:-1] for leaf in trainable if leaf.has_own_buffer}
        alike, packs = Counter(kinds.values()), {leaf.jax_buffer for leaf in trainable if not leaf.has_own_buffer}
        frequent = policy.CHUNKING.min_equal_leaves(len(kinds) + len(packs))
        # On a GPU, a call costs the host more than the work of a small program costs the device.
        self._equal_counts = {leaf: alike[kind] for leaf, kind in kinds.items() if alike[kind] >= frequent and leaf.device.type == "cpu"}
        self._large_rows_by_kind: dict[
            tuple[object, ...], list[ParamRecord]
        ] = {}  # large rows of buckets, by kind; they may leave their bucket
        for leaf in filter(is_large_row, trainable):
            self._large_rows_by_kind.setdefault(self._hyperparam_table.canonical_order(leaf)[:-1], []).append(leaf)

        # These two count all trainable parameters, so that the set of gradients does not change the plans. For few elements, gathering the
        # gradients is cheaper than calling one more program.
        self._has_few_elements = sum(leaf.shape.numel() for leaf in trainable) <= policy.BUCKETING.max_gathered_elements
        readable = [
            leaf
            for leaf in trainable
            if leaf.element_mask is None and (leaf.has_own_buffer or self._hyperparam_table.may_address_grad(leaf))
        ]
        self.shard_groups = ShardGroups.of(leaf.dtensor_layout for leaf in self._trainable if leaf.param.requires_grad)
        sizes = [(str(numpy_dtype(leaf.grad_dtype)), leaf.shape.numel()) for leaf in readable]
        self._streamable_elements = sum(size for dtype, size in sizes if policy.STREAMING.can_stream(dtype, size))

    @property
    def last_used(self) -> list[BoundExecutable]:
        """The bound executables of the last step. None before the first step, and after a step whose results have moved."""
        return [launch for part in self.last_steps for launch in part.launches]

    @property
    def last_steps(self) -> Sequence[DeviceStep[BoundExecutable]]:
        """What the last step has run, by device. Nothing where `last_used` is empty."""
        return () if self.last_grad_set is None else self.bound_by_grad_set.get(self.last_grad_set, ())

    def leaves_of_sparse_buckets(self, with_grad: Iterable[int]) -> list[ParamRecord]:
        """Return the records in buckets whose rows without a gradient cost more than an own buffer for each other row.

        All records of a kind are returned, with or without a gradient, because the set of gradients changes from step to step.
        """
        active = {self._trainable[i] for i in with_grad} if self._large_rows_by_kind else set()
        found: list[ParamRecord] = []
        for leaves in self._large_rows_by_kind.values():
            own = active.intersection(leaves)
            rows = sum(len(memory.rows) for memory in {leaf.jax_buffer for leaf in own} if memory is not None)
            if self._materializes_rows or policy.BUCKETING.is_underused(rows, len(own), self.states.moved_bytes(leaves[0])):
                found += leaves
        return found

    def prepare(self, grad_set: GradSet, hyperparams: np.ndarray, transaction: Transaction) -> list[DeviceStep[BoundExecutable]]:
        """Return the bound executables for a set of gradients, by device. Parameters without state get their initial state.

        Compiling may be interrupted, the rest of the `transaction` not.

        Args:
          grad_set: the set of gradients.
          hyperparams: the hyperparameters of this step. Initial state may depend on them.
          transaction: the transaction of the step.

        Returns:
          The bound executables, or an empty list if the step must start over: a signal handler has changed the optimizer, or XLA
          materializes the values of rows whose gradients are read by address.
        """
        values, key = self._hyperparam_table.values_by_row(hyperparams), grad_set
        if self._max_grad_norm is not None:  # a norm shows infinities too, so one program serves both
            grad_set = grad_set._replace(finite_check_done=False)
        by_device = self._leaves_by_device(grad_set.with_grad)
        leaves = [[leaf for leaf, _ in part] for part in by_device]
        prefetched = self._prefetch_initial_state([leaf for part in leaves for leaf in part], values)
        addressed = self._may_address_grads(grad_set)
        chunks = [list(self._chunk(self._make_operands(part, values, addressed))) for part in by_device]
        stats_layouts = [self._lay_out_stats(part, grad_set) for part in chunks]
        stream_forks = _compile_stream_forks(chunks, len(hyperparams))
        compiled = self._compile(chunks, stats_layouts, grad_set, transaction)
        if compiled is None:
            return []
        wait(stream_forks)
        with gc_paused():
            made_state = [self.states.ensure_state(part, values, prefetched) for part in leaves]
        self.has_new_state = any(made_state)
        executables, stats_executables = compiled
        steps = self._bind(chunks, stats_layouts, iter(executables), iter(stats_executables))
        if len(self.bound_by_grad_set) == _MAX_GRAD_SETS:
            del self.bound_by_grad_set[next(iter(self.bound_by_grad_set))]
        self.bound_by_grad_set[key] = steps
        return steps

    def _leaves_by_device(self, with_grad: Sequence[int]) -> list[list[tuple[ParamRecord, int]]]:
        """Return the parameters with a gradient, each with the position of its gradient, in one list for each device.

        Raises:
          ValueError: something needs the parameters of several devices together.
        """
        by_device: dict[torch.device, list[tuple[ParamRecord, int]]] = {}
        for position, i in enumerate(with_grad):
            by_device.setdefault(self._trainable[i].device, []).append((self._trainable[i], position))
        if len(by_device) > 1:
            joint_sets = [unit for part in by_device.values() for unit in self.states.group_by_joint_set([leaf for leaf, _ in part])]
            check_devices(self._cls_name, by_device, self._max_grad_norm is not None, len(joint_sets) > len(set(joint_sets)))
        return list(by_device.values())

    def _may_address_grads(self, grad_set: GradSet) -> bool:
        """Return whether programs may read gradients of buckets by address."""
        return not (self._has_few_elements or self._has_metrics) and (not self.needs_stats(grad_set) or self._streams_stats)

    def needs_stats(self, grad_set: GradSet) -> bool:
        """Return whether an update needs statistics of all gradients."""
        return self._max_grad_norm is not None or (grad_set.has_loss_scale and not grad_set.finite_check_done)

    @property
    def _streams_stats(self) -> bool:
        """Whether statistics stream over large gradients on a CPU."""
        return policy.STREAMING.is_worth_streaming(self._streamable_elements)

    def _lay_out_stats(self, chunks: Sequence[Sequence[ProgramOperand]], grad_set: GradSet) -> StatsLayout | None:
        """Return how the statistics on one device are computed; None if none are needed."""
        if not self.needs_stats(grad_set):
            return None
        return lay_out_stats(chunks, self._streams_stats and chunks[0][0].leaves[0].device.type == "cpu", self.shard_groups)

    def _compile(
        self,
        chunks: Sequence[Sequence[Sequence[ProgramOperand]]],
        stats_layouts: Sequence[StatsLayout | None],
        grad_set: GradSet,
        transaction: Transaction,
    ) -> tuple[list[executable.UpdateExecutable], list[executable.StatsExecutable]] | None:
        """Return the executable of each chunk, and those of the statistics; None if the step must start over."""
        before = self._cache.info.compilations
        with gc_paused(), transaction.interruptible():
            executables, stats_executables = self._get_executables(chunks, stats_layouts, grad_set)
        if self.is_outdated:
            return None
        if not self._materializes_rows and any(program.materializes_rows for program in executables):
            self._materializes_rows = True
            return None
        self._hyperparam_table.held_trace.clear()
        operands = [operand for part in chunks for chunk in part for operand in chunk]
        leaf_plans = [(list(map(_name, operand.leaves)), operand.leaf_plan) for operand in operands]
        _, extra, has_loss_scale, finite_check_done = grad_set
        inputs = RecompileInputs(leaf_plans, self._max_grad_norm is not None, has_loss_scale, finite_check_done, extra)
        self._cache.record_miss(inputs, self._cache.info.compilations - before, {operand.leaves[0].device for operand in operands})
        if self._cache.info.compilations > before or not self.bound_by_grad_set:
            allocation.release_freed_memory()
        return executables, stats_executables

    def _bind(
        self,
        chunks: Sequence[Sequence[Sequence[ProgramOperand]]],
        stats_layouts: Sequence[StatsLayout | None],
        executables: Iterator[executable.UpdateExecutable],
        stats_executables: Iterator[executable.StatsExecutable],
    ) -> list[DeviceStep[BoundExecutable]]:
        """Return the bound executables of each device."""
        steps: list[DeviceStep[BoundExecutable]] = []
        for part, layout in zip(chunks, stats_layouts, strict=True):
            launches = [self._bound(chunk, next(executables)) for chunk in part]
            stage = None if layout is None else layout.stage(launches[0].executable.plan, stats_executables)
            steps.append(DeviceStep(launches, stage))
        return steps

    def _bound(self, operands: Sequence[ProgramOperand], program: executable.UpdateExecutable) -> BoundExecutable:
        shared = [self.states.shared_states[joint_set] for joint_set in _list_joint_sets(operands)]
        sources = [source for operand in operands for source in operand.grad_sources]
        gradients = GradientArguments(sources, operands[0].leaves[0].device)
        return BoundExecutable(program, operands, shared, self._hyperparam_table.row_offsets, gradients)

    def _prefetch_initial_state(
        self, leaves: Sequence[ParamRecord], values: Sequence[Sequence[float]]
    ) -> dict[ParamRecord, list[InitialValue]]:
        """Start to write initial state while executables are compiled or read.

        It uses memory held back for compiling, so the peak stays the same.
        """
        if getattr(jax.config, "jax_compilation_cache_dir", None):  # jax most likely reads the executables from its cache
            return self.states.prefetch_initial_state(leaves, values)
        return self.states.prefetch_initial_state(
            [leaf for leaf in leaves if leaf.device.type == "cpu"], values, deferred_bytes=_COMPILE_BYTES
        )

    def prepare_single(
        self,
        with_grad: Sequence[int],
        extra: ExtraArgsSpec,
        hyperparams: np.ndarray,
        compile_program: Callable[[Sequence[ProgramOperand], update.UpdatePlan], Any],
    ) -> BoundExecutable | None:
        """Return one bound executable for all parameters with a gradient, which are on one device. Its program does more than update them.

        Args:
          compile_program: makes the program from the operands and the plan of their update. State is made only after it returns.

        Returns:
          The bound executable, or None if a signal handler has changed the optimizer.
        """
        values = self._hyperparam_table.values_by_row(hyperparams)
        leaves = [self._trainable[i] for i in with_grad]
        blocks = self._make_operands(
            [(leaf, position) for position, leaf in enumerate(leaves)], values, addressed=False, grads_as_arguments=True
        )
        with gc_paused():
            weights = (0.0 if self._max_grad_norm is None else 1.0,) * len(blocks)
            plan = self._make_plan(blocks, GradSet(tuple(with_grad), extra), weights)
            program = compile_program(blocks, plan)
        if self.is_outdated:
            return None
        self._hyperparam_table.held_trace.clear()
        allocation.release_freed_memory()
        with gc_paused():
            self.has_new_state = self.states.ensure_state(leaves, values)
        return self._bound(blocks, program)

    def _make_operands(
        self,
        leaves: Sequence[tuple[ParamRecord, int]],
        values: Sequence[Sequence[float]],
        addressed: bool,
        grads_as_arguments: bool = False,
    ) -> list[ProgramOperand]:
        """Return the parameters as operands of programs: first those with their own buffers, then buckets.

        Args:
          leaves: each record with the position of its gradient.
          values: the hyperparameters by row.
          addressed: whether programs may read gradients of buckets by address.
          grads_as_arguments: whether gradients that no program reads by address are arguments of their own; they are gathered otherwise.
        """
        alone: list[ProgramOperand] = []
        by_bucket: dict[JaxBuffer | None, ProgramOperand] = {}
        for leaf, position in leaves:
            if leaf.bucket_row is None:
                block = ProgramOperand(None)
                alone.append(block)
            else:
                block = by_bucket.get(leaf.jax_buffer) or by_bucket.setdefault(
                    leaf.jax_buffer, ProgramOperand(self.states.ensure_bucket_state(leaf, values[leaf.hyperparam_row]))
                )
            block.leaves.append(leaf)
            block.grad_positions.append(position)
        blocks = [*alone, *sorted(by_bucket.values(), key=lambda block: block.bucket is not None and not block.bucket.grads_as_arguments)]
        for block in blocks:
            leaf = block.leaves[0]
            if leaf not in self._leaf_plans:
                described = self._make_leaf_plan(block)
                block.leaf_plan = self._interned_plans.setdefault(described, described)
                if leaf.state_buffers is not None:  # before, its initial state may still change
                    self._leaf_plans[leaf] = block.leaf_plan
            else:
                block.leaf_plan = self._leaf_plans[leaf]
            described = block.leaf_plan
            if described.addresses_grads and block.bucket is not None:
                described = self._choose_grad_source(described, block.bucket.gathers_grads, addressed, grads_as_arguments)
            if described.transform.joint_set is not None and block.bucket is not None:
                described = replace(described, bucket_members=tuple((each.bucket_row, each.spec) for each in block.leaves))
            if described is not block.leaf_plan:
                block.leaf_plan = self._interned_plans.setdefault(described, described)
        return blocks

    def _choose_grad_source(
        self, leaf_plan: update.LeafPlan, gathers_grads: bool, addressed: bool, grads_as_arguments: bool
    ) -> update.LeafPlan:
        """Return the plan of a bucket with the way in which the program reads its gradients: by address, as arguments, or gathered."""
        is_addressed = (
            addressed
            and not self._materializes_rows
            and (self._max_grad_norm is None or policy.STREAMING.can_stream(leaf_plan.spec.dtype, leaf_plan.size))
        )
        return replace(
            leaf_plan, grads_as_arguments=grads_as_arguments and not is_addressed and not gathers_grads, addresses_grads=is_addressed
        )

    def _make_leaf_plan(self, operand: ProgramOperand) -> update.LeafPlan:
        leaf, bucket = operand.leaves[0], operand.bucket
        assert leaf.spec is not None
        fields, hidden, row = (
            self.states.fields(leaf),
            self._rules[leaf.group_index].hidden_state,
            self._hyperparam_table.transforms[leaf.hyperparam_row],
        )
        for each in operand.leaves if bucket is not None else ():
            saved = self.states.optimizer_state.get(each.param, {})
            if each.state_buffers is None and has_state(fields, saved):
                check_saved_state(each, fields, hidden, saved)
        other = None if leaf.grad_dtype is leaf.dtype else str(numpy_dtype(leaf.grad_dtype))
        if bucket is None:
            state = state_signature(leaf, fields, hidden, leaf.local_values(self.states.optimizer_state.get(leaf.param, {})))
            return update.LeafPlan(
                row, leaf.spec, state, leaf.jax_buffer is not None, leaf.element_mask is not None, grad_dtype_override=other
            )
        count, width = bucket.jax_buffer.array.shape
        state = tuple((tuple(memory.array.shape), str(memory.array.dtype)) for memory in bucket.state_buffers)
        length = leaf.shape.numel() if leaf.has_own_buffer else None
        spec = leaf.spec._replace(shape=(width,))
        return update.LeafPlan(
            row,
            spec,
            state,
            True,
            False,
            count,
            bucket.grads_as_arguments,
            valid_length=length,
            addresses_grads=bucket.addresses_grads,
            grad_dtype_override=other,
        )

    def _chunk(self, operands: list[ProgramOperand]) -> Iterator[list[ProgramOperand]]:
        """Yield the operands of each program."""
        addressed: dict[str, list[ProgramOperand]] = {}  # by dtype: one array over all memory is the argument
        for block in operands:
            if block.leaf_plan.addresses_grads:
                addressed.setdefault(block.leaf_plan.spec.dtype, []).append(block)
        yield from addressed.values()
        operands = [block for block in operands if not block.leaf_plan.addresses_grads]
        kinds = [None if block.leaf_plan.transform.joint_set is not None else id(block.leaf_plan) for block in operands]
        counts = [self._equal_counts.get(block.leaves[0], 0) for block in operands]
        for positions in chunking.chunk_leaves(kinds, counts, self._cache.sets_keep_changing):
            yield [operands[position] for position in positions]

    def _get_executables(
        self, chunks_by_device: Sequence[Sequence[Sequence[ProgramOperand]]], stats_layouts: Sequence[StatsLayout | None], grad_set: GradSet
    ) -> tuple[list[executable.UpdateExecutable], list[executable.StatsExecutable]]:
        plans: dict[_ExecutableKey, update.UpdatePlan] = {}
        keys: list[_ExecutableKey] = []
        stats_plans: list[update.StatsPlan] = []
        streaming: list[LazyExecutable] = []
        for part, layout in zip(chunks_by_device, stats_layouts, strict=True):
            own: list[update.UpdatePlan] = []
            for chunk, stats_weights in zip(part, [() for _ in part] if layout is None else layout.own_weights, strict=True):
                kinds = tuple(id(operand.leaf_plan) for operand in chunk)  # equal plans are one object
                keys.append((kinds, chunk[0].leaves[0].device, *grad_set[1:], stats_weights))
                if keys[-1] not in self._executables or _list_joint_sets(chunk):
                    plans[keys[-1]] = self._make_plan(chunk, grad_set, stats_weights)
                own.append(plans.get(keys[-1]) or self._executables[keys[-1]].plan)
            if layout is not None:
                stats_plans += layout.stats_plans(own)
                streaming += layout.streaming_executables(own[0])
        new_stats_plans = [plan for plan in stats_plans if plan not in self._stats_executables]
        try:
            found, found_stats = self._cache.get_executables(list(plans.values()), new_stats_plans, streaming)
        except TypeError as error:
            missing = re.search(r"missing \d+ required .*argument", str(error))
            if missing is None:
                raise
            raise TypeError(
                f"{self._cls_name}: the transformation needs more than gradients ({error}). Pass it to step, as opt.step(value=loss), or "
                "give a closure that returns the loss."
            ) from error
        self._executables |= zip(plans, found, strict=True)
        self._stats_executables |= zip(new_stats_plans, found_stats, strict=True)
        return [self._executables[key] for key in keys], [self._stats_executables[plan] for plan in stats_plans]

    def _make_plan(self, chunk: Sequence[ProgramOperand], grad_set: GradSet, stats_weights: tuple[float, ...]) -> update.UpdatePlan:
        """Return the plan of a chunk.

        Args:
          chunk: the operands.
          grad_set: the set of gradients.
          stats_weights: as in `UpdatePlan`.
        """
        leaves = [leaf for block in chunk for leaf in block.leaves]
        shared = tuple(
            self.states.shared_signature(unit, [leaf for leaf in leaves if self.states.joint_set_of(leaf) == unit])
            for unit in _list_joint_sets(chunk)
        )
        skeleton = self._hyperparam_table.all_paths if any(leaf.spec is not None and leaf.spec.path is not None for leaf in leaves) else ()
        clip, described = self._max_grad_norm is not None, tuple(block.leaf_plan for block in chunk)
        return update.UpdatePlan(
            described,
            clip,
            device_of(leaves[0].param),
            self._hyperparam_table.vector_length,
            skeleton,
            shared,
            *grad_set[1:],
            stats_weights,
            self._has_metrics,
        )

    def rebind(self, launches: Sequence[BoundExecutable]) -> None:
        """Bind all executables to the new addresses after results moved."""
        for launch in launches:
            launch.rebind()
        self.bound_by_grad_set.clear()

    def recover_after_failure(
        self, error: BaseException, snapshots: Sequence[tuple[torch.Tensor, torch.Tensor]], completed: Sequence[BoundExecutable] = ()
    ) -> bool:
        """Give all tensors valid memory after a failed call, whose donated buffers are gone, and restore the copied values.

        A note on the error names the parameters that were updated nevertheless, and those whose values are lost.

        Args:
          error: the error of the call.
          snapshots: tensors with copies of their values before the call.
          completed: the executables whose results are in place.

        Returns:
          Whether any values are lost.
        """
        lost = self.states.recover_after_failure()
        restore_values(snapshots)
        self.bound_by_grad_set.clear()  # some executables may not have been called
        if lost and not snapshots:
            alone, both = ([leaf.name for leaf in lost if (leaf.jax_buffer is None) is is_alone] for is_alone in (True, False))
            parts = ([f"parameters and state of {both}"] if both else []) + ([f"the state of {alone}"] if alone else [])
            error.add_note(f"The update failed half-way; {' and '.join(parts)} are lost and hold NaN. Load a checkpoint.")
        updated = [leaf.name for launch in completed if not (snapshots and launch.executable.has_callback) for leaf in launch.leaves]
        if updated:
            error.add_note(f"This step has updated {updated} and no other parameter.")
        return bool(lost)


def _compile_stream_forks(chunks: Iterable[Sequence[Sequence[ProgramOperand]]], num_hyperparams: int) -> list[Future[None]]:
    """Begin to compile what divides the executables of a device among streams, where there are several executables."""
    firsts = [part[0][0].leaves[0] for part in chunks if len(part) > 1]
    return [submit(streams.compile_fork, num_hyperparams, device_of(leaf.param)) for leaf in firsts if leaf.device.type == "cpu"]


def _list_joint_sets(operands: Iterable[ProgramOperand]) -> list[int]:
    """Return the joint sets that a program with these operands evaluates."""
    return sorted({block.leaf_plan.transform.joint_set for block in operands if block.leaf_plan.transform.joint_set is not None})
