"""Code objects of Python functions. Other callables have none."""

from __future__ import annotations

from types import CellType, CodeType, FunctionType


def code_of(function: object) -> CodeType | None:
    """Return the code of a Python function; None for another callable. Callers then count no copies of it and read no names in it."""
    return getattr(function, "__code__", None)


def with_code_of(
    function: FunctionType, variables: dict[str, object], defaults: tuple[object, ...] | None, closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Return a function with the same code and name but other globals, defaults and closure cells."""
    return FunctionType(function.__code__, variables, function.__name__, defaults, closure)
