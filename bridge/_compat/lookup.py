"""Look up private names of other packages."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from operator import attrgetter
from typing import Any


def asks_for_safe_mode(environment: Mapping[str, str]) -> bool:
    """Return whether the environment variables of a process ask for the safe mode."""
    return environment.get("MASKBRIDGE_SAFE", "0") not in ("", "0")


# Whether optimizers run without private names, without reading memory by address, and without donating what torch tensors alias.
SAFE_MODE = asks_for_safe_mode(os.environ)
NAMES: set[str] = set()  # the paths that were looked up


def private(path: str, fallback: Any, needed: bool = False) -> Any:
    """Return the object at a path in an imported package, such as "torch._C._from_dlpack".

    Return `fallback` if there is none. In the safe mode return it too, unless the name is `needed`: no public name does the same, and
    without it torch code cannot be traced, or an error is not recognized. A deprecated name is returned without its warning.
    """
    NAMES.add(path)
    if SAFE_MODE and not needed:
        return fallback
    parts = path.split(".")
    modules = (sys.modules.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    module = next(filter(None, modules), None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return attrgetter(path.removeprefix(f"{module.__name__}."))(module) if module is not None else fallback
    except AttributeError:
        return fallback
