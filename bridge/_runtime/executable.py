"""The compiled update of a plan: traced, optimized, compiled, and for a step of one executable called inline."""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp

from bridge._compat.types import PyTreeDef
from bridge._compiler.plan import Plan, abstract
from bridge._compiler.update import by_type, measured, stepped
from bridge._ir.queries import properties_of
from bridge._process import CORES, default_promotion, default_settings
from bridge._xla.compile import Executable, Piece, bytes_accessed, compiled, meanwhile
from bridge._xla.compile_options import in_any_order, of_barriers, of_update, on_one_core
from bridge._xla.inline_execution import Serialized, inline, loaded, serialized
from bridge._xla.probes import held, several_results

from . import streaming_stats
from .outline import Pieces, cut

# The most elements of a program, and the most operations, for which one core is faster: waking the other threads takes longer than their
# share of the work.
ON_ONE_CORE = (1 << 17) * CORES // max(CORES - 1, 1)
_OPERATIONS = 40 * ON_ONE_CORE
# With this many loops for each core, XLA's threads share them while the calling thread does other work. Inline execution would add the
# calling thread, which is one too many. Where the loops are short on average and none has half of all elements, each loop runs on one
# core and several run at once: no loop waits for its other half.
_LOOPS_A_CORE, _SHORT_LOOP = 16, 1 << 17
# The average elements of a loop above which the schedule of small loops makes no difference.
_LONG_LOOP = 1 << 20
# The most elements that XLA may store between loops for its own schedule of loops: a fraction of the size at which the C library returns
# memory to the system. XLA stores one more array for each loop if it cannot write several results from one loop.
_LITTLE = 1 << 20


