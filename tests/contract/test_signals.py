"""Signals during a step: the step is done whole or not at all, handlers stay installed, and each signal is delivered once."""

import itertools
import linecache
import os
import signal
import sys
import threading
import time

import jax
import optax
import pytest
import torch

import bridge
import torch_api

FOLDERS = tuple(os.path.dirname(package.__file__) + os.sep for package in (bridge, torch_api))
NUMBERS = signal.SIGINT, signal.SIGTERM


class Terminated(BaseException):
    pass


def terminate(number, frame):
    raise Terminated


HANDLERS = signal.default_int_handler, terminate
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signals")


@pytest.fixture(autouse=True)
def handlers():
    """Install handlers that raise, and check after the test that they are still installed."""
    before = [signal.signal(number, handler) for number, handler in zip(NUMBERS, HANDLERS, strict=True)]
    yield
    found = tuple(map(signal.getsignal, NUMBERS))
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)
    assert found == HANDLERS


def call_with_signal(call, number, at_line, begins=lambda: True):
    """Call, and raise a signal at one line of the library; return whether that line exists and whether the handler raised."""
    count = 0

    def local(frame, event, argument):
        nonlocal count
        count += event == "line" and begins()
        if event == "line" and count == at_line and begins():
            sys.settrace(None)
            signal.raise_signal(number)
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename.startswith(FOLDERS) else None)
    try:
        call()
    except (KeyboardInterrupt, Terminated):
        return count >= at_line, True
    finally:
        sys.settrace(before)
    return count >= at_line, False


def step_in_another_thread(step):
    """Step in another thread, which would hang if a lock were still held."""
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def parameters():
    """Return small parameters that share a bucket, large ones, and views, whose results are copied back."""
    flat = torch.zeros(6 * 36)
    own = [torch.zeros(6, 6) for _ in range(6)] + [torch.zeros(300, 300), torch.zeros(7)]
    params = [torch.nn.Parameter(x) for x in (*own, *(flat[36 * i : 36 * i + 36] for i in range(6)))]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def are_after(optimizer, params, n):
    """Return whether parameters and momentum equal n steps of torch.optim.SGD with lr 1, momentum 1 and gradients of ones."""
    seen = [(p.detach().flatten()[::50], optimizer.state[p]["momentum_buffer"].flatten()[::50]) for p in params]
    return all((values == -n * (n + 1) / 2).all() and (momentum == n).all() for values, momentum in seen)


