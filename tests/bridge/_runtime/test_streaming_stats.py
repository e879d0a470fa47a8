"""Norm and finite check of large gradients, which are read by address before the update."""

import jax
import numpy as np
import pytest
import torch
from oracles import FUSES, clones, movement_error
from packing import streaming_of
from policies import change_policy

import bridge
import torch_api
from bridge import _process
from bridge._compiler import policy
from bridge._memory import address_space
from bridge._process import x64
from bridge._runtime import in_flight, streaming_stats
from bridge._xla import compile as reading_compile
from bridge._xla import streams

pytestmark = [pytest.mark.unoptimized, pytest.mark.skipif(not address_space.CAN_READ_BY_ADDRESS, reason="only for Linux on x86-64")]
CHUNK = policy.STREAMING.chunk_elements
SIZES = [CHUNK, CHUNK + 1, 100_000, 2_000_003, 3 * CHUNK, 1 << 20]
CPU = jax.local_devices(backend="cpu")[0]
WAYS = {"norm": (True, False), "finite": (False, True), "both": (True, True)}


def some(dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for n in sizes]


def found(grads, clip, scaled, scale=4.0):
    kinds = [(i, g.numel(), str(g.dtype).removeprefix("torch.")) for i, g in enumerate(grads)]
    for _, _, dtype in kinds:
        streaming_stats.streaming_stats_executable(dtype, clip, scaled, CPU).compile()
    reader = streaming_stats.StreamingStats(kinds, clip, scaled, CPU)
    reads, held = [], []
    with x64():
        result = np.asarray(reader(grads, [np.full(1, scale, np.float32)] if scaled else [], reads, held))
    for array in reads:
        array.block_until_ready()
    return result


def squares(grads):
    return sum(float(np.square(g.double().numpy()).sum()) for g in grads)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None], ids=["float32", "float64", "both"])
def test_each_element_is_counted_once(way, dtype):
    grads = some(dtype) if dtype else some(torch.float32)[::2] + some(torch.float64)[1::2]
    clip, scaled = WAYS[way]
    expected = squares(grads) / (16 if scaled else 1) if clip else 0.0
    np.testing.assert_allclose(found(grads, clip, scaled), [expected, 0.0], rtol=1e-12 if dtype == torch.float64 else 2e-7)


def test_comparison_detects_elements_counted_twice(monkeypatch):
    grads, concatenate = some(), np.concatenate
    # The last part of each gradient starts one element early, so it counts one element twice and misses the last.
    monkeypatch.setattr(
        streaming_stats.np, "concatenate", lambda xs: concatenate([*xs[:-1], xs[-1] - 1]) if xs[-1].size == 3 else concatenate(xs)
    )
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found(grads, True, False), [squares(grads), 0.0], rtol=2e-7)


@pytest.mark.parametrize("at", [(0, 0), (1, CHUNK), (3, 1_999_999), (3, 2_000_002), (5, -1)], ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nonfinite_element_is_found_anywhere(at, value):
    grads = some()
    grads[at[0]][at[1]] = value
    assert np.isnan(found(grads, False, True)[1])
    assert np.isnan(found(grads, True, True)[1])


def test_overflowing_sum_does_not_count_as_nonfinite():
    grads = [torch.full((1 << 20,), 3e37), torch.full((CHUNK,), 2e38)]
    np.testing.assert_allclose(found(grads, True, True, scale=1e30), [(1 << 20) * 9e14 + CHUNK * 4e16, 0.0], rtol=1e-5)
    assert found(grads, False, True)[1] == 0


def test_dense_gradients_in_any_order_are_not_copied():
    streaming_stats.streaming_stats_executable("float32", True, False, CPU).compile()
    base = some(sizes=[16 * 32 * 50 * 50])[0]
    turned = base.view(16, 32, 50, 50).to(memory_format=torch.channels_last)
    sparse = torch.zeros(base.numel(), 2)[:, 0].copy_(base)
    for grad, copies in ((turned, 0), (sparse, 1)):
        reader, held = streaming_stats.StreamingStats([(0, base.numel(), "float32")], True, False, CPU), []
        with x64():
            jax.block_until_ready(reader([grad], [], [], held))
        assert sum(storage.data_ptr() != grad.untyped_storage().data_ptr() for storage in held) == copies
        np.testing.assert_allclose(found([grad], True, False), [squares([base]), 0.0], rtol=2e-7)


@pytest.mark.parametrize("way", WAYS)
def test_program_allocates_no_large_temporaries(way):
    program = streaming_stats.streaming_stats_executable("float32", *WAYS[way], CPU)
    program.compile()
    assert program.compiled.memory_analysis().temp_size_in_bytes < 1 << 20


SHAPES = [(700, 1000), (2000, 300), (11,), (300, 300), (64, 64), (64, 64), (64, 64), (64, 64)]


def parameters():
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give(params, step, live=None):
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator)
        p.grad = g if live is None or i in live else None


