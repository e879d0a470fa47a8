"""The batch of a train step: which leaves are traced, which select the program, and how the arrays become arguments."""

from __future__ import annotations

import copy
import enum
from collections.abc import Hashable, Mapping, Sequence
from types import FunctionType
from typing import NoReturn, TypeAlias, cast

import jax
import numpy as np
import torch
from jax.core import Tracer
from jax.tree_util import DictKey

from bridge._compat.types import PyTreeDef
from bridge._interop.containers import own_attributes, with_values
from bridge._interop.dlpack import to_jax
from bridge._interop.tensor_storage import why_unreadable
from bridge._ir.types import PyTree
from bridge._memory import jax_buffers
from bridge._memory.array_interface import host_view

CLS_NAME = "JaxTrainStep"
_STATIC_TYPES = (bool, int, str, bytes, type(None), torch.dtype, torch.device)

# An argument of a program. On the CPU, a tensor is a NumPy view.
_Argument: TypeAlias = jax.Array | np.ndarray | np.generic
LeafKind: TypeAlias = tuple[Hashable, ...]
BatchSignature: TypeAlias = tuple[PyTreeDef, tuple[LeafKind, ...]]  # the structure of a batch, and the kind of each leaf


class _StaticLeaf:
    """Mark of a leaf whose value is part of the signature."""


class Batch:
    """The flattened arguments of one call.

    arrays: the traced leaves as arguments of a program. Tensors on the CPU are NumPy views, which are the cheapest; floats have the dtype
    `real`.
    signature: everything else. Calls with equal signatures use one program. Ints, bools and strings are part of the signature, since they
    decide shapes and branches.

    A mapping that is no dict (UserDict, BatchEncoding) reaches loss_fn as a mapping of its own type, if one can be made. Its attributes
    with plain values are part of the signature.
    """

    def __init__(self, batch: PyTree, device: torch.device, real: type[np.floating] = np.float32) -> None:
        leaves, self.tree = jax.tree.flatten(batch)
        self.arrays: list[_Argument] = []
        kinds: list[LeafKind] = []
        for position, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                kinds.append((torch.Tensor, x.shape, x.dtype))
                self.arrays.append(_as_argument(x, device, position))
            elif isinstance(x, float):
                kinds.append((float,))
                self.arrays.append(real(x))
            elif isinstance(x, jax.Array | np.ndarray | np.generic):
                kinds.append((jax.Array, x.shape, str(x.dtype)))
                self.arrays.append(_check_array(x, position))
            elif isinstance(x, _STATIC_TYPES):
                kinds.append((_StaticLeaf, x, type(x)))
            elif isinstance(x, Mapping):
                inner = Batch(_expose_mappings(batch, position), device, real)
                self.arrays, self.tree, self.signature = inner.arrays, inner.tree, inner.signature
                return
            else:
                raise TypeError(
                    f"{CLS_NAME}: item {position} of the batch is a {type(x).__name__}; expected tensors, arrays, numbers, strings, or "
                    "lists, tuples and mappings of them. Convert it before the call."
                )
        self.signature: BatchSignature = self.tree, tuple(kinds)

    def unflatten(self, traced: Sequence[_Argument]) -> tuple[PyTree, ...]:
        """Return the arguments with these arrays in place of the traced leaves."""
        rest = iter(traced)
        _, kinds = self.signature
        return self.tree.unflatten([kind[1] if kind[0] is _StaticLeaf else next(rest) for kind in kinds])


def describe_kind(kind: LeafKind) -> str:
    """Return an item of a signature as text: the value of a static leaf, or dtype and shape of a traced one."""
    if kind[0] is _StaticLeaf:
        return repr(kind[1])
    if kind == (float,):
        return "a float"
    _, shape, dtype = kind
    return f"{dtype}{list(cast('tuple[int, ...]', shape))}".removeprefix("torch.")


def _check_array(x: _Argument, position: int) -> _Argument:
    if isinstance(x, Tracer):
        raise ValueError(
            f"{CLS_NAME}: item {position} of the batch is a tracer ({x.aval}). Call the train step outside jit, grad and vmap."
        )
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(
            f"{CLS_NAME}: item {position} of the batch was donated or deleted and has no memory. Keep the result, or pass a copy."
        )
    return x.copy() if isinstance(x, jax.Array | np.ndarray) and jax_buffers.is_over_jax_buffer(x) else x  # as for tensors