def test_signal_at_any_line_finds_a_step_whole_or_undone():
    params = parameters()
    optimizer = torch_api.MaskedSGD(params, lr=1.0, momentum=1.0)
    optimizer.step(), optimizer.step()
    n = 2
    for line in itertools.count(1, 2):
        is_there, is_delivered = call_with_signal(optimizer.step, NUMBERS[line // 2 % 2], line)
        n += are_after(optimizer, params, n + 1)
        assert are_after(optimizer, params, n), line
        assert tuple(map(signal.getsignal, NUMBERS)) == HANDLERS, line
        if not is_there:
            break
        assert is_delivered, line
        if line % 15 == 0:
            step_in_another_thread(optimizer.step)
            n += 1
    assert line > 100


def test_signal_at_any_line_finds_a_train_step_whole_or_undone():
    flat = torch.zeros(12)
    module = torch.nn.Linear(3, 2)
    module.weight, module.bias = torch.nn.Parameter(flat[:6].view(2, 3)), torch.nn.Parameter(torch.zeros(2))
    module.register_buffer("seen", flat[6:10].view(4)[1:3])  # a view, so its new value is copied back
    module.register_buffer("calls", torch.zeros(()))

    def loss_fn(model, x):
        model.seen.add_(1)
        model.calls.add_(1)
        return (model(x) * 0 + model.weight.sum() + model.bias.sum()).mean()

    optimizer = torch_api.MaskedSGD(module.parameters(), lr=1.0)
    train_step = torch_api.JaxTrainStep(module, loss_fn, optimizer)
    x = torch.ones(1, 3)
    train_step(x), train_step(x)
    for line in itertools.count(1, 2):
        n = int(module.calls)
        is_there, is_delivered = call_with_signal(lambda: train_step(x), NUMBERS[line // 2 % 2], line)
        now = int(module.calls)
        assert now - n in (0, 1), line
        assert all((t == value).all() for t, value in ((module.weight, -now), (module.bias, -now), (module.seen, now))), line
        assert tuple(map(signal.getsignal, NUMBERS)) == HANDLERS, line
        if not is_there:
            break
        assert is_delivered, line
    step_in_another_thread(lambda: train_step(x))
    assert line > 100


def test_signal_at_any_line_finds_flush_whole_or_undone():
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    optimizer = torch_api.MaskedSGD(module.parameters(), lr=1.0)
    train_step = torch_api.JaxTrainStep(module, lambda model, x: model(x).sum(), optimizer, accumulate=4)
    x = torch.ones(1, 2)
    for n, line in enumerate(itertools.count(1, 7), 1):
        train_step(x)
        is_there, _ = call_with_signal(train_step.flush, signal.SIGINT, line)
        train_step.flush()
        assert (module.weight == -n).all(), line
        assert train_step.pending == 0
        if not is_there:
            break


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_timer_signals_never_leave_a_partial_step():
    params = parameters()
    optimizer = torch_api.MaskedSGD(params, lr=1.0, momentum=1.0)
    optimizer.step(), optimizer.step()
    start = time.perf_counter()
    for _ in range(5):
        optimizer.step()
    took, n, interrupts = (time.perf_counter() - start) / 5, 7, 0
    before = signal.signal(signal.SIGALRM, terminate)
    times = torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist()
    try:
        for part in times:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(1.5 * took * part, 1e-6))
                    optimizer.step()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Terminated:
                interrupts += 1
            n += are_after(optimizer, params, n + 1)
            assert are_after(optimizer, params, n)
            assert signal.getsignal(signal.SIGALRM) is terminate
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 10


def signalling():
    """Return an optimizer whose step raises the signals in `sent`, and then an error if `fails` is not empty."""
    sent, fails = [], []

    def callback(_):
        for each in sent:
            signal.raise_signal(each)
        if fails:
            raise ValueError("the user's own error")

    def update(gradients, state, params=None):
        jax.tree.map(lambda leaf: jax.debug.callback(callback, leaf.ravel()[0]), gradients)
        return gradients, state

    p = torch.nn.Parameter(torch.ones(4))
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(optax.GradientTransformation(lambda params: (), update), optax.sgd(0.5))
        optimizer = torch_api.OptaxOptimizer([p], tx)
        p.grad = torch.ones(4)
        optimizer.step()
    return optimizer, p, sent, fails


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals")
@pytest.mark.parametrize("case", ["it raises", "a handler raises", "nothing raises"])
def test_each_signal_reaches_its_handler(case):
    optimizer, p, sent, fails = signalling()
    received = []
    others = signal.SIGUSR1, signal.SIGUSR2
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in others]
    try:
        if case == "it raises":
            sent += others
            fails.append(True)
            with pytest.raises(Exception, match="the user's own error"):
                optimizer.step()
            assert received == [*others]
            assert (p == 0.5).all()
        elif case == "a handler raises":
            sent += [signal.SIGUSR2, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2]
            with pytest.raises(Terminated) as caught:
                optimizer.step()
            assert isinstance(caught.value.__context__, KeyboardInterrupt)
            assert received == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2]
            assert (p == 0).all()
        else:
            sent += [*others, *others]
            optimizer.step()
            assert received == [*others, *others]
            assert (p == 0).all()
    finally:
        for number, handler in zip(others, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals")
def test_handler_may_replace_itself():
    optimizer, _, sent, _ = signalling()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: signal.signal(number, signal.SIG_IGN))
    try:
        sent.append(signal.SIGUSR1)
        optimizer.step()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_compilation_can_be_interrupted():
    module = torch.nn.Linear(2, 1)
    is_first, went_on = [True], []

    def loss_fn(model, x):
        if is_first and is_first.pop():
            signal.raise_signal(signal.SIGINT)
            went_on.append(True)
        return model(x).sum()

    train_step = torch_api.JaxTrainStep(module, loss_fn, torch_api.MaskedSGD(module.parameters(), lr=1.0))
    start = module.weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        train_step(torch.ones(1, 2))
    assert not went_on
    assert torch.equal(module.weight, start)
    train_step(torch.ones(1, 2))
    assert torch.equal(module.weight, start - 1)


def traced():
    """Return a module, a function that traces its forward, and the attributes that a trace replaces."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.inner(x)

    module = Outer()
    function, params = bridge.module_function(module), bridge.module_tree(module)
    owners = Outer, torch.nn.Linear, torch.nn.Module, torch.autograd.Function.__mro__[1]
    return lambda: function(params, jax.numpy.ones((3, 2))), lambda: [jax.jit, jax.checkpoint, torch.compile, *map(dict, map(vars, owners))]


@pytest.mark.parametrize("at_end", [False, True], ids=["the first lines", "the last lines"])
def test_interrupt_at_any_line_of_a_trace_restores_all_classes(at_end):
    call, attributes = traced()
    call()
    before = attributes()
    lines = []

    def local(frame, event, argument):
        """Count lines and raise KeyboardInterrupt at one; skip the line that leaves a lock's `with`, where no real signal arrives."""
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("with "):
            lines.append(frame.f_lineno)
            if len(lines) == at_line:
                raise KeyboardInterrupt
        return local

    def interrupted():
        lines.clear()
        earlier = sys.gettrace()
        sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename.startswith(FOLDERS) else None)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(earlier)
        return False

    at_line = 0
    assert not interrupted()
    count = len(lines)
    for at_line in range(count - 400, count, 3) if at_end else range(1, 400, 3):
        assert interrupted(), at_line
        assert attributes() == before, at_line


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")
def test_handler_may_trace_at_any_line_of_a_trace():
    call, attributes = traced()
    expected, before, handled, results = call(), attributes(), [], []
    earlier = signal.signal(signal.SIGUSR1, lambda *_: handled.append(call().shape))
    alarm = signal.signal(signal.SIGALRM, terminate)
    signal.alarm(120)  # if a lock were held, the handler would wait forever
    try:
        for at_line in itertools.count(1, 17):
            is_there, is_interrupted = call_with_signal(lambda: results.append(call()), signal.SIGUSR1, at_line)
            assert not is_interrupted, at_line
            assert attributes() == before, at_line
            if not is_there:
                break
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGUSR1, earlier)
        signal.signal(signal.SIGALRM, alarm)
    assert len(handled) > 30
    assert set(handled) == {expected.shape}
    assert all((result == expected).all() for result in results)


