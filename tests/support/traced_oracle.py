"""Eager torch as the reference for traced torch code: compares values, dtypes and gradients of one compiled program."""

import jax
import numpy as np
import torch
from bad_inputs_modules import Applies
from oracles import jitted

import bridge
from bridge._process import x64


def compare(function, *inputs, tol=1e-4):
    """Compare value and gradients of a function of floating tensors; `tol` is the relative tolerance, a fifth of it the absolute one."""
    given = [x.clone().requires_grad_() for x in inputs]
    out = function(*given)
    weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    expected = torch.autograd.grad((out * weights).sum(), given)
    pure, by = bridge.module_function(Applies(function)), bridge.to_jax(weights)

    def weighted(xs):
        found = pure({}, *xs)
        return (found * by).sum(), found

    slopes, found = jitted(jax.grad(weighted, has_aux=True))(bridge.to_jax(inputs, copy=None))
    assert found.dtype == bridge.to_jax(out.detach(), copy=None).dtype
    np.testing.assert_allclose(found, out.detach(), rtol=tol, atol=tol / 5)
    for ours, theirs in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tol, atol=tol / 5)


def same(function, *inputs):
    """Check that values, dtypes and shapes equal torch's under jit."""
    with x64():
        found = jax.jit(lambda xs: bridge.module_function(Applies(function))({}, *xs))(bridge.to_jax(inputs))
        expected = function(*inputs)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
            assert (ours.shape, str(ours.dtype)) == (tuple(theirs.shape), str(theirs.dtype).removeprefix("torch."))


def compare_on_integers(function):
    """Compare values and dtype of a function of a 3 by 3 tensor of int64."""
    x = torch.arange(-4, 5).reshape(3, 3)
    with x64():
        found = bridge.module_function(Applies(function))({}, bridge.to_jax(x))
    expected = function(x)
    assert bridge.to_torch(found).dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
