"""torch's OpenMP threads end before a large update, and torch starts them again."""

import os
import threading
import time
from typing import Any

import pytest
import torch
from oracles import random_grads, same, set_grads

import torch_api
from bridge._runtime import openmp

pytestmark = pytest.mark.quick

THREADS = 2
pause_now: Any = openmp.pause
has_pause = pytest.mark.skipif(openmp.pause is None, reason="this torch's OpenMP runtime cannot pause its threads")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def native_threads():
    return set(os.listdir("/proc/self/task"))


def end(threads):
    """Return whether the threads end; a sleeping thread first has to wake up."""
    deadline = time.monotonic() + 10
    while threads & native_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not threads & native_threads()


def parallel():
    torch.ones(1 << 22).add_(1.0)


@has_pause
def test_threads_end_and_start_again():
    pause_now(openmp.PAUSE_SOFT)
    before = native_threads()
    parallel()
    own = native_threads() - before
    assert own
    assert pause_now(openmp.PAUSE_SOFT) == 0
    assert end(own)
    x = torch.rand(1 << 22)
    assert float((x + x).sum()) == pytest.approx(2 * float(x.sum(dtype=torch.float64)), rel=1e-5)


@has_pause
def test_other_python_threads_keep_their_openmp_threads():
    pause_now(openmp.PAUSE_SOFT)
    before, ready, done = native_threads(), threading.Event(), threading.Event()

    def other():
        parallel()
        ready.set()
        done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    theirs = native_threads() - before
    parallel()
    own = native_threads() - before - theirs
    assert own
    assert pause_now(openmp.PAUSE_SOFT) == 0
    assert end(own)
    assert theirs <= native_threads()
    done.set()
    thread.join()


def test_pause_is_off_if_unwanted_or_unavailable(monkeypatch):
    class Old:
        def __init__(self, path):
            pass

    with monkeypatch.context() as m:
        m.setattr(openmp.ctypes, "CDLL", Old)
        assert openmp._find_pause_function() is None
    with monkeypatch.context() as m:
        m.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool")
        assert openmp._find_pause_function() is None
    monkeypatch.setenv("MASKBRIDGE_OPENMP", "0")
    assert openmp._find_pause_function() is None


@pytest.mark.parametrize("shapes", [[(64, 64)] * 6, [(512, 512)] * 2, [(3,), (700, 512)]])
def test_only_large_steps_end_threads_and_numbers_do_not_change(shapes, monkeypatch):
    pauses, results = [], []
    for pause in (openmp.pause or (lambda kind: 0), None):
        monkeypatch.setattr(openmp, "pause", pause and (lambda kind, pause=pause: (pauses.append(kind), pause(kind))[1]))
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = torch_api.MaskedAdamW(params, lr=0.01)
        for _ in range(3):
            set_grads(params, random_grads(params))
            optimizer.step()
        results.append(params)
    assert same(*results)
    large = sum(p.numel() for p in params) >= openmp.MIN_ELEMENTS_PER_THREAD * THREADS
    assert pauses == [openmp.PAUSE_SOFT] * (3 if large else 0)


@pytest.mark.parametrize("width", [8, 700])
def test_large_train_step_ends_threads(width, monkeypatch):
    pauses = []
    monkeypatch.setattr(openmp, "pause", lambda kind: pauses.append(kind) or 0)
    model = torch.nn.Linear(width, width)
    train_step = torch_api.JaxTrainStep(
        model, lambda model, x: model(x).square().mean(), torch_api.MaskedAdamW(model.parameters(), lr=0.01)
    )
    for _ in range(2):
        train_step(torch.ones(4, width))
    assert pauses == ([openmp.PAUSE_SOFT] * 2 if width == 700 else [])
