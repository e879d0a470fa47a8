"""One evaluation of a transformation: from leaves, gradients and state to new leaves and state, as shaped arrays or as flat buffers."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]

from bridge._compat.types import PyTreeDef
from bridge._ir.numerics import finfo, scale_floating
from bridge._ir.rounding import round_to_nearest, stochastic_round
from bridge._ir.types import Array, PyTree
from bridge._process import x64

from .hyperparams import TracedHyperparam
from .spec import (
    EMA_PARAM,
    GRADS_PLACEHOLDER,
    MASTER_PARAM,
    ROUNDING_KEY,
    StateField,
    StateLayout,
    TransformSpec,
    UpdateSpec,
    buffer_shape,
    flatten,
    to_compute_dtype,
    to_storage_dtype,
    unflatten,
)
from .state_layout import state_layout

if TYPE_CHECKING:
    from jax.typing import ArrayLike

T_co = TypeVar("T_co", covariant=True)


class UpdateArrays(NamedTuple, Generic[T_co]):
    """The arrays that one evaluation reads or returns: parameters, gradients, the state of each leaf, and the shared state."""

    params: Sequence[T_co]
    grads: Sequence[T_co]
    leaf_state: Sequence[Sequence[T_co]]
    shared_state: Sequence[T_co]


def init_state(
    update_spec: UpdateSpec, values: Sequence[ArrayLike | TracedHyperparam] | Array, params: Sequence[jax.Array]
) -> UpdateArrays[jax.Array]:
    """Return the initial state of shaped leaves in the dtypes of the layout, without the leaves and without auxiliary state."""
    row, layout = update_spec.transform, state_layout(update_spec)
    with update_spec.dtype_context():
        leaves = [to_compute_dtype(p, row) for p in params]
        state = jax.tree.leaves(row.build(values, update_spec.specs[0].dtype).init(update_spec.to_tree(leaves)))
        own, shared = _split_state(update_spec, layout, state, None, [{} for _ in params])
    return UpdateArrays([], [], own, shared)


# ------------------------------------------------------------------ the update


def evaluate(
    update_spec: UpdateSpec,
    arrays: UpdateArrays[jax.Array],
    values: jax.Array,
    multipliers: Sequence[jax.Array],
    scale: jax.Array | None,
    unit_factor: jax.Array | None,
    extra: Mapping[str, PyTree],
) -> UpdateArrays[jax.Array]:
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
      TypeError: integers or bools of the state become floating.
    """
    row, layout = update_spec.transform, state_layout(update_spec)
    with update_spec.dtype_context():
        aux_state = [
            {field.name: x for field, x in zip(fields, own, strict=True) if field.state_index is None}
            for fields, own in zip(layout.leaf_fields, arrays.leaf_state, strict=True)
        ]
        compute_params = [_compute_param(p, kept, row) for p, kept in zip(arrays.params, aux_state, strict=True)]
        params = [scale_floating(p, unit_factor) for p in compute_params]
        grads = [scale_floating(scale_floating(to_compute_dtype(g, row), unit_factor), scale) for g in arrays.grads]
        state: list[jax.Array | None] = [None] * layout.treedef.num_leaves
        for fields, leaf_state in zip((*layout.leaf_fields, layout.shared_fields), (*arrays.leaf_state, arrays.shared_state), strict=True):
            for field, x in zip(fields, leaf_state, strict=True):
                if field.state_index is not None:
                    if field.key_impl is not None:
                        state[field.state_index] = jax.random.wrap_key_data(x, impl=field.key_impl)
                    else:
                        state[field.state_index] = scale_floating(
                            to_compute_dtype(x, row).astype(field.compute_dtype), None if field.shape == () else unit_factor
                        )
        extra = {name: update_spec.to_tree(grads) if value is GRADS_PLACEHOLDER else value for name, value in extra.items()}
        transformation = row.build(update_spec.as_hyperparams(values), update_spec.specs[0].dtype)
        # A user's transformation may be of any class.
        if extra and isinstance(transformation, optax.GradientTransformation):  # pyright: ignore[reportUnnecessaryIsInstance]
            transformation = optax.with_extra_args_support(transformation)  # others may take them
        update: Callable[..., tuple[PyTree, PyTree]] = transformation.update
        updates, new = update(update_spec.to_tree(grads), layout.treedef.unflatten(state), update_spec.to_tree(params), **extra)
        new_state, structure = cast(tuple[list[jax.Array], PyTreeDef], jax.tree.flatten(new))
        if structure != layout.treedef:
            raise ValueError(
                f"the transformation's update changes the structure of its state from {layout.treedef} to {structure}. `update` must "
                "return a state like that of `init`."
            )
        _check_state_kinds(layout, new_state)
        moves = _check_updates(update_spec, updates, params)
        # Added to the parameter without `unit_factor`: the compiler then sees that a constant update of 0 changes nothing (optax.freeze).
        results = [
            _apply_update(row, *each, row.ema_decay(values))
            for each in zip(arrays.params, compute_params, moves, multipliers, aux_state, strict=True)
        ]
        own, shared = _split_state(update_spec, layout, new_state, arrays, [kept for _, kept in results])
    return UpdateArrays([p for p, _ in results], [], own, shared)


