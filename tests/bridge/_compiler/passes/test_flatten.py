"""An update is written on flat arrays, with a reshape at each end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expecttest import assert_expected_inline
from jaxprs import printed

from bridge._compiler.passes.flatten import FlatProgram

pytestmark = pytest.mark.quick

MATRIX = jax.ShapeDtypeStruct((2, 3), np.float32)


def test_elementwise_operations_and_full_sums_use_flat_arrays():
    def update(grads):
        return {"w": grads["w"] * 2 + grads["w"].sum()}

    assert_expected_inline(
        printed(jax.make_jaxpr(update)({"w": MATRIX})),
        """\
{ lambda ; a:f32[2,3]. let
    b:f32[2,3] = mul a 2.0:f32[]
    c:f32[] = reduce_sum[axes=(0, 1)] a
    d:f32[2,3] = add b c
  in (d,) }""",
    )
    flat = FlatProgram.trace(update, {"w": MATRIX})
    assert flat.out_tree == jax.tree.structure({"w": 0})
    assert_expected_inline(
        printed(flat.closed),
        """\
{ lambda ; a:f32[2,3]. let
    b:f32[6] = reshape[new_sizes=(6,)] a
    c:f32[6] = mul b 2.0:f32[]
    d:f32[6] = reshape[new_sizes=(6,)] a
    e:f32[] = reduce_sum[axes=(0,)] d
    f:f32[] = reshape[new_sizes=()] e
    g:f32[6] = add c f
    h:f32[2,3] = reshape[new_sizes=(2, 3)] g
  in (h,) }""",
    )


def test_operation_that_needs_the_shape_keeps_it():
    flat = FlatProgram.trace(lambda x: jnp.cumsum(x, 1) * 2, MATRIX)
    assert_expected_inline(
        printed(flat.closed),
        """\
{ lambda ; a:f32[2,3]. let
    b:f32[2,3] = cumsum[axis=1 reverse=False] a
    c:f32[6] = reshape[new_sizes=(6,)] b
    d:f32[6] = mul c 2.0:f32[]
    e:f32[2,3] = reshape[new_sizes=(2, 3)] d
  in (e,) }""",
    )


def test_update_with_a_callback_is_not_rewritten():
    assert FlatProgram.trace(lambda x: (jax.debug.print("{}", x), x)[1], MATRIX) is None
