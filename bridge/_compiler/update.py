"""The update as a function that jax traces: (params, state, grads, hyperparams) -> (params, state), for one `UpdatePlan`.

Every scalar that a user may change between steps is an element of one float64 vector, so a new value needs no compilation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from itertools import accumulate, compress
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.types import Array
from bridge._memory.address_space import Scattered

from .chunking import LARGE
from .grad_stats import along, consequences, found_in
from .joint_update import Columns, Way, unit_update
from .leaf_update import ONES, Common, LeafArrays, LeafScalars, NewLeaf, Passes, joined, leaf_update, parted, passes_of, unless
from .passes.batch_rows import Slot, Value
from .passes.kernel_class import Alike
from .passes.per_kind import for_each
from .plan import Leaf, Plan, in_rows
from .separability import in_parts
from .spec import Row

_traces = 0
_Result: TypeAlias = tuple[Array, Sequence[Array]]  # the new parameter of a leaf, and its state


def traces() -> int:
    """Return how often an update was traced in this process."""
    return _traces


class Updated(NamedTuple):
    """The results of an update.

    params, state, scalar_vectors, copied_back: the new values of the arguments of these names.
    skip_counts: the new count of skipped updates, if the loss is scaled.
    tokens: the completion token, a result that is never donated.
    """

    params: Sequence[Array]
    state: Sequence[Array]
    vectors: Sequence[Array]
    kept: Sequence[Array]
    skipped: Sequence[Array]
    tokens: Sequence[Array]


def update(
    plan: Plan,
    params: Sequence[jax.Array],
    state: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    kept: Sequence[jax.Array],
    grads: Sequence[jax.Array | Scattered],
    masks: Sequence[jax.Array],
    hyperparams: jax.Array,
    offsets: jax.Array,
    live: jax.Array,
    extra: list[jax.Array],
    scaling: Sequence[jax.Array],
    measure: Array,
    after: Sequence[jax.Array] = (),
    fused: bool = True,
    pieces: bool = False,
) -> Updated:
    """Return the results of one update.

    The arguments after the plan are those of `abstract_args`, as a `BoundExecutable` and a step provide them, except for `grads`, which
    `stack_grads` returns.

    stream_event: zeros that exist when the program may begin.
    fused: whether XLA is asked to fuse several results into one loop; see `bridge._xla.compile`.
    is_outlined: whether `bridge._runtime.outline` compiles parts of the program separately.
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
    results: dict[int, _Result] = {}
    alike: dict[tuple[Leaf, bool], list[int]] = {}
    for position, leaf in enumerate(plan.leaves):
        if leaf.row.unit is None:
            alike.setdefault((leaf, leaf_masks[position] is None), []).append(position)
    common = Common(ones, scale, skip, extra)
    values = _values(plan, hyperparams, offsets, [i for at in alike.values() for i in at], pieces)
    kinds: list[Alike] = []
    for (leaf, _), at in alike.items():
        problem = plan.problem(leaf)
        passes = _passes(plan, leaf, fused)
        parts = [parted(problem, old_params[i], own[i], grads[i], leaf_masks[i], cast(jax.Array, values[i])) for i in at]
        arrays, scalars = zip(*parts, strict=True)
        kinds.append(Alike(leaf_update(problem, passes, plan.extra), arrays, scalars, leaf.count, _family(plan, leaf, passes, len(alike))))
    updated = for_each(kinds, common, plan.device.platform == "cpu")
    for kind, ((leaf, _), at), new in zip(kinds, alike.items(), updated, strict=True):
        for i, arrays, scalars, result in zip(at, kind.arrays, kind.scalars, new, strict=True):
            live_rows = leaf_lives[i]
            new_p, *columns = result if live_rows is None or leaf.count == 1 else _where_live(live_rows, result, arrays, scalars)
            results[i] = new_p, joined(plan.problem(leaf), *columns)
    columns, way = Columns(old_params, own, cast(Sequence[jax.Array], grads), leaf_masks, values), Way(fused, pieces)
    new_shared, together = _together(plan, columns, states, common, way if plan.device.platform == "cpu" else None)
    results |= together
    ordered = [results[i] for i in range(len(plan.leaves))]
    # jax gives each result the first unused donated buffer of its type. So the results that reuse a buffer come first, in
    # the order of their arguments, and those without a donated buffer last.
    new_params = [p for leaf, (p, _) in zip(plan.leaves, ordered, strict=True) if leaf.inplace]
    new_kept = [p for leaf, (p, _) in zip(plan.leaves, ordered, strict=True) if not leaf.inplace]
    new_state, new_vectors = _collected(plan, [fields for _, fields in ordered])
    token = sum((x[0] for x in after), start=ones[0].astype(jnp.float32))
    return Updated(new_params, new_state + new_shared, new_vectors, new_kept, skipped, [token])


