"""Values known during a trace: torch itself computes operators without a jax implementation, such as the indices of a fixed mask."""

import math

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bad_inputs_modules import Applies
from torch import nn
from traced_oracle import compare

import bridge

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[tuple(torch.ones(4, 4).triu(1).nonzero().T)],
        lambda x: x[torch.ones(4, 4).triu(1).nonzero(as_tuple=True)],
        lambda x: x[torch.argwhere(torch.eye(4))],
        lambda x: x[torch.unique(torch.arange(6) // 2)],
        lambda x: x * torch.unique_consecutive(torch.arange(6).clamp(max=3), return_counts=True)[1],
        lambda x: x * torch.linalg.ldl_factor(torch.eye(4) * 2).LD,
        lambda x: torch.masked_select(x, torch.eye(4).bool()),
        lambda x: x.masked_select(torch.arange(4) > 1),
    ],
)
def test_known_values_are_computed_by_torch(function):
    torch.manual_seed(0)
    compare(function, torch.randn(4, 4))


def run(function):
    return jax.jit(lambda x: bridge.module_function(Applies(function))({}, x, rng=jax.random.key(0)))(np.ones((4, 4), np.float32))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.ones(4, 1).squeeze_(),  # in place: the write would not reach the tensor
        lambda x: x + torch._fused_dropout(torch.ones(4), 0.5)[0],  # draws from torch's generator
    ],
)
def test_writing_and_drawing_operators_without_implementation_raise(function):
    with pytest.raises(NotImplementedError, match="has no implementation in jax"):
        run(function)


@pytest.mark.parametrize(
    ("what", "function"),
    {
        r"torch.Tensor.nonzero": lambda x: x.nonzero(),
        r"torch.argwhere": lambda x: x[torch.argwhere(x > 0)],
        r"torch.functional.unique": lambda x: torch.unique(x),
        r"torch.bincount": lambda x: torch.bincount(x[0].long()),
        r"torch.nn.functional.one_hot": lambda x: F.one_hot(x.long()),
        r"torch._pack_padded_sequence": lambda x: nn.utils.rnn.pack_padded_sequence(x, x[0].long(), enforce_sorted=False).data,
        r"item\(\)": lambda x: x * x.sum().item(),
        r"tolist\(\)": lambda x: x.tolist(),
        r"numpy\(\)": lambda x: x.numpy(),
        r"`if` or bool\(\)": lambda x: x if x.sum() > 0 else -x,
        r"int\(\)": lambda x: x[: int(x.sum())],
        r"float\(\)": lambda x: math.exp(x.sum()),
        r"A size or an index of Python": lambda x: [1, 2][x.sum().long()],
    }.items(),
)
def test_error_names_the_operator_that_reads_values(what, function):
    with pytest.raises(jax.errors.ConcretizationTypeError, match=rf"{what} in the module itself \(Applies\) asks for values"):
        run(function)


def test_error_shows_the_traced_scalar_and_not_other_tensors():
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"shape float32\[\]\s+torch.nn.functional.dropout"):
        run(lambda x: F.dropout(x, x.sum()))


def test_known_values_convert_to_python_and_numpy():
    ones = torch.ones(3)
    found = run(lambda x: x * float(torch.ones(3).cumsum(0).numpy()[2]) * ones.new([2.0])[0] * torch.ones(3).tolist()[1])
    np.testing.assert_array_equal(found, np.full((4, 4), 6.0))


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="in jax 0.8 arguments of a custom_jvp function become tracers")
def test_known_value_broadcast_with_a_traced_one_stays_known():
    def function(x):
        count, x = torch.broadcast_tensors(torch.tensor(3.0), x)
        return x[: int(count.max())]

    assert run(function).shape == (3, 4)


def test_selecting_by_a_traced_mask_raises():
    with pytest.raises(NotImplementedError, match="how many elements it chooses depends on values"):
        run(lambda x: torch.masked_select(x, x > 0))


def test_generator_of_torch_is_not_used():
    before = torch.get_rng_state()
    run(lambda x: x[torch.argwhere(torch.eye(4))])
    assert torch.equal(torch.get_rng_state(), before)
