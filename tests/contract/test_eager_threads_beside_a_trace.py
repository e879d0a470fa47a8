"""While one thread traces torch code, eager torch code in other threads and in signal handlers gives its own results."""

import copy
import random
import signal
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

SECONDS = 0.4  # how long each kind of eager code runs while another thread traces


class Scaled(nn.Linear):
    """A layer with an attribute from a property and one from `__getattr__`."""

    @property
    def scale(self):
        return self.weight.shape[0] * self.factor

    def __getattr__(self, name):
        return 2.0 if name == "factor" else super().__getattr__(name)

    def forward(self, x):
        return super().forward(x) * self.scale


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.inner = Scaled(4, 4), nn.BatchNorm1d(4), nn.Module()
        self.inner.weight = nn.Parameter(torch.ones(4))
        self.last, self.calls = nn.Linear(4, 1), 0
        self.last.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.factor,))
        self.last.factor = 3.0

    def forward(self, x):
        self.calls = self.calls + 1
        return self.last(Cube.apply(self.norm(self.first(x)) * self.inner.weight))


def by_functions(x):
    w = x[:4] / 3
    return torch.softmax(nn.functional.linear(x, w) @ w, -1).sum(0).mul_(2.0).clamp(0, 1).view(2, 2)


def gradient(x):
    x = x.clone().requires_grad_()
    (Cube.apply(x).sum() + nn.functional.cross_entropy(x, torch.arange(4) % 4)).backward()
    return x.grad


def statistics(x, module):
    """Return the output and the statistics of a copied batch norm in training mode."""
    module = copy.deepcopy(module).train()
    return torch.cat([module(x).detach(), module.norm.running_mean[:, None], module.norm.num_batches_tracked.float().view(1, 1)])


def by_generators(x):
    """Draw and shuffle as a data loader's worker does."""
    rng = np.random.RandomState(0)
    drawn = rng.permutation(4), np.random.default_rng(1).random((4, 4), np.float32), random.Random(2).random()
    np.random.rand(), random.random()
    return torch.stack([torch.from_numpy(drawn[1])[drawn[0]] * drawn[2], x]).flip(0)


def by_new_modules(x):
    """Make, change, copy and call a module."""
    module = nn.Sequential(nn.Linear(4, 3, bias=False), nn.GELU(), nn.LayerNorm(3))
    nn.init.constant_(module[0].weight, 0.5)
    module.extra = nn.Parameter(torch.ones(1))
    module = copy.copy(module)
    del module[1]
    return module(x) * module.extra


@pytest.fixture
def _threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def beside_traces(eager, trace):
    """Run eager code in two threads while this thread traces; return the number of calls and the wrong ones."""
    want, wrong, counts, stop = eager(), [], [], threading.Event()

    def run():
        count = 0
        while not stop.is_set():
            try:
                found = eager()
                if type(found) is not torch.Tensor or not torch.allclose(found, want):
                    wrong.append(found)
            except Exception as error:  # noqa: BLE001 - to be shown in the main thread
                wrong.append(error)
            count += 1
        counts.append(count)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    timer = threading.Timer(SECONDS, stop.set)
    for thread in (*threads, timer):
        thread.start()
    traces = 0
    while not stop.is_set() or traces < 2:
        trace()
        traces += 1
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return sum(counts), wrong


EAGER = {
    "functions": lambda net, other, x: lambda: by_functions(x),
    "the module that is traced": lambda net, other, x: lambda: net(x).detach(),
    "another module of its classes": lambda net, other, x: lambda: other(x).detach(),
    "gradients": lambda net, other, x: lambda: gradient(x),
    "gradients of the module": lambda net, other, x: lambda: torch.autograd.grad(net(x).sum(), net.first.weight)[0],
    "statistics": lambda net, other, x: lambda: statistics(x, other),
    "generators": lambda net, other, x: lambda: by_generators(x),
    "a new module": lambda net, other, x: lambda: by_new_modules(x).detach(),
}


@pytest.mark.usefixtures("_threads_take_turns_often")
@pytest.mark.parametrize("kind", EAGER)
def test_eager_code_gives_its_own_results_while_a_module_is_traced(kind):
    torch.manual_seed(0)
    net, other, x = Net().eval(), Net().eval(), torch.randn(4, 4)
    params, array, expected = bridge.module_tree(net), jnp.asarray(x.numpy()), net(x).detach().numpy()

    def trace():
        np.testing.assert_allclose(bridge.module_function(net)(params, array), expected, rtol=1e-4)

    calls, wrong = beside_traces(EAGER[kind](net, other, x), trace)
    assert calls > 20
    assert wrong == []


def test_a_handler_that_traces_while_a_loss_is_traced_gives_its_own_result():
    torch.manual_seed(0)
    outer, inner, x, found = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), torch.randn(4, 4), []
    params = bridge.module_tree(inner)

    def handler(*_):
        found.append(np.asarray(bridge.module_function(inner)(params, jnp.asarray(x.numpy()))))

    def loss_fn(model, x):
        signal.raise_signal(signal.SIGTERM)
        return model(x).mean()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        loss = torch_api.JaxTrainStep(outer, loss_fn, torch_api.MaskedSGD(outer.parameters(), lr=0.0))(x)
    finally:
        signal.signal(signal.SIGTERM, before)
    torch.testing.assert_close(loss, outer(x).mean().detach())
    assert len(found) == 1
    np.testing.assert_allclose(found[0], inner(x).detach().numpy(), rtol=1e-5)