def evaluate_buffers(
    update_spec: UpdateSpec,
    arrays: UpdateArrays[jax.Array],
    values: jax.Array,
    multipliers: Sequence[jax.Array],
    scale: jax.Array | None,
    unit_factor: jax.Array | None,
    extra: Mapping[str, PyTree],
) -> UpdateArrays[jax.Array]:
    """Run `evaluate` on flat buffers and return buffers."""
    layout, specs = state_layout(update_spec), update_spec.specs
    shaped = UpdateArrays(
        [unflatten(p, spec) for p, spec in zip(arrays.params, specs, strict=True)],
        [unflatten(g, spec) for g, spec in zip(arrays.grads, specs, strict=True)],
        [
            [unflatten(b, spec) if f.shape is None else b.reshape(f.shape) for f, b in zip(fields, buffers, strict=True)]
            for fields, buffers, spec in zip(layout.leaf_fields, arrays.leaf_state, specs, strict=True)
        ],
        [b.reshape(f.shape) for f, b in zip(layout.shared_fields, arrays.shared_state, strict=True)],
    )
    new = evaluate(update_spec, shaped, values, multipliers, scale, unit_factor, extra)
    params = [flatten(p, spec) for p, spec in zip(new.params, specs, strict=True)]
    return to_buffers(update_spec, layout, new)._replace(params=params)


def _check_state_kinds(layout: StateLayout, state: Sequence[jax.Array]) -> None:
    """Raise TypeError if state that is stored as integers or bools becomes floating, because it would be cut off."""
    for field in (*itertools.chain.from_iterable(layout.leaf_fields), *layout.shared_fields):
        if field.state_index is None or field.key_impl is not None or jnp.issubdtype(field.dtype, jnp.inexact):
            continue
        dtype = jnp.result_type(state[field.state_index])
        if jnp.issubdtype(dtype, jnp.inexact):
            name = f" {field.name!r}" if field.name else ""
            raise TypeError(
                f"the transformation's state{name} is {field.dtype} after `init` and {dtype} after `update`; expected one kind. "
                f"Let `init` make it floating, or `update` return {field.dtype}."
            )


