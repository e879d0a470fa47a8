"""What a compiled step knows of a module, and whether that is still so: one comparison of columns a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter

import torch

from bridge._compiler.spec import Same
from bridge._interop.tensor_storage import storage_of

_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride
_kind = attrgetter("shape", "dtype", "requires_grad")
# What a forward pass may branch on; a traced program has the values of the time at which it was traced.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)


class Watch:
    """A module as it was when last looked at: its parts, its plain attributes (`training` among them), and where its tensors lie.

    Plain are numbers, strings, dtypes, devices, None, and tuples of these; of other attributes only whether they are there.

    params, buffers: by name, tied ones once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._modules = list(module.modules())
        self.params: dict[str, torch.Tensor] = dict(module.named_parameters())
        self.buffers: dict[str, torch.Tensor] = dict(module.named_buffers())
        self._tensors = [*self.params.values(), *self.buffers.values()]
        self._parts = [getattr(m, name) for m in self._modules for name in _PARTS]
        self._held, self._lengths = self._contents(), list(map(len, self._parts))
        self._own = [vars(m) for m in self._modules]
        self.look()

    def look(self) -> None:
        """Take note of how everything is now; the parts are as they were."""
        self._names, self._getters = self._keys(), list(map(_getter, self._own))
        self._values, self._plain = self._attributes(), self._described()
        self._seen = self._places()

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """All that the trace of a loss depends on."""
        kinds = tuple((name, t.shape, t.dtype) for name, t in (*self.params.items(), *self.buffers.items()))
        hooks = tuple(Same(hook) for m in self._modules for name in _HOOKS for hook in getattr(m, name).values())
        return tuple(self._modules), tuple(self._plain), hooks, kinds

    def same(self) -> bool:
        """Whether all is as it was at the last look."""
        return self._places() == self._seen and self._same_parts() and self._same_attributes()

    def _same_parts(self) -> bool:
        return self._lengths == list(map(len, self._parts)) and all(map(is_, self._held, self._contents()))

    def _contents(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._parts)))

    def _places(self) -> Sequence[object]:
        held = list(map(len, map(storage_of, self._tensors)))  # a storage that is freed and given back may lie where it did
        return list(map(_address, self._tensors)), held, list(map(_strides, self._tensors)), list(map(_kind, self._tensors))

    def _same_attributes(self) -> bool:
        if self._keys() != self._names:
            return False
        now = self._attributes()
        if all(map(is_, now, self._values)):
            return True
        self._values = now  # perhaps equal values in other objects
        return self._plain == self._described()

    def _keys(self) -> tuple[list[int], list[str]]:
        """How many attributes each module has and the latest: others than before would be more, or a later one."""
        return list(map(len, self._own)), list(map(next, map(reversed, self._own)))

    def _attributes(self) -> list[object]:
        return list(chain.from_iterable([get(own) for get, own in zip(self._getters, self._own, strict=True)]))

    def _described(self) -> list[tuple[str, Hashable]]:
        return [(name, _description(value)) for own in self._own for name, value in own.items()]


# What torch itself keeps of a module: dicts of tensors, modules and hooks, which nobody replaces by something plain. To look at
# these too would take twice as long, for the memory that it touches.
_TORCHS = frozenset(name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict | set))


def _getter(own: dict[str, object]) -> Callable[[dict[str, object]], Iterable[object]]:
    """What gets the values of a module's attributes, but for torch's own, as a tuple."""
    names = [name for name in own if name not in _TORCHS]
    return itemgetter(*names) if len(names) > 1 else lambda own: tuple(map(own.__getitem__, names))


def _description(value: object) -> tuple[Hashable, ...] | None:
    """A plain value with its type, since 1 == True; of others nothing."""
    if isinstance(value, tuple):
        return tuple, *map(_description, value)
    return (type(value), value) if isinstance(value, _PLAIN) else None
