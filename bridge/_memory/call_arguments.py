"""Tensors as arguments of a compiled program, and its results as tensors, by the cheapest route."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import getitem
from typing import Any, TypeAlias

import jax
import jax.core
import numpy as np
import torch

from bridge._interop.dlpack import ALIGNMENT_GPU, _cpu_calls, _exporter, _tensor_to_jax, to_jax, with_memory
from bridge._interop.dtypes import numpy_dtype
from bridge._interop.tensor_storage import storage_of

from .array_interface import Window, host_view


def results(arrays: Sequence[jax.Array], on_cpu: bool) -> list[torch.Tensor]:
    """Tensors over what a program has just returned: as `to_torch`, without its questions, which take a microsecond each."""
    calls = _cpu_calls() if on_cpu else None
    if calls is None:
        return list(map(_exporter(), arrays))
    to_capsule, from_capsule = calls
    return list(map(from_capsule, map(to_capsule, arrays, repeat(None))))


Argument: TypeAlias = jax.Array | np.ndarray  # of a compiled program
_stride, _is_contiguous = torch.Tensor.stride, torch.Tensor.is_contiguous


class Views:
    """From addresses on the CPU to flat numpy views of so many elements there, a third of what torch's `numpy()` costs.

    A view owns nothing: whoever passes it to a call holds the memory until that call has ended.
    """

    def __init__(self, avals: Sequence[jax.ShapeDtypeStruct | jax.core.ShapedArray]) -> None:
        dtypes = [np.dtype(aval.dtype) for aval in avals]
        counts = [math.prod(aval.shape) for aval in avals]
        bytes_of = [dtype.itemsize * count for dtype, count in zip(dtypes, counts, strict=True)]
        call: Any = operator.call
        makers = [(ctypes.c_char * count).from_address for count in bytes_of]
        self.buffers: Callable[[Iterable[int]], Iterable[Any]] = functools.partial(map, call, makers)  # of addresses
        self.over: Callable[[Iterable[Any]], Iterable[np.ndarray]] = functools.partial(
            map, np.ndarray, [(count,) for count in counts], dtypes
        )  # those

    def __call__(self, addresses: Iterable[int]) -> list[np.ndarray]:
        return list(self.over(self.buffers(addresses)))


class Operands:
    """`operands` of tensors on the CPU whose shapes and dtypes are known: of plain ones in a third of the time.

    The memory of plain tensors is only looked at. The caller knows that their storages hold them (`backing`), and holds the tensors
    until the program has ended.

    Args:
      shapes, dtypes: of the tensors.
      order: of the dimensions of each in memory; None as they are.
      needed: how many bytes the storage of each must have, where the caller does not know: it may have been freed or made smaller.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        order: Sequence[tuple[int, ...] | None],
        needed: Sequence[int] = (),
    ) -> None:
        self._order, self._needed = order, needed
        self._contiguous = [dims is None for dims in order]
        self._turned = [i for i, dims in enumerate(order) if dims is not None]
        self._strides = [_dense_strides(shapes[i], order[i] or ()) for i in self._turned]
        known = [jax.ShapeDtypeStruct((math.prod(shape),), numpy_dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._views = None if any(dtype.is_complex for dtype in dtypes) else Views(known)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Argument]:
        if (
            self._views is not None
            and list(map(_is_contiguous, tensors)) == self._contiguous
            and (not self._turned or list(map(_stride, map(tensors.__getitem__, self._turned))) == self._strides)
            and not any(map(torch.Tensor.is_neg, tensors))
            and (not self._needed or all(map(operator.ge, map(len, map(storage_of, tensors)), self._needed)))
        ):
            try:
                addresses = list(map(torch.Tensor.data_ptr, tensors))
            except RuntimeError:  # one has no memory
                addresses = [0]
            if all(addresses):
                return list(self._views.over(self._views.buffers(addresses)))  # as its call, which would be a frame more
        return operands(tensors, self._order)


def _dense_strides(shape: Sequence[int], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in this order."""
    strides, step = [0] * len(order), 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def operands(tensors: Sequence[torch.Tensor], order: Sequence[tuple[int, ...] | None]) -> Sequence[Argument]:
    """The tensors as flat arguments of one compiled call, elements in the dimension order given, by the cheapest route.

    Zero-copy where jax can alias the memory, else copied: the caller only reads them. On the CPU a numpy view passed
    straight to the call costs a third of an import. The tensors must stay unchanged until the call has ended.
    """
    if tensors and tensors[0].device.type != "cpu":
        # Each export orders jax's stream after torch's current one.
        flat = [(t if d is None else t.permute(d)).detach().reshape(-1) for t, d in zip(map(with_memory, tensors), order, strict=True)]
        return [_tensor_to_jax(t, None, "") for t in flat]
    return [host_view(t if d is None else with_memory(t).detach().permute(d)).reshape(-1) for t, d in zip(tensors, order, strict=True)]


_address, _strides, _is_neg, _is_conj = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_neg, torch.Tensor.is_conj
_PLACES = 8  # of one argument that are remembered: more only where memory is given out anew at every step


def alias(tensor: torch.Tensor) -> jax.Array:
    """A flat array over the bytes of a contiguous tensor that is not empty; it keeps nothing alive and orders no streams."""
    with torch.inference_mode(False):
        return to_jax(Window(None, tensor.data_ptr(), (tensor.numel(),), numpy_dtype(tensor.dtype), tensor.device).tensor())


class Borrowed:
    """As `call_arguments.operands` of tensors on one GPU, for so many arguments, with their dimensions in the order given.

    jax's stream is not put behind torch's: whoever calls a program also passes it what `dlpack.behind_torch` gives.
    """

    def __init__(self, order: Sequence[tuple[int, ...] | None], are_complex: bool = False) -> None:
        self._order, self._complex = order, are_complex
        self._known: list[dict[tuple[int, tuple[int, ...]], jax.Array]] = [{} for _ in order]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Argument]:
        if any(map(_is_neg, tensors)) or (self._complex and any(map(_is_conj, tensors))):  # what lies there is not what they are
            return operands(tensors, self._order)
        try:
            return list(map(getitem, self._known, zip(map(_address, tensors), map(_strides, tensors), strict=True)))
        except KeyError:
            return list(map(self._array, self._known, tensors, self._order))

    @staticmethod
    def _array(known: dict[tuple[int, tuple[int, ...]], jax.Array], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> Argument:
        place = tensor.data_ptr(), tensor.stride()
        if place not in known:
            flat = tensor.detach() if dims is None else tensor.detach().permute(dims)
            if not flat.is_contiguous() or not flat.numel() or tensor.data_ptr() % ALIGNMENT_GPU:
                return operands([tensor], [dims])[0]  # a copy
            if len(known) >= _PLACES:
                known.clear()
            known[place] = alias(flat)
        return known[place]


class PaddedOperands(Operands):
    """As `Operands`, those at some positions copied to rows of more elements, `longer`, with zeros behind the elements of the tensor."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        order: Sequence[tuple[int, ...] | None],
        longer: Mapping[int, int],
    ) -> None:
        with torch.inference_mode(False):  # else no later step could write to them
            self._rows = {at: (torch.zeros(length, dtype=dtypes[at]), order[at]) for at, length in longer.items()}
        super().__init__(
            [(longer[at],) if at in longer else shape for at, shape in enumerate(shapes)],
            dtypes,
            [None if at in longer else dims for at, dims in enumerate(order)],
        )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Argument]:
        given = list(tensors)
        for at, (row, dims) in self._rows.items():
            tensor = given[at].detach()
            row[: tensor.numel()].copy_((tensor if dims is None else tensor.permute(dims)).reshape(-1))
            given[at] = row
        return super().__call__(given)
