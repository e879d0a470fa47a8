"""torch operators on integers and half types in traced code have torch's values and dtypes.

Where jax is imprecise in half types, values and gradients are computed in float32 and rounded once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bridge

pytestmark = pytest.mark.unoptimized

NUMBERS = torch.tensor([[[5, -3, 7, 0, 2, -8], [1, 1, -2, 9, -9, 4], [3, 6, -7, 2, 8, 0], [-1, -5, 2, 2, 4, 9]]])
CASES = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d padded": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "max_pool2d dilated": lambda x: F.max_pool2d(x, 2, dilation=2),
    "max_pool2d with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x.float(), 2),
    "linspace": lambda x: torch.linspace(x[0, 0, 1], x[0, 0, 2], 12, dtype=torch.int64),
    "linspace of negative": lambda x: torch.linspace(-2.0, x[0, 0, 3], 50, dtype=torch.int64),
    "linspace of one": lambda x: x + torch.linspace(3, 9, 1, dtype=torch.int64),
    "logspace": lambda x: torch.logspace(x[0, 0, 3], x[0, 0, 4], 9, dtype=torch.int64),
    "logspace of base 2": lambda x: x[..., :5] + torch.logspace(1.5, 6.5, 5, base=2.0, dtype=torch.int64),
    "is_signed": lambda x: x + int(torch.is_signed(x)) + int(x.is_signed()),
    "masked.amax": lambda x: torch.masked.amax(x, 2, mask=torch.tensor([True, False, True, True, False, True])),
    "masked.argmin": lambda x: torch.masked.argmin(x, 1),
}
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


@pytest.mark.parametrize("name", CASES)
def test_operators_on_integers_match_torch(name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = jax.jit(bridge.module_function(Applies(CASES[name])))({}, bridge.to_jax(NUMBERS, copy=True))
        theirs = CASES[name](NUMBERS)
        for x, y in zip(jax.tree.leaves(found), theirs if isinstance(theirs, tuple) else [theirs], strict=True):
            assert str(x.dtype) == str(y.dtype).removeprefix("torch.")
            np.testing.assert_array_equal(x, y)


def test_traced_split_indices_raise_and_name_the_operator():
    fn = jax.jit(bridge.module_function(Applies(lambda x: torch.tensor_split(x[0], x[0, 0, :2]))))
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"torch\.tensor_split in the module itself \(Applies\) asks for values"):
        fn({}, bridge.to_jax(NUMBERS.int(), copy=True))


def results(fn, x):
    """Return the output of a function and the gradient of its sum."""
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


def test_normal_has_the_dtype_of_its_mean_or_deviation():
    fn = jax.jit(bridge.module_function(Applies(lambda x: (torch.normal(x, 1.0), torch.normal(0.0, x), torch.normal(x, x.float())))))
    with jax.numpy_dtype_promotion("standard"):
        found = fn({}, jnp.ones(3, jnp.bfloat16), rng=jax.random.key(0))
    x = torch.ones(3, dtype=torch.bfloat16)
    theirs = torch.normal(x, 1.0), torch.normal(0.0, x), torch.normal(x, x.float())
    assert [str(x.dtype) for x in found] == [str(x.dtype).removeprefix("torch.") for x in theirs]
