"""Guards of the warm path. They check that parameters and gradients still have the metadata and addresses seen at the last step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch

from bridge._compat.torch import guard
from bridge._interop.tensor_storage import offset_of, storage_of
from torch_api._params.record import Leaf

_address, _grad = torch.Tensor.data_ptr, attrgetter("grad")


class Sight:
    """What was true of the active leaves when each of them was last looked at.

    A step asks in a few C calls whether all is as it was for the same live leaves. Where anything differs, or nothing is known, the
    leaves are looked at one by one.
    """

    def __init__(self) -> None:
        self._known: Any = None

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
        self._known = tuple(live), params, present, absent, kept, as_params, as_grads, list(map(_address, present)), sizes, offsets

    def glance(self) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """The active leaves that have a gradient, and the gradients; None where anything has changed since `remember`."""
        if self._known is None:
            return None
        live, params, present, absent, kept, as_params, as_grads, addresses, sizes, offsets = self._known
        grads = list(map(_grad, present))
        as_before = (
            as_grads(*grads)
            and as_params(*params)
            and list(map(_address, present)) == addresses
            and all(map(is_, map(_grad, absent), repeat(None)))
            and list(map(len, map(storage_of, chain(grads, kept)))) == sizes
            and list(map(offset_of, chain(grads, kept))) == offsets
        )
        return (live, grads) if as_before else None
