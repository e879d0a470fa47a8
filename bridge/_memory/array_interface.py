"""Arrays over tensors and tensors over jax arrays, by numpy's and CUDA's array interfaces, without DLPack."""

# jax and torch annotate some of these functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

from bridge._compat.lookup import SAFE_MODE
from bridge._interop.dlpack import with_dense_storage
from bridge._interop.dtypes import EXTENSION_DTYPES, numpy_dtype


class _TensorBytes:
    """The array interface of a contiguous CPU tensor. An array over it keeps the tensor alive.

    `Tensor.numpy()` would forbid resizing the storage from then on, and libraries free gradients and batches by resizing their storages.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, typestr: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = {"data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape), "typestr": typestr, "version": 3}


def host_view(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over the memory of a CPU tensor, which the array keeps alive. If the tensor is not contiguous, it is a copy.

    In the safe mode it always is a copy, of which numpy holds the memory.

    Raises:
      ValueError: The elements cannot be read; see `with_dense_storage`.
    """
    tensor = with_dense_storage(tensor)
    if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dtype, bits = numpy_dtype(tensor.dtype), _typestr(tensor.dtype)
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    if SAFE_MODE:
        as_integers = EXTENSION_DTYPES[tensor.dtype][0] if tensor.dtype in EXTENSION_DTYPES else tensor.dtype
        view = tensor.detach().clone().view(as_integers).numpy()
    else:
        view = np.asarray(_TensorBytes(tensor, bits))
    return view.view(dtype) if view.dtype != dtype else view


@functools.cache
def _typestr(dtype: torch.dtype) -> str:
    """Return the type string of a dtype in numpy's array interface. A dtype that only ml_dtypes has is given as integers of its width."""
    return numpy_dtype(EXTENSION_DTYPES[dtype][0] if dtype in EXTENSION_DTYPES else dtype).str


# Array interfaces have no bfloat16 or float8: these travel as integers of the same width.
_INTEGER_VIEWS = {np.dtype(dtype): (numpy_dtype(bits), extension) for extension, (bits, dtype) in EXTENSION_DTYPES.items()}


class ArrayInterface:
    """The array interface of some bytes on a device. A tensor over it keeps it alive, and it keeps the owner alive.

    Args:
      owner: The object that holds the memory; None if the user of the interface holds it.
      address: The address of the first byte.
      shape: The shape of the C-contiguous elements.
      dtype: Their numpy or ml_dtypes dtype.
      device: torch's device, the CPU or a GPU.
    """

    def __init__(self, owner: object, address: int, shape: tuple[int, ...], dtype: DTypeLike, device: torch.device) -> None:
        self.owner, self._device = owner, device
        self._numpy_dtype, self._extension_dtype = _INTEGER_VIEWS.get(np.dtype(dtype), (np.dtype(dtype), None))
        interface: dict[str, Any] = {"data": (address, False), "shape": shape, "typestr": self._numpy_dtype.str, "version": 3}
        self._interface = interface
        if device.type == "cpu":
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface

    def as_tensor(self) -> torch.Tensor:
        """Return a tensor whose storage is exactly these bytes. If the shape has no elements, the tensor has memory of its own."""
        shape = self._interface["shape"]
        if not math.prod(shape):
            view = torch.from_numpy(np.zeros(shape, self._numpy_dtype)).to(self._device)
        elif self._device.type == "cpu":
            view = torch.from_numpy(np.asarray(self))
        else:
            view = torch.as_tensor(self, device=self._device)
        return view if self._extension_dtype is None else view.view(self._extension_dtype)
