"""jax_function: arguments and outputs share memory with torch, nothing is read after the call; threads and torch.compile."""

import functools
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import torch
from torch._dynamo.utils import counters

import bridge
from bridge._autograd import traced_function
from bridge._memory import call_arguments

KEEPS_RESULTS = jax.__version_info__ < (0, 11)  # whether the backward of tanh reads its result
LAYOUTS = {
    "contiguous": lambda: torch.randn(16, 8),
    "transposed": lambda: torch.randn(8, 16).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(4, 2, 8).permute(2, 0, 1),
    "0-d": lambda: torch.tensor(1.5),
    "bfloat16": lambda: torch.randn(64).bfloat16(),
    "bool": lambda: torch.randn(64) > 0,
}
COPIED = {
    "unaligned": lambda: torch.randn(65)[1:],
    "with gaps": lambda: torch.randn(8, 16)[:, ::2],
    "expanded": lambda: torch.randn(8, 1).expand(8, 4),
    "conjugate": lambda: torch.randn(8, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.randn(8)),
    "empty": lambda: torch.zeros(0, 3),
}


class Seen:
    """The addresses of inputs as jax gets them, and of outputs as (jax's, torch's)."""

    def __init__(self, monkeypatch):
        self.into, self.out = [], []
        run, results = traced_function.CompiledCall._run, call_arguments.results_as_tensors

        def watched_run(call, flat, others):
            # The compiled call treats an operand like this: it reads aligned memory without a copy.
            self.into.append([jax.device_put(x, may_alias=True).unsafe_buffer_pointer() for x in flat])
            return run(call, flat, others)

        def watched_results(arrays, on_cpu):
            found = results(arrays, on_cpu)
            self.out.append([(x.unsafe_buffer_pointer(), t.data_ptr()) for x, t in zip(arrays, found, strict=True)])
            return found

        monkeypatch.setattr(traced_function.CompiledCall, "_run", watched_run)
        monkeypatch.setattr(traced_function, "results_as_tensors", watched_results)


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arguments_and_outputs_are_not_copied(layout, seen):
    x, f = LAYOUTS[layout](), bridge.jax_function(lambda x: x * x)
    ys = [f(x), f(x), f._call_any((x,), {})]
    assert len(f._by_fast_signature) == 1, "the call did not use the fast path"
    assert seen.into == [[x.data_ptr()]] * 3
    assert seen.out == [[(y.data_ptr(), y.data_ptr())] for y in ys]
    for y in ys:
        torch.testing.assert_close(y, x & x if x.dtype is torch.bool else x * x)


@pytest.mark.parametrize("layout", COPIED)
def test_memory_that_jax_cannot_alias_is_copied(layout, seen):
    x, f = COPIED[layout](), bridge.jax_function(lambda x: x * x)
    for _ in range(2):
        torch.testing.assert_close(f(x), (x * x).resolve_conj().resolve_neg())
    assert not x.numel() or seen.into[0] != [x.data_ptr()]


def test_backward_copies_no_arguments_outputs_or_gradients(seen):
    a, b = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32).mul_(0.1).t().requires_grad_()
    y = bridge.jax_function(lambda a, b: jnp.exp(a @ b))(a, b)
    grad = torch.randn(32, 32)
    found = torch.autograd.grad(y, (a, b), grad)
    assert seen.into == [[a.data_ptr(), b.data_ptr()], [a.data_ptr(), b.data_ptr(), y.data_ptr(), grad.data_ptr()]]
    assert [ours for pair in seen.out[1] for ours in pair] == [x.data_ptr() for x in found for _ in range(2)]
    z = torch.exp(a @ b)
    torch.testing.assert_close(found, torch.autograd.grad(z, (a, b), grad))


