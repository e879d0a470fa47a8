"""Whether tensors share elements in memory: two of them, or one with itself. Only addresses and strides are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from bridge._interop.tensor_storage import shortage


def first_overlap(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that share a byte, the same position twice for one that overlaps itself; None if all are apart.

    Interleaved tensors (columns of one matrix) are apart.
    """
    whole = [(i, t) for i, t in enumerate(tensors) if t.numel() and not shortage(t)]
    lie = [(str(t.device), t.data_ptr(), t.data_ptr() + _reach(t) * t.element_size(), i) for i, t in whole]
    open_: list[tuple[str, int, int, int]] = []  # those that reach beyond the start of the next
    for device, start, end, i in sorted(each for each in lie if each[1]):
        if overlaps_itself(tensors[i]):
            return i, i
        open_ = [other for other in open_ if other[0] == device and other[2] > start]
        for *_, j in open_:
            if _share(tensors[j], tensors[i]):
                return min(i, j), max(i, j)
        open_.append((device, start, end, i))
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor are one in memory."""
    if not tensor.numel() or tensor.is_contiguous():
        return False
    reach, sure = 1, True
    sizes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in sizes:
        sure &= stride >= reach  # each step goes beyond all elements of the dimensions before
        reach += stride * (size - 1)
    if sure or sizes[0][0] == 0:
        return not sure
    places = reduce(np.add.outer, (np.arange(size) * stride for stride, size in sizes))
    return len(np.unique(places)) < places.size


def _reach(tensor: torch.Tensor) -> int:
    """The elements from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Place:
    """Where the elements of a tensor are, as numpy's array interface tells it; nobody reads them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        self.__array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides, "typestr": f"|V{size}", "version": 3,
        }  # fmt: skip


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors that reach into each other have a byte in common; so too where that takes too long to find out."""
    if _reach(first) == first.numel() and _reach(second) == second.numel():  # no gaps
        return True
    try:
        return np.shares_memory(np.asarray(_Place(first)), np.asarray(_Place(second)), max_work=10**6)  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True
