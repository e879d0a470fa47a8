"""Second starts: a compiled update is found by what it was written from, without a trace, and is the same to the bit."""

import functools
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch

from bridge import executables, flags, programs, rules, step
from bridge.dlpack import x64
from torch_api import MaskedAdam, MaskedAdamW, OptaxOptimizer

ROOT = Path(__file__).parent.parent
KEPT = "maskbridge_update-*"
PARAMS = {"huge": (1100, 1000), "large": (300, 512), "vector": (7,)} | dict.fromkeys(("one", "two", "three", "four"), (64, 16))

# Optimizers of this package's own equations, each with what its numbers are told by; then one of the user's, which is never kept.
WORKER = """
import hashlib, json, sys
import jax, optax, torch
import torch_api
from bridge import step

SHAPES = json.loads(sys.argv[1])


def digest(make):
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]
    opt, before = make(params), step.traces()
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    tensors = [*params, *(x for p in params for _, x in sorted(opt.state[p].items()))]
    found = hashlib.sha256(b"".join(x.detach().contiguous().numpy().tobytes() for x in tensors)).hexdigest()
    inline = [launch.program.alone is not launch.program.update for launch in opt._launches.latest]
    return found, step.traces() - before, opt.cache_info().compilations, inline


made = {
    "AdamW": lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2),
    "norm": lambda ps: torch_api.MaskedAdamW(ps, lr=1e-2, max_grad_norm=1.0, amsgrad=True),
    "Muon": lambda ps: torch_api.MaskedMuon([p for p in ps if p.shape == (64, 16)], lr=1e-2),
    "user": lambda ps: torch_api.OptaxOptimizer(ps, tx=optax.adamw(1e-2)),
}
print(json.dumps({name: digest(make) for name, make in made.items()}))
"""


def started(folder=None, **environment):
    """What a fresh process finds, by optimizer: the digest of its numbers, how many updates it traced, how many programs it has, and which
    of them may be run by the thread that calls them."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-W", "error", "-c", WORKER, json.dumps(PARAMS)]
    env = given | (kept if folder else {}) | {"JAX_NUMPY_DTYPE_PROMOTION": "standard"} | environment  # as optax needs it
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


OURS = ["AdamW", "norm", "Muon"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def plain():
    return started()


@pytest.fixture(scope="module")
def first(folder):
    return started(folder)


@pytest.fixture(scope="module")
def second(first, folder):
    return started(folder)


def test_a_second_start_traces_no_update_of_our_own_equations(first, second):
    assert all(first[name][1] > 0 for name in OURS)
    assert [second[name][1] for name in OURS] == [0] * len(OURS)


def test_numbers_are_those_of_a_start_without_cache_to_the_bit(plain, first, second):
    numbers = [{name: digest for name, (digest, *_) in found.items()} for found in (plain, first, second)]
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0].values())) == 4  # the digest tells one from another


def test_programs_that_are_found_count_as_others_do(plain, second):
    assert [second[name][2] for name in plain] == [plain[name][2] for name in plain]


def test_a_users_own_transformation_is_traced_at_every_start(plain, second):
    assert second["user"][1] == plain["user"][1] > 0


def test_nothing_is_kept_without_jaxs_cache_or_below_its_least_time(plain, tmp_path):
    found = started(tmp_path, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="1000")
    assert [name for name in found if found[name][1] == 0] == []
    assert not list(tmp_path.glob(KEPT))
    assert all(plain[name][1] > 0 for name in plain)


@contextmanager
def changed(folder, change):
    """A cache whose entries of ours are changed, by one function for each, or gone: jax finds its own where they were alone."""
    before = {file: file.read_bytes() for file in sorted(folder.glob(KEPT)) if file.name.endswith("-cache")}
    assert len(before) == len(OURS)
    for file, function in zip(before, change, strict=True):
        content = function(before[file])
        file.unlink() if content is None else file.write_bytes(content)
    yield
    for file, content in before.items():
        file.write_bytes(content)


def test_what_jax_has_read_from_its_cache_is_not_written_again(first, folder):
    """jaxlib 0.10.2 leaves functions out of such a program, and the step that found it failed: NOT_FOUND."""
    kept = lambda: {file for file in folder.glob("*") if "gradients_read" not in file.name}  # noqa: E731 - of jaxlib 0.6.0, at each start
    files = kept()
    with changed(folder, [lambda _: None] * len(OURS)):
        found = started(folder)
        assert not list(folder.glob(KEPT))
    assert {name: digest for name, (digest, *_) in found.items()} == {name: digest for name, (digest, *_) in first.items()}
    assert all(found[name][1] > 0 for name in OURS)
    assert kept() == files  # jax had them all


def test_the_calling_thread_runs_what_was_found_here_and_not_what_jax_has_found(plain, second):
    """Of what jax has read from its cache jaxlib 0.10.2 writes a program without some functions: see above."""
    if not plain["user"][3][0]:
        pytest.skip("this jaxlib's client takes no functions with a program that it reads")
    assert all(all(inline) for *_, inline in plain.values())
    assert all(all(second[name][3]) for name in ("AdamW", "Muon"))
    assert second["user"][3] == [False]


def test_what_is_damaged_is_made_anew(first, folder):
    with changed(folder, [lambda data: data[:1000], lambda data: data[:-9] + b"123456789", lambda _: b""]):
        found = started(folder)
    assert {name: digest for name, (digest, *_) in found.items()} == {name: digest for name, (digest, *_) in first.items()}
    assert all(found[name][1] > 0 for name in OURS)


# ------------------------------------------------------------------ what a program is known by


class Folder(dict):
    """jax's cache in this process, which may be without one."""

    put = dict.__setitem__


