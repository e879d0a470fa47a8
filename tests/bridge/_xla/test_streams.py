"""Executables of one step on several execution streams: equal numbers, order after earlier work, and the thread's stream restored."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from policies import change_policy

import bridge
import torch_api
from bridge import _process
from bridge._compiler import policy
from bridge._memory import address_space, pending_results
from bridge._process import x64
from bridge._runtime import execute, streaming_stats
from bridge._xla import streams

pytestmark = pytest.mark.quick

COUNT = 40  # equal leaves that are too large for buckets
needs_calls = pytest.mark.skipif(streams._stream_calls is None, reason="this jaxlib has only one execution stream")


@pytest.fixture(autouse=True)
def _several_programs(monkeypatch):
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=16, max_equal_leaves=8)


def built(seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(200, 200, generator=generator)) for _ in range(COUNT)]
    return params, torch_api.MaskedAdamW(params, lr=1e-2, **options)


def steps(params, optimizer, count=5):
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.fixture
def single_stream(monkeypatch):
    def without():
        monkeypatch.setattr(streams, "_stream_calls", None)
        monkeypatch.setattr(streams, "set_stream", streams._keep_stream)

    return without


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_several_streams_give_the_numbers_of_one(single_stream, options):
    side_by_side = steps(*built(**options))
    single_stream()
    assert all(map(torch.equal, side_by_side, steps(*built(**options))))


def test_update_that_is_divided_into_pieces_runs_on_one_stream(single_stream):
    def clipped():
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(200, 200, generator=generator)) for _ in range(COUNT)]
        return params, torch_api.OptaxOptimizer(params, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))

    side_by_side = steps(*clipped())
    single_stream()
    params, optimizer = clipped()
    assert all(map(torch.equal, side_by_side, steps(params, optimizer)))
    assert optimizer._launch_cache.last_used[0].executable._outlined is not None


@pytest.mark.skipif(not address_space.CAN_READ_BY_ADDRESS, reason="only for Linux on x86-64")
@pytest.mark.parametrize("several", [True, False])
def test_streamed_norm_counts_each_element_with_and_without_streams(several, single_stream, monkeypatch):
    if not several:
        single_stream()
    monkeypatch.setattr(_process, "CORES", 2)
    chunk = policy.STREAMING.chunk_elements
    change_policy(monkeypatch, "STREAMING", min_elements=chunk)
    sizes, device = [20 * chunk, chunk + 5], jax.devices("cpu")[0]
    streaming_stats.streaming_stats_executable("float32", True, False, device).compile()
    reader = streaming_stats.StreamingStats([(i, size, "float32") for i, size in enumerate(sizes)], True, False, device)
    grads, reads = [torch.full((size,), 0.5) for size in sizes], []
    with x64():
        found = np.asarray(reader(grads, [], reads, []))
    jax.block_until_ready(reads)
    assert found.tolist() == [0.25 * sum(sizes), 0.0]


@needs_calls
def test_programs_take_streams_in_turn_and_the_threads_stream_is_restored(monkeypatch):
    change_policy(monkeypatch, "BUCKETING", max_addressed_row_bytes=0)  # otherwise one program would update all
    params, optimizer = built()
    steps(params, optimizer, 1)
    own, chosen, choose = streams._stream_calls[0](), [], streams.set_stream
    monkeypatch.setattr(streams, "set_stream", lambda order: (chosen.append(order), choose(order)))
    steps(params, optimizer, 1)
    launches = len(optimizer._launch_cache.last_used)
    assert launches > streams.STREAM_COUNT
    assert len(chosen) == launches + 1
    several = chosen[: streams.STREAM_COUNT]
    assert chosen[:-1] == [several[i % streams.STREAM_COUNT] for i in range(launches)]
    assert len({own, *several}) == 1 + streams.STREAM_COUNT
    assert chosen[-1] == own == streams._stream_calls[0]()


@needs_calls
def test_failed_step_restores_the_stream(monkeypatch):
    params, optimizer = built()
    steps(params, optimizer, 1)
    own = streams._stream_calls[0]()

    def broken(*_):
        raise RuntimeError("lost the device")

    monkeypatch.setattr(pending_results, "_pointer", broken)
    with pytest.raises(RuntimeError, match="lost the device"):
        steps(params, optimizer, 1)
    assert streams._stream_calls[0]() == own


def test_step_with_one_program_keeps_the_stream(monkeypatch):
    params = [torch.nn.Parameter(torch.randn(200, 200)) for _ in range(3)]
    optimizer = torch_api.MaskedAdamW(params, lr=1e-2)
    monkeypatch.setattr(streams, "set_stream", lambda _: pytest.fail("asked for another order"))
    steps(params, optimizer)


def test_earlier_computation_reads_parameters_before_the_step():
    params, optimizer = built()
    steps(params, optimizer, 1)
    slow = jax.jit(lambda x, y: (y * (1 + 0 * jnp.linalg.matrix_power(x, 6)[0, 0])).sum())  # y is read last
    x, last = jnp.full((600, 600), 1e-3), bridge.to_jax(params[-1].detach())
    slow(x, last).block_until_ready()
    for seed in range(20):
        expected = params[-1].detach().sum()
        result = slow(x, bridge.to_jax(params[-1].detach()))  # still runs when the step starts
        steps(params, optimizer, 1 + seed % 2)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@needs_calls
def test_token_program_is_compiled_once_per_length():
    device, numbers = jax.devices("cpu")[0], np.array([0.0, 0.1, np.inf, np.nan, 1e308])
    with x64():
        found = [streams.fork_streams(numbers + n, device)[0] for n in range(2)]
        compiled = streams._copy_program(5, device)
        assert all(np.array_equal(x, numbers + n, equal_nan=True) for n, x in enumerate(found))
        assert compiled is streams._copy_program(5, device)
        assert compiled is not streams._copy_program(6, device)


@needs_calls
@pytest.mark.parametrize("off", [False, True])
def test_token_program_is_compiled_before_the_first_step_runs(off, monkeypatch):
    streams._copy_program.cache_clear()
    change_policy(monkeypatch, "BUCKETING", max_addressed_row_bytes=0)
    params, optimizer = built()
    found, run = [], execute.run
    monkeypatch.setattr(execute, "run", lambda *given: (found.append(streams._copy_program.cache_info().misses), run(*given))[1])
    with jax.disable_jit(off):
        steps(params, optimizer, 2)
    assert found == [1, 1]
    assert streams._copy_program.cache_info().misses == 1


@pytest.mark.slow
def test_token_waits_on_the_given_device_for_every_default_device():
    code = """
        import jax, numpy as np
        from bridge._xla import streams
        from bridge._process import x64
        one, other = jax.devices("cpu")
        for default in (None, one, other):
            with jax.default_device(default), x64():
                for device in (one, other):
                    numbers, _ = streams.fork_streams(np.ones(32), device)
                    assert not isinstance(numbers, jax.Array) or numbers.devices() == {device}, (default, device, numbers.devices())
    """
    flags = "--xla_force_host_platform_device_count=2"
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=os.environ | {"XLA_FLAGS": flags})
