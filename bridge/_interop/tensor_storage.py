"""Check that the storage of a tensor still holds all elements of the tensor.

`tensor.untyped_storage().resize_()` frees a storage or shrinks it (FSDP and offloading do), but tensors over the storage keep their shapes.
A program that reads such a tensor by its address would read freed memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Each of these is one C call per tensor. The length of a torch.UntypedStorage is its size in bytes.
storage_of, offset_of = torch.Tensor.untyped_storage, torch.Tensor.storage_offset
_bytes_of, _is_contiguous = torch.Tensor.nbytes.__get__, torch.Tensor.is_contiguous  # pyright: ignore[reportAttributeAccessIssue]


def why_unreadable(tensor: torch.Tensor) -> str:
    """Return why the elements of a tensor cannot be read, for an error message; '' if the storage holds them all.

    A tensor without a storage of its own (sparse, or a subclass that wraps other tensors) counts as readable.
    """
    try:
        storage_bytes = len(storage_of(tensor))
    except RuntimeError:
        return ""
    needed = bytes_needed(tensor)
    if storage_bytes >= needed:
        return ""
    problem = "was freed" if not storage_bytes else "is too small"
    return f"its memory {problem} (its storage was resized to {storage_bytes} bytes, and its elements need {needed})"


def bytes_needed(tensor: torch.Tensor) -> int:
    """Return how many bytes a storage needs to hold the last element of the tensor; 0 if the tensor has no elements."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(offset_of(tensor) + last + 1) * tensor.element_size()


def first_unreadable(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the position of the first tensor whose elements cannot be read; None if all can."""
    try:
        are_dense_from_start = not any(map(offset_of, tensors)) and all(map(_is_contiguous, tensors))
        if are_dense_from_start and list(map(len, map(storage_of, tensors))) == list(map(_bytes_of, tensors)):
            return None
    except RuntimeError:  # a tensor has no storage
        pass
    return next((i for i, tensor in enumerate(tensors) if why_unreadable(tensor)), None)