def _together(
    plan: Plan, columns: Columns, states: Iterator[jax.Array], common: Common, way: Way | None
) -> tuple[list[Array], dict[int, _Result]]:
    """Return the new state that belongs to no leaf, and the results of the leaves in joint sets by position."""
    new_shared: list[Array] = []
    results: dict[int, _Result] = {}
    for (problem, places), signatures in zip(plan.units, plan.shared, strict=True):
        shared = [next(states) for _ in signatures]
        new, found = unit_update(problem, places, columns, shared, common, plan.extra, way)
        new_shared += unless(common.skip, new, shared)
        results |= found
    return new_shared, results


def _distributed(plan: Plan, state: Iterator[jax.Array], vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Return the state of each leaf, from the state arrays and the vectors of scalars."""
    cells = {dtype: iter(jax.lax.split(x, [1] * len(x))) for dtype, x in zip(plan.scalars, vectors, strict=True)}
    return [
        [next(cells[dtype]).reshape(()) if among else next(state) for (_, dtype), among in zip(leaf.state, leaf.together, strict=True)]
        for leaf in plan.leaves
    ]


def _collected(plan: Plan, own: Sequence[Sequence[Array]]) -> tuple[list[Array], list[jax.Array]]:
    """Return the state arrays and the vectors of scalars: the inverse of `_unpack_state`."""
    arrays: list[Array] = []
    scalars: dict[str, list[Array]] = {dtype: [] for dtype in plan.scalars}
    for leaf, fields in zip(plan.leaves, own, strict=True):
        for x, (_, dtype), among in zip(fields, leaf.state, leaf.together, strict=True):
            (scalars[dtype] if among else arrays).append(x.reshape(1) if among else x)
    return arrays, [jnp.concatenate(column) for column in scalars.values()]


def _passes(plan: Plan, leaf: Leaf, fused: bool) -> Passes:
    """Return how often the transformation of a leaf is evaluated."""
    large = leaf.count in (None, 1) and math.prod(leaf.spec.shape) >= LARGE
    return passes_of(plan.problem(leaf), plan.extra, plan.device, large, fused)


def by_type(plan: Plan) -> bool:
    """Return whether some leaf computes the results of each dtype in a loop of its own, behind barriers that must survive."""
    alone = {leaf for leaf in plan.leaves if leaf.row.unit is None}
    return plan.device.platform == "cpu" and any(_passes(plan, leaf, True).by_type for leaf in alone)


# From this many classes of leaves in one program on, it pays off to find out whether the size of a leaf matters, which takes two traces.
_KINDS = 4
_of_any_size: dict[Hashable, bool] = {}


def _family(plan: Plan, leaf: Leaf, passes: Passes, kinds: int) -> Hashable:
    """Return a key that is equal for leaves with the same update. Sizes may differ if they are known not to matter."""
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


def _values(plan: Plan, hyperparams: jax.Array, offsets: jax.Array, first: Sequence[int], pieces: bool) -> list[Value]:
    """Return the hyperparam scalars of each leaf; for a bucket, one row for each parameter.

    The scalars of one transformation are sliced as one table. The leaves `first` have the order in which their scalars are stacked
    again later, so that XLA reuses the table instead of computing one loop with a result for each leaf. In an outlined program, the
    scalars of a leaf in a joint set stay a row of their table.
    """
    starts = [0, *accumulate(leaf.count or 1 for leaf in plan.leaves)]
    tables: dict[tuple[Row, bool], list[int]] = {}
    for i in (*first, *(i for i, leaf in enumerate(plan.leaves) if leaf.row.unit is not None)):
        leaf = plan.leaves[i]
        tables.setdefault((leaf.row, pieces and leaf.row.unit is not None and leaf.count is None), []).append(i)
    found: dict[int, Value] = {}
    for (kind, stay), at in tables.items():
        counts = [plan.leaves[i].count for i in at]
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in at])
        # Consecutive rows are a slice of the vector; other rows need a gather, which is a loop of its own.
        in_turn = bool(np.all(np.diff(rows) == 1))
        own = offsets[rows[0] : rows[-1] + 1] if in_turn else offsets[rows]
        table = jax.vmap(partial(_cut, hyperparams, width=kind.width))(own)
        for i, count, row in zip(at, counts, accumulate((count or 1 for count in counts[:-1]), initial=0), strict=True):
            if stay:
                found[i] = Slot(table, row)
            else:
                found[i] = jax.lax.slice_in_dim(table, row, row + count) if count else jax.lax.index_in_dim(table, row, keepdims=False)
    return [found[i] for i in range(len(plan.leaves))]


def _cut(vector: jax.Array, start: jax.Array, width: int) -> jax.Array:
    return jax.lax.dynamic_slice(vector, (start,), (width,))


def stepped(
    plan: Plan,
    params: list[jax.Array],
    state: list[jax.Array],
    vectors: list[jax.Array],
    kept: list[jax.Array],
    grads: list[jax.Array],
    *others: Any,
) -> tuple[Sequence[Array], ...]:
    """Run `update` on flat gradients as `abstract_args` describes them: the program of a step."""
    return tuple(update(plan, params, state, vectors, kept, in_rows(plan, grads), *others, pieces=plan.device.platform == "cpu"))


def _flags(plan: Plan, masks: Sequence[jax.Array], live: jax.Array) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
    """Return for each leaf its element mask, and for each bucket which of its rows are updated; None where there is none."""
    at, given = 0, iter(masks)
    lives: list[jax.Array | None] = []
    for leaf in plan.leaves:
        lives.append(None if leaf.count is None else live[at : at + leaf.count])
        at += leaf.count or 0
    return [next(given) if leaf.elements else None for leaf in plan.leaves], lives


def _where_live(live: jax.Array, new: NewLeaf, arrays: LeafArrays, scalars: LeafScalars) -> NewLeaf:
    """Return the new rows of a bucket; rows without a flag keep their bits."""

    def chosen(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(along(live, before), after, before)

    return jax.tree.map(chosen, new, (arrays.param, arrays.state, scalars.state))


def measured(
    plan: Plan,
    grads: Sequence[jax.Array],
    masks: Sequence[jax.Array],
    live: jax.Array,
    scaling: Sequence[jax.Array],
    measure: Array,
    after: Sequence[jax.Array],
) -> Array:
    """Add the statistics of a plan's gradients to those of other programs; see `bridge._compiler.grad_stats`."""
    measure = sum((x[0].astype(jnp.float64) for x in after), start=measure)
    return found_here(plan, in_rows(plan, grads), *_flags(plan, masks, live), scaling, measure)


def found_here(
    plan: Plan,
    grads: Sequence[jax.Array | Scattered],
    masks: Sequence[jax.Array | None],
    lives: Sequence[jax.Array | None],
    scaling: Sequence[jax.Array],
    before: Array,
) -> Array:
    """Return the statistics of those gradients of a plan that the streaming statistics do not read, added to previous ones."""
    near = [not plan.far(leaf) for leaf in plan.leaves]
    read = cast(list[jax.Array], list(compress(grads, near)))  # the streaming statistics read all addressed gradients
    return found_in(plan.clip, read, list(compress(masks, near)), list(compress(lives, near)), scaling, before, plan.device.platform)
