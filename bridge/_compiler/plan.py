"""The static `Plan` of an executable: all that decides the program of an update."""

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

# Elements of one place that a turn reads, and places. 49 gradients of 600 MB on 2 cores of an AMD EPYC, by turns, medians of six processes,
# three of them while memory was fast: four places 39 to 43 GB/s and 30 to 31, eight 43 to 48 and 31 to 32, sixteen 27 (slow), parts of half
# as many elements 38 to 45 (fast). A loop in C got 48 to 50 and 32. Before that one place gave 28 where four gave 33, a plain sum 26.
PART, _PLACES = 1 << 13, 8
_LEAST = 1 << 20  # elements of all, and of each core: for fewer the calls cost more than they spare
_DTYPES = {"float32", "float64"}


def takes(dtype: str, size: int) -> bool:
    """Whether a gradient of so many elements may be read here."""
    return dtype in _DTYPES and size >= PART


def is_worth(elements: int) -> bool:
    """Whether so many elements, of all gradients of a CPU that may be read here, are."""
    return SUPPORTED and elements >= _LEAST


@dataclass(frozen=True)
class Leaf:
    """What the program must know of one live leaf: its transformation, its arrays, and which way its result goes.

    `count`: small leaves of equal signature, side by side in the rows of one buffer each for parameters, gradients and
    every field of state; `spec` is then that of one row. None for a leaf by itself. `singly`: the gradients of the rows are
    arguments of their own, because reading them in one place would not be worth moving them there. `at_once`: the gradients of
    the rows are read where they lie, as of `bridge._compiler.passes.gather_rows`. `members`: of leaves that their transformation sees
    together with others,
    each with its row. `length`: of a single row that is longer than its leaf, the elements of that; what stands behind them may be
    anything, and in the gradient is zero. `other_gradient`: the dtype of a gradient that has another than the leaf.
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
        """That of its gradient, which is mostly its own."""
        return self.other_gradient or self.spec.dtype

    @property
    def size(self) -> int:
        """The elements that are a leaf's, in one row."""
        return self.length or math.prod(self.spec.shape)

    @property
    def buffer(self) -> Signature:
        size = math.prod(self.spec.shape)
        return (size,) if self.count is None else (self.count, size), self.spec.dtype

    @property
    def together(self) -> tuple[bool, ...]:
        """Of each of its state whether it lies in a vector with those of other leaves: the scalars of a leaf by itself."""
        return tuple(shape == () and self.count is None for shape, _ in self.state)


@dataclass(frozen=True)
class Plan:
    """All that is static about one update, and so the key of its program.

    `width`: of the vector of hyperparams. `measured`: the norm and the finite check are over more than these leaves, and
    come from calls of `Program.measure`. `ahead`: those of large gradients come from `bridge._runtime.streaming_stats`.
    `shared` has the state that belongs to no leaf, for each unit of the rows in ascending order. `scaled`: the gradients are those of a
    scaled loss, and the update is skipped where one is not finite; `checked`: which the count of infinities that is given says of all of
    them.
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
        """Whether something must be found of all gradients before the first element is updated."""
        return self.clip or (self.scaled and not self.checked)

    def far(self, leaf: Leaf) -> bool:
        """Whether the gradient of a leaf is measured before the program, where it lies."""
        lies = leaf.count is None or leaf.length is not None or leaf.at_once
        return self.ahead and lies and not leaf.elements and takes(leaf.gradient_dtype, leaf.size)

    @property
    def far_dtypes(self) -> list[str]:
        """Those of the leaves that are far, each once."""
        return list(dict.fromkeys(leaf.gradient_dtype for leaf in self.leaves if self.far(leaf)))

    def problem(self, leaf: Leaf) -> Problem:
        """A leaf that is updated by itself."""
        return Problem(leaf.row, (leaf.spec,), () if leaf.spec.path is None else self.skeleton)

    @property
    def units(self) -> list[tuple[Problem, list[tuple[int, int | None]]]]:
        """Each transformation that is evaluated over several leaves together, with their places: position, and row in a pack.

        The leaves are in the order of their paths, as in the problem that was looked at before.
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
        """Dtype -> how many scalars of state there are that lie in one vector, in the order of the leaves."""
        kinds = [dtype for leaf in self.leaves for (_, dtype), among in zip(leaf.state, leaf.together, strict=True) if among]
        return {dtype: kinds.count(dtype) for dtype in dict.fromkeys(kinds)}

    @property
    def offsets(self) -> int:
        """How many leaves there are, those of packs one by one."""
        return sum(leaf.count or 1 for leaf in self.leaves)


def in_rows(plan: Plan, grads: Sequence[jax.Array]) -> list[jax.Array | Scattered]:
    """The gradient of each leaf of the plan, of a pack in rows, from flat ones as of `abstract`."""
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
    """Shape and dtype of the arguments of `bridge._compiler.update.stepped`, in its order."""

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
    """Return the abstract arguments of a plan's program, or of one that is only to be counted."""
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
