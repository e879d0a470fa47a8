"""Updates with many operands are rewritten with few; branches become selects."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from expecttest import assert_expected_inline
from jaxprs import printed
from oracles import FUSES, clones, movement_error, random_grads, set_grads

import torch_api
from bridge._compiler.passes import operand_limit, per_kind
from bridge._ir import jaxpr

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

SIZE = 18432


def parameters(count=2, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(SIZE).to(dtype)) for _ in range(count)]


def stepped(tx, params):
    optimizer = torch_api.OptaxOptimizer([(f"w{i}", p) for i, p in enumerate(params)], tx)
    set_grads(params, random_grads(params))
    optimizer.step()
    return optimizer


# (make, bytes per element) of updates that XLA would split into several loops: equal constants, branches, or a stored gradient.
MANY = {
    "optimistic_adam_v2": (lambda: optax.optimistic_adam_v2(1e-3), 36),
    "ademamix": (lambda: optax.contrib.ademamix(1e-3), 36),
    "adan": (lambda: optax.adan(1e-3), 44),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adamw(1e-3), 3), 36),
    "conditionally_transform": (lambda: optax.conditionally_transform(optax.adam(1e-3), lambda step: step % 2 == 0), 28),
    "conditionally_mask": (lambda: optax.conditionally_mask(optax.adam(1e-3), lambda step: step % 2 == 0), 28),
    "optimistic_gradient_descent": (lambda: optax.optimistic_gradient_descent(1e-3), 20),
}
MANY = {name: case for name, case in MANY.items() if hasattr(optax, name) or hasattr(optax.contrib, name)}


@FUSES
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("make", "least"), MANY.values(), ids=MANY)
def test_two_parameters_read_and_write_each_array_once(make, least):
    optimizer = stepped(make(), params := parameters())
    assert optimizer.bytes_accessed() / (SIZE * len(params)) == pytest.approx(least, rel=0.02)


@FUSES
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this XLA writes loops of many operands without our pass too")
@pytest.mark.usefixtures("standard_promotion")
def test_comparison_detects_too_many_operands(monkeypatch):
    monkeypatch.setattr(per_kind, "limit_operands", lambda closed, size: closed)
    monkeypatch.setattr(per_kind, "_families", {})
    monkeypatch.setattr("bridge._runtime.cache._programs", {})
    optimizer = stepped(MANY["ademamix"][0](), params := parameters())
    assert optimizer.bytes_accessed() / (SIZE * len(params)) > 1.5 * MANY["ademamix"][1]


@FUSES
@pytest.mark.usefixtures("standard_promotion")
def test_loop_has_few_operands():
    optimizer = stepped(MANY["ademamix"][0](), parameters())
    text = optimizer._launch_cache.last_used[0].executable.update.as_text()
    loops = [line for line in text.splitlines() if re.search(rf"= \(f32\[{SIZE}\].* fusion\(", line)]
    assert len(loops) == 2
    assert all(re.findall(r" fusion\((.*?)\), kind", line)[0].count("%") < 12 for line in loops)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", MANY)
def test_steps_match_optax(name):
    params, tx = parameters(), MANY[name][0]()
    start = clones(params)
    optimizer = torch_api.OptaxOptimizer([(f"w{i}", p) for i, p in enumerate(params)], tx)
    theirs = {f"w{i}": jnp.array(p.detach().numpy()) for i, p in enumerate(params)}
    others = dict(theirs)  # these move by a factor 1.0001 more, so the comparison can fail
    state, update = tx.init(theirs), jax.jit(tx.update)
    for _ in range(20):
        grads = random_grads(params)
        set_grads(params, grads)
        optimizer.step()
        updates, state = update({f"w{i}": jnp.array(g.numpy()) for i, g in enumerate(grads)}, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        others = optax.apply_updates(others, jax.tree.map(lambda u: u * np.float32(1.0001), updates))

    errors = [
        max(
            movement_error(p, torch.from_numpy(np.array(end[f"w{i}"])), first)
            for i, (p, first) in enumerate(zip(params, start, strict=True))
        )
        for end in (theirs, others)
    ]
    assert errors[0] < 2e-5 < errors[1]


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jnp.ones(shape, jnp.float32) for shape in shapes))


def many(x, s):
    """Use thirteen constants besides 0 and 1, and a scalar that is read twice and divides."""
    for k in range(13):
        x = x * np.float32(1.0 + k / 64) + np.float32(k % 2)
    return jnp.where(x > 0, x / s, x - s) + np.float32(0.0)


def test_each_equation_gets_its_own_scalars():
    closed = traced(many, (64,), ())
    written = operand_limit.limit_operands(closed, 64)
    spread = [eqn.invars[0] for eqn in written.jaxpr.eqns if eqn.primitive.name == "broadcast_in_dim" and not hasattr(eqn.invars[0], "val")]
    assert len(spread) == len(set(spread)) > 13
    assert {eqn.primitive.name for eqn in written.jaxpr.eqns if eqn.outvars[0].aval.shape == (64,)}.isdisjoint({"div"})
    x, s = np.linspace(-2, 2, 64, dtype=np.float32), np.float32(3)
    ours = jax.jit(jax.extend.core.jaxpr_as_fun(written))(x, s)[0]
    np.testing.assert_allclose(ours, many(x.astype(np.float64), 3.0), rtol=1e-6)


def scaled_by_sum_of(function):
    """A joint transformation: the gradient is scaled by the sum of `function` over all leaves."""

    def update(grads, state, params=None):
        total = sum(jnp.sum(function(g)) for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda g: -0.1 * g / (1 + total * total), grads), state

    return optax.GradientTransformation(lambda params: (), update)


def clamped(g):
    """Use two scalars in each equation."""
    for _ in range(9):
        g = jax.lax.clamp(np.float32(-0.7), g, np.float32(0.7))
    return g


def halves(g):
    """Bitcast each 32-bit number to two 16-bit numbers."""
    for k in range(14):
        g = g * np.float32(1 + k / 64)
    return jax.lax.bitcast_convert_type(g, jnp.uint16).astype(jnp.float32) * np.float32(2.0**-16)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("shapes", [[(40,), (40,)], [(9, 4)] * 6, [(1,), (1, 1), (7,)]], ids=str)
@pytest.mark.parametrize("function", [clamped, halves])
def test_sums_over_equations_with_several_scalars(function, shapes):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    grads, start = random_grads(params), clones(params)
    optimizer = torch_api.OptaxOptimizer([(f"w{i}", p) for i, p in enumerate(params)], scaled_by_sum_of(function))
    set_grads(params, grads)
    optimizer.step()
    updates, _ = scaled_by_sum_of(function).update([jnp.asarray(g.numpy()) for g in grads], ())
    for p, first, update in zip(params, start, updates, strict=True):
        torch.testing.assert_close(p.detach() - first.detach(), torch.from_numpy(np.array(update)), rtol=1e-3, atol=1e-6)


def test_jaxpr_with_few_operands_is_unchanged():
    closed = traced(lambda x, s: x * np.float32(0.9) + s, (64,), ())
    assert operand_limit.limit_operands(closed, 64) is closed


def test_jaxpr_with_too_many_scalars_is_unchanged():
    def long(x):
        for k in range(operand_limit._MAX_SCALAR_READS // 2 + 1):
            x = x * np.float32(1 + k / 64) + np.float32(k / 64 + 0.1)
        return x

    closed = traced(long, (64,))
    assert operand_limit.limit_operands(closed, 64) is closed


@pytest.mark.filterwarnings("error")
def test_constant_with_infinite_reciprocal_does_not_warn():
    closed = traced(lambda x, s: many(x, s) / np.float32(1e-40), (64,), ())
    assert operand_limit.limit_operands(closed, 64) is not closed


# ---------------------------------------------------------------------- branches


def branched(index, x):
    return jax.lax.switch(index, [lambda x: (x * 2, x), lambda x: (jax.nn.relu(x), x * 0 + 1), lambda x: (x - 1, x)], x)


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 9])
def test_select_of_branches_equals_the_chosen_branch(index):
    closed = jax.make_jaxpr(branched)(jnp.int32(0), jnp.ones(4))
    opened = jaxpr.inline_calls(closed.jaxpr, closed.consts)
    assert "cond" in str(closed)
    assert "cond" not in str(opened)
    x = jnp.asarray([-1.0, 0.5, jnp.nan, 3.0])
    for ours, theirs in zip(jax.extend.core.jaxpr_as_fun(opened)(jnp.int32(index), x), branched(jnp.int32(index), x), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_branch_with_a_reduction_stays_a_cond():
    closed = jax.make_jaxpr(lambda go, x: jax.lax.cond(go, lambda x: x / jnp.sum(x), lambda x: x, x))(True, jnp.ones(4))
    assert "cond" in str(jaxpr.inline_calls(closed.jaxpr, closed.consts))


def test_branch_with_a_callback_stays_a_cond():
    seen = []

    def told(x):
        jax.debug.callback(lambda: seen.append(1))
        return x

    closed = jax.make_jaxpr(lambda go, x: jax.lax.cond(go, told, lambda x: x, x))(True, jnp.ones(4))
    opened = jaxpr.inline_calls(closed.jaxpr, closed.consts)
    jax.extend.core.jaxpr_as_fun(opened)(np.int32(0), jnp.ones(4))
    jax.effects_barrier()
    assert not seen


def test_cond_with_constant_index_becomes_its_branch():
    closed = jax.make_jaxpr(lambda x: jax.lax.cond(np.bool_(True), lambda x: x / jnp.sum(x), lambda x: jnp.cumsum(x), x))(jnp.ones(4))
    if not hasattr(closed.jaxpr.eqns[-1].invars[0], "val"):
        pytest.skip("this jax computes the index")
    opened = jaxpr.inline_calls(closed.jaxpr, closed.consts)
    assert "cond" in str(closed)
    assert not re.search("cond|cumsum", str(opened))
    np.testing.assert_array_equal(jax.extend.core.jaxpr_as_fun(opened)(jnp.arange(4.0))[0], np.arange(4, dtype=np.float32) / np.float32(6))


@pytest.mark.usefixtures("standard_promotion")
def test_apply_if_finite_skips_nonfinite_updates():
    params = parameters()
    optimizer = stepped(optax.apply_if_finite(optax.adam(1e-2), 3), params)
    before = clones(params)
    grads = random_grads(params)
    grads[1][7] = torch.inf
    set_grads(params, grads)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    set_grads(params, random_grads(params))
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_each_equation_gets_its_own_scalars_and_multiplies_by_reciprocals(monkeypatch):
    monkeypatch.setattr(operand_limit, "_MAX_OPERANDS", 3)
    array, number = jax.ShapeDtypeStruct((4,), np.float32), jax.ShapeDtypeStruct((), np.float32)
    closed = jax.make_jaxpr(lambda p, n, m: p / n + p * m)(array, number, number)
    assert_expected_inline(
        printed(closed),
        """\
{ lambda ; a:f32[4] b:f32[] c:f32[]. let
    d:f32[4] = div a b
    e:f32[4] = mul a c
    f:f32[4] = add d e
  in (f,) }""",
    )
    assert_expected_inline(
        printed(operand_limit.limit_operands(closed, 4)),
        """\
{ lambda ; a:f32[4] b:f32[] c:f32[]. let
    d:f32[] = div 1.0:f32[] b
    e:f32[] = copy d
    f:f32[4] = broadcast_in_dim e
    g:f32[4] = mul a f
    h:f32[] = copy c
    i:f32[4] = broadcast_in_dim h
    j:f32[4] = mul a i
    k:f32[4] = add g j
  in (k,) }""",
    )
    monkeypatch.undo()
    assert operand_limit.limit_operands(closed, 4) is closed
