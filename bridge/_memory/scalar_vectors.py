"""Numbers of state (step counts) as 0-d tensors of torch's own that a program takes as one vector and gives back as one.

They lie side by side, each tensor with a storage of its own bytes alone: the vector is their memory, and a jax array for each of
them, which would cost more than its arithmetic, is not needed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge._compat.torch import foreach_copy_
from bridge._interop.dlpack import ALIGNMENT, ALIGNMENT_GPU
from bridge._interop.dtypes import EXTENSION_DTYPES, numpy_dtype

from .array_interface import Window
from .call_arguments import Argument, alias, operands


def reserve(count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """So many new 0-d tensors, side by side."""
    if device.type == "cpu":
        space = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
        owner, start = space, space.ctypes.data + -space.ctypes.data % ALIGNMENT
    else:
        owner = torch.zeros(count, dtype=dtype, device=device)
        start = owner.data_ptr()
    return [Window(owner, start + i * dtype.itemsize, (), numpy_dtype(dtype), device).tensor() for i in range(count)]


class Cells:
    """The numbers of one dtype that one program takes.

    read: gives them as one vector, to be read before `write`; on a GPU after `collect`, by what runs after torch's stream.
    tensors: where they are.
    address, length: of their bytes, where they lie one behind the other; else `length` is 0.
    """

    __slots__ = ("_at", "_copies", "_values", "address", "length", "read", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        # All that lies between the first and the last of them, of which those at `_at` are ours.
        self._values: np.ndarray | torch.Tensor | None = None
        self._at: slice | np.ndarray = slice(None)
        self._copies: torch.Tensor | None = None
        self.address = self.length = 0
        first = self.tensors[0]
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        start, size = min(addresses), first.itemsize
        places = [(address - start) // size for address in addresses]
        adjacent = places == list(range(len(places)))
        if first.device.type == "cpu" and first.dtype not in EXTENSION_DTYPES:
            count = max(places) + 1
            # Each length is a type of ctypes, which takes time to make: so there are few. What lies behind is not looked at.
            space: Any = (ctypes.c_char * (size << count.bit_length())).from_address(start)
            values = self._values = np.frombuffer(space, numpy_dtype(first.dtype), count)
            self._at = self._at if adjacent else np.array(places)
            self.address, self.length = start, values.nbytes if adjacent else 0
            self.read: Callable[[], Argument] = functools.partial(values.__getitem__, self._at)
        elif first.device.type != "cpu":
            with torch.inference_mode(False):
                if adjacent and not start % ALIGNMENT_GPU:
                    source = self._values = Window(None, start, (len(places),), numpy_dtype(first.dtype), first.device).tensor()
                else:
                    source = self._copies = torch.empty(len(places), dtype=first.dtype, device=first.device)
                array = alias(source)
            self.read = lambda: array
        else:
            self.read = lambda: operands([torch.stack(self.tensors)], [None])[0]

    def collect(self) -> bool:
        """Put the numbers side by side where they are read on a GPU; False where they lie so."""
        if self._copies is None:
            return False
        torch.stack(self.tensors, out=self._copies)
        return True

    def write(self, vector: jax.Array) -> None:
        """Take the elements of a vector as the numbers; on the CPU it is ready, elsewhere torch's stream waits for it."""
        if self._values is None:
            foreach_copy_(self.tensors, torch.from_dlpack(vector).unbind())
        elif isinstance(self._values, torch.Tensor):
            self._values.copy_(torch.from_dlpack(vector))
        else:
            self._values[self._at] = np.asarray(vector)


class Number:
    """A new 0-d tensor on the CPU that a result is copied into, as `Cells` are.

    To import the result took 90 us behind a program of 13 ms, which leaves nothing of torch or Python in the caches.

    tensor, and where its bytes are: address, length.
    """

    __slots__ = ("address", "length", "tensor")

    def __init__(self, dtype: torch.dtype) -> None:
        self.tensor = torch.empty((), dtype=dtype)
        self.address, self.length = self.tensor.data_ptr(), dtype.itemsize

    def write(self, value: jax.Array) -> None:
        """Take what a result holds, which is there."""
        ctypes.memmove(self.address, value.unsafe_buffer_pointer(), self.length)
