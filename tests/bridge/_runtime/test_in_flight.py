"""The state after errors and signals during a step, and access to its memory by other optimizers and threads."""

import gc
import os
import signal
import threading
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
import torch
from oracles import random_params
from packing import streaming_of
from policies import change_policy

import torch_api
from bridge._compiler import policy
from bridge._memory import adoption, allocation, pending_results
from bridge._runtime import cache, in_flight
from bridge._xla import streams
from bridge._xla.compile import LazyExecutable
from torch_api._step import launch_cache

pytestmark = pytest.mark.unoptimized


def stepped(optimizer, params, count=1):
    for _ in range(count):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()


def churn():
    """Reuse freed memory."""
    gc.collect()
    return [np.full(200, 9.0, np.float32) for _ in range(2000)]


def test_groups_may_have_frozen_parameters_only():
    model = torch.nn.Linear(3, 3).requires_grad_(False)
    torch_api.MaskedAdam(model.parameters(), lr=0.1).step()
    params = random_params(shapes=[(3,), (4,)])
    optimizer = torch_api.MaskedSGD([{"params": [params[0]], "momentum": 0.5}, {"params": [params[1]]}], lr=0.1)
    stepped(optimizer, params)
    params[1].requires_grad_(False)
    optimizer.max_grad_norm = 10.0
    before = params[0].detach().clone()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(params[0], before)


class PreemptedError(Exception):
    pass


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_signal_during_a_step_is_handled_after_the_results_are_in_place(monkeypatch, number):
    def raises(*_):
        raise PreemptedError

    before, finish = signal.signal(number, raises), pending_results.PendingCalls.finish
    params = random_params(shapes=[(20,)] * 6) + [torch.nn.Parameter(torch.zeros(20))]
    optimizers = torch_api.MaskedSGD(params[:6], lr=1.0), torch_api.MaskedSGD(params[6:], lr=1.0, writeback="copy")
    try:
        for optimizer, p in zip(optimizers, (params[0], params[6]), strict=True):
            stepped(optimizer, params)
            start = p.detach().clone()
            monkeypatch.setattr(pending_results.PendingCalls, "finish", lambda calls: (os.kill(os.getpid(), number), finish(calls))[1])
            with pytest.raises(PreemptedError):
                optimizer.step()
            monkeypatch.undo()
            assert torch.equal(p.detach(), start - 1)
            assert signal.getsignal(number) is raises
            optimizer.step()
            assert torch.equal(p.detach(), start - 2)
    finally:
        signal.signal(number, before)


def test_error_while_waiting_keeps_results_and_handlers(monkeypatch):
    params = random_params(shapes=[(30,)] * 5)
    optimizer = torch_api.MaskedSGD(params, lr=1.0)
    stepped(optimizer, params)
    handler, wait = signal.getsignal(signal.SIGINT), pending_results._pointer
    start = [p.detach().clone() for p in params]

    def broken(*args):
        wait(*args)
        raise RuntimeError("lost the device")

    monkeypatch.setattr(pending_results, "_pointer", broken)
    with pytest.raises(RuntimeError, match="lost the device") as caught:
        optimizer.step()
    assert "The step is not whole" not in "".join(getattr(caught.value, "__notes__", ()))
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is handler
    assert all(torch.equal(p.detach(), before - 1) for p, before in zip(params, start, strict=True))


