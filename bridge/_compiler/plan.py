"""The `UpdatePlan`, which is the cache key of an update's executable, and the abstract arguments that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bridge._compat.types import Device
from bridge._memory.address_space import AddressedRows
from bridge._names import Path

from . import policy
from .passes.gather_rows import gather_signatures
from .spec import NO_EXTRA_ARGS, ById, ExtraArgsSpec, LeafSpec, Signature, TransformSpec, UpdateSpec

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclass(frozen=True)
class LeafPlan:
    """The static description of one leaf of a program: a parameter, or a bucket of parameters with equal signatures.

    A bucket has one buffer each for parameters, gradients and every state field. Each row belongs to one parameter.

    transform: the transformation of the leaf.
    spec: the leaf as its transformation sees it; for a bucket, one row.
    state: the signature of each state array.
    inplace: whether the new values replace a donated parameter; otherwise they are copied back.
    has_element_mask: whether a mask selects the elements to update.
    rows: the number of rows of a bucket; None for a single parameter.
    grads_as_arguments: whether the gradient of each row is an argument of its own, because copying it into one buffer costs more.
    bucket_members: the row and the spec of each parameter of a bucket in a joint set.
    valid_length: the elements of the parameter in the only row of a padded bucket. The padding of the gradient is zero; other padding
      may have any value.
    addresses_grads: whether the program reads the gradients of the rows by address; see `bridge._compiler.passes.gather_rows`.
    grad_dtype_override: the dtype of the gradient, if it differs from the leaf's.
    """

    transform: TransformSpec
    spec: LeafSpec
    state: tuple[Signature, ...]
    inplace: bool
    has_element_mask: bool
    rows: int | None = None
    grads_as_arguments: bool = False
    bucket_members: tuple[tuple[int, LeafSpec], ...] = ()
    valid_length: int | None = None
    addresses_grads: bool = False
    grad_dtype_override: str | None = None

    @property
    def grad_dtype(self) -> str:
        """The dtype of the gradient."""
        return self.grad_dtype_override or self.spec.dtype

    @property
    def size(self) -> int:
        """The number of elements of one parameter, without padding."""
        return self.valid_length or math.prod(self.spec.shape)

    @property
    def can_stream_grad(self) -> bool:
        """Whether `bridge._runtime.streaming_stats` can read the gradients at their own addresses."""
        has_address = self.rows is None or self.valid_length is not None or self.addresses_grads
        return has_address and not self.has_element_mask and policy.STREAMING.can_stream(self.grad_dtype, self.size)

    @property
    def buffer(self) -> Signature:
        size = math.prod(self.spec.shape)
        return (size,) if self.rows is None else (self.rows, size), self.spec.dtype

    @property
    def scalars_in_vector(self) -> tuple[bool, ...]:
        """For each state array, whether it is stored in a vector with those of other leaves: the scalars of a single parameter are."""
        return tuple(shape == () and self.rows is None for shape, _ in self.state)


@dataclass(frozen=True)
class UpdatePlan:
    """The static description of one update, and the cache key of its executable.

    clip: whether the global norm of the gradients is clipped.
    vector_length: the length of the vector of hyperparams.
    shared_signatures: the signatures of the state that belongs to no leaf, for each joint set in ascending order.
    has_loss_scale: whether the gradients are those of a scaled loss. The update is skipped if one of them is not finite.
    finite_check_done: whether the step's count of infinities covers all gradients.
    stats_weights: for each leaf the factor of the squares of its gradient in the statistics that the program computes and adds to its
      argument; 0 for a gradient that `bridge._runtime.stats_stage` has read before. Empty if the program computes none.
    has_metrics: whether the program returns the metrics of each parameter (`bridge._compiler.metrics`).
    """

    leaves: tuple[LeafPlan, ...]
    clip: bool
    device: Device
    vector_length: int
    all_paths: tuple[Path, ...] = ()
    shared_signatures: tuple[tuple[Signature, ...], ...] = ()
    extra: ExtraArgsSpec = NO_EXTRA_ARGS
    has_loss_scale: bool = False
    finite_check_done: bool = False
    stats_weights: tuple[float, ...] = ()
    has_metrics: bool = False

    @property
    def needs_global_stats(self) -> bool:
        """Whether the update needs a statistic of all gradients before it changes the first element."""
        return self.clip or (self.has_loss_scale and not self.finite_check_done)

    def update_spec(self, leaf: LeafPlan) -> UpdateSpec:
        """Return the `UpdateSpec` of a leaf that is updated on its own."""
        return UpdateSpec(leaf.transform, (leaf.spec,), () if leaf.spec.path is None else self.all_paths)

    @property
    def joint_sets(self) -> list[tuple[UpdateSpec, list[tuple[int, int | None]]]]:
        """The `UpdateSpec` of each joint set, with the position and the bucket row of each of its leaves.

        The leaves are in the order of `all_paths`, as in the trace of the separability analysis.
        """
        seen: dict[int, list[tuple[int, int | None, LeafSpec]]] = {}
        for position, leaf in enumerate(self.leaves):
            if leaf.transform.joint_set is not None:
                seen.setdefault(leaf.transform.joint_set, []).extend(
                    (position, row, spec) for row, spec in leaf.bucket_members or ((None, leaf.spec),)
                )
        nth = {path: i for i, path in enumerate(self.all_paths)}
        units: list[tuple[UpdateSpec, list[tuple[int, int | None]]]] = []
        for _, own in sorted(seen.items()):
            own.sort(key=lambda place: nth[place[2].path or ()])
            problem = UpdateSpec(self.leaves[own[0][0]].transform, tuple(spec for *_, spec in own), self.all_paths)
            units.append((problem, [(at, row) for at, row, _ in own]))
        return units

    @property
    def scalar_counts(self) -> dict[str, int]:
        """The length of each vector of state scalars, by dtype. A vector has its scalars in the order of the leaves."""
        kinds = [dtype for leaf in self.leaves for (_, dtype), among in zip(leaf.state, leaf.scalars_in_vector, strict=True) if among]
        return {dtype: kinds.count(dtype) for dtype in dict.fromkeys(kinds)}

    @property
    def num_params(self) -> int:
        """The number of parameters, which counts every row of a bucket."""
        return sum(leaf.rows or 1 for leaf in self.leaves)


@dataclass(frozen=True)
class StatsPlan:
    """The static description of an executable that computes statistics of gradients, and its cache key.

    plan: the update of the gradients. The executable takes the gradients as the update takes them.
    weights: for each leaf the factor of the squares of its gradient. A weight of 0 leaves the gradient out.
    covers_found_inf: whether infinities that the loss scaler has found make the finite check fail, so that other processes learn of them.
    """

    plan: UpdatePlan
    weights: tuple[float, ...]
    covers_found_inf: bool = False


def stack_grads(plan: UpdatePlan, grads: Sequence[jax.Array]) -> list[jax.Array | AddressedRows]:
    """Return the gradient of each leaf, with rows for a bucket, from flat gradients as `abstract_args` describes them."""
    given = iter(grads)
    return [
        next(given)
        if leaf.rows is None
        else AddressedRows(next(given), next(given), leaf.rows, leaf.spec.shape[0])
        if leaf.addresses_grads
        else jnp.stack([next(given) for _ in range(leaf.rows)])
        if leaf.grads_as_arguments
        else next(given).reshape(leaf.rows, -1)
        for leaf in plan.leaves
    ]


_X = TypeVar("_X")


class UpdateArguments(NamedTuple, Generic[_X]):
    """The arguments of the program of a plan, in its order: arrays, tracers, or shapes and dtypes.

    params, state: the donated buffers: parameters that are updated in place, and state arrays. Those of shared state come last.
    scalar_vectors: the scalars of state, one vector for each dtype.
    copied_back: the parameters that are copied back.
    grads: the gradients, as `LeafPlan` says.
    masks: the element mask of each leaf that has one.
    hyperparams: float64 vector: `ONES` times 1.0, the norm bound, then the hyperparameter rows.
    row_offsets: int32, for each parameter: where its hyperparameter row begins.
    active_rows: boolean, for each row of each bucket: whether the row is updated.
    row_sizes: with metrics int32, for each parameter its number of elements; else empty.
    extra: the arrays among the extra arguments.
    loss_scaling: with a loss scale the scale, the count of infinities found, and the count of skipped updates; else empty.
    stats: the statistics that other programs have computed.
    stream_event: zeros that exist when the program may begin.
    """

    params: Sequence[_X]
    state: Sequence[_X]
    scalar_vectors: Sequence[_X]
    copied_back: Sequence[_X]
    grads: Sequence[_X]
    masks: Sequence[_X]
    hyperparams: _X
    row_offsets: _X
    active_rows: _X
    row_sizes: Sequence[_X]
    extra: Sequence[_X]
    loss_scaling: Sequence[_X]
    stats: _X
    stream_event: Sequence[_X]


def abstract_args(plan: UpdatePlan, for_counting: bool = False) -> UpdateArguments[jax.ShapeDtypeStruct]:
    """Return the abstract arguments of a plan's program.

    Args:
      plan: the plan.
      for_counting: whether the program is compiled only to count its bytes. Addressed gradients then have the size of their rows.
    """
    sharding = jax.sharding.SingleDeviceSharding(plan.device)

    def array(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = [array(*leaf.buffer) for leaf in plan.leaves if leaf.inplace]
    kept = [array(*leaf.buffer) for leaf in plan.leaves if not leaf.inplace]
    own = [s for leaf in plan.leaves for s, among in zip(leaf.state, leaf.scalars_in_vector, strict=True) if not among]
    state = [array(*s) for s in (*own, *(s for signatures in plan.shared_signatures for s in signatures))]
    scalars = [array((count,), dtype) for dtype, count in plan.scalar_counts.items()]
    grads: list[jax.ShapeDtypeStruct] = []
    for shape, dtype, leaf in ((leaf.buffer[0], leaf.grad_dtype, leaf) for leaf in plan.leaves):
        if leaf.addresses_grads:
            grads += [array(*each) for each in gather_signatures(shape[0], dtype, shape[1] if for_counting else None)]
        else:
            grads += [array(shape[1:], dtype)] * shape[0] if leaf.grads_as_arguments else [array((math.prod(shape),), dtype)]
    masks = [array(leaf.buffer[0], np.bool_) for leaf in plan.leaves if leaf.has_element_mask]
    hyperparams, offsets = jax.ShapeDtypeStruct((plan.vector_length,), np.float64), jax.ShapeDtypeStruct((plan.num_params,), np.int32)
    live = jax.ShapeDtypeStruct((sum(leaf.rows or 0 for leaf in plan.leaves),), np.bool_)
    sizes = [offsets] if plan.has_metrics else []
    extra = [array(*s) for s in plan.extra.leaves if not isinstance(s, ById)]
    scaling = [array((1,), dtype) for dtype in (np.float32, np.float32, np.int32)] if plan.has_loss_scale else []
    measure = jax.ShapeDtypeStruct((2,), np.float64)
    after = [] if plan.device.platform == "cpu" else [array((1,), np.float32)]
    return UpdateArguments(params, state, scalars, kept, grads, masks, hyperparams, offsets, live, sizes, extra, scaling, measure, after)
