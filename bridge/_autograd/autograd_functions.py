"""torch.autograd.Functions that call a `TracedFunction` and its derivatives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.typing import ArrayLike

from bridge._compat.torch import forward_level, functorch_is_active, is_legacy_batch, unchecked_apply

from .traced_function import ForwardWithResiduals, Result, TracedFunction


class RecordedCall(torch.autograd.Function):
    """A call that torch's graph records, with the residuals of its backward."""

    @staticmethod
    def forward(
        ctx: Any, recording: ForwardWithResiduals, results: Sequence[Result] | None, others: Sequence[ArrayLike], *tensors: torch.Tensor
    ) -> tuple[Result, ...]:
        if results is None:
            results = recording.forward(tensors, others)
        first, second = recording.split_points
        outs, kept, rest = results[:first], results[first:second], results[second:]
        ctx.set_materialize_grads(False)
        if recording.non_differentiable_outs:
            ctx.mark_non_differentiable(*[outs[i] for i in recording.non_differentiable_outs])
        if not recording.saves_all_tensors:
            tensors = tuple([tensors[i] for i in recording.needed_argnums])
        if recording.residual_out_indices:
            kept = [*[outs[i] for i in recording.residual_out_indices], *kept]
        ctx.save_for_backward(*tensors, *kept)
        ctx.call = recording, others, rest
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Result | None, ...]:
        recording, others, rest = ctx.call
        program, wanted, needed = recording.program, recording.grad_argnums, recording.needed_argnums
        given = tuple(i for i, grad in enumerate(grads) if grad is not None and program.outs_are_differentiable[i])
        out: list[Result | None] = [None] * (3 + len(program.tensor_specs))
        if not given:
            return tuple(out)
        saved, chosen = ctx.saved_tensors, [grads[i] for i in given]
        _refuse_legacy_vmap(chosen)
        if torch.is_grad_enabled() or is_transformed():
            pull = program.vjp_function(wanted, given, needed)
            found = call_traced(pull, others, [*saved[: len(needed)], *chosen], is_transformed())
        else:
            found = recording.backward(given, [*saved, *chosen], [*rest, *others])
        for i, grad in zip(wanted, found, strict=True):
            out[3 + i] = grad
        return tuple(out)


class FunctorchCall(torch.autograd.Function):
    """A call under a transformation of torch.func or in forward mode. It saves only its arguments; derivatives recompute the rest."""

    @staticmethod
    def forward(program: TracedFunction, others: Sequence[ArrayLike], *tensors: torch.Tensor) -> tuple[Result, ...]:
        return program.run(tensors, others)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Result, ...]) -> None:
        ctx.program, ctx.others, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*_non_differentiable_outs(ctx.program, output))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Result | None, ...]:
        program: TracedFunction = ctx.program
        out: list[Result | None] = [None] * len(ctx.needs_input_grad)
        given = tuple(i for i, grad in enumerate(grads) if grad is not None and program.outs_are_differentiable[i])
        wanted = tuple(i for i, yes in enumerate(ctx.needs_input_grad[2:]) if yes)
        if given and wanted:
            all_argnums = tuple(range(len(program.tensor_specs)))
            tensors = [*ctx.saved_tensors, *(grads[i] for i in given)]
            found = call_traced(program.vjp_function(wanted, given, all_argnums), ctx.others, tensors, is_transformed())
            for i, grad in zip(wanted, found, strict=True):
                out[2 + i] = grad
        return tuple(out)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Result | None, ...]:
        program = ctx.program
        _refuse_legacy_vmap(tangents[2:])
        given = tuple(
            i for i, t in enumerate(tangents[2:]) if t is not None and jax.numpy.issubdtype(program.tensor_specs[i].dtype, np.inexact)
        )
        tensors = [*ctx.saved_tensors, *(tangents[2 + i] for i in given)]
        found = iter(call_traced(program.jvp_function(given), ctx.others, tensors, is_transformed()))
        return tuple(next(found) if yes else None for yes in program.outs_are_differentiable)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Result, ...], tuple[int | None, ...]]:
        program, others, *tensors = args
        outs = call_traced(program.vmap_function(info.batch_size, tuple(in_dims[2:])), others, tensors, is_transformed())
        return outs, tuple(0 if isinstance(x, torch.Tensor) else None for x in outs)


def call_traced(
    program: TracedFunction, others: Sequence[ArrayLike], tensors: Sequence[torch.Tensor], transformed: bool
) -> tuple[Result, ...]:
    """Call a traced function, and record it in torch's graph only if torch would ask for gradients.

    Args:
      transformed: what `is_transformed()` returns for this call.
    """
    if transformed:
        return FunctorchCall.apply(program, others, *tensors)
    recording = residual_forward(program, tensors)
    if recording is not None:
        return RecordedCall.apply(recording, None, others, *tensors)
    return program.run(tensors, others)


def residual_forward(program: TracedFunction, tensors: Sequence[torch.Tensor]) -> ForwardWithResiduals | None:
    """Return the forward that keeps residuals, if torch would ask for gradients of these tensors; else None."""
    if not program.has_gradient or not torch.is_grad_enabled():
        return None
    wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
    return program.with_residuals(wanted) if wanted else None


# Calls `apply` without its check for active transformations and for tensors that one left behind. The caller has made both checks.
record_call = unchecked_apply(RecordedCall)


def is_transformed() -> bool:
    """Whether torch.func or forward mode transforms the running code. True also where torch does not tell, which makes calls slower."""
    return functorch_is_active() or forward_level() >= 0


def _refuse_legacy_vmap(tensors: Iterable[torch.Tensor | None]) -> None:
    if any(isinstance(x, torch.Tensor) and is_legacy_batch(x) for x in tensors):
        raise RuntimeError(
            "jax_function: is_grads_batched=True and vectorize=True use torch's old vmap, which custom functions cannot support. "
            "Use torch.func: jacrev or jacfwd, or vmap over the function that torch.func.vjp returns."
        )


def _non_differentiable_outs(program: TracedFunction, outs: Sequence[Result]) -> list[torch.Tensor]:
    return [x for x, yes in zip(outs, program.outs_are_differentiable, strict=True) if not yes and isinstance(x, torch.Tensor)]
