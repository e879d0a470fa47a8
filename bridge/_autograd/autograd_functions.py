"""The nodes of torch's graph that call a traced function and its derivatives."""

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
    """The call in torch's graph, with residuals."""

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
    """The call under a transformation of torch.func or in forward mode: keeps arguments alone, and computes anew from them."""

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
    """Call a program by the cheapest way that keeps what torch must know."""
    if transformed:
        return _Transformed.apply(program, others, *tensors)
    recording = _recording(program, tensors)
    if recording is not None:
        return _Recorded.apply(recording, None, others, *tensors)
    return program.run(tensors, others)


def _recording(program: Program, tensors: Sequence[torch.Tensor]) -> Recording | None:
    """What keeps residuals, if torch would ask for gradients of a call with these tensors."""
    if not program.differentiable or not torch.is_grad_enabled():
        return None
    wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
    return program.recording(wanted) if wanted else None


# `Function.apply` asks again whether torch transforms, and looks for what transformations left over: 2 us, known by now.
_record = apply_of(_Recorded)


def _transformed() -> bool:
    """Whether torch transforms what runs now; always, where it does not tell, which costs 15 us a call."""
    return functorch_is_active() or forward_level() >= 0


def _refuse_legacy_batch(tensors: Iterable[torch.Tensor | None]) -> None:
    if any(isinstance(x, torch.Tensor) and is_legacy_batch(x) for x in tensors):
        raise RuntimeError(
            "jax_function: is_grads_batched=True and vectorize=True batch by torch's old vmap, which no function of one's own can "
            "follow. Use torch.func: jacrev or jacfwd, or vmap over what torch.func.vjp returns."
        )


def _integers(program: Program, outs: Sequence[Result]) -> list[torch.Tensor]:
    return [x for x, yes in zip(outs, program.outs_differ, strict=True) if not yes and isinstance(x, torch.Tensor)]
