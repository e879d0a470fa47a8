"""Looks for private names of other packages."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

NAMES: set[str] = set()  # each that was asked for


def private(path: str, otherwise: Any) -> Any:
    """Return what an imported package has at a path, such as "torch._C._from_dlpack"; `otherwise` where it has nothing there."""
    NAMES.add(path)
    parts = path.split(".")
    modules = (sys.modules.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    module = next(filter(None, modules), None)
    try:
        return attrgetter(path.removeprefix(f"{module.__name__}."))(module) if module is not None else otherwise
    except AttributeError:
        return otherwise
