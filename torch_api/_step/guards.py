"""Guards of the warm path. They check that parameters and gradients still have the metadata and addresses seen at the last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_

import torch

from bridge._compat.torch import guard
from bridge._interop.tensor_storage import offset_of, storage_of
from torch_api._params.record import Leaf

_address, _grad = torch.Tensor.data_ptr, attrgetter("grad")


@dataclass(frozen=True, slots=True)
class _Known:
    """Active leaves as they were at the last look.

    live, params: the positions of the leaves with a gradient; all dense parameters. present, absent: those with a gradient, and those that
    must have none. kept: those with a gradient in torch's own memory. as_params, as_grads: the C guards. addresses: of `present`.
    sizes, offsets: of the storages of gradients and `kept`.
    """

    live: tuple[int, ...]
    params: list[torch.Tensor]
    present: list[torch.Tensor]
    absent: list[torch.Tensor]
    kept: list[torch.Tensor]
    as_params: Callable[..., bool]
    as_grads: Callable[..., bool]
    addresses: list[int]
    sizes: list[int]
    offsets: list[int | torch.SymInt]


class Sight:
    """What was true of the active leaves when each of them was last looked at.

    A step asks in a few C calls whether all is as it was for the same live leaves. Where anything differs, or nothing is known, the
    leaves are looked at one by one.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None

    def forget(self, really: bool = True) -> None:
        """The next step looks at each leaf."""
        self._known = None if really else self._known

    def remember(self, leaves: Sequence[Leaf], live: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Take note of the leaves as they are. Each has been looked at, and so has its gradient, which is None for those that are not live.

        Args:
          leaves: the active ones.
          live: the positions of those that have a gradient.
          grads: their gradients.
        """
        self._known = None
        if any(leaf.layout is not None for leaf in leaves):
            return
        # The guard cannot look at sparse parameters, which are frozen: only a gradient that one gets makes a difference.
        params = [leaf.param for leaf in leaves if leaf.param.layout is torch.strided]
        as_params, as_grads = guard(params), guard(grads)
        if as_params is None or as_grads is None:
            return
        chosen = set(live)
        present = [leaves[i].param for i in live]
        rest = [leaf.param for i, leaf in enumerate(leaves) if i not in chosen]
        absent = [p for p in rest if p.requires_grad or p.layout is not torch.strided]
        # torch owns the memory of those that are read and written at their address, so it may be resized too.
        kept = [leaves[i].param for i in live if leaves[i].memory is None]
        held = [*grads, *kept]  # equal strides and these: equal reach (`tensor_storage.shortage`)
        sizes, offsets = list(map(len, map(storage_of, held))), list(map(offset_of, held))
        self._known = _Known(tuple(live), params, present, absent, kept, as_params, as_grads, list(map(_address, present)), sizes, offsets)

    def glance(self) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """The active leaves that have a gradient, and the gradients; None where anything has changed since `remember`."""
        known = self._known
        if known is None:
            return None
        grads = list(map(_grad, known.present))
        as_before = (
            known.as_grads(*grads)
            and known.as_params(*known.params)
            and list(map(_address, known.present)) == known.addresses
            and all(map(is_, map(_grad, known.absent), repeat(None)))
            and list(map(len, map(storage_of, chain(grads, known.kept)))) == known.sizes
            and list(map(offset_of, chain(grads, known.kept))) == known.offsets
        )
        return (known.live, grads) if as_before else None
