"""Guards of the warm path: they compare parameters and gradients with the metadata and addresses of the last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_

import torch

from bridge._compat.torch import make_guard
from bridge._interop.tensor_storage import offset_of, storage_of
from torch_api._params.record import ParamRecord

_address, _grad = torch.Tensor.data_ptr, attrgetter("grad")


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The metadata of all trainable parameters at the last step that checked each of them.

    with_grad: the positions of the records whose parameter has a gradient. dense_params: all dense parameters.
    params_with_grad: the parameters of `with_grad`. params_without_grad: the parameters that must have no gradient.
    copied_back: the parameters of `with_grad` that live in torch's own memory.
    params_guard, grads_guard: torch's C guards. param_addresses: the addresses of `params_with_grad`.
    storage_sizes, storage_offsets: of the gradients, then of `copied_back`.
    """

    with_grad: tuple[int, ...]
    dense_params: list[torch.Tensor]
    params_with_grad: list[torch.Tensor]
    params_without_grad: list[torch.Tensor]
    copied_back: list[torch.Tensor]
    params_guard: Callable[..., bool]
    grads_guard: Callable[..., bool]
    param_addresses: list[int]
    storage_sizes: list[int]
    storage_offsets: list[int | torch.SymInt]


class Guards:
    """Compare the trainable parameters with the last step.

    A warm step compares all of them in a few C calls. If anything differs, or if nothing is recorded, the step takes the slow path and
    checks each parameter.
    """

    def __init__(self) -> None:
        self._last_step: _LastStep | None = None

    def invalidate(self, condition: bool = True) -> None:
        """Make the next step take the slow path, if `condition` holds."""
        self._last_step = None if condition else self._last_step

    def record(self, leaves: Sequence[ParamRecord], with_grad: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Record the metadata of parameters and gradients. The caller has checked each of them.

        Args:
          leaves: the records of all trainable parameters.
          with_grad: the positions of the records whose parameter has a gradient.
          grads: the gradients of `with_grad`.
        """
        self._last_step = None
        if any(leaf.dtensor_layout is not None for leaf in leaves):
            return
        # The guard rejects sparse parameters. They are frozen, so only a gradient that appears on one matters.
        params = [leaf.param for leaf in leaves if leaf.param.layout is torch.strided]
        as_params, as_grads = make_guard(params), make_guard(grads)
        if as_params is None or as_grads is None:
            return
        chosen = set(with_grad)
        present = [leaves[i].param for i in with_grad]
        rest = [leaf.param for i, leaf in enumerate(leaves) if i not in chosen]
        absent = [p for p in rest if p.requires_grad or p.layout is not torch.strided]
        # torch owns this memory, so user code may resize it. The program reads and writes it by address.
        kept = [leaves[i].param for i in with_grad if leaves[i].jax_buffer is None]
        held = [*grads, *kept]  # with equal strides, sizes and offsets, `tensor_storage.why_unreadable` gives the same answer
        sizes, offsets = list(map(len, map(storage_of, held))), list(map(offset_of, held))
        self._last_step = _LastStep(
            tuple(with_grad), params, present, absent, kept, as_params, as_grads, list(map(_address, present)), sizes, offsets
        )

    def check(self) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """Return the positions of the records with a gradient, and the gradients; None if anything has changed since `record`."""
        known = self._last_step
        if known is None:
            return None
        grads = list(map(_grad, known.params_with_grad))
        as_before = (
            known.grads_guard(*grads)
            and known.params_guard(*known.dense_params)
            and list(map(_address, known.params_with_grad)) == known.param_addresses
            and all(map(is_, map(_grad, known.params_without_grad), repeat(None)))
            and list(map(len, map(storage_of, chain(grads, known.copied_back)))) == known.storage_sizes
            and list(map(offset_of, chain(grads, known.copied_back))) == known.storage_offsets
        )
        return (known.with_grad, grads) if as_before else None
