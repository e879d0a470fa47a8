"""Containers that hold tensors: those of torch as pytrees of jax, and a search in those that jax does not look into.

The named results of torch functions (`torch.max(x, 1)`) and `PackedSequence` are registered with jax when this package is imported. The
batch sizes of a `PackedSequence` are a part of the tree's structure: recurrent layers loop by their values.
"""

from __future__ import annotations

import copy
import functools
from collections import UserDict, UserList, deque
from collections.abc import Mapping, Set
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
import torch
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from torch.nn.utils.rnn import PackedSequence


def _register_results() -> None:
    for kind in torch.return_types.all_return_types:
        names = getattr(kind, "__match_args__", ())

        def flatten(x: Any, names: Any = names) -> tuple[list[tuple[Any, Any]], None]:
            keys = map(GetAttrKey, names) if len(names) == len(x) else map(SequenceKey, range(len(x)))
            return list(zip(keys, x, strict=True)), None

        with suppress(ValueError):  # somebody has registered it before
            jax.tree_util.register_pytree_with_keys(kind, flatten, functools.partial(_result, kind), flatten_func=_plain)


def _plain(x: Any) -> tuple[tuple[Any, ...], None]:
    return tuple(x), None


def _result(kind: Any, _: None, values: Any) -> Any:
    return kind(values)


_DYNAMIC = ("data", "sorted_indices", "unsorted_indices")


def _packed_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
    return [(GetAttrKey(name), getattr(x, name)) for name in _DYNAMIC], tuple(x.batch_sizes.tolist())


def _packed(x: Any) -> tuple[list[Any], tuple[int, ...]]:
    return [getattr(x, name) for name in _DYNAMIC], tuple(x.batch_sizes.tolist())


def _unpacked(sizes: tuple[int, ...], values: Any) -> Any:
    """A PackedSequence of any values: its own constructor asks them for their device."""
    data, *indices = values
    with torch._C.DisableTorchFunction():
        batch_sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    return tuple.__new__(PackedSequence, (data, batch_sizes, *indices))


_register_results()
with suppress(ValueError):
    jax.tree_util.register_pytree_with_keys(PackedSequence, _packed_with_keys, _unpacked, flatten_func=_packed)


def with_values(x: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """A mapping of the same type with other values, such as a batch of a tokenizer; a dict where the type has no way to make one."""
    if isinstance(x, UserDict | dict):
        with suppress(Exception):  # whatever a subclass does with a value that it does not know
            new: Any = copy.copy(x)
            for key, value in values.items():
                new[key] = value
            return new
    return dict(values)


class Opened:
    """A mapping that jax does not know as a pytree, as one; `unflatten` gives a mapping of the same type."""

    def __init__(self, x: Mapping[Any, Any]) -> None:
        self.x = x


class _Kind:
    """What of a mapping belongs to the structure of the tree: its type and its keys. It holds none of the values."""

    def __init__(self, x: Mapping[Any, Any]) -> None:
        self.empty = with_values(x, dict.fromkeys(x))
        self._key = type(x), tuple(x)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Kind) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


jax.tree_util.register_pytree_with_keys(
    Opened,
    lambda opened: ([(DictKey(key), value) for key, value in opened.x.items()], _Kind(opened.x)),
    lambda kind, values: with_values(kind.empty, dict(zip(kind.empty, values, strict=True))),
    flatten_func=lambda opened: (list(opened.x.values()), _Kind(opened.x)),
)


def opened(tree: Any) -> Any:
    """A tree in which jax looks into the mappings of all types that are among its leaves."""
    return jax.tree.map(lambda x: Opened(x) if isinstance(x, Mapping) else x, tree)


_SIMPLE = (
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
_OWN = ("jax", "jaxlib", "bridge", "torch_api")  # whose functions and programs are objects
_MANY = 1000  # objects that are looked at


def holds(x: Any, kind: Any) -> str | None:
    """Where a leaf of jax's, a container or an object, holds an instance of `kind`: the way there by attributes and keys; None if nowhere.

    It looks into the containers and the attributes of objects, not into what functions close over.
    """
    pending, seen = [(x, "")], set()
    for value, place in pending:
        if id(value) in seen or len(seen) > _MANY:
            continue
        seen.add(id(value))
        for name, part in _parts(value):
            if isinstance(part, kind):
                return f"{place}{name}".lstrip(".")
            pending.append((part, f"{place}{name}"))
    return None


def _parts(x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, _SIMPLE) or type(x).__module__.partition(".")[0] in _OWN:
        return []
    parts: list[tuple[str, Any]] = []
    if isinstance(x, Mapping):
        parts = [(f"[{key!r}]", value) for key, value in x.items()]
    elif isinstance(x, list | tuple | deque | UserList | Set):
        parts = [(f"[{i}]", value) for i, value in enumerate(x)]
    if isinstance(x, functools.partial):
        parts += [("args", x.args), ("keywords", x.keywords)]
    own = getattr(x, "__dict__", None)
    if isinstance(own, dict):
        parts += [(f".{name}", value) for name, value in own.items()]
    slots = [name for base in type(x).__mro__ for name in _names(vars(base).get("__slots__", ()))]
    return parts + [(f".{name}", getattr(x, name)) for name in slots if hasattr(x, name)]


def _names(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))
