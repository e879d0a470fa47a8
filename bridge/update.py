"""The update as a function that jax traces: (params, state, grads, hyperparams) -> (params, state), for one static `Plan`.

Every number that a user may change between steps is an element of one float64 vector, so no value of it recompiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import reading
from ._memory.address_space import Scattered
from ._names import Path
from .analysis import in_parts
from .at_once import signature as at_once
from .gradients import along, consequences, found_in
from .joint import Way
from .leaf_update import ONES, Passes, joined, leaf_update, parted, passes_of, unless
from .loops import LARGE
from .problem import NO_EXTRA, Extra, Problem, Row, Same, Signature, Spec
from .side_by_side import Slot
from .split import Alike, for_each
from .units import Columns, unit_update

_traces = 0


@dataclass(frozen=True)
class Leaf:
    """What the program must know of one live leaf: its transformation, its arrays, and which way its result goes.

    `count`: small leaves of equal signature, side by side in the rows of one buffer each for parameters, gradients and
    every field of state; `spec` is then that of one row. None for a leaf by itself. `singly`: the gradients of the rows are
    arguments of their own, because reading them in one place would not be worth moving them there. `at_once`: the gradients of
    the rows are read where they lie, as of `bridge.at_once`. `members`: of leaves that their transformation sees together with others,
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
    come from calls of `Program.measure`. `ahead`: those of large gradients come from `bridge.reading`. `shared` has the state that
    belongs to no leaf, for each unit of the rows in ascending order. `scaled`: the gradients are those of a scaled loss, and the update
    is skipped where one is not finite; `checked`: which the count of infinities that is given says of all of them.
    """

    leaves: tuple[Leaf, ...]
    clip: bool
    device: Any
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
        return self.ahead and lies and not leaf.elements and reading.takes(leaf.gradient_dtype, leaf.size)

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
        units = []
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


def traces() -> int:
    """How often an update has been traced in this process."""
    return _traces


def update(
    plan: Plan,
    params: list[Any],
    state: list[Any],
    vectors: list[Any],
    kept: list[Any],
    grads: list[Any],
    masks: list[Any],
    hyperparams: Any,
    offsets: Any,
    live: Any,
    extra: list[Any],
    scaling: list[Any],
    measure: Any,
    after: Sequence[Any] = (),
    fused: bool = True,
    pieces: bool = False,
) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any], list[Any]]:
    """New parameters, state, vectors of scalars, kept leaves and count of skipped updates, and tokens: a result that nobody donates.

    The arguments after the plan are as of `abstract`: what a `bridge.step.Launch` and a step have; `grads` as of `in_rows`.
    `after`: zeros that are there when the program may begin. `fused`: as of `compile.compiled`. `pieces`: it will be cut by `pieces.cut`.
    """
    global _traces
    _traces += 1
    ones = hyperparams[:ONES]
    donated, read, states = iter(params), iter(kept), iter(state)
    leaf_masks, leaf_lives = _flags(plan, masks, live)
    old_params = [next(donated) if leaf.inplace else next(read) for leaf in plan.leaves]
    own = _distributed(plan, states, vectors)
    if plan.decisive and not plan.measured:
        measure = found_here(plan, grads, leaf_masks, leaf_lives, scaling, measure)
    scale, skip, skipped = consequences(plan.clip, hyperparams[ONES], scaling, measure)
    results: list[Any] = [None] * len(plan.leaves)
    alike: dict[Any, list[int]] = {}
    for position, leaf in enumerate(plan.leaves):
        if leaf.row.unit is None:
            alike.setdefault((leaf, leaf_masks[position] is None), []).append(position)
    values = _values(plan, hyperparams, offsets, [i for at in alike.values() for i in at], pieces)
    kinds = []
    for (leaf, _), at in alike.items():
        problem = plan.problem(leaf)
        passes = _passes(plan, leaf, fused)
        parts = [parted(problem, old_params[i], own[i], grads[i], leaf_masks[i], values[i]) for i in at]
        arrays, scalars = zip(*parts, strict=True)
        kinds.append(Alike(leaf_update(problem, passes, plan.extra), arrays, scalars, leaf.count, _family(plan, leaf, passes, len(alike))))
    updated = for_each(kinds, (ones, scale, skip, extra), plan.device.platform == "cpu")
    for kind, ((leaf, _), at), new in zip(kinds, alike.items(), updated, strict=True):
        for i, arrays, scalars, result in zip(at, kind.arrays, kind.scalars, new, strict=True):
            new_p, *columns = result if leaf.count in (None, 1) else _where_live(leaf_lives[i], result, arrays, scalars)
            results[i] = new_p, joined(plan.problem(leaf), *columns)
    columns, way = Columns(old_params, own, grads, leaf_masks, values), Way(fused, pieces)
    new_shared, together = _together(plan, columns, states, (ones, scale, skip, extra), way if plan.device.platform == "cpu" else None)
    results = [together.get(i, result) for i, result in enumerate(results)]
    # jax gives each result the first donated buffer of its type that is left: so the results that donate come first, in
    # the order of their arguments, and those without a buffer of their own last.
    new_params = [p for leaf, (p, _) in zip(plan.leaves, results, strict=True) if leaf.inplace]
    new_kept = [p for leaf, (p, _) in zip(plan.leaves, results, strict=True) if not leaf.inplace]
    new_state, new_vectors = _collected(plan, [fields for _, fields in results])
    token = sum((x[0] for x in after), start=ones[0].astype(jnp.float32))
    return new_params, new_state + new_shared, new_vectors, new_kept, skipped, [token]


def _together(plan: Plan, columns: Columns, states: Iterator[Any], common: Any, way: Way | None) -> tuple[list[Any], dict[int, Any]]:
    """The new state that belongs to no leaf, and by position the results of leaves that a transformation sees together."""
    new_shared: list[Any] = []
    results: dict[int, Any] = {}
    for (problem, places), signatures in zip(plan.units, plan.shared, strict=True):
        shared = [next(states) for _ in signatures]
        new, found = unit_update(problem, places, columns, shared, common, plan.extra, way)
        new_shared += unless(common[2], new, shared)
        results |= found
    return new_shared, results


def _distributed(plan: Plan, state: Iterator[Any], vectors: Sequence[Any]) -> list[list[Any]]:
    """The state of each leaf, from its arrays and from the vectors of scalars."""
    cells = {dtype: iter(jax.lax.split(x, [1] * len(x))) for dtype, x in zip(plan.scalars, vectors, strict=True)}
    return [
        [next(cells[dtype]).reshape(()) if among else next(state) for (_, dtype), among in zip(leaf.state, leaf.together, strict=True)]
        for leaf in plan.leaves
    ]


def _collected(plan: Plan, own: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """The arrays of the state of each leaf, and the vectors of scalars: what `_distributed` takes."""
    arrays: list[Any] = []
    scalars: dict[str, list[Any]] = {dtype: [] for dtype in plan.scalars}
    for leaf, fields in zip(plan.leaves, own, strict=True):
        for x, (_, dtype), among in zip(fields, leaf.state, leaf.together, strict=True):
            (scalars[dtype] if among else arrays).append(x.reshape(1) if among else x)
    return arrays, [jnp.concatenate(column) for column in scalars.values()]


def _passes(plan: Plan, leaf: Leaf, fused: bool) -> Passes:
    """How often the rule of a leaf is evaluated."""
    large = leaf.count in (None, 1) and math.prod(leaf.spec.shape) >= LARGE
    return passes_of(plan.problem(leaf), plan.extra, plan.device, large, fused)


def by_type(plan: Plan) -> bool:
    """Whether the results of some leaf come from loops of one type each, behind barriers that must stay."""
    alone = {leaf for leaf in plan.leaves if leaf.row.unit is None}
    return plan.device.platform == "cpu" and any(_passes(plan, leaf, True).by_type for leaf in alone)


# So many kinds in one program are worth finding out whether a leaf's size matters, which takes as long as tracing two of them.
_KINDS = 4
_of_any_size: dict[Any, bool] = {}


def _family(plan: Plan, leaf: Leaf, passes: Passes, kinds: int) -> Any:
    """Equal for leaves whose updates are the same, but for their size where that was found not to matter."""
    size = math.prod(leaf.spec.shape)
    rule = plan.problem(leaf)._replace(specs=(leaf.spec._replace(shape=()),)), plan.extra
    key = rule, size if leaf.row.scaled else None
    if key not in _of_any_size and kinds >= _KINDS:
        if len(_of_any_size) >= 256:
            _of_any_size.clear()
        _of_any_size[key] = in_parts(leaf.row, plan.skeleton, leaf.spec, plan.extra, (size,))
    return (
        rule,
        () if _of_any_size.get(key) else leaf.spec.shape,
        tuple(dtype for _, dtype in leaf.state),
        leaf.other_gradient,
        leaf.elements,
        passes,
    )


def _values(plan: Plan, hyperparams: Any, offsets: Any, first: Sequence[int], pieces: bool) -> list[Any]:
    """The numbers of each leaf's row; of a pack one row of them for each of its leaves.

    They are taken from the hyperparams as a table for each transformation, those of the leaves `first` in the order in which they
    are put together again: XLA then takes the table, where of forty-seven leaves one by one it had a loop of as many results. In
    a program that will be cut in `pieces`, those of leaves that are seen together stay rows of their table.
    """
    starts = [0, *accumulate(leaf.count or 1 for leaf in plan.leaves)]
    tables: dict[tuple[Row, bool], list[int]] = {}
    for i in (*first, *(i for i, leaf in enumerate(plan.leaves) if leaf.row.unit is not None)):
        leaf = plan.leaves[i]
        tables.setdefault((leaf.row, pieces and leaf.row.unit is not None and leaf.count is None), []).append(i)
    found: dict[int, Any] = {}
    for (kind, stay), at in tables.items():
        counts = [plan.leaves[i].count for i in at]
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in at])
        # Rows that follow each other are a part of the vector; others are gathered by a loop of their own.
        in_turn = bool(np.all(np.diff(rows) == 1))
        own = offsets[rows[0] : rows[-1] + 1] if in_turn else offsets[rows]
        table = jax.vmap(partial(_cut, hyperparams, width=kind.width))(own)
        for i, count, row in zip(at, counts, accumulate((count or 1 for count in counts[:-1]), initial=0), strict=True):
            if stay:
                found[i] = Slot(table, row)
            else:
                found[i] = jax.lax.slice_in_dim(table, row, row + count) if count else jax.lax.index_in_dim(table, row, keepdims=False)
    return [found[i] for i in range(len(plan.leaves))]


def _cut(vector: Any, start: Any, width: int) -> Any:
    return jax.lax.dynamic_slice(vector, (start,), (width,))


def in_rows(plan: Plan, grads: Sequence[Any]) -> list[Any]:
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


def stepped(plan: Plan, params: Any, state: Any, vectors: Any, kept: Any, grads: list[Any], *others: Any) -> tuple[Any, ...]:
    """As `update`, of flat gradients as of `abstract`: the program of a step."""
    return update(plan, params, state, vectors, kept, in_rows(plan, grads), *others, pieces=plan.device.platform == "cpu")


def _flags(plan: Plan, masks: Sequence[Any], live: Any) -> tuple[list[Any], list[Any]]:
    """For each leaf its mask of elements, and for each pack which of its rows are updated; None where there is none."""
    at, lives, given = 0, [], iter(masks)
    for leaf in plan.leaves:
        lives.append(None if leaf.count is None else live[at : at + leaf.count])
        at += leaf.count or 0
    return [next(given) if leaf.elements else None for leaf in plan.leaves], lives


def _where_live(live: Any, new: Any, arrays: Any, scalars: Any) -> Any:
    """The new rows of a pack; those that are not `live` keep their bits."""
    chosen = lambda after, before: jnp.where(along(live, before), after, before)  # noqa: E731
    return jax.tree.map(chosen, new, (arrays[0], arrays[1], scalars[0]))


def measured(plan: Plan, grads: Any, masks: Any, live: Any, scaling: Any, measure: Any, after: Sequence[Any]) -> Any:
    """What the gradients of a plan add to a norm and a finite check that are over more: see `found_in`."""
    measure = sum((x[0].astype(jnp.float64) for x in after), start=measure)
    return found_here(plan, in_rows(plan, grads), *_flags(plan, masks, live), scaling, measure)


def found_here(plan: Plan, grads: Sequence[Any], masks: Sequence[Any], lives: Sequence[Any], scaling: Any, before: Any) -> Any:
    """As `found_in`, of the gradients of a plan that are not `far`."""
    near = [not plan.far(leaf) for leaf in plan.leaves]
    grads, masks, lives = (list(compress(x, near)) for x in (grads, masks, lives))
    return found_in(plan.clip, grads, masks, lives, scaling, before, plan.device.platform)


def abstract(plan: Plan, counted: bool = False) -> tuple[Any, ...]:
    """Shape and dtype of the arguments of `stepped`, in its order; or of one that is only to be counted."""
    sharding = jax.sharding.SingleDeviceSharding(plan.device)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
    params = [array(*leaf.buffer) for leaf in plan.leaves if leaf.inplace]
    kept = [array(*leaf.buffer) for leaf in plan.leaves if not leaf.inplace]
    own = [s for leaf in plan.leaves for s, among in zip(leaf.state, leaf.together, strict=True) if not among]
    state = [array(*s) for s in (*own, *(s for signatures in plan.shared for s in signatures))]
    scalars = [array((count,), dtype) for dtype, count in plan.scalars.items()]
    grads = []
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
    return params, state, scalars, kept, grads, masks, hyperparams, offsets, live, extra, scaling, measure, after
