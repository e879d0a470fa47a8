"""Eager torch as the reference for traced torch code: values, dtypes and gradients of one compiled program."""

import jax
import numpy as np
import torch
from bad_inputs_modules import Applies
from oracles import jitted

import bridge


def compare(function, *inputs, tol=1e-4):
    """`function` of floating tensors; `tol`: relative to each number, and a fifth of it absolute."""
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
