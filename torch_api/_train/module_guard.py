"""Guards of a module: whether a traced program still fits it. A call compares a few lists."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import NamedTuple, TypeAlias, cast

import torch

from bridge._compiler.spec import ById
from bridge._interop.tensor_storage import storage_of

_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride
_metadata = attrgetter("shape", "dtype", "requires_grad")
# Types of attributes on which a forward pass may branch. A traced program has their values at tracing time.
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)


_Attribute: TypeAlias = tuple[str, tuple[Hashable, ...] | None]


class ModuleSignature(NamedTuple):
    """The properties of a module that a traced loss depends on.

    modules: the submodules. attributes: the attributes of all of them, in their order. hooks: their forward hooks. tensors: name, shape and
    dtype of each parameter and buffer.
    """

    modules: tuple[torch.nn.Module, ...]
    attributes: tuple[_Attribute, ...]
    hooks: tuple[ById, ...]
    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]


class ModuleGuard:
    """The submodules, plain attributes (`training` among them) and tensor addresses of a module, as they were at the last refresh.

    Plain attributes are numbers, strings, dtypes, devices, None, and tuples of these. Of any other attribute only the name is compared.

    params, buffers: tensors by name; a tied tensor has one name.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._modules = list(module.modules())
        self.params: dict[str, torch.Tensor] = dict(module.named_parameters())
        self.buffers: dict[str, torch.Tensor] = dict(module.named_buffers())
        self._tensors = [*self.params.values(), *self.buffers.values()]
        self._parts = [getattr(m, name) for m in self._modules for name in _PARTS]
        self._part_contents, self._lengths = self._read_part_contents(), list(map(len, self._parts))
        self._attribute_dicts = [vars(m) for m in self._modules]
        self.refresh()

    def refresh(self) -> None:
        """Record attributes and addresses as they are now. The submodules must be the same."""
        self._attribute_keys, self._getters = self._read_attribute_keys(), list(map(_getter, self._attribute_dicts))
        self._attribute_values, self._plain_attributes = self._read_attribute_values(), self._read_plain_attributes()
        self._tensor_metadata = self._read_tensor_metadata()

    @property
    def signature(self) -> ModuleSignature:
        """The properties of the module that a traced loss depends on."""
        kinds = tuple((name, t.shape, t.dtype) for name, t in (*self.params.items(), *self.buffers.items()))
        hooks = tuple(ById(hook) for m in self._modules for name in _HOOKS for hook in getattr(m, name).values())
        return ModuleSignature(tuple(self._modules), tuple(self._plain_attributes), hooks, kinds)

    def is_unchanged(self) -> bool:
        """Return whether nothing has changed since the last refresh."""
        return self._read_tensor_metadata() == self._tensor_metadata and self._has_same_parts() and self._has_same_attributes()

    def _has_same_parts(self) -> bool:
        return self._lengths == list(map(len, self._parts)) and all(map(is_, self._part_contents, self._read_part_contents()))

    def _read_part_contents(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._parts)))

    def _read_tensor_metadata(self) -> Sequence[object]:
        storage_sizes = list(map(len, map(storage_of, self._tensors)))  # a freed and reallocated storage may have its old address
        return list(map(_address, self._tensors)), storage_sizes, list(map(_strides, self._tensors)), list(map(_metadata, self._tensors))

    def _has_same_attributes(self) -> bool:
        if self._read_attribute_keys() != self._attribute_keys:
            return False
        now = self._read_attribute_values()
        if all(map(is_, now, self._attribute_values)):
            return True
        self._attribute_values = now  # equal values may be other objects
        return self._plain_attributes == self._read_plain_attributes()

    def _read_attribute_keys(self) -> tuple[list[int], list[str]]:
        """Return the number of attributes of each module, and the last one. A new attribute changes one of them."""
        return list(map(len, self._attribute_dicts)), list(map(next, map(reversed, self._attribute_dicts)))

    def _read_attribute_values(self) -> list[object]:
        return list(chain.from_iterable([get(own) for get, own in zip(self._getters, self._attribute_dicts, strict=True)]))

    def _read_plain_attributes(self) -> list[_Attribute]:
        return [(name, _description(value)) for own in self._attribute_dicts for name, value in own.items()]


# torch's own attributes of a module: dicts of tensors, modules and hooks. User code does not replace them by plain values, and skipping
# them makes the comparison faster.
_TORCH_ATTRIBUTES = frozenset(name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict | set))


def _getter(own: dict[str, object]) -> Callable[[dict[str, object]], Iterable[object]]:
    """Return a function that gets the values of a module's attributes, without torch's own, as a tuple."""
    names = [name for name in own if name not in _TORCH_ATTRIBUTES]
    return itemgetter(*names) if len(names) > 1 else lambda own: tuple(map(own.__getitem__, names))


def _description(value: object) -> tuple[Hashable, ...] | None:
    """Return a plain value with its type, because 1 == True; None for any other value."""
    if isinstance(value, tuple):
        return tuple, *map(_description, value)
    return (type(value), value) if isinstance(value, _PLAIN_TYPES) else None


def plain_value(description: object) -> object:
    """Return the value that `_description` has described; `...` for one that is not plain."""
    if description is None:
        return ...
    kind, *parts = cast("tuple[object, ...]", description)
    return tuple(map(plain_value, parts)) if kind is tuple else parts[0]
