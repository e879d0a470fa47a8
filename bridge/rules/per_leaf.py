"""A transformation from an equation for one leaf, and the arithmetic that torch.optim's equations share."""

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
State: TypeAlias = dict[str, jax.Array]  # of one leaf, by field name
Update: TypeAlias = tuple[jax.Array, Mapping[str, jax.Array | None]]  # of one leaf, and its new state


# ------------------------------------------------------------------ from one leaf to a tree


def per_leaf(begin: Callable[[jax.Array], State], leaf: Callable[..., Update]) -> optax.GradientTransformation:
    """A transformation from an equation for one leaf, mapped over the tree.

    Args:
      begin: from a leaf to its state by field name. Leaves may have different fields (Adafactor's vectors and matrices).
      leaf: leaf(g, p, **state) -> (update, new state by name); names that the leaf's state has not are dropped.

    Returns:
      The transformation; its state is a named tuple of trees, one for each field, None where a leaf has no such field.
    """

    def init(params: optax.Params) -> tuple[PyTree, ...]:
        leaves, structure = jax.tree.flatten(params)
        states = [begin(p) for p in leaves]
        names = tuple(dict.fromkeys(name for state in states for name in state))
        return _state_type(names)(*(structure.unflatten([state.get(name) for state in states]) for name in names))

    def update(updates: optax.Updates, state: PyTree, params: optax.Params | None = None) -> tuple[optax.Updates, PyTree]:
        if params is None:
            raise ValueError("this transformation reads the parameters: call update(grads, state, params) with params, not None.")
        grads, structure = jax.tree.flatten(updates)
        columns = [structure.flatten_up_to(field) for field in state]
        own = [{name: c[i] for name, c in zip(state._fields, columns, strict=True) if c[i] is not None} for i in range(len(grads))]
        results = [leaf(g, p, **fields) for g, p, fields in zip(grads, structure.flatten_up_to(params), own, strict=True)]
        new = {
            name: structure.unflatten([new.get(name) if name in old else None for old, (_, new) in zip(own, results, strict=True)])
            for name in state._fields
        }
        return structure.unflatten([u for u, _ in results]), type(state)(**new)

    return optax.GradientTransformation(init, update)


@functools.cache
def _state_type(fields: tuple[str, ...]) -> Callable[..., tuple[PyTree, ...]]:
    """One named tuple type for each set of fields: jax compares them by identity."""
    return collections.namedtuple("State", fields)


def count() -> jax.Array:
    """A step count as torch keeps it: a float32 scalar for each leaf."""
    return jnp.zeros((), jnp.float32)


# ------------------------------------------------------------------ pieces of equations


def caster(like: jax.Array) -> Callable[[Scalar], jax.Array]:
    """A function from scalars, of any width, to the type of an array."""
    return lambda scalar: jnp.asarray(scalar).astype(like.dtype)


def wide(scalar: Scalar) -> jax.Array:
    """A scalar in the widest float that jax has here, so that products of scalars round once."""
    return jnp.asarray(scalar).astype(jnp.result_type(float))


def decayed(g: jax.Array, p: jax.Array, weight_decay: Scalar) -> jax.Array:
    """g + weight_decay * p, and g where nothing decays: an infinite parameter then stays what it is."""
    weight_decay = caster(g)(weight_decay)
    return jnp.where(weight_decay == 0, g, g + weight_decay * p)


def shrunk(p: jax.Array, factor: Scalar, *updates: jax.Array) -> jax.Array:
    """The update that takes p to p * factor and adds `updates` one after the other, rounded as torch rounds it.

    torch rounds p * factor before it adds, and the factor, 1 - lr * weight_decay, before that: in float32 1e-5 of the
    movement after 50 steps. p - (1 - c) * p has p * c's own rounding where it contracts to one multiply-add, and
    p + ((... + updates) - p) hands the sum through the optax interface: exactly, as long as one step moves a parameter
    by less than half of itself, and to its last digit else.
    """
    less = p - (1 - caster(p)(factor)) * p
    return jnp.where(jnp.isfinite(p), sum(updates, less) - p, sum(updates[1:], updates[0]))


def lerp(start: jax.Array, end: jax.Array, weight: Scalar) -> jax.Array:
    """torch.lerp: from the nearer end, so that a weight of 1 gives `end` itself.

    Written so that it is one multiply-add, from either end: in other forms a pack and a parameter alone, or a run and its
    resumption, were seen to round otherwise.
    """
    weight = caster(start)(weight)
    from_start = weight < 0.5
    return jnp.where(from_start, start, end) + (end - start) * jnp.where(from_start, weight, -(1 - weight))


def bias_correction(beta: Scalar, step: jax.Array) -> jax.Array:
    """1 - beta ** step without the cancellation, for beta near 1 and early steps."""
    known = isinstance(beta, float | int)
    log = wide(math.log(beta) if beta else -math.inf) if known else jnp.log(wide(beta))
    return -jnp.expm1(wide(step) * log)
