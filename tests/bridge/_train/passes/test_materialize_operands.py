"""Operands of matrix products with other readers are materialized by a barrier, so that no layer is computed twice."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxprs import operations, printed
from sampling import sampled
from torch import nn

import torch_api
from bridge._ir import classify
from bridge._train import train_program
from bridge._train.passes import materialize_operands

X, W = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32), np.ones((32, 8), np.float32)
IMAGES, KERNEL = np.linspace(-1, 1, 2 * 8 * 8 * 16, dtype=np.float32).reshape(2, 16, 8, 8), np.ones((4, 16, 3, 3), np.float32)


def rewritten(function, *arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    return closed, ClosedJaxpr(materialize_operands.materialize_operands(closed.jaxpr), closed.consts)


def barriers(closed):
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in operations(closed.jaxpr))


def shared(x, w):
    y = jnp.tanh(x)
    return y @ w, y.sum(0)


def called(x, w):
    y = jax.jit(lambda x: jnp.tanh(x) * 2)(x)
    return jax.jit(lambda y: y.reshape(64, 32) @ w)(y), y.sum(0)


def within(x, w):
    return jax.jit(shared)(x, w)


def looped(x, w):
    return lax.scan(lambda s, _: ((shared(s, w)[0].sum() * s), shared(s, w)[1]), x, None, 2)


def turned(x, w):
    y = jnp.tanh(x).T
    return y.T @ w, y.sum(0)


def joined(x, w):
    y = jnp.concatenate([x[32:], x[:32]])
    return y.reshape(64, 32) @ w, y.sum(0)


@pytest.mark.parametrize("function", [shared, called, within, looped, turned, joined])
def test_operand_with_another_reader_is_materialized_without_changing_values(function):
    before, after = rewritten(function, X, W)
    assert barriers(before) == 0
    assert barriers(after) > 0
    for a, b in zip(jaxpr_as_fun(before)(X, W), jaxpr_as_fun(after)(X, W), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, w: jnp.tanh(x) @ w, (X, W)),  # one reader
        (lambda x, w: (jnp.tanh(x).sum(0), jnp.tanh(x).max(0)), (X, W)),  # no product
        (lambda x, w: (x @ w, x.sum(0)), (X, W)),  # an argument is in memory already
        (lambda x, w: (lambda y: (y @ w, y.sum(0)))(x @ x.T @ x), (X, W)),  # the result of a product is, too
        (shared, (X[:4], W)),  # too small
    ],
)
def test_operand_in_memory_or_with_one_reader_is_unchanged(function, arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    assert materialize_operands.materialize_operands(closed.jaxpr) is closed.jaxpr


def test_operand_of_a_convolution_is_materialized_channels_last():
    def convolved(x, w):
        y = jnp.tanh(x)
        return lax.conv_general_dilated(y, w, (1, 1), "SAME"), y.sum((0, 2, 3))

    _, after = rewritten(convolved, IMAGES, KERNEL)
    assert barriers(after) == 1
    assert "f32[2,8,8,16] = optimization_barrier" in str(after)


def test_value_that_is_convolved_and_pooled_is_materialized():
    def pooled(x, w):
        y = jnp.tanh(x)
        pool = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "SAME")
        return pool, lax.conv_general_dilated(y, w, (1, 1), "SAME")

    _, after = rewritten(pooled, IMAGES, KERNEL)
    assert barriers(after) == 1


def test_readers_behind_a_long_chain_of_views_count():
    def chain(x, w):
        y = jnp.tanh(x)
        for _ in range(1500):
            y = lax.transpose(y, (1, 0))
        return y @ w, y.sum(0)

    assert barriers(rewritten(chain, X, W)[1]) == 1


def test_shared_function_is_visited_once(monkeypatch):
    """The function is called a million times in total."""
    cheap, product = jax.jit(lambda x: jnp.tanh(x)), jax.jit(lambda x: x @ np.eye(32, dtype=np.float32))
    for _ in range(20):
        cheap, product = jax.jit(lambda x, f=cheap: f(f(x))), jax.jit(lambda x, f=product: f(f(x)))
    count, own = [], materialize_operands._rewrite
    monkeypatch.setattr(materialize_operands, "_rewrite", lambda known, jaxpr: count.append(1) or own(known, jaxpr))
    _, after = rewritten(lambda x: (lambda y: (product(y), y.sum(0)))(cheap(x)), X)
    assert len(count) <= 44
    assert barriers(after) == 1


class Layers(nn.Module):
    def __init__(self, depth, kind):
        super().__init__()
        self.norms = nn.ModuleList((nn.BatchNorm1d if kind == "residual network" else nn.LayerNorm)(64) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.kind = kind

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if self.kind == "norm first":
                x = x + layer(norm(x))
            else:
                x = norm(x + layer(x)) if self.kind == "encoder" else torch.relu(x + norm(layer(x)))
        return x


class Attention(nn.Module):
    """An attention layer whose gradient of the joint projection concatenates three parts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x):
        query, key, value = self.layer(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value)


