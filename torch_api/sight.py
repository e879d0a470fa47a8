"""What a step sees of the parameters at one glance: which have a gradient, and whether all else is as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress, repeat
from operator import and_, attrgetter, is_, is_not
from typing import Any

import torch

from .plan import Leaf

_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride
_grad, _shape, _requires_grad = attrgetter("grad"), attrgetter("shape"), attrgetter("requires_grad")
_kind = attrgetter("shape", "dtype", "device", "layout")


class Sight:
    """Columns of what was true of the active leaves when each of them was last looked at.

    A step compares whole columns, which costs a microsecond a leaf; only where one differs, or nothing is known, are the
    leaves looked at one by one.
    """

    def __init__(self) -> None:
        self._params: list[torch.Tensor] | None = None

    def forget(self, really: bool = True) -> None:
        """The next step looks at each leaf."""
        self._params = None if really else self._params

    def remember(self, leaves: Sequence[Leaf]) -> None:
        """Take note of the leaves as they are, every one of which has been looked at, or its gradient is None."""
        if any(leaf.layout is not None for leaf in leaves):
            return
        self._params = [leaf.param for leaf in leaves]
        self._addresses = [leaf.address if leaf.spec is not None else None for leaf in leaves]
        self._shapes, self._strides = [leaf.shape for leaf in leaves], [leaf.strides for leaf in leaves]
        self._kinds = [(leaf.shape, leaf.dtype, leaf.device, torch.strided) for leaf in leaves]
        self._shown = [leaf.shown if leaf.state is not None else () for leaf in leaves]
        self._has_state = list(map(bool, self._shown))
        self._positions = tuple(range(len(leaves)))

    def glance(self, state: Mapping[Any, Any]) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """The active leaves that have a gradient now, and the gradients; None where anything else has changed."""
        if self._params is None:
            return None
        grads = list(map(_grad, self._params))
        chosen = list(map(and_, map(is_not, grads, repeat(None)), map(_requires_grad, self._params)))
        live = self._positions if all(chosen) else tuple(compress(self._positions, chosen))
        params, grads = list(compress(self._params, chosen)), list(compress(grads, chosen))
        as_before = (
            list(map(_address, params)) == list(compress(self._addresses, chosen))
            and list(map(_kind, grads)) == list(compress(self._kinds, chosen))
            and list(map(_shape, params)) == list(compress(self._shapes, chosen))
            and list(map(_strides, params)) == list(compress(self._strides, chosen))
        )
        if not as_before:
            return None
        with_state = list(compress(self._has_state, chosen))
        held: list[Any] = list(map(state.get, compress(params, with_state)))
        if not all(held):
            return None
        now = list(chain.from_iterable(map(dict.values, held)))
        shown = list(chain.from_iterable(compress(self._shown, chosen)))
        return (live, grads) if len(now) == len(shown) and all(map(is_, now, shown)) else None
