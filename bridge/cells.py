"""Numbers of state (step counts) as 0-d tensors of torch's own that a program takes as one vector and gives back as one.

On the CPU they lie side by side, each tensor with a storage of its own bytes alone: the vector is their memory, and a jax array for
each of them, which would cost more than its arithmetic, is not needed.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from .dlpack import ALIGNMENT, EXTENSION_DTYPES, numpy_dtype, operands


def reserve(count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """So many new 0-d tensors, on the CPU side by side."""
    if device.type != "cpu" or dtype in EXTENSION_DTYPES:
        return [torch.zeros((), dtype=dtype, device=device) for _ in range(count)]
    space = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
    values = space[-space.ctypes.data % ALIGNMENT :][: count * dtype.itemsize].view(numpy_dtype(dtype))
    return [torch.from_numpy(values[i : i + 1].reshape(())) for i in range(count)]


class Cells:
    """The numbers of one dtype that one program takes.

    read: gives them as one vector, to be read before `write`. `tensors`: where they are.
    address, length: of their bytes, where they lie one behind the other; else `length` is 0.
    """

    __slots__ = ("_at", "_values", "address", "length", "read", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._values: Any = None  # all that lies between the first and the last of them, of which those at `_at` are ours
        self._at: Any = None
        self.address = self.length = 0
        first = self.tensors[0]
        if first.device.type != "cpu" or first.dtype in EXTENSION_DTYPES:
            self.read: Callable[[], Any] = self._stacked
            return
        addresses = np.array([tensor.data_ptr() for tensor in self.tensors])
        self.address = int(addresses.min())
        places = (addresses - self.address) // first.itemsize
        space: Any = (ctypes.c_char * ((int(places.max()) + 1) * first.itemsize)).from_address(self.address)
        self._values = np.frombuffer(space, numpy_dtype(first.dtype))
        adjacent = np.array_equal(places, np.arange(len(places)))
        self._at, self.length = (slice(None), self._values.nbytes) if adjacent else (places, 0)
        self.read = functools.partial(operator.getitem, self._values, self._at)

    def write(self, vector: jax.Array) -> None:
        """Take the elements of a vector that is ready as the numbers."""
        if self._values is None:
            torch._foreach_copy_(self.tensors, torch.from_dlpack(vector).unbind())
        else:
            self._values[self._at] = np.asarray(vector)

    def _stacked(self) -> Any:
        with torch.no_grad():
            return operands([torch.stack(self.tensors)], [None])[0]
