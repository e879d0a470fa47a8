"""Cost of a step: traces, compilations, bytes, addresses, frames. No test asserts a time."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
import torch
from oracles import clones, project_frames, random_grads, random_params, set_grads
from policies import change_policy
from sampling import sampled

import bridge
import torch_api
from bridge._runtime import cache, executable
from bridge._xla import compile as programs_compile
from bridge._xla import compile_options, multi_output_fusion, probes

pytestmark = [pytest.mark.quick, pytest.mark.long]

ROOT = Path(__file__).parents[3]
CPU_INFO = Path("/proc/cpuinfo")
fused_loops = pytest.mark.skipif(not multi_output_fusion.is_fusion_enabled(), reason="the environment turns multi-output fusion off")


def stepped(optimizer, params, count=1):
    for _ in range(count):
        set_grads(params, random_grads(params))
        optimizer.step()


def counts():
    return bridge.traces(), bridge.compilations()


def new_since(before):
    return tuple(now - then for now, then in zip(counts(), before, strict=True))


def test_steps_under_a_cosine_schedule_trace_once():
    params = random_params(shapes=[(11, 3), (11,)])
    optimizer = torch_api.MaskedAdamW(params)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    before, addresses = counts(), [p.data_ptr() for p in params]
    for _ in range(100):
        stepped(optimizer, params)
        scheduler.step()
    assert new_since(before) == (1, 1)
    assert addresses == [p.data_ptr() for p in params]


def test_changed_hyperparameters_do_not_recompile():
    params = random_params(shapes=[(11, 4), (11,)])
    optimizer = torch_api.MaskedAdamW(params, max_grad_norm=1.0)
    stepped(optimizer, params)
    before = counts()
    group = optimizer.param_groups[0]
    for key, value in {"lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.7, "lr_scale": 0.1, "wd_scale": 3.0}.items():
        group[key] = value
        stepped(optimizer, params)
    group["lr"] = 1  # schedulers also write integers
    optimizer.max_grad_norm = 7
    stepped(optimizer, params)
    assert new_since(before) == (0, 0)


def test_static_hyperparameter_recompiles_once_per_value():
    params = random_params(shapes=[(11, 5)])
    optimizer = torch_api.MaskedAdamW(params)
    stepped(optimizer, params)
    before = counts()
    for maximize in (True, False, True, False):
        optimizer.param_groups[0]["maximize"] = maximize
        stepped(optimizer, params)
    assert new_since(before) == (1, 1)


def test_known_set_of_gradients_compiles_nothing():
    params = random_params(shapes=[(11, 6)] * 3)
    optimizer = torch_api.MaskedSGD(params, lr=0.1)
    stepped(optimizer, params)
    before = counts()
    for missing in (0, 1, 2, 0):
        set_grads(params, [g if i != missing else None for i, g in enumerate(random_grads(params))])
        optimizer.step()
    assert new_since(before) == (1, 1)


def test_set_trainable_back_to_a_known_pattern_compiles_nothing():
    params = random_params(shapes=[(11, 7), (11,)])
    optimizer = torch_api.MaskedAdamW([("a", params[0]), ("b", params[1])])
    stepped(optimizer, params)
    optimizer.set_trainable("a", False)
    stepped(optimizer, params)
    before = counts()
    for trainable in (True, False, True):
        optimizer.set_trainable("a", trainable)
        stepped(optimizer, params)
    assert new_since(before) == (0, 0)


def test_optimizers_of_equal_shapes_share_one_program():
    before = counts()
    for name in ("first", "second", "third"):
        params = random_params(shapes=[(13, 2)])
        stepped(torch_api.MaskedAdamW([(name, params[0])], lr=0.1), params, 2)
    assert new_since(before) == (1, 1)


def test_addresses_of_parameters_and_state_stay_constant():
    params = random_params()
    optimizer = torch_api.MaskedAdamW(params, amsgrad=True)
    stepped(optimizer, params)
    tensors = [*params, *(t for state in optimizer.state.values() for t in state.values())]
    addresses = [t.data_ptr() for t in tensors]
    stepped(optimizer, params, 20)
    assert addresses == [t.data_ptr() for t in tensors]
    assert float(optimizer.state[params[0]]["step"]) == 21.0  # the tensor objects show the new values


@fused_loops
@pytest.mark.parametrize(
    ("build", "most"),
    [
        (lambda p: torch_api.MaskedAdam(p), 28),
        (lambda p: torch_api.MaskedAdamW(p), 28),
        (lambda p: torch_api.MaskedAdamW(p, amsgrad=True), 36),
        (lambda p: torch_api.MaskedSGD(p), 12),
        (lambda p: torch_api.MaskedSGD(p, momentum=0.9), 20),
        (lambda p: torch_api.MaskedSGD(p, momentum=0.9, nesterov=True, weight_decay=0.1), 20),
        (lambda p: torch_api.MaskedAdamW(p, max_grad_norm=1.0), 36),
    ],
    ids=["Adam", "AdamW", "amsgrad", "SGD", "momentum", "nesterov", "clip and AdamW"],
)
def test_step_reads_and_writes_each_array_once(build, most):
    (p,) = random_params(shapes=[(1 << 10, 1 << 10)])
    optimizer = build([p])
    stepped(optimizer, [p])
    assert optimizer.bytes_accessed() / p.numel() <= most * 1.001


def addresses():
    return {array.unsafe_buffer_pointer() for array in jax.live_arrays()}


def test_frozen_leaves_cost_no_bytes_and_have_no_state():
    trained, frozen = random_params(shapes=[(64, 64), (512, 512)])
    alone = torch_api.MaskedAdamW(clones([trained]))
    stepped(alone, alone.param_groups[0]["params"])
    optimizer = torch_api.MaskedAdamW([("a", trained), ("b", frozen)], mask="a", max_grad_norm=None)
    live = addresses()
    stepped(optimizer, [trained, frozen])
    assert optimizer.bytes_accessed() == alone.bytes_accessed()
    assert len(addresses() - live) == 2  # exp_avg and exp_avg_sq of the trained leaf; its step is torch's own tensor
    assert sum(row["state bytes"] for row in optimizer.report().rows) == 2 * 4 * trained.numel() + 4


def test_state_has_the_bytes_of_torch():
    params = random_params()
    theirs = clones(params)
    ours, original = torch_api.MaskedAdamW(params, amsgrad=True), torch.optim.AdamW(theirs, amsgrad=True)
    stepped(ours, params)
    stepped(original, theirs)
    size = lambda o: sum(t.numel() * t.element_size() for s in o.state.values() for t in s.values())  # noqa: E731
    assert size(ours) == size(original)


@pytest.mark.parametrize("kind", ["in place", "copy", "views", "transposed views"])
def test_warm_step_enters_at_most_20_frames_in_10_files(kind):
    """Also for steps that copy results, on request or into parameters that are views of one tensor."""
    params = random_params(shapes=[(8, 4)] * 30)
    if "views" in kind:
        rows = torch.randn(30, 8, 4)
        params = [torch.nn.Parameter(row.t() if kind == "transposed views" else row) for row in rows]
    optimizer = torch_api.MaskedAdamW(params, max_grad_norm=1.0, writeback="copy" if kind == "copy" else "inplace")
    assert {row["write-back"].partition(":")[0] for row in optimizer.report().rows} == {"inplace" if kind == "in place" else "copy"}
    stepped(optimizer, params, 2)
    set_grads(params, random_grads(params))
    frames = project_frames(optimizer.step)
    assert len(frames) <= 20, frames
    assert len({file for file, _ in frames}) <= 10, frames


@pytest.mark.slow
def test_frames_of_a_copying_step_do_not_depend_on_the_number_of_parameters():
    counts = set()
    for number in (3, 40):
        params = random_params(shapes=[(8, 8)] * number)
        optimizer = torch_api.MaskedAdamW(params, writeback="copy")
        stepped(optimizer, params, 2)
        set_grads(params, random_grads(params))
        counts.add(len(project_frames(optimizer.step)))
    assert len(counts) == 1, counts


def test_gradients_may_be_overwritten_after_the_step():
    """jax dispatches asynchronously; unless the step waits, it reads large gradients after they were overwritten."""
    (p,) = random_params(shapes=[(2048, 1024)])
    (q,) = clones([p])
    ours, theirs = torch_api.MaskedSGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    for _ in range(20):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        ours.step()
        p.grad.fill_(float("nan"))
        theirs.step()
        torch.testing.assert_close(p, q)


def run(code, **environment):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout.strip()


OURS = "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion"
OTHER = "--xla_backend_extra_options=other"
WHOLE = {"MASKBRIDGE_XLA_FLAGS": "1"}
UNNAMED = "import jax._src.lib as lib; lib.xla_client.CompileOptions = object"
# name -> (code before the import, environment, XLA_FLAGS afterwards, whether our programs request multi-output fusion).
REQUESTS = {
    "each program": ("", {}, "", True),
    "each program, beside the user's own": ("", {"XLA_FLAGS": OTHER}, OTHER, True),
    "each program, jax has started": ("jax.devices()", {}, "", True),
    "opted out": ("", {"MASKBRIDGE_XLA_FLAGS": "0"}, "", False),
    "the process": ("", WHOLE, OURS, True),
    "the process, appended": ("", WHOLE | {"XLA_FLAGS": "--xla_dump_to="}, f"--xla_dump_to= {OURS}", True),
    "the process, the user's own stays": ("", WHOLE | {"XLA_FLAGS": OTHER}, OTHER, True),
    "the process, too late": ("jax.devices()", WHOLE, "", True),
    "no private name": (UNNAMED, {}, OURS, True),
    "no private name, opted out": (UNNAMED, {"MASKBRIDGE_XLA_FLAGS": "0"}, "", False),
    "no private name, the user's own stays": (UNNAMED, {"XLA_FLAGS": OTHER}, OTHER, False),
    "no private name, too late": (f"jax.devices(); {UNNAMED}", {}, "", False),
}


def forked(codes):
    """Run each code in its own process, forked while torch and jax are idle; codes maps names to (environment, code)."""
    server = f"""
