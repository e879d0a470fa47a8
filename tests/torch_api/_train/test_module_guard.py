"""JaxTrainStep notices changes of the module: attributes, buffers that are only written, and batches that alias parameters."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from train_steps import adamw, assert_moved_alike

import bridge
import torch_api
from torch_api import JaxTrainStep

pytestmark = pytest.mark.usefixtures("standard_promotion", "unoptimized_training")


class Scaled(nn.Module):
    """A layer whose forward reads an optional attribute."""

    def __init__(self, k=None):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        if k is not None:
            self.k = k

    def forward(self, x):
        k = getattr(self, "k", 1.0)
        k = k[0] if isinstance(k, tuple) else 0.3 if isinstance(k, bool) else 2.0 if not isinstance(k, int | float) else k
        return self.layer(x) * k


def square(model, x):
    return model(x).square().mean()


def eager(model, optimizer, x):
    optimizer.zero_grad()
    loss = square(model, x)
    loss.backward()
    optimizer.step()
    return loss.detach()


CHANGES = {
    "new": (None, 0.1),
    "float": (1.0, 0.1),
    "type": (1, True),
    "tuple": ((1.0, 2), (0.1, 2)),
    "to an array": (1.0, np.ones(3)),
    "to a tensor": (1.0, torch.ones(8)),
    "from an array": (np.ones(3), 0.1),
}


@pytest.mark.parametrize(("first", "then"), CHANGES.values(), ids=CHANGES)
def test_changed_attribute_takes_effect(first, then):
    model = Scaled(first)
    twin, start = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train_step = JaxTrainStep(model, square, adamw(model))
    for step in range(6):
        if step == 3:
            model.k = twin.k = then
        x = torch.randn(16, 8)
        torch.testing.assert_close(train_step(x), eager(twin, other, x))
    assert_moved_alike(model, twin, start, 1e-4)
    assert train_step.cache_info().compilations == 2


def test_removing_one_attribute_and_adding_another_takes_effect():
    model = Scaled()
    model.other = object()
    train_step = JaxTrainStep(model, square, adamw(model))
    x = torch.randn(16, 8)
    before = train_step(x)
    del model.other
    model.k = 0.1
    assert before > 20 * train_step(x)
    assert train_step.cache_info().compilations == 2


def test_equal_values_in_new_objects_keep_the_cached_step():
    model = Scaled(1.0)
    model.last = None
    train_step = JaxTrainStep(model, square, adamw(model))
    x = torch.randn(16, 8)
    train_step(x)
    model.last = torch.zeros(3)
    train_step(x)
    before = train_step.cache_info()
    for _ in range(4):
        model.k, model.last = float("1.0"), torch.randn(3)
        train_step(x)
    now = train_step.cache_info()
    assert (now.hits - before.hits, now.misses, now.compilations) == (4, before.misses, before.compilations)


class Remembers(nn.Module):
    """A layer that writes a buffer and never reads it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("last", torch.zeros(16, 8))

    def forward(self, x):
        self.last.copy_(x.detach())
        return self.layer(x)


def test_write_only_buffer_keeps_its_address():
    model = Remembers()
    train_step = JaxTrainStep(model, square, adamw(model))
    train_step(torch.randn(16, 8))
    address, before = model.last.data_ptr(), train_step.cache_info()
    for _ in range(5):
        x = torch.randn(16, 8)
        train_step(x)
        assert model.last.data_ptr() == address
        assert torch.equal(model.last, x)
    assert train_step.cache_info().hits - before.hits == 5


ALIASES = {
    "jax": lambda model: bridge.module_tree(model)["0"]["weight"],
    "numpy": lambda model: model[0].weight.detach().numpy(),
    "numpy, a slice": lambda model: model[0].weight.detach().numpy()[3:].T,
    "torch": lambda model: model[0].weight.detach(),
}


@pytest.mark.parametrize("width", [16, 1600])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_batch_that_aliases_a_parameter_is_read_before_the_update(alias, width):
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
    twin, start = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    ours, other = torch_api.MaskedSGD(model.parameters(), lr=1e-3, momentum=0.9), torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)

    def loss(m, anchor, x, labels):
        own = m[0].weight if anchor.shape == m[0].weight.shape else m[0].weight[3:].T
        return F.cross_entropy(m(x), labels) + (anchor * own).mean()

    train_step = JaxTrainStep(model, loss, ours)
    for _ in range(5):
        x, labels = torch.randn(16, 8), torch.randint(0, 3, (16,))
        theirs = alias(twin)
        anchor = theirs.clone() if isinstance(theirs, torch.Tensor) else torch.from_numpy(np.array(theirs))
        value = train_step(alias(model), x, labels)
        other.zero_grad()
        expected = loss(twin, anchor, x, labels)
        expected.backward()
        other.step()
        torch.testing.assert_close(value, expected.detach())
    assert_moved_alike(model, twin, start, 1e-4)
