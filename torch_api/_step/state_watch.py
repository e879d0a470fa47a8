"""Whether anyone but the optimizer holds its state: while nobody does, no step has to look for changes made by hand."""

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
    """`open`: whether someone may hold the state or a part of it. `count`: how often it was asked for. `steps`: since then.

    A wrapper that takes over an optimizer's `__dict__` has the same object.
    """

    __slots__ = ("count", "open", "steps")

    def __init__(self) -> None:
        self.open, self.count, self.steps = True, 0, 0

    def note(self) -> None:
        self.open, self.count, self.steps = True, self.count + 1, 0


class Keeper(torch.optim.Optimizer):
    """An optimizer that notices when its state is asked for, and takes note when all of it has been let go again.

    `state` lies where torch's `__setstate__` puts it, in the instance's own dict.
    """

    _leaves: list[Leaf]
    _active: list[Leaf]
    _launches: Launches
    _asks: Asks

    @property
    def state(self) -> defaultdict[torch.Tensor, MutableParamState]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As torch's: by parameter, the dict of its state."""
        own = vars(self)
        if "state" not in own:
            return super().state  # an AttributeError, for the `__getattr__` of wrappers that make a subclass
        if "_asks" in own:
            self._asks.note()
        return own["state"]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, MutableParamState]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        vars(self)["state"] = state
        if "_asks" in vars(self):
            self._asks.note()

    def _as_left(self) -> bool:
        """Whether the state of every leaf has the tensors that it was given, in the memory that they were given."""
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
        """After a step that has looked when it was asked for so often: see whether all was let go, at ever longer intervals."""
        asks = self._asks
        asks.steps += 1
        if asks.count == asked and asks.steps & (asks.steps - 1) == 0:
            asks.open = False  # first: another thread may ask for it meanwhile
            shown = chain((leaf.shown for leaf in self._leaves), self._launches.states.tensors())
            if _is_held(vars(self), Counter(map(id, chain.from_iterable(shown)))):
                asks.open = True


def _is_held(holder: Mapping[str, Any], own: Counter[int]) -> bool:
    """Whether there are more references to the state, its dicts or its tensors than the optimizer's; `own`: of those, by tensor's id, what
    it has beside the dicts."""
    if any(type(fields) is not dict for fields in holder["state"].values()):
        return True
    return any(now > alone for now, alone in zip(_references(holder, own), _ALONE, strict=True))


def _references(holder: Mapping[str, Any], own: Counter[int]) -> tuple[int, int, int]:
    """To the state itself; the most to a dict of it; the most to a tensor, without the optimizer's."""
    state = sys.getrefcount(holder["state"])
    dicts = max(map(sys.getrefcount, holder["state"].values()), default=0)
    own = own + Counter(map(id, chain.from_iterable(map(dict.values, holder["state"].values()))))
    values = chain.from_iterable(map(dict.values, holder["state"].values()))
    return state, dicts, max((sys.getrefcount(x) - own[id(x)] for x in values if isinstance(x, torch.Tensor)), default=0)


def _alone() -> tuple[int, int, int]:
    """The references where nobody else has any: the launches hold the state, too."""
    holder: dict[str, Any] = {"state": {0: {"name": torch.zeros(2).view(2)}}}
    launches = holder["state"]
    counts = _references(holder, Counter())
    del launches
    return counts


_ALONE = _alone()
