"""Transformations that must see all leaves together, and runs of them, for tests of joint updates."""

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


def mix_neighbors():
    """Mix the update of each leaf with the gradient of the previous leaf, if both have equal size."""

    def update(updates, state, params=None):
        leaves, tree = jax.tree.flatten(updates)
        mixed = [a + 0.5 * b.reshape(a.shape) if a.size == b.size else a for a, b in zip(leaves, leaves[-1:] + leaves[:-1], strict=True)]
        return jax.tree.unflatten(tree, mixed), state

    return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.05, momentum=0.9))


def scaled_by_norm_of_computed_values():
    """Scale updates by a norm over all leaves of values computed from the gradient and its trace."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, trace, params=None):
        trace = jax.tree.map(lambda g, t: 0.9 * t + g * jnp.tanh(g), updates, trace)
        size = norm_of(jax.tree.map(lambda g, t: g / (jnp.abs(t) + 1), updates, trace))
        return jax.tree.map(lambda g, t: -0.1 * g / (jnp.abs(t) + 1) / (1 + size), updates, trace), trace

    return optax.GradientTransformation(init, update)


def scaled_by_two_equal_norms():
    """Scale updates by two norms that have the same equations on the same arrays but different constants."""

    def update(updates, state, params=None):
        of = lambda bound: norm_of(jax.tree.map(lambda g: jnp.tanh(bound * g), updates))  # noqa: E731
        few, many = of(state["few"]), of(state["many"])
        return jax.tree.map(lambda g: -0.1 * (few / many) * g, updates), state | {"few": state["few"] * 1.1}

    return optax.GradientTransformation(lambda params: {"few": jnp.asarray(0.1), "many": jnp.asarray(2.0)}, update)


def divided_by_row_norms():
    """Divide each leaf by the norms of its rows plus the norm of all leaves, times a constant of the leaf's shape."""

    def update(updates, state, params=None):
        total = norm_of(updates)
        rows = lambda g: jnp.sqrt(jnp.sum(g * g, axis=-1, keepdims=True)) if g.ndim > 1 else jnp.abs(g) + 1  # noqa: E731
        fixed = lambda g: np.linspace(0.5, 1.5, g.size, dtype=np.float32).reshape(g.shape)  # noqa: E731
        return jax.tree.map(lambda g: -0.3 * fixed(g) * g / (rows(g) + total), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# Prodigy estimates its distance by a quotient of sums, whose float32 error is 1e-5 with and without split kernels.
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
    "two leaves": mix_neighbors,
    "sums": scaled_by_norm_of_computed_values,
    "sums of a kind": scaled_by_two_equal_norms,
    "rows": divided_by_row_norms,
}


def pure(tx, start, grads):
    """Return the parameters after the steps, computed by optax on jax arrays, as tensors."""
    params = [jnp.asarray(p.detach().numpy()) for p in start]
    state, update = tx.init(params), jax.jit(tx.update)
    for each in grads:
        updates, state = update([jnp.asarray(g.numpy()) for g in each], state, params)
        params = optax.apply_updates(params, updates)
    return [torch.from_numpy(np.array(p)) for p in params]


def program(optimizer):
    (launch,) = optimizer._launch_cache.last_used
    return launch.executable


def moved(tx, params, grads, **arguments):
    named = [(f"p{i:02}", p) for i, p in enumerate(params)]  # names that optax sorts in the same order
    optimizer = torch_api.OptaxOptimizer(named, tx, **arguments)
    for each in grads:
        set_grads(params, each)
        optimizer.step()
    return optimizer


def moved_by(tx, start, grads, **arguments):
    params = [torch.nn.Parameter(x.clone()) for x in start]
    moved(tx, params, grads, **arguments)
    return params


def which_scaled_steps_move(optimizer, params, bad):
    """Take four steps with a loss scaler, the third with a nonfinite gradient `bad`; return for each whether any bit changed."""
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
