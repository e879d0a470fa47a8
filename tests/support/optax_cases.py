"""Runs of our optimizers and of pure optax from the same parameters and gradients."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from oracles import movement_error

import bridge

SHAPES = {"a.weight": (4, 3), "a.bias": (3,), "b.weight": (3, 3), "s": ()}
STEPS = 20


def draw(shapes=SHAPES, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {k: torch.nn.Parameter((torch.randn(v, generator=g) * 0.3).to(dtype)) for k, v in shapes.items()}


def draw_grads(params, steps=STEPS, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [{k: torch.randn(p.shape, generator=g).to(p.dtype) for k, p in params.items()} for _ in range(steps)]


def nest(named):
    tree = {}
    for name, value in named.items():
        *path, last = name.split(".")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return tree


def unnest(tree, prefix=""):
    out = {}
    for key, value in tree.items():
        out |= unnest(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def as_jax(named):
    return nest({k: jnp.asarray(v.detach().numpy().copy()) for k, v in named.items()})


def as_torch(tree):
    return {k: torch.tensor(np.asarray(v)) for k, v in unnest(tree).items()}


def pure(tx, start, grads, **extra):
    """Return the parameters and the state after the steps in pure JAX."""
    tree, tx = as_jax(start), optax.with_extra_args_support(tx)
    state, update = tx.init(tree), jax.jit(lambda g, s, p: tx.update(g, s, p, **extra))
    for g in grads:
        updates, state = update(as_jax(g), state, tree)
        tree = optax.apply_updates(tree, updates)
    return as_torch(tree), state


def run(opt, params, grads, **extra):
    for given in grads:
        for name, p in params.items():
            p.grad = None if given.get(name) is None else given[name].clone(memory_format=torch.preserve_format)
        opt.step(**extra)


def snap(params):
    return {k: p.detach().clone() for k, p in params.items()}


def twin(params, order=list):
    return {k: torch.nn.Parameter(params[k].detach().clone()) for k in order(params)}


def states(opt, params):
    return {(k, f): torch.as_tensor(v).clone() for k, p in params.items() for f, v in opt.state.get(p, {}).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def compiled():
    return bridge.compilations(), bridge.traces()


def saved(opt):
    """Return the state_dict after a round trip through a file loaded with weights_only=True."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def errors(ours, theirs, start):
    """Return each parameter's error relative to its movement; a parameter that must not move has error 1 if it moved."""
    out = {}
    for k in ours:
        still = torch.equal(theirs[k], start[k])
        out[k] = float(not torch.equal(ours[k], start[k])) if still else movement_error(ours[k], theirs[k], start[k])
    return out
