"""Matrix products and transpositions of train steps are rewritten for XLA's CPU compiler with the same results."""

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
from torch import nn

import torch_api
from bridge._compiler import leaf_update, update
from bridge._ir import jaxpr as products_jaxpr
from bridge._ir.queries import properties_of
from bridge._process import x64
from bridge._train import train_program
from bridge._train.passes import matmul_layout
from bridge._xla import multi_output_fusion

needs_float32_result = pytest.mark.skipif(not matmul_layout._HAS_FLOAT32_RESULT, reason="products of bfloat16 are not rewritten")

# Shapes of both operands, contracted and batch dimensions of each: left smaller, right smaller, equal, two contracted dimensions in
# another order, with a batch.
ACROSS = [
    ((64, 3), (64, 9), ((0,), (0,)), ((), ())),
    ((64, 9), (64, 3), ((0,), (0,)), ((), ())),
    ((64, 4), (64, 4), ((0,), (0,)), ((), ())),
    ((8, 6, 9), (6, 8, 3), ((0, 1), (1, 0)), ((), ())),
    ((6, 8, 3), (8, 6, 9), ((1, 0), (0, 1)), ((), ())),
    ((2, 5, 40, 7), (2, 5, 40, 4), ((2,), (2,)), ((0, 1), (0, 1))),
    ((64, 3, 3), (64, 2, 2), ((0,), (0,)), ((), ())),
]


def rewritten(f, *arguments):
    """Return the result of the rewritten program of f, and its jaxpr."""
    closed = jax.make_jaxpr(f)(*arguments)
    jaxpr = matmul_layout.arrange_matmuls(closed.jaxpr)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*arguments), jaxpr


def equations(jaxpr, name):
    return [eqn for eqn in operations(jaxpr) if eqn.primitive.name == name]


@pytest.mark.parametrize("case", ACROSS, ids=str)
def test_product_over_leading_dims_transposes_its_smaller_side(case):
    left, right, over, batch = case
    random = np.random.default_rng(0)
    with x64():
        a, b = (jnp.asarray(random.normal(size=shape)) for shape in (left, right))
        product = lambda a, b: lax.dot_general(a, b, (over, batch))  # noqa: E731
        (ours,), jaxpr = rewritten(product, a, b)
        np.testing.assert_allclose(ours, product(a, b), rtol=1e-12, atol=1e-12)
    (dot,) = equations(jaxpr, "dot_general")
    assert not matmul_layout._contracts_leading_dims(dot)
    turned = equations(jaxpr, "transpose")[0].invars[0].aval.size
    result = np.prod([a.shape[i] for i in batch[0]], dtype=int) * ours.size
    assert turned == min(a.size, b.size) or turned + result >= max(a.size, b.size)


HALVES = [((40, 300), (300, 9), ((1,), (0,)), ((), ())), ((3, 40, 300), (3, 50, 300), ((2,), (2,)), ((0,), (0,))), *ACROSS]


@needs_float32_result
@pytest.mark.parametrize("case", HALVES, ids=str)
def test_bfloat16_product_is_summed_in_float32_and_rounded_once(case):
    left, right, over, batch = case
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in (left, right))
    product = lambda a, b: lax.dot_general(a, b, (over, batch))  # noqa: E731
    (ours,), jaxpr = rewritten(product, a, b)
    assert ours.dtype == jnp.bfloat16
    assert [eqn.outvars[0].aval.dtype for eqn in equations(jaxpr, "dot_general")] == [jnp.float32]
    assert [eqn.outvars[0].aval.dtype for eqn in equations(jax.make_jaxpr(product)(a, b).jaxpr, "dot_general")] == [jnp.bfloat16]
    with x64():
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (a, b)]
        exact, most = np.asarray(product(*wide)), np.asarray(product(*map(abs, wide)))
    bound = abs(exact) * 2.0**-8 + most * 2.0**-20  # half a unit in the last place, plus the error of a float32 sum
    assert (abs(np.asarray(ours, np.float64) - exact) <= bound).all()
    twice = 2 * (ours / 3 + (ours / 6).astype(jnp.bfloat16))  # this rounds several times
    assert (abs(np.asarray(twice, np.float64) - exact) > bound).any()


TRANSPOSED = [
    # (function, shapes, whether each operand was transposed): an operand is read untransposed unless that reorders the result.
    (lambda a, w: a @ w.T, (40, 300), (9, 300), (True, True)),
    (lambda a, w: a.T @ w.T, (300, 40), (9, 300), (True, True)),
    (lambda a, w: jnp.matmul(jnp.transpose(a, (1, 0, 2)), w.T), (3, 5, 300), (9, 300), (False, True)),
    (lambda a, w: lax.dot_general(jnp.transpose(a, (0, 2, 1)), w, (((1,), (0,)), ((), ()))), (3, 5, 300), (300, 9), (True, True)),
    (lambda a, w: jnp.matmul(a, jnp.swapaxes(w, 1, 2)), (3, 40, 300), (3, 9, 300), (True, False)),  # a batch
]