@pytest.mark.parametrize("where", ["reader", "order"])
def test_error_at_the_end_of_a_step_releases_signals_and_buckets(where, monkeypatch):
    params = random_params(shapes=[(1 << 20,), (1 << 19,)] + [(30,)] * 5)
    optimizer = torch_api.MaskedAdam(params, lr=1.0, max_grad_norm=1.0)
    stepped(optimizer, params)
    handler, launches = signal.getsignal(signal.SIGINT), optimizer._launch_cache.last_used
    assert streaming_of(optimizer) is not None
    assert any(launch.buckets for launch in launches)

    def broken(*_):
        raise RuntimeError("lost the device")

    if where == "reader":
        read = type(streaming_of(optimizer)).__call__
        lost = lambda reader, *args: (read(reader, *args), args[2].append(SimpleNamespace(block_until_ready=broken)))[0]  # noqa: E731
        monkeypatch.setattr(type(streaming_of(optimizer)), "__call__", lost)
    else:
        real = in_flight.InFlight.__enter__

        def enter(flight):
            found = real(flight)
            flight.saved_stream = "none"  # `streams.set_stream` takes numbers
            return found

        monkeypatch.setattr(in_flight.InFlight, "__enter__", enter)
        monkeypatch.setattr(streams, "set_stream", broken)
    with pytest.raises(RuntimeError, match="lost the device"):
        optimizer.step()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is handler
    before = [p.detach().clone() for p in params]
    other = threading.Thread(target=optimizer.step, daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    memories = [memory for launch in launches for memory in launch.arguments.state]
    assert all(memory.array.is_ready() for memory in memories)  # every started program has ended
    assert not any(torch.equal(p.detach(), old) for p, old in zip(params, before, strict=True))


def test_error_while_waiting_for_one_program_keeps_all_results(monkeypatch):
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0)
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=16)
    params = random_params(shapes=[(n,) for n in (20, 30)] * 20)
    optimizer = torch_api.MaskedAdam(params, lr=1.0)
    stepped(optimizer, params)
    assert len(optimizer._launch_cache.last_used) > 1
    wait, calls = pending_results._pointer, []

    def broken(*args):
        found = wait(*args)
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("lost the device")
        return found

    start = [p.detach().clone() for p in params]
    monkeypatch.setattr(pending_results, "_pointer", broken)
    with pytest.raises(RuntimeError, match="lost the device"):
        optimizer.step()
    monkeypatch.undo()
    assert not any(torch.equal(p, before) for p, before in zip(params, start, strict=True))
    assert {int(optimizer.state[p]["step"]) for p in params} == {2}


def test_error_of_a_partial_step_names_the_updated_parameters(monkeypatch):
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0)
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=16)
    params = random_params(shapes=[(20,)] * (policy.CHUNKING.max_equal_leaves + 1))
    optimizer = torch_api.MaskedSGD(params, lr=1.0)
    stepped(optimizer, params)
    last = optimizer._launch_cache.last_used[-1].executable

    def broken(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(last, "update", broken)
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        optimizer.step()
    first = [f"param{i}" for i in range(policy.CHUNKING.max_equal_leaves + 1) if not torch.equal(params[i], before[i])]
    assert 0 < len(first) <= policy.CHUNKING.max_equal_leaves
    assert f"This step has updated {first} and no other parameter." in caught.value.__notes__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("makes", [lambda: optax.sgd(0.1, momentum=0.9), lambda: optax.adam(0.1)], ids=["sgd", "adam"])
def test_failing_callback_loses_no_bucket_row(makes):
    failing = []

    def update(grads, state, params=None):
        jax.debug.callback(lambda _: 1 / 0 if failing else None, jax.tree.leaves(grads)[0].ravel()[0])
        return grads, state

    with jax.numpy_dtype_promotion("standard"):
        calling = optax.GradientTransformation(lambda _: (), update)
        names = [*(f"a.{i}" for i in range(6)), "b.w"]
        params = dict(zip(names, (torch.nn.Parameter(torch.ones(20)) for _ in names), strict=True))
        torch_api.MaskedSGD([params[f"a.{i}"] for i in range(6)], lr=0.1)  # a.5 is in the bucket, but in no other optimizer
        own = [(name, p) for name, p in params.items() if name != "a.5"]
        optimizer = torch_api.PartitionedOptimizer(own, {"a": makes(), "b": calling}, labels={"a": "a", "b": "b"})
        stepped(optimizer, params.values(), 2)
        params["a.3"].grad = None
        optimizer.step()
        before = {name: p.detach().clone() for name, p in params.items()}
        failing.append(True)
        with pytest.raises(Exception, match=r"ZeroDivision|division by zero"):
            optimizer.step()
        held = churn()
        assert all(torch.equal(params[name].detach(), value) for name, value in before.items())
        failing.clear()
        stepped(optimizer, params.values())
        assert bool(params["a.3"].isfinite().all())
        del held


def test_optimizers_of_separate_bucket_rows_may_step_in_threads():
    params = random_params(shapes=[(16,)] * 8)
    torch_api.MaskedSGD(params, lr=1.0)  # puts all into one bucket
    start, errors = [p.detach().clone() for p in params], []

    def run(own):
        try:
            stepped(torch_api.MaskedSGD(own, lr=1.0), own, 100)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(own,)) for own in (params[:4], params[4:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.allclose(p.detach(), before - 100, atol=1e-4) for p, before in zip(params, start, strict=True))


@pytest.mark.parametrize("name", ["RMSprop", "Adam", "SGD"])
def test_bucketed_parameter_is_its_rounded_master(name):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5000, generator=generator).bfloat16()) for _ in range(6)]
    optimizer = getattr(torch_api, f"Masked{name}")(params, lr=1e-3, master_weights=True)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(5000, generator=generator).bfloat16()
        optimizer.step()
        assert all(torch.equal(optimizer.state[p]["master_param"].bfloat16(), p.detach()) for p in params)


