"""Inline execution in the calling thread, and small programs on one core: the numbers do not change, and other threads run."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import clones, movement_error, random_grads, random_params, run_pair, set_grads
from policies import change_policy

import torch_api
from bridge import _process
from bridge._compat import jax as compat
from bridge._compiler import policy
from bridge._ir.queries import properties_of
from bridge._runtime import cache, executable
from bridge._xla import compile_options, inline_execution, probes

CPU = jax.devices("cpu")[0]


def inline(compiled):
    return inline_execution.load_inline(inline_execution.serialize_executable(compiled), CPU)


def takes_functions():
    return inline(jax.jit(lambda x: x + 1).lower(1.0).compile()) is not None


INLINE = pytest.mark.skipif(not takes_functions(), reason="this jaxlib cannot load a program with host functions")


def slow(x):
    """Compute for some tenths of a second on one core."""
    return jax.lax.fori_loop(0, 400, lambda _, x: jnp.tanh(x @ x), x), x[0]


def made(function, *arguments, **options):
    return jax.jit(function, **options).lower(*arguments).compile()


def small(make, sizes=((40, 30), (30,)), steps=1):
    params = random_params(shapes=sizes)
    optimizer = make(params)
    for _ in range(steps):
        set_grads(params, random_grads(params))
        optimizer.step()
    return optimizer, params


def launches(optimizer):
    return optimizer._launch_cache.last_used


# ------------------------------------------------------------------ inline execution


@INLINE
def test_results_are_ready_when_the_inline_call_returns():
    x = jnp.full((200, 200), 0.01)  # not a NumPy array, whose memory jax may first copy in another thread
    elsewhere = made(slow, x)
    here = inline(elsewhere)
    results = here(x)
    assert all(r.is_ready() for r in results)
    others = elsewhere(x)
    assert not others[0].is_ready()  # the check can fail: jax's own call returns before the result is ready
    assert all(np.array_equal(a, b) for a, b in zip(results, others, strict=True))


@INLINE
def test_other_threads_run_during_an_inline_call():
    x = jnp.full((200, 200), 0.01)
    here, ticks, done = inline(made(slow, x)), [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    before = time.perf_counter()
    here(x)
    after = time.perf_counter()
    done.set()
    thread.join()
    assert sum(before < t < after for t in ticks) > 10


@INLINE
def test_inline_call_donates_in_place():
    here = inline(made(lambda x: x + 1, jnp.zeros(1000), donate_argnums=0))
    x = jnp.zeros(1000)
    address = x.unsafe_buffer_pointer()
    y = here(x)
    assert x.is_deleted()
    assert y.unsafe_buffer_pointer() == address


@INLINE
def test_placeholder_function_is_never_called(monkeypatch):
    calls = []
    monkeypatch.setattr(compat, "_never", lambda *_: calls.append(1))
    assert float(inline(made(lambda x: x + 1, 1.0))(1.0)) == 2.0
    assert not calls
    monkeypatch.undo()
    with pytest.raises(AssertionError, match=r"has called what it was only loaded with"):
        compat._never()


def test_inline_form_is_none_if_unsupported(monkeypatch):
    kept = inline_execution.serialize_executable(made(lambda x: x + 1, 1.0))
    assert kept is not None
    assert inline_execution.load_inline(None, CPU) is None
    assert inline_execution.load_inline(kept, type("Device", (), {"platform": "cuda"})) is None

    def takes_none(self, *args, **kwargs):
        raise TypeError("deserialize_executable(): incompatible function arguments")

    monkeypatch.setattr(compat.InlineClient, "deserialize_executable", takes_none)
    assert inline_execution.load_inline(kept, CPU) is None

    def cannot(compiled):
        raise RuntimeError("UNIMPLEMENTED: LessThan is not serializable")

    monkeypatch.setattr(inline_execution, "serialize", cannot)
    assert inline_execution.serialize_executable(made(lambda x: x + 1, 1.0)) is None


def test_inline_execution_does_not_change_any_bit(monkeypatch):
    found = []
    for call in (inline_execution.load_inline, lambda kept, device: None):
        monkeypatch.setattr(executable, "load_inline", call)
        monkeypatch.setattr(cache, "_programs", {})
        torch.manual_seed(0)
        optimizer, params = small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), steps=20)
        found.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    (launch,) = launches(optimizer)
    assert launch.executable.inline_executable is launch.executable.update


@INLINE
def test_second_form_of_a_program_is_loaded_on_demand(monkeypatch):
    monkeypatch.setattr(cache, "_programs", {})
    optimizer, params = small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), steps=2)
    (launch,) = launches(optimizer)
    assert "update" not in vars(launch.executable)
    before = launch.executable.bytes_accessed
    assert "update" not in vars(launch.executable)
    again = launch.executable.update
    assert again is launch.executable.update is not launch.executable.inline_executable
    assert launch.executable.bytes_accessed == before > 0
    launch.executable.inline_executable = again  # it can replace the inline form
    there = [p.detach().clone() for p in params]
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(params, there, strict=True))


@INLINE
def test_only_a_single_program_of_a_step_runs_inline(monkeypatch):
    asked = []
    optimizer, _ = small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2))
    (launch,) = launches(optimizer)
    assert launch.executable.inline_executable is not launch.executable.update
    monkeypatch.setattr(executable, "load_inline", lambda kept, device: asked.append(1))
    monkeypatch.setattr(cache, "_programs", {})
    params = random_params(shapes=[(1 << 10, 1 << 10)] * 5 + [(8, n) for n in range(1, 70)])
    with pytest.MonkeyPatch.context() as patch:
        change_policy(patch, "BUCKETING", max_gathered_row_bytes=0)
        several = torch_api.MaskedAdamW(params, lr=1e-2)
    set_grads(params, random_grads(params))
    several.step()
    assert len(launches(several)) > 1
    assert not asked


@INLINE
def test_many_large_loops_do_not_run_inline(monkeypatch):
    many = 32
    change_policy(monkeypatch, "THREADING", many_loops_per_core=many / _process.CORES)
    for count, size, by_caller in [(many, 1 << 14, False), (many - 1, 1 << 14, True), (many, 1 << 7, True)]:
        optimizer, _ = small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), [(size + 16 * n,) for n in range(count)], steps=2)
        (launch,) = launches(optimizer)
        assert len(launch.executable.plan.leaves) == count
        assert (launch.executable.inline_executable is not launch.executable.update) == by_caller


@pytest.mark.parametrize("seen", ["print", "callback", "in a branch"])
@pytest.mark.parametrize("together", [False, True], ids=["leaf by leaf", "under a norm"])
def test_program_with_a_callback_does_not_run_inline(seen, together, capfd):
    show = {
        "print": lambda x: jax.debug.print("seen {}", x),
        "callback": lambda x: jax.debug.callback(lambda x: print("seen", x), x),
        "in a branch": lambda x: jax.lax.cond(x > -1e9, lambda: jax.debug.print("seen it"), lambda: None),
    }[seen]

    def update(updates, state, params=None):
        leaves = jax.tree.leaves(updates)
        norm = jnp.sqrt(sum(jnp.sum(u * u) for u in leaves)) if together else leaves[0].reshape(-1)[0]
        show(norm)
        return jax.tree.map(lambda u: u / (norm + 1) if together else u, updates), state

    tx = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.1))
    optimizer, _ = small(lambda ps: torch_api.OptaxOptimizer(ps, tx), steps=2)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2
    (launch,) = launches(optimizer)
    assert launch.executable.has_callback
    assert launch.executable.inline_executable is launch.executable.update


@INLINE
def test_out_of_memory_raises_and_leaves_valid_tensors():
    def update(updates, state, params=None):
        most = jax.tree.leaves(updates)[0].reshape(-1)[0] + jnp.arange(1 << 43, dtype=jnp.float32)
        return jax.tree.map(lambda u: u + jnp.sort(most)[0], updates), state

    params = {"w": torch.nn.Parameter(torch.zeros(64))}
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    params["w"].grad = torch.ones(64)
    with pytest.raises(Exception, match=r"(?i)out of memory") as caught:
        optimizer.step()
    assert "parameters and state of ['w'] are lost and hold NaN" in "".join(caught.value.__notes__)
    assert bool(params["w"].isnan().all())


# ------------------------------------------------------------------ on one core


def divided(optimizer):
    """Return how many loops of the optimizer's programs are divided among cores."""
    return sum(launch.executable.update.as_text().count("outer_dimension_partitions") for launch in launches(optimizer))


