"""Arguments that need no questions: what they are and where they lie, in one pass.

Most calls are given contiguous or transposed tensors on the CPU, floats, and a few static values. Their key is made of
little more than what torch hands out, so that a call which was seen before costs few lines of Python; the other ways
into a program answer all questions, and must have answered them once for each key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from bridge._interop.dlpack import ALIGNMENT, dense_order
from bridge._interop.tensor_storage import offset_of, storage_of
from bridge._memory.adoption import align

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # no subclasses, which may have no memory or other semantics
_STATIC = frozenset({int, bool, str})  # what has a hash, no part that could change, and is equal only where programs are


# The key, all that decides what a call does with the leaves; the tensors; where they lie; what else the program is given; and what is to
# be held until the call has ended, so that no other thread moves a parameter which is read.
Plain = tuple[list[Hashable], list[torch.Tensor], list[int], list[float], list[torch.UntypedStorage]]


def plain(leaves: Iterable[Any]) -> Plain | None:
    """The leaves described, if all are tensors on the CPU with memory of their own, floats, or static; None if one is not."""
    key: list[Hashable] = []
    tensors, addresses, floats, held = [], [], [], []
    try:
        for leaf in leaves:
            kind = type(leaf)
            if kind in _TENSORS:
                address = leaf.data_ptr()  # raises where there is none: sparse, or left over from a transformation
                # Empty, or with gaps, or in a storage that was freed or made smaller.
                if not address or not leaf.is_cpu or len(storage_of(leaf)) < offset_of(leaf) * leaf.itemsize + leaf.nbytes:
                    return None
                if address % ALIGNMENT and kind is torch.nn.Parameter:
                    align(leaf)
                    held.append(leaf.untyped_storage())
                    address = leaf.data_ptr()
                addresses.append(address)
                key += (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.is_neg(), leaf.is_conj())
                tensors.append(leaf)
            elif kind is float:
                key.append(float)
                floats.append(leaf)
            elif kind in _STATIC:
                key += (kind, leaf)
            else:
                return None
    except RuntimeError:
        return None
    return key, tensors, addresses, floats, held


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values are what lies at its address, one after another in some order of dimensions."""
    return not tensor.is_neg() and not tensor.is_conj() and dense_order(tensor) is not None


def addresses_of(tensors: Sequence[torch.Tensor], specs: Sequence[tuple[torch.dtype, int]]) -> list[int] | None:
    """Where the tensors lie, if each is contiguous on the CPU, of this type and so many elements; None if one is not."""
    found = []
    for tensor, (dtype, count) in zip(tensors, specs, strict=True):
        plain = type(tensor) in _TENSORS and tensor.dtype is dtype and tensor.is_cpu and tensor.layout is torch.strided
        if not plain or tensor.numel() != count or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        try:
            if len(storage_of(tensor)) < offset_of(tensor) * tensor.itemsize + tensor.nbytes:  # it was freed or made smaller
                return None
            found.append(tensor.data_ptr())
        except RuntimeError:  # left over from a transformation
            return None
    return found if all(found) else None
