"""Tensors and arrays between torch and jax: the only file that touches DLPack.

Zero-copy means that both sides see the same bytes, in both directions: a write through torch is visible in the jax
array, although jax calls it immutable. Import afresh after a write; a jax array that was printed keeps the old values
(https://github.com/jax-ml/jax/issues/19123).
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import jax
import numpy as np
import torch
import torch.utils.dlpack

from ._interop.dlpack import _cpu_calls, _exporter, _tensor_to_jax, with_memory
from ._interop.dtypes import EXTENSION_DTYPES, numpy_dtype
from ._interop.tensor_storage import storage_of


def results(arrays: Sequence[jax.Array], on_cpu: bool) -> list[torch.Tensor]:
    """Tensors over what a program has just returned: as `to_torch`, without its questions, which take a microsecond each."""
    calls = _cpu_calls() if on_cpu else None
    if calls is None:
        return list(map(_exporter(), arrays))
    to_capsule, from_capsule = calls
    return list(map(from_capsule, map(to_capsule, arrays, repeat(None))))


_stride, _is_contiguous = torch.Tensor.stride, torch.Tensor.is_contiguous


class Views:
    """From addresses on the CPU to flat numpy views of so many elements there, a third of what torch's `numpy()` costs.

    A view owns nothing: whoever passes it to a call holds the memory until that call has ended.
    """

    def __init__(self, avals: Sequence[Any]) -> None:
        dtypes = [np.dtype(aval.dtype) for aval in avals]
        counts = [math.prod(aval.shape) for aval in avals]
        bytes_of = [dtype.itemsize * count for dtype, count in zip(dtypes, counts, strict=True)]
        call: Any = operator.call
        self.buffers = functools.partial(map, call, [(ctypes.c_char * count).from_address for count in bytes_of])  # of addresses
        self.over = functools.partial(map, np.ndarray, [(count,) for count in counts], dtypes)  # those

    def __call__(self, addresses: Iterable[int]) -> list[np.ndarray[Any, Any]]:
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

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
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


def operands(tensors: Sequence[torch.Tensor], order: Sequence[tuple[int, ...] | None]) -> list[Any]:
    """The tensors as flat arguments of one compiled call, elements in the dimension order given, by the cheapest route.

    Zero-copy where jax can alias the memory, else copied: the caller only reads them. On the CPU a numpy view passed
    straight to the call costs a third of an import. The tensors must stay unchanged until the call has ended.
    """
    if tensors and tensors[0].device.type != "cpu":
        # Each export orders jax's stream after torch's current one.
        flat = [(t if d is None else t.permute(d)).detach().reshape(-1) for t, d in zip(map(with_memory, tensors), order, strict=True)]
        return [_tensor_to_jax(t, None, "") for t in flat]
    return [host_view(t if d is None else with_memory(t).detach().permute(d)).reshape(-1) for t, d in zip(tensors, order, strict=True)]


class _Bytes:
    """The memory of a contiguous tensor on the CPU as numpy takes it: an array over it holds the tensor.

    `Tensor.numpy()` would forbid to resize the storage from then on, and libraries free gradients and batches in that way.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, bits: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = {"data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape), "typestr": bits, "version": 3}


def host_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor on the CPU as an array over the same memory, which it keeps alive; of a copy where the tensor is not contiguous.

    Raises:
      ValueError: the elements cannot be read; see `with_memory`.
    """
    tensor = with_memory(tensor)
    if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dtype, bits = numpy_dtype(tensor.dtype), _bits(tensor.dtype)
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    view = np.asarray(_Bytes(tensor, bits))
    return view.view(dtype) if view.dtype != dtype else view


@functools.cache
def _bits(dtype: torch.dtype) -> str:
    """How numpy's array interface calls a type, or for a type that only ml_dtypes has, its bits."""
    return numpy_dtype(EXTENSION_DTYPES[dtype][0] if dtype in EXTENSION_DTYPES else dtype).str