EXCHANGES = {
    "ema_params": lambda params: torch_api.MaskedAdamW(params, lr=0.1, ema_decay=0.9).ema_params,
    "eval_params": lambda params: torch_api.MaskedScheduleFreeAdamW(params, lr=0.1).eval_params,
}


@pytest.mark.parametrize("is_leaving", [False, True], ids=["entering", "leaving by another"])
@pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES)
def test_signal_during_an_ema_swap_keeps_the_trained_values(make, is_leaving):
    params = [torch.nn.Parameter(torch.ones(50)) for _ in range(4)]
    with jax.numpy_dtype_promotion("standard"):
        exchange = make(params)
        optimizer = exchange.__self__
        for p in params:
            p.grad = torch.ones(50)
        for _ in range(3):
            optimizer.step()
    for line in itertools.count(1, 1 if is_leaving else 4):
        leaving: list[bool] = []

        def use(leaving=leaving):
            with exchange():
                leaving.append(True)
                if is_leaving:
                    raise KeyboardInterrupt

        trained = [p.detach().clone() for p in params]
        is_there, _ = call_with_signal(use, signal.SIGTERM, line, lambda leaving=leaving: bool(leaving) is is_leaving)
        assert all(map(torch.equal, params, trained)), line
        optimizer.step()
        if not is_there:
            break


def test_all_signals_within_one_call_are_delivered():
    count = 1500
    arrived = []

    def trains(name, param):
        signal.raise_signal(signal.SIGALRM)
        return True

    before = signal.signal(signal.SIGALRM, lambda *_: arrived.append(1))
    try:
        optimizer = torch_api.MaskedSGD([("first", torch.nn.Parameter(torch.zeros(1)))], lr=0.1, mask=trains)
        arrived.clear()
        optimizer.add_param_group({"params": [(f"p{i}", torch.nn.Parameter(torch.zeros(1))) for i in range(count)]})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(arrived) == count
    assert len(optimizer.param_groups) == 2


def load(optimizer, saved):
    optimizer.load_state_dict(saved)


def freeze(optimizer, saved):
    optimizer.set_trainable("bias", False)


def outcome(model, optimizer):
    """Return the parameters, their state, and the flags of which are trained."""
    state = [optimizer.state[p]["trace"].clone() for p in model.parameters() if p in optimizer.state]
    return [*(p.detach().clone() for p in model.parameters()), *state], [row["status"] for row in optimizer.report().rows]


def is_same(one, other):
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(torch.allclose, one[0], other[0]))


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("step", freeze),
        ("train step", freeze),
        ("train step", load),
        ("the loss of a train step", freeze),
        ("the loss of a train step", load),
    ],
)
def test_changes_by_a_handler_during_compilation_are_kept(kind, change):
    """The result is as if the handler had run before the step or after it."""
    count = last = at = 0  # traces made, traces of the first step, and the trace at which the signal arrives

    def traced(function):
        def arriving(*args):
            nonlocal count
            count += 1
            if count == at:
                signal.raise_signal(signal.SIGUSR1)
            return function(*args)

        return arriving

    momentum, loss = optax.trace(0.5), lambda model, x: model(x).sum()
    if kind == "the loss of a train step":
        loss = traced(loss)
    else:
        momentum = optax.GradientTransformation(momentum.init, traced(momentum.update))

    def run(before=lambda *_: None, after=lambda *_: None):
        """Return the state after a first step and after a second one."""
        nonlocal count, last, at
        model = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        optimizer = torch_api.OptaxOptimizer(model.named_parameters(), optax.chain(momentum, optax.scale(-1.0)))
        saved = {"state": {i: {"trace": torch.full_like(p, 8.0)} for i, p in enumerate(model.parameters())}}
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
        step = torch_api.JaxTrainStep(model, loss, optimizer) if kind != "step" else lambda x: optimizer.step()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before(optimizer, saved)
        earlier = signal.signal(signal.SIGUSR1, lambda *_: change(optimizer, saved))
        count = 0
        try:
            step(torch.ones(1, 2))
        finally:
            signal.signal(signal.SIGUSR1, earlier)
        last, at = count, 0
        after(optimizer, saved)
        first = outcome(model, optimizer)
        step(torch.ones(1, 2))
        return first, outcome(model, optimizer)

    expected = [run(before=change), run(after=change)]
    for nth in sorted({1, (1 + last) // 2, last}):
        at = nth
        found = run()
        assert any(all(map(is_same, found, each)) for each in expected), nth
