"""torch2jax, imported when the first torch code is traced, and the operators that users registered with it.

The package documents only `implements` and `mk_rng`. Without one of the other names nothing can be traced, and an error names it.
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
    """Return the torch2jax package.

    Raises:
      ImportError: The package cannot be imported, or lacks a name that is needed.
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


def torchish_class() -> Any:
    """Return the class of torch2jax's values."""
    return torch2jax().Torchish


def rng_keys_from(keys: Any) -> AbstractContextManager[Any]:
    """Return a context in which `torch2jax.mk_rng()` takes its key from `keys.poop()`."""
    return torch2jax().RngPooperContext(keys)


def is_torchish(x: object) -> bool:
    """Return whether `x` is a value of torch2jax. A traced tensor is one once torch2jax is imported."""
    return isinstance(x, getattr(sys.modules.get("torch2jax"), "Torchish", ()))


def user_implementation(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the implementation that a user registered for a torch function; None if there is only torch2jax's own, or none."""
    found = torch2jax().HANDLED_FUNCTIONS.get(func)
    return None if found is builtin_implementations().get(func) else found


@functools.cache
def builtin_implementations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the entries of the operator table that torch2jax itself made.

    Users may have added or replaced entries before. A second copy of the package, which nobody else uses, shows the original table.
    """
    package = torch2jax()
    copy = importlib.util.module_from_spec(package.__spec__)
    package.__spec__.loader.exec_module(copy)
    return {func: found for func, found in package.HANDLED_FUNCTIONS.items() if _have_same_code(found, copy.HANDLED_FUNCTIONS.get(func))}


def _have_same_code(one: object, other: object) -> bool:
    """Return whether two functions have the same code and close over the same objects."""
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return one is other or one == other
    closure_cells = zip(one.__closure__ or (), other.__closure__ or (), strict=False)
    return code_of(one) == code_of(other) and all(_have_same_code(x.cell_contents, y.cell_contents) for x, y in closure_cells)