@pytest.fixture
def cache(monkeypatch):
    kept = Folder()
    monkeypatch.setattr(executables, "_cache", lambda client: kept)
    monkeypatch.setattr(executables, "_SWITCHES", ())
    return kept


def plan_of(make=MaskedAdamW, shape=(40, 3), **options):
    param = torch.nn.Parameter(torch.ones(shape))
    param.grad = torch.ones(shape)
    opt = make([param], **options)
    opt.step()
    (program,) = opt._cache._programs
    return program.plan


def key(plan):
    found = executables.Entry(plan)
    return found._key if found._cache is not None else None


def test_a_key_is_that_of_the_plan(cache):
    known = {
        "AdamW": key(plan_of()),
        "another shape": key(plan_of(shape=(40, 4))),
        "another option": key(plan_of(amsgrad=True)),
        "another equation": key(plan_of(MaskedAdam)),
        "with a norm": key(plan_of(max_grad_norm=1.0)),
        "another type": key(plan_of(state_dtype=torch.bfloat16)),
    }
    assert None not in known.values()
    assert len(set(known.values())) == len(known)
    assert key(plan_of(lr=0.5)) == known["AdamW"]  # a number of each step


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(executables, "_source", lambda: "another"),
        lambda patch: patch.setattr(executables, "_machine", lambda: ["another"]),
        lambda patch: patch.setattr(executables, "_options", lambda: "another"),
        lambda patch: patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true"),
        lambda patch: patch.setenv("MASKBRIDGE_XLA_FLAGS", "0"),
    ],
    ids=["source", "machine", "XLA's options", "XLA_FLAGS", "our flag"],
)
def test_a_key_is_that_of_what_surrounds_it(change, cache, monkeypatch):
    plan = plan_of()
    before = key(plan)
    assert key(plan) == before
    with monkeypatch.context() as patch:
        change(patch)
        assert key(plan) not in (before, None)
    assert key(plan) == before


def test_a_key_is_that_of_jaxs_settings_but_not_of_its_messages(cache):
    plan = plan_of()
    before, logs = key(plan), jax.config.jax_log_compiles
    with jax.default_matmul_precision("highest"):
        assert key(plan) not in (before, None)
    jax.config.update("jax_log_compiles", not logs)
    try:
        assert key(plan) == before
    finally:
        jax.config.update("jax_log_compiles", logs)


