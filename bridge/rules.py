"""torch.optim's update equations as optax `GradientTransformation`s.

optax's own adam, adamw and sgd differ from torch's in places that show: one step count for all leaves, no amsgrad on
the decayed gradient, other first steps of momentum. These follow torch 2.13 and keep a count per leaf; the state fields
carry torch's names. Leaves are real (a complex parameter comes as its (..., 2) real view, as torch.optim takes it).

Scalars may be Python floats or traced float64: bias corrections are computed before the cast to the leaf's type,
because 1 - 0.999 has lost four digits in float32.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Scalar = Any  # a Python float, or a traced 0-d array


class Rule(NamedTuple):
    """A factory of transformations, and what its hyperparams and state mean to a torch optimizer.

    `structural` hyperparams take None for "none of it", which a 0 in a param group stands for: they decide which state
    exists. `hidden` state is not part of torch's state_dict; restored state begins with the value given here.

    `scaled`: any optax transformation, not one of this file: it is evaluated as in pure JAX, and its update is
    multiplied by the group's `lr` unless `lr` is among its own hyperparams. Those with defaults are `given`, and only
    the `traceable` of them may be traced. `ready`: one transformation for all groups, not one for each. `takes_extra`:
    it reads further arguments of `step`.
    """

    factory: Callable[..., optax.GradientTransformation]
    structural: frozenset[str] = frozenset()
    hidden: dict[str, float] = {}  # noqa: RUF012
    given: dict[str, Any] | None = None
    traceable: frozenset[str] = frozenset()
    scaled: bool = False
    ready: bool = False
    takes_extra: bool = False

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The hyperparams and options by name with their defaults, None for structural ones being 0 in a group."""
        if self.given is not None:
            return self.given
        parameters = inspect.signature(self.factory).parameters.values()
        return {p.name: 0 if p.name in self.structural and p.default is None else p.default for p in parameters}


class AdamState(NamedTuple):
    step: Any  # float32 0-d per leaf, as torch keeps it
    exp_avg: Any
    exp_avg_sq: Any


class AmsgradState(NamedTuple):
    step: Any
    exp_avg: Any
    exp_avg_sq: Any
    max_exp_avg_sq: Any


class MomentumState(NamedTuple):
    momentum_buffer: Any


class DampenedState(NamedTuple):
    momentum_buffer: Any
    seen: Any  # float32 0-d per leaf: 0 before the first gradient, which enters the buffer undampened


