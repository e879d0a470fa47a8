"""Containers that hold tensors: torch's own, registered as pytrees of jax, and a search in objects that jax treats as leaves.

Importing this module registers the named results of torch functions (`torch.max(x, 1)`) and `PackedSequence` with jax. The batch sizes of a
`PackedSequence` belong to the tree's structure, because recurrent layers loop by their values.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from jax.tree_util import GetAttrKey, SequenceKey
from torch.nn.utils.rnn import PackedSequence

_T = TypeVar("_T")
_K = TypeVar("_K")
_V = TypeVar("_V")


def _register_results() -> None:
    for kind in torch.return_types.all_return_types:
        names = getattr(kind, "__match_args__", ())

        def flatten(x: tuple[_T, ...], names: Sequence[str] = names) -> tuple[list[tuple[object, _T]], None]:
            keys = map(GetAttrKey, names) if len(names) == len(x) else map(SequenceKey, range(len(x)))
            return list(zip(keys, x, strict=True)), None

        with suppress(ValueError):  # another package has registered the type already
            jax.tree_util.register_pytree_with_keys(kind, flatten, functools.partial(_unflatten_result, kind), flatten_func=_flatten_result)


def _flatten_result(x: tuple[_T, ...]) -> tuple[tuple[_T, ...], None]:
    return tuple(x), None


def _unflatten_result(kind: Callable[[Iterable[object]], _T], _: None, values: Iterable[object]) -> _T:
    return kind(values)


_PACKED_LEAVES = ("data", "sorted_indices", "unsorted_indices")


def _flatten_packed_with_keys(x: PackedSequence) -> tuple[list[tuple[object, torch.Tensor | None]], tuple[int, ...]]:
    return [(GetAttrKey(name), getattr(x, name)) for name in _PACKED_LEAVES], tuple(x.batch_sizes.tolist())


def _flatten_packed(x: PackedSequence) -> tuple[list[torch.Tensor | None], tuple[int, ...]]:
    return [getattr(x, name) for name in _PACKED_LEAVES], tuple(x.batch_sizes.tolist())


def _unflatten_packed(sizes: tuple[int, ...], values: Iterable[object]) -> PackedSequence:
    """Return a `PackedSequence` of any values. Its own constructor would read their device."""
    data, *indices = values
    with torch.DisableTorchFunction():
        batch_sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    return tuple.__new__(PackedSequence, (data, batch_sizes, *indices))


_register_results()
with suppress(ValueError):
    jax.tree_util.register_pytree_with_keys(PackedSequence, _flatten_packed_with_keys, _unflatten_packed, flatten_func=_flatten_packed)


def with_values(x: Mapping[Any, object], values: Mapping[Any, _V], attributes: Mapping[str, object] | None = None) -> Mapping[Any, _V]:
    """Return a mapping of the same type with other values, or a dict if the new mapping could share memory with `x`.

    An example is a batch of a tokenizer. The new mapping is made without code of its class, which could write into `x`.

    Args:
      x: The mapping.
      values: The items of the new mapping.
      attributes: The attributes of the new mapping, those of `x` by default. An attribute that repeats an item of `x` follows the new item.
    """
    with suppress(Exception):  # a class may raise anything for a value that it does not know
        new = _new_mapping(x, values)
        for name, value in (own_attributes(x) if attributes is None else attributes).items():
            object.__setattr__(new, name, value)
        for name in _attributes_that_are_items(x):
            object.__setattr__(new, name, values[name])
        if list(new) == list(values) and all(new[key] is value for key, value in values.items()):
            return new
    return dict(values)


def _new_mapping(x: Mapping[_K, object], values: Mapping[_K, _V]) -> Mapping[_K, _V]:
    """Return a new mapping of the type of `x` that has these items and no other attributes."""
    if isinstance(x, UserDict):
        new: Any = object.__new__(type(x))
        vars(new)["data"] = dict(values)
        return new
    base: Any = next(kind for kind in type(x).__mro__ if kind in (OrderedDict, defaultdict, dict))
    new = base.__new__(type(x))
    if isinstance(x, defaultdict):
        new.default_factory = x.default_factory
    for key, value in values.items():
        base.__setitem__(new, key, value)
    if _raw_attribute(x, "__dict__", None) is x:
        new.__dict__ = new
    return new


def _attributes_that_are_items(x: Mapping[Any, object]) -> list[str]:
    """Return the names of attributes that repeat an item of the mapping."""
    own = _raw_attribute(x, "__dict__", {})
    return [] if own is x else [name for name, value in own.items() if name in x and x[name] is value]


def own_attributes(x: Mapping[Any, object]) -> dict[str, object]:
    """Return the attributes of a mapping that do not repeat an item."""
    own = _raw_attribute(x, "__dict__", {})
    repeated = _attributes_that_are_items(x)
    found = {name: value for name, value in own.items() if own is not x and name not in repeated}
    if isinstance(x, UserDict):
        found.pop("data", None)
    return found | {name: value for name in _slot_names(type(x)) if (value := _raw_attribute(x, name, _UNSET)) is not _UNSET}


_UNSET = object()


def _raw_attribute(x: object, name: str, default: object) -> Any:
    """Return an attribute without running code of the class: a mapping may look for any name among its items."""
    try:
        return object.__getattribute__(x, name)
    except AttributeError:
        return default


_LEAF_TYPES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    np.ndarray,
    torch.Tensor,
    jax.Array,
)
_OPAQUE_PACKAGES = ("jax", "jaxlib", "bridge", "torch_api")  # packages whose objects are not searched: functions, executables
_MAX_VISITED = 1000  # the search ends after so many objects


def path_to_instance(x: object, kind: type | tuple[type, ...]) -> str | None:
    """Return the path of attributes and keys to an instance of `kind` in a leaf of jax's; None if there is none.

    The search looks into containers and the attributes of objects, not into the closures of functions.
    """
    pending, visited = [(x, "")], set()
    for value, place in pending:
        if id(value) in visited or len(visited) > _MAX_VISITED:
            continue
        visited.add(id(value))
        for name, part in _children(value):
            if isinstance(part, kind):
                return f"{place}{name}".lstrip(".")
            pending.append((part, f"{place}{name}"))
    return None


def _children(x: object) -> list[tuple[str, object]]:
    if isinstance(x, _LEAF_TYPES) or type(x).__module__.partition(".")[0] in _OPAQUE_PACKAGES:
        return []
    parts: list[tuple[str, object]] = []
    if isinstance(x, Mapping):
        parts = [(f"[{key!r}]", value) for key, value in x.items()]
    elif isinstance(x, list | tuple | deque | UserList | Set):
        parts = [(f"[{i}]", value) for i, value in enumerate(x)]
    if isinstance(x, functools.partial):
        parts += [("args", x.args), ("keywords", x.keywords)]
    own = getattr(x, "__dict__", None)
    if isinstance(own, dict):
        parts += [(f".{name}", value) for name, value in own.items()]
    return parts + [(f".{name}", getattr(x, name)) for name in _slot_names(type(x)) if hasattr(x, name)]


def _slot_names(kind: type) -> list[str]:
    """Return the names of the slots of a class and of its bases."""
    own = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in own for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]
