"""The update of a single leaf as a function that jax traces, evaluated as often as XLA needs to write all results from one loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap, zip_longest
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp

from bridge._compat.types import Device
from bridge._ir.types import PyTree
from bridge._memory.address_space import AddressedRows
from bridge._xla import probes
from bridge._xla.multi_output_fusion import is_fusion_enabled

from .apply_transform import UpdateArrays, evaluate_buffers, init_state, to_buffers
from .passes import loop_order
from .passes.reductions import Stages
from .spec import HALF_DTYPES, ExtraArgsSpec, StateField, UpdateSpec, may_cross_elements, unflatten
from .state_layout import state_layout

# Traced 1.0s at the head of the hyperparams, one for each evaluation of a rule that must not be merged with the others.
ONES = 4

T = TypeVar("T")
NewLeaf: TypeAlias = tuple[jax.Array, list[jax.Array], list[jax.Array]]  # the parameter, the arrays of state, the scalars of state


class LeafArrays(NamedTuple):
    """The arrays that the update of one leaf reads: in a pack each has one row for each leaf."""

    param: jax.Array
    state: list[jax.Array]
    grad: jax.Array | AddressedRows
    mask: jax.Array | None


class LeafScalars(NamedTuple):
    """The scalars that the update of one leaf reads: those of its state, and the row of its hyperparams."""

    state: list[jax.Array]
    values: jax.Array


class Common(NamedTuple):
    """What the updates of all leaves read.

    ones: traced 1.0s, as of `ONES`.
    scale: what the gradients are multiplied by, or None.
    skip: whether the update is skipped, or None.
    extra: the arrays among the further arguments.
    """

    ones: jax.Array
    scale: jax.Array | None
    skip: jax.Array | None
    extra: list[jax.Array]


def parted(
    problem: UpdateSpec, p: jax.Array, state: Sequence[jax.Array], g: jax.Array | AddressedRows, mask: jax.Array | None, values: jax.Array
) -> tuple[LeafArrays, LeafScalars]:
    """What an update reads of one leaf: its arrays, and the scalars of its state with the numbers of its row."""
    fields = state_layout(problem).leaf_fields[0]
    columns = [[x for field, x in zip(fields, state, strict=True) if (field.shape == ()) is scalar] for scalar in (False, True)]
    return LeafArrays(p, columns[0], g, mask), LeafScalars(columns[1], values)


def joined(problem: UpdateSpec, arrays: Sequence[jax.Array], scalars: Sequence[jax.Array]) -> list[jax.Array]:
    """The state of a leaf in the order of its fields."""
    columns = {False: iter(arrays), True: iter(scalars)}
    return [next(columns[field.shape == ()]) for field in state_layout(problem).leaf_fields[0]]


class Passes(NamedTuple):
    """How often a rule is evaluated: once, once more for the parameter, and once more for each array of state from the second on.

    `beside`: what is kept beside the state comes with the parameter. `by_type`: results of each type in a loop of their own, as of
    `loop_order.order_loops_by_dtype`. `stored`: what is summed up is stored before, as of `bridge._compiler.passes.reductions`.
    """

    evaluations: int
    beside: bool = False
    by_type: bool = False
    stored: bool = False


ONCE, TWICE = Passes(1), Passes(2, beside=True)


def passes_of(problem: UpdateSpec, extra: ExtraArgsSpec, device: Device, large: bool, fused: bool) -> Passes:
    """Return how often the rule of a leaf is evaluated, so that its update moves few bytes.

    XLA writes several results from one loop if they have one type and share no intermediate. A leaf that keeps its shape, or is summed
    over, is evaluated once: operations across its elements store their results anyway. So is a leaf of several types whose state is one
    array, and a half leaf whose state is not: it is computed from the state that is stored. What is kept beside a half leaf comes from the
    evaluation of the leaf, which is its master rounded.

    Args:
      problem: the leaf.
      extra: the further arguments of the rule.
      device: the device of the leaf.
      large: whether the leaf is so large that results of several types are worth a loop for each type.
      fused: whether the program asks XLA for several results from one loop.
    """
    spec, fields = problem.specs[0], state_layout(problem).leaf_fields[0]
    if not (fused and is_fusion_enabled()) or not spec.is_flat or extra.leaves:
        return ONCE
    if spec.reduces_over_leaf:
        return Passes(1, stored=True)
    arrays = [field for field in fields if field.shape is None]
    kept = {field.dtype for field in arrays if field.state_index is None}
    beside = not kept <= {spec.dtype}
    apart = Passes(1 + min(len(repeatable(fields, beside)), ONES), beside)
    if all(field.dtype == spec.dtype for field in arrays):
        return apart
    is_narrow = not kept and spec.dtype in HALF_DTYPES and HALF_DTYPES.isdisjoint(field.dtype for field in arrays)
    is_once = is_narrow or len(arrays) == 1
    if large and device.platform == "cpu" and probes.barriers_survive():
        return (ONCE if is_once else apart)._replace(by_type=True)
    return ONCE if is_once else apart if spec.dtype in kept else TWICE


@functools.lru_cache(1024)
def leaf_update(problem: UpdateSpec, passes: Passes, extra: ExtraArgsSpec) -> Callable[..., NewLeaf]:
    """The update of one leaf: (arrays, scalars) as of `parted`, and what all leaves have in common, to (p, arrays, scalars)."""
    fields = state_layout(problem).leaf_fields[0]

    def leaf(arrays: LeafArrays, scalars: LeafScalars, common: Common) -> NewLeaf:
        p, g, mask, values = arrays.param, cast(jax.Array, arrays.grad), arrays.mask, scalars.values
        ones, scale, skip, further = common
        state = joined(problem, arrays.state, scalars.state)

        def evaluated(inputs: PyTree, factor: jax.Array | None = None) -> tuple[jax.Array, list[jax.Array]]:
            p, g, state, values, scale, further = inputs
            new = evaluate_buffers(
                problem, UpdateArrays([p], [g], [state], []), values, [values[-1]], scale, factor, extra.unflatten(further)
            )
            return new.params[0], list(new.leaf_state[0])

        kept = kept_in(mask, p, problem)
        (read,) = selected_state(problem, [mask], [kept], [state], values)
        inputs = kept, kept_in(mask, g, problem), read, values, scale, further
        is_summed, one = problem.specs[0].reduces_over_leaf, ones[ONES - 1] if passes.stored else None
        result = Stages(evaluated, inputs, p.size).begin(inputs, one) if is_summed else partial(evaluated, inputs)

        # With every result a function of the same loads, XLA writes them from one loop, but only if no intermediate is
        # shared between them. So results come from evaluations of their own, on inputs times traced 1.0s, which
        # nothing can fold together; the arithmetic that this repeats is free beside the memory traffic.
        new_p, new_state = result(None)
        if passes.evaluations > 1:
            new_p, other = result(ones[0])
            if passes.beside:
                new_state = [b if field.state_index is None else a for field, a, b in zip(fields, new_state, other, strict=True)]
        for nth, position in enumerate(repeatable(fields, passes.beside)):
            if 1 <= nth <= passes.evaluations - 2:
                new_state[position] = result(ones[nth])[1][position]
        if passes.evaluations > 1:  # the gradient as it is would be a copy of its own (optax.adan)
            new_state = [jnp.where(ones[0] == 1, new, old) if new is g else new for new, old in zip(new_state, state, strict=True)]
        new = (new_p, new_state) if mask is None else masked(mask, fields, (p, state), (new_p, new_state))
        new_p, new_state = unless(skip, new, (p, state))
        new_arrays, new_scalars = parted(problem, new_p, new_state, g, mask, values)
        return new_p, new_arrays.state, new_scalars.state

    count = 1 + sum(field.shape != () for field in fields)  # as `parted` has them: the parameter, then the arrays of state
    if not passes.by_type:
        return leaf
    return loop_order.order_loops_by_dtype(leaf, count, leaf_update(problem, TWICE, extra) if passes.evaluations > 1 else None)


def repeatable(fields: Sequence[StateField], beside: bool) -> list[int]:
    """The fields of the leaf's shape that may have evaluations of their own."""
    return [i for i, field in enumerate(fields) if field.shape is None and not (beside and field.state_index is None)]