def adam(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.Adam, and AdamW with `decoupled_weight_decay=True`, per leaf.

    The updates are added to the parameters: -lr * (m_hat / (sqrt(v_hat) + eps)), and for AdamW another
    -lr * weight_decay * params. eps stands outside the root, as in torch and in optax's default.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py; Kingma and Ba, arXiv:1412.6980;
    Loshchilov and Hutter, arXiv:1711.05101; amsgrad: Reddi et al., arXiv:1904.09237 (torch takes the maximum before the
    bias correction, optax's amsgrad after it).
    """

    def init(params: Any) -> AdamState | AmsgradState:
        step = _per_leaf_zero(params)
        if amsgrad:
            return AmsgradState(step, _zeros(params), _zeros(params), _zeros(params))
        return AdamState(step, _zeros(params), _zeros(params))

    def leaf(g: jax.Array, p: jax.Array, step: jax.Array, m: jax.Array, v: jax.Array, v_max: jax.Array | None = None) -> tuple[Any, ...]:
        cast = _caster(g)
        g = -g if maximize else g
        if not decoupled_weight_decay:
            g = _decayed(g, p, cast(weight_decay))
        step = step + 1
        m = _lerp(m, g, cast(1 - betas[0]))
        v = v * cast(betas[1]) + g * g * cast(1 - betas[1])
        root = v if v_max is None else (v_max := jnp.maximum(v_max, v))
        denominator = jnp.sqrt(root) / cast(jnp.sqrt(_bias_correction(betas[1], step))) + cast(eps)
        update = -cast(_wide(lr) / _bias_correction(betas[0], step)) * m / denominator
        if decoupled_weight_decay:
            # torch rounds p * (1 - lr * weight_decay) before it adds, and 1 - lr * weight_decay before that: in float32
            # 1e-5 of the movement after 50 steps. p - (1 - c) * p has p * c's own rounding where it contracts to one
            # multiply-add, and p + ((... + update) - p) hands the sum through the optax interface: exactly, as long as one
            # step moves a parameter by less than half of itself, and to its last digit else.
            shrunk = p - (1 - cast(1 - _wide(lr) * _wide(weight_decay))) * p
            update = jnp.where(jnp.isfinite(p), (shrunk + update) - p, update)
        return (update, step, m, v) if v_max is None else (update, step, m, v, v_max)

    return _per_leaf(init, leaf)


def sgd(
    lr: Scalar = 1e-3,
    momentum: Scalar | None = None,
    dampening: Scalar | None = None,
    weight_decay: Scalar = 0.0,
    *,
    nesterov: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.SGD, per leaf. `momentum` or `dampening` None: none, and no state for it.

    The first gradient enters the buffer undampened, and lr stands outside the momentum: both as in torch, unlike
    Sutskever et al. (2013).

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py
    """

    def init(params: Any) -> Any:
        if momentum is None:
            return optax.EmptyState()
        if dampening is None:
            return MomentumState(_zeros(params))
        return DampenedState(_zeros(params), _per_leaf_zero(params))

    def leaf(g: jax.Array, p: jax.Array, buffer: jax.Array | None = None, seen: jax.Array | None = None) -> tuple[Any, ...]:
        cast = _caster(g)
        g = _decayed(-g if maximize else g, p, cast(weight_decay))
        state: tuple[jax.Array, ...] = ()
        if buffer is not None:
            share = cast(1.0) if seen is None else cast(1 - _wide(dampening) * _wide(seen))
            buffer = buffer * cast(momentum) + g * share
            state = (buffer,) if seen is None else (buffer, jnp.ones_like(seen))
            g = g + cast(momentum) * buffer if nesterov else buffer
        return (-cast(lr) * g, *state)

    return _per_leaf(init, leaf)


def _per_leaf(init: optax.TransformInitFn, leaf: Callable[..., tuple[Any, ...]]) -> optax.GradientTransformation:
    """A transformation from an equation for one leaf: leaf(g, p, *state) -> (update, *state), mapped over the tree."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("this transformation reads the parameters: call update(grads, state, params) with params, not None.")
        fields = tuple(state)
        results = jax.tree.map(leaf, updates, params, *fields)
        outer = jax.tree.structure(updates)
        columns = jax.tree.transpose(outer, jax.tree.structure((0,) * (1 + len(fields))), results)
        return columns[0], type(state)(*columns[1:])

    return optax.GradientTransformation(init, update)


def _decayed(g: jax.Array, p: jax.Array, weight_decay: jax.Array) -> jax.Array:
    """g + weight_decay * p, and g where nothing decays: an infinite parameter then stays what it is."""
    return jnp.where(weight_decay == 0, g, g + weight_decay * p)


def _lerp(start: jax.Array, end: jax.Array, weight: jax.Array) -> jax.Array:
    """torch.lerp: from the nearer end, so that a weight of 1 gives `end` itself."""
    return jnp.where(weight < 0.5, start + (end - start) * weight, end - (end - start) * (1 - weight))


def _zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def _per_leaf_zero(params: Any) -> Any:
    return jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params)


def _caster(like: jax.Array) -> Callable[[Scalar], jax.Array]:
    return lambda scalar: jnp.asarray(scalar).astype(like.dtype)


def _wide(scalar: Scalar) -> jax.Array:
    """A scalar in the widest float that jax has here, so that products of scalars round once."""
    return jnp.asarray(scalar).astype(jnp.result_type(float))


def _bias_correction(beta: Scalar, step: jax.Array) -> jax.Array:
    """1 - beta ** step without the cancellation, for beta near 1 and early steps."""
    known = isinstance(beta, float | int)
    log = _wide(math.log(beta) if beta else -math.inf) if known else jnp.log(_wide(beta))
    return -jnp.expm1(_wide(step) * log)


ADAM = Rule(adam)
SGD = Rule(sgd, structural=frozenset({"momentum", "dampening"}), hidden={"seen": 1.0})
