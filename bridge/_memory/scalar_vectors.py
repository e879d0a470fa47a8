"""Scalars of state (step counts) as 0-d torch tensors that a program takes as one vector and returns as one vector.

The tensors are adjacent in memory, each with a storage of its own bytes. The vector is that memory: a jax array for each scalar would cost
more than its arithmetic.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge._compat.lookup import SAFE_MODE
from bridge._compat.torch import foreach_copy_
from bridge._interop.dlpack import ALIGNMENT, ALIGNMENT_GPU
from bridge._interop.dtypes import EXTENSION_DTYPES, numpy_dtype

from .array_interface import ArrayInterface
from .call_arguments import Argument, as_call_arguments, import_non_owning


def reserve_scalars(count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return new 0-d tensors that are adjacent in memory; in the safe mode they are not."""
    if SAFE_MODE:
        return [torch.zeros((), dtype=dtype, device=device) for _ in range(count)]
    if device.type == "cpu":
        space = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
        owner, start = space, space.ctypes.data + -space.ctypes.data % ALIGNMENT
    else:
        owner = torch.zeros(count, dtype=dtype, device=device)
        start = owner.data_ptr()
    return [ArrayInterface(owner, start + i * dtype.itemsize, (), numpy_dtype(dtype), device).as_tensor() for i in range(count)]


class ScalarVector:
    """The scalars of one dtype that a program takes.

    read: Return the scalars as one vector. Call it before `write`; on a GPU call it after `gather`, in a program that waits for torch's
      stream.
    tensors: The 0-d tensors.
    address: The address of the first scalar.
    length: The number of bytes if the scalars are adjacent; else 0.
    """

    __slots__ = ("_copies", "_positions", "_values", "address", "length", "read", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        # The memory from the first to the last scalar, of which the scalars are the elements at `_positions`.
        self._values: np.ndarray | torch.Tensor | None = None
        self._positions: slice | np.ndarray = slice(None)
        self._copies: torch.Tensor | None = None
        self.address = self.length = 0
        first = self.tensors[0]
        if SAFE_MODE or (first.device.type == "cpu" and first.dtype in EXTENSION_DTYPES):
            self.read: Callable[[], Argument] = lambda: as_call_arguments([torch.stack(self.tensors)], [None])[0]
            return
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        start, size = min(addresses), first.itemsize
        positions = [(address - start) // size for address in addresses]
        adjacent = positions == list(range(len(positions)))
        if first.device.type == "cpu":
            count = max(positions) + 1
            # ctypes makes a type for each length, which takes time, so few lengths are used. Nobody reads beyond the last scalar.
            space: Any = (ctypes.c_char * (size << count.bit_length())).from_address(start)
            values = self._values = np.frombuffer(space, numpy_dtype(first.dtype), count)
            self._positions = self._positions if adjacent else np.array(positions)
            self.address, self.length = start, values.nbytes if adjacent else 0
            self.read = functools.partial(values.__getitem__, self._positions)
        else:
            with torch.inference_mode(False):
                if adjacent and not start % ALIGNMENT_GPU:
                    source = self._values = ArrayInterface(
                        None, start, (len(positions),), numpy_dtype(first.dtype), first.device
                    ).as_tensor()
                else:
                    source = self._copies = torch.empty(len(positions), dtype=first.dtype, device=first.device)
                array = import_non_owning(source)
            self.read = lambda: array

    def gather(self) -> bool:
        """Copy the scalars to adjacent memory where a GPU program reads them. Return False if they are adjacent already."""
        if self._copies is None:
            return False
        torch.stack(self.tensors, out=self._copies)
        return True

    def write(self, vector: jax.Array) -> None:
        """Write the elements of a vector to the scalars. On the CPU the vector is ready; on a GPU torch's stream waits for it."""
        if self._values is None:
            foreach_copy_(self.tensors, torch.from_dlpack(vector).unbind())
        elif isinstance(self._values, torch.Tensor):
            self._values.copy_(torch.from_dlpack(vector))
        else:
            self._values[self._positions] = np.asarray(vector)


class ScalarResult:
    """A new 0-d CPU tensor for one result of a program, copied as the results in a `ScalarVector` are.

    Copying is much faster than importing the result.

    tensor: The tensor.
    address: The address of its bytes.
    length: Their number; 0 in the safe mode.
    """

    __slots__ = ("address", "length", "tensor")

    def __init__(self, dtype: torch.dtype) -> None:
        self.tensor = torch.empty((), dtype=dtype)
        self.address, self.length = self.tensor.data_ptr(), 0 if SAFE_MODE else dtype.itemsize

    def write(self, value: jax.Array) -> None:
        """Copy a result, which is ready, into the tensor."""
        if SAFE_MODE:
            self.tensor.copy_(torch.from_dlpack(value))
            return
        ctypes.memmove(self.address, value.unsafe_buffer_pointer(), self.length)
