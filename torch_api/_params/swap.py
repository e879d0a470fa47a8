"""Swap other values into the parameters for a time: their average, or the evaluation weights of a schedule-free optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bridge._compat.torch import foreach_copy_
from bridge._runtime.transaction import Transaction

EVALUATION = "eval"  # `ParameterSwap.swapped_by` between `eval()` and `train()` of a schedule-free optimizer


class ParameterSwap:
    """Whether the parameters of an optimizer hold other values than the trained ones.

    swapped_by: the name of the context manager or call that swapped them; "" if none did.
    """

    def __init__(self) -> None:
        self.swapped_by = ""

    def raise_swapped_error(self, what: str) -> None:
        """Raise an error for a call that needs the trained values.

        Args:
          what: the call.
        """
        if self.swapped_by == EVALUATION:
            raise RuntimeError(f"{what}: since eval() the parameters hold other values than the trained ones. Call train() first.")
        raise RuntimeError(f"{what}: inside {self.swapped_by}() the parameters hold other values than the trained ones. Leave it first.")

    @contextmanager
    def swap_in(
        self,
        cls_name: str,
        name: str,
        values: Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]],
        transaction: Callable[[], Transaction],
    ) -> Iterator[None]:
        """Write a value into each parameter, rounded to its dtype. On exit, also by an exception, restore the parameter bit for bit.

        Inside the context, the old values are held in one copy. The parameters keep their memory, but user code may replace it.

        Args:
          cls_name: class name for errors.
          name: the name of the context manager.
          values: gives the parameters and their values.
          transaction: opens a transaction of the optimizer.
        """
        saved: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        try:
            try:
                with transaction():
                    if self.swapped_by:
                        self.raise_swapped_error(f"{cls_name}.{name}")
                    pairs = values()
                    params = [p for p, _ in pairs]
                    before = [p.detach().clone(memory_format=torch.preserve_format) for p in params]
                    saved.append((params, before))
                    self.swapped_by = name
                    write_values(params, [value for _, value in pairs])
                yield
            finally:
                self._restore(saved, transaction)
        finally:  # again: a signal may have interrupted the first call before its transaction
            self._restore(saved, transaction)

    def _restore(self, saved: list[tuple[list[torch.Tensor], list[torch.Tensor]]], transaction: Callable[[], Transaction]) -> None:
        if saved:
            with transaction():
                write_values(*saved[0])  # the parameters may have other memory by now
                self.swapped_by = ""
                saved.clear()


def write_values(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write a value into each parameter, rounded to its dtype."""
    into = [p.detach() for p in params]
    if into and all(type(p) is torch.Tensor for p in into):
        foreach_copy_(into, list(values))
    else:
        for p, value in zip(into, values, strict=True):
            p.copy_(value)
