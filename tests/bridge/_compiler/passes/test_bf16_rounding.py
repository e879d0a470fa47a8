"""The last rounding to bfloat16 is written with bit operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expecttest import assert_expected_inline
from jax.extend.core import jaxpr_as_fun
from jaxprs import printed

from bridge._compiler.passes.bf16_rounding import round_bf16_by_bits

pytestmark = pytest.mark.quick

HALF = jax.ShapeDtypeStruct((4,), jnp.bfloat16)


def test_last_rounding_becomes_bit_operations():
    closed = jax.make_jaxpr(lambda p: (p.astype(jnp.float32) * 3).astype(jnp.bfloat16))(HALF)
    assert_expected_inline(
        printed(closed),
        """\
{ lambda ; a:bf16[4]. let
    b:f32[4] = convert_element_type[new_dtype=float32] a
    c:f32[4] = mul b 3.0:f32[]
    d:bf16[4] = convert_element_type[new_dtype=bfloat16] c
  in (d,) }""",
    )
    assert_expected_inline(
        printed(round_bf16_by_bits(closed)),
        """\
{ lambda ; a:bf16[4]. let
    b:f32[4] = convert_element_type[new_dtype=float32] a
    c:f32[4] = mul b 3.0:f32[]
    d:f32[4] = reduce_precision[exponent_bits=8 mantissa_bits=7] c
    e:u32[4] = bitcast_convert_type[new_dtype=uint32] d
    f:u32[4] = bitcast_convert_type[new_dtype=uint32] e
    g:u32[4] = shift_right_logical f 16:u32[]
    h:u16[4] = convert_element_type[new_dtype=uint16] g
    i:bf16[4] = bitcast_convert_type[new_dtype=bfloat16] h
  in (i,) }""",
    )
    x = jnp.array([1.0, -0.0, 3.140625, jnp.inf], jnp.bfloat16)
    (found,), (expected,) = (jax.jit(jaxpr_as_fun(each))(x) for each in (round_bf16_by_bits(closed), closed))
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), np.asarray(expected).view(np.uint16))


def test_rounding_with_another_reader_is_kept():
    closed = jax.make_jaxpr(lambda p: ((half := (p.astype(jnp.float32) * 3).astype(jnp.bfloat16)), half + half))(HALF)
    assert round_bf16_by_bits(closed) is closed
