"""What a step sees of the parameters at one glance: which have a gradient, and whether all else is as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import and_, attrgetter, is_, is_not
from typing import Any

import torch

from .plan import Leaf

_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride
_grad, _shape, _requires_grad = attrgetter("grad"), attrgetter("shape"), attrgetter("requires_grad")
_kind = attrgetter("shape", "dtype", "device", "layout")


def _no_guard(tensors: Sequence[torch.Tensor]) -> None:
    """The columns are compared at every step."""


def _fast_guard() -> Callable[[Sequence[torch.Tensor]], Callable[..., bool] | None]:
    """What makes one C call that says whether tensors still have the class, dtype, device, sizes, strides and `requires_grad` of these.

    torch.compile guards its graphs by it. The name is private, so it is used only where it answers as expected; the
    columns then stand behind it for whatever it denies (it denies all in an autocast region).
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
            return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check if tensors else None

        one = torch.zeros(2, 3)
        others = torch.zeros(3, 2), torch.zeros(3, 2).t(), one.double(), torch.zeros(2, 3, requires_grad=True), None
        check = guard([one])
        if check is not None and check(torch.ones(2, 3)) is True and not any(map(check, others)):
            return guard
    except (ImportError, AttributeError, TypeError, SystemError):
        pass
    return _no_guard


_guard = _fast_guard()


class Sight:
    """What was true of the active leaves when each of them was last looked at.

    A step asks whether all is as it was for the same live leaves, in a few C calls; else it compares whole columns, which
    costs a microsecond a leaf; only where one differs, or nothing is known, are the leaves looked at one by one.
    """

    def __init__(self) -> None:
        self._params: list[torch.Tensor] | None = None

    def forget(self, really: bool = True) -> None:
        """The next step looks at each leaf."""
        self._params = None if really else self._params

    def remember(self, leaves: Sequence[Leaf], live: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Take note of the leaves as they are, every one of which has been looked at, or its gradient is None.

        Args:
          leaves: the active ones.
          live: those of them that have a gradient; `grads`: their gradients.
        """
        self._params = None  # until all the rest is known
        if any(leaf.layout is not None for leaf in leaves):
            return
        params = [leaf.param for leaf in leaves]
        self._addresses = [leaf.address if leaf.spec is not None else None for leaf in leaves]
        self._shapes, self._strides = [leaf.shape for leaf in leaves], [leaf.strides for leaf in leaves]
        self._kinds = [(leaf.shape, leaf.dtype, leaf.device, torch.strided) for leaf in leaves]
        self._positions = tuple(range(len(leaves)))
        self._same = self._guards(params, tuple(live), grads)
        self._params = params

    def _guards(self, params: Sequence[torch.Tensor], live: tuple[int, ...], grads: Sequence[torch.Tensor]) -> Any:
        """What `glance` asks first; None where there is no fast way."""
        checks = _guard(params), _guard(grads)
        if None in checks:
            return None
        chosen = set(live)
        absent = [p for i, p in enumerate(params) if i not in chosen and p.requires_grad]
        present = [params[i] for i in live]
        return live, present, absent, checks, list(map(_address, present))

    def glance(self) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """The active leaves that have a gradient now, and the gradients; None where anything else has changed."""
        if self._params is None:
            return None
        if self._same is not None:
            live, present, absent, (as_params, as_grads), addresses = self._same
            grads = list(map(_grad, present))
            if (
                as_grads(*grads)
                and as_params(*self._params)
                and list(map(_address, present)) == addresses
                and all(map(is_, map(_grad, absent), repeat(None)))
            ):
                return live, grads
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
        return (live, grads) if as_before else None