def kept_in(mask: jax.Array | None, x: T, problem: UpdateSpec) -> T | jax.Array:
    """The array with 0 where the mask is False, if the transformation may look from one element to another."""
    if mask is None or not may_cross_elements(problem):
        return x
    array = cast(jax.Array, x)  # rows of packs have no masks
    return jnp.where(mask, array, jnp.zeros_like(array))


def selected_state(
    problem: UpdateSpec,
    masks: Sequence[jax.Array | None],
    params: Sequence[jax.Array],
    state: Sequence[Sequence[T]],
    values: jax.Array,
) -> Sequence[Sequence[T | jax.Array]]:
    """Return the state that an update reads: where a mask is False, what `init` gives of parameters as of `kept_in`.

    A state that begins at the parameter would else be compared with the 0 that the update sees there.
    """
    if all(mask is None for mask in masks) or not may_cross_elements(problem):
        return list(map(list, state))
    plan = state_layout(problem)
    fresh = init_state(problem, problem.as_hyperparams(values), [unflatten(p, spec) for p, spec in zip(params, problem.specs, strict=True)])
    columns = zip(plan.leaf_fields, masks, state, to_buffers(problem, plan, fresh).leaf_state, strict=True)
    return [list(starmap(partial(_begun_outside, mask), zip_longest(fields, own, begun))) for fields, mask, own, begun in columns]


def _begun_outside(mask: jax.Array | None, field: StateField, x: T, begun: jax.Array | None) -> T | jax.Array:
    if mask is None or begun is None or field.shape is not None:
        return x
    array = cast(jax.Array, x)
    return jnp.where(mask, array, begun.astype(array.dtype))


def masked(
    mask: jax.Array,
    fields: Sequence[StateField],
    old: tuple[jax.Array, Sequence[jax.Array]],
    new: tuple[jax.Array, Sequence[jax.Array]],
) -> tuple[jax.Array, list[jax.Array]]:
    """The new values where the mask is True, the old where it is False."""
    state = [
        jnp.where(mask, after, before) if field.shape is None else after
        for field, before, after in zip(fields, old[1], new[1], strict=True)
    ]
    return jnp.where(mask, new[0], old[0]), state


def unless(skip: jax.Array | None, new: T, old: T) -> T:
    """The new values, or all old ones where the update is skipped."""
    return new if skip is None else jax.tree.map(lambda after, before: jnp.where(skip, before, after), new, old)
