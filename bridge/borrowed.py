"""Tensors on a GPU as the arguments of one compiled call after another, imported once for each address.

An import costs 10 us and more, as much as updating a million elements on the device, and torch's allocator gives gradients
the same few addresses again and again. So the arrays here own nothing: they say where the bytes are, and whoever passes
them to a call sees to it that the tensors are alive then and that torch's stream comes after the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import jax
import torch

from ._interop.dlpack import ALIGNMENT_GPU, to_jax
from ._interop.dtypes import numpy_dtype
from .dlpack import operands
from .windows import Window

_address, _strides, _is_neg, _is_conj = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_neg, torch.Tensor.is_conj
_PLACES = 8  # of one argument that are remembered: more only where memory is given out anew at every step


def alias(tensor: torch.Tensor) -> jax.Array:
    """A flat array over the bytes of a contiguous tensor that is not empty; it keeps nothing alive and orders no streams."""
    with torch.inference_mode(False):
        return to_jax(Window(None, tensor.data_ptr(), (tensor.numel(),), numpy_dtype(tensor.dtype), tensor.device).tensor())


class Borrowed:
    """As `dlpack.operands` of tensors on one GPU, for so many arguments, with their dimensions in the order given.

    jax's stream is not put behind torch's: whoever calls a program also passes it what `dlpack.behind_torch` gives.
    """

    def __init__(self, order: Sequence[tuple[int, ...] | None], are_complex: bool = False) -> None:
        self._order, self._complex = order, are_complex
        self._known: list[dict[Any, jax.Array]] = [{} for _ in order]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        if any(map(_is_neg, tensors)) or (self._complex and any(map(_is_conj, tensors))):  # what lies there is not what they are
            return operands(tensors, self._order)
        try:
            return list(map(getitem, self._known, zip(map(_address, tensors), map(_strides, tensors), strict=True)))
        except KeyError:
            return list(map(self._array, self._known, tensors, self._order))

    @staticmethod
    def _array(known: dict[Any, jax.Array], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> Any:
        place = tensor.data_ptr(), tensor.stride()
        if place not in known:
            flat = tensor.detach() if dims is None else tensor.detach().permute(dims)
            if not flat.is_contiguous() or not flat.numel() or tensor.data_ptr() % ALIGNMENT_GPU:
                return operands([tensor], [dims])[0]  # a copy
            if len(known) >= _PLACES:
                known.clear()
            known[place] = alias(flat)
        return known[place]
