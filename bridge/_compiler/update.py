"""The update as a function that jax traces: (params, state, grads, hyperparams) -> (params, state), for one `UpdatePlan`.

Every scalar that a user may change between steps is an element of one float64 vector, so a new value needs no compilation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.types import Array, PyTree
from bridge._memory.address_space import AddressedRows

from . import policy
from .grad_stats import broadcast_rows, clip_and_skip, grad_stats, inverse_loss_scale
from .joint_update import Columns, Way, unit_update
from .leaf_update import ONES, Common, LeafArrays, LeafScalars, NewLeaf, Passes, joined, leaf_update, parted, passes_of, unless
from .metrics import leaf_metrics
from .passes.batch_rows import Slot, Value
from .passes.kernel_class import KernelClass
from .passes.per_kind import for_each
from .plan import LeafPlan, StatsPlan, UpdateArguments, UpdatePlan, stack_grads
from .separability import is_size_independent
from .spec import TransformSpec

_traces = 0
_Result: TypeAlias = tuple[Array, Sequence[Array]]  # the new parameter of a leaf, and its state


def traces() -> int:
    """Return how often an update was traced in this process.

    Example:
      >>> import bridge
      >>> before = bridge.traces()
      >>> bridge.traces() - before
      0
    """
    return _traces


class UpdateResults(NamedTuple):
    """The results of an update.

    params, state, scalar_vectors, copied_back: the new values of the arguments of these names.
    skip_counts: the new count of skipped updates, if the loss is scaled.
    stats: the statistics of the gradients, if the program computes them for a norm.
    metrics: float64, for each parameter a row of `bridge._compiler.metrics`, if the plan has metrics.
    tokens: the completion token, a result that is never donated.
    """

    params: Sequence[Array]
    state: Sequence[Array]
    scalar_vectors: Sequence[Array]
    copied_back: Sequence[Array]
    skip_counts: Sequence[Array]
    stats: Sequence[Array]
    metrics: Sequence[Array]
    tokens: Sequence[Array]


@dataclass(frozen=True)
class _Leaves:
    """The arguments of a program by leaf, in the order of the plan.

    masks: the element mask of each leaf; None where there is none.
    row_flags: for each bucket which of its rows are updated; None for other leaves.
    shared_state: the state that belongs to no leaf, not yet divided among the joint sets.
    """

    params: list[jax.Array]
    state: list[list[jax.Array]]
    grads: Sequence[jax.Array | AddressedRows]
    masks: list[jax.Array | None]
    row_flags: list[jax.Array | None]
    shared_state: Iterator[jax.Array]


def update(
    plan: UpdatePlan,
    arguments: UpdateArguments[jax.Array],
    grads: Sequence[jax.Array | AddressedRows],
    fused: bool = True,
    is_outlined: bool = False,
) -> UpdateResults:
    """Return the results of one update.

    Args:
      plan: what the program computes.
      arguments: its arguments, of which `grads` is not used.
      grads: the gradient of each leaf, with rows for a bucket.
      fused: whether XLA is asked to fuse several results into one loop; see `bridge._xla.compile`.
      is_outlined: whether `bridge._runtime.outline` compiles parts of the program separately.
    """
    global _traces
    _traces += 1
    ones = arguments.hyperparams[:ONES]
    leaves = _by_leaf(plan, arguments, grads)
    stats = arguments.stats
    if any(plan.stats_weights):
        stats = _stats_of_leaves(StatsPlan(plan, plan.stats_weights), grads, leaves.masks, leaves.row_flags, arguments.loss_scaling, stats)
    scale, skip, skipped = clip_and_skip(plan.clip, arguments.hyperparams[ONES], arguments.loss_scaling, stats)
    common = Common(ones, scale, skip, list(arguments.extra))
    positions_by_plan = _equal_leaves(plan, leaves)
    first = [i for positions in positions_by_plan.values() for i in positions]
    values = _scalar_rows(plan, arguments.hyperparams, arguments.row_offsets, first, is_outlined)
    results = _update_separate_leaves(plan, leaves, positions_by_plan, values, common, fused)
    columns = Columns(leaves.params, leaves.state, cast(Sequence[jax.Array], grads), leaves.masks, values)
    way = Way(fused, is_outlined) if plan.device.platform == "cpu" else None
    new_shared, together = _update_joint_sets(plan, columns, leaves.shared_state, common, way)
    results |= together
    ordered = [results[i] for i in range(len(plan.leaves))]
    # jax gives each result the first unused donated buffer of its type. So the results that reuse a buffer come first, in
    # the order of their arguments, and those without a donated buffer last.
    new_params = [p for leaf, (p, _) in zip(plan.leaves, ordered, strict=True) if leaf.inplace]
    new_kept = [p for leaf, (p, _) in zip(plan.leaves, ordered, strict=True) if not leaf.inplace]
    new_state, new_vectors = _pack_state(plan, [fields for _, fields in ordered])
    metrics = [_metrics(plan, arguments, leaves, [cast(jax.Array, p) for p, _ in ordered])] if plan.has_metrics else []
    own_stats = [stats] if plan.clip and any(plan.stats_weights) else []
    token = ones[0].astype(jnp.float32)
    for event in arguments.stream_event:
        token = token + event[0]
    return UpdateResults(new_params, new_state + new_shared, new_vectors, new_kept, skipped, own_stats, metrics, [token])


def _metrics(plan: UpdatePlan, arguments: UpdateArguments[jax.Array], leaves: _Leaves, new_params: Sequence[jax.Array]) -> jax.Array:
    """Return the metrics of each parameter, float64 (parameters, 3)."""
    unscaling = inverse_loss_scale(arguments.loss_scaling) if arguments.loss_scaling else None
    starts = [0, *accumulate(leaf.rows or 1 for leaf in plan.leaves)]
    grads = cast(Sequence[jax.Array], leaves.grads)  # no gradient is addressed in a plan with metrics
    columns = zip(plan.leaves, leaves.params, new_params, grads, leaves.masks, starts, starts[1:], strict=False)
    sizes = arguments.row_sizes[0]
    found = [leaf_metrics(leaf, old, new, g, mask, sizes[start:end], unscaling) for leaf, old, new, g, mask, start, end in columns]
    return jnp.concatenate(found)


def _by_leaf(plan: UpdatePlan, arguments: UpdateArguments[jax.Array], grads: Sequence[jax.Array | AddressedRows]) -> _Leaves:
    """Return the arguments of a program by leaf."""
    donated, read, state = iter(arguments.params), iter(arguments.copied_back), iter(arguments.state)
    masks, row_flags = _row_flags(plan, arguments.masks, arguments.active_rows)
    params = [next(donated) if leaf.inplace else next(read) for leaf in plan.leaves]
    return _Leaves(params, _unpack_state(plan, state, arguments.scalar_vectors), grads, masks, row_flags, state)


def _equal_leaves(plan: UpdatePlan, leaves: _Leaves) -> dict[tuple[LeafPlan, bool], list[int]]:
    """Return the positions of the leaves outside of joint sets, by their plan and whether they have no element mask."""
    positions_by_plan: dict[tuple[LeafPlan, bool], list[int]] = {}
    for position, leaf in enumerate(plan.leaves):
        if leaf.transform.joint_set is None:
            positions_by_plan.setdefault((leaf, leaves.masks[position] is None), []).append(position)
    return positions_by_plan


def _update_separate_leaves(
    plan: UpdatePlan,
    leaves: _Leaves,
    positions_by_plan: dict[tuple[LeafPlan, bool], list[int]],
    values: Sequence[Value],
    common: Common,
    fused: bool,
) -> dict[int, _Result]:
    """Return the results of the leaves that their transformation updates one by one, by position. Equal leaves share a kernel."""
    kinds: list[KernelClass] = []
    for (leaf, _), at in positions_by_plan.items():
        problem = plan.update_spec(leaf)
        passes = _leaf_passes(plan, leaf, fused)
        parts = [
            parted(problem, leaves.params[i], leaves.state[i], leaves.grads[i], leaves.masks[i], cast(jax.Array, values[i])) for i in at
        ]
        arrays, scalars = zip(*parts, strict=True)
        kinds.append(
            KernelClass(
                leaf_update(problem, passes, plan.extra),
                arrays,
                scalars,
                leaf.rows,
                _size_class(plan, leaf, passes, len(positions_by_plan)),
            )
        )
    results: dict[int, _Result] = {}
    updated = for_each(kinds, common, plan.device.platform == "cpu")
    for kind, ((leaf, _), at), new in zip(kinds, positions_by_plan.items(), updated, strict=True):
        for i, arrays, scalars, result in zip(at, kind.arrays, kind.scalars, new, strict=True):
            flags = leaves.row_flags[i]
            new_p, *columns = result if flags is None or leaf.rows == 1 else _select_active_rows(flags, result, arrays, scalars)
            results[i] = new_p, joined(plan.update_spec(leaf), *columns)
    return results


def _update_joint_sets(
    plan: UpdatePlan, columns: Columns, states: Iterator[jax.Array], common: Common, way: Way | None
) -> tuple[list[Array], dict[int, _Result]]:
    """Return the new state that belongs to no leaf, and the results of the leaves in joint sets by position."""
    new_shared: list[Array] = []
    results: dict[int, _Result] = {}
    for (problem, places), signatures in zip(plan.joint_sets, plan.shared_signatures, strict=True):
        shared = [next(states) for _ in signatures]
        new, found = unit_update(problem, places, columns, shared, common, plan.extra, way)
        new_shared += unless(common.skip, new, shared)
        results |= found
    return new_shared, results


def _unpack_state(plan: UpdatePlan, state: Iterator[jax.Array], vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Return the state of each leaf, from the state arrays and the vectors of scalars."""
    cells = {dtype: iter(jax.lax.split(x, [1] * len(x))) for dtype, x in zip(plan.scalar_counts, vectors, strict=True)}
    return [
        [
            next(cells[dtype]).reshape(()) if among else next(state)
            for (_, dtype), among in zip(leaf.state, leaf.scalars_in_vector, strict=True)
        ]
        for leaf in plan.leaves
    ]


