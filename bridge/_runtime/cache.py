"""The process-wide cache of update executables by plan. Optimizers with equal plans share an executable."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from weakref import WeakValueDictionary

from bridge._compiler.plan import Plan
from bridge._xla.compile import Piece, meanwhile

from .executable import Program

_compilations = 0


# `_programs` has all executables that are alive. `_lru` keeps those alive that were requested last, also where no optimizer uses them.
# The number is bounded because each executable takes memory mappings, of which Linux gives a process a limited number. XLA's compiler
# aborts the process when none is left.
_programs: WeakValueDictionary[Plan, Program] = WeakValueDictionary()
_recent: dict[Plan, Program] = {}
_PROGRAMS_KEPT = 128
_programs_lock = threading.Lock()


def programs(plans: Sequence[Plan]) -> list[Program]:
    """Return the executables of plans. Compile those that this process has not, several at once in a pool of threads.

    Plans with many classes of leaves compile longest, so they are traced first and compile while the others are traced.
    """
    global _compilations
    with _programs_lock:
        found = {plan: program for plan in plans if (program := _programs.get(plan)) is not None}
        missing = sorted(dict.fromkeys(plan for plan in plans if plan not in found), key=lambda plan: -len(set(plan.leaves)))
        new: dict[Plan, Program] = {}
        compiling: dict[Piece, Future[None]] = {}
        try:
            for plan in missing:
                program = new[plan] = Program(plan)
                pieces = [piece for piece in program.pieces if piece.compiled is None and piece not in compiling]
                if len(missing) == len(pieces) == 1:
                    pieces[0].compile()
                else:
                    compiling |= {piece: meanwhile(piece.compile) for piece in pieces}
        finally:
            wait(compiling.values())
        for each in compiling.values():
            each.result()  # raises the error of a failed compilation
        for program in new.values():
            program.ready()
        _compilations += len(new)
        _programs.update(new)
        found |= new
        for plan, program in found.items():  # most recently used last
            _recent.pop(plan, None)
            _recent[plan] = program
        while len(_recent) > max(_PROGRAMS_KEPT, len(found)):
            del _recent[next(iter(_recent))]
    return [found[plan] for plan in plans]


def compilations() -> int:
    """Return how many executables this process has compiled."""
    return _compilations


def count_compilation() -> None:
    """Count an executable that is compiled outside this cache."""
    global _compilations
    _compilations += 1
