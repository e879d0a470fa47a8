"""One evaluation of a transformation: from leaves, gradients and state to new leaves and state, as shaped arrays or as flat buffers."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]

from bridge._compat.types import PyTreeDef
from bridge._ir.numerics import finfo, times
from bridge._ir.rounding import nearest, stochastic_round
from bridge._ir.types import Array, PyTree
from bridge._process import x64

from .hyperparams import Scalar
from .spec import AVERAGE, GRADIENTS, KEY, MASTER, Field, Layout, Problem, Row, buffer_shape, flatten, lift, lower, unflatten
from .state_layout import layout

if TYPE_CHECKING:
    from jax.typing import ArrayLike

T_co = TypeVar("T_co", covariant=True)


class Arrays(NamedTuple, Generic[T_co]):
    """The arrays that one evaluation reads or returns: parameters, gradients, the state of each leaf, and the shared state."""

    params: Sequence[T_co]
    grads: Sequence[T_co]
    own: Sequence[Sequence[T_co]]
    shared: Sequence[T_co]


def begin(problem: Problem, values: Sequence[ArrayLike | Scalar] | Array, params: Sequence[jax.Array]) -> Arrays[jax.Array]:
    """Return the initial state of shaped leaves in the dtypes of the layout, without the leaves and without auxiliary state."""
    row, plan = problem.row, layout(problem)
    with problem.types():
        leaves = [lift(p, row) for p in params]
        state = jax.tree.leaves(row.transformation(values, problem.specs[0].dtype).init(problem.tree(leaves)))
        own, shared = _taken_out(problem, plan, state, None, [{} for _ in params])
    return Arrays([], [], own, shared)


# ------------------------------------------------------------------ the update


def evaluate(
    problem: Problem,
    arrays: Arrays[jax.Array],
    values: jax.Array,
    multipliers: Sequence[jax.Array],
    scale: jax.Array | None,
    factor: jax.Array | None,
    extra: Mapping[str, PyTree],
) -> Arrays[jax.Array]:
    """Return the new values of shaped leaves and of their state; `grads` of the result is empty.

    Args:
      update_spec: the transformation and its leaves.
      arrays: the leaves, their gradients and their state, shaped.
      values: float64, the scalars of the transformation.
      multipliers: one float64 scalar for each leaf of an optax transformation; a leaf whose scalar is 0 keeps its bits.
      scale: the factor of the gradients, or None.
      unit_factor: a traced 1.0 that keeps XLA from merging this evaluation with another, or None.
      extra: the extra arguments of the transformation.

    Raises:
      ValueError: an update does not fit its parameter, or the structure of the state changes.
    """
    row, plan = problem.row, layout(problem)
    with problem.types():
        beside = [
            {field.name: x for field, x in zip(fields, own, strict=True) if field.position is None}
            for fields, own in zip(plan.own, arrays.own, strict=True)
        ]
        wide = [_wide(p, kept, row) for p, kept in zip(arrays.params, beside, strict=True)]
        params = [times(p, factor) for p in wide]
        grads = [times(times(lift(g, row), factor), scale) for g in arrays.grads]
        state: list[jax.Array | None] = [None] * plan.structure.num_leaves
        for fields, leaf_state in zip((*plan.own, plan.shared), (*arrays.own, arrays.shared), strict=True):
            for field, x in zip(fields, leaf_state, strict=True):
                if field.position is not None:
                    if field.key is not None:
                        state[field.position] = jax.random.wrap_key_data(x, impl=field.key)
                    else:
                        state[field.position] = times(lift(x, row).astype(field.arithmetic), None if field.shape == () else factor)
        extra = {name: problem.tree(grads) if value is GRADIENTS else value for name, value in extra.items()}
        transformation = row.transformation(problem.scalars(values), problem.specs[0].dtype)
        # A user's transformation may be of any class.
        if extra and isinstance(transformation, optax.GradientTransformation):  # pyright: ignore[reportUnnecessaryIsInstance]
            transformation = optax.with_extra_args_support(transformation)  # others may take them
        update: Callable[..., tuple[PyTree, PyTree]] = transformation.update
        updates, new = update(problem.tree(grads), plan.structure.unflatten(state), problem.tree(params), **extra)
        new_state, structure = cast(tuple[list[jax.Array], PyTreeDef], jax.tree.flatten(new))
        if structure != plan.structure:
            raise ValueError(
                f"the transformation's update changes the structure of its state from {plan.structure} to {structure}. `update` must "
                "return a state like that of `init`."
            )
        moves = _moves(problem, updates, params)
        # Added to the parameter without `unit_factor`: the compiler then sees that a constant update of 0 changes nothing (optax.freeze).
        results = [_settled(row, *each, row.decay(values)) for each in zip(arrays.params, wide, moves, multipliers, beside, strict=True)]
        own, shared = _taken_out(problem, plan, new_state, arrays, [kept for _, kept in results])
    return Arrays([p for p, _ in results], [], own, shared)


def evaluate_buffers(
    problem: Problem,
    arrays: Arrays[jax.Array],
    values: jax.Array,
    multipliers: Sequence[jax.Array],
    scale: jax.Array | None,
    factor: jax.Array | None,
    extra: Mapping[str, PyTree],
) -> Arrays[jax.Array]:
    """Run `evaluate` on flat buffers and return buffers."""
    plan, specs = layout(problem), problem.specs
    shaped = Arrays(
        [unflatten(p, spec) for p, spec in zip(arrays.params, specs, strict=True)],
        [unflatten(g, spec) for g, spec in zip(arrays.grads, specs, strict=True)],
        [
            [unflatten(b, spec) if f.shape is None else b.reshape(f.shape) for f, b in zip(fields, buffers, strict=True)]
            for fields, buffers, spec in zip(plan.own, arrays.own, specs, strict=True)
        ],
        [b.reshape(f.shape) for f, b in zip(plan.shared, arrays.shared, strict=True)],
    )
    new = evaluate(problem, shaped, values, multipliers, scale, factor, extra)
    params = [flatten(p, spec) for p, spec in zip(new.params, specs, strict=True)]
    return buffered(problem, plan, new)._replace(params=params)


def _moves(problem: Problem, updates: PyTree, params: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the update of each leaf. Raise ValueError if it is missing or does not have the shape of its parameter."""
    moves: list[PyTree]
    try:
        moves = problem.leaves(updates)
    except (KeyError, TypeError, IndexError):
        moves = [None]
    for spec, p, move in zip(problem.specs, params, moves, strict=False):
        if getattr(move, "shape", None) != p.shape:
            given = "is missing" if move is None else f"has shape {getattr(move, 'shape', move)}"
            raise ValueError(
                f"the transformation's update does not fit the parameters: at {'.'.join(spec.path or ('the leaf',))} the parameter has "
                f"shape {p.shape}, but the update {given}. `update` must return a tree like the gradients'."
            )
    return moves


