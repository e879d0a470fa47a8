"""What a step runs, for `explain()` and the logs: its executables, kernel classes, buckets and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from bridge._compiler.plan import LeafPlan
from bridge._memory.jax_buffers import JaxBuffer
from bridge._runtime.executable import UpdateExecutable
from torch_api._params.record import ParamRecord

from .bound_executable import BoundExecutable, ProgramOperand


class ExecutableSummary(NamedTuple):
    """One executable of the last step.

    device: the device of its parameters.
    calls: how often a step calls it, each time on other parameters.
    programs: how many compiled programs it consists of. It is 1, unless equal parts of a large program are compiled once.
    leaves: what one call updates: the parameters with a buffer of their own, and the buckets.
    kernel_classes: how many classes of leaves have different loops.
    bytes: the bytes that one call reads and writes, by the compiler's count; None if they were not counted.
    scratch_bytes: the memory that one call takes for intermediate values, by the compiler's count; None if it does not say.
    parameters: the names of all parameters that the calls update.
    """

    device: str
    calls: int
    programs: int
    leaves: int
    kernel_classes: int
    bytes: int | None
    scratch_bytes: int | None
    parameters: tuple[str, ...]


class KernelClassSummary(NamedTuple):
    """Leaves of an executable whose update is the same function of arrays of the same shapes and dtypes.

    executable: the position of the executable.
    transformation: the function that makes the transformation.
    shape: the shape of each leaf's buffer; a bucket has (rows, elements of a row). None if the transformation needs all parameters
      together.
    dtype, grad_dtype: the dtypes of parameter and gradient.
    state_dtypes: the dtype of each array of state.
    gradient: how the executable gets the gradients.
    leaves: how many leaves there are.
    parameters: the names of their parameters.
    """

    executable: int
    transformation: str
    shape: tuple[int, ...] | None
    dtype: str
    grad_dtype: str
    state_dtypes: tuple[str, ...]
    gradient: str
    leaves: int
    parameters: tuple[str, ...]


class BucketSummary(NamedTuple):
    """Parameters that share one buffer, a row each, and are updated as one array.

    rows: how many rows the buffer has. row_elements: the length of a row, with padding.
    dtype: the dtype of the parameters.
    gradient: how the executable of the last step got the gradients; "" if no step has used the bucket.
    parameters: the name of the parameter in each row that this optimizer trains.
    """

    rows: int
    row_elements: int
    dtype: str
    gradient: str
    parameters: tuple[str, ...]


class CopySummary(NamedTuple):
    """Tensors that each step copies, for one reason.

    what: "parameter", "state", "gradient", "buffer" or "frozen tensor".
    bytes: the bytes of the tensors.
    """

    what: str
    reason: str
    bytes: int
    parameters: tuple[str, ...]


_GATHERED, _PADDED = "gathered", "copied to a padded row"
_COPIED_GRADIENTS = {
    _GATHERED: "gradients of small parameters are gathered into the rows of one array, which one loop reads",
    _PADDED: "its row is longer than the parameter, so that each core gets an equal part",
}
_ASKED_FOR = "writeback='copy'"


def summarize_executables(
    launches: Iterable[BoundExecutable], counts_bytes: bool, computes_grads: bool = False
) -> tuple[list[ExecutableSummary], list[KernelClassSummary]]:
    """Return the executables of some bound executables, each once, and their kernel classes.

    Args:
      launches: the bound executables.
      counts_bytes: whether to ask the compiler for the bytes. For gradients that are read by address, this compiles a program.
      computes_grads: whether the executables compute the gradients themselves.
    """
    launches_of: dict[UpdateExecutable, list[BoundExecutable]] = {}
    for launch in launches:
        launches_of.setdefault(launch.executable, []).append(launch)
    executables: list[ExecutableSummary] = []
    kernel_classes: list[KernelClassSummary] = []
    for position, (executable, calls) in enumerate(launches_of.items()):
        operands_of: dict[Hashable, list[ProgramOperand]] = {}
        for operand in (operand for launch in calls for operand in launch.operands):
            joint_set = operand.leaf_plan.transform.joint_set
            operands_of.setdefault(operand.leaf_plan if joint_set is None else joint_set, []).append(operand)
        kernel_classes += [_kernel_class(position, operands, computes_grads) for operands in operands_of.values()]
        executables.append(
            ExecutableSummary(
                str(calls[0].device),
                len(calls),
                executable.num_programs,
                len(calls[0].operands),
                len(operands_of),
                round(executable.bytes_accessed) if counts_bytes else None,
                executable.scratch_bytes,
                _names(leaf for launch in calls for leaf in launch.leaves),
            )
        )
    return executables, kernel_classes


def _kernel_class(executable: int, operands: Sequence[ProgramOperand], computes_grads: bool) -> KernelClassSummary:
    plan = operands[0].leaf_plan
    return KernelClassSummary(
        executable,
        _factory_name(plan.transform.factory),
        plan.buffer[0] if plan.transform.joint_set is None else None,
        plan.spec.dtype,
        plan.grad_dtype,
        tuple(dtype for _, dtype in plan.state),
        "computed" if computes_grads else ", ".join(sorted({_gradient_of(operand.leaf_plan) for operand in operands})),
        len(operands),
        _names(leaf for operand in operands for leaf in operand.leaves),
    )


def _factory_name(factory: Callable[..., object]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)


def _gradient_of(plan: LeafPlan) -> str:
    """Return how a program gets the gradients of a leaf."""
    if plan.addresses_grads:
        return "read by address"
    if plan.valid_length is not None:
        return _PADDED
    if plan.rows is None or plan.grads_as_arguments:
        return "argument"
    return _GATHERED


def summarize_buckets(records: Iterable[ParamRecord], launches: Iterable[BoundExecutable]) -> list[BucketSummary]:
    """Return the buckets that hold more than one of these parameters."""
    gradients = {
        operand.bucket.jax_buffer: _gradient_of(operand.leaf_plan)
        for launch in launches
        for operand in launch.operands
        if operand.bucket is not None
    }
    members: dict[JaxBuffer, list[ParamRecord]] = {}
    for leaf in records:
        if leaf.jax_buffer is not None and not leaf.has_own_buffer:
            members.setdefault(leaf.jax_buffer, []).append(leaf)
    found: list[BucketSummary] = []
    for buffer, leaves in members.items():
        rows, row_elements = buffer.array.shape
        found.append(BucketSummary(rows, row_elements, str(buffer.array.dtype), gradients.get(buffer, ""), _names(leaves)))
    return found


def summarize_copies(
    records: Iterable[ParamRecord], launches: Sequence[BoundExecutable], computes_grads: bool = False
) -> list[CopySummary]:
    """Return what each step copies: parameters, state that cannot move, and gradients.

    Args:
      records: the trained parameters.
      launches: the bound executables of a step.
      computes_grads: whether the executables compute the gradients themselves.
    """
    found: dict[tuple[str, str], list[tuple[ParamRecord, int]]] = {}
    for leaf in records:
        if leaf.jax_buffer is None and leaf.address is not None:
            reason = _ASKED_FOR if leaf.copy_reason == "asked for" else leaf.copy_reason
            found.setdefault(("parameter", reason), []).append((leaf, leaf.local_tensor.nbytes))
        for tensor, _ in leaf.mirrors:
            found.setdefault(("state", "a tensor that you have put into the state, and that must keep its memory"), []).append(
                (leaf, tensor.nbytes)
            )
    for operand in (operand for launch in launches for operand in launch.operands if not computes_grads):
        reason = _COPIED_GRADIENTS.get(_gradient_of(operand.leaf_plan))
        if reason is not None:
            sizes = [(leaf, leaf.shape.numel() * leaf.grad_dtype.itemsize) for leaf in operand.leaves]
            found.setdefault(("gradient", reason), []).extend(sizes)
    return [
        CopySummary(what, reason, sum(size for _, size in leaves), _names(leaf for leaf, _ in leaves))
        for (what, reason), leaves in found.items()
    ]


def _names(leaves: Iterable[ParamRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(leaf.name for leaf in leaves))


def describe_layout(records: Sequence[ParamRecord]) -> str:
    """Return where the parameters are, as text for a log."""
    buffers = [leaf.jax_buffer for leaf in records if leaf.jax_buffer is not None]
    size, buckets = sum(buffer.array.nbytes for buffer in set(buffers)), summarize_buckets(records, ())
    text = f"parameters in jax's memory: {len(buffers)}, in {len(set(buffers))} buffers of {size:,} bytes, {len(buckets)} of them buckets"
    copies = [f"{len(each.parameters)} of {each.bytes:,} bytes ({each.reason})" for each in summarize_copies(records, ())]
    return f"{text}; copied at each step: {', '.join(copies) or 'none'}"


def describe_step_memory(launches: Sequence[BoundExecutable], computes_grads: bool = False) -> str:
    """Return the memory of a step beside the parameters and their gradients, as text for a log."""
    state = sum(buffer.array.nbytes for launch in launches for part in (*launch.operands, *launch.shared) for buffer in part.state_buffers)
    gathered = sum(
        math.prod(operand.leaf_plan.buffer[0]) * _itemsize(operand.leaf_plan.grad_dtype)
        for launch in launches
        for operand in launch.operands
        if not computes_grads and _gradient_of(operand.leaf_plan) in _COPIED_GRADIENTS
    )
    copied = sum(launch.copied_result_bytes for launch in launches)
    scratch = [size for launch in launches if (size := launch.executable.scratch_bytes) is not None]
    known = f"{max(scratch):,} bytes of scratch memory in the largest executable" if scratch else "scratch memory that is not known"
    return f"{state:,} bytes of state, {gathered:,} of gathered gradients, {copied:,} of copied results, {known}"


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
