"""Functions that jax computes coarsely in half types, or refuses: their values and gradients are those of float32, rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge

FUNCTIONS = {
    "polygamma 0": lambda x: torch.polygamma(0, x),
    "polygamma 2": lambda x: torch.polygamma(2, x),
    "digamma": torch.digamma,
    "ndtr": torch.special.ndtr,
    "log_ndtr": torch.special.log_ndtr,
    "entr": torch.special.entr,
    "i0": torch.i0,
    "i1e": torch.special.i1e,
    "mvlgamma": lambda x: torch.mvlgamma(x + 2, 3),
    "xlog1py": lambda x: torch.special.xlog1py(x, x),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x.reshape(2, 2)),
}


class Applies(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def results(fn, x):
    """What a function gives, and the gradient of its sum."""
    (_, out), slope = jax.value_and_grad(lambda x: (fn({}, x).astype(jnp.float32).sum(), fn({}, x)), has_aux=True)(x)
    return out, slope


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype):
    x = torch.tensor([0.3, 1.7, 2.2, 0.9], dtype=dtype)
    fns = {name: bridge.module_function(Applies(function)) for name, function in FUNCTIONS.items()}
    with jax.numpy_dtype_promotion("standard"):
        found = jax.jit(lambda x: {name: results(fn, x) for name, fn in fns.items()})(bridge.to_jax(x, copy=True))
    eps = torch.finfo(dtype).eps
    for name, (out, grad) in found.items():
        wide = x.float().requires_grad_()
        expected = FUNCTIONS[name](wide)
        (slope,) = torch.autograd.grad(expected.sum(), wide)
        assert str(out.dtype) == str(grad.dtype) == str(dtype).removeprefix("torch."), name
        np.testing.assert_allclose(np.asarray(out, np.float32), expected.detach(), rtol=eps, atol=eps / 8, err_msg=name)
        np.testing.assert_allclose(np.asarray(grad, np.float32), slope, rtol=2 * eps, atol=eps, err_msg=name)


def test_normal_numbers_have_the_type_of_their_mean_or_deviation():
    fn = jax.jit(bridge.module_function(Applies(lambda x: (torch.normal(x, 1.0), torch.normal(0.0, x), torch.normal(x, x.float())))))
    with jax.numpy_dtype_promotion("standard"):
        found = fn({}, jnp.ones(3, jnp.bfloat16), rng=jax.random.key(0))
    x = torch.ones(3, dtype=torch.bfloat16)
    theirs = torch.normal(x, 1.0), torch.normal(0.0, x), torch.normal(x, x.float())
    assert [str(x.dtype) for x in found] == [str(x.dtype).removeprefix("torch.") for x in theirs]