def _check_updates(problem: UpdateSpec, updates: PyTree, params: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the update of each leaf. Raise ValueError if it is missing or does not have the shape of its parameter."""
    moves: list[PyTree]
    try:
        moves = problem.from_tree(updates)
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


def _compute_param(p: jax.Array, aux_state: Mapping[str, jax.Array], row: TransformSpec) -> jax.Array:
    """Return the parameter in its compute dtype: its master weights, or its own value where it was written to since the last step."""
    if MASTER_PARAM not in aux_state:
        return to_compute_dtype(p, row)
    own = to_compute_dtype(p, row)
    return jnp.where(round_to_nearest(aux_state[MASTER_PARAM], p.dtype) == own, aux_state[MASTER_PARAM], own)


def _apply_update(
    row: TransformSpec,
    old: jax.Array,
    p: jax.Array,
    update: jax.Array,
    multiplier: jax.Array,
    aux_state: Mapping[str, jax.Array],
    decay: jax.Array | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the new parameter and its auxiliary state.

    The parameter is p + multiplier * update in the dtype of `old`. With a multiplier of 0 it is `old`, whatever the update is.
    """
    kept: dict[str, jax.Array] = {}
    factor = None
    if row.is_optax:
        update = update if jnp.issubdtype(update.dtype, jnp.inexact) else update.astype(p.dtype)
        factor = multiplier.astype(finfo(update.dtype).dtype)
        # With this select the compiler sees that a constant 0 (optax.set_to_zero) changes nothing, and it does not write the leaf.
        update = jnp.where(update == 0, jnp.zeros_like(update), factor * update)
    moved = p + update
    if factor is not None and MASTER_PARAM in aux_state:
        moved = jnp.where(factor == 0, p, moved)  # the value that is stored, so that the parameter can be rounded from it
    if ROUNDING_KEY in aux_state:
        new, kept[ROUNDING_KEY] = (
            stochastic_round(moved, old.dtype, aux_state[ROUNDING_KEY]),
            aux_state[ROUNDING_KEY] + jnp.asarray([0, 1], jnp.int32),
        )
    else:
        new = to_storage_dtype(moved, old.dtype, row)
    if factor is not None:
        new = jnp.where(factor == 0, old, new)
    if MASTER_PARAM in aux_state:
        kept[MASTER_PARAM] = moved
    if EMA_PARAM in aux_state:
        assert decay is not None  # a transformation with an average has a decay
        average, trained = to_compute_dtype(aux_state[EMA_PARAM], row), moved if MASTER_PARAM in aux_state else to_compute_dtype(new, row)
        with x64():
            share = (1 - decay).astype(finfo(average.dtype).dtype)
        kept[EMA_PARAM] = to_storage_dtype(average + share * (trained - average), aux_state[EMA_PARAM].dtype, row)
    return new, kept


def _split_state(
    problem: UpdateSpec,
    layout: StateLayout,
    state: Sequence[jax.Array],
    like: UpdateArrays[jax.Array] | None,
    aux_state: Sequence[Mapping[str, jax.Array]],
) -> tuple[list[list[jax.Array]], list[jax.Array]]:
    """Return the state arrays of each leaf and the shared ones, in the dtypes of `like` or else of the layout, with auxiliary state."""

    def stored(field: StateField, position: int, old: object) -> jax.Array:
        x = state[position]
        return (
            jax.random.key_data(x)
            if field.key_impl is not None
            else to_storage_dtype(jnp.asarray(x), getattr(old, "dtype", field.dtype), problem.transform)
        )

    columns = (*layout.leaf_fields, layout.shared_fields)
    before = columns if like is None else (*like.leaf_state, like.shared_state)
    *own, shared = [
        [stored(f, f.state_index, old) for f, old in zip(fields, olds, strict=True) if f.state_index is not None]
        + [extra[f.name] for f in fields if f.state_index is None and f.name in extra]
        for fields, olds, extra in zip(columns, before, (*aux_state, {}), strict=True)
    ]
    return own, shared


def to_buffers(update_spec: UpdateSpec, layout: StateLayout, state: UpdateArrays[jax.Array]) -> UpdateArrays[jax.Array]:
    """Return the state of shaped leaves as flat buffers."""
    own = [
        [flatten(x, spec) if f.shape is None else x.reshape(buffer_shape(f, spec)) for f, x in zip(fields, leaf, strict=False)]
        for fields, leaf, spec in zip(layout.leaf_fields, state.leaf_state, update_spec.specs, strict=True)
    ]
    return UpdateArrays([], [], own, [x.reshape(buffer_shape(f)) for f, x in zip(layout.shared_fields, state.shared_state, strict=True)])
