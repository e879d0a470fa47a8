"""Extra arguments of a step: `step(**extra_args)`, as arrays of a program."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
import torch

from bridge._compiler.spec import NO_EXTRA, Extra, Same
from bridge._interop.dlpack import to_jax
from bridge._interop.tensor_storage import shortage
from bridge._ir.types import PyTree
from bridge._names import Path, unnest
from torch_api._params.record import Leaf

_Array: TypeAlias = jax.Array | np.ndarray

_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64, torch.int64: torch.int32}
_NARROW_NUMPY = {np.dtype(wide): np.dtype(narrow) for wide, narrow in (("f8", "f4"), ("c16", "c8"), ("i8", "i4"))}


def are_wide(leaves: Iterable[Leaf]) -> bool:
    """Return whether all floating and complex parameters have 64 bits. Frozen parameters may be of other kinds."""
    floats = [leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point or leaf.dtype.is_complex]
    return all(dtype in (torch.float64, torch.complex128) for dtype in floats)


class Arguments:
    """The extra keyword arguments of one step, as arguments of a program.

    Tensors and numbers become arrays. As in pure JAX, the arrays have 32 bits, unless all parameters have 64. Any other object stays as it
    is and is compared by identity. A dict with the names of all parameters, dotted or nested, becomes the nested dict of the parameters
    that have a gradient.
    """

    def __init__(self, given: Mapping[str, PyTree], leaves: Sequence[Leaf], skeleton: Sequence[Path]) -> None:
        self._paths = {".".join(path): path for path in skeleton}
        self._names = {id(leaf): ".".join(path) for leaf, path in zip(leaves, skeleton, strict=True)}
        self._wide = are_wide(leaves)
        self._given = {name: self._by_parameter(name, value) for name, value in given.items()}
        self.names = tuple(sorted(given))

    def _by_parameter(self, argument: str, value: PyTree) -> _ByParameter | PyTree:
        flat = unnest(value) if isinstance(value, Mapping) else {}
        whole = flat and flat.keys() == self._paths.keys()
        return _ByParameter(argument, flat) if whole else jax.tree.map(functools.partial(self._array, argument), value)

    def of(self, leaves: Sequence[Leaf]) -> tuple[Extra, list[_Array]]:
        """Return the static description of the arguments, and their arrays, for the parameters that have a gradient."""
        alive = {self._names[id(leaf)] for leaf in leaves}
        tree = {name: self._nested(value, alive) if isinstance(value, _ByParameter) else value for name, value in self._given.items()}
        flat, structure = jax.tree.flatten(tree)
        arrays = [x for x in flat if not isinstance(x, Same)]
        signature = tuple(x if isinstance(x, Same) else (tuple(x.shape), str(x.dtype)) for x in flat)
        return (Extra(structure, signature), arrays) if tree else (NO_EXTRA, [])

    def _nested(self, value: _ByParameter, alive: set[str]) -> PyTree:
        root: PyTree = {}
        for name, path in self._paths.items():
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self._array(f"{value.argument}[{name!r}]", value.by_name[name]) if name in alive else None
        return root

    def _array(self, argument: str, x: object) -> _Array | Same:
        if isinstance(x, torch.Tensor):
            if why := shortage(x):
                raise ValueError(f"step: the argument {argument} cannot be read: {why}. Nothing was updated: pass a tensor that is whole.")
            narrow = None if self._wide else _NARROW.get(x.dtype)
            return to_jax(x.detach() if narrow is None else x.detach().to(narrow), copy=None)
        if not isinstance(x, bool | int | float | np.ndarray | np.generic | jax.Array):
            return x if isinstance(x, Same) else Same(x)
        if isinstance(x, jax.Array):
            return x
        array = np.asarray(x)
        return array if self._wide else array.astype(_NARROW_NUMPY.get(array.dtype, array.dtype))


class _ByParameter:
    def __init__(self, argument: str, by_name: dict[str, object]) -> None:
        self.argument, self.by_name = argument, by_name
