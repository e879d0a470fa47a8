"""Other values in the parameters for a while: their average, or what a schedule-free optimizer evaluates with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def swapped(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Write a value into each parameter, rounded to its dtype, and on leaving, however that comes, the bits that it had before.

    The parameters stay where they are. One copy of those named is held meanwhile.
    """
    pairs = [(p.detach(), value, p.detach().clone()) for p, value in values]
    try:
        for p, value, _ in pairs:
            p.copy_(value)
        yield
    finally:
        for p, _, before in pairs:
            p.copy_(before)
