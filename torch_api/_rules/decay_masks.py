"""Mark selectors that are made for `decay_mask`, so that they are rejected as `mask`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from bridge._transforms.selectors import Selector

_Function = TypeVar("_Function", bound=Callable[..., object])
_DECAY_FUNCTIONS: set[object] = set()
# The last results of no_decay, compared by identity. A plain dict cannot carry a mark, and jax does not treat a subclass as a dict.
_DECAY_MASKS: deque[dict[str, bool]] = deque(maxlen=64)


def mark_decay_mask(mask: dict[str, bool]) -> dict[str, bool]:
    """Mark a dict that is made for `decay_mask`, and return it."""
    _DECAY_MASKS.append(mask)
    return mask


def mark_decay_function(function: _Function) -> _Function:
    """Mark a selector function that is made for `decay_mask`, and return it. A decorator."""
    _DECAY_FUNCTIONS.add(function)
    return function


def refuse_decay_mask(cls_name: str, mask: Selector) -> None:
    """Raise for a `mask` that is made for `decay_mask`: it selects the parameters that decay, and would freeze all others."""
    function = getattr(mask, "func", mask)  # of a functools.partial
    if isinstance(mask, Mapping):
        given = "a result of no_decay" if any(mask is each for each in _DECAY_MASKS) else None
    else:
        given = function.__name__ if callable(function) and _is_hashable(function) and function in _DECAY_FUNCTIONS else None
    if given is not None:
        raise ValueError(
            f"{cls_name}: mask is {given}, which says which parameters decay; as mask it would freeze all others. "
            "Expected decay_mask=... for it. (optax's argument `mask` of adamw and others is decay_mask here; mask says what is trained.)"
        )


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
