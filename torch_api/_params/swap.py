"""Other values in the parameters for a while: their average, or what a schedule-free optimizer evaluates with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bridge._compat.torch import foreach_copy_
from bridge._runtime.transaction import Transaction

EVALUATION = "eval"  # what `Exchange.inside` is between the calls of `eval` and `train` of a schedule-free optimizer


class Exchange:
    """Which context or call, if any, has put other values into the parameters of an optimizer than those that it trains."""

    def __init__(self) -> None:
        self.inside = ""

    def refuse(self, what: str) -> None:
        """Raise the error of a call that needs the trained values."""
        if self.inside == EVALUATION:
            raise RuntimeError(f"{what}: since eval() the parameters hold other values than those trained. Call train() first.")
        raise RuntimeError(f"{what}: inside {self.inside}() the parameters hold other values than those trained. Leave it first.")

    @contextmanager
    def hold(
        self,
        owner: str,
        name: str,
        values: Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]],
        transaction: Callable[[], Transaction],
    ) -> Iterator[None]:
        """Write a value into each parameter, rounded to its dtype, and on leaving, however that comes, the bits that it had before.

        The parameters stay where they are, and may be moved meanwhile. One copy of those named is held meanwhile.
        """
        held: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        try:
            try:
                with transaction():
                    if self.inside:
                        self.refuse(f"{owner}.{name}")
                    pairs = values()
                    params = [p for p, _ in pairs]
                    before = [p.detach().clone(memory_format=torch.preserve_format) for p in params]
                    held.append((params, before))
                    self.inside = name
                    write(params, [value for _, value in pairs])
                yield
            finally:
                self._give_back(held, transaction)
        finally:  # another signal may have arrived before the transaction of the first call began
            self._give_back(held, transaction)

    def _give_back(self, held: list[tuple[list[torch.Tensor], list[torch.Tensor]]], transaction: Callable[[], Transaction]) -> None:
        if held:
            with transaction():
                write(*held[0])  # to where the parameters are now: their data may have been replaced meanwhile
                self.inside = ""
                held.clear()


def write(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write a value into each parameter, rounded to its dtype."""
    into = [p.detach() for p in params]
    if into and all(type(p) is torch.Tensor for p in into):
        foreach_copy_(into, list(values))
    else:
        for p, value in zip(into, values, strict=True):
            p.copy_(value)