def train(params, steps, step):
    for n in range(steps):
        give(params, n)
        step()


def ours(params, **options):
    return torch_api.MaskedAdamW(params, lr=1e-2, max_grad_norm=1.0, **options)


def launches(optimizer):
    return optimizer._launch_cache.last_used


def test_clipped_steps_move_as_in_torch():
    params = parameters()
    start, other = clones(params), clones(params)
    theirs = torch.optim.AdamW(other, lr=1e-2)

    def their_step():
        torch.nn.utils.clip_grad_norm_(other, 1.0)
        theirs.step()

    optimizer = ours(params)
    train(params, 20, optimizer.step)
    train(other, 20, their_step)
    assert streaming_of(optimizer) is not None
    for p, q, s in zip(params, other, start, strict=True):
        assert movement_error(p, q, s) < 1e-5


def test_streaming_norm_equals_the_norm_in_the_program(monkeypatch):
    """The rule is SGD, because Adam's movement hardly depends on a factor."""
    sgd = lambda params: torch_api.MaskedSGD(params, lr=1e-2, momentum=0.9, max_grad_norm=1.0)  # noqa: E731
    params, plain, half = parameters(), parameters(), parameters()
    start, optimizer = clones(params), sgd(params)
    train(params, 20, optimizer.step)
    with monkeypatch.context() as m:
        m.setattr(policy, "CAN_READ_BY_ADDRESS", False)
        other = sgd(plain)
        train(plain, 20, other.step)
    assert streaming_of(optimizer) is not None
    assert streaming_of(other) is None
    assert max(map(movement_error, params, plain, start)) < 1e-5
    make = streaming_stats._PerDtypeStats.__init__
    first_share = lambda self, *args: (make(self, *args), setattr(self, "shares", self.shares[:1]))[0]  # noqa: E731
    monkeypatch.setattr(streaming_stats._PerDtypeStats, "__init__", first_share)
    monkeypatch.setattr(_process, "CORES", 2)
    change_policy(monkeypatch, "STREAMING", min_elements=1 << 19)
    train(half, 20, sgd(half).step)
    if streams.has_streams():
        assert max(map(movement_error, half, plain, start)) > 1e-2


def test_every_set_of_gradients_uses_the_same_programs(monkeypatch):
    params = parameters()
    optimizer = ours(params)
    train(params, 2, optimizer.step)
    monkeypatch.setattr(reading_compile.LazyExecutable, "__init__", lambda *_: pytest.fail("another program"))
    assert {streaming_stats.streaming_stats_executable("float32", True, False, CPU)} == {
        kind.executable for kind in streaming_of(optimizer)._per_dtype
    }
    monkeypatch.undo()
    for live in ({0, 1, 2}, {1, 3}, {2, 4, 5}):
        give(params, 5, live)
        before = streaming_stats.streaming_stats_executable.cache_info().misses
        optimizer.step()
        assert streaming_stats.streaming_stats_executable.cache_info().misses == before
        far = [position for position in live if params[position].numel() >= CHUNK]
        assert (streaming_of(optimizer) is None) == (not far)


