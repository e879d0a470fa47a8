"""The executables of this process by plan."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from weakref import WeakValueDictionary

from bridge._compiler.plan import Plan
from bridge._xla.compile import Piece, meanwhile

from .executable import Program

_compilations = 0


# All that live, for whoever has the same plan; those asked for last, which live whether an optimizer uses them or not. Each takes 40 to
# 160 of the 65530 mappings of memory that Linux lets a process have, and XLA's compiler ends a process that is out of them.
_programs: WeakValueDictionary[Plan, Program] = WeakValueDictionary()
_recent: dict[Plan, Program] = {}
_PROGRAMS_KEPT = 128
_programs_lock = threading.Lock()


def programs(plans: Sequence[Plan]) -> list[Program]:
    """The programs of plans, compiled when a plan is first seen in this process, several at once: a thread for each core.

    Those of most kinds of leaves, which take longest to compile, are traced first; the others are while those are compiled.
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
            each.result()  # or its error
        for program in new.values():
            program.ready()
        _compilations += len(new)
        _programs.update(new)
        found |= new
        for plan, program in found.items():  # the last to go
            _recent.pop(plan, None)
            _recent[plan] = program
        while len(_recent) > max(_PROGRAMS_KEPT, len(found)):
            del _recent[next(iter(_recent))]
    return [found[plan] for plan in plans]


def compilations() -> int:
    """How many programs have been compiled in this process."""
    return _compilations


def count_compilation() -> None:
    """Count a program that was compiled elsewhere."""
    global _compilations
    _compilations += 1