@pytest.mark.parametrize("change", ["rewritten", "gone", "none"])
def test_every_file_of_the_package_is_its_source(monkeypatch, tmp_path, change):
    files = [tmp_path / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text("x = 1\n")
    monkeypatch.setattr(executables, "__file__", str(tmp_path / "executables.py"))
    hashed, found = executables._source.__wrapped__, []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        files[1].write_text(text)
        monkeypatch.setattr(executables, "_imported", executables._files())
        found.append(hashed())
    assert found[0] == found[2] != found[1]
    assert None not in found
    if change == "rewritten":  # since the import: what was imported is not there any more
        files[0].write_text("x = 10\n")
    elif change == "gone":
        files[0].rename(tmp_path / "c.py")
        monkeypatch.setattr(executables, "_imported", {files[1]: executables._imported[files[1]]})
    else:
        monkeypatch.setattr(executables, "_imported", {})
    assert hashed() is None


def test_an_option_of_xla_is_read_from_where_xla_reads_it(tmp_path):
    """A file that XLA_FLAGS names, and what was set before jax began: the environment does not tell."""
    code = "import os, jax; from bridge import executables; {}; print(executables._options())"
    flags, options = tmp_path / "flags", []
    meanwhile = "jax.devices(); os.environ['XLA_FLAGS'] = '--xla_cpu_enable_fast_math=false'"
    for value, later in (("false", "pass"), ("true", "pass"), ("true", meanwhile)):
        flags.write_text(f"--xla_cpu_enable_fast_math={value}\n")
        command = [sys.executable, "-c", code.format(later)]
        env = os.environ | {"XLA_FLAGS": str(flags), "PYTHONPATH": str(ROOT)}
        options.append(subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout.split()[-1])
    assert options[0] != options[1] == options[2]


def test_functions_that_somebody_replaced_are_no_source(cache, monkeypatch):
    plan = plan_of()
    assert key(plan) is not None
    with monkeypatch.context() as patch:
        patch.setattr(rules, "lerp", lambda a, b, w: a)
        assert key(plan) is None
    assert key(plan) is not None


@functools.wraps(rules.adam)
def _wrapped(*args, **options):
    return rules.adam(*args, **options)


def _without_module():
    space = {"adam": rules.adam}
    exec("def mine(lr=1e-3): return adam(lr)", space)
    return space["mine"]


@pytest.mark.parametrize("factory", [_wrapped, _without_module()], ids=["wraps", "no module"])
def test_a_rule_of_a_user_is_not_taken_for_ours(factory, cache):
    plan = plan_of(lambda ps: OptaxOptimizer(ps, tx=rules.Rule(factory)))
    assert key(plan) is None


def test_what_cannot_be_told_is_not_kept(cache, monkeypatch):
    plan = plan_of()

    def gone():
        raise ImportError("no such name")

    monkeypatch.setattr(executables, "_options", gone)
    assert key(plan) is None


@pytest.mark.parametrize(
    "x",
    [
        lambda: 1,
        optax.adamw,
        functools.partial(optax.adamw, 1e-3),
        functools.partial(rules.adam, optax.adam),
        optax.adam(1e-3),
        object(),
        np.ones(3),
        {"name": [object]},
        (1, (2, lambda x: x)),
        jax.tree.structure({"value": 1}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_plain_or_ours_has_no_text(x):
    assert executables.text(x) is None
    assert executables.text((1, x)) is None


def test_texts_tell_values_apart():
    values = [
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        (1,),
        ((1,),),
        (1, 1),
        {"a": 1},
        {"b": 1},
        frozenset({1}),
        -0.0,
        0.0,
        rules.adam,
        rules.rmsprop,
    ]
    values += [
        functools.partial(rules.adam, 1),
        functools.partial(rules.adam, 2),
        functools.partial(rules.adam, lr=1),
        ("a", "b"),
        ("a b",),
    ]
    found = list(map(executables.text, values))
    assert None not in found
    assert len(set(found)) == len(values)
    assert executables.text(frozenset({"b", "a", "c"})) == executables.text(frozenset({"c", "b", "a"}))


@pytest.mark.usefixtures("standard_promotion")
def test_no_entry_for_code_of_a_user_or_where_jax_keeps_nothing(cache, monkeypatch):
    assert key(plan_of(lambda ps: OptaxOptimizer(ps, tx=optax.adam(1e-3)))) is None
    plan = plan_of()
    assert key(plan) is not None
    monkeypatch.setattr(executables, "_SWITCHES", ("jax_compilation_cache_dir", "a setting that is gone"))
    assert key(plan) is None
    monkeypatch.setattr(executables, "_SWITCHES", ())
    monkeypatch.setattr(executables, "_source", lambda: None)
    assert key(plan) is None


def test_no_entry_where_jax_has_the_private_name_no_longer(monkeypatch):
    from jax._src import compilation_cache

    monkeypatch.setattr(executables, "_SWITCHES", ())
    monkeypatch.delattr(compilation_cache, "_get_cache")
    assert key(plan_of()) is None


def test_a_cache_that_fails_costs_a_trace_alone(cache, monkeypatch):
    plan = plan_of(shape=(11, 5))
    monkeypatch.setattr(programs, "_programs", {})

    def full(self, name, content):
        raise OSError("No space left on device")

    monkeypatch.setattr(Folder, "put", full)
    monkeypatch.setattr(Folder, "get", full)
    monkeypatch.setattr(executables, "written", iter(range(100)).__next__)  # as if jax had written each
    traced = step.traces()
    (program,) = step.programs([plan])
    assert program.update is not None
    assert step.traces() == traced + 1


def test_what_is_kept_is_found_in_this_process_too(cache, monkeypatch):
    plan = plan_of(shape=(13, 5))
    monkeypatch.setattr(programs, "_programs", {})
    monkeypatch.setattr(executables, "written", iter(range(100)).__next__)
    (made,) = step.programs([plan])
    assert len(cache) == 1
    monkeypatch.setattr(programs, "_programs", {})
    traced = step.traces()
    (found,) = step.programs([plan])
    assert step.traces() == traced
    assert found is not made
    assert found.bytes_accessed == made.bytes_accessed > 0
    assert found.measure is made.measure is None


def test_the_source_is_not_read_where_nothing_is_kept(monkeypatch):
    def unreadable():
        raise OSError("not a directory")

    monkeypatch.setattr(executables, "_SWITCHES", ("a setting that is gone",))
    monkeypatch.setattr(executables, "_source", unreadable)
    plan_of(shape=(19, 5))


def test_what_jax_has_not_written_is_not_kept(cache, monkeypatch):
    plan = plan_of(shape=(17, 5))
    monkeypatch.setattr(programs, "_programs", {})
    step.programs([plan])  # this process has no cache of jax's
    assert not cache


def test_what_an_option_is_asked_of_is_one_program_in_every_thread():
    found = set()
    for types in (nullcontext(), x64()):
        flags._nothing.cache_clear()
        with types:
            found.add(flags._nothing().as_text())
    assert len(found) == 1
    with x64():
        assert jax.jit(lambda x: x).lower(0.0).as_text() not in found  # as it was: with the types of who asked first
