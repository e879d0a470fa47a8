"""Gradients, batches and parameters in unusual forms that torch.optim accepts: lazy negatives and tensors without elements."""

import numpy as np
import pytest
import torch

import torch_api

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def stepped(optimizer_class, grads):
    params = [torch.nn.Parameter(torch.ones(g.shape, dtype=g.dtype)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer_class(params, lr=0.5, momentum=0.9).step()
    return params


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lazily_negated_gradients_are_applied(dtype, count):
    values = [torch.randn(4, 3).to(dtype) for _ in range(count)]
    forms = torch._neg_view, lambda x: torch._neg_view(x.t().contiguous()).t()
    grads = [forms[i % 2](x) for i, x in enumerate(values)]
    assert all(map(torch.is_neg, grads))
    ours, theirs = stepped(torch_api.MaskedSGD, grads), stepped(torch.optim.SGD, grads)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_imaginary_part_of_a_conjugate_may_be_a_gradient(dtype):
    x = torch.randn(4, 3, dtype=dtype)
    ours, theirs = (stepped(optimizer, [x.conj().imag]) for optimizer in (torch_api.MaskedSGD, torch.optim.SGD))
    torch.testing.assert_close(ours[0], theirs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_train_step_takes_a_lazily_negated_batch(dtype):
    def trained(x):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1).to(dtype)
        step = torch_api.JaxTrainStep(model, lambda model, x: model(x).float().sum(), torch_api.MaskedSGD(model.parameters(), lr=0.5))
        step(x)
        return model.weight

    x = torch.randn(4, 3).to(dtype)
    torch.testing.assert_close(trained(torch._neg_view(x)), trained(-x))


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4), (0,)])
@pytest.mark.parametrize("optimizer_class", [torch_api.MaskedSGD, torch_api.MaskedAdamW, torch_api.MaskedAdafactor])
def test_parameter_without_elements_is_accepted(optimizer_class, shape):
    empty = torch.nn.Parameter(torch.from_numpy(np.zeros(shape, np.float32)))
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([("empty", empty), ("other", other)], lr=0.5)
    empty.grad, other.grad = torch.zeros_like(empty), torch.ones(3)
    optimizer.step()
    assert empty.shape == shape
    assert (other != 1).all()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def test_expanded_parameter_is_refused():
    with pytest.raises(ValueError, match="several elements have one address"):
        torch_api.MaskedSGD([torch.nn.Parameter(torch.ones(1, 3).expand(2, 3))], lr=0.5).step()
