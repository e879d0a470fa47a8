"""Other values in the parameters for a while: their average, or what a schedule-free optimizer evaluates with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class Exchange:
    """Which context, if any, has put other values into the parameters of an optimizer than those that it trains."""

    def __init__(self) -> None:
        self.inside = ""

    def refuse(self, what: str) -> None:
        """Raise the error of a call that needs the trained values."""
        raise RuntimeError(f"{what}: inside {self.inside}() the parameters hold other values than those trained. Leave it first.")

    @contextmanager
    def hold(self, owner: str, name: str, values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
        """Write a value into each parameter, rounded to its dtype, and on leaving, however that comes, the bits that it had before.

        The parameters stay where they are, and may be moved meanwhile. One copy of those named is held meanwhile.
        """
        if self.inside:
            self.refuse(f"{owner}.{name}")
        pairs = [(p, value, p.detach().clone(memory_format=torch.preserve_format)) for p, value in values]
        self.inside = name
        try:
            for p, value, _ in pairs:
                p.detach().copy_(value)
            yield
        finally:
            for p, _, before in pairs:
                p.detach().copy_(before)  # where it is now: its data may have been replaced meanwhile
            self.inside = ""
