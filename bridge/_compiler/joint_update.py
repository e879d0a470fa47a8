"""The update of a joint set: leaves that one transformation must see together."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._ir.classify import is_broadcast
from bridge._ir.jaxpr import backward_slice, literal_value, make_slicer
from bridge._ir.types import Array, ClosedJaxpr, Jaxpr, Literal, PyTree, Var, aval_of

from . import policy
from .apply_transform import UpdateArrays, evaluate_buffers
from .leaf_update import Common, kept_in, selected_state, unless
from .passes.batch_rows import Slot, Value, buffers_of, columns_of, cut, evaluated_once, of_packs, of_parts, packed
from .passes.flatten import FlatProgram
from .passes.hoist import Rest, known, run
from .passes.kernel_class import KernelClass
from .passes.per_kind import for_each
from .separability import flat_program
from .spec import ExtraArgsSpec, UpdateSpec
from .state_layout import state_layout


class Way(NamedTuple):
    """How an update is written.

    fused: whether XLA is asked for several results from one loop.
    pieces: whether the program will be cut in pieces.
    ready: the function if it was traced before, to be used where it takes these inputs.
    """

    fused: bool
    pieces: bool
    ready: FlatProgram | None = None


class Old(NamedTuple):
    """What a leaf was: its flat array, its arrays and numbers of state, which of those have its shape, and its mask of elements or None.

    In a pack the arrays are rows. `multiplier`: its row of a column, or a number.
    """

    param: Value
    state: Sequence[Value]
    shaped: Sequence[bool]
    mask: jax.Array | None
    multiplier: Value


class _Leaf(NamedTuple):
    """The elementwise remainder of a leaf: its flat array, the old arrays by place, its mask, the function of a `KernelClass` that takes
    those, what else it reads, and its scalars. `key` is equal for leaves that differ in size only."""

    rest: Rest
    param: Value
    old: dict[int, Value]
    mask: jax.Array | None
    multiplier: Value
    function: Callable[..., list[jax.Array]]
    key: Hashable

    def arrays(self, values: Mapping[Var, Value]) -> tuple[list[Value], list[Value], jax.Array | None]:
        """What the function takes of the leaf."""
        return [self.old[at] for at in self.rest.places], [values[v] for v in self.rest.arrays], self.mask

    def pack(self, values: Mapping[Var, Value]) -> Hashable:
        """Equal for leaves whose arrays are rows of the same packs, and only those; None for other leaves."""
        buffers = buffers_of(jax.tree.leaves(self.arrays(values)))
        return None if buffers is None or self.mask is not None else (self.key, buffers)


def updated(
    function: Callable[[PyTree], UpdateArrays[jax.Array]],
    inputs: PyTree,
    old: Sequence[Old],
    ones: jax.Array,
    skip: jax.Array | None,
    way: Way,
) -> UpdateArrays[Value]:
    """The function's arrays, flat: where a mask is False, or all is skipped, the old ones; its shared state as it comes.

    Args:
      function: of `inputs`, a pytree of flat arrays and numbers.
      inputs: what it takes; rows of packs as `Slot`. So may those results be that have the shape of a leaf.
      old: the leaves.
      ones: traced 1.0s.
      skip: whether to keep everything, or None.
      way: how to write it.
    """
    given = jax.tree.leaves(inputs)
    found = way.ready if way.ready is not None and way.ready.accepts(given) else FlatProgram.trace(function, inputs)
    if found is None:  # a callback is called once
        return settled(function(jax.tree.map(cut, inputs)), old, skip)
    flat, structure = found
    jaxpr: Jaxpr = flat.jaxpr
    outvars = jaxpr.outvars
    needed, places = known(jaxpr), structure.unflatten(range(structure.num_leaves))
    leaves = _leaves(jaxpr, needed, places, old, way.fused)
    apart = {at for leaf in leaves for at in leaf.rest.places}

    once = {at: v for at, v in enumerate(outvars) if at not in apart}
    before = list(dict.fromkeys([*needed, *(v for v in once.values() if not isinstance(v, Literal))]))
    values: dict[Var, Value] = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*given, *flat.consts), strict=True))
    values |= of_packs(flat, before, values)
    values |= of_parts(flat, before, values) if way.pieces else {}
    values |= evaluated_once(flat, before, values)
    results: list[Value | None] = [None] * structure.num_leaves
    for at, v in once.items():
        results[at] = jnp.asarray(literal_value(v)) if isinstance(v, Literal) else values[v]
    results = jax.tree.leaves(settled(structure.unflatten(results), old, skip), is_leaf=lambda x: x is None)
    for at, x in _rests(flat, leaves, values, (ones, skip), way.pieces):
        results[at] = x
    return structure.unflatten(results)


def _leaves(jaxpr: Jaxpr, needed: Sequence[Var], places: UpdateArrays[int], old: Sequence[Old], fused: bool) -> list[_Leaf]:
    """The leaves of which something is left to evaluate."""
    behind, is_known = make_slicer(jaxpr.eqns), set(needed)
    found: list[_Leaf] = []
    for leaf, p, own in zip(old, places.params, places.leaf_state, strict=True):
        shaped = {p: leaf.param} | {at: x for at, x, like in zip(own, leaf.state, leaf.shaped, strict=True) if like}
        (size,) = leaf.param.shape
        rest = Rest.of(behind, is_known, [(at, jaxpr.outvars[at]) for at in shaped], size)
        if rest is not None:
            elements = leaf.param.buffer.size if isinstance(leaf.param, Slot) else size
            apart = fused and elements >= _LARGE and not any(jnp.issubdtype(aval_of(v).dtype, jnp.complexfloating) for v in rest.arrays)
            groups = _groups(rest) if apart else [list(range(len(rest.results)))]
            found.append(
                _Leaf(rest, leaf.param, shaped, leaf.mask, leaf.multiplier, _evaluated(rest, groups), (rest.text((size,)), str(groups)))
            )
    return found


def _rests(
    flat: ClosedJaxpr, leaves: Sequence[_Leaf], values: Mapping[Var, Value], common: tuple[jax.Array, jax.Array | None], pieces: bool
) -> Iterator[tuple[int, Value]]:
    """The results of all leaves, each with its place: those of equal ones from one function, those of a whole pack from one loop."""

    def home(leaf: _Leaf) -> int:
        return id(leaf.param.buffer if isinstance(leaf.param, Slot) else leaf.param)

    seen: dict[int, set[Hashable]] = {}
    for leaf in leaves:
        seen.setdefault(home(leaf), set()).add(leaf.pack(values))
    kinds: dict[tuple[bool, Hashable], list[_Leaf]] = {}
    for leaf in leaves:
        pack = leaf.pack(values)
        side_by_side = pack is not None and seen[home(leaf)] == {pack}
        kinds.setdefault((side_by_side, pack if side_by_side else (leaf.key, leaf.param.shape, leaf.mask is None)), []).append(leaf)
    least = (
        policy.CHUNKING.min_equal_leaves(sum(1 if side_by_side else len(members) for (side_by_side, _), members in kinds.items()))
        if pieces
        else math.inf
    )
    alike: list[KernelClass] = []
    for (side_by_side, _), members in kinds.items():
        parts = not side_by_side and len(members) >= least
        alike.append(_alike(flat, members, values, side_by_side, parts))
    for ((side_by_side, _), members), found in zip(kinds.items(), for_each(alike, common), strict=True):
        if side_by_side:
            rows = [cast(Slot, leaf.param).index for leaf in members]
            buffers = [cast(Slot, x).buffer for x in members[0].arrays(values)[0]]
            live = np.isin(np.arange(len(buffers[0])), rows)[:, None]
            new = [x if live.all() else jnp.where(live, x, old) for x, old in zip(found[0], buffers, strict=True)]
            found = [[Slot(x, row) for x in new] for row in rows]
        for leaf, arrays in zip(members, found, strict=True):
            yield from zip(leaf.rest.places, arrays, strict=True)


def _alike(flat: ClosedJaxpr, members: Sequence[_Leaf], values: Mapping[Var, Value], side_by_side: bool, parts: bool) -> KernelClass:
    """Leaves of one function; `side_by_side`: as the rows of one pack; `parts`: each is a part of the program."""
    first, arrays = members[0], [leaf.arrays(values) for leaf in members]
    family = "joint", first.key, first.mask is None
    if not side_by_side and not parts:
        numbers = [[cut(values[v]) for v in leaf.rest.numbers] for leaf in members]
        return KernelClass(first.function, jax.tree.map(cut, arrays), numbers, size_class=family)
    if parts:
        columns, at = _columns(flat, members, values)
        return KernelClass(first.function, jax.tree.map(cut, arrays), [columns], size_class=family, table_rows=at)
    multipliers = [cast(Slot, leaf.multiplier) for leaf in members]
    rows, count = [multiplier.index for multiplier in multipliers], len(multipliers[0].buffer)
    columns = columns_of(flat, rows, [leaf.rest.numbers for leaf in members], values, count)
    return KernelClass(first.function, [jax.tree.map(lambda x: x.buffer, arrays[0])], [columns], count, family)


def _columns(flat: ClosedJaxpr, members: Sequence[_Leaf], values: Mapping[Var, Value]) -> tuple[list[Array], list[int]]:
    """Return the numbers that the leaves read, as columns, and the row of each leaf in them.

    Each bucket has a table of its own for its multipliers, and the leaves outside buckets share one. A row index means one leaf only
    within one table, so the columns of several tables are concatenated.
    """
    multipliers = [cast(Slot, leaf.multiplier) for leaf in members]
    tables: dict[int, list[tuple[_Leaf, Slot]]] = {}
    for leaf, multiplier in zip(members, multipliers, strict=True):
        tables.setdefault(id(multiplier.buffer), []).append((leaf, multiplier))
    starts: dict[int, int] = {}
    parts: list[list[Array]] = []
    height = 0
    for key, own in tables.items():
        rows, count = [multiplier.index for _, multiplier in own], len(own[0][1].buffer)
        parts.append(columns_of(flat, rows, [leaf.rest.numbers for leaf, _ in own], values, count))
        starts[key], height = height, height + count
    columns: list[Array] = parts[0] if len(parts) == 1 else [jnp.concatenate(each) for each in zip(*parts, strict=True)]
    return columns, [starts[id(multiplier.buffer)] + multiplier.index for multiplier in multipliers]


def settled(new: UpdateArrays[Value], old: Sequence[Old], skip: jax.Array | None) -> UpdateArrays[Value]:
    """The new parameters and state where they are to be taken, those that are there."""

    def one(mask: jax.Array | None, after: Value, before: Value) -> Value:
        if after is None or after is before:
            return after
        new, old = cut(after), cut(before)
        return unless(skip, new if mask is None else jnp.where(mask, new, old), old)

    params = [one(leaf.mask, p, leaf.param) for leaf, p in zip(old, new.params, strict=True)]
    own = [
        [one(leaf.mask if like else None, *each) for like, *each in zip(leaf.shaped, state, leaf.state, strict=True)]
        for leaf, state in zip(old, new.leaf_state, strict=True)
    ]
    return new._replace(params=params, leaf_state=own)


# ------------------------------------------------------------------ the rest of a leaf


def _groups(rest: Rest) -> list[list[int]]:
    """Which results are evaluated together: those that share nothing which is computed from arrays, the parameter last."""
    groups: list[tuple[set[Var], list[int]]] = []
    for i in (*range(1, len(rest.results)), 0):
        own = {
            v
            for eqn in backward_slice(rest.eqns, [rest.results[i]])
            if not is_broadcast(eqn, aval_of(eqn.outvars[0]).size)
            for v in eqn.outvars
        }
        free = next((group for group in groups if own.isdisjoint(group[0])), None)
        if free is None and len(groups) < _EVALUATIONS:
            groups.append(free := (set(), []))
        taken, members = groups[-1] if free is None else free
        taken.update(own)
        members.append(i)
    return [members for _, members in groups]


_LARGE = 1 << 14  # elements; fewer are evaluated once, since each evaluation is compiled: 300 small leaves took 10 s at first, then 7
_EVALUATIONS = 4  # the first as it is, each other times a traced 1.0 of its own


def _evaluated(rest: Rest, groups: Sequence[list[int]]) -> Callable[..., list[jax.Array]]:
    """The function of a leaf: see `_Leaf`."""
    parts = [(group, backward_slice(rest.eqns, [rest.results[i] for i in group])) for group in groups]

    def leaf(
        given: tuple[list[jax.Array], list[jax.Array], jax.Array | None],
        own: list[jax.Array],
        common: tuple[jax.Array, jax.Array | None],
    ) -> list[jax.Array]:
        (old, read, mask), (ones, skip) = given, common
        new = list(old)
        for nth, (group, eqns) in enumerate(parts):
            arrays, numbers = dict(zip(rest.arrays, read, strict=True)), dict(zip(rest.numbers, own, strict=True))
            values = run(eqns, arrays, numbers, ones[nth - 1] if nth else None)
            for i in group:
                x = values[rest.results[i]]
                new[i] = x if mask is None else jnp.where(mask, x, old[i])
        return unless(skip, new, old)

    return leaf


Place = tuple[int, int | None]  # of a leaf: its position among those of the plan, and its row if that is a pack


class Columns(NamedTuple):
    """Of all leaves of a plan, those of packs in rows: parameters, fields of state, gradients, masks of elements and numbers.

    The numbers of a leaf by itself may be a row of a table too, a `Slot`.
    """

    params: Sequence[jax.Array]
    own: Sequence[Sequence[jax.Array]]
    grads: Sequence[jax.Array]
    masks: Sequence[jax.Array | None]
    values: Sequence[Value]


def unit_update(
    problem: UpdateSpec,
    places: Sequence[Place],
    given: Columns,
    shared: Sequence[jax.Array],
    common: Common,
    extra: ExtraArgsSpec,
    way: Way | None,
) -> tuple[list[Array], Mapping[int, tuple[Array, list[Array]]]]:
    """The new shared state, and by position new parameters and state.

    Args:
      problem: the leaves.
      places: of each leaf.
      given: of all leaves of the plan.
      shared: the state that belongs to no leaf.
      common: ones, scale, skip, and the arrays among the `extra` arguments.
      way: how to write the update for flat leaves, cut where it looks across elements; but where that is None, or a leaf lies in another
        order of dimensions, it is evaluated in the shapes of the leaves.
    """
    ones, scale, skip, further = common

    def of(x: jax.Array, row: int | None) -> Value:
        return x if row is None else Slot(x, row)

    values = [of(cast(jax.Array, given.values[i]), row) for i, row in places]
    last = {id(x.buffer): x.buffer[:, -1] for x in values if isinstance(x, Slot)}
    multipliers = [Slot(last[id(x.buffer)], x.index) if isinstance(x, Slot) else x[-1] for x in values]
    leaves: list[Old] = []
    for (i, row), kinds, multiplier in zip(places, state_layout(problem).leaf_fields, multipliers, strict=True):
        state, shaped = [of(x, row) for x in given.own[i]], [field.shape is None for field in kinds]
        leaves.append(Old(of(given.params[i], row), state, shaped, given.masks[i], multiplier))
    params = [kept_in(leaf.mask, leaf.param, problem) for leaf in leaves]
    grads = [kept_in(leaf.mask, of(given.grads[i], row), problem) for leaf, (i, row) in zip(leaves, places, strict=True)]
    state = [leaf.state for leaf in leaves]
    if any(leaf.mask is not None for leaf in leaves):
        state = selected_state(problem, [leaf.mask for leaf in leaves], list(map(cut, params)), state, cut(values[0]))
    inputs = UpdateArrays(params, grads, state, shared), cut(values[0]), multipliers, scale, further

    def evaluated(inputs: PyTree) -> UpdateArrays[jax.Array]:
        arrays, values, multipliers, scale, further = inputs
        return evaluate_buffers(problem, arrays, values, multipliers, scale, None, extra.unflatten(further))

    if way is None or any(spec.dim_order is not None for spec in problem.specs):
        new = settled(evaluated(jax.tree.map(cut, inputs)), leaves, skip)
    else:
        ready = flat_program(problem, extra) if scale is None else None
        new = updated(evaluated, inputs, leaves, ones, skip, way._replace(ready=ready))
    found: dict[int, list[tuple[int | None, list[Value]]]] = {}
    for (position, row), p, state in zip(places, new.params, new.leaf_state, strict=True):
        found.setdefault(position, []).append((row, [p, *state]))
    results = {}
    for position, rows in found.items():
        (row, arrays_of_one), *_ = rows
        if row is not None:
            columns = zip(*(arrays for _, arrays in rows), strict=True)
            old = given.params[position], *given.own[position]
            arrays_of_one = [packed([row or 0 for row, _ in rows], *each) for each in zip(columns, old, strict=True)]
        results[position] = arrays_of_one[0], arrays_of_one[1:]
    return list(map(cut, new.shared_state)), results