@needs_float32_result
@pytest.mark.parametrize("case", TRANSPOSED, ids=range(len(TRANSPOSED)))
def test_bfloat16_product_reads_untransposed_operands(case):
    f, *shapes, as_given = case
    random = np.random.default_rng(0)
    a, w = (jnp.asarray(random.integers(-8, 8, size=shape), jnp.bfloat16) for shape in shapes)
    (ours,), jaxpr = rewritten(f, a, w)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(f(a, w), np.float32))  # exact sums of integers, rounded once
    call = next(eqn for eqn in jaxpr.eqns if any(equations(body, "dot_general") for _, body in products_jaxpr.jaxpr_params(eqn)))
    assert [v in jaxpr.invars for v in call.invars] == list(as_given)


@pytest.mark.parametrize("dtypes", [("float16", None), ("float32", None), ("bfloat16", "float32")])
def test_products_of_other_dtypes_are_unchanged(dtypes):
    dtype, sums = dtypes
    closed = jax.make_jaxpr(lambda a, b: jnp.matmul(a, b, preferred_element_type=sums))(jnp.ones((4, 6), dtype), jnp.ones((6, 5), dtype))
    assert matmul_layout.arrange_matmuls(closed.jaxpr) is closed.jaxpr


def test_product_without_leading_contracted_dims_is_unchanged():
    a, b = jnp.ones((4, 6)), jnp.ones((6, 5))
    for f in (lambda a, b: a @ b, lambda a, b: jnp.concatenate([a, b.T[:4]]), lambda a, b: a.T[:5] @ jnp.ones(4), lambda a, b: b.T):
        closed = jax.make_jaxpr(f)(a, b)
        assert matmul_layout.arrange_matmuls(closed.jaxpr) is closed.jaxpr


def test_precision_stays_with_its_operand():
    a, b = jnp.ones((64, 9)), jnp.ones((64, 3))
    precision = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    _, jaxpr = rewritten(lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=precision), a, b)
    (dot,) = equations(jaxpr, "dot_general")
    assert dot.params["precision"] == precision[::-1]


def test_transposed_concatenation_concatenates_transposed_parts():
    a, b = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(12.0).reshape(1, 3, 4)
    f = lambda a, b: jnp.transpose(lax.concatenate([a, b], 0), (1, 0, 2))  # noqa: E731
    (ours,), jaxpr = rewritten(f, a, b)
    np.testing.assert_array_equal(ours, f(a, b))
    assert sorted(eqn.outvars[0].aval.shape for eqn in equations(jaxpr, "transpose")) == [(3, 1, 4), (3, 2, 4)]


def test_concatenation_with_another_reader_is_unchanged():
    a = jnp.ones((2, 3))
    closed = jax.make_jaxpr(lambda a: (lambda c: (c.T, c + 1))(lax.concatenate([a, a], 0)))(a)
    assert matmul_layout.arrange_matmuls(closed.jaxpr) is closed.jaxpr


def test_products_in_nested_jaxprs_are_rewritten():
    a, b = jnp.ones((64, 9)), jnp.ones((64, 3))

    def f(a, b):
        inner = jax.jit(lambda a, b: a.T @ b)(a, b)
        return lax.scan(lambda c, x: (c + x.T @ b, None), inner, jnp.stack([a, 2 * a]))[0]

    ours, jaxpr = rewritten(lambda a, b: lax.scan(lambda c, x: (c + lax.dot_general(x, b, (((0,), (0,)), ((), ()))), None),
                                jnp.zeros((9, 3)), jnp.stack([a, 2 * a]))[0], a, b)  # fmt: skip
    np.testing.assert_allclose(ours[0], 3 * a.T @ b)
    assert [matmul_layout._contracts_leading_dims(eqn) for eqn in equations(jaxpr, "dot_general")] == [False]
    np.testing.assert_allclose(rewritten(f, a, b)[0][0], f(a, b))


