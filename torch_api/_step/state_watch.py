"""Detect whether user code may have edited `optimizer.state`. While nobody else references the state, a step need not check it."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch

from torch_api._params.record import Leaf
from torch_api._rules.types import MutableParamState

if TYPE_CHECKING:
    from .launch_cache import Launches

_address = torch.Tensor.data_ptr
_views, _seen = attrgetter("views"), attrgetter("seen")


class Asks:
    """Accesses of user code to `optimizer.state`.

    may_be_referenced: whether someone else may reference the state or a part of it. access_count: the number of accesses.
    steps_since_access: the number of steps since the last access.

    A wrapper that takes over an optimizer's `__dict__` shares this object.
    """

    __slots__ = ("count", "open", "steps")

    def __init__(self) -> None:
        self.open, self.count, self.steps = True, 0, 0

    def note(self) -> None:
        self.open, self.count, self.steps = True, self.count + 1, 0


class Keeper(torch.optim.Optimizer):
    """An optimizer that records accesses to `state`, and that stops checking the state when nobody else references it any more.

    `state` lives where torch's `__setstate__` puts it, in the `__dict__` of the instance.
    """

    _leaves: list[Leaf]
    _active: list[Leaf]
    _launches: Launches
    _asks: Asks

    @property
    def state(self) -> defaultdict[torch.Tensor, MutableParamState]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of each parameter, as a dict from parameter to dict of fields, as in torch."""
        own = vars(self)
        if "state" not in own:
            return super().state  # raises AttributeError, which the `__getattr__` of wrappers that subclass the optimizer expects
        if "_asks" in own:
            self._asks.note()
        return own["state"]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, MutableParamState]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        vars(self)["state"] = state
        if "_asks" in vars(self):
            self._asks.note()

    def _as_left(self) -> bool:
        """Return whether every parameter still has the state tensors that the optimizer made, at the same addresses."""
        state = vars(self)["state"]
        if state is not self._launches.states.shown:
            return False
        leaves = [leaf for leaf in self._active if leaf.state is not None and leaf.shown]
        for leaf in leaves:
            held = state.get(leaf.param)
            if not held or not all(map(is_, map(held.get, leaf.fields), leaf.shown)):
                return False
        seen = list(chain.from_iterable(map(_seen, leaves)))
        return list(map(_address, chain.from_iterable(map(_views, leaves)))) == seen

    def _take_back(self, asked: int) -> None:
        """Stop watching the state if nobody else references it. Later attempts are further and further apart.

        Args:
          access_count: the number of accesses when this step checked the state.
        """
        asks = self._asks
        asks.steps += 1
        if asks.count == asked and asks.steps & (asks.steps - 1) == 0:
            asks.open = False  # before the count, because another thread may access the state during it
            shown = chain((leaf.shown for leaf in self._leaves), self._launches.states.tensors())
            if _is_held(vars(self), Counter(map(id, chain.from_iterable(shown)))):
                asks.open = True


def _is_held(holder: Mapping[str, Any], own: Counter[int]) -> bool:
    """Return whether someone else references the state, its dicts or its tensors.

    Args:
      attributes: the `__dict__` of the optimizer.
      own_references: by id of a tensor, the optimizer's own references to it outside of the dicts.
    """
    if any(type(fields) is not dict for fields in holder["state"].values()):
        return True
    return any(now > alone for now, alone in zip(_references(holder, own), _ALONE, strict=True))


def _references(holder: Mapping[str, Any], own: Counter[int]) -> tuple[int, int, int]:
    """Return the reference count of the state, the largest one of its dicts, and the largest one of its tensors without ours."""
    state = sys.getrefcount(holder["state"])
    dicts = max(map(sys.getrefcount, holder["state"].values()), default=0)
    own = own + Counter(map(id, chain.from_iterable(map(dict.values, holder["state"].values()))))
    values = chain.from_iterable(map(dict.values, holder["state"].values()))
    return state, dicts, max((sys.getrefcount(x) - own[id(x)] for x in values if isinstance(x, torch.Tensor)), default=0)


def _alone() -> tuple[int, int, int]:
    """Return the reference counts of a state that nobody else references. The launch cache references the state, too."""
    holder: dict[str, Any] = {"state": {0: {"name": torch.zeros(2).view(2)}}}
    launches = holder["state"]
    counts = _references(holder, Counter())
    del launches
    return counts


_ALONE = _alone()
