"""Look up private names of other packages."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

NAMES: set[str] = set()  # the paths that were looked up


def private(path: str, fallback: Any) -> Any:
    """Return the object at a path in an imported package, such as "torch._C._from_dlpack"; `fallback` if there is none."""
    NAMES.add(path)
    parts = path.split(".")
    modules = (sys.modules.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    module = next(filter(None, modules), None)
    try:
        return attrgetter(path.removeprefix(f"{module.__name__}."))(module) if module is not None else fallback
    except AttributeError:
        return fallback
