"""THE compiled update: (params, grads, state, hyperparams) -> (params, state), as one XLA program or, of many leaves, a few.

Parameters and state are donated and come back at their own addresses; gradients are only read. Programs are shared by
all optimizers of the process: what identifies one is the static `Plan`, never an optimizer or a name.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from .analysis import calls_back
from .dlpack import X64, operands, wait_for, x64
from .flags import client_started, request_fusion
from .storage import Memory
from .update import Plan, abstract, bytes_accessed, measured, traces, update

__all__ = ["Launch", "Outcome", "Program", "compilations", "programs", "run", "settle", "traces"]

_MAY_HAVE = "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2"  # the last two tell a job that its time is over
_HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, *(getattr(signal, name) for name in _MAY_HAVE if hasattr(signal, name)))
_rows = attrgetter("rows")
_array, _memory, _address, _pointer = (
    attrgetter("array"),
    attrgetter("memory"),
    attrgetter("address"),
    methodcaller("unsafe_buffer_pointer"),
)
_compilations = 0
_forked = False
_packs_lock = threading.RLock()


def _after_fork() -> None:
    global _forked
    _forked = client_started()


def was_forked() -> bool:
    """Whether this process was forked from one in which jax had started."""
    return _forked


request_fusion()
os.register_at_fork(after_in_child=_after_fork)


class Program:
    """One compiled update, and where it is one of several under a common norm or finite check the measure of its gradients.

    `calls_back`: it calls Python while it runs, which may fail half-way (a line search, a debugging print).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.update: Any = None  # until it is compiled
        self.measure: Any = None
        arguments = abstract(plan)
        with x64(), jax.disable_jit(False):
            traced = jax.jit(functools.partial(update, plan), donate_argnums=(0, 1)).trace(*arguments)
            self.calls_back = calls_back(traced.jaxpr.jaxpr)
            self._lowered = [traced.lower()]
            if plan.measured:
                _, _, _, grads, masks, _, _, live, _, scaling, measure = arguments
                self._lowered.append(jax.jit(functools.partial(measured, plan)).lower(grads, masks, live, scaling, measure))

    def compile(self) -> None:
        """Make it ready; several may be compiled at once, each in a thread."""
        with x64():
            self.update, *measures = [lowered.compile() for lowered in self._lowered]
        self.measure = measures[0] if measures else None
        self._lowered = []

    @property
    def bytes_accessed(self) -> float:
        return bytes_accessed(self.update) + (bytes_accessed(self.measure) if self.measure else 0.0)


class Launch:
    """A program over some of the live leaves, and where their arrays are: what stays the same from step to step.

    In plan order: leaves by themselves come before packs.

    inplace: what has the `memory` of each in-place leaf; its array is donated and replaced.
    state: the memories of the state of every leaf, then of the shared state; likewise.
    kept, kept_order: the tensors of the other leaves, which are only read, and the order of their dimensions in memory.
    positions: which of the step's gradients belong to leaves by themselves, and then, in `order`, the order of their dimensions.
    gathered: which of the gradients belong into packs; `targets`: the place of each there; `rows`: the packs of gradients.
    masks: a boolean array per leaf with `elements`.
    offsets: int32 (leaves, those of packs one by one): where in the hyperparams the numbers of its row begin.
    live: boolean, one for each row of each pack: whether that row is updated.
    """

    __slots__ = (
        "gathered", "inplace", "kept", "kept_order", "live", "masks", "offsets", "order", "positions", "program", "rows", "state",
        "targets",
    )  # fmt: skip

    program: Program
    inplace: Sequence[Any]
    state: Sequence[Memory]
    kept: Sequence[torch.Tensor]
    kept_order: Sequence[Any]
    positions: Sequence[int]
    order: Sequence[Any]
    gathered: Sequence[int]
    targets: list[torch.Tensor]
    rows: list[torch.Tensor]
    masks: list[Any]
    offsets: Any
    live: Any


class Outcome(NamedTuple):
    """What a step leaves behind: of each launch new values for its `kept`, in memory of their own; whether a memory came to lie
    elsewhere (`settle`); of scaled gradients the new count of skipped updates, else an empty list; and the signals that arrived
    meanwhile, as (handler, number, frame): to be handled once all is in place."""

    kept: list[list[Any]]
    moved: bool
    skipped: list[Any]
    arrived: list[tuple[Any, Any, Any]]


_NOTHING_MEASURED = np.zeros(2)


