"""Turn tensors into arguments of an executable, and its results into tensors, without copies where that is possible."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import getitem
from typing import Any, Protocol, TypeAlias

import jax
import jax.core
import numpy as np
import torch

from bridge._compat.lookup import SAFE_MODE
from bridge._interop.dlpack import ALIGNMENT_GPU, _capsule_calls, _exporter, _tensor_to_jax, to_jax, with_dense_storage
from bridge._interop.dtypes import numpy_dtype
from bridge._interop.tensor_storage import offset_of, storage_of

from .array_interface import ArrayInterface, host_view


def results_as_tensors(arrays: Sequence[jax.Array], on_cpu: bool) -> list[torch.Tensor]:
    """Return tensors over the results of an executable. This is `to_torch` without its checks."""
    calls = _capsule_calls() if on_cpu else None
    if calls is None:
        return list(map(_exporter(), arrays))
    to_capsule, from_capsule = calls
    return list(map(from_capsule, map(to_capsule, arrays, repeat(None))))


Argument: TypeAlias = jax.Array | np.ndarray  # of an executable
_stride, _is_contiguous = torch.Tensor.stride, torch.Tensor.is_contiguous


class TensorArguments(Protocol):
    """Turns tensors into flat arguments of one call, without copies where that is possible."""

    def __call__(self, tensors: Sequence[torch.Tensor], held: list[object]) -> Sequence[Argument]:
        """Return the arguments. `held` receives what the caller holds until the program has ended."""
        ...


def arguments_over(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    dim_orders: Sequence[tuple[int, ...] | None],
    device: torch.device,
) -> TensorArguments:
    """Return what turns tensors with these shapes and dtypes, on one device, into arguments.

    Args:
      shapes: The shape of each tensor.
      dtypes: The dtype of each tensor.
      dim_orders: The order of each tensor's dimensions in memory; None for the order that they have.
      device: The device of all tensors.
    """
    if SAFE_MODE:
        return lambda tensors, held: as_call_arguments(tensors, dim_orders)
    if device.type == "cpu":
        return CpuArguments(shapes, dtypes, dim_orders)
    return GpuArguments(dim_orders, any(dtype.is_complex for dtype in dtypes))


class TensorViews:
    """Turns dense CPU tensors into flat numpy arrays over their elements, by address, which is cheaper than torch's `numpy()`.

    The arrays keep nothing alive: the caller has checked the storages, and holds them until the program has ended.

    Args:
      avals: The shape and dtype of each tensor.
    """

    def __init__(self, avals: Sequence[jax.ShapeDtypeStruct | jax.core.ShapedArray]) -> None:
        dtypes = [np.dtype(aval.dtype) for aval in avals]
        counts = [math.prod(aval.shape) for aval in avals]
        bytes_of = [dtype.itemsize * count for dtype, count in zip(dtypes, counts, strict=True)]
        call: Any = operator.call
        makers = [(ctypes.c_char * count).from_address for count in bytes_of]
        self.buffers_at: Callable[[Iterable[int]], Iterable[Any]] = functools.partial(map, call, makers)  # of addresses
        self.arrays_over: Callable[[Iterable[Any]], Iterable[np.ndarray]] = functools.partial(
            map, np.ndarray, [(count,) for count in counts], dtypes
        )  # of the buffers

    def __call__(self, tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
        return list(self.arrays_over(self.buffers_at(map(torch.Tensor.data_ptr, tensors))))


class CpuArguments:
    """Does what `as_call_arguments` does, faster, for CPU tensors whose shapes and dtypes are known.

    The arguments are views by address. Each call checks that the storages hold the tensors, and hands the storages to the caller.

    Args:
      shapes: The shape of each tensor.
      dtypes: The dtype of each tensor.
      dim_orders: The order of each tensor's dimensions in memory; None for the order that they have.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dim_orders: Sequence[tuple[int, ...] | None]
    ) -> None:
        self._dim_orders = dim_orders
        self._contiguous = [dims is None for dims in dim_orders]
        self._permuted = [i for i, dims in enumerate(dim_orders) if dims is not None]
        self._strides = [_dense_strides(shapes[i], dim_orders[i] or ()) for i in self._permuted]
        self._itemsizes = [dtype.itemsize for dtype in dtypes]
        self._sizes = [math.prod(shape) * itemsize for shape, itemsize in zip(shapes, self._itemsizes, strict=True)]
        known = [jax.ShapeDtypeStruct((math.prod(shape),), numpy_dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._views = None if any(dtype.is_complex for dtype in dtypes) else TensorViews(known)

    def __call__(self, tensors: Sequence[torch.Tensor], held: list[object]) -> Sequence[Argument]:
        if (
            self._views is not None
            and list(map(_is_contiguous, tensors)) == self._contiguous
            and (not self._permuted or list(map(_stride, map(tensors.__getitem__, self._permuted))) == self._strides)
            and not any(map(torch.Tensor.is_neg, tensors))
        ):
            try:
                storages = list(map(storage_of, tensors))
                bytes_held, addresses = list(map(len, storages)), list(map(torch.Tensor.data_ptr, tensors))
            except RuntimeError:  # a tensor has no memory
                return as_call_arguments(tensors, self._dim_orders)
            if all(addresses) and (
                bytes_held == self._sizes
                or all(
                    map(
                        operator.ge, bytes_held, map(operator.add, self._sizes, map(operator.mul, map(offset_of, tensors), self._itemsizes))
                    )
                )
            ):
                held += storages
                return list(self._views.arrays_over(self._views.buffers_at(addresses)))  # a call of `_views` would be one more frame
        return as_call_arguments(tensors, self._dim_orders)


def _dense_strides(shape: Sequence[int], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions have this order in memory."""
    strides, step = [0] * len(order), 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def as_call_arguments(tensors: Sequence[torch.Tensor], dim_orders: Sequence[tuple[int, ...] | None]) -> Sequence[Argument]:
    """Return the tensors as flat arguments of one call, with elements in the given order of dimensions.

    An argument aliases its tensor if jax can do that, and is a copy otherwise. The tensors must stay unchanged until the call has ended. On
    the CPU, a numpy view passed to the call is cheaper than an import by DLPack.
    """
    if tensors and tensors[0].device.type != "cpu":
        # Each export makes jax's stream wait for torch's current one.
        flat = [
            (t if d is None else t.permute(d)).detach().reshape(-1)
            for t, d in zip(map(with_dense_storage, tensors), dim_orders, strict=True)
        ]
        return [_tensor_to_jax(t, None, "") for t in flat]
    return [
        host_view(t if d is None else with_dense_storage(t).detach().permute(d)).reshape(-1)
        for t, d in zip(tensors, dim_orders, strict=True)
    ]


_address, _strides, _is_neg, _is_conj = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_neg, torch.Tensor.is_conj
_MAX_REMEMBERED = 8  # addresses remembered for one argument; more occur only if memory moves at every step


def import_non_owning(tensor: torch.Tensor) -> jax.Array:
    """Return a flat array over the bytes of a contiguous tensor with elements. It keeps nothing alive and orders no streams."""
    with torch.inference_mode(False):
        return to_jax(ArrayInterface(None, tensor.data_ptr(), (tensor.numel(),), numpy_dtype(tensor.dtype), tensor.device).as_tensor())


class GpuArguments:
    """Does what `as_call_arguments` does for tensors on one GPU, with remembered imports.

    jax's stream does not wait for torch's. The caller passes the result of `dlpack.torch_stream_token` to the program for that.

    Args:
      dim_orders: The order of each tensor's dimensions in memory; None for the order that they have.
      are_complex: Whether a tensor may be complex, and then conjugated lazily.
    """

    def __init__(self, dim_orders: Sequence[tuple[int, ...] | None], are_complex: bool = False) -> None:
        self._dim_orders, self._complex = dim_orders, are_complex
        self._imports: list[dict[tuple[int, tuple[int, ...]], jax.Array]] = [{} for _ in dim_orders]

    def __call__(self, tensors: Sequence[torch.Tensor], held: list[object]) -> Sequence[Argument]:
        held += tensors
        if any(map(_is_neg, tensors)) or (self._complex and any(map(_is_conj, tensors))):  # the bytes are not the values
            return as_call_arguments(tensors, self._dim_orders)
        try:
            return list(map(getitem, self._imports, zip(map(_address, tensors), map(_strides, tensors), strict=True)))
        except KeyError:
            return list(map(self._argument, self._imports, tensors, self._dim_orders))

    @staticmethod
    def _argument(imports: dict[tuple[int, tuple[int, ...]], jax.Array], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> Argument:
        place = tensor.data_ptr(), tensor.stride()
        if place not in imports:
            flat = tensor.detach() if dims is None else tensor.detach().permute(dims)
            if not flat.is_contiguous() or not flat.numel() or tensor.data_ptr() % ALIGNMENT_GPU:
                return as_call_arguments([tensor], [dims])[0]  # a copy
            if len(imports) >= _MAX_REMEMBERED:
                imports.clear()
            imports[place] = import_non_owning(flat)
        return imports[place]