def test_two_parameters_may_swap_data():
    params = random_params(shapes=[(5,)] * 6)
    optimizer = torch_api.MaskedSGD(params, lr=1.0)
    stepped(optimizer, params)
    a, b = (p.detach().clone() for p in params[:2])
    params[0].data, params[1].data = params[1].data, params[0].data
    stepped(optimizer, params)
    assert torch.equal(params[0].detach(), b - 1)
    assert torch.equal(params[1].detach(), a - 1)


def test_replaced_state_data_is_used_by_a_new_set_of_gradients():
    params = random_params(shapes=[(5,)] * 6)
    optimizer = torch_api.MaskedSGD(params, lr=1.0, momentum=0.5)
    stepped(optimizer, params)
    optimizer.state[params[0]]["momentum_buffer"].data = torch.full((5,), 100.0)
    before = params[0].detach().clone()
    params[3].grad = None
    optimizer.step()
    assert torch.allclose(params[0].detach(), before - 51)


# Two parameters have 480,000 bytes of Adam's state each, two have 160,000. The state of small ones is held back first.
@pytest.mark.parametrize(
    ("cached", "held_back", "begun"),
    [
        (True, 1 << 40, [[300, 300, 100, 100], []]),
        (False, 1 << 40, [[], [300, 300, 100, 100]]),
        (False, 319_999, [[300, 300], [100, 100]]),
        (False, 320_100, [[300], [300, 100, 100]]),
        (False, 0, [[300, 300, 100, 100], []]),
    ],
)
def test_state_is_initialized_during_compilation_within_a_memory_limit(cached, held_back, begun, monkeypatch, tmp_path):
    order = []

    def noted(name, function):
        def call(*arguments, **options):
            order.append(name(*arguments))
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(launch_cache, "_COMPILE_BYTES", held_back)
    monkeypatch.setattr(
        allocation,
        "full_many",
        noted(lambda kinds, _: sorted((shape[0] // 200 for shape, *_ in kinds[::2]), reverse=True), allocation.full_many),
    )
    monkeypatch.setattr(
        adoption,
        "full_many",
        noted(lambda kinds, _: sorted((shape[0] // 200 for shape, *_ in kinds[::2]), reverse=True), allocation.full_many),
    )
    monkeypatch.setattr(LazyExecutable, "compile", noted(lambda _: "program", LazyExecutable.compile))
    monkeypatch.setattr(cache, "_programs", {})
    monkeypatch.setattr(cache, "_lru", {})
    before = getattr(jax.config, "jax_compilation_cache_dir", None)
    params = [torch.nn.Parameter(torch.randn(n, 200, dtype=torch.float64).float()) for n in (300, 300, 100, 100)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours, theirs = torch_api.MaskedAdamW(params, lr=0.1), torch.optim.AdamW(copies, lr=0.1)
    order.clear()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path) if cached else None)
    try:
        for _ in range(2):
            for p, copy in zip(params, copies, strict=True):
                p.grad = torch.randn_like(p)
                copy.grad = p.grad.clone()
            ours.step()
            theirs.step()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert list(dict.fromkeys(map(str, order))) == [str(each) for each in (begun[0], "program", begun[1]) if each]
    for p, copy in zip(params, copies, strict=True):
        torch.testing.assert_close(p, copy)
