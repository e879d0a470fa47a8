"""optax's masking transformations, with selectors in place of pytrees of bools and labels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import KeyPath
from jax.typing import ArrayLike
from optax import (
    EmptyState,
    GradientTransformation,
    GradientTransformationExtraArgs,
    MaskedNode,
    MaskedState,
    PartitionState,
    identity,
    set_to_zero,
    stateless,
    stateless_with_tree_map,
    tree_map_params,
    with_extra_args_support,
)
from optax.schedules import StatefulSchedule

from bridge._interop.flax_serialization import register_with_flax
from bridge._ir.types import PyTree
from bridge._names import did_you_mean, path_name

from .selectors import Selector, required_arguments, resolve_labels, resolve_mask

__all__ = [
    "EmptyState",
    "GradientTransformation",
    "GradientTransformationExtraArgs",
    "MaskedNode",
    "MaskedState",
    "PartitionState",
    "ResolvedState",
    "StatefulSchedule",
    "freeze",
    "identity",
    "masked",
    "partition",
    "select",
    "set_to_zero",
    "stateless",
    "stateless_with_tree_map",
    "tree_map_params",
    "with_extra_args_support",
]


_ABSENT = jax.ShapeDtypeStruct((), np.float32)  # in place of None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["elements"], meta_fields=["by_path"])
@dataclasses.dataclass(frozen=True)
class Labels:
    """The label of each leaf by its key path. Labels are static: jit reads them while it traces, and traces again for others.

    `elements` holds a boolean array for each leaf of which only some elements are trained.
    """

    by_path: tuple[tuple[str, Hashable], ...]
    elements: dict[str, jax.Array]


class ResolvedState(NamedTuple):
    """The state of `select`, `freeze` and `partition`.

    Args:
      inner_state: optax's own `PartitionState`.
      labels: the labels that `init` has resolved, which jit sees as static.

    Example:
      >>> import bridge, jax.numpy as jnp, optax
      >>> state = bridge.select(optax.sgd(0.1), "w").init({"w": jnp.ones(1), "b": jnp.ones(1)})
      >>> state.labels.by_path
      (("['b']", 'frozen'), ("['w']", 'trained'))
    """

    inner_state: optax.OptState
    labels: Any


def masked(inner: GradientTransformation, mask: PyTree, *, mask_compatible_extra_args: bool = False) -> GradientTransformationExtraArgs:
    """`optax.masked`: where the mask is False, the RAW GRADIENT passes through as the update.

    Only here does False have this meaning, which is optax's. Use `masked` for one transformation of a chain, such as weight decay on some
    leaves. To leave parameters unchanged, use `select` or `freeze`.

    Args:
      inner: the transformation for leaves with True. Only these leaves have state.
      mask: a pytree of bools over the parameters, a prefix of one, or a function from the parameters to one; not a selector. A callable
        pytree (an Equinox module) is a mask if it holds a bool, else a function. optax differs: it takes a module without leaves,
        or with numbers only, for a mask that does not fit.
      mask_compatible_extra_args: whether to mask extra args that have the structure of the updates too.

    Source: https://github.com/google-deepmind/optax/blob/v0.2.8/optax/transforms/_masking.py

    Example:
      >>> import bridge, jax.numpy as jnp, optax
      >>> tx = bridge.masked(optax.sgd(0.5), {"w": True, "b": False})
      >>> params = grads = {"w": jnp.ones(1), "b": jnp.ones(1)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates
      {'b': Array([1.], dtype=float32), 'w': Array([-0.5], dtype=float32)}
    """
    return optax.masked(inner, _as_tree_or_function(mask, _is_bool), mask_compatible_extra_args=mask_compatible_extra_args)


def select(tx: GradientTransformation, mask: Selector, *, mask_compatible_extra_args: bool = False) -> GradientTransformationExtraArgs:
    """Optimize with `tx` where the mask is True. Elsewhere the update is exactly zero, even for a gradient of NaN.

    A leaf with False has no state and does not count in norms of `tx`, and its gradient is not read. A mask value may also be a boolean
    array of the leaf's shape: False elements then reach `tx` as zero gradients and get a zero update. State is allocated for the whole
    leaf, and the array is kept in the state.

    Args:
      tx: any optax transformation. Extra args are passed on to it.
      mask: any selector (docs/selectors.md), True = optimized. It is resolved when `init` receives the parameters, which may be tracers.
      mask_compatible_extra_args: whether to hide frozen leaves of extra args that have the structure of the updates too.

    Raises:
      ValueError, TypeError: from `init`, as `bridge.resolve_mask`; from `update`, for a leaf that `init` did not see.

    Differs from `optax.transforms.selective_transform`: True means optimized, `mask` is a selector that is resolved once, and extra
    args are passed on.

    Example:
      >>> import bridge, jax.numpy as jnp, optax
      >>> tx = bridge.select(optax.sgd(0.5), "w")
      >>> params = grads = {"w": jnp.ones(1), "b": jnp.ones(1)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates
      {'b': Array([0.], dtype=float32), 'w': Array([-0.5], dtype=float32)}
    """

    def resolve(params: optax.Params) -> PyTree:
        return jax.tree.map(_label_of_mask_value, _resolve_mask_tree(mask, params))

    return _resolved_partition({"trained": tx, "frozen": set_to_zero()}, resolve, mask_compatible_extra_args)


def freeze(*, frozen: Selector) -> GradientTransformationExtraArgs:
    """Set updates to zero where `frozen` is True, and leave others unchanged. The only state is the resolved selector.

    As the last transformation of a chain it freezes parameters, but those before it still have state and read gradients. `select` avoids
    both.

    Args:
      frozen: any selector (docs/selectors.md), True = frozen. It is resolved when `init` receives the parameters.

    Raises:
      TypeError: `frozen` is None: a selector None means all leaves, and `frozen=None` looks like none. Otherwise as `select`.

    Differs from `optax.transforms.freeze(mask)`: the argument's name says what True means, and it is a selector that is resolved once.

    Example:
      >>> import bridge, jax.numpy as jnp, optax
      >>> tx = optax.chain(optax.sgd(0.5), bridge.freeze(frozen="b"))
      >>> params = grads = {"w": jnp.ones(1), "b": jnp.ones(1)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates
      {'b': Array([0.], dtype=float32), 'w': Array([-0.5], dtype=float32)}
    """
    if frozen is None:
        raise TypeError("freeze: frozen=None says neither all nor nothing. Use True to freeze every leaf, False to freeze none.")

    def resolve(params: optax.Params) -> PyTree:
        return jax.tree.map(lambda value: _label_of_mask_value(np.logical_not(value)), _resolve_mask_tree(frozen, params))

    return _resolved_partition({"trained": identity(), "frozen": set_to_zero()}, resolve)


def partition(
    transforms: Mapping[Any, GradientTransformation], param_labels: Selector, *, mask_compatible_extra_args: bool = False
) -> GradientTransformationExtraArgs:
    """`optax.partition` with labels from any selector. They are resolved once, when `init` receives the parameters, and checked.

    Args:
      transforms: label -> transformation. Labels have one type that sorts, such as str.
      param_labels: a pytree of labels over the parameters, a prefix of one (one label serves all), a function from the parameters to one,
        a callable pytree that holds labels (an Equinox module), or any other selector (docs/selectors.md).
      mask_compatible_extra_args: as in `optax.partition`.

    Raises:
      TypeError: the labels cannot be keys of one pytree.
      ValueError: from `init`: a leaf without a label, a label without a transformation, or a transformation without a leaf. The
        text names the label, the leaf and the nearest known labels. From `update`: a leaf that `init` did not see.

    Source: https://github.com/google-deepmind/optax/blob/v0.2.8/optax/transforms/_combining.py

    Example:
      >>> import bridge, jax.numpy as jnp, optax
      >>> tx = bridge.partition({"a": optax.sgd(0.5), "z": optax.sgd(0.25)}, {"w": "a", "b": "z"})
      >>> params = grads = {"w": jnp.ones(1), "b": jnp.ones(1)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates
      {'b': Array([-0.25], dtype=float32), 'w': Array([-0.5], dtype=float32)}
    """
    _check_keys(transforms)
    return _resolved_partition(transforms, lambda params: _resolve_label_tree(param_labels, params, transforms), mask_compatible_extra_args)


def _resolved_partition(
    transforms: Mapping[Any, GradientTransformation], resolve: Callable[[optax.Params], PyTree], mask_compatible_extra_args: bool = False
) -> GradientTransformationExtraArgs:
    """Return an `optax.partition` by the result of `resolve(params)` at `init`: for each leaf a label, or an array of trained elements."""

    def by(labels: PyTree) -> GradientTransformationExtraArgs:
        return optax.partition(transforms, lambda _: labels, mask_compatible_extra_args=mask_compatible_extra_args)

    def init(params: optax.Params) -> ResolvedState:
        register_with_flax(Labels, _labels_to_state_dict, _labels_from_state_dict)
        if not jax.tree.leaves(params):
            # optax's tree_map_params calls init with a placeholder for the parameters, and maps over the result together with the real
            # state: one leaf in place of the labels keeps the real ones whole.
            return ResolvedState(by(params).init(params), False)
        labels = _make_labels(_resolve_with_absent(resolve, params))
        return ResolvedState(by(_labels_like(labels, params)).init(params), labels)

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, ResolvedState]:
        register_with_flax(Labels, _labels_to_state_dict, _labels_from_state_dict)
        labels = state.labels if isinstance(state.labels, Labels) else Labels((), {})
        tx = by(_labels_like(labels, updates if params is None else params))
        updates, inner = tx.update(_zero_frozen_elements(labels, updates), state.inner_state, params, **extra_args)
        return _zero_frozen_elements(labels, updates), ResolvedState(inner, state.labels)

    return GradientTransformationExtraArgs(init, update)


def _labels_to_state_dict(labels: Labels) -> dict[str, dict[str, jax.Array]]:
    return {"elements": dict(labels.elements)}


def _labels_from_state_dict(labels: Labels, state: Mapping[str, Mapping[str, ArrayLike]]) -> Labels:
    """Return the labels with the boolean arrays that flax has saved. The labels of leaves stay those that `init` has resolved."""
    found = {name: jnp.asarray(x) for name, x in state["elements"].items()}
    if found.keys() != labels.elements.keys():
        raise ValueError(
            f"The saved state masks elements of {sorted(found)}, this transformation those of {sorted(labels.elements)}. Restore into a "
            "state that was made with the same mask."
        )
    return Labels(labels.by_path, found)


def _resolve_with_absent(resolve: Callable[[optax.Params], PyTree], params: optax.Params) -> PyTree:
    """Resolve over the params; if that fails, resolve again with placeholders for every None among them.

    A torch optimizer passes None for parameters that are frozen or have no gradient, and a pattern may match only these.
    """
    try:
        return resolve(params)
    except ValueError:
        whole = jax.tree.map(lambda x: _ABSENT if x is None else x, params, is_leaf=lambda x: x is None)
        if jax.tree.structure(whole) == jax.tree.structure(params):
            raise
        return resolve(whole)


def _label_of_mask_value(value: bool | np.bool_ | np.ndarray) -> object:
    """Return the label for a value of a mask. An array of elements is returned unchanged."""
    return value if np.ndim(value) else "trained" if value else "frozen"


def _make_labels(values: PyTree) -> Labels:
    by_path, elements = [], {}
    for path, value in jax.tree_util.tree_leaves_with_path(values):
        name = jax.tree_util.keystr(path)
        if isinstance(value, np.ndarray):
            elements[name] = jnp.asarray(value)
        by_path.append((name, "trained" if name in elements else value))
    return Labels(tuple(by_path), elements)


def _labels_like(labels: Labels, like: PyTree) -> PyTree:
    """Return the labels in the structure of `like`: the parameters if given, since a gradient may be None."""
    known = dict(labels.by_path)

    def look_up(path: KeyPath, _: object) -> Hashable:
        name = jax.tree_util.keystr(path)
        if name not in known:
            raise ValueError(
                f"update: init did not see the leaf {name}. Call init with the parameters as they are now. {did_you_mean(name, known)}"
            )
        return known[name]

    return jax.tree_util.tree_map_with_path(look_up, like)


def _zero_frozen_elements(labels: Labels, updates: optax.Updates) -> optax.Updates:
    """Set updates to zero at the frozen elements of leaves that are masked by element."""
    if not labels.elements:
        return updates

    def zeroed(path: KeyPath, u: jax.Array) -> jax.Array:
        mask = labels.elements.get(jax.tree_util.keystr(path))
        return u if mask is None else jnp.where(mask, u, jnp.zeros_like(u))

    return jax.tree_util.tree_map_with_path(zeroed, updates)


def _resolve_mask_tree(spec: Selector, params: optax.Params) -> PyTree:
    """Resolve a mask whose pytree may hold 0-d boolean arrays, as optax's may, in place of bools."""

    def plain(leaf: Any) -> object:
        return bool(leaf) if _is_bool(leaf) and np.ndim(leaf) == 0 and not isinstance(leaf, Tracer) else leaf

    return resolve_mask(jax.tree.map(plain, _as_tree_or_function(spec, _is_bool)), params)


def _as_tree_or_function(spec: PyTree, is_value: Callable[[object], bool]) -> PyTree:
    """Make a callable pytree unambiguous: a tree with its functions removed if it holds a value, else a function that is no pytree."""
    if not callable(spec) or jax.tree_util.all_leaves([spec]):
        return spec
    if any(is_value(leaf) for leaf in jax.tree.leaves(spec)):
        return jax.tree.map(lambda leaf: False if callable(leaf) else leaf, spec)
    return functools.partial(spec)


def _is_bool(leaf: object) -> bool:
    return isinstance(leaf, bool) or str(getattr(leaf, "dtype", "")).endswith("bool")


def _check_keys(transforms: Mapping[Any, object]) -> None:
    try:
        sorted(transforms)
        fit = jax.tree_util.all_leaves(list(transforms))
    except TypeError:
        fit = False
    if not fit:
        raise TypeError(
            f"partition: the labels {list(transforms)} cannot be leaves of a pytree and keys that jax sorts. Use strings, or "
            "one other type that sorts."
        )


def _resolve_label_tree(spec: PyTree, params: optax.Params, transforms: Mapping[Any, object]) -> PyTree:
    kinds = tuple({type(key) for key in transforms})
    spec = _as_tree_or_function(spec, lambda leaf: isinstance(leaf, kinds))
    if callable(spec) and jax.tree_util.all_leaves([spec]) and required_arguments(spec) == 1:
        spec = spec(params)
    known = all(isinstance(leaf, kinds) and leaf in transforms for leaf in jax.tree.leaves(spec))
    tree = _broadcast_labels(spec, params) if known else None
    labels = resolve_labels(spec, params) if tree is None else tree
    _check_labels(labels, transforms, params)
    return labels


def _broadcast_labels(spec: PyTree, params: optax.Params) -> PyTree:
    """Broadcast a prefix tree of labels as optax does: ('a', 'b') is a prefix here, not a list of patterns. None if it is no prefix."""
    try:
        return jax.tree.map(lambda label, part: jax.tree.map(lambda _: label, part), spec, params)
    except ValueError:
        return None


def _check_labels(labels: PyTree, transforms: Mapping[Any, object], params: optax.Params) -> None:
    """Raise if a label has no transformation or a transformation has no leaf; optax does not check the latter."""
    given = [(path_name(path), label) for path, label in jax.tree_util.tree_leaves_with_path(labels)]
    unknown = [(name, label) for name, label in given if label not in transforms]
    if unknown:
        name, label = unknown[0]
        raise ValueError(
            f"partition: no transformation for the label {label!r} of {name!r} ({len(unknown)} of {len(given)} leaves have "
            f"such a label). {did_you_mean(str(label), map(str, transforms))}"
        )
    used = [label for _, label in given]
    absent = any(leaf is _ABSENT for leaf in jax.tree.leaves(params))  # these leaves may have other labels
    idle = [label for label in transforms if label not in used and not absent]
    if idle:
        raise ValueError(
            f"partition: no leaf has the label {idle[0]!r}, so its transformation would do nothing. Take it out, or label a "
            f"leaf. {did_you_mean(str(idle[0]), map(str, used))}"
        )
