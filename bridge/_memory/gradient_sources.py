"""The three ways in which gradients become arguments of a program: viewed, gathered, or addressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, cast

import torch

from bridge._compat.torch import foreach_copy_

from .address_space import BucketAddresses, RowAddresses
from .call_arguments import TensorArguments, arguments_over


@dataclass(frozen=True, slots=True)
class ViewedGradient:
    """A gradient that is an argument itself. The program reads it where it is.

    position: Its position among the gradients of the step.
    shape, dtype: Its shape and dtype.
    dim_order: The order of its dimensions in memory; None for the order that they have.
    """

    position: int
    shape: Sequence[int]
    dtype: torch.dtype
    dim_order: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class GatheredGradients:
    """Gradients that are copied to a buffer, which is the argument.

    positions: The position of each gradient among those of the step.
    buffer: The buffer.
    views: The part of the buffer for each gradient, with the gradient's shape; empty with a `cat_target`.
    cat_target: The buffer as `out` of one `torch.cat` of all gradients, which is faster than a copy for each; None if `torch.cat` cannot
      fill it.
    """

    positions: Sequence[int]
    buffer: torch.Tensor
    views: Sequence[torch.Tensor]
    cat_target: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AddressedGradients:
    """Gradients of a bucket's rows that a program reads by their addresses. All sources of this program are of this kind.

    positions: The position of each gradient among those of the step.
    rows: The arguments of `gather_rows`.
    """

    positions: Sequence[int]
    rows: RowAddresses


GradientSource: TypeAlias = ViewedGradient | GatheredGradients | AddressedGradients


class GradientArguments:
    """Turns the gradients of a step into the arguments of one program.

    A program that gathers takes its arguments from the result of `gather`, others from the gradients of the step:

      grads = arguments.gather(grads) if arguments.buffers else grads
      arguments.as_arguments([grads[i] for i in arguments.positions], held)

    positions: The position of each argument among the gradients of the step, and of a buffer in the result of `gather`.
    buffers: The buffers into which gradients are gathered.
    as_arguments: Turns the gradients and buffers at `positions` into arguments.

    Args:
      sources: The sources, in the order of the program's arguments.
      device: The device of the gradients.
    """

    __slots__ = ("_cat_gathers", "_copied_positions", "_copy_targets", "as_arguments", "buffers", "positions")

    def __init__(self, sources: Sequence[GradientSource], device: torch.device) -> None:
        gathered = [each for each in sources if isinstance(each, GatheredGradients)]
        self.buffers = [each.buffer for each in gathered]
        self._cat_gathers = [(each.positions, each.cat_target) for each in gathered if each.cat_target is not None]
        copied = [each for each in gathered if each.cat_target is None]
        self._copied_positions = [*chain.from_iterable(each.positions for each in copied)]
        self._copy_targets = [*chain.from_iterable(each.views for each in copied)]
        self.as_arguments: TensorArguments
        self.positions: Sequence[int]
        if sources and isinstance(sources[0], AddressedGradients):
            addressed = cast(Sequence[AddressedGradients], sources)
            self.positions = [*chain.from_iterable(each.positions for each in addressed)]
            self.as_arguments = BucketAddresses([each.rows for each in addressed])
            return
        sources = cast(Sequence[ViewedGradient | GatheredGradients], sources)
        from_end = iter(range(-len(gathered), 0))  # `gather` returns the buffers behind the gradients
        self.positions = [each.position if isinstance(each, ViewedGradient) else next(from_end) for each in sources]
        read = [each.buffer if isinstance(each, GatheredGradients) else each for each in sources]
        orders = [each.dim_order if isinstance(each, ViewedGradient) else None for each in read]
        self.as_arguments = arguments_over([each.shape for each in read], [each.dtype for each in read], orders, device)

    def gather(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy gradients into the buffers. Return all gradients of the step, and the buffers behind them."""
        for positions, target in self._cat_gathers:
            torch.cat(list(map(grads.__getitem__, positions)), out=target)
        if self._copied_positions:
            foreach_copy_(self._copy_targets, list(map(grads.__getitem__, self._copied_positions)))
        return [*grads, *self.buffers]
