"""A loss that draws with NumPy or Python's random module is traced once, so its number is a constant; one warning says so."""

import random
import threading
import time
import warnings

import jax
import numpy as np
import pytest
import torch
from torch import nn

import torch_api

pytestmark = pytest.mark.unoptimized

GENERATOR = np.random.default_rng(0)
PYTHONS = random.Random(0)
LEGACY = np.random.RandomState(0)


def helper():
    return GENERATOR.beta(0.4, 0.4)


def closed_over():
    own = np.random.default_rng(1)
    return lambda: own.random()


DRAWS = {
    "numpy.random.beta": (lambda: np.random.beta(0.4, 0.4), "numpy.random"),
    "permutation": (lambda: torch.ones(2)[np.random.permutation(2)].sum(), "numpy.random"),
    "random.choice": (lambda: random.choice([1.0, 2.0]), "by random "),
    "a generator of the module's file": (lambda: GENERATOR.random(), "GENERATOR, a generator of NumPy"),
    "one in a helper function": (helper, "GENERATOR, a generator of NumPy"),
    "one that is closed over": (closed_over(), "own, a generator of NumPy"),
    "of Python": (lambda: PYTHONS.random(), "PYTHONS, a generator of Python"),
    "legacy": (lambda: LEGACY.rand(), "LEGACY, a generator of NumPy"),
    "made in the loss": (lambda: np.random.default_rng().random(), "default_rng"),
}


def step_of(draw, model=None):
    model = model or nn.Linear(3, 1)
    return torch_api.JaxTrainStep(model, lambda model, x: model(x).mean() * draw(), torch_api.MaskedSGD(model.named_parameters(), lr=0.0))


@pytest.mark.parametrize("kind", DRAWS)
def test_draw_in_a_loss_warns_once(kind):
    draw, source = DRAWS[kind]
    step = step_of(draw)
    with pytest.warns(UserWarning, match=f"{source}.*torch.rand") as caught:
        step(torch.ones(2, 3))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert step(torch.ones(2, 3)) == step(torch.ones(2, 3))


def test_draw_in_a_loss_method_warns():
    class Trainer:
        generator = None

        def loss(self, model, x):
            return model(x).mean() * self.generator.beta(0.4, 0.4)

    trainer, model = Trainer(), nn.Linear(3, 1)
    trainer.generator = np.random.default_rng(0)
    step = torch_api.JaxTrainStep(model, trainer.loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.0))
    with pytest.warns(UserWarning, match="generator, a generator of NumPy"):
        step(torch.ones(2, 3))


def test_draw_in_the_model_warns():
    class Drops(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.generator = np.random.default_rng(0)

        def forward(self, x):
            return super().forward(x) * self.generator.random()

    with pytest.warns(UserWarning, match=r"generator, a generator of NumPy"):
        step_of(lambda: 1.0, Drops())(torch.ones(2, 3))


def fixed():
    return np.random.default_rng(3).random()


SILENT = {
    "torch.rand": lambda: torch.rand(()),
    "a seeded generator that is made in the loss": fixed,
    "jax": lambda: jax.random.uniform(jax.random.key(0)),
    "constants of numpy": lambda: np.ones(()).item(),
}


@pytest.mark.parametrize("kind", SILENT)
def test_losses_without_draws_do_not_warn(kind):
    step = step_of(SILENT[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = {float(step(torch.ones(2, 3))) for _ in range(3)}
    assert len(losses) == (3 if kind.startswith("torch") else 1)


def test_draws_outside_of_the_loss_do_not_warn():
    step = step_of(lambda: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(torch.full((2, 3), np.random.rand()))
            random.random()


@pytest.fixture
def other_thread():
    """Run another thread that draws continuously."""
    stop, began = threading.Event(), threading.Event()

    def draw():
        while not stop.is_set():
            np.random.rand(3)
            random.random()
            began.set()
            time.sleep(1e-4)

    thread = threading.Thread(target=draw)
    thread.start()
    began.wait()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("other_thread")
def test_draws_in_another_thread_do_not_warn():
    step = step_of(lambda: time.sleep(0.01) or 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(2, 3))


@pytest.mark.usefixtures("other_thread")
@pytest.mark.parametrize("kind", ["permutation", "random.choice", "a generator of the module's file", "legacy"])
def test_draw_in_the_loss_warns_while_another_thread_draws(kind):
    draw, source = DRAWS[kind]
    with pytest.warns(UserWarning, match=f"{source}.*torch.rand") as caught:
        step_of(draw)(torch.ones(2, 3))
    assert len(caught) == 1
