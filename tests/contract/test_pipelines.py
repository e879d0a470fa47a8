"""The two workloads of benchmarks/pipelines.py: fifty steps of JaxTrainStep give the losses of the eager loop."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling import sampled

import torch_api

pytestmark = [pytest.mark.unoptimized, pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


@pytest.fixture(scope="module")
def pipelines():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import common
        import pipelines

        return pipelines, common.Settings()
    finally:
        sys.path.remove(folder)


def moved(batch, i):
    """Return another batch of the same shapes."""
    first, *rest = batch
    if first.is_floating_point():
        return first.roll(i, 0) * (1 + i / 50), *rest
    return ((first + i) % 128).roll(i, 0), *rest


@pytest.mark.parametrize("index", sampled([0, 1], ["digits", "characters"]))
def test_fifty_steps_give_the_losses_of_the_eager_loop(index, pipelines):
    module, settings = pipelines
    torch.manual_seed(0)
    model, loss_fn, batch = list(module.TASKS.values())[index](settings)
    twin, wrong = copy.deepcopy(model), copy.deepcopy(model)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    train_step = torch_api.JaxTrainStep(model, loss_fn, torch_api.MaskedAdamW(model.named_parameters(), **options))

    def eager(net, **changed):
        optimizer = torch.optim.AdamW(net.parameters(), **(options | changed))
        for i in range(50):
            optimizer.zero_grad()
            loss = loss_fn(net, *moved(batch, i))
            loss.backward()
            optimizer.step()
            yield loss.item()

    losses, expected = [train_step(*moved(batch, i)).item() for i in range(50)], list(eager(twin))
    np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=0)
    assert expected[-1] < expected[0]
    assert train_step.cache_info().compilations == 1
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(losses, list(eager(wrong, lr=1.02e-3)), atol=1e-4, rtol=0)
