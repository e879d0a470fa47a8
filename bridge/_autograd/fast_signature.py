"""The fast path of `jax_function`: the key of common arguments, and whether they can be viewed by address, computed in one pass.

Most calls get contiguous or transposed tensors on the CPU, floats and a few static values. A warm call with such arguments runs few lines
of Python. The general path handles all other arguments, and makes all checks on the first call with each key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from bridge._interop.dlpack import ALIGNMENT, dense_order
from bridge._interop.tensor_storage import offset_of, storage_of
from bridge._memory.adoption import align_storage

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # no subclasses: they may have no memory, or other semantics
_STATIC = frozenset({int, bool, str})  # hashable and immutable; equal values of one type give equal programs


# (key, tensors, floats, storages). The key holds everything that decides how a call treats the leaves. The caller
# holds the storages until the call has ended, so that no other thread moves a parameter that the program reads.
FastSignature = tuple[list[Hashable], list[torch.Tensor], list[float], list[torch.UntypedStorage]]


def fast_signature(leaves: Iterable[Any]) -> FastSignature | None:
    """Return the fast signature of the leaves; None if one is not a CPU tensor with readable memory, a float, or a static value."""
    key: list[Hashable] = []
    tensors, floats, held = [], [], []
    try:
        for leaf in leaves:
            kind = type(leaf)
            if kind in _TENSORS:
                address = leaf.data_ptr()  # raises RuntimeError for sparse tensors, and for tensors that a transformation left behind
                # It is empty, on another device, or has more elements than its storage: expanded, or the storage was freed or resized.
                if not address or not leaf.is_cpu or len(storage_of(leaf)) < offset_of(leaf) * leaf.itemsize + leaf.nbytes:
                    return None
                if address % ALIGNMENT and kind is torch.nn.Parameter:
                    align_storage(leaf)
                    held.append(leaf.untyped_storage())
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
    return key, tensors, floats, held


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds its values without gaps, in some order of dimensions."""
    return not tensor.is_neg() and not tensor.is_conj() and dense_order(tensor) is not None


def can_view(tensors: Sequence[torch.Tensor], specs: Sequence[tuple[torch.dtype, int]]) -> bool:
    """Return whether all are contiguous CPU tensors with the dtype and element count of their spec, and can be read by address."""
    for tensor, (dtype, count) in zip(tensors, specs, strict=True):
        is_plain = type(tensor) in _TENSORS and tensor.dtype is dtype and tensor.is_cpu and tensor.layout is torch.strided
        if not is_plain or tensor.numel() != count or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return False
        try:
            if len(storage_of(tensor)) < offset_of(tensor) * tensor.itemsize + tensor.nbytes or not tensor.data_ptr():  # freed or resized
                return False
        except RuntimeError:  # a tensor that a transformation left behind
            return False
    return True
