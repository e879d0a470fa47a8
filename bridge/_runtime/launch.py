"""What a step needs of a bound executable: the arguments that stay the same from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import torch

from bridge._memory.call_arguments import Argument, TensorArguments
from bridge._memory.gradient_sources import GradientArguments
from bridge._memory.jax_buffers import JaxBuffer
from bridge._memory.scalar_vectors import ScalarVector

from .executable import UpdateExecutable


class HasJaxBuffer(Protocol):
    """A leaf that may have a jax buffer, which is donated and replaced."""

    @property
    def jax_buffer(self) -> JaxBuffer | None: ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BoundArguments:
    """The buffers, views and arguments that each call of an executable takes.

    All sequences are in the plan's order: separate leaves come before buckets.

    inplace: the leaves with a `jax_buffer`, whose array is donated and replaced.
    params: the tensors that alias those buffers; a call increments their version.
    state: the buffers of the state of all leaves, then of shared state; donated and replaced too.
    scalars: the scalar state of separate leaves, by dtype.
    copied_back, copied_back_dim_order: the tensors of the other leaves, which are only read, and the order of their dimensions in memory.
    copied_back_as_arguments: turns those tensors into arguments. Raises a ValueError where a storage was freed or made smaller.
    gradients: turns the gradients of the step into arguments.
    mirrored, mirrors: tensors of state that the user has assigned and that keep their addresses, and the tensors over `state` that stand
      in for them. Values are copied from the former before the call and back after it.
    masks: a boolean array for each leaf with an `element_mask`.
    row_offsets: int32, for each leaf and each row of a bucket: where its hyperparameter row begins.
    active_rows: boolean, for each row of each bucket: whether the row is updated.
    row_sizes: with metrics int32, for each leaf and each row of a bucket its number of elements; else empty.
    """

    inplace: Sequence[HasJaxBuffer]
    params: Sequence[torch.Tensor]
    state: Sequence[JaxBuffer]
    scalars: Sequence[ScalarVector]
    copied_back: Sequence[torch.Tensor]
    copied_back_dim_order: Sequence[tuple[int, ...] | None]
    copied_back_as_arguments: TensorArguments
    gradients: GradientArguments
    mirrored: list[torch.Tensor]
    mirrors: list[torch.Tensor]
    masks: Sequence[Argument]
    row_offsets: Argument
    active_rows: Argument
    row_sizes: list[Argument]


class Launch(Protocol):
    """An executable over some of the leaves with a gradient, with the buffers that it is called on.

    executable: the executable.
    arguments: the buffers and arguments. They are made at the first access, while earlier executables run.
    copied_result_bytes: bytes that a call allocates on a CPU for results which are copied.
    """

    @property
    def executable(self) -> UpdateExecutable: ...
    @cached_property
    def arguments(self) -> BoundArguments: ...
    @cached_property
    def copied_result_bytes(self) -> int: ...


_L = TypeVar("_L", bound=Launch)


class StepNumbers(NamedTuple, Generic[_L]):
    """The numbers of a step on one device that users log, as arrays that nobody has waited for.

    stats: the statistics of the gradients, if the step clips; else empty.
    metrics: for each executable that has metrics its launch and its metrics.
    """

    stats: Sequence[Argument] = ()
    metrics: Sequence[tuple[_L, jax.Array]] = ()
