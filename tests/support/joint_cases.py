"""Transformations that must see all leaves, and runs of them: what the tests of them share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from oracles import random_grads, same, set_grads

import torch_api


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def clipped(tx, bound=0.5):
    return optax.chain(optax.clip_by_global_norm(bound), tx)


def across_two():
    """The update of each leaf with the gradient of the leaf before it, where that is as large."""

    def update(updates, state, params=None):
        leaves, tree = jax.tree.flatten(updates)
        mixed = [a + 0.5 * b.reshape(a.shape) if a.size == b.size else a for a, b in zip(leaves, leaves[-1:] + leaves[:-1], strict=True)]
        return jax.tree.unflatten(tree, mixed), state

    return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.05, momentum=0.9))


def sums_of_what_is_computed():
    """Scaled by a norm over all leaves of what is computed from the gradient and a trace of it."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, trace, params=None):
        trace = jax.tree.map(lambda g, t: 0.9 * t + g * jnp.tanh(g), updates, trace)
        size = norm_of(jax.tree.map(lambda g, t: g / (jnp.abs(t) + 1), updates, trace))
        return jax.tree.map(lambda g, t: -0.1 * g / (jnp.abs(t) + 1) / (1 + size), updates, trace), trace

    return optax.GradientTransformation(init, update)


def two_sums_of_a_kind():
    """Scaled by two norms, of the same arithmetic on the same arrays, but with other numbers."""

    def update(updates, state, params=None):
        of = lambda bound: norm_of(jax.tree.map(lambda g: jnp.tanh(bound * g), updates))  # noqa: E731
        few, many = of(state["few"]), of(state["many"])
        return jax.tree.map(lambda g: -0.1 * (few / many) * g, updates), state | {"few": state["few"] * 1.1}

    return optax.GradientTransformation(lambda params: {"few": jnp.asarray(0.1), "many": jnp.asarray(2.0)}, update)


def by_rows():
    """Each leaf divided by the norms of its rows and by that of all leaves, with a constant of the leaf's shape."""

    def update(updates, state, params=None):
        total = norm_of(updates)
        rows = lambda g: jnp.sqrt(jnp.sum(g * g, axis=-1, keepdims=True)) if g.ndim > 1 else jnp.abs(g) + 1  # noqa: E731
        fixed = lambda g: np.linspace(0.5, 1.5, g.size, dtype=np.float32).reshape(g.shape)  # noqa: E731
        return jax.tree.map(lambda g: -0.3 * fixed(g) * g / (rows(g) + total), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# Prodigy's estimate of the distance is a quotient of sums: its float32 is off by 1e-5 with and without the cut.
TRANSFORMATIONS = {
    "clip, adamw": lambda: clipped(optax.adamw(0.05, weight_decay=0.1)),
    "clip, lion": lambda: clipped(optax.lion(0.02)),
    "clip, rmsprop, momentum": lambda: clipped(optax.rmsprop(0.02, momentum=0.9)),
    "clip, nadamw": lambda: clipped(optax.nadamw(0.05, weight_decay=0.1)),
    "clip, amsgrad": lambda: clipped(optax.amsgrad(0.05)),
    "clip, lamb": lambda: clipped(optax.lamb(0.05)),
    "clip, adafactor": lambda: clipped(optax.adafactor(0.05, min_dim_size_to_factor=16)),
    "clip, amsgrad, average": lambda: clipped(optax.chain(optax.amsgrad(0.05), optax.ema(0.5))),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.05),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "two leaves": across_two,
    "sums": sums_of_what_is_computed,
    "sums of a kind": two_sums_of_a_kind,
    "rows": by_rows,
}


def pure(tx, start, grads):
    """optax on jax arrays: the end, as tensors."""
    params = [jnp.asarray(p.detach().numpy()) for p in start]
    state, update = tx.init(params), jax.jit(tx.update)
    for each in grads:
        updates, state = update([jnp.asarray(g.numpy()) for g in each], state, params)
        params = optax.apply_updates(params, updates)
    return [torch.from_numpy(np.array(p)) for p in params]


def program(optimizer):
    (launch,) = optimizer._launches.latest
    return launch.program


def moved(tx, params, grads, **arguments):
    named = [(f"p{i:02}", p) for i, p in enumerate(params)]  # in the order of the leaves for optax too
    optimizer = torch_api.OptaxOptimizer(named, tx, **arguments)
    for each in grads:
        set_grads(params, each)
        optimizer.step()
    return optimizer


def moved_by(tx, start, grads, **arguments):
    params = [torch.nn.Parameter(x.clone()) for x in start]
    moved(tx, params, grads, **arguments)
    return params


def moves_of_scaled_steps(optimizer, params, bad):
    """Of four steps with a loss scaler whether any bit changed; at the third a gradient, the `bad` one, is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    moves = []
    for n in range(4):
        loss = scaler.scale(sum((p * g).sum() for p, g in zip(params, random_grads(params), strict=True)))
        optimizer.zero_grad()
        loss.backward()
        if n == 2:
            params[bad].grad[-1] = float("nan")
        before = [x.clone() for x in (*params, *(s for p in params for s in optimizer.state[p].values()))]
        scaler.step(optimizer)
        scaler.update()
        moves.append(not same(before, [*params, *(s for p in params for s in optimizer.state[p].values())]))
    return moves