def _pack_state(plan: UpdatePlan, own: Sequence[Sequence[Array]]) -> tuple[list[Array], list[jax.Array]]:
    """Return the state arrays and the vectors of scalars: the inverse of `_unpack_state`."""
    arrays: list[Array] = []
    scalars: dict[str, list[Array]] = {dtype: [] for dtype in plan.scalar_counts}
    for leaf, fields in zip(plan.leaves, own, strict=True):
        for x, (_, dtype), among in zip(fields, leaf.state, leaf.scalars_in_vector, strict=True):
            (scalars[dtype] if among else arrays).append(x.reshape(1) if among else x)
    return arrays, [jnp.concatenate(column) for column in scalars.values()]


def _leaf_passes(plan: UpdatePlan, leaf: LeafPlan, fused: bool) -> Passes:
    """Return how often the transformation of a leaf is evaluated."""
    large = leaf.rows in (None, 1) and math.prod(leaf.spec.shape) >= policy.THREADING.min_large_elements
    return passes_of(plan.update_spec(leaf), plan.extra, plan.device, large, fused)


def has_loops_by_dtype(plan: UpdatePlan) -> bool:
    """Return whether some leaf computes the results of each dtype in a loop of its own, behind barriers that must survive."""
    alone = {leaf for leaf in plan.leaves if leaf.transform.joint_set is None}
    return plan.device.platform == "cpu" and any(_leaf_passes(plan, leaf, True).by_type for leaf in alone)


