"""A jax_function in a train step has jax's own flag for 64 bits, though the step itself keeps them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn

import bridge
import torch_api
from bridge.dlpack import x64
from bridge.widths import is_wide, keeps, narrow


def carried(x):
    """Runs only where the default type is that of x."""
    return lax.scan(lambda c, row: (jnp.tanh(row), c), jnp.zeros(x.shape[-1]), x)[0].sum()


def noisy(x):
    return (x * jax.random.normal(jax.random.key(1), x.shape)).sum()


@pytest.mark.parametrize("function", [carried, noisy])
def test_it_computes_as_outside_of_the_step(function):
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    expected = bridge.jax_function(function)(model(x)).item()
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    train_step = torch_api.JaxTrainStep(model, lambda m, x: bridge.jax_function(function)(m(x)), optimizer)
    np.testing.assert_allclose(train_step(x).item(), expected, rtol=1e-5)
    with pytest.raises((TypeError, ValueError), match="float64"):  # the same code as it stands meets its own float64 numbers
        torch_api.JaxTrainStep(model, lambda m, x: function(jnp.asarray(m(x))), optimizer)(x)


@pytest.mark.parametrize(("asked", "dtype"), [(None, torch.float64), (True, torch.float32)])
def test_64_bits_are_kept_where_they_are_given_or_asked_for(asked, dtype):
    model, seen = nn.Linear(3, 2, dtype=dtype), []
    function = bridge.jax_function(lambda x: seen.append(jnp.zeros(2).dtype) or x.sum(), x64=asked)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    torch_api.JaxTrainStep(model, lambda m, x: function(m(x)), optimizer)(torch.ones(4, 3, dtype=dtype))
    assert set(seen) == {np.dtype(np.float64)}


def test_what_is_wide_and_what_it_becomes():
    with x64():
        arrays = [jnp.zeros(2, kind) for kind in (np.float64, np.int64, np.uint64, np.complex128)]
        assert all(map(is_wide, arrays))
        assert [str(narrow(x).dtype) for x in arrays] == ["float32", "int32", "uint32", "complex64"]
    tensors = [torch.zeros(2, dtype=kind) for kind in (torch.float64, torch.int64, torch.complex128)]
    assert all(map(is_wide, tensors))
    assert [narrow(x).dtype for x in tensors] == [torch.float32, torch.int32, torch.complex64]
    assert narrow("text") == "text"
    assert not any(map(is_wide, (torch.zeros(2), jnp.zeros(2, np.int32), torch.zeros(2, dtype=torch.complex64))))
    assert keeps(None, False, tensors)
    assert keeps(None, True, ())
    assert not keeps(None, False, ())
    assert not keeps(False, True, tensors)
