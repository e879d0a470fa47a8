"""Hyper params and state of flax.optim's optimizers as plain data: fields by name, and trees as nested dicts that can be saved."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from bridge._compat.types import PyTreeDef
from bridge._ir.types import PyTree
from bridge._names import did_you_mean, path_name

# The value of a hyper param: a number, an array, or a schedule (a function of the step).
HyperParam: TypeAlias = ArrayLike | optax.Schedule


def resolve_learning_rate(title: str, learning_rate: HyperParam | None, lr: HyperParam | None) -> HyperParam | None:
    """Return `learning_rate` or its other name `lr`, whichever is given; None for neither, a TypeError for both."""
    if learning_rate is not None and lr is not None:
        raise TypeError(f"{title} got both lr and learning_rate, two names of one hyper param. Give one of them.")
    return learning_rate if lr is None else lr


def field_names(hyper_params: object) -> tuple[str, ...]:
    """Return the names of the attributes of a dataclass, a NamedTuple or any other object."""
    if dataclasses.is_dataclass(hyper_params):
        return tuple(field.name for field in dataclasses.fields(hyper_params))
    return getattr(hyper_params, "_fields", None) or tuple(getattr(hyper_params, "__dict__", ()))


def field_values(hyper_params: object) -> dict[str, Any]:
    """Return the attributes of a dataclass, a NamedTuple or any other object, by name."""
    return {name: getattr(hyper_params, name) for name in field_names(hyper_params)}


def with_fields(title: str, hyper_params: Any, values: Mapping[str, Any]) -> Any:
    """Copy hyper params with some attributes replaced. `lr` means `learning_rate` unless there is an attribute `lr`.

    Raises:
      TypeError: an unknown name; the text lists the known ones. Or both `lr` and `learning_rate`.
    """
    names, values = field_names(hyper_params), dict(values)
    if "lr" in values and "lr" not in names:
        lr = values.pop("lr")
        values["learning_rate"] = resolve_learning_rate(title, values.get("learning_rate"), lr)
    unknown = [name for name in values if name not in names]
    if unknown:
        raise TypeError(f"{title} has no hyper param {unknown[0]!r}. Known: {', '.join(names) or 'none'}.")
    if hasattr(hyper_params, "_replace"):
        return hyper_params._replace(**values)
    if dataclasses.is_dataclass(hyper_params) and not isinstance(hyper_params, type):
        return dataclasses.replace(hyper_params, **values)
    new = copy.copy(hyper_params)
    for name, value in values.items():
        setattr(new, name, value)
    return new


def compute_dtype_of(dtype: DTypeLike) -> np.dtype:
    """Return the dtype for the arithmetic of a parameter: float32 for half types, else the parameter's own."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32 if half else dtype)


def cast_hyper_params(hyper_params: Any, dtype: DTypeLike) -> Any:
    """Cast the floating arrays among the hyper params, so that an update does not change the dtype of what it updates."""
    other: dict[str, HyperParam] = {}
    for name, value in field_values(hyper_params).items():
        if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating) and value.dtype != dtype:
            other[name] = jnp.asarray(value).astype(dtype)
    return with_fields("", hyper_params, other) if other else hyper_params


def flatten_like_params(treedef: PyTreeDef, tree: PyTree, title: str) -> list[PyTree]:
    """Return the subtree of `tree` at each leaf of the parameters. Raise a ValueError where the structures differ."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"apply_gradient: {title} must have the structure of the parameters, {treedef}. {error}") from error


def check_gradients(title: str, params: PyTree, grads: PyTree) -> None:
    """Raise a ValueError that names the parameter if a gradient is missing or has another shape."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    for (path, param), grad in zip(paths, flatten_like_params(treedef, grads, "grads"), strict=True):
        if grad is None or np.shape(grad) != np.shape(param):
            what = "None" if grad is None else f"an array of shape {np.shape(grad)}"
            raise ValueError(f"{title}: the gradient of {path_name(path)!r} is {what}; expected one of shape {np.shape(param)}.")


def to_nested_dict(tree: PyTree) -> dict[str, Any]:
    """Return a pytree as nested dicts by the names in its key paths, in flax's layout. Leaves are not copied."""
    root: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *above, last = _key_names(path)
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return root


def from_nested_dict(like: PyTree, saved: PyTree) -> PyTree:
    """Return the tree `like` with its leaves replaced by those of nested dicts.

    Raises:
      ValueError: an entry is missing, unknown, or of another shape or dtype than in `like`; the text names it.
    """
    found = {_key_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(saved)}
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    wanted = {_key_names(path): leaf for path, leaf in paths}
    for here, there, where in ((wanted, found, "the saved state"), (found, wanted, "this optimizer")):
        lost = [".".join(key) for key in here if key not in there]
        if lost:
            close = did_you_mean(lost[0], map(".".join, there)) if there else "It is empty."
            raise ValueError(
                f"restore_state: {where} has no entry {lost[0]!r} ({len(lost)} such). {close} Parameters and definition must be the same."
            )
    return treedef.unflatten([_check_leaf(".".join(key), leaf, found[key]) for key, leaf in wanted.items()])


def _check_leaf(name: str, like: ArrayLike, saved: ArrayLike) -> jax.Array:
    shape, dtype = np.shape(like), getattr(like, "dtype", None)
    given_shape, given_dtype = np.shape(saved), getattr(saved, "dtype", dtype)  # a Python number has no dtype of its own
    if given_shape != shape or (dtype is not None and given_dtype != dtype):
        given, expected = f"shape {given_shape} and dtype {given_dtype}", f"shape {shape} and dtype {dtype}"
        raise ValueError(f"restore_state: {name!r} has {given}; expected {expected}, as this optimizer has.")
    return jnp.asarray(saved, dtype)


def _key_names(path: KeyPath) -> tuple[str, ...]:
    return tuple(path_name((key,)) for key in path)