@pytest.mark.skipif(_process.CORES == 1, reason="needs two cores")
def test_short_loops_use_one_core_and_long_loops_several(monkeypatch):
    shapes = [(300, 300), (300,)]
    assert divided(small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), shapes)[0]) == 0
    assert divided(small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), [(600, 600), (600,)])[0]) > 0
    monkeypatch.setattr(executable, "single_threaded", lambda options: options)
    monkeypatch.setattr(cache, "_programs", {})
    assert divided(small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), shapes)[0]) > 0  # the check can fail


@pytest.mark.skipif(_process.CORES == 1, reason="needs two cores")
def test_many_short_loops_use_one_core_each(monkeypatch):
    many, short = 32, 1 << 16
    change_policy(monkeypatch, "THREADING", many_loops_per_core=many / _process.CORES)

    def loops(count, largest=0):
        shapes = [(short + 16 * n,) for n in range(count)] + [(largest,)] * (largest > 0)
        return divided(small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), shapes)[0])

    assert loops(many) == 0
    assert loops(many - 1) > 0
    assert loops(many, largest=many * short * _process.CORES) > 0
    change_policy(monkeypatch, "THREADING", short_loop_elements=short // 2)
    monkeypatch.setattr(cache, "_programs", {})
    assert loops(many) > 0  # the check can fail


@pytest.mark.skipif(_process.CORES == 1, reason="needs two cores")
def test_expensive_short_loop_uses_several_cores():
    def much(updates, state, params=None):
        def long(u):
            for n in range(200):
                u = jnp.sin(u) + n
            return u

        return jax.tree.map(long, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), much)
    assert divided(small(lambda ps: torch_api.OptaxOptimizer(ps, tx), [(300, 300)])[0]) > 0


