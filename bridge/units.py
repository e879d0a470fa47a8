"""The update of leaves that one transformation must see together, some of them rows of packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .analysis import flat_of
from .evaluate import Arrays, evaluate_buffers
from .joint import Old, Way, settled, updated
from .leaf_update import kept_in, selected_state
from .problem import Extra, Problem, layout
from .side_by_side import Slot, cut, packed

Place = tuple[int, int | None]  # of a leaf: its position among those of the plan, and its row if that is a pack


class Columns(NamedTuple):
    """Of all leaves of a plan, those of packs in rows: parameters, fields of state, gradients, masks of elements and numbers.

    The numbers of a leaf by itself may be a row of a table too, a `Slot`.
    """

    params: Sequence[Any]
    own: Sequence[Sequence[Any]]
    grads: Sequence[Any]
    masks: Sequence[Any]
    values: Sequence[Any]


def unit_update(
    problem: Problem, places: Sequence[Place], given: Columns, shared: Sequence[Any], common: Any, extra: Extra, way: Way | None
) -> tuple[list[Any], Mapping[int, tuple[Any, list[Any]]]]:
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
    of = lambda x, row: x if row is None else Slot(x, row)  # noqa: E731
    values = [of(given.values[i], row) for i, row in places]
    last = {id(x.buffer): x.buffer[:, -1] for x in values if isinstance(x, Slot)}
    multipliers = [Slot(last[id(x.buffer)], x.index) if isinstance(x, Slot) else x[-1] for x in values]
    leaves = []
    for (i, row), kinds, multiplier in zip(places, layout(problem).own, multipliers, strict=True):
        state, shaped = [of(x, row) for x in given.own[i]], [field.shape is None for field in kinds]
        leaves.append(Old(of(given.params[i], row), state, shaped, given.masks[i], multiplier))
    params = [kept_in(leaf.mask, leaf.param, problem) for leaf in leaves]
    grads = [kept_in(leaf.mask, of(given.grads[i], row), problem) for leaf, (i, row) in zip(leaves, places, strict=True)]
    state = [leaf.state for leaf in leaves]
    if any(leaf.mask is not None for leaf in leaves):
        state = selected_state(problem, [leaf.mask for leaf in leaves], list(map(cut, params)), state, cut(values[0]))
    inputs = Arrays(params, grads, state, shared), cut(values[0]), multipliers, scale, further

    def evaluated(inputs: Any) -> Arrays:
        arrays, values, multipliers, scale, further = inputs
        return evaluate_buffers(problem, arrays, values, multipliers, scale, None, extra.restored(further))

    if way is None or any(spec.order is not None for spec in problem.specs):
        new = settled(evaluated(jax.tree.map(cut, inputs)), leaves, skip)
    else:
        ready = flat_of(problem, extra) if scale is None else None
        new = updated(evaluated, inputs, leaves, ones, skip, way._replace(ready=ready))
    found: dict[int, list[tuple[int | None, list[Any]]]] = {}
    for (position, row), p, state in zip(places, new.params, new.own, strict=True):
        found.setdefault(position, []).append((row, [p, *state]))
    results = {}
    for position, rows in found.items():
        (row, arrays_of_one), *_ = rows
        if row is not None:
            columns = zip(*(arrays for _, arrays in rows), strict=True)
            old = given.params[position], *given.own[position]
            arrays_of_one = [packed([row or 0 for row, _ in rows], *each) for each in zip(columns, old, strict=True)]
        results[position] = arrays_of_one[0], arrays_of_one[1:]
    return list(map(cut, new.shared)), results