import io, json, os, contextlib, jax, optax, torch
for name, (environment, code) in {codes!r}.items():
    child = os.fork()
    if not child:
        os.environ.update(environment)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code)
        print(json.dumps([name, printed.getvalue()]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    return dict(map(json.loads, run(server).splitlines()))


@pytest.fixture(scope="module")
def requests():
    """Return XLA_FLAGS and the answer after the import for each of `REQUESTS`, each in its own process."""
    asked = (
        "import bridge, json, os; print(json.dumps([os.environ.get('XLA_FLAGS', ''), bridge._xla.multi_output_fusion.is_fusion_enabled()]))"
    )
    codes = {name: (environment, f"{before}\n{asked}") for name, (before, environment, *_) in REQUESTS.items()}
    return {name: json.loads(printed) for name, printed in forked(codes).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(REQUESTS))
def test_process_flag_is_set_only_if_needed_effective_and_wanted(requests, name):
    assert requests[name] == list(REQUESTS[name][2:])


@pytest.mark.nightly
@fused_loops
@pytest.mark.slow
def test_flag_does_not_change_the_numbers():
    code = """
import torch, torch_api
torch.manual_seed(0)
p = torch.nn.Parameter(torch.randn(33, 7))
o = torch_api.MaskedAdamW([p], lr=0.01, weight_decay=0.1)
for _ in range(20):
    p.grad = torch.randn_like(p)
    o.step()
print(p.double().sum().item(), o.bytes_accessed() / p.numel() > 35)
"""
    codes = {switch: ({"MASKBRIDGE_XLA_FLAGS": switch} if switch else {}, code) for switch in ("", "1", "0")}
    runs = {name: printed.split() for name, printed in forked(codes | {"late": ({}, f"jax.devices(){code}")}).items()}
    assert {switch: found[1] for switch, found in runs.items()} == {"": "False", "1": "False", "late": "False", "0": "True"}
    for found in runs.values():
        assert float(found[0]) == pytest.approx(float(runs["0"][0]), rel=1e-6)


@fused_loops
def test_each_leaf_is_one_loop_and_scalars_share_a_few():
    """Values that depend only on step counts and hyperparameters are computed once for all leaves, not in one loop per leaf."""
    loops = {}
    for count in (4, 16):
        params = random_params(shapes=[(8000 + 16 * i,) for i in range(count)])
        optimizer = torch_api.MaskedAdamW(params)
        stepped(optimizer, params)
        (launch,) = optimizer._launch_cache.last_used
        text = launch.executable.update.as_text()
        loops[count] = text[text.index("ENTRY") :].count(" fusion(")
    assert loops[4] >= 4
    assert loops[16] - loops[4] <= 12


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_temporaries_exist_for_one_leaf_at_a_time(monkeypatch):
    """LAMB stores an update of the leaf's size between its loops; in XLA's own order the updates of all leaves exist at once."""
    shapes = [(300, 300 + i) for i in range(8)]
    needed = {}
    for name, options in (("ours", compile_options.update_options), ("XLA's", lambda device: {})):
        monkeypatch.setattr(executable, "update_options", options)
        monkeypatch.setattr(cache, "_programs", {})
        params = random_params(shapes=shapes)
        optimizer = torch_api.MaskedLamb(params, lr=1e-3)
        stepped(optimizer, params)
        (launch,) = optimizer._launch_cache.last_used
        needed[name] = launch.executable.update.memory_analysis().temp_size_in_bytes
    largest = 4 * 300 * 307
    assert needed["ours"] < 4 * largest
    assert needed["XLA's"] > 7 * largest  # the check can fail


@pytest.mark.nightly
@pytest.mark.usefixtures("standard_promotion")
def test_many_loops_with_small_temporaries_keep_xlas_schedule(monkeypatch):
    order, piece, count, one = (
        dict(compile_options._first_supported(compile_options._SCHEDULER_OPTIONS)),
        programs_compile.LazyExecutable,
        18,
        4 * 60_000,
    )

    def compiled(optimizer_class, count, **arguments):
        """Return whether the schedule of least memory is requested for all programs, and the bytes of XLA's temporaries."""
        asked = []
        monkeypatch.setattr(executable, "LazyExecutable", lambda lowered, options: asked.append(options) or piece(lowered, options))
        monkeypatch.setattr(cache, "LazyExecutable", lambda lowered, options: asked.append(options) or piece(lowered, options))
        monkeypatch.setattr(cache, "_programs", {})
        params = random_params(shapes=[(60_000 + i,) for i in range(count)])
        optimizer = optimizer_class(params, lr=1e-3, **arguments)
        stepped(optimizer, params)
        assert asked
        needed = (launch.executable.update.memory_analysis().temp_size_in_bytes for launch in optimizer._launch_cache.last_used)
        return all(order.items() <= options.items() for options in asked), sum(needed)

    assert order
    for found in (compiled(torch_api.MaskedAdamW, count), compiled(torch_api.MaskedRAdam, count, max_grad_norm=1.0)):
        assert found[0] is not probes.fuses_multiple_outputs()  # if XLA stores an array per loop, the schedule of least memory is kept
        assert found[1] < 4 * one
    assert compiled(torch_api.MaskedAdamW, count - 2)[0]
    in_order, needed = compiled(torch_api.MaskedLamb, count)
    assert in_order
    with monkeypatch.context() as patch:
        change_policy(patch, "THREADING", long_loop_elements=50_000)
        assert compiled(torch_api.MaskedAdamW, count)[0]
    with monkeypatch.context() as patch:
        patch.setattr(executable, "fuses_multiple_outputs", lambda: False)
        assert compiled(torch_api.MaskedAdamW, count)[0]
    change_policy(monkeypatch, "THREADING", max_unordered_elements=float("inf"))
    monkeypatch.setattr(executable, "fuses_multiple_outputs", lambda: True)
    in_xlas, more = compiled(torch_api.MaskedLamb, count)  # the check can fail
    assert not in_xlas
    assert more > 2 * needed


def test_update_options_are_known_to_jaxlib_and_not_set_by_the_user(monkeypatch):
    cpu, gpu = (types.SimpleNamespace(platform=platform) for platform in ("cpu", "cuda"))
    (newer, least), (older, off), (width, bits) = *compile_options._SCHEDULER_OPTIONS, compile_options._VECTOR_WIDTH
    assert compile_options.update_options(gpu) == {}
    for known, expected in (
        ({newer, older, width}, {newer: least, width: bits}),
        ({older, width}, {older: off, width: bits}),
        ({newer}, {newer: least}),
        (set(), {}),
    ):
        monkeypatch.setattr(compile_options, "_is_supported", lambda option, value, known=known: option in known)
        assert compile_options.update_options(cpu) == expected
    monkeypatch.setattr(compile_options, "_is_supported", lambda option, value: True)
    for option in (newer, older):
        monkeypatch.setenv("XLA_FLAGS", f"--{option}={least}")
        assert compile_options.update_options(cpu) == {width: bits}
    monkeypatch.setenv("XLA_FLAGS", f"--{width}=128")
    assert compile_options.update_options(cpu) == {newer: least}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not CPU_INFO.exists() or "avx512f" not in CPU_INFO.read_text(), reason="needs a CPU with vectors of 512 bits")
@pytest.mark.parametrize(("before", "widest"), [("", 16), ("executable.of_update = lambda device: {}", 8)], ids=["ours", "XLA's"])
def test_updates_use_the_widest_vectors(tmp_path, before, widest):
    """Read LLVM's code for the loop; XLA's own choice shows that the check can fail."""
    code = f"""if True:
        import torch, torch_api
        from bridge._runtime import executable
        {before}
        p = torch.nn.Parameter(torch.zeros(100_000))
        p.grad = torch.ones_like(p)
        torch_api.MaskedAdamW([p], lr=0.1).step()
    """
    environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path}"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment)
    written = [path.read_text() for path in tmp_path.glob("*ir-with-opt.ll")]
    assert max(int(n) for text in written for n in re.findall(r"store <(\d+) x float>", text)) == widest
