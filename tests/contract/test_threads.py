"""Steps in several threads: of one optimizer, of two with the same parameters, and of train steps. Every call takes effect."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import bridge
import torch_api

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(os.path.dirname(package.__file__) + os.sep for package in (bridge, torch_api))
SHAPES = {"small": [(6, 6)] * 6, "large": [(70, 40), (5,), (90, 30)], "views": [(36,)] * 3}


def make(shapes, optimizers=1, momentum=0.5):
    """Return parameters of zeros with gradients of ones, and optimizers that each have all of them."""
    flat = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes))
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    params = [torch.nn.Parameter(x.view(s) if shapes is SHAPES["views"] else x.view(s).clone()) for x, s in zip(parts, shapes, strict=True)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, [torch_api.MaskedSGD(params, lr=1.0, momentum=momentum) for _ in range(optimizers)]


def serial(steps, momentum):
    """Return one element after `steps` steps of torch.optim.SGD."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=momentum)
    for _ in range(steps):
        optimizer.step()
    return p.item()


def meet(call, other, at_line):
    """Call, and at one line of the library start `other` in another thread; return the number of lines."""
    count, threads, errors = 0, [], []

    def catching():
        try:
            other()
        except Exception as error:  # noqa: BLE001 - to be shown in the main thread
            errors.append(error)

    def local(frame, event, argument):
        nonlocal count
        count += event == "line"
        if event == "line" and count == at_line:
            threads.append(threading.Thread(target=catching, daemon=True))
            threads[0].start()
            threads[0].join(0.02)
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename.startswith(FOLDERS) else None)
    try:
        call()
    finally:
        sys.settrace(before)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    return count


def together(calls, times):
    """Make each call `times` times, each in its own thread, all threads at once."""
    errors = []
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait()
        try:
            for _ in range(times):
                call()
        except Exception as error:  # noqa: BLE001 - to be shown in the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []


@pytest.mark.parametrize(("optimizers", "momentum"), [(1, 0.5), (2, 0.0)], ids=["one optimizer", "two"])
@pytest.mark.parametrize("kind", SHAPES)
def test_step_during_another_step_waits_and_takes_effect(kind, optimizers, momentum):
    params, made = make(SHAPES[kind], optimizers, momentum)
    for optimizer in made * 2:
        optimizer.step()
    steps = 2 * optimizers
    lines = meet(made[0].step, made[-1].step, 1)
    steps += 2
    for line in range(2, lines, max(lines // 20, 1)):
        meet(made[0].step, made[-1].step, line)
        steps += 2
    expected = serial(steps, momentum)
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, expected))


