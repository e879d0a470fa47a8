"""The arguments of an executable that stay the same from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bridge._memory.call_arguments import Argument
from bridge._memory.jax_buffers import JaxBuffer
from bridge._memory.scalar_vectors import ScalarVector

from .executable import UpdateExecutable
from .streaming_stats import StreamingStats


class HasJaxBuffer(Protocol):
    """A leaf that may have a jax buffer, which is donated and replaced."""

    @property
    def jax_buffer(self) -> JaxBuffer | None: ...


class Launch(ABC):
    """An executable over some of the leaves with a gradient, with the buffers that it is called on.

    All sequences are in the plan's order: separate leaves come before buckets.

    copied_result_bytes: bytes that a call allocates on a CPU for results which are copied.
    streaming_stats: computes the statistics of the large gradients of a whole step, on the first launch; None where nothing does.
    inplace: the leaves with a `jax_buffer`, whose array is donated and replaced.
    params: the tensors that alias those buffers; a call increments their version.
    state: the buffers of the state of all leaves, then of shared state; donated and replaced too.
    scalars: the scalar state of separate leaves, by dtype.
    copied_back, copied_back_dim_order: the tensors of the other leaves, which are only read, and the order of their dimensions in memory.
    copied_back_as_arguments: from those tensors to arguments. Raises a ValueError where a storage was freed or made smaller.
    argument_positions: the gradients of the step that are arguments, by position.
    as_arguments: from those gradients, and then `bucket_grads`, to arguments; `BucketAddresses` where gradients are read by address.
    bucket_grads: the buffers that gradients of buckets are gathered into.
    cat_gathers: for each bucket whose rows all have a gradient, the positions of those and its buffer as `torch.cat` takes it.
    copy_gathers, copy_targets: the positions of the gradients of all other buckets, and the row of each in the buffer.
    mirrored, mirrors: tensors of state that the user has assigned and that keep their addresses, and the tensors over `state` that stand
      in for them. Values are copied from the former before the call and back after it.
    masks: a boolean array for each leaf with an `element_mask`.
    row_offsets: int32, for each leaf and each row of a bucket: where its hyperparameter row begins.
    active_rows: boolean, for each row of each bucket: whether the row is updated.

    The executable, the buckets and `bucket_grads` are set by the constructor. `prepare` sets the rest before the first call, while
    earlier executables run.
    """

    __slots__ = (
        "active_rows",
        "argument_positions",
        "as_arguments",
        "bucket_grads",
        "cat_gathers",
        "copied_back",
        "copied_back_as_arguments",
        "copied_back_dim_order",
        "copied_result_bytes",
        "copy_gathers",
        "copy_targets",
        "executable",
        "inplace",
        "is_prepared",
        "masks",
        "mirrored",
        "mirrors",
        "params",
        "row_offsets",
        "scalars",
        "state",
        "streaming_stats",
    )  # fmt: skip

    executable: UpdateExecutable
    streaming_stats: StreamingStats | None
    is_prepared: bool
    copied_result_bytes: int
    inplace: Sequence[HasJaxBuffer]
    params: Sequence[torch.Tensor]
    state: Sequence[JaxBuffer]
    scalars: Sequence[ScalarVector]
    copied_back: Sequence[torch.Tensor]
    copied_back_dim_order: Sequence[tuple[int, ...] | None]
    copied_back_as_arguments: Callable[[Sequence[torch.Tensor]], Sequence[Argument]]
    argument_positions: Sequence[int]
    as_arguments: Callable[[Sequence[torch.Tensor]], Sequence[Argument]]
    cat_gathers: Sequence[tuple[Sequence[int], torch.Tensor]]
    copy_gathers: Sequence[int]
    copy_targets: list[torch.Tensor]
    bucket_grads: list[torch.Tensor]
    mirrored: list[torch.Tensor]
    mirrors: list[torch.Tensor]
    masks: list[Argument]
    row_offsets: Argument
    active_rows: Argument

    @abstractmethod
    def prepare(self) -> None:
        """Set all fields that a call needs."""
