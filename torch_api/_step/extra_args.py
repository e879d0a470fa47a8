"""Extra arguments of a step: `step(**extra_args)`, as arrays of a program."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
import torch

from bridge._compiler.spec import NO_EXTRA_ARGS, ById, ExtraArgsSpec
from bridge._interop.dlpack import to_jax
from bridge._interop.tensor_storage import why_unreadable
from bridge._ir.types import PyTree
from bridge._names import Path, unnest
from torch_api._params.record import ParamRecord

_Array: TypeAlias = jax.Array | np.ndarray

_TO_32BIT = {torch.float64: torch.float32, torch.complex128: torch.complex64, torch.int64: torch.int32}
_TO_32BIT_NUMPY = {np.dtype(wide): np.dtype(narrow) for wide, narrow in (("f8", "f4"), ("c16", "c8"), ("i8", "i4"))}


def are_64bit(leaves: Iterable[ParamRecord]) -> bool:
    """Return whether all floating and complex parameters have 64 bits. Frozen parameters may be of other kinds."""
    floats = [leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point or leaf.dtype.is_complex]
    return all(dtype in (torch.float64, torch.complex128) for dtype in floats)


class ExtraArgs:
    """The extra keyword arguments of one step, as arguments of a program.

    Tensors and numbers become arrays. As in pure JAX, the arrays have 32 bits, unless all parameters have 64. Another object stays as it
    is and is compared by identity. A dict with the names of all parameters, dotted or nested, becomes the nested dict of the parameters
    that have a gradient.
    """

    def __init__(self, extra_args: Mapping[str, PyTree], leaves: Sequence[ParamRecord], all_paths: Sequence[Path]) -> None:
        self._paths = {".".join(path): path for path in all_paths}
        self._names = {id(leaf): ".".join(path) for leaf, path in zip(leaves, all_paths, strict=True)}
        self._keeps_64bit = are_64bit(leaves)
        self._values = {name: self._convert(name, value) for name, value in extra_args.items()}
        self.names = tuple(sorted(extra_args))

    def _convert(self, argument: str, value: PyTree) -> _PerParam | PyTree:
        flat = unnest(value) if isinstance(value, Mapping) else {}
        covers_all = flat and flat.keys() == self._paths.keys()
        return _PerParam(argument, flat) if covers_all else jax.tree.map(functools.partial(self._to_array, argument), value)

    def for_leaves(self, leaves: Sequence[ParamRecord]) -> tuple[ExtraArgsSpec, list[_Array]]:
        """Return the static description of the arguments, and their arrays, for the parameters that have a gradient."""
        with_grad = {self._names[id(leaf)] for leaf in leaves}
        tree = {
            name: self._nest_arrays(value, with_grad) if isinstance(value, _PerParam) else value for name, value in self._values.items()
        }
        flat, structure = jax.tree.flatten(tree)
        arrays = [x for x in flat if not isinstance(x, ById)]
        signature = tuple(x if isinstance(x, ById) else (tuple(x.shape), str(x.dtype)) for x in flat)
        return (ExtraArgsSpec(structure, signature), arrays) if tree else (NO_EXTRA_ARGS, [])

    def _nest_arrays(self, value: _PerParam, with_grad: set[str]) -> PyTree:
        root: PyTree = {}
        for name, path in self._paths.items():
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self._to_array(f"{value.argument}[{name!r}]", value.by_name[name]) if name in with_grad else None
        return root

    def _to_array(self, argument: str, x: object) -> _Array | ById:
        if isinstance(x, torch.Tensor):
            if why := why_unreadable(x):
                raise ValueError(f"step: the argument {argument} cannot be read: {why}. Nothing was updated: pass a tensor that is whole.")
            narrow_dtype = None if self._keeps_64bit else _TO_32BIT.get(x.dtype)
            return to_jax(x.detach() if narrow_dtype is None else x.detach().to(narrow_dtype), copy=None)
        if not isinstance(x, bool | int | float | np.ndarray | np.generic | jax.Array):
            return x if isinstance(x, ById) else ById(x)
        if isinstance(x, jax.Array):
            return x
        array = np.asarray(x)
        return array if self._keeps_64bit else array.astype(_TO_32BIT_NUMPY.get(array.dtype, array.dtype))


class _PerParam:
    def __init__(self, argument: str, by_name: dict[str, object]) -> None:
        self.argument, self.by_name = argument, by_name
