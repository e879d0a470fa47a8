"""Train steps in half types sum in float32, so that broadcast values have torch's gradient."""

import jax
import jax.numpy as jnp
import pytest
import torch
from expecttest import assert_expected_inline
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxprs import operations, printed
from torch import nn

import torch_api
from bridge._train import train_program
from bridge._train.passes import float32_sums

pytestmark = pytest.mark.quick

HALVES = ["bfloat16", "float16"]
# (shape of the broadcast value, shape of the result).
SHAPES = [((), (10, 30, 16)), ((), (4096,)), ((), (64, 512)), ((1, 30, 1), (128, 30, 16)), ((4, 1), (4, 4096))]


def with_sums(f, *arguments):
    """Return the results of f with its sums in float32, and its jaxpr."""
    closed = jax.make_jaxpr(f)(*arguments)
    jaxpr = float32_sums.sum_in_float32(closed.jaxpr)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*arguments), jaxpr


def summed_types(jaxpr):
    return [eqn.invars[0].aval.dtype for eqn in operations(jaxpr) if eqn.primitive.name == "reduce_sum"]


def gradient_of_broadcast(small, large):
    return jax.grad(lambda x: jnp.broadcast_to(x, large).astype(jnp.float32).sum()), jnp.ones(small)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradient_of_a_broadcast_counts_its_readers(shapes, dtype):
    f, x = gradient_of_broadcast(*shapes)
    x = x.astype(dtype)
    (ours,), jaxpr = with_sums(jax.jit(f), x)
    assert (ours.dtype, ours.shape) == (x.dtype, x.shape)
    wanted = torch.Size(shapes[1]).numel() / max(1, torch.Size(shapes[0]).numel())
    assert (ours.astype(jnp.float32) == jnp.asarray(wanted, dtype).astype(jnp.float32)).all()
    assert set(summed_types(jaxpr)) == {jnp.dtype("float32")}
    assert jnp.dtype(dtype) in summed_types(jax.make_jaxpr(jax.jit(f))(x).jaxpr)


def test_sum_in_the_half_type_itself_is_wrong():
    """If the results were equal, the pass would not be needed."""
    f, x = gradient_of_broadcast((), (10, 30, 16))
    assert float(jax.jit(f)(x.astype(jnp.bfloat16))) < 1000  # the exact sum is 4800


def test_sums_of_wide_types_are_unchanged():
    f = lambda x, n: (x.sum(), n.sum(), lax.reduce_max(x, (0,)), x.astype(jnp.bfloat16).sum())  # noqa: E731
    closed = jax.make_jaxpr(f)(jnp.ones(8), jnp.arange(8))
    assert float32_sums.sum_in_float32(closed.jaxpr) is closed.jaxpr


class Gated(nn.Module):
    """A module with a scalar and a per-channel parameter in the middle, both broadcast."""

    def __init__(self):
        super().__init__()
        self.gate, self.scale = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.full((6, 1), 0.5))

    def forward(self, x):
        return (x * self.scale).relu() * self.gate


def movement(step, model, x):
    before = [p.detach().clone() for p in model.parameters()]
    step(model, x)
    return [(p.detach().float() - q.float()) for p, q in zip(model.parameters(), before, strict=True)]


def loss_of(model, x):
    return model(x).float().sum() / 64


def eager(model, x):
    loss_of(model, x).backward()
    torch.optim.SGD(model.parameters(), lr=2.0).step()


def ours(model, x):
    torch_api.JaxTrainStep(model, loss_of, torch_api.MaskedSGD(model.named_parameters(), lr=2.0))(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_train_step_moves_broadcast_parameters_as_in_torch(dtype, monkeypatch):
    x = torch.rand(40, 6, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    theirs, own = (movement(step, Gated().to(dtype), x) for step in (eager, ours))
    for a, b in zip(own, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0.02)
    if dtype is torch.bfloat16:  # float16 has three more bits
        monkeypatch.setattr(train_program, "sum_in_float32", lambda jaxpr: jaxpr)
        broken = movement(ours, Gated().to(dtype), x)
        assert not all(torch.allclose(a, b, rtol=0.02) for a, b in zip(broken, theirs, strict=True))


def test_sum_is_taken_in_float32_and_rounded_once():
    closed = jax.make_jaxpr(lambda x: lax.reduce_sum(x, (0,)))(jax.ShapeDtypeStruct((4, 2), jnp.bfloat16))
    assert_expected_inline(
        printed(closed),
        """\
{ lambda ; a:bf16[4,2]. let
    b:bf16[2] = reduce_sum[axes=(0,)] a
  in (b,) }""",
    )
    assert_expected_inline(
        printed(float32_sums.sum_in_float32(closed.jaxpr)),
        """\
{ lambda ; a:bf16[4,2]. let
    b:bf16[2] = jit[
      name=<lambda>
      jaxpr={ lambda ; a:bf16[4,2]. let
          c:f32[4,2] = convert_element_type[new_dtype=float32] a
          d:f32[2] = reduce_sum[axes=(0,)] c
          b:bf16[2] = convert_element_type[new_dtype=bfloat16] d
        in (b,) }] a
  in (b,) }""",
    )
