"""The compiled programs of a step: the update of a plan, and the statistics of gradients that several updates share.

An update is traced, optimized and compiled, and called inline in a step of one executable.
"""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp

from bridge import _logs
from bridge._compat.types import PyTreeDef
from bridge._compiler import policy
from bridge._compiler.plan import StatsPlan, UpdatePlan, abstract_args
from bridge._compiler.update import has_loops_by_dtype, stats_step, update_step
from bridge._ir.queries import properties_of
from bridge._process import default_promotion, default_settings
from bridge._xla.compile import Executable, LazyExecutable, bytes_accessed, compile_lowered, scratch_bytes, submit
from bridge._xla.compile_options import keep_barriers, single_threaded, update_options, xla_schedule
from bridge._xla.inline_execution import Serialized, load_executable, load_inline, serialize_executable
from bridge._xla.probes import barrier_bytes, fuses_multiple_outputs

from .outline import Pieces, cut


class UpdateExecutable:
    """One compiled update.

    has_callback: the program calls Python while it runs (a line search, a debugging print), which may fail halfway.
    reads_grads_by_address: the program reads gradients at their own addresses, through the process-wide array.

    Args:
      plan: the plan.
      cls_name: the class of the optimizer that needs it first, for logs.
    """

    def __init__(self, plan: UpdatePlan, cls_name: str = "update") -> None:
        self.plan = plan
        self.has_callback = False
        self.reads_grads_by_address = any(leaf.addresses_grads for leaf in plan.leaves)
        sizes = [(leaf.rows or 1) * math.prod(leaf.spec.shape) for leaf in plan.leaves]
        threading = policy.THREADING
        self.elements, self._has_many_loops = sum(sizes), threading.has_many_loops(len(sizes))
        may_reorder_loops = threading.may_reorder_loops(sizes)
        self._outlined: Pieces | None = None
        self._own_executable: LazyExecutable | None = None
        self._serialized: Serialized | None = None  # the serialized update, from which it can be loaded again
        self._from_cache = False  # whether jax has loaded the update from its persistent cache
        arguments = abstract_args(plan)
        # Probe the compiler in other threads while this thread traces the update.
        known = submit(update_options, plan.device)
        may_be_ordered = submit(fuses_multiple_outputs) if may_reorder_loops and plan.device.platform == "cpu" else None
        with default_settings(), default_promotion():
            jitted = functools.partial(jax.jit, functools.partial(update_step, plan), donate_argnums=(0, 1))
            traced, donated = jitted().trace(*arguments), len(jax.tree.leaves(arguments[:2]))
            if not all(properties_of(traced.jaxpr).used_inputs[:donated]):
                # jax drops an argument that is not read, such as state that is overwritten (optax.adafactor's). Its result would move.
                traced = jitted(keep_unused=True).trace(*arguments)
            subject = _logs.subject(cls_name, plan.device)
            _logs.JAXPR.info("%s: jaxpr of the update of %d leaves\n%s", subject, len(plan.leaves), traced.jaxpr)
            properties = properties_of(traced.jaxpr)
            self.has_callback = properties.has_callback
            kept = keep_barriers(properties) if has_loops_by_dtype(plan) else {}
            options = known.result() | kept
            are_few = self.elements <= threading.single_core_elements and properties.op_count <= threading.single_core_operations
            if plan.device.platform == "cpu" and (are_few or threading.has_short_loops(sizes)):
                options = single_threaded(options)
            elif (
                may_be_ordered is not None
                and properties.materialized_elements <= threading.max_unordered_elements
                and may_be_ordered.result()
            ):
                options = xla_schedule(options)
            structure = cast(PyTreeDef, jax.tree.structure(traced.out_info))
            self._outlined = cut(traced.jaxpr, structure, donated, plan.device, options)
            if self._outlined is None:
                self._own_executable = LazyExecutable(traced.lower(), options)

    @property
    def lazy_executables(self) -> list[LazyExecutable]:
        """Everything to compile before `finish_compiling`."""
        if self._outlined is not None:
            return list(self._outlined.pieces)
        return [] if self._own_executable is None else [self._own_executable]

    def finish_compiling(self) -> None:
        """Take the results of compilation. All of `lazy_executables` must be compiled."""
        if "update" in vars(self):
            return
        if self._own_executable is not None:
            self.update, self._from_cache, self._own_executable = self._own_executable.compiled, self._own_executable.from_cache, None
        elif self._outlined is not None:
            self.update = self._outlined

    @functools.cached_property
    def update(self) -> Executable:
        """The compiled update, for a step of several executables."""
        return load_executable(cast(Serialized, self._serialized), self.plan.device)  # `inline_executable` has dropped the compiled one

    @functools.cached_property
    def inline_executable(self) -> Executable:
        """The update for a step of one executable. The calling thread runs it, where XLA supports that.

        Only its serialized form is kept then, and `update` is loaded from it on demand.
        """
        if (
            self.has_callback
            or self._outlined is not None
            or self._from_cache
            or (self._has_many_loops and self.elements > policy.THREADING.single_core_elements)
        ):
            return self.update
        self._serialized = self._serialized or serialize_executable(cast(jax.stages.Compiled, self.update))
        found = load_inline(self._serialized, self.plan.device)
        if found is None:
            return self.update
        vars(self).pop("update", None)
        return found

    @property
    def _available_update(self) -> Executable:
        """The update in the form that is loaded."""
        return vars(self).get("update") or self.inline_executable

    @property
    def bytes_accessed(self) -> float:
        """The bytes that the update reads and writes, by the compiler's count."""
        update = self._compile_for_counting() if self.reads_grads_by_address else self._available_update
        return bytes_accessed(update) - barrier_bytes(update)

    @property
    def num_programs(self) -> int:
        """The number of compiled programs that the update consists of."""
        return 1 if self._outlined is None else len(self._outlined.pieces)

    @property
    def scratch_bytes(self) -> int | None:
        """The bytes that one call takes for intermediate values, by the compiler's count; None if the compiler does not say."""
        programs = [self._available_update] if self._outlined is None else [piece.compiled for piece in self._outlined.pieces]
        return max((size for program in programs if (size := scratch_bytes(program)) is not None), default=None)

    def _compile_for_counting(self) -> jax.stages.Compiled:
        """Compile the update for counting bytes. The process-wide array has only the size that is read, since the compiler counts all."""
        with default_settings(), default_promotion():
            lowered = jax.jit(functools.partial(update_step, self.plan), donate_argnums=(0, 1)).lower(
                *abstract_args(self.plan, for_counting=True)
            )
        return compile_lowered(lowered, True, update_options(self.plan.device))

    @property
    def _addressed_row_bytes(self) -> list[int]:
        """The bytes of each bucket whose gradients the program reads by address."""
        return [math.prod(leaf.buffer[0]) * jnp.dtype(leaf.spec.dtype).itemsize for leaf in self.plan.leaves if leaf.addresses_grads]

    @functools.cached_property
    def materializes_rows(self) -> bool:
        """Whether XLA materializes an array as large as a bucket whose gradients are read by address, and so needs several loops."""
        needed = cast(jax.stages.Compiled, self._available_update).memory_analysis() if self._addressed_row_bytes else None
        return needed is not None and needed.temp_size_in_bytes >= min(self._addressed_row_bytes)