# From this many classes of leaves in one program on, it pays off to find out whether the size of a leaf matters, which takes two traces.
_MIN_LEAF_CLASSES = 4
_size_independent: dict[Hashable, bool] = {}


def _size_class(plan: UpdatePlan, leaf: LeafPlan, passes: Passes, kinds: int) -> Hashable:
    """Return a key that is equal for leaves with the same update. Sizes may differ if they are known not to matter."""
    size = math.prod(leaf.spec.shape)
    rule = plan.update_spec(leaf)._replace(specs=(leaf.spec._replace(shape=()),)), plan.extra
    key = rule, size if leaf.transform.is_optax else None
    if key not in _size_independent and kinds >= _MIN_LEAF_CLASSES:
        if len(_size_independent) >= 256:
            _size_independent.clear()
        _size_independent[key] = is_size_independent(leaf.transform, plan.all_paths, leaf.spec, plan.extra, (size,))
    return (
        rule,
        () if _size_independent.get(key) else leaf.spec.shape,
        tuple(dtype for _, dtype in leaf.state),
        leaf.grad_dtype_override,
        leaf.has_element_mask,
        passes,
    )


def _scalar_rows(plan: UpdatePlan, hyperparams: jax.Array, offsets: jax.Array, first: Sequence[int], is_outlined: bool) -> list[Value]:
    """Return the hyperparam scalars of each leaf; for a bucket, one row for each parameter.

    The scalars of one transformation are sliced as one table. The leaves `first` have the order in which their scalars are stacked
    again later, so that XLA reuses the table instead of computing one loop with a result for each leaf. In an outlined program, the
    scalars of a leaf in a joint set stay a row of their table.
    """
    starts = [0, *accumulate(leaf.rows or 1 for leaf in plan.leaves)]
    tables: dict[tuple[TransformSpec, bool], list[int]] = {}
    for i in (*first, *(i for i, leaf in enumerate(plan.leaves) if leaf.transform.joint_set is not None)):
        leaf = plan.leaves[i]
        tables.setdefault((leaf.transform, is_outlined and leaf.transform.joint_set is not None and leaf.rows is None), []).append(i)
    found: dict[int, Value] = {}
    for (kind, stay), at in tables.items():
        counts = [plan.leaves[i].rows for i in at]
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in at])
        # Consecutive rows are a slice of the vector; other rows need a gather, which is a loop of its own.
        in_turn = bool(np.all(np.diff(rows) == 1))
        own = offsets[rows[0] : rows[-1] + 1] if in_turn else offsets[rows]
        table = jax.vmap(partial(_slice_row, hyperparams, width=kind.num_scalars))(own)
        for i, count, row in zip(at, counts, accumulate((count or 1 for count in counts[:-1]), initial=0), strict=True):
            if stay:
                found[i] = Slot(table, row)
            else:
                found[i] = jax.lax.slice_in_dim(table, row, row + count) if count else jax.lax.index_in_dim(table, row, keepdims=False)
    return [found[i] for i in range(len(plan.leaves))]


