"""Whether anyone but the optimizer holds its state: while nobody does, no step has to look for changes made by hand."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from .plan import Leaf

_address = torch.Tensor.data_ptr
_views, _seen = attrgetter("views"), attrgetter("seen")


class Keeper(torch.optim.Optimizer):
    """An optimizer that notices when its state is asked for, and takes note when all of it has been let go again.

    `state` lies where torch's `__setstate__` puts it, in the instance's own dict.
    """

    _leaves: list[Leaf]
    _launches: Any
    _is_out = True  # whether someone may hold the state or a part of it
    _steps_out = 0  # since it was last asked for

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As torch's: by parameter, the dict of its state."""
        self._is_out, self._steps_out = True, 0
        return vars(self)["state"]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._is_out, self._steps_out = True, 0
        vars(self)["state"] = state

    def _take_back(self) -> None:
        """After a step that has looked: see whether all was let go, at ever longer intervals."""
        self._steps_out += 1
        if self._steps_out & (self._steps_out - 1) == 0:
            self._is_out = False  # first: another thread may ask for it meanwhile
            shown = chain((leaf.shown for leaf in self._leaves), self._launches.shared_tensors())
            if _is_held(vars(self), Counter(map(id, chain.from_iterable(shown)))):
                self._is_out = True


def in_place(leaves: Iterable[Leaf]) -> bool:
    """Whether each state tensor still looks at the memory that it was given."""
    leaves = list(leaves)
    seen = list(chain.from_iterable(map(_seen, leaves)))
    return list(map(_address, chain.from_iterable(map(_views, leaves)))) == seen


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
    tensors = chain.from_iterable(map(dict.values, holder["state"].values()))
    return state, dicts, max((sys.getrefcount(tensor) - own[id(tensor)] for tensor in tensors), default=0)


def _alone() -> tuple[int, int, int]:
    """The references where nobody else has any: the launches hold the state, too."""
    holder: dict[str, Any] = {"state": {0: {"name": torch.zeros(2).view(2)}}}
    launches = holder["state"]
    counts = _references(holder, Counter())
    del launches
    return counts


_ALONE = _alone()
