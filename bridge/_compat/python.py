"""Code objects of functions. A callable that is not written in Python has none."""

from __future__ import annotations

from types import CellType, CodeType, FunctionType


def code_of(function: object) -> CodeType | None:
    """Return the code that a function was made of. None: what is made of the callable is not counted, and the names in it are not read."""
    return getattr(function, "__code__", None)


def with_code_of(
    function: FunctionType, variables: dict[str, object], defaults: tuple[object, ...] | None, cells: tuple[CellType, ...] | None
) -> FunctionType:
    """Return a function of the same code and name with other global variables, defaults and cells."""
    return FunctionType(function.__code__, variables, function.__name__, defaults, cells)
