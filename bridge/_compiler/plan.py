"""The `UpdatePlan`, which is the cache key of an update's executable, and the abstract arguments that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bridge._compat.types import Device
from bridge._memory.address_space import SUPPORTED, Scattered
from bridge._names import Path

from .passes.gather_rows import signature as at_once
from .spec import NO_EXTRA, Extra, Problem, Row, Same, Signature, Spec

if TYPE_CHECKING:
    from jax.typing import DTypeLike

# The elements of one chunk of a gradient, and the chunks that one loop iteration of the streaming statistics reads. Several chunks
# at once keep more reads of memory in flight than one.
PART, _PLACES = 1 << 13, 8
_LEAST = 1 << 20  # elements in total and for each core; with fewer, the calls cost more than they save
_DTYPES = {"float32", "float64"}


def takes(dtype: str, size: int) -> bool:
    """Return whether the streaming statistics can read a gradient of this dtype and size."""
    return dtype in _DTYPES and size >= PART


def is_worth(elements: int) -> bool:
    """Return whether the streaming statistics are worth their calls for gradients with this many elements in total."""
    return SUPPORTED and elements >= _LEAST


@dataclass(frozen=True)
class Leaf:
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

    row: Row
    spec: Spec
    state: tuple[Signature, ...]
    inplace: bool
    elements: bool
    count: int | None = None
    singly: bool = False
    members: tuple[tuple[int, Spec], ...] = ()
    length: int | None = None
    at_once: bool = False
    other_gradient: str | None = None

    @property
    def gradient_dtype(self) -> str:
        """The dtype of the gradient."""
        return self.other_gradient or self.spec.dtype

    @property
    def size(self) -> int:
        """The number of elements of one parameter, without padding."""
        return self.length or math.prod(self.spec.shape)

    @property
    def buffer(self) -> Signature:
        size = math.prod(self.spec.shape)
        return (size,) if self.count is None else (self.count, size), self.spec.dtype

    @property
    def together(self) -> tuple[bool, ...]:
        """For each state array, whether it is stored in a vector with those of other leaves: the scalars of a single parameter are."""
        return tuple(shape == () and self.count is None for shape, _ in self.state)


@dataclass(frozen=True)
class Plan:
    """The static description of one update, and the cache key of its executable.

    clip: whether the global norm of the gradients is clipped.
    vector_length: the length of the vector of hyperparams.
    shared_signatures: the signatures of the state that belongs to no leaf, for each joint set in ascending order.
    has_loss_scale: whether the gradients are those of a scaled loss. The update is skipped if one of them is not finite.
    finite_check_done: whether the step's count of infinities covers all gradients.
    stats_precomputed: whether the norm and the finite check cover more leaves than these. Then they come from the
      `stats_executable` of each `UpdateExecutable`.
    has_streaming_stats: whether `bridge._runtime.streaming_stats` reads the large gradients.
    """

    leaves: tuple[Leaf, ...]
    clip: bool
    device: Device
    width: int
    skeleton: tuple[Path, ...] = ()
    shared: tuple[tuple[Signature, ...], ...] = ()
    extra: Extra = NO_EXTRA
    scaled: bool = False
    checked: bool = False
    measured: bool = False
    ahead: bool = False

    @property
    def decisive(self) -> bool:
        """Whether the update needs a statistic of all gradients before it changes the first element."""
        return self.clip or (self.scaled and not self.checked)

    def far(self, leaf: Leaf) -> bool:
        """Return whether the streaming statistics read the gradient of a leaf, before the program runs."""
        lies = leaf.count is None or leaf.length is not None or leaf.at_once
        return self.ahead and lies and not leaf.elements and takes(leaf.gradient_dtype, leaf.size)

    @property
    def far_dtypes(self) -> list[str]:
        """The dtypes of the gradients that the streaming statistics read, each once."""
        return list(dict.fromkeys(leaf.gradient_dtype for leaf in self.leaves if self.far(leaf)))

    def problem(self, leaf: Leaf) -> Problem:
        """Return the `UpdateSpec` of a leaf that is updated on its own."""
        return Problem(leaf.row, (leaf.spec,), () if leaf.spec.path is None else self.skeleton)

    @property
    def units(self) -> list[tuple[Problem, list[tuple[int, int | None]]]]:
        """The `UpdateSpec` of each joint set, with the position and the bucket row of each of its leaves.

        The leaves are in the order of `all_paths`, as in the trace of the separability analysis.
        """
        seen: dict[int, list[tuple[int, int | None, Spec]]] = {}
        for position, leaf in enumerate(self.leaves):
            if leaf.row.unit is not None:
                seen.setdefault(leaf.row.unit, []).extend((position, row, spec) for row, spec in leaf.members or ((None, leaf.spec),))
        nth = {path: i for i, path in enumerate(self.skeleton)}
        units: list[tuple[Problem, list[tuple[int, int | None]]]] = []
        for _, own in sorted(seen.items()):
            own.sort(key=lambda place: nth[place[2].path or ()])
            problem = Problem(self.leaves[own[0][0]].row, tuple(spec for *_, spec in own), self.skeleton)
            units.append((problem, [(at, row) for at, row, _ in own]))
        return units

    @property
    def scalars(self) -> dict[str, int]:
        """The length of each vector of state scalars, by dtype. A vector has its scalars in the order of the leaves."""
        kinds = [dtype for leaf in self.leaves for (_, dtype), among in zip(leaf.state, leaf.together, strict=True) if among]
        return {dtype: kinds.count(dtype) for dtype in dict.fromkeys(kinds)}

    @property
    def offsets(self) -> int:
        """The number of parameters, which counts every row of a bucket."""
        return sum(leaf.count or 1 for leaf in self.leaves)


def in_rows(plan: Plan, grads: Sequence[jax.Array]) -> list[jax.Array | Scattered]:
    """Return the gradient of each leaf, with rows for a bucket, from flat gradients as `abstract_args` describes them."""
    given = iter(grads)
    return [
        next(given)
        if leaf.count is None
        else Scattered(next(given), next(given), leaf.count, leaf.spec.shape[0])
        if leaf.at_once
        else jnp.stack([next(given) for _ in range(leaf.count)])
        if leaf.singly
        else next(given).reshape(leaf.count, -1)
        for leaf in plan.leaves
    ]


class AbstractArguments(NamedTuple):
    """Shapes and dtypes of the arguments of `bridge._compiler.update.update_step`, in its order."""

    params: list[jax.ShapeDtypeStruct]
    state: list[jax.ShapeDtypeStruct]
    vectors: list[jax.ShapeDtypeStruct]
    kept: list[jax.ShapeDtypeStruct]
    grads: list[jax.ShapeDtypeStruct]
    masks: list[jax.ShapeDtypeStruct]
    hyperparams: jax.ShapeDtypeStruct
    offsets: jax.ShapeDtypeStruct
    live: jax.ShapeDtypeStruct
    extra: list[jax.ShapeDtypeStruct]
    scaling: list[jax.ShapeDtypeStruct]
    measure: jax.ShapeDtypeStruct
    after: list[jax.ShapeDtypeStruct]


def abstract(plan: Plan, counted: bool = False) -> AbstractArguments:
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
    own = [s for leaf in plan.leaves for s, among in zip(leaf.state, leaf.together, strict=True) if not among]
    state = [array(*s) for s in (*own, *(s for signatures in plan.shared for s in signatures))]
    scalars = [array((count,), dtype) for dtype, count in plan.scalars.items()]
    grads: list[jax.ShapeDtypeStruct] = []
    for shape, dtype, leaf in ((leaf.buffer[0], leaf.gradient_dtype, leaf) for leaf in plan.leaves):
        if leaf.at_once:
            grads += [array(*each) for each in at_once(shape[0], dtype, shape[1] if counted else None)]
        else:
            grads += [array(shape[1:], dtype)] * shape[0] if leaf.singly else [array((math.prod(shape),), dtype)]
    masks = [array(leaf.buffer[0], np.bool_) for leaf in plan.leaves if leaf.elements]
    hyperparams, offsets = jax.ShapeDtypeStruct((plan.width,), np.float64), jax.ShapeDtypeStruct((plan.offsets,), np.int32)
    live = jax.ShapeDtypeStruct((sum(leaf.count or 0 for leaf in plan.leaves),), np.bool_)
    extra = [array(*s) for s in plan.extra.leaves if not isinstance(s, Same)]
    scaling = [array((1,), dtype) for dtype in (np.float32, np.float32, np.int32)] if plan.scaled else []
    measure = jax.ShapeDtypeStruct((2,), np.float64)
    after = [] if plan.device.platform == "cpu" else [array((1,), np.float32)]
    return AbstractArguments(params, state, scalars, kept, grads, masks, hyperparams, offsets, live, extra, scaling, measure, after)