class Program:
    """One compiled update, with the executable of its gradient statistics if several executables share a norm or a finite check.

    has_callback: the program calls Python while it runs (a line search, a debugging print), which may fail halfway.
    reads_grads_by_address: the program reads gradients at their own addresses, through the process-wide array.
    stats_executable: computes the statistics of the gradients before the update; None where no statistics are shared.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.measure: jax.stages.Compiled | None = None
        self.calls_back = False
        self.scattered = any(leaf.at_once for leaf in plan.leaves)
        sizes = [(leaf.count or 1) * math.prod(leaf.spec.shape) for leaf in plan.leaves]
        self.elements, self._are_many = sum(sizes), len(sizes) >= _LOOPS_A_CORE * CORES
        self._are_short = self._are_many and self.elements <= len(sizes) * _SHORT_LOOP and max(sizes) * CORES <= self.elements
        self._are_mixed = len(sizes) > _LOOPS_A_CORE and self.elements <= len(sizes) * _LONG_LOOP
        self._cut: Pieces | None = None
        self._own: list[Piece] = []
        self._written: Serialized | None = None  # the serialized update, from which it can be loaded again
        self._from_cache = False  # whether jax has loaded the update from its persistent cache
        arguments = abstract(plan)
        # Probe the compiler in other threads while this thread traces the update.
        known = meanwhile(of_update, plan.device)
        may_be_ordered = meanwhile(several_results) if self._are_mixed and plan.device.platform == "cpu" else None
        with default_settings(), default_promotion():
            jitted = functools.partial(jax.jit, functools.partial(stepped, plan), donate_argnums=(0, 1))
            traced, donated = jitted().trace(*arguments), len(jax.tree.leaves(arguments[:2]))
            if not all(properties_of(traced.jaxpr).used_inputs[:donated]):
                # jax drops an argument that is not read, such as state that is overwritten (optax.adafactor's). Its result would move.
                traced = jitted(keep_unused=True).trace(*arguments)
            properties = properties_of(traced.jaxpr)
            self.calls_back = properties.has_callback
            kept = of_barriers(properties) if by_type(plan) else {}
            options = known.result() | kept
            are_few = self.elements <= ON_ONE_CORE and properties.op_count <= _OPERATIONS
            if plan.device.platform == "cpu" and (are_few or self._are_short):
                options = on_one_core(options)
            elif may_be_ordered is not None and properties.materialized_elements <= _LITTLE and may_be_ordered.result():
                options = in_any_order(options)
            structure = cast(PyTreeDef, jax.tree.structure(traced.out_info))
            self._cut = cut(traced.jaxpr, structure, donated, plan.device, options)
            if self._cut is None:
                self._own.append(Piece(traced.lower(), options))
            if plan.measured and not all(map(plan.far, plan.leaves)):
                _, _, _, _, grads, masks, _, _, live, _, scaling, measure, after = arguments
                measuring = jax.jit(functools.partial(measured, plan))
                self._own.append(Piece(measuring.lower(grads, masks, live, scaling, measure, after), options))

    @property
    def pieces(self) -> list[Piece]:
        """Everything to compile before `finish_compiling`, with the executables that stream over large gradients."""
        plan = self.plan
        far = (streaming_stats.piece(dtype, plan.clip, plan.scaled, plan.device) for dtype in plan.far_dtypes)
        return [*(self._cut.pieces if self._cut is not None else ()), *self._own, *far]

    def ready(self) -> None:
        """Take the results of compilation. All of `lazy_executables` must be compiled."""
        if "update" in vars(self):
            return
        compiled = [piece.compiled for piece in self._own]
        self.update = self._cut if self._cut is not None else compiled.pop(0)
        self.measure = compiled[0] if compiled else None
        self._from_cache = any(piece.from_cache for piece in self._own)
        self._own = []

    @functools.cached_property
    def update(self) -> Executable:
        """The compiled update, for a step of several executables."""
        return loaded(cast(Serialized, self._written), self.plan.device)  # `inline_executable` has dropped the compiled one

    @functools.cached_property
    def alone(self) -> Executable:
        """The update for a step of one executable. The calling thread runs it, where XLA supports that.

        Only its serialized form is kept then, and `update` is loaded from it on demand.
        """
        if self.calls_back or self._cut is not None or self._from_cache or (self._are_many and self.elements > ON_ONE_CORE):
            return self.update
        self._written = self._written or serialized(cast(jax.stages.Compiled, self.update))
        found = inline(self._written, self.plan.device)
        if found is None:
            return self.update
        vars(self).pop("update", None)
        return found

    @property
    def _either(self) -> Executable:
        """The update in the form that is loaded."""
        return vars(self).get("update") or self.alone

    @property
    def bytes_accessed(self) -> float:
        """The bytes that the update reads and writes, by the compiler's count. Gradients read for statistics count once more."""
        far = sum(
            leaf.size * (leaf.count or 1) * jnp.dtype(leaf.gradient_dtype).itemsize for leaf in self.plan.leaves if self.plan.far(leaf)
        )
        update = self._counted() if self._rows else self._either
        return bytes_accessed(update) - held(update) + (bytes_accessed(self.measure) if self.measure else 0.0) + far

    def _counted(self) -> jax.stages.Compiled:
        """Compile the update for counting bytes. The process-wide array has only the size that is read, since the compiler counts all."""
        with default_settings(), default_promotion():
            lowered = jax.jit(functools.partial(stepped, self.plan), donate_argnums=(0, 1)).lower(*abstract(self.plan, counted=True))
        return compiled(lowered, True, of_update(self.plan.device))

    @property
    def _rows(self) -> list[int]:
        """The bytes of each bucket whose gradients the program reads by address."""
        return [math.prod(leaf.buffer[0]) * jnp.dtype(leaf.spec.dtype).itemsize for leaf in self.plan.leaves if leaf.at_once]

    @functools.cached_property
    def stores(self) -> bool:
        """Whether XLA materializes an array as large as a bucket whose gradients are read by address, and so needs several loops."""
        needed = cast(jax.stages.Compiled, self._either).memory_analysis() if self._rows else None
        return needed is not None and needed.temp_size_in_bytes >= min(self._rows)
