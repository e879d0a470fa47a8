"""Kernels shared by many leaves; their scalar arithmetic is computed once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import movement_error
from sampling import sampled

import torch_api
from bridge._compiler.passes import kernel_class, per_kind
from bridge._process import x64

pytestmark = pytest.mark.quick

TABLE = np.linspace(0.5, 1.5, 5).astype(np.float32)


def adamlike(arrays, scalars, common):
    p, m, g = arrays
    t, lr = scalars
    decay, scale = common
    t = t + 1
    m = decay * m + (1 - decay) * g * scale
    rate = lr / (1 - decay ** t.astype(jnp.float32))
    return p - rate * m, [m], t


def branching(arrays, scalars, common):
    p, m, g = arrays
    t, lr = scalars
    decay, _ = common
    warm = jnp.where(t < 3, lr * jnp.asarray(TABLE)[jnp.minimum(t, 4)], lr * jnp.sum(jnp.asarray(TABLE)))
    skip = (t % 2 == 0) & (lr > 0.1)
    return jnp.where(skip, p, p - warm * g), [jnp.where(g > warm, m, m + decay)], jnp.where(skip, t, t + 2)


def looped(arrays, scalars, common):
    p, m, g = arrays
    t, lr = scalars
    decay, _ = common
    total = jax.lax.fori_loop(0, 3, lambda i, x: x * decay + i, lr)
    branch = jax.lax.cond(t > 2, lambda x: x * 2, lambda x: x - 1, total)
    return p * branch, [m + jnp.sum(g)], t * 0 + t  # one of the results does not depend on an array


def passes_inputs_through(arrays, scalars, common):
    """Return a scalar input, an array input and a constant unchanged."""
    p, m, _ = arrays
    t, _ = scalars
    return p, [jnp.full_like(m, 3.0) * common[1]], t


def of_scalars_only(arrays, scalars, common):
    t, lr = scalars
    return jnp.broadcast_to(lr * common[0], (4, 25)), [jnp.zeros((4, 25), jnp.float32) + t.astype(jnp.float32)], t - 1


FUNCTIONS = [adamlike, branching, looped, passes_inputs_through, of_scalars_only]


def inputs(count, shape=(4, 25)):
    random = np.random.default_rng(count)
    arrays = [tuple(random.normal(size=shape).astype(np.float32) for _ in range(3)) for _ in range(count)]
    scalars = [(np.int32(i + 1), np.float32(0.05 * (i + 1))) for i in range(count)]
    return jax.tree.map(jnp.asarray, (arrays, scalars, (np.float32(0.9), np.float32(2.0))))


def alone(function, arrays, scalars, common):
    return per_kind.for_each([kernel_class.KernelClass(function, arrays, scalars)], common)[0]


@pytest.mark.parametrize("count", sampled([2, 1, 7]))
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(4, 25), (5,), ()], ids=str)
def test_for_each_equals_a_plain_loop(function, count, shape):
    if function is of_scalars_only and shape != (4, 25):
        shape = 4, 25
    with x64():
        arrays, scalars, common = inputs(count, shape)
        found = jax.jit(lambda *given: alone(function, *given))(arrays, scalars, common)
        expected = [jax.jit(function)(a, s, common) for a, s in zip(arrays, scalars, strict=True)]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_for_each_uses_the_scalars_of_each_leaf():
    """The comparison detects swapped scalars: with equal arrays, each result must use its own scalars."""
    arrays, scalars, common = inputs(4)
    found = alone(adamlike, [arrays[0]] * 4, scalars, common)
    assert len({float(p.sum()) for p, _, _ in found}) == 4
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found[1][0], adamlike(arrays[0], scalars[2], common)[0], rtol=1e-6)


def test_scalar_arithmetic_is_traced_once_for_all_leaves():
    arrays, scalars, common = inputs(12)
    powers = lambda function: str(jax.make_jaxpr(function)(arrays, scalars, common)).count(" pow ")  # noqa: E731
    assert powers(lambda *given: alone(adamlike, *given)) == 1
    assert powers(lambda a, s, c: [adamlike(x, y, c) for x, y in zip(a, s, strict=True)]) == 12


def test_other_shapes_and_rows_share_scalar_arithmetic():
    """Leaves of three shapes and a bucket of three rows share scalar arithmetic, next to leaves with other arithmetic."""
    arrays, scalars, common = inputs(9)
    flat = jax.tree.map(lambda x: x.reshape(-1), arrays)
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    kinds = [
        kernel_class.KernelClass(adamlike, arrays[:2], scalars[:2]),
        kernel_class.KernelClass(branching, arrays[2:4], scalars[2:4]),
        kernel_class.KernelClass(adamlike, flat[4:5], scalars[4:5]),
        kernel_class.KernelClass(adamlike, [stack(flat[5:8])], [stack(scalars[5:8])], rows=3),
        kernel_class.KernelClass(passes_inputs_through, arrays[8:], scalars[8:]),
    ]
    both = lambda common: per_kind.for_each(kinds, common)  # noqa: E731
    found = jax.jit(both)(common)
    found[3] = [jax.tree.map(lambda x, i=i: x[i], found[3][0]) for i in range(3)]
    given = [*arrays[:4], *flat[4:8], arrays[8]]
    functions = [adamlike] * 2 + [branching] * 2 + [adamlike] * 4 + [passes_inputs_through]
    expected = [jax.jit(function)(a, s, common) for function, a, s in zip(functions, given, scalars, strict=True)]
    for x, y in zip([x for kind in found for x in kind], expected, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), x, y)
    alone = [jax.jit(function)(a, scalars[0], common) for function, a in zip(functions, given, strict=True)]
    with pytest.raises(AssertionError):  # the comparison detects which scalars were used
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), [x for kind in found for x in kind][7], alone[7])
    assert str(jax.make_jaxpr(both)(common)).count(" pow ") == 1


def in_pairs(arrays, scalars, common):
    """A kernel that is not flat inside, as complex arrays are computed."""
    p, m, g = (jnp.stack([x, x], axis=-1) for x in arrays)
    t, lr = scalars
    return (p - lr * g).sum(-1), [(m * common[0]).sum(-1)], t


@pytest.mark.parametrize(("function", "traces"), [(adamlike, 1), (branching, 1), (passes_inputs_through, 1), (in_pairs, 4)])
def test_size_class_is_traced_once(function, traces):
    calls = []

    def counted(*given):
        calls.append(None)
        return function(*given)

    sizes = 70, 300, 1, 65
    arrays, scalars, common = zip(*(inputs(count, (size,)) for count, size in zip((1, 2, 3, 5), sizes, strict=True)), strict=True)
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    with x64():
        kinds = [kernel_class.KernelClass(counted, a, s, None, counted) for a, s in zip(arrays[:3], scalars, strict=False)]
        kinds.append(kernel_class.KernelClass(counted, [stack(arrays[3])], [stack(scalars[3])], 5, counted))
        found = jax.jit(lambda common: per_kind.for_each(kinds, common))(common[0])
        assert len(calls) == traces
        found[3] = [jax.tree.map(lambda x, i=i: x[i], found[3][0]) for i in range(5)]
        for kind, a, s in zip(found, arrays, scalars, strict=True):
            expected = [jax.jit(function)(*each, common[0]) for each in zip(a, s, strict=True)]
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), kind, expected)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), kind) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


def test_repeated_scalar_arithmetic_is_computed_once():
    def twice(arrays, scalars, common):
        (first, _, t), (_, m, _) = (adamlike([x * one for x in arrays], scalars, common[:2]) for one in (1, common[2]))
        return first, m, t

    arrays, scalars, common = inputs(3)
    program = str(jax.make_jaxpr(lambda *given: alone(twice, *given))(arrays, scalars, (*common, np.float32(1.0))))
    assert program.count(" pow ") == 1


def test_update_of_equal_leaves_is_a_function_called_for_each():
    def lines(count, function):
        arrays, scalars, common = inputs(count)
        return str(jax.jit(function).lower(arrays, scalars, common).as_text()).count("stablehlo.subtract")

    ours, plain = (lambda *given: alone(adamlike, *given)), lambda a, s, c: [adamlike(x, y, c) for x, y in zip(a, s, strict=True)]
    assert lines(2, ours) == lines(12, ours)
    assert lines(12, plain) == 6 * lines(2, plain)


def by_size(at):
    """A transformation that treats leaves with more than `at` elements differently."""

    def update(updates, state, params):
        return jax.tree.map(lambda g, x: -0.1 * (g + 0.5 * x if x.size > at else g), updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("at", "sizes"), [(1000, (40, 100, 500, 2000, 5000, 7000)), (12, (10,) * 8), (7000, (40, 100, 500, 2000, 5000, 7001))]
)
def test_branch_on_leaf_size_uses_the_size_of_the_leaf(at, sizes):
    """Sizes of one class share a trace, and small leaves lie in rows that are longer than they are."""
    params = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    twins = [jnp.asarray(p.detach().numpy().copy()) for p in params]
    start = [p.detach().clone() for p in params]
    optimizer, tx = torch_api.OptaxOptimizer(params, by_size(at)), by_size(at)
    state = tx.init(twins)
    for _ in range(20):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        updates, state = tx.update([jnp.asarray(g.numpy()) for g in grads], state, twins)
        twins = optax.apply_updates(twins, updates)
    assert max(movement_error(p, torch.from_numpy(np.array(x)), s) for p, x, s in zip(params, twins, start, strict=True)) < 1e-5