def _wide(p: jax.Array, beside: Mapping[str, jax.Array], row: Row) -> jax.Array:
    """Return the parameter in its compute dtype: its master weights, or its own value where it was written to since the last step."""
    if MASTER not in beside:
        return lift(p, row)
    own = lift(p, row)
    return jnp.where(nearest(beside[MASTER], p.dtype) == own, beside[MASTER], own)


def _settled(
    row: Row,
    old: jax.Array,
    p: jax.Array,
    update: jax.Array,
    multiplier: jax.Array,
    beside: Mapping[str, jax.Array],
    decay: jax.Array | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the new parameter and its auxiliary state.

    The parameter is p + multiplier * update in the dtype of `old`. With a multiplier of 0 it is `old`, whatever the update is.
    """
    kept: dict[str, jax.Array] = {}
    factor = None
    if row.scaled:
        update = update if jnp.issubdtype(update.dtype, jnp.inexact) else update.astype(p.dtype)
        factor = multiplier.astype(finfo(update.dtype).dtype)
        # With this select the compiler sees that a constant 0 (optax.set_to_zero) changes nothing, and it does not write the leaf.
        update = jnp.where(update == 0, jnp.zeros_like(update), factor * update)
    moved = p + update
    if factor is not None and MASTER in beside:
        moved = jnp.where(factor == 0, p, moved)  # the value that is stored, so that the parameter can be rounded from it
    if KEY in beside:
        new, kept[KEY] = stochastic_round(moved, old.dtype, beside[KEY]), beside[KEY] + jnp.asarray([0, 1], jnp.int32)
    else:
        new = lower(moved, old.dtype, row)
    if factor is not None:
        new = jnp.where(factor == 0, old, new)
    if MASTER in beside:
        kept[MASTER] = moved
    if AVERAGE in beside:
        assert decay is not None  # a transformation with an average has a decay
        average, trained = lift(beside[AVERAGE], row), moved if MASTER in beside else lift(new, row)
        with x64():
            share = (1 - decay).astype(finfo(average.dtype).dtype)
        kept[AVERAGE] = lower(average + share * (trained - average), beside[AVERAGE].dtype, row)
    return new, kept


def _taken_out(
    problem: Problem, plan: Layout, state: Sequence[jax.Array], like: Arrays[jax.Array] | None, beside: Sequence[Mapping[str, jax.Array]]
) -> tuple[list[list[jax.Array]], list[jax.Array]]:
    """Return the state arrays of each leaf and the shared ones, in the dtypes of `like` or else of the layout, with auxiliary state."""

    def stored(field: Field, position: int, old: object) -> jax.Array:
        x = state[position]
        return jax.random.key_data(x) if field.key is not None else lower(jnp.asarray(x), getattr(old, "dtype", field.dtype), problem.row)

    columns = (*plan.own, plan.shared)
    before = columns if like is None else (*like.own, like.shared)
    *own, shared = [
        [stored(f, f.position, old) for f, old in zip(fields, olds, strict=True) if f.position is not None]
        + [extra[f.name] for f in fields if f.position is None and f.name in extra]
        for fields, olds, extra in zip(columns, before, (*beside, {}), strict=True)
    ]
    return own, shared


def buffered(problem: Problem, plan: Layout, state: Arrays[jax.Array]) -> Arrays[jax.Array]:
    """Return the state of shaped leaves as flat buffers."""
    own = [
        [flatten(x, spec) if f.shape is None else x.reshape(buffer_shape(f, spec)) for f, x in zip(fields, leaf, strict=False)]
        for fields, leaf, spec in zip(plan.own, state.own, problem.specs, strict=True)
    ]
    return Arrays([], [], own, [x.reshape(buffer_shape(f)) for f, x in zip(plan.shared, state.shared, strict=True)])
