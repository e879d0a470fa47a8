"""The warning about late compilation, and the user's line that it names."""

from __future__ import annotations

import sys


class CompilationWarning(UserWarning):
    """A step after the first compiled a program, or a function compiled one for each of many signatures. The text says why.

    Example:
      >>> import warnings, torch_api
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", torch_api.CompilationWarning)  # a late compilation raises inside of this block
    """


def stack_level() -> int:
    """Return the stack level, seen from the caller, of the nearest frame that belongs neither to torch nor to maskbridge."""
    level, frame = 0, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "torch_api", "bridge"):
        level, frame = level + 1, frame.f_back
    return level + 1
