"""Tensors over memory that something else owns, through the array interfaces of numpy and of CUDA.

Never through DLPack: the export of a jax array pins its buffer, and XLA then copies instead of reusing it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ._interop.dtypes import EXTENSION_DTYPES, numpy_dtype

# The array interfaces know no bfloat16 or float8: their bits travel as integers of the same width.
_BITS = {np.dtype(dtype): (numpy_dtype(bits), extension) for extension, (bits, dtype) in EXTENSION_DTYPES.items()}


class Window:
    """Some bytes on a device as numpy or CUDA see them: a tensor over it keeps it alive, and it the owner.

    Args:
      owner: what holds the memory; None where whoever uses the window does.
      address: of the first byte; `shape`: of C-contiguous elements of `dtype`, numpy's or ml_dtypes'.
      device: torch's, the CPU or a GPU.
    """

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: Any, device: torch.device) -> None:
        self.owner, self._device = owner, device
        self._bits, self._extension = _BITS.get(np.dtype(dtype), (np.dtype(dtype), None))
        self._interface = interface = {"data": (address, False), "shape": shape, "typestr": self._bits.str, "version": 3}
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