@FUSES
def test_norm_reads_the_gradients_once():
    counts = []
    for bound in (None, 1.0):
        p = torch.nn.Parameter(torch.ones(1 << 21))
        optimizer = torch_api.MaskedAdamW([p], max_grad_norm=bound)
        p.grad = torch.ones_like(p)
        optimizer.step()
        counts.append(optimizer.bytes_accessed() / p.numel())
    assert counts[1] - counts[0] == pytest.approx(4, abs=0.01)
    turn = 4 * policy.STREAMING.concurrent_chunks * CHUNK
    program = streaming_stats.streaming_stats_executable("float32", True, False, CPU)
    program.compile()
    # The compiler counts one iteration of each loop: four parts, a remainder, and the sums.
    assert bridge._xla.compile.bytes_accessed(program.compiled) < 3.5 * turn


def test_gradients_stay_alive_until_they_are_read_even_if_the_step_fails(monkeypatch):
    params = parameters()
    optimizer = ours(params)
    train(params, 2, optimizer.step)
    before, launch = clones(params), launches(optimizer)[0]
    flights, leave = [], in_flight.InFlight.__exit__
    monkeypatch.setattr(in_flight.InFlight, "__exit__", lambda self, *error: flights.append((self, len(self.held))) or leave(self, *error))
    for form in ("update", "inline_executable"):  # the call of several programs, and that of one
        monkeypatch.setattr(launch.executable, form, lambda *_: 1 / 0)
    give(params, 9)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    ((flight, held),) = flights
    assert flight.reads
    assert all(array.is_ready() for array in flight.reads)
    assert held >= 3
    assert not flight.held
    assert all(map(torch.equal, params, before))


def test_loss_scale_and_frozen_elements_are_respected(monkeypatch):
    params = parameters()
    mask = {"p0": torch.zeros(700, 1000, dtype=torch.bool), "p1": True, "p3": True}
    mask["p0"][:350] = True
    optimizer = torch_api.MaskedSGD([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0, mask=mask, max_grad_norm=0.5, fused=True)
    change_policy(monkeypatch, "STREAMING", min_elements=1)
    start = clones(params)
    give(params, 0)
    params[0].grad[400:] = torch.nan  # frozen rows
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    assert streaming_of(optimizer) is not None
    own = [params[0].grad[:350], params[1].grad, params[3].grad]
    factor = 0.5 / (squares(own) ** 0.5 / 8 + 1e-6) / 8
    for i, g in ((1, params[1].grad), (3, params[3].grad)):
        assert movement_error(params[i], start[i] - factor * g, start[i]) < 1e-5
    assert movement_error(params[0][:350], start[0][:350] - factor * own[0], start[0][:350]) < 1e-5
    assert torch.equal(params[0][350:], start[0][350:])
    assert optimizer.skipped_steps == 0


def without_memory():
    """Yield gradients of ones that report address 0."""
    from torch.testing._internal.two_tensor import TwoTensor

    shape = (1024, 1024)
    yield "wraps others", TwoTensor(torch.ones(shape), torch.ones(shape)), None
    yield "zeros", torch._efficientzerotensor(shape), None
    yield "functional", torch._to_functional_tensor(torch.ones(shape)), "it has no memory, and a copy of it fails"
    freed = torch.ones(shape)
    freed.untyped_storage().resize_(0)
    yield "freed", freed, r"its memory was freed \(its storage was resized to 0 bytes"


@pytest.mark.parametrize("scaled", [False, True])
def test_gradient_without_memory_is_copied_or_raises(scaled):
    for name, gradient, error in without_memory():
        params = [torch.nn.Parameter(torch.full((1024, 1024), 2.0)), torch.nn.Parameter(torch.full((1024, 1024), 3.0))]
        optimizer = torch_api.MaskedAdamW(params, lr=1e-2, weight_decay=0.0, max_grad_norm=None if scaled else 1.0, fused=True)
        if scaled:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert streaming_of(optimizer) is not None
        before, states = clones(params), [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]
        params[0].grad = gradient
        if error is not None:
            with pytest.raises(ValueError, match=f"the gradient of 'param0'.* cannot be read: .*{error}.* Nothing was updated"):
                optimizer.step()
            assert all(map(torch.equal, params, before))
            assert all(torch.equal(optimizer.state[p][k], x) for p, own in zip(params, states, strict=True) for k, x in own.items())
            params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        assert not any(map(torch.equal, params, before)), name
        if name == "wraps others":
            torch.testing.assert_close(before[0] - params[0], torch.full((1024, 1024), 1e-2), rtol=1e-3, atol=0.0)
