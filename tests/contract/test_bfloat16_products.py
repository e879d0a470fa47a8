"""A bfloat16 layer in a train step takes batches with any number of dimensions and moves as in the eager loop."""

import copy

import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized


def loss_fn(model, x):
    return model(x).float().square().mean()


@pytest.mark.parametrize("shape", [(15, 300), (3, 5, 300), (3, 1, 5, 300)], ids=str)
def test_a_layer_moves_as_in_the_eager_loop(shape):
    model = torch.nn.Linear(300, 9, bias=False).bfloat16()
    twin, start = copy.deepcopy(model), model.weight.detach().float()
    step = torch_api.JaxTrainStep(model, loss_fn, torch_api.MaskedSGD(model.named_parameters(), lr=20.0))
    other = torch.optim.SGD(twin.parameters(), lr=20.0)
    for seed in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        loss = loss_fn(twin, x)
        other.zero_grad()
        loss.backward()
        other.step()
        torch.testing.assert_close(step(x), loss.detach(), rtol=0.02, atol=0.0)
    moved = twin.weight.detach().float() - start
    assert (model.weight.detach().float() - start - moved).norm() < 0.03 * moved.norm()
