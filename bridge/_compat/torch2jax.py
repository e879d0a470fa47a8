"""torch2jax, which is imported when the first torch code is traced, and the operators that users registered with it.

The package documents `implements` and `mk_rng` alone. Without one of the other names nothing is traced, and an error names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from .python import code_of

_NAMES = ("HANDLED_FUNCTIONS", "RngPooperContext", "Torchish")


@functools.cache
def torch2jax() -> Any:
    """Return the package.

    Raises:
      ImportError: it cannot be imported, or has not the names that are needed.
    """
    try:
        package = importlib.import_module("torch2jax")
    except ImportError as error:
        raise ImportError(
            f"module_function and JaxTrainStep trace torch code, which needs the package torch2jax, and it cannot be imported ({error}). "
            "Install it: pip install 'torch2jax>=0.1,<0.2'. Optimizers and jax_function work without it."
        ) from error
    missing = [name for name in _NAMES if not hasattr(package, name)]
    if missing:
        raise ImportError(
            f"torch2jax {importlib.metadata.version('torch2jax')} has no {missing[0]}, by which module_function and JaxTrainStep trace "
            "torch code; 0.1 has it. Install it: pip install 'torch2jax>=0.1,<0.2'."
        )
    return package


def torchish() -> Any:
    """Return the class of its values."""
    return torch2jax().Torchish


def drawing_from(keys: Any) -> AbstractContextManager[Any]:
    """A context in which `torch2jax.mk_rng()` asks `keys.poop()` for a key."""
    return torch2jax().RngPooperContext(keys)


def is_torchish(x: object) -> bool:
    """Whether `x` is a value of torch2jax; a traced tensor is one as soon as anything is traced."""
    return isinstance(x, getattr(sys.modules.get("torch2jax"), "Torchish", ()))


def registered(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the implementation that a user registered for a torch function; None where there is none but torch2jax's own."""
    found = torch2jax().HANDLED_FUNCTIONS.get(func)
    return None if found is own().get(func) else found


@functools.cache
def own() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the entries of the table that torch2jax itself made.

    Users may have added to the table before, and may have replaced entries. A second copy of the package, which nobody else
    sees, says what it began with.
    """
    package = torch2jax()
    copy = importlib.util.module_from_spec(package.__spec__)
    package.__spec__.loader.exec_module(copy)
    return {func: found for func, found in package.HANDLED_FUNCTIONS.items() if _are_same(found, copy.HANDLED_FUNCTIONS.get(func))}


def _are_same(one: object, other: object) -> bool:
    """Whether two functions have the same code and close over the same objects."""
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return one is other or one == other
    cells = zip(one.__closure__ or (), other.__closure__ or (), strict=False)
    return code_of(one) == code_of(other) and all(_are_same(x.cell_contents, y.cell_contents) for x, y in cells)
