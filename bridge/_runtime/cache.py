"""The process-wide cache of update executables by plan. Optimizers with equal plans share an executable."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import cast
from weakref import WeakValueDictionary

from bridge import _logs
from bridge._compiler.plan import StatsPlan, UpdatePlan
from bridge._xla.compile import LazyExecutable, submit

from .executable import StatsExecutable, UpdateExecutable

_compilations = 0


# `_programs` has all executables that are alive. `_lru` keeps those alive that were requested last, also where no optimizer uses them.
# The number is bounded because each executable takes memory mappings, of which Linux gives a process a limited number. XLA's compiler
# aborts the process when none is left.
_programs: WeakValueDictionary[UpdatePlan | StatsPlan, UpdateExecutable | StatsExecutable] = WeakValueDictionary()
_lru: dict[UpdatePlan | StatsPlan, UpdateExecutable | StatsExecutable] = {}
_LRU_SIZE = 128
_programs_lock = threading.Lock()


def get_executables(
    plans: Sequence[UpdatePlan],
    stats_plans: Sequence[StatsPlan] = (),
    others: Iterable[LazyExecutable] = (),
    cls_name: str = "update",
) -> tuple[list[UpdateExecutable], list[StatsExecutable]]:
    """Return the executables of plans. Compile those that this process has not, several at once in a pool of threads.

    Plans with many classes of leaves compile longest, so they are traced first and compile while the others are traced.

    Args:
      plans: the plans of updates.
      stats_plans: the plans of statistics.
      others: executables that are compiled with them.
      cls_name: the class of the optimizer that needs them, for logs.
    """
    global _compilations
    with _programs_lock:
        wanted = [*plans, *stats_plans]
        by_plan = {plan: program for plan in wanted if (program := _programs.get(plan)) is not None}
        missing = sorted(dict.fromkeys(plan for plan in wanted if plan not in by_plan), key=_compile_order)
        new: dict[UpdatePlan | StatsPlan, UpdateExecutable | StatsExecutable] = {}
        to_compile = [piece for piece in others if piece.compiled is None]
        compiling: dict[LazyExecutable, Future[None]] = {piece: submit(piece.compile) for piece in to_compile}
        needed_by = dict.fromkeys(to_compile, wanted[0]) if wanted else {}  # what is compiled now, and a plan that needs it
        try:
            for plan in missing:
                program = new[plan] = UpdateExecutable(plan, cls_name) if isinstance(plan, UpdatePlan) else StatsExecutable(plan)
                to_compile = [piece for piece in program.lazy_executables if piece.compiled is None and piece not in compiling]
                needed_by |= dict.fromkeys(to_compile, plan)
                if len(missing) == len(to_compile) == 1 and not compiling:
                    to_compile[0].compile()
                else:
                    compiling |= {piece: submit(piece.compile) for piece in to_compile}
        finally:
            wait(compiling.values())
        for each in compiling.values():
            each.result()  # raises the error of a failed compilation
        for program in new.values():
            program.finish_compiling()
        for piece, plan in needed_by.items() if _logs.is_on(_logs.HLO) else ():
            _log_hlo(cls_name, plan, piece)
        _compilations += sum(isinstance(plan, UpdatePlan) for plan in new)
        _programs.update(new)
        by_plan |= new
        for plan, program in by_plan.items():  # most recently used last
            _lru.pop(plan, None)
            _lru[plan] = program
        while len(_lru) > max(_LRU_SIZE, len(by_plan)):
            del _lru[next(iter(_lru))]
    updates, stats = [by_plan[plan] for plan in plans], [by_plan[plan] for plan in stats_plans]
    return cast("list[UpdateExecutable]", updates), cast("list[StatsExecutable]", stats)


def _compile_order(plan: UpdatePlan | StatsPlan) -> int:
    return -len(set(plan.leaves)) if isinstance(plan, UpdatePlan) else 0


def _log_hlo(cls_name: str, plan: UpdatePlan | StatsPlan, executable: LazyExecutable) -> None:
    update, what = (plan, "update") if isinstance(plan, UpdatePlan) else (plan.plan, "statistics of gradients")
    subject, text = _logs.subject(cls_name, update.device), executable.compiled.as_text()
    _logs.HLO.info("%s: optimized HLO for the %s of %d leaves\n%s", subject, what, len(update.leaves), text)


def compilations() -> int:
    """Return how many executables this process has compiled for optimizers and train steps.

    Example:
      >>> import bridge
      >>> before = bridge.compilations()
      >>> bridge.compilations() - before
      0
    """
    return _compilations


def count_compilation() -> None:
    """Count an executable that is compiled outside this cache."""
    global _compilations
    _compilations += 1
