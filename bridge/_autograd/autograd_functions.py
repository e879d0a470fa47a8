"""torch.autograd.Functions that call a `TracedFunction` and its derivatives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.typing import ArrayLike

from bridge._compat.torch import apply_of, forward_level, functorch_is_active, is_legacy_batch

from .traced_function import Program, Recording, Result


class _Recorded(torch.autograd.Function):
    """A call that torch's graph records, with the residuals of its backward."""

    @staticmethod
    def forward(
        ctx: Any, recording: Recording, found: Sequence[Result] | None, others: Sequence[ArrayLike], *tensors: torch.Tensor
    ) -> tuple[Result, ...]:
        if found is None:
            found = recording.forward(tensors, others)
        first, second = recording.ends
        outs, kept, rest = found[:first], found[first:second], found[second:]
        ctx.set_materialize_grads(False)
        if recording.without_gradient:
            ctx.mark_non_differentiable(*[outs[i] for i in recording.without_gradient])
        if not recording.saves_all_tensors:
            tensors = tuple([tensors[i] for i in recording.needed])
        if recording.outputs:
            kept = [*[outs[i] for i in recording.outputs], *kept]
        ctx.save_for_backward(*tensors, *kept)
        ctx.call = recording, others, rest
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Result | None, ...]:
        recording, others, rest = ctx.call
        program, wanted, needed = recording.program, recording.wanted, recording.needed
        given = tuple(i for i, grad in enumerate(grads) if grad is not None and program.outs_differ[i])
        out: list[Result | None] = [None] * (3 + len(program.tensors))
        if not given:
            return tuple(out)
        saved, chosen = ctx.saved_tensors, [grads[i] for i in given]
        _refuse_legacy_batch(chosen)
        if torch.is_grad_enabled() or _transformed():
            pull = program.pullback(wanted, given, needed)
            found = _apply(pull, others, [*saved[: len(needed)], *chosen], _transformed())
        else:
            found = recording.backward(given, [*saved, *chosen], [*rest, *others])
        for i, grad in zip(wanted, found, strict=True):
            out[3 + i] = grad
        return tuple(out)


class _Transformed(torch.autograd.Function):
    """A call under a transformation of torch.func or in forward mode. It saves only its arguments; derivatives recompute the rest."""

    @staticmethod
    def forward(program: Program, others: Sequence[ArrayLike], *tensors: torch.Tensor) -> tuple[Result, ...]:
        return program.run(tensors, others)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Result, ...]) -> None:
        ctx.program, ctx.others, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*_integers(ctx.program, output))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Result | None, ...]:
        program: Program = ctx.program
        out: list[Result | None] = [None] * len(ctx.needs_input_grad)
        given = tuple(i for i, grad in enumerate(grads) if grad is not None and program.outs_differ[i])
        wanted = tuple(i for i, yes in enumerate(ctx.needs_input_grad[2:]) if yes)
        if given and wanted:
            everything = tuple(range(len(program.tensors)))
            tensors = [*ctx.saved_tensors, *(grads[i] for i in given)]
            found = _apply(program.pullback(wanted, given, everything), ctx.others, tensors, _transformed())
            for i, grad in zip(wanted, found, strict=True):
                out[2 + i] = grad
        return tuple(out)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Result | None, ...]:
        program = ctx.program
        _refuse_legacy_batch(tangents[2:])
        given = tuple(i for i, t in enumerate(tangents[2:]) if t is not None and jax.numpy.issubdtype(program.tensors[i].dtype, np.inexact))
        tensors = [*ctx.saved_tensors, *(tangents[2 + i] for i in given)]
        found = iter(_apply(program.pushforward(given), ctx.others, tensors, _transformed()))
        return tuple(next(found) if yes else None for yes in program.outs_differ)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Result, ...], tuple[int | None, ...]]:
        program, others, *tensors = args
        outs = _apply(program.batched(info.batch_size, tuple(in_dims[2:])), others, tensors, _transformed())
        return outs, tuple(0 if isinstance(x, torch.Tensor) else None for x in outs)


def _apply(program: Program, others: Sequence[ArrayLike], tensors: Sequence[torch.Tensor], transformed: bool) -> tuple[Result, ...]:
    """Call a traced function, and record it in torch's graph only if torch would ask for gradients.

    Args:
      transformed: what `is_transformed()` returns for this call.
    """
    if transformed:
        return _Transformed.apply(program, others, *tensors)
    recording = _recording(program, tensors)
    if recording is not None:
        return _Recorded.apply(recording, None, others, *tensors)
    return program.run(tensors, others)


def _recording(program: Program, tensors: Sequence[torch.Tensor]) -> Recording | None:
    """Return the forward that keeps residuals, if torch would ask for gradients of these tensors; else None."""
    if not program.differentiable or not torch.is_grad_enabled():
        return None
    wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
    return program.recording(wanted) if wanted else None


# Calls `apply` without its check for active transformations and for tensors that one left behind. The caller has made both checks.
_record = apply_of(_Recorded)


def _transformed() -> bool:
    """Whether torch.func or forward mode transforms the running code. True also where torch does not tell, which makes calls slower."""
    return functorch_is_active() or forward_level() >= 0


def _refuse_legacy_batch(tensors: Iterable[torch.Tensor | None]) -> None:
    if any(isinstance(x, torch.Tensor) and is_legacy_batch(x) for x in tensors):
        raise RuntimeError(
            "jax_function: is_grads_batched=True and vectorize=True use torch's old vmap, which custom functions cannot support. "
            "Use torch.func: jacrev or jacfwd, or vmap over the function that torch.func.vjp returns."
        )


def _integers(program: Program, outs: Sequence[Result]) -> list[torch.Tensor]:
    return [x for x, yes in zip(outs, program.outs_differ, strict=True) if not yes and isinstance(x, torch.Tensor)]