def _as_argument(x: torch.Tensor, device: torch.device, position: int) -> _Argument:
    if x.requires_grad or x.device != device or x.layout is not torch.strided:
        raise ValueError(f"{CLS_NAME}: item {position} of the batch, of shape {tuple(x.shape)}, {_why_unsupported(x, device)}")
    if why := why_unreadable(x):
        raise ValueError(
            f"{CLS_NAME}: item {position} of the batch, of shape {tuple(x.shape)}, cannot be read: {why}. Nothing was updated."
        )
    if jax_buffers.is_over_jax_buffer(x):  # the program would read memory that it writes
        x = x.clone()
    return to_jax(x, copy=None) if device.type != "cpu" else host_view(x)


def _why_unsupported(x: torch.Tensor, device: torch.device) -> str:
    if x.requires_grad:
        return "requires grad, but the program gives gradients to the optimizer's parameters alone. Pass tensor.detach()."
    if x.device != device:
        return f"is on {x.device}, the module on {device}. Move it there first: tensor.to({str(device)!r})."
    return f"has layout {x.layout}; expected torch.strided. Convert it with to_dense()."


class _MappingNode:
    """A pytree node for a mapping type that jax does not know. `unflatten` returns a mapping of the same type."""

    def __init__(self, x: Mapping[Hashable, PyTree], position: int) -> None:
        self.structure = _MappingStructure(x, position)
        self.values = [_expose_mappings(x[key], position) for key in x]


class _MappingStructure:
    """The static part of a mapping: its type, keys and attributes. It references none of the values."""

    def __init__(self, x: Mapping[Hashable, PyTree], position: int) -> None:
        self.keys = tuple(x)
        values = dict.fromkeys(self.keys)
        self._empty, entries = with_values(x, values), []
        if type(self._empty) is type(x):
            attributes = own_attributes(x)
            entries = [(name, _comparable_value(value)) for name, value in attributes.items()]
            for name, entry in entries:
                if entry is None and any(isinstance(leaf, _ARRAY_TYPES) for leaf in jax.tree.leaves(attributes[name])):
                    raise TypeError(
                        f"{CLS_NAME}: item {position} of the batch is a {type(x).__name__} whose attribute {name!r} holds a tensor, which "
                        "would be a constant of the program. Put it among the items of the mapping."
                    )
                attributes[name] = _UnreadableAttribute(type(x), name) if entry is None else copy.deepcopy(attributes[name])
            self._empty = with_values(x, values, attributes)
        self._key = type(x), self.keys, tuple(entries)

    def rebuild(self, values: Sequence[PyTree]) -> PyTree:
        return with_values(self._empty, dict(zip(self.keys, values, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MappingStructure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


_ARRAY_TYPES = (torch.Tensor, jax.Array, np.ndarray)
_COMPARABLE_TYPES = (*_STATIC_TYPES, float, complex, np.generic, enum.Enum, type, FunctionType)


def _comparable_value(x: object) -> tuple[type, Hashable] | None:
    """Return a value in a form that a signature can compare; None if its value cannot be compared."""
    if isinstance(x, _COMPARABLE_TYPES):
        return type(x), x
    if isinstance(x, list | tuple | set | frozenset):
        parts = [_comparable_value(value) for value in x]
        return None if None in parts else (type(x), frozenset(parts) if isinstance(x, set | frozenset) else tuple(parts))
    if isinstance(x, dict):
        parts = [_comparable_value(pair) for pair in x.items()]
        return None if None in parts else (type(x), tuple(parts))
    return None


class _UnreadableAttribute:
    """Placeholder for an attribute of a mapping whose value could differ between batches that share a program; reading it raises."""

    def __init__(self, kind: type, name: str) -> None:
        self._place = kind.__name__, name

    def _refuse(self, *_: object) -> NoReturn:
        kind, name = object.__getattribute__(self, "_place")
        raise TypeError(
            f"{CLS_NAME}: loss_fn reads the attribute {name!r} of a {kind} in the batch, whose value is no number, string or container of "
            "them, so that it would be a constant of the program. Put what loss_fn needs of it among the items of the mapping."
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = _refuse


jax.tree_util.register_pytree_with_keys(
    _MappingNode,
    lambda opened: (list(zip(map(DictKey, opened.structure.keys), opened.values, strict=True)), opened.structure),
    lambda kind, values: kind.rebuild(list(values)),
    flatten_func=lambda opened: (opened.values, opened.structure),
)


def _expose_mappings(tree: PyTree, position: int) -> PyTree:
    """Return the tree with a pytree node in place of each mapping among its leaves."""
    return jax.tree.map(lambda x: _MappingNode(x, position) if isinstance(x, Mapping) else x, tree)