def run(
    launches: Sequence[Launch], grads: Sequence[torch.Tensor], hyperparams: np.ndarray, extra: Sequence[Any], scaling: Sequence[Any]
) -> Outcome:
    """One step on one device: every program, in order, then a wait for all of their results.

    Args:
      launches: what is updated.
      grads: the gradients of all live leaves.
      hyperparams: float64 (width,): ONES times 1.0, the norm bound, then the rows.
      extra: the arrays among the further arguments, in the order of the plans' `extra`.
      scaling: of `scaled` plans the loss scale and the count of infinities found, float32, and the count of skipped
        updates, int32; all of shape (1,).
    """
    if _forked:
        raise RuntimeError("this process was forked after jax had started, and jax hangs in such a child. Start it with 'spawn'.")
    flight, kept, skipped = _Flight(), [], []
    flight.programs, flight.packed = len(launches), any(map(_rows, launches))
    further = list(extra), list(scaling)
    device = launches[0].program.plan.device
    quiet = jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False), jax.transfer_guard("allow")
    with flight, X64(True), quiet[0], quiet[1], quiet[2], quiet[3], torch.no_grad():
        numbers: Any = jax.device_put(hyperparams, device) if len(launches) > 1 and device.platform != "cpu" else hyperparams
        measure: Any = _NOTHING_MEASURED
        given = []
        for launch in launches:
            if launch.gathered:
                torch._foreach_copy_(launch.targets, list(map(grads.__getitem__, launch.gathered)))
            given.append(operands([*map(grads.__getitem__, launch.positions), *launch.rows], launch.order))
            if launch.program.measure is not None:
                measure = launch.program.measure(given[-1], launch.masks, launch.live, further[1], measure)
        for launch, gradients in zip(launches, given, strict=True):
            params = list(map(_memory, launch.inplace))
            read = operands(launch.kept, launch.kept_order) if launch.kept else []
            own = list(map(_array, params)), list(map(_array, launch.state)), read, gradients, launch.masks
            new_params, new_state, new_kept, skipped, token = launch.program.update(
                *own, numbers, launch.offsets, launch.live, *further, measure
            )
            flight.tokens.append(token)
            flight.memories += params
            flight.memories += launch.state
            flight.arrays += new_params
            flight.arrays += new_state
            kept.append(new_kept)
    return Outcome(kept, flight.moved, skipped, flight.arrived)


class _Flight:
    """The time from the first donation until all results are with their memories.

    Meanwhile nothing else holds the bytes that torch looks at: an exception raised in between by a signal handler would free
    them, so handlers written in Python wait. Optimizers of separate parameters may share a pack, which nobody can see: their
    threads take turns.
    """

    __slots__ = ("arrays", "arrived", "handlers", "memories", "moved", "packed", "programs", "tokens")
    programs: int  # how many are to be called
    packed: bool  # whether some work on packs

    def __enter__(self) -> _Flight:
        self.arrived: list[tuple[Any, Any, Any]] = []
        self.handlers: dict[int, Any] = {}
        self.tokens: list[Any] = []
        self.memories: list[Memory] = []
        self.arrays: list[Any] = []
        self.moved = False
        if self.packed:
            _packs_lock.acquire()
        for number in _HELD_SIGNALS if threading.current_thread() is threading.main_thread() else ():
            handler = signal.getsignal(number)
            if callable(handler):
                self.handlers[number] = handler
                signal.signal(number, lambda n, frame, handler=handler: self.arrived.append((handler, n, frame)))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.tokens:
            error.add_note(f"The step is not whole: {len(self.tokens)} of its {self.programs} programs have updated their parameters.")
        try:
            # All results of one execution become ready together. Without this wait a call may still be reading the
            # gradients while torch zeroes them: seen with large operands, never with small ones.
            wait_for(self.tokens)
        finally:
            try:
                self.moved = settle(self.memories, self.arrays)  # not before: asking an array for its address waits for it
            finally:
                for number, handler in self.handlers.items():
                    signal.signal(number, handler)
                if self.packed:
                    _packs_lock.release()


def settle(memories: Sequence[Memory], arrays: Sequence[jax.Array]) -> bool:
    """Hand the results of a donated call to the memories that they were computed in.

    Returns:
      Whether a result lies elsewhere, because something outside held a buffer (a numpy view of one of
      `jax.live_arrays()`, say) and XLA copied it. Tensors over that memory must then look again: see `storage.renewed`.
    """
    for memory, array in zip(memories, arrays, strict=True):
        memory.array = array
    if list(map(_pointer, arrays)) == list(map(_address, memories)):
        return False
    return any(memory.address != _pointer(memory.array) and memory.array.size for memory in memories)


_PROGRAMS_KEPT = 512  # beyond these, one lives as long as an optimizer uses it
_programs: dict[Plan, Program] = {}
_programs_lock = threading.Lock()


def programs(plans: Sequence[Plan]) -> list[Program]:
    """The programs of plans, compiled when a plan is first seen in this process: several at once, a thread for each core."""
    global _compilations
    with _programs_lock:
        found = {plan: _programs.get(plan) or Program(plan) for plan in plans}
        new = [program for plan, program in found.items() if plan not in _programs]
        for _ in _threads().map(Program.compile, new) if len(new) > 1 else map(Program.compile, new):
            pass
        _compilations += len(new)
        for plan, program in found.items():  # the last to go
            _programs.pop(plan, None)
            _programs[plan] = program
        while len(_programs) > _PROGRAMS_KEPT:
            del _programs[next(iter(_programs))]
    return [found[plan] for plan in plans]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "compile")


def compilations() -> int:
    """How many programs have been compiled in this process."""
    return _compilations
