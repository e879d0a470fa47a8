"""JAX code in a train step runs under the 64-bit flag that the user has set, while torch code keeps 64-bit types."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from torch import nn

import bridge
import torch_api
from bridge._interop.dtypes import is_64bit, keeps_64bit, to_32bit
from bridge._process import x64
from bridge._tracing import module_function

pytestmark = pytest.mark.quick


def carried(x):
    """Scan x with a carry of the default dtype, which fails unless that is the dtype of x."""
    return lax.scan(lambda c, row: (jnp.tanh(row), c), jnp.zeros(x.shape[-1]), x)[0].sum()


def noisy(x):
    return (x * jax.random.normal(jax.random.key(1), x.shape)).sum()


WRITTEN = {
    "as a jax_function": lambda function: lambda m, x: bridge.jax_function(function)(m(x)),
    "as it stands": lambda function: lambda m, x: function(jnp.asarray(m(x))),
}


@pytest.mark.parametrize("function", [carried, noisy])
@pytest.mark.parametrize("written", ["as a jax_function", "as it stands"])
def test_jax_code_gives_the_numbers_of_a_jax_function(function, written, monkeypatch):
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    expected = bridge.jax_function(function)(model(x)).item()
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    np.testing.assert_allclose(torch_api.JaxTrainStep(model, WRITTEN[written](function), optimizer)(x).item(), expected, rtol=1e-5)
    monkeypatch.setattr(module_function, "scope", lambda on: x64())
    with pytest.raises((TypeError, ValueError), match="float64"):  # the code itself makes float64 values
        torch_api.JaxTrainStep(model, WRITTEN["as it stands"](function), optimizer)(x)


def loss_and_dtypes(model, *batch):
    """Return the loss of the first step, and the dtypes that JAX code and torch code have in the loss."""
    seen = {}

    def loss(m, x, y):
        out, labels = jnp.asarray(m(x)), jnp.asarray(y)
        seen.update(made=jnp.zeros(2).dtype, out=out.dtype, labels=labels.dtype, leaf=jax.tree.leaves([y])[0].dtype, torch=y.dtype)
        far = (y * 2**40) // 2**40  # 64 bits in torch
        seen.update(far=far.dtype, view=jnp.asarray(y.view(2, -1)).dtype)
        chosen = optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()
        return chosen + jnp.asarray(F.cross_entropy(m(x), far)) + (out * jnp.linspace(0, 1, out.shape[-1])).sum().astype(chosen.dtype)

    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    value = float(torch_api.JaxTrainStep(model, loss, optimizer)(*batch))
    return value, {name: str(kind) for name, kind in seen.items()}


def test_loss_in_jax_has_32_bit_types_and_torch_code_64_bit_types():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4), torch.randn(4, 3), torch.tensor([0, 3, 1, 2])
    logits = model(x)
    expected = 2 * F.cross_entropy(logits, y) + (logits * torch.linspace(0, 1, 4)).sum()
    value, seen = loss_and_dtypes(model, x, y)
    narrow = dict.fromkeys(("made", "out"), "float32") | dict.fromkeys(("labels", "leaf", "view"), "int32")
    assert seen == narrow | {"torch": "torch.int64", "far": "torch.int64"}
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)


def test_loss_in_jax_of_a_float64_model_has_64_bit_types():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 3, 1, 2])
    _, seen = loss_and_dtypes(model, x, y)
    wide = dict.fromkeys(("made", "out"), "float64") | dict.fromkeys(("labels", "leaf", "view"), "int64")
    assert seen == wide | {"torch": "torch.int64", "far": "torch.int64"}


@pytest.mark.parametrize(("asked", "dtype"), [(None, torch.float64), (True, torch.float32)])
def test_x64_is_on_for_64_bit_inputs_or_on_request(asked, dtype):
    model, seen = nn.Linear(3, 2, dtype=dtype), []
    function = bridge.jax_function(lambda x: seen.append(jnp.zeros(2).dtype) or x.sum(), x64=asked)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    torch_api.JaxTrainStep(model, lambda m, x: function(m(x)), optimizer)(torch.ones(4, 3, dtype=dtype))
    assert set(seen) == {np.dtype(np.float64)}


def test_64_bit_dtypes_are_recognized_and_narrowed():
    with x64():
        arrays = [jnp.zeros(2, kind) for kind in (np.float64, np.int64, np.uint64, np.complex128)]
        assert all(map(is_64bit, arrays))
        assert [str(to_32bit(x).dtype) for x in arrays] == ["float32", "int32", "uint32", "complex64"]
    tensors = [torch.zeros(2, dtype=kind) for kind in (torch.float64, torch.int64, torch.complex128)]
    assert all(map(is_64bit, tensors))
    assert [to_32bit(x).dtype for x in tensors] == [torch.float32, torch.int32, torch.complex64]
    assert to_32bit("text") == "text"
    assert not any(map(is_64bit, (torch.zeros(2), jnp.zeros(2, np.int32), torch.zeros(2, dtype=torch.complex64))))
    assert keeps_64bit(None, False, tensors)
    assert keeps_64bit(None, True, ())
    assert not keeps_64bit(None, False, ())
    assert not keeps_64bit(False, True, tensors)
