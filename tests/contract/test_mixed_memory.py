"""Joint transformations over parameters of equal shape that lie in different memory give the numbers of pure optax.

Equal parameters share arithmetic. Some share a bucket; one that comes from NumPy has its own memory; parameters thawed later lie in a
second bucket; a parameter without a gradient is inactive. The values of one parameter must never be used for another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from sampling import sampled_tuples

import torch_api

pytestmark = [pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]


def clipped(*transformations):
    return optax.chain(optax.clip_by_global_norm(1.0), *transformations)


def neighbors():
    """Mix each leaf with the next leaf of its shape, then divide it by its norm and by the norm of that next leaf."""

    def update(updates, state, params=None):
        leaves, tree = jax.tree.flatten(updates)
        after = leaves[1:] + leaves[:1]
        mixed = [a + 0.5 * b if a.shape == b.shape else a for a, b in zip(leaves, after, strict=True)]
        return tree.unflatten([a / (jnp.linalg.norm(a) + jnp.linalg.norm(b)) for a, b in zip(mixed, after, strict=True)]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def shares():
    """Scale each leaf by its share in a running sum; each leaf keeps a copy of the sum and its own step count."""

    def init(params):
        return {"count": jax.tree.map(lambda p: jnp.zeros([], jnp.int32), params), "sum": jax.tree.map(lambda p: jnp.zeros([]), params)}

    def update(updates, state, params=None):
        count = jax.tree.map(lambda n: n + 1, state["count"])
        sums = jax.tree.map(lambda s, g: 0.5 * s + jnp.sum(jnp.abs(g)), state["sum"], updates)
        total = sum(jax.tree.leaves(sums))
        return jax.tree.map(lambda g, n, s: g / n * (s / total), updates, count, sums), {"count": count, "sum": sums}

    return optax.GradientTransformation(init, update)


TRANSFORMATIONS = {
    "lamb": lambda: clipped(optax.lamb(0.05)),
    "lars": lambda: clipped(optax.lars(0.5)),
    "block rms": lambda: clipped(optax.scale(3.0), optax.clip_by_block_rms(0.05), optax.sgd(0.1, momentum=0.9)),
    "trust ratio": lambda: clipped(optax.scale_by_trust_ratio(), optax.scale(-0.1)),
    "adamw": lambda: clipped(optax.adamw(0.05, weight_decay=0.1)),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.05),
    "adaptive clip": lambda: clipped(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "normalized": lambda: optax.chain(optax.scale_by_trust_ratio(), optax.normalize_by_update_norm(), optax.trace(0.9), optax.scale(-0.1)),
    "neighbors": lambda: optax.chain(neighbors(), optax.scale(-0.1)),
    "shares": lambda: optax.chain(shares(), optax.scale(-0.1)),
}
SHAPES = [(16,), (16,), (16,), (16,), (16,), (2, 8)]


def with_parts(tree, names, change):
    """Return the tree with `change` applied to each dict that has one value per parameter."""
    is_part = lambda x: isinstance(x, dict) and set(x) == names  # noqa: E731
    return jax.tree.map(lambda *each: change(*each) if is_part(each[0]) else each[0], *tree, is_leaf=is_part)


def by_optax(tx, start, steps):
    """Return the parameters after `steps`, pairs of the names that are trained and the gradients by name.

    A parameter's state starts at the first step that trains it. Without a gradient, a parameter and its state do not change.
    """
    names, begun, state = set(start), set(), None
    params = {name: jnp.asarray(value) for name, value in start.items()}
    for trained, grads in steps:
        live, fresh, known = set(grads), tx.init(params), frozenset(begun)
        if state is not None:
            state = with_parts((state, fresh), names, lambda old, new, known=known: {n: (old if n in known else new)[n] for n in old})
        state, begun = fresh if state is None else state, begun | trained
        cut = lambda tree, live=live: {n: x if n in live else None for n, x in tree.items()}  # noqa: E731
        given = {name: jnp.asarray(grads[name]) if name in live else None for name in start}
        updates, new = tx.update(given, with_parts((state,), names, cut), cut(params))
        state = with_parts((new, state), names, lambda new, old, live=live: {n: (new if n in live else old)[n] for n in new})
        params = {name: p + updates[name] if name in live else p for name, p in params.items()}
    return params


def draw(generator, thaws):
    """Return parameter values, the names of parameters outside buckets, the names of parameters that are thawed later, and the steps."""
    count = int(generator.integers(20, 24))
    shapes = {f"p{i:02}": SHAPES[generator.integers(len(SHAPES))] for i in range(count)}
    number = lambda shape: (generator.standard_normal(shape) * 3.0 ** generator.integers(-2, 3)).astype(np.float32)  # noqa: E731
    some = lambda share: {name for name in shapes if generator.random() < share}  # noqa: E731
    alone, late, missing = some(generator.choice([0.05, 0.3])), some(0.4 * thaws), some(0.1)
    trained = [set(shapes) - late, set(shapes)]
    steps = [(names, {name: number(shapes[name]) for name in shapes if name in names - missing}) for names in trained]
    return {name: number(shape) for name, shape in shapes.items()}, alone, late, steps


@pytest.mark.filterwarnings("ignore:.*each step copies")  # this test is about parameters in NumPy's memory
@pytest.mark.parametrize(("name", "seed"), sampled_tuples([(name, seed) for seed, name in enumerate(TRANSFORMATIONS)]))
def test_parameters_in_different_memory_move_as_in_optax(name, seed):
    way = (None, "set_trainable", "add_param_group")[seed % 3]
    start, alone, late, steps = draw(np.random.default_rng(seed), way is not None)
    params = {n: torch.nn.Parameter(torch.from_numpy(x.copy()) if n in alone else torch.tensor(x)) for n, x in start.items()}
    first, others = ([(n, p) for n, p in params.items() if (n in late) is is_late] for is_late in (False, True))
    frozen = {"mask": lambda name, param: name not in late} if way == "set_trainable" else {}
    optimizer = torch_api.OptaxOptimizer(params.items() if frozen else first, TRANSFORMATIONS[name](), **frozen)
    for nth, (_, grads) in enumerate(steps):
        if nth == 1 and way == "set_trainable":
            optimizer.set_trainable([n for n, _ in others], True)
        elif nth == 1 and way == "add_param_group":
            optimizer.add_param_group({"params": others})
        for n, p in params.items():
            p.grad = torch.tensor(grads[n]) if n in grads else None
        optimizer.step()
    expected = by_optax(TRANSFORMATIONS[name](), start, steps)
    moves = {n: np.abs(np.asarray(x) - start[n]).max() for n, x in expected.items()}
    errors = {n: np.abs(p.detach().numpy() - expected[n]).max() / (moves[n] or 1) for n, p in params.items()}
    assert max(errors.values()) < 1e-4, {n: e for n, e in errors.items() if e >= 1e-4}


def test_buckets_with_different_row_counts_move_as_in_optax():
    """Some leaves lie in a bucket with few rows and some in one with many; they are mixed where the leaves between have no gradient."""
    generator = np.random.default_rng(0)
    shapes = {f"p{i:02}.{part}": (3,) if part == 1 else (16,) for i in range(7) for part in range(3) if i < 5 or part == 2}
    start, grads = ({n: generator.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()} for _ in range(2))
    params = {n: torch.nn.Parameter(torch.tensor(x)) for n, x in start.items()}
    tx = optax.chain(optax.clip_by_global_norm(1e3), neighbors(), optax.scale(-0.1))
    optimizer = torch_api.OptaxOptimizer(params.items(), tx, mask=lambda name, param: not name.endswith("2"))
    for live in (("0", "1"), ("0", "1", "2"), ("0", "2")):
        if live == ("0", "1", "2"):
            optimizer.set_trainable("*.2", True)
        before = {n: p.detach().numpy().copy() for n, p in params.items()}
        for n, p in params.items():
            p.grad = torch.tensor(grads[n]) if n.endswith(live) else None
        optimizer.step()
        given = {n: jnp.asarray(grads[n]) if n.endswith(live) else None for n in start}
        updates, _ = tx.update(given, tx.init(start))
        for n, p in params.items():
            np.testing.assert_allclose(p.detach().numpy() - before[n], 0 if updates[n] is None else updates[n], atol=1e-6)