@pytest.mark.parametrize("sides", [(300, 200, 4000), (4000, 300, 200), (300, 4000, 200), (300, 300, 300)])
def test_size_of_a_product_is_that_of_its_smallest_operand(sides):
    m, k, n = sides
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((m, k), (k, n), (7, m, k), (7, k, n))]
    expected = sides != (300, 300, 300)
    for f, of in ((jnp.matmul, shapes[:2]), (jnp.matmul, shapes[2:]), (jax.jit(jnp.matmul), shapes[:2])):
        assert properties_of(jax.make_jaxpr(f)(*of)).has_large_product != expected


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@needs_float32_result
@pytest.mark.parametrize("broken", [False, True])
def test_bfloat16_train_step_has_no_bfloat16_products(broken, monkeypatch):
    if broken:
        monkeypatch.setattr(train_program, "arrange_matmuls", lambda jaxpr: jaxpr)
    model = Net().to(torch.bfloat16)
    train_step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), torch_api.MaskedAdamW(model.named_parameters(), lr=1e-3))
    train_step(torch.randn(64, 256).bfloat16())
    (program,) = train_step._programs.values()
    made = [eqn.outvars[0].aval.dtype for eqn in equations(program.jaxpr, "dot_general")]
    assert len(made) == 3 + 3 + 2  # forward, weight gradients, and input gradients except for the batch
    assert (jnp.bfloat16 in made) == broken


def copies_of_donated():
    """Return how many large arguments the program of a train step copies."""
    torch.manual_seed(0)
    model = Net()
    train_step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), torch_api.MaskedAdamW(model.named_parameters(), lr=1e-3))
    train_step(torch.randn(64, 256))
    (program,) = train_step._programs.values()
    text = program.call.as_text()
    return len(re.findall(r"f32\[65536\]\S* copy\((?:f32\[65536\]\S* )?%?(?:donated|[aA]rg|param)", text[text.index("\nENTRY") :]))


def test_donated_leaves_are_not_copied(monkeypatch):
    assert copies_of_donated() == 0
    monkeypatch.setattr(train_program, "barrier", lambda x: x)
    assert copies_of_donated() > 0


@pytest.mark.skipif(not multi_output_fusion.is_fusion_enabled(), reason="multi-output fusion is off")
def test_number_of_evaluations_depends_on_the_program_options(monkeypatch):
    asked = []
    passes_of = leaf_update.passes_of
    monkeypatch.setattr(update, "passes_of", lambda *given: asked.append((given[-1], passes_of(*given))) or asked[-1][1])
    assert copies_of_donated() == 0
    assert {fused for fused, _ in asked} == {False}
    assert {way.evaluations for _, way in asked} == {1}


@pytest.mark.quick
def test_smaller_operand_of_a_leading_dims_product_is_transposed():
    over_first = (((0,), (0,)), ((), ()))
    closed = jax.make_jaxpr(lambda x, g: lax.dot_general(x, g, over_first))(
        jax.ShapeDtypeStruct((8, 4), np.float32), jax.ShapeDtypeStruct((8, 2), np.float32)
    )
    assert_expected_inline(
        printed(closed),
        """\
{ lambda ; a:f32[8,4] b:f32[8,2]. let
    c:f32[4,2] = dot_general[dimension_numbers=(([0], [0]), ([], []))] a b
  in (c,) }""",
    )
    assert_expected_inline(
        printed(matmul_layout.arrange_matmuls(closed.jaxpr)),
        """\
{ lambda ; a:f32[8,4] b:f32[8,2]. let
    c:f32[4,2] = jit[
      name=<lambda>
      jaxpr={ lambda ; a:f32[8,4] b:f32[8,2]. let
          d:f32[2,8] = transpose[permutation=(1, 0)] b
          e:f32[2,8] = optimization_barrier d
          f:f32[2,4] = dot_general[
            dimension_numbers=(([1], [0]), ([], []))
            preferred_element_type=float32] e a
          g:f32[2,4] = optimization_barrier f
          c:f32[4,2] = transpose[permutation=(1, 0)] g
        in (c,) }] a b
  in (c,) }""",
    )


@pytest.mark.quick
def test_parts_of_a_transposed_concatenation_are_transposed():
    closed = jax.make_jaxpr(lambda x, y: lax.transpose(lax.concatenate([x, y], 1), (1, 0)))(
        jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((2, 1), np.float32)
    )
    assert_expected_inline(
        printed(closed),
        """\
{ lambda ; a:f32[2,3] b:f32[2,1]. let
    c:f32[2,4] = concatenate[dimension=1] a b
    d:f32[4,2] = transpose[permutation=(1, 0)] c
  in (d,) }""",
    )
    assert_expected_inline(
        printed(matmul_layout.arrange_matmuls(closed.jaxpr)),
        """\
{ lambda ; a:f32[2,3] b:f32[2,1]. let
    _:f32[2,4] = concatenate[dimension=1] a b
    c:f32[4,2] = jit[
      name=<lambda>
      jaxpr={ lambda ; a:f32[2,3] b:f32[2,1]. let
          d:f32[3,2] = transpose[permutation=(1, 0)] a
          e:f32[1,2] = transpose[permutation=(1, 0)] b
          c:f32[4,2] = concatenate[dimension=0] d e
        in (c,) }] a b
  in (c,) }""",
    )