def compiled(model, x):
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=1e-3)
    train_step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), optimizer)
    train_step(x)
    (program,) = train_step._programs.values()
    return program.call.as_text()


def joins():
    """Return how often parts are joined into a tensor as large as the layer's output."""
    text = compiled(Attention(), torch.randn(4, 16, 32))
    shapes = re.findall(r"f32\[([\d,]+)\]\S* concatenate\(", text)
    return sum(math.prod(map(int, shape.split(","))) == 4 * 16 * 96 for shape in shapes)


def test_gradient_of_parts_is_concatenated_once_for_bias_and_weight(monkeypatch):
    assert joins() == 1
    monkeypatch.setattr(materialize_operands, "_RECOMPUTED", classify.ELEMENTWISE)
    assert joins() == 2


def most_arguments(depth, kind):
    """Return the most operands of any fusion; with recomputed values this would grow with the depth."""
    text = compiled(Layers(depth, kind), torch.randn(32, 64))
    entry = text[text.index("\nENTRY") :]
    return max(line.split("fusion(")[1].split(")")[0].count("%") for line in entry.splitlines() if " fusion(" in line)


@pytest.mark.parametrize("kind", sampled(["encoder", "residual network"]))
def test_train_step_does_not_recompute_layers(kind, monkeypatch):
    shallow, deep = (most_arguments(depth, kind) for depth in (3, 7))
    assert deep == shallow
    monkeypatch.setattr(train_program, "materialize_operands", lambda jaxpr: jaxpr)
    shallow, deep = (most_arguments(depth, kind) for depth in (3, 7))
    assert deep > shallow + 3


def test_train_step_with_norm_first_layers_does_not_recompute_layers():
    assert most_arguments(10, "norm first") == most_arguments(4, "norm first")


@pytest.mark.quick
def test_operand_with_another_reader_gets_a_barrier():
    def function(x, w):
        y = jnp.sin(x)
        return y @ w, y.sum()

    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((32, 64), np.float32), jax.ShapeDtypeStruct((64, 2), np.float32))
    assert_expected_inline(
        printed(closed),
        """\
{ lambda ; a:f32[32,64] b:f32[64,2]. let
    c:f32[32,64] = sin a
    d:f32[32,2] = dot_general[
      dimension_numbers=(([1], [0]), ([], []))
      preferred_element_type=float32] c b
    e:f32[] = reduce_sum[axes=(0, 1)] c
  in (d, e) }""",
    )
    assert_expected_inline(
        printed(materialize_operands.materialize_operands(closed.jaxpr)),
        """\
{ lambda ; a:f32[32,64] b:f32[64,2]. let
    c:f32[32,64] = sin a
    d:f32[32,64] = jit[
      name=stored
      jaxpr={ lambda ; c:f32[32,64]. let
          d:f32[32,64] = optimization_barrier c
        in (d,) }] c
    e:f32[32,2] = dot_general[
      dimension_numbers=(([1], [0]), ([], []))
      preferred_element_type=float32] d b
    f:f32[] = reduce_sum[axes=(0, 1)] d
  in (e, f) }""",
    )
