"""`explain()`: what the last step ran, and why."""

import pytest
import torch

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


def trained(shapes, grads=None, **options):
    """Return an optimizer of parameters w0, w1, ... with gradients, and the parameters."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    return torch_api.MaskedAdamW([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, **options), params


def test_bytes_are_those_of_the_last_step_when_sets_of_gradients_alternate():
    optimizer, params = trained([(3, 221)] * 3)
    counts = []
    for grad in (torch.ones(3, 221), None) * 2:
        params[1].grad = params[2].grad = grad
        optimizer.step()
        counts.append(optimizer.bytes_accessed())
    assert counts == counts[:2] * 2
    assert counts[1] < counts[0] / 2