def test_only_residuals_are_kept_alive():
    cases = {
        (lambda a, b: a * b): ((0, 1), (), 0),
        (lambda a, b: a + 2 * b): ((), (), 0),
        (lambda a, b: jnp.exp(a) + b): ((0,), (), 1),
        (lambda a, b: (jnp.exp(a), b)): ((0,), (0,), 0),
        (lambda a, b: jnp.exp(a @ b)): ((0, 1), (0,), 0),
        (lambda a, b: jnp.sin(a) * b): ((0, 1), (), 2),
    }
    for fn, expected in cases.items():
        f = bridge.jax_function(fn)
        f(torch.randn(80, 80, requires_grad=True), torch.randn(80, 80, requires_grad=True))
        recording = next(iter(f._by_signature.values()))[0].with_residuals((0, 1))
        assert (recording.needed_argnums, recording.residual_out_indices, len(recording.transferable)) == expected


CONSTANT = jnp.ones(64)
HANDED_THROUGH = {
    "itself": lambda x: x,
    "through jit": lambda x: jax.jit(lambda x: x)(x),
    "views": lambda x: (x.reshape(8, 8), x[:], x.reshape(8, 8).T),
    "twice": lambda x: (x, x),
    "one result twice": lambda x: (lambda y: (y, y))(x + 1),
    "a constant": lambda x: (CONSTANT, x),
    "numbers": lambda x: (1.0, 2, x),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", HANDED_THROUGH)
def test_outputs_do_not_share_memory(name, requires_grad):
    x = torch.arange(64.0).requires_grad_(requires_grad)
    outs = bridge.jax_function(HANDED_THROUGH[name])(x)
    outs = outs if isinstance(outs, tuple) else (outs,)
    assert len({t.data_ptr() for t in (x, *outs)}) == len(outs) + 1
    before = [t.detach().clone() for t in outs]
    for out in outs:
        out.detach().fill_(-7)
    assert torch.equal(x, torch.arange(64.0))
    assert CONSTANT.tolist() == [1] * 64
    again = bridge.jax_function(HANDED_THROUGH[name])(x)
    torch.testing.assert_close(again if isinstance(again, tuple) else (again,), tuple(before))


# ------------------------------------------------------------------ changes after the call

ROWS, SIDE, ROUNDS = 2048, 256, 1000  # jax runs smaller products before the call returns


@functools.cache
def product():
    return bridge.jax_function(lambda x, w: x @ w)


def constants(rows=ROWS, side=SIDE):
    """Return x with one value in all elements, and a matrix whose product with x has that value in all elements."""
    return torch.full((rows, side), 1.0), torch.full((side, side), 1.0 / side)


def test_tensors_may_change_right_after_each_call():
    x, w = constants()
    seed, wrong = torch.empty_like(x), []
    for i in range(ROUNDS):
        x.detach().fill_(i % 7)
        learn = i % 4 == 0
        y = product()(x.requires_grad_(learn), w)
        x.detach().fill_(-1)
        if learn:
            seed.fill_(i % 5)
            (grad,) = torch.autograd.grad(y, x, seed)
            seed.fill_(-1)
            wrong += [i] * (not bool((grad == i % 5).all()))
        wrong += [i] * (not bool((y == i % 7).all()))
    assert wrong == []


def test_comparison_detects_a_call_that_does_not_wait():
    """The same program without the wait: the test above can fail."""
    x, w = constants()
    product()(x, w)
    program = next(p for (p, _) in product()._by_signature.values() if p.tensor_specs[0].shape == (ROWS, SIDE))
    compiled, stale = program._cache["run"]._compiled, 0
    for _ in range(100):
        x.fill_(3)
        (y,) = compiled(*call_arguments.as_call_arguments([x, w], [None, None]))
        x.fill_(-1)
        stale += not bool((bridge.to_torch(y) == 3).all())
    assert stale


def test_change_between_forward_and_backward_raises_torchs_error():
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def changed(fn, which):
        copies = a * 1, b * 1
        y = bridge.jax_function(fn)(*copies)
        with torch.no_grad():
            (y if which is None else copies[which]).add_(1)
        return torch.autograd.grad(y.sum(), (a, b), allow_unused=True)

    for fn, which in (
        (lambda a, b: a * b, 0),
        (lambda a, b: a * b, 1),
        (lambda a, b: jnp.sin(a) + b, 0),
        (lambda a, b: jnp.tanh(a) + 0 * b, 0),
    ):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changed(fn, which)
    if KEEPS_RESULTS:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changed(lambda a, b: jnp.tanh(a @ b), None)
    else:
        for ours, theirs in zip(changed(lambda a, b: jnp.tanh(a @ b), None), torch.autograd.grad(torch.tanh(a @ b), (a, b)), strict=True):
            torch.testing.assert_close(ours, theirs)
    for fn, which in ((lambda a, b: a + 2 * b, 0), (lambda a, b: jnp.sin(a) + b, 1), (lambda a, b: a * b, None)):
        changed(fn, which)


def test_residuals_are_freed_with_the_backward_and_with_the_graph():
    f, x = bridge.jax_function(lambda x: jnp.tanh(jnp.sin(x))), torch.randn(8, requires_grad=True)
    y = f(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = f(x)
    gone = weakref.ref(y)
    node = weakref.ref(y.grad_fn)
    del y
    assert (gone(), node()) == (None, None), "a reference cycle keeps it alive"


def test_programs_are_freed_with_the_function():
    f = bridge.jax_function(lambda x: x + 1)
    f(torch.ones(3))
    program = weakref.ref(next(iter(f._by_signature.values()))[0])
    del f
    gc.collect()
    assert program() is None


# ------------------------------------------------------------------ who calls


def test_threads_share_a_function_and_trace_each_signature_once():
    traces, barrier = [], threading.Barrier(8)

    def fn(x, n):
        traces.append(n)
        return jnp.sin(x) * n

    f = bridge.jax_function(fn)

    def work(index):
        barrier.wait()
        for round_ in range(20):
            n, wide = round_ % 3, bool((index + round_) % 2)
            x = torch.full((8,), float(index), dtype=torch.float64 if wide else torch.float32, requires_grad=True)
            f(x, n).sum().backward()
            torch.testing.assert_close(x.grad, n * torch.cos(x.detach()))
            torch.testing.assert_close(f(x.detach(), n), n * torch.sin(x.detach()))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sorted(traces) == [0, 0, 1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # importing torch 2.11 warns
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # at graph breaks
def test_call_inside_torch_compile_is_a_graph_break_with_right_gradients():
    torch._dynamo.reset()
    counters.clear()
    f = bridge.jax_function(lambda x, s: {"y": jnp.sin(x) * s})

    def caller(x):
        return f(torch.tanh(x), 2.0)["y"] * 3

    compiled = torch.compile(caller, backend="eager")
    for n in (4, 4, 6):
        x = torch.randn(n, requires_grad=True)
        ours, plain = compiled(x), torch.sin(torch.tanh(x)) * 6
        torch.testing.assert_close(ours, plain)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(plain.sum(), x))
    assert sum(counters["graph_break"].values()) >= 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(caller, backend="eager", fullgraph=True)(torch.randn(4))
    torch._dynamo.reset()


def test_debug_settings_of_jax_do_not_stop_the_call():
    f, x = bridge.jax_function(lambda x: x * 2), torch.ones(3, requires_grad=True)
    with jax.transfer_guard("disallow"), jax.disable_jit():
        f(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not (os.environ.get("MASKBRIDGE_TEST_GPU") and torch.cuda.is_available()), reason="no GPU, or none requested")
def test_torchs_stream_waits_for_results_on_a_gpu():
    x, w = (t.cuda() for t in constants(4096, 4096))
    for i in range(50):
        x.fill_(i % 7)
        y = product()(x, w)
        x.fill_(-1)
        assert y.device == x.device
        assert bool((y == i % 7).all())
