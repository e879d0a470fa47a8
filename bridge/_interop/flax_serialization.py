"""Make our state types known to `flax.serialization`, which handles only registered types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def register_with_flax(kind: type[_T], to_state_dict: Callable[[_T], object], from_state_dict: Callable[[_T, Any], _T]) -> None:
    """Register a type with flax if flax is imported already. This does not import flax."""
    flax: Any = sys.modules.get("flax.serialization")
    if getattr(flax, "register_serialization_state", None) is not None and not flax.is_serializable(kind):
        flax.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)
