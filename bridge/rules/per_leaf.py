"""Build a transformation from the equation of one leaf, with arithmetic that rounds as torch.optim does."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from bridge._ir.types import PyTree

Scalar: TypeAlias = float | jax.Array  # a Python float, or a traced 0-d array
State: TypeAlias = dict[str, jax.Array]  # the state of one leaf, by field name
Update: TypeAlias = tuple[jax.Array, Mapping[str, jax.Array | None]]  # the update of one leaf, and its new state


# ------------------------------------------------------------------ from one leaf to a tree


def per_leaf(init_leaf: Callable[[jax.Array], State], update_leaf: Callable[..., Update]) -> optax.GradientTransformation:
    """Make a transformation by mapping the equation of one leaf over the tree.

    Args:
      init_leaf: from a leaf to its state by field name. Leaves may have different fields (Adafactor's vectors and matrices).
      update_leaf: update_leaf(g, p, **state) -> (update, new state by name). Names that the leaf's state does not have are dropped.

    Returns:
      The transformation. Its state is a named tuple of trees, one for each field, with None for leaves without the field. Its
      `update` raises a ValueError without `params`.
    """

    def init(params: optax.Params) -> tuple[PyTree, ...]:
        leaves, structure = jax.tree.flatten(params)
        states = [init_leaf(p) for p in leaves]
        names = tuple(dict.fromkeys(name for state in states for name in state))
        return _state_type(names)(*(structure.unflatten([state.get(name) for state in states]) for name in names))

    def update(updates: optax.Updates, state: PyTree, params: optax.Params | None = None) -> tuple[optax.Updates, PyTree]:
        if params is None:
            raise ValueError("this transformation reads the parameters: call update(grads, state, params) with params, not None.")
        grads, structure = jax.tree.flatten(updates)
        columns = [structure.flatten_up_to(field) for field in state]
        own = [{name: c[i] for name, c in zip(state._fields, columns, strict=True) if c[i] is not None} for i in range(len(grads))]
        results = [update_leaf(g, p, **fields) for g, p, fields in zip(grads, structure.flatten_up_to(params), own, strict=True)]
        new = {
            name: structure.unflatten([new.get(name) if name in old else None for old, (_, new) in zip(own, results, strict=True)])
            for name in state._fields
        }
        return structure.unflatten([u for u, _ in results]), type(state)(**new)

    return optax.GradientTransformation(init, update)


@functools.cache
def _state_type(fields: tuple[str, ...]) -> Callable[..., tuple[PyTree, ...]]:
    """Return one named tuple type for each set of fields, because jax compares types by identity."""
    return collections.namedtuple("State", fields)


def initial_count() -> jax.Array:
    """Return the initial step count of a leaf: a float32 scalar, as in torch."""
    return jnp.zeros((), jnp.float32)


# ------------------------------------------------------------------ parts of equations


def cast_scalars(like: jax.Array) -> Callable[[Scalar], jax.Array]:
    """Return a function that casts scalars to the dtype of an array."""
    return lambda scalar: jnp.asarray(scalar).astype(like.dtype)


def widest_float(scalar: Scalar) -> jax.Array:
    """Cast a scalar to the widest float that jax is set to, so that a product of scalars is rounded once."""
    return jnp.asarray(scalar).astype(jnp.result_type(float))


def add_decay(g: jax.Array, p: jax.Array, weight_decay: Scalar) -> jax.Array:
    """Return g + weight_decay * p, and g where weight_decay is 0: an infinite parameter then stays unchanged."""
    weight_decay = cast_scalars(g)(weight_decay)
    return jnp.where(weight_decay == 0, g, g + weight_decay * p)


def scaled_update(p: jax.Array, factor: Scalar, *updates: jax.Array) -> jax.Array:
    """Return the update from p to p * factor plus `updates`, added in order and rounded as in torch.

    torch rounds the factor, 1 - lr * weight_decay, and then p * factor before it adds. p - (1 - c) * p rounds like p * c where XLA
    contracts it to one multiply-add. The caller adds p to the result, p + ((... + updates) - p): this is exact if a step moves the
    parameter by less than half of its value, and else exact but for the last digit.
    """
    less = p - (1 - cast_scalars(p)(factor)) * p
    return jnp.where(jnp.isfinite(p), sum(updates, less) - p, sum(updates[1:], updates[0]))


def lerp(start: jax.Array, end: jax.Array, weight: Scalar) -> jax.Array:
    """Interpolate as torch.lerp does: from the nearer end, so that a weight of 1 gives `end` exactly.

    From either end this is one multiply-add. In other forms a bucket and a separate parameter could round differently, and so could a run
    that is resumed.
    """
    weight = cast_scalars(start)(weight)
    from_start = weight < 0.5
    return jnp.where(from_start, start, end) + (end - start) * jnp.where(from_start, weight, -(1 - weight))


def bias_correction(beta: Scalar, step: jax.Array) -> jax.Array:
    """Return 1 - beta ** step, without cancellation for beta near 1 and small steps."""
    known = isinstance(beta, float | int)
    log = widest_float(math.log(beta) if beta else -math.inf) if known else jnp.log(widest_float(beta))
    return -jnp.expm1(widest_float(step) * log)
