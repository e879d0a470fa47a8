"""One compiled update."""

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

# Elements up to which a program keeps to one core, and operations for them all: then waking the others takes longer than what they save,
# all but one share of the time. AdamW of 2^18 elements, 40 operations each: 142 us on one of two cores, 148 on both; of 2^19 242 and 198.
ON_ONE_CORE = (1 << 17) * CORES // max(CORES - 1, 1)
_OPERATIONS = 40 * ON_ONE_CORE
# Loops, for each core, that are many: XLA's threads share them while the calling thread does its own work, where that would be one thread
# too much (0.94 times as long with 48 of 2^19 elements, as long with 16). Where those have few elements on average, and none half of
# all, each runs on one core, several at a time, and none waits for its other half: MobileNet-v2 took 0.95 times as long, DenseNet-121
# 0.99; ResNet-50, whose loops are longer, would take 1.02.
_LOOPS_A_CORE, _SHORT_LOOP = 16, 1 << 17
# Elements of a loop beside which the order of all that is small makes no difference (GPT-2 small: 0.99 to 1.01 times as long in XLA's).
_LONG_LOOP = 1 << 20
# Elements that may be stored between loops in whatever order: a fraction of the 32 MiB from which the C library gives memory back. Where
# XLA does not write several results from one loop, which is asked once (0.14 s), it stores an array of each loop more, of all at once.
_LITTLE = 1 << 20


class Program:
    """One compiled update, and where it is one of several under a common norm or finite check the measure of its gradients.

    `calls_back`: it calls Python while it runs, which may fail half-way (a line search, a debugging print).
    `scattered`: it reads gradients where they lie. `pieces`: what is to be compiled before it is `ready`, that which reads the leaves of
    the plan that are `far` among it.
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
        self._written: Serialized | None = None  # the update as it is read again
        self._from_cache = False  # jax has read the update from its persistent cache
        arguments = abstract(plan)
        # What the compiler is asked, it is asked while the update is traced.
        known = meanwhile(of_update, plan.device)
        may_be_ordered = meanwhile(several_results) if self._are_mixed and plan.device.platform == "cpu" else None
        with default_settings(), default_promotion():
            jitted = functools.partial(jax.jit, functools.partial(stepped, plan), donate_argnums=(0, 1))
            traced, donated = jitted().trace(*arguments), len(jax.tree.leaves(arguments[:2]))
            if not all(properties_of(traced.jaxpr).used_inputs[:donated]):
                # State of which only a constant is written (optax.adafactor's): jax would leave it out, and the result lie elsewhere.
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
        """What is to be compiled before it is `ready`, that which reads the leaves of the plan that are `far` among it."""
        plan = self.plan
        far = (streaming_stats.piece(dtype, plan.clip, plan.scaled, plan.device) for dtype in plan.far_dtypes)
        return [*(self._cut.pieces if self._cut is not None else ()), *self._own, *far]

    def ready(self) -> None:
        """All pieces are compiled."""
        if "update" in vars(self):
            return
        compiled = [piece.compiled for piece in self._own]
        self.update = self._cut if self._cut is not None else compiled.pop(0)
        self.measure = compiled[0] if compiled else None
        self._from_cache = any(piece.from_cache for piece in self._own)
        self._own = []

    @functools.cached_property
    def update(self) -> Executable:
        """The compiled update."""
        return loaded(cast(Serialized, self._written), self.plan.device)  # as `alone` has left it

    @functools.cached_property
    def alone(self) -> Executable:
        """The update for a step in which it is the only program: the thread that calls it then runs it, where that can be had.

        It is then all that is kept of it but bytes, from which `update` is read where somebody asks again.
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
        """The update in the form that is there."""
        return vars(self).get("update") or self.alone

    @property
    def bytes_accessed(self) -> float:
        """By the compiler's count; for `reading` the gradients are counted, once."""
        far = sum(
            leaf.size * (leaf.count or 1) * jnp.dtype(leaf.gradient_dtype).itemsize for leaf in self.plan.leaves if self.plan.far(leaf)
        )
        update = self._counted() if self._rows else self._either
        return bytes_accessed(update) - held(update) + (bytes_accessed(self.measure) if self.measure else 0.0) + far

    def _counted(self) -> jax.stages.Compiled:
        """The update compiled to be counted alone, of a memory as large as what is read of it: the compiler counts all that there is."""
        with default_settings(), default_promotion():
            lowered = jax.jit(functools.partial(stepped, self.plan), donate_argnums=(0, 1)).lower(*abstract(self.plan, counted=True))
        return compiled(lowered, True, of_update(self.plan.device))

    @property
    def _rows(self) -> list[int]:
        """The bytes of each pack that is updated `at_once`."""
        return [math.prod(leaf.buffer[0]) * jnp.dtype(leaf.spec.dtype).itemsize for leaf in self.plan.leaves if leaf.at_once]

    @functools.cached_property
    def stores(self) -> bool:
        """Whether XLA stores something as large as a pack that is to be updated `at_once`, so in more than one loop."""
        needed = cast(jax.stages.Compiled, self._either).memory_analysis() if self._rows else None
        return needed is not None and needed.temp_size_in_bytes >= min(self._rows)
