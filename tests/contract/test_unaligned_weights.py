"""Weights from files may be unaligned: a weight without another holder is aligned once, instead of copied at each call."""

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

ALIGNMENT = 64
SHAPE = (16, 8)


def unaligned(folder, dtype=torch.float32):
    """Return a weight that starts a few bytes into a file, and the dict that holds it."""
    torch.manual_seed(0)
    for count in range(1, 17):
        first = torch.zeros(8 * count, dtype=torch.uint8)
        safetensors.torch.save_file({"a": first, "weight": torch.randn(SHAPE).to(dtype)}, folder / f"{count}.safetensors")
        loaded = safetensors.torch.load_file(folder / f"{count}.safetensors")
        if loaded["weight"].data_ptr() % ALIGNMENT:
            return loaded
    raise AssertionError("every weight is aligned")


def parameter(loaded):
    return torch.nn.Parameter(loaded.pop("weight"), requires_grad=False)


def is_aligned(tensor):
    return not tensor.data_ptr() % ALIGNMENT


def train_step(weight):
    model = torch.nn.Sequential(torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False), torch.nn.Linear(SHAPE[0], 2))
    model[0].weight = weight
    optimizer = torch_api.MaskedSGD(model[1].named_parameters(), lr=0.0)
    step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)
    x = torch.linspace(-1, 1, 3 * SHAPE[1]).view(3, SHAPE[1])

    def check():
        torch.testing.assert_close(step(x), model(x).square().mean().detach(), rtol=1e-4, atol=1e-5)

    return step, check


@pytest.mark.fast_path
def test_train_step_aligns_a_frozen_weight_once(tmp_path):
    weight = parameter(unaligned(tmp_path))
    step, check = train_step(weight)
    check()
    address = weight.data_ptr()
    assert is_aligned(weight)
    check()
    weight.data.mul_(3)  # the program still reads the weight at its address
    check()
    assert weight.data_ptr() == address
    assert step.cache_info().compilations == 1


@pytest.mark.fast_path
def test_train_step_aligns_a_weight_once_its_other_holder_is_gone(tmp_path):
    loaded = unaligned(tmp_path)
    weight = torch.nn.Parameter(loaded["weight"], requires_grad=False)
    step, check = train_step(weight)
    check()
    assert not is_aligned(weight)
    loaded["weight"].add_(1)
    check()
    loaded.clear()
    check()
    assert is_aligned(weight)
    check()
    assert step.cache_info().compilations == 1


@pytest.mark.fast_path
def test_train_step_aligns_an_unaligned_buffer(tmp_path):
    class Shifted(torch.nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.linear = torch.nn.Linear(8, 2)
            self.register_buffer("shift", shift)

        def forward(self, x):
            return self.linear(x + self.shift)

    model = Shifted(parameter(unaligned(tmp_path)).detach())
    step = torch_api.JaxTrainStep(
        model, lambda model, x: model(x).square().mean(), torch_api.MaskedSGD(model.linear.named_parameters(), lr=0.0)
    )
    step(torch.ones(8))
    torch.testing.assert_close(step(torch.ones(8)), model(torch.ones(8)).square().mean().detach(), rtol=1e-4, atol=1e-5)
    assert is_aligned(model.shift)


@pytest.mark.fast_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_jax_function_aligns_a_parameter_once(dtype, tmp_path):
    weight, double = parameter(unaligned(tmp_path, dtype)), bridge.jax_function(lambda w, x: 2 * w + x.astype(w.dtype))
    expected = 2 * weight.detach() + 1
    torch.testing.assert_close(double(weight, torch.ones(SHAPE)), expected)
    address = weight.data_ptr()
    assert is_aligned(weight)
    torch.testing.assert_close(double(weight, torch.ones(SHAPE)), expected)
    assert weight.data_ptr() == address


@pytest.mark.fast_path
def test_jax_function_aligns_a_strided_trained_parameter(tmp_path):
    weight = torch.nn.Parameter(unaligned(tmp_path).pop("weight").t())
    bridge.jax_function(lambda w: jnp.sum(w**2))(weight).backward()
    assert is_aligned(weight)
    assert weight.stride() == (1, SHAPE[1])
    torch.testing.assert_close(weight.grad, 2 * weight.detach())


@pytest.mark.fast_path
def test_memory_with_another_holder_is_not_moved(tmp_path):
    double, loaded = bridge.jax_function(lambda w: 2 * w), unaligned(tmp_path)
    kept = torch.nn.Parameter(loaded["weight"], requires_grad=False)
    array = np.zeros(SHAPE[0] * SHAPE[1] + 1, np.float32)[1:]
    of_numpy = torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)
    plain = loaded["a"].float()[1:]
    for tensor in (kept, of_numpy, plain):
        address = tensor.data_ptr()
        for _ in range(2):
            torch.testing.assert_close(double(tensor), 2 * tensor.detach())
            assert tensor.data_ptr() == address
    loaded["weight"].add_(1)
    array += 1
    torch.testing.assert_close(double(kept), 2 * loaded["weight"])
    np.testing.assert_array_equal(double(of_numpy), 2 * array)
    loaded.clear()
    double(kept)
    assert is_aligned(kept)
