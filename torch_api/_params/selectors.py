"""The selectors of an optimizer's constructor. They also decide about parameters that are added later."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from types import MethodType
from typing import NamedTuple, TypeVar

import torch

from bridge._transforms import selectors
from bridge._transforms.selectors import UncheckedSelector
from torch_api._rules.decay_masks import refuse_decay_mask

_Result = TypeVar("_Result")


class _Lost(NamedTuple):
    """Replaces a selector that cannot be pickled with its optimizer."""

    description: str


class Selectors:
    """The constructor's `mask`, `decay_mask`, `lr_scale` and, in partitioned optimizers, `labels`, by name.

    `copy.deepcopy` replaces modules and parameters in them by copies that it made before (`copy.deepcopy((model, optimizer))`). A pickle
    contains the selectors that pickle without a module, and a placeholder for each other one. The placeholder raises an error when a
    group is added to the unpickled optimizer.
    """

    def __init__(self, cls_name: str, specs: Mapping[str, UncheckedSelector]) -> None:
        refuse_decay_mask(cls_name, specs.get("mask"))
        self._owner, self._specs = cls_name, {name: selectors.snapshot_selector(spec) for name, spec in specs.items()}

    def __getitem__(self, name: str) -> UncheckedSelector:
        return self._specs[name]

    def resolve(self, name: selectors.SelectorKind, leaves: selectors.NamedLeaves) -> list[selectors.Decision]:
        """Return the decision of one selector about each parameter that has none yet."""
        return self.resolve_with(name, leaves, selectors.resolve_selector)

    def resolve_with(
        self,
        name: selectors.SelectorKind,
        leaves: selectors.NamedLeaves,
        resolve: Callable[[UncheckedSelector, selectors.NamedLeaves, selectors.SelectorKind], _Result],
    ) -> _Result:
        """Return `resolve(spec, leaves, name)` for one selector, with an explanation in its errors."""
        spec = self._specs[name]
        if isinstance(spec, _Lost):
            raise ValueError(
                f"{self._owner}: {name} of the constructor is {spec.description}, which was not pickled with the optimizer, so nothing "
                f"decides about parameters that are added now.{_remedy_text(name)} Or construct an optimizer of all parameters, and load "
                "the state_dict into it."
            )
        try:
            return resolve(spec, leaves, name)
        except (ValueError, TypeError) as error:
            if leaves.resolved_count:
                error.add_note(
                    f"{self._owner}: {name} of the constructor also decides about parameters that are added.{_remedy_text(name)}"
                )
            raise

    def check_nameless_param(self, name: str, group: int) -> None:
        """Raise for a parameter without a name if a selector decides by name."""
        given = [key for key, spec in self._specs.items() if key != "labels" and selectors.reads_names(spec)]
        if given:
            raise ValueError(
                f"{self._owner}: {name!r}, put into param group {group} by hand, has no name, and {given[0]} of the constructor decides by "
                "name. Expected a name for each parameter in group['param_names']. Or use add_param_group."
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Selectors:
        twin = object.__new__(Selectors)
        twin._owner, twin._specs = self._owner, {name: _with_copies(spec, memo) for name, spec in self._specs.items()}
        return twin

    def __getstate__(self) -> dict[str, object]:
        specs = {name: spec if _pickles(spec) else _Lost(_description(spec)) for name, spec in self._specs.items()}
        return {"_owner": self._owner, "_specs": specs}


def _remedy_text(name: str) -> str:
    remedies = {"mask": " Give the group a `mask` of its own, or `trainable=True`.", "labels": " Give the group its `label`."}
    return remedies.get(name, "")


class _Pickler(pickle.Pickler):
    """A pickler that skips tensors and fails for modules, because unpickling a module needs its class."""

    def persistent_id(self, obj: object) -> str | None:
        if isinstance(obj, torch.nn.Module):
            raise pickle.PicklingError(type(obj).__name__)
        return "tensor" if isinstance(obj, torch.Tensor) else None


def _with_copies(spec: UncheckedSelector, memo: Mapping[int, object]) -> UncheckedSelector:
    """Return the spec with modules and parameters replaced by their copies in the memo of a `copy.deepcopy`."""
    if isinstance(spec, torch.nn.Module | torch.Tensor):
        return memo.get(id(spec), spec)
    if isinstance(spec, MethodType):
        return MethodType(spec.__func__, _with_copies(spec.__self__, memo))
    if type(spec) is dict:
        return {key: _with_copies(value, memo) for key, value in spec.items()}
    if type(spec) in (list, tuple, set):
        return type(spec)(_with_copies(value, memo) for value in spec)
    return spec


def _pickles(spec: UncheckedSelector) -> bool:
    try:
        _Pickler(io.BytesIO()).dump(spec)
    except Exception:  # noqa: BLE001 - classes may raise anything
        return False
    return True


def _description(spec: UncheckedSelector) -> str:
    name = getattr(spec, "__qualname__", None)
    return f"a {type(spec).__name__}" if name is None else repr(name)
