"""Derivative rule of recurrent layers: it equals jax's own for the plain loop, and accumulates no weight gradient in the loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracles import jitted

from bridge._process import x64
from bridge._tracing.ops import recurrent

pytestmark = pytest.mark.long

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
STEPS, BATCH, WIDTH = 5, 2, 3


def arguments(name, seed=0):
    random = np.random.default_rng(seed)
    wide = GATES[name] * WIDTH
    state = tuple(jnp.asarray(random.normal(size=(BATCH, WIDTH))) for _ in range(2 if name == "lstm" else 1))
    gates, weight, bias = (jnp.asarray(random.normal(size=shape)) for shape in ((STEPS, BATCH, wide), (wide, WIDTH), (wide,)))
    return gates, state, weight, bias


def ours(name, reverse):
    return lambda *given: recurrent._recurrence(recurrent._CELLS[name], reverse, True, *given)


def plain(name, reverse):
    def function(gates, state, weight, bias):
        def step(state, g):
            state = recurrent._CELLS[name].new(g, state[0] @ weight.T + bias, state, False)
            return state, state[0]

        last, out = lax.scan(step, state, gates, reverse=reverse)
        return out, last

    return function


def weighed(function):
    def loss(*given):
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)) for x in jax.tree.leaves(function(*given)))

    return loss


def derivatives(function, given, direction):
    """Return values, tangents, the gradient, its tangents, and gradients of a batch, from one program."""
    gradient = jax.grad(weighed(function), argnums=(0, 1, 2, 3))

    @jitted
    def every(given, direction):
        both = jax.tree.map(lambda a, b: jnp.stack([a, b]), given, direction)
        return jax.jvp(function, given, direction), jax.jvp(gradient, given, direction), jax.vmap(gradient)(*both)

    return jax.tree.leaves(every(given, direction))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_derivatives_equal_those_of_the_plain_loop(name, reverse):
    with x64():
        given, direction = arguments(name), arguments(name, seed=1)
        for a, b in zip(*(derivatives(f(name, reverse), given, direction) for f in (ours, plain)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", GATES)
def test_comparison_detects_a_gradient_without_the_other_gates(name, monkeypatch):
    cell = recurrent._CELLS[name]
    forgets = cell._replace(slopes=lambda *given: jax.tree.map(lambda x: x.at[..., 0].set(0.0), cell.slopes(*given)))
    monkeypatch.setitem(recurrent._CELLS, name, forgets)
    with pytest.raises(AssertionError):
        test_derivatives_equal_those_of_the_plain_loop(name, False)


def compiled(function, given, wanted=(0, 1, 2, 3)):
    """Return the text of the gradient's program without unused equations."""
    return jax.jit(jax.grad(weighed(function), argnums=wanted)).lower(*given).compile().as_text()


def products_in_loops(text):
    parts = dict(re.findall(r"^(?:ENTRY )?(%\S+) \(.*?\{$(.*?)^\}", text, re.MULTILINE | re.DOTALL))

    def products(name):
        return parts[name].count(" dot(") + sum(map(products, re.findall(r"calls=(%[\w.\-]+)", parts[name])))

    return sorted(products(name) for name in re.findall(r"body=(%[\w.\-]+)", text))


@pytest.mark.parametrize("name", GATES)
def test_loop_has_one_product_per_step_and_direction(name):
    given = jax.tree.map(lambda x: x.astype(jnp.float32), arguments(name))
    assert products_in_loops(compiled(ours(name, False), given)) == [1, 1]
    assert products_in_loops(compiled(plain(name, False), given)) == [1, 2]


def test_a_frozen_weight_costs_no_product():
    given = jax.tree.map(lambda x: x.astype(jnp.float32), arguments("lstm"))
    counts = [compiled(ours("lstm", False), given, wanted).count(" dot(") for wanted in ((0, 1, 3), (0, 1, 2, 3))]
    assert counts == [2, 3]
