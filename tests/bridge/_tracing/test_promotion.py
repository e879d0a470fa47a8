"""Traced torch code refuses mixed dtypes where torch does, and elsewhere promotes as torch does."""

import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from bad_inputs_modules import Applies

import bridge
import torch_api
from bridge._interop.dtypes import TORCH_DTYPES
from bridge._process import x64
from bridge._tracing import op_registry
from bridge._tracing.promotion import result_type

pytestmark = pytest.mark.quick

X, W, V = torch.ones(2, 3), torch.ones(3, 3), torch.ones(3)
REFUSED = {
    "linear": lambda x: F.linear(x, W),
    "its bias": lambda x: F.linear(x.to(W.dtype), W, V.to(x.dtype)),
    "matmul": lambda x: x @ W,
    "reversed": lambda x: W.__rmatmul__(x),
    "bmm": lambda x: torch.bmm(x[None], W[None]),
    "addmm": lambda x: torch.addmm(V, x, W),
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(1, 2, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(x, X, X),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, X),
    "lerp": lambda x: torch.lerp(x, X, 0.5),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
}
PROMOTED = {
    "add": lambda x: x + X,
    "mse_loss": lambda x: F.mse_loss(x, X),
    "where": lambda x: torch.where(X > 0, x, X),
    "cat": lambda x: torch.cat([x, X]),
    "cat of an empty one": lambda x: torch.cat([x[:0, 0], X[0]]),
    "layer_norm of a half type": lambda x: F.layer_norm(X.half() * x.half(), (3,), V, V),
    "addcmul": lambda x: torch.addcmul(x, X, X),
}


def traced(function, x):
    with x64():
        return bridge.module_function(Applies(function))({}, bridge.to_jax(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_mixed_dtypes_are_refused_as_in_torch(name, dtype):
    function, x = REFUSED[name], X.to(dtype)
    try:
        function(x)
    except (RuntimeError, NotImplementedError):
        named = f"float.*{str(dtype).removeprefix('torch.')}|{str(dtype).removeprefix('torch.')}.*float"
        with pytest.raises(RuntimeError if dtype.is_floating_point else Exception, match=named if dtype.is_floating_point else None):
            traced(function, x)
    else:
        assert not dtype.is_floating_point
        traced(function, x)


@pytest.mark.parametrize("name", PROMOTED)
def test_dtypes_are_promoted_as_in_torch(name):
    x = X.double()
    assert TORCH_DTYPES[str(traced(PROMOTED[name], x).dtype)] == PROMOTED[name](x).dtype


OF_THREE = {
    "half": torch.ones(2).half(),
    "bfloat16": torch.ones(2).bfloat16(),
    "int32": torch.ones(2, dtype=torch.int32),
    "bool": torch.ones(2, dtype=torch.bool),
    "float32 without dimensions": torch.tensor(1.0),
    "float64 without dimensions": torch.tensor(1.0, dtype=torch.float64),
    "int64 without dimensions": torch.tensor(1),
}


def test_three_dtypes_are_promoted_as_in_torch():
    for names in itertools.combinations(OF_THREE, 3):
        xs = [OF_THREE[name] for name in names]
        with x64():
            assert result_type(*bridge.to_jax(xs)) == torch.addcmul(*xs).dtype, names


@pytest.mark.usefixtures("standard_promotion")
def test_comparison_detects_a_product_that_promotes(monkeypatch):
    entry = op_registry.OPS[F.linear]
    monkeypatch.setitem(op_registry.OPS, F.linear, entry._replace(same_dtype_kind=None))
    with pytest.raises(pytest.fail.Exception):
        test_mixed_dtypes_are_refused_as_in_torch("linear", torch.float64)


def test_batch_of_another_dtype_raises_and_trains_nothing():
    model = torch.nn.Linear(3, 1)
    optimizer = torch_api.MaskedAdamW(model.parameters(), lr=0.1)
    step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), optimizer)
    step(X)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="the batch to the model's dtype"):
        step(X.double())
    assert all(map(torch.equal, before, model.parameters()))
    step(X)
    assert not torch.equal(before[0], model.weight)


def test_half_parameters_accept_half_inputs_only():
    pure, params = bridge.module_function(torch.nn.Linear(3, 1)), bridge.module_tree(torch.nn.Linear(3, 1))
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    assert pure(half, jnp.ones((2, 3), jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(RuntimeError, match="bfloat16"):
        pure(half, jnp.ones((2, 3)))
