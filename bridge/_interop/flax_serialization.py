"""States of ours for `flax.serialization`, which knows a type only after it was registered there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def known_to_flax(kind: type[_T], to_state_dict: Callable[[_T], object], from_state_dict: Callable[[_T, Any], _T]) -> None:
    """Register a type with flax, if flax has been imported: it is not imported for that."""
    flax: Any = sys.modules.get("flax.serialization")
    if getattr(flax, "register_serialization_state", None) is not None and not flax.is_serializable(kind):
        flax.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)
