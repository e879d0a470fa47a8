"""Memory as numpy sees it: arrays over tensors, and tensors over jax arrays, without DLPack."""

# jax and torch declare some of the functions used here in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

from bridge._interop.dlpack import with_memory
from bridge._interop.dtypes import EXTENSION_DTYPES, numpy_dtype


class _Bytes:
    """The memory of a contiguous tensor on the CPU as numpy takes it: an array over it holds the tensor.

    `Tensor.numpy()` would forbid to resize the storage from then on, and libraries free gradients and batches in that way.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, bits: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = {"data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape), "typestr": bits, "version": 3}


def host_view(tensor: torch.Tensor) -> np.ndarray:
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


# The array interfaces know no bfloat16 or float8: their bits travel as integers of the same width.
_BITS = {np.dtype(dtype): (numpy_dtype(bits), extension) for extension, (bits, dtype) in EXTENSION_DTYPES.items()}


class Window:
    """Some bytes on a device as numpy or CUDA see them: a tensor over it keeps it alive, and it the owner.

    Args:
      owner: what holds the memory; None where whoever uses the window does.
      address: of the first byte; `shape`: of C-contiguous elements of `dtype`, numpy's or ml_dtypes'.
      device: torch's, the CPU or a GPU.
    """

    def __init__(self, owner: object, address: int, shape: tuple[int, ...], dtype: DTypeLike, device: torch.device) -> None:
        self.owner, self._device = owner, device
        self._bits, self._extension = _BITS.get(np.dtype(dtype), (np.dtype(dtype), None))
        interface: dict[str, Any] = {"data": (address, False), "shape": shape, "typestr": self._bits.str, "version": 3}
        self._interface = interface
        if device.type == "cpu":
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface

    def tensor(self) -> torch.Tensor:
        """A tensor with a storage of its own, over exactly these bytes; over none of anyone's where the shape has no elements."""
        shape = self._interface["shape"]
        if not math.prod(shape):
            view = torch.from_numpy(np.zeros(shape, self._bits)).to(self._device)
        elif self._device.type == "cpu":
            view = torch.from_numpy(np.asarray(self))
        else:
            view = torch.as_tensor(self, device=self._device)
        return view if self._extension is None else view.view(self._extension)