class StatsExecutable:
    """The compiled program of a `StatsPlan`: (grads, masks, active_rows, loss_scaling, stats, stream_event) -> stats.

    call: the program, once `lazy_executables` are compiled.
    """

    def __init__(self, plan: StatsPlan) -> None:
        self.plan = plan
        update, arguments = plan.plan, abstract_args(plan.plan)
        sizes = [leaf.size * (leaf.rows or 1) for leaf, weight in zip(update.leaves, plan.weights, strict=True) if weight]
        threading = policy.THREADING
        options = update_options(update.device)
        if update.device.platform == "cpu" and (sum(sizes) <= threading.single_core_elements or threading.has_short_loops(sizes)):
            options = single_threaded(options)
        own = arguments.grads, arguments.masks, arguments.active_rows, arguments.loss_scaling, arguments.stats, arguments.stream_event
        with default_settings(), default_promotion():
            self.lazy_executables = [LazyExecutable(jax.jit(functools.partial(stats_step, plan)).lower(*own), options)]

    def finish_compiling(self) -> None:
        """Take the result of compilation."""
        if self.lazy_executables:
            self.call = self.lazy_executables.pop().compiled

    @property
    def bytes_accessed(self) -> float:
        """The bytes that the program reads and writes, by the compiler's count."""
        return bytes_accessed(self.call)
