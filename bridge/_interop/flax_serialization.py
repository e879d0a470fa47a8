"""States of ours for `flax.serialization`, which knows a type only after it was registered there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def known_to_flax(kind: type, to_state_dict: Callable[[Any], Any], from_state_dict: Callable[[Any, Any], Any]) -> None:
    """Register a type with flax, if flax has been imported: it is not imported for that."""
    flax: Any = sys.modules.get("flax.serialization")
    if getattr(flax, "register_serialization_state", None) is not None and not flax.is_serializable(kind):
        flax.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)