def test_op_count_sums_results_and_is_infinite_for_loops():
    x = jax.ShapeDtypeStruct((10,), np.float32)
    work = lambda f: properties_of(jax.make_jaxpr(f)(x)).op_count  # noqa: E731
    assert work(lambda x: x * 2 + 1) == 20
    assert work(lambda x: jax.jit(lambda y: y * 2)(x) + 1) == 30  # the result of the call counts again
    twice = jax.jit(lambda y: y * 2)
    assert work(lambda x: twice(twice(x))) == 40  # a shared function counts at each call
    assert work(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x + 1, x)) == float("inf")
    assert work(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x + 1, x))) == float("inf")


def test_single_thread_option_keeps_other_options_and_user_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(compile_options, "_is_supported", lambda option, value: True)
    assert compile_options.single_threaded({"a": 1}) == {"a": 1, compile_options._PASSES_OPTION: compile_options._LOOP_PARALLELIZATION}
    assert (
        compile_options.single_threaded({compile_options._PASSES_OPTION: "x"})[compile_options._PASSES_OPTION]
        == f"x,{compile_options._LOOP_PARALLELIZATION}"
    )
    monkeypatch.setattr(compile_options, "_is_supported", lambda option, value: False)
    assert compile_options.single_threaded({"a": 1}) == {"a": 1}
    monkeypatch.setattr(compile_options, "_is_supported", lambda option, value: True)
    monkeypatch.setenv("XLA_FLAGS", f"--{compile_options._PASSES_OPTION}=mine")
    assert compile_options.single_threaded({"a": 1}) == {"a": 1}


@pytest.mark.skipif(not probes.fuses_multiple_outputs(), reason="this XLA writes only one result per loop")
def test_equal_matrices_of_a_small_model_share_its_program(monkeypatch):
    change_policy(monkeypatch, "BUCKETING", max_gathered_bucket_bytes=1)
    counts = []
    for few in (policy.BUCKETING.max_gathered_elements, 0):  # with 0 the check fails
        change_policy(monkeypatch, "BUCKETING", max_gathered_elements=few)
        counts.append(len(launches(small(lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2), [(128, 72)] * 8 + [(128,)] * 8)[0])))
    assert counts == [1, 2]


@pytest.mark.skipif(not probes.fuses_multiple_outputs(), reason="this XLA writes only one result per loop")
@pytest.mark.parametrize(
    ("shape", "count", "far"),
    [((200, 192), 39, False), ((200, 192), 40, True), ((300, 256), 63, False), ((300, 256), 64, True), ((96, 96), 64, False)],
)
def test_gradients_of_many_large_equal_leaves_are_read_by_address(shape, count, far):
    optimizer, _ = small(lambda ps: torch_api.MaskedSGD(ps, lr=1e-2), [shape] * count)
    assert any(launch.executable.reads_grads_by_address for launch in launches(optimizer)) is far


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "NAdam"])
def test_small_models_move_as_in_torch(name):
    extra = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}.get(name, {})
    shapes = [(128, 72)] * 8 + [(128,)] * 8 + [(784, 20), (20,), ()]
    params = random_params(shapes=shapes)
    theirs, starts = clones(params), clones(params)
    ours, torchs = getattr(torch_api, f"Masked{name}")(params, lr=1e-3, **extra), getattr(torch.optim, name)(theirs, lr=1e-3, **extra)
    run_pair(ours, params, torchs, theirs, 20)
    assert max(movement_error(p, q, s) for p, q, s in zip(params, theirs, starts, strict=True)) < 1e-5