def _slice_row(vector: jax.Array, start: jax.Array, width: int) -> jax.Array:
    return jax.lax.dynamic_slice(vector, (start,), (width,))


def update_step(plan: UpdatePlan, *arguments: PyTree) -> tuple[Sequence[Array], ...]:
    """Run `update` on arguments in the order of `UpdateArguments`: the program of a step."""
    given = UpdateArguments[jax.Array](*arguments)
    return tuple(update(plan, given, stack_grads(plan, given.grads), is_outlined=plan.device.platform == "cpu"))


def _row_flags(
    plan: UpdatePlan, masks: Sequence[jax.Array], active_rows: jax.Array
) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
    """Return for each leaf its element mask, and for each bucket which of its rows are updated; None where there is none."""
    at, given = 0, iter(masks)
    lives: list[jax.Array | None] = []
    for leaf in plan.leaves:
        lives.append(None if leaf.rows is None else active_rows[at : at + leaf.rows])
        at += leaf.rows or 0
    return [next(given) if leaf.has_element_mask else None for leaf in plan.leaves], lives


def _select_active_rows(row_flags: jax.Array, new: NewLeaf, arrays: LeafArrays, scalars: LeafScalars) -> NewLeaf:
    """Return the new rows of a bucket; rows without a flag keep their bits."""

    def chosen(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(broadcast_rows(row_flags, before), after, before)

    return jax.tree.map(chosen, new, (arrays.param, arrays.state, scalars.state))


def stats_step(
    plan: StatsPlan,
    grads: Sequence[jax.Array],
    masks: Sequence[jax.Array],
    active_rows: jax.Array,
    loss_scaling: Sequence[jax.Array],
    stats: Array,
    stream_event: Sequence[jax.Array],
) -> Array:
    """Add the statistics of a plan's gradients to those of other programs: the program of a `StatsPlan`."""
    stats = sum((x[0].astype(jnp.float64) for x in stream_event), start=stats)
    if plan.covers_found_inf and loss_scaling:
        stats = jnp.where(loss_scaling[1][0] > 0, stats + np.array([0.0, np.nan]), stats)
    stacked = stack_grads(plan.plan, grads)
    return _stats_of_leaves(plan, stacked, *_row_flags(plan.plan, masks, active_rows), loss_scaling, stats)


def _stats_of_leaves(
    plan: StatsPlan,
    grads: Sequence[jax.Array | AddressedRows],
    masks: Sequence[jax.Array | None],
    row_flags: Sequence[jax.Array | None],
    loss_scaling: Sequence[jax.Array],
    previous_stats: Array,
) -> Array:
    """Return the statistics of the gradients that have a weight, added to previous ones."""
    read = cast(list[jax.Array], list(compress(grads, plan.weights)))  # an addressed gradient has no weight: it is streamed
    weights = list(filter(None, plan.weights))
    clip, platform = plan.plan.clip, plan.plan.device.platform
    own_masks, own_flags = list(compress(masks, plan.weights)), list(compress(row_flags, plan.weights))
    return grad_stats(clip, read, weights, own_masks, own_flags, loss_scaling, previous_stats, platform)