@pytest.mark.parametrize("case", ["one optimizer", "two optimizers", "first steps", "some change the group"])
def test_every_step_of_four_threads_takes_effect(case):
    params, made = make(SHAPES["large"] + SHAPES["small"], 2 if case == "two optimizers" else 1, 0.0)
    if case != "first steps":
        for optimizer in made:
            optimizer.step()
    done = 0 if case == "first steps" else len(made)
    calls = [optimizer.step for optimizer in made] * (4 // len(made))
    if case == "some change the group":
        calls[-1] = lambda: (made[0].set_trainable([params[0]], True), made[0].load_state_dict(made[0].state_dict()))
    together(calls, 15)
    steps = done + 15 * (4 - (case == "some change the group"))
    for p in params:
        assert (p == -steps).all()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_call_of_a_train_step_takes_effect(accumulate):
    module = torch.nn.Linear(3, 2)
    module.register_buffer("calls", torch.zeros(()))
    torch.nn.init.zeros_(module.weight), torch.nn.init.zeros_(module.bias)

    def loss_fn(model, x):
        model.calls.add_(1)
        return model(x).sum()

    optimizer = torch_api.MaskedSGD(module.parameters(), lr=1.0)
    train_step = torch_api.JaxTrainStep(module, loss_fn, optimizer, accumulate=accumulate)
    x = torch.ones(1, 3)
    together([lambda: train_step(x)] * 3, 20)
    assert module.calls == 60
    assert (module.weight == -60 // accumulate).all()
    assert train_step.pending == 0


def test_train_step_and_optimizer_may_run_in_two_threads():
    module = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(module.weight), torch.nn.init.zeros_(module.bias)
    optimizer = torch_api.MaskedSGD(module.parameters(), lr=1.0)
    train_step = torch_api.JaxTrainStep(module, lambda model, x: model(x).sum(), optimizer)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    x = torch.ones(1, 3)
    together([lambda: train_step(x), optimizer.step], 20)
    assert (module.weight == -40).all()


def test_ema_params_and_steps_may_run_in_two_threads():
    params, _ = make(SHAPES["small"])
    optimizer = torch_api.MaskedSGD(params, lr=1.0, ema_decay=0.5)
    optimizer.step()
    done, refused = [1], []

    def steps():
        try:
            optimizer.step()
            done[0] += 1
        except RuntimeError as error:
            assert "inside ema_params()" in str(error)  # noqa: PT017 - in a thread
            refused.append(error)

    def look():
        with optimizer.ema_params():
            pass

    together([steps, look], 40)
    for p in params:
        assert (p == -done[0]).all()


def test_closure_may_wait_for_the_step_of_another_thread():
    params, (optimizer,) = make(SHAPES["large"], momentum=0.0)
    optimizer.step()

    def closure():
        thread = threading.Thread(target=optimizer.step, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return torch.zeros(())

    optimizer.step(closure)
    for p in params:
        assert (p == -3).all()


WAITING = """
import os, signal, threading, time, warnings
import jax, optax, torch, torch_api

warnings.simplefilter("ignore")
is_inside, may_end, waits = threading.Event(), threading.Event(), []

def callback(_):
    if waits:
        is_inside.set()
        may_end.wait(60)

def update(gradients, state, params=None):
    jax.tree.map(lambda leaf: jax.debug.callback(callback, leaf.ravel()[0]), gradients)
    return gradients, state

p, q = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
slow = torch_api.OptaxOptimizer([p], optax.chain(optax.GradientTransformation(lambda params: (), update), optax.sgd(1.0)))
other = torch_api.MaskedSGD([q], lr=1.0)
p.grad, q.grad = torch.ones(4), torch.ones(4)
slow.step(), other.step()
waits.append(True)
thread = threading.Thread(target=slow.step)
thread.start()
assert is_inside.wait(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    other.step()
    raise SystemExit("it did not wait")
except KeyboardInterrupt:
    assert thread.is_alive() and (q == -1).all()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

child = os.fork()
if not child:
    try:
        signal.alarm(60)
        other.step()
    except RuntimeError as error:
        os._exit("was forked" not in str(error))
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0

may_end.set()
thread.join()
other.step()
assert (p == -2).all() and (q == -2).all()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no such signals, no fork")
def test_signals_and_forks_do_not_wait_for_another_threads_step():
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


SHORT_OF_MEMORY = """
import resource, numpy, torch, torch_api

SIZE = 9_000_000

def call_without_room(step):
    \"\"\"Step where no piece of memory as large as a parameter is left; whether it could.\"\"\"
    pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages, resource.RLIM_INFINITY))
    taken = []
    try:
        while True:
            taken.append(numpy.empty(2 * SIZE, numpy.uint8))
    except MemoryError:
        pass
    try:
        step()
        return True
    except MemoryError as error:
        assert "Nothing was updated." in error.__notes__[0]
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def check(params, optimizer, step):
    step(), step()
    for n in (2, 3):
        assert not call_without_room(step)
        for p in params:
            assert (p == -n * (n + 1) / 2).all(), n
            assert (optimizer.state[p]["momentum_buffer"] == n).all(), n
        step()

def parameters(kind):
    if kind == "views":
        return [torch.nn.Parameter(x) for x in torch.zeros(3 * SIZE).split(SIZE)]
    if kind == "views beside others":
        return [torch.nn.Parameter(torch.zeros(SIZE)), torch.nn.Parameter(torch.zeros(2 * SIZE)[:SIZE])]
    return [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(3)]

def train():
    module = torch.nn.Linear(1, SIZE, bias=False)
    torch.nn.init.zeros_(module.weight)
    optimizer = torch_api.MaskedSGD(module.parameters(), lr=1.0, momentum=1.0, writeback="copy")
    train_step = torch_api.JaxTrainStep(module, lambda model, x: (model.weight[:, 0] * x).sum(), optimizer)
    x = torch.ones(())
    check([module.weight], optimizer, lambda: train_step(x))

def optimize(kind):
    params = parameters(kind)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch_api.MaskedSGD(params, lr=1.0, momentum=1.0, writeback="copy" if kind == "copy" else "inplace")
    check(params, optimizer, optimizer.step)

optimize("copy"), optimize("views"), optimize("views beside others"), train()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as Linux does it")
def test_step_without_memory_for_copies_changes_nothing():
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    code = [sys.executable, "-W", "ignore", "-c", SHORT_OF_MEMORY]
    done = subprocess.run(code, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_hooks_run_once_for_each_update_of_a_train_step_in_several_threads(accumulate):
    module = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(module.weight), torch.nn.init.zeros_(module.bias)
    optimizer, seen = torch_api.MaskedSGD(module.parameters(), lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before") or time.sleep(0.0005))  # other threads run during the pause
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train_step = torch_api.JaxTrainStep(module, lambda model, x: model(x).sum(), optimizer, accumulate=accumulate)
    x = torch.ones(1, 3)
    together([lambda: train_step(x)] * 4, 30)
    assert [seen.count(kind) for kind in ("before", "after")] == [120 // accumulate] * 2
    assert (module.weight == -120 // accumulate).all()


def test_hook_may_call_the_train_step():
    module = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(module.weight), torch.nn.init.zeros_(module.bias)
    optimizer, x, inner = torch_api.MaskedSGD(module.parameters(), lr=1.0), torch.ones(1, 3), [True]
    train_step = torch_api.JaxTrainStep(module, lambda model, x: model(x).sum(), optimizer, accumulate=2)

    def hook(*_):
        if inner:
            inner.pop()
            train_step(x)

    optimizer.register_step_pre_hook(hook)
    train_step(x), train_step(x)
    assert train_step.pending == 1
    train_step.flush()
    assert train_step.pending == 0
    assert (module.weight == -2).all()
