"""The warning about compiled programs, and whose line it names."""

from __future__ import annotations

import sys


class CompilationWarning(UserWarning):
    """A step after the first compiled a program, or a function compiled one for each of many signatures; the text says why."""


def stack_level() -> int:
    """The stack level, seen from the caller, of the frame that called the step: the first that is neither torch's nor ours."""
    level, frame = 0, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "torch_api", "bridge"):
        level, frame = level + 1, frame.f_back
    return level + 1
