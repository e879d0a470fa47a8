"""Detect whether user code may have edited `optimizer.state`. While nobody else references the state, a step need not check it."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch

from torch_api._params.record import ParamRecord
from torch_api._rules.types import MutableParamState

if TYPE_CHECKING:
    from .launch_cache import LaunchCache

_address = torch.Tensor.data_ptr
_local_state, _state_addresses = attrgetter("local_state"), attrgetter("state_addresses")


class StateAccess:
    """Accesses of user code to `optimizer.state`.

    may_be_referenced: whether someone else may reference the state or a part of it. access_count: the number of accesses.
    steps_since_access: the number of steps since the last access.

    A wrapper that takes over an optimizer's `__dict__` shares this object.
    """

    __slots__ = ("access_count", "may_be_referenced", "steps_since_access")

    def __init__(self) -> None:
        self.may_be_referenced, self.access_count, self.steps_since_access = True, 0, 0

    def record_access(self) -> None:
        self.may_be_referenced, self.access_count, self.steps_since_access = True, self.access_count + 1, 0


class StateWatchingOptimizer(torch.optim.Optimizer):
    """An optimizer that records accesses to `state`, and that stops checking the state when nobody else references it any more.

    `state` lives where torch's `__setstate__` puts it, in the `__dict__` of the instance.
    """

    _records: list[ParamRecord]
    _trainable: list[ParamRecord]
    _launch_cache: LaunchCache
    _state_access: StateAccess

    @property
    def state(self) -> defaultdict[torch.Tensor, MutableParamState]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of each parameter, as a dict from parameter to dict of fields, as in torch."""
        own = vars(self)
        if "state" not in own:
            return super().state  # raises AttributeError, which the `__getattr__` of wrappers that subclass the optimizer expects
        if "_state_access" in own:
            self._state_access.record_access()
        return own["state"]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, MutableParamState]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        vars(self)["state"] = state
        if "_state_access" in vars(self):
            self._state_access.record_access()

    def _state_is_unmodified(self) -> bool:
        """Return whether every parameter still has the state tensors that the optimizer made, at the same addresses."""
        state = vars(self)["state"]
        if state is not self._launch_cache.states.optimizer_state:
            return False
        leaves = [leaf for leaf in self._trainable if leaf.state_buffers is not None and leaf.state_tensors]
        for leaf in leaves:
            held = state.get(leaf.param)
            if not held or not all(map(is_, map(held.get, leaf.state_names), leaf.state_tensors)):
                return False
        seen = list(chain.from_iterable(map(_state_addresses, leaves)))
        return list(map(_address, chain.from_iterable(map(_local_state, leaves)))) == seen

    def _stop_watching_if_unreferenced(self, access_count: int) -> None:
        """Stop watching the state if nobody else references it. Later attempts are further and further apart.

        Args:
          access_count: the number of accesses when this step checked the state.
        """
        asks = self._state_access
        asks.steps_since_access += 1
        if asks.access_count == access_count and asks.steps_since_access & (asks.steps_since_access - 1) == 0:
            asks.may_be_referenced = False  # before the count, because another thread may access the state during it
            shown = chain((leaf.state_tensors for leaf in self._records), self._launch_cache.states.shared_tensors())
            if _is_externally_referenced(vars(self), Counter(map(id, chain.from_iterable(shown)))):
                asks.may_be_referenced = True


def _is_externally_referenced(attributes: Mapping[str, Any], own_references: Counter[int]) -> bool:
    """Return whether someone else references the state, its dicts or its tensors.

    Args:
      attributes: the `__dict__` of the optimizer.
      own_references: by id of a tensor, the optimizer's own references to it outside of the dicts.
    """
    if any(type(fields) is not dict for fields in attributes["state"].values()):
        return True
    return any(now > alone for now, alone in zip(_count_references(attributes, own_references), _OWN_REFERENCES, strict=True))


def _count_references(attributes: Mapping[str, Any], own_references: Counter[int]) -> tuple[int, int, int]:
    """Return the reference count of the state, the largest one of its dicts, and the largest one of its tensors without ours."""
    state = sys.getrefcount(attributes["state"])
    dicts = max(map(sys.getrefcount, attributes["state"].values()), default=0)
    own_references = own_references + Counter(map(id, chain.from_iterable(map(dict.values, attributes["state"].values()))))
    values = chain.from_iterable(map(dict.values, attributes["state"].values()))
    return state, dicts, max((sys.getrefcount(x) - own_references[id(x)] for x in values if isinstance(x, torch.Tensor)), default=0)


def _count_own_references() -> tuple[int, int, int]:
    """Return the reference counts of a state that nobody else references. The launch cache references the state, too."""
    holder: dict[str, Any] = {"state": {0: {"name": torch.zeros(2).view(2)}}}
    launches = holder["state"]
    counts = _count_references(holder, Counter())
    del launches
    return counts


_OWN_REFERENCES = _count_own_references()
