"""The doctor: each problem is simulated by facts, or by a real process with such an environment."""

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bridge
from bridge._xla.multi_output_fusion import FUSION_FLAG
from bridge.doctor import diagnose
from bridge.environment import Environment, read_environment

pytestmark = pytest.mark.unoptimized

ROOT = Path(__file__).parents[2]
VERSIONS = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "torch": "2.13.0+cu126",
    "optax": "0.2.8",
    "numpy": "2.4.6",
    "ml-dtypes": "0.6.0",
    "torch2jax": "0.1.0",
    "packaging": "26.4",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {re.match(r"[\w-]+", text)[0].replace("_", "-"): re.sub(r"^[\w-]+", "", text) for text in PROJECT["dependencies"]}
ASKED = {"XLA_FLAGS": f"--xla_backend_extra_options={FUSION_FLAG}", "OMP_WAIT_POLICY": "passive"}
# A machine without problems before jax has started, and one with GPUs on both sides while jax runs.
HEALTHY = Environment(ASKED, VERSIONS, REQUIREMENTS, "3.12.1", cores=8, torch_threads=8, cache_dir="/tmp", start_method="forkserver")
QUIET = ASKED | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
ON_GPU = dataclasses.replace(
    HEALTHY, env=QUIET, torch_cuda="12.6", torch_gpus=2, plugins=("jax-cuda12-plugin",), jax_devices=(("gpu", 2),), fuses_outputs=True,
    has_fast_import=True, has_fast_export=True,
)  # fmt: skip
RANK = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def changed(facts=HEALTHY, env=None, without=(), **values):
    new = {name: value for name, value in (facts.env if env is None else facts.env | env).items() if name not in without}
    return dataclasses.replace(facts, env=new, **values)


PROBLEMS = {
    "jax too old": (
        changed(versions=VERSIONS | {"jax": "0.7.2", "jaxlib": "0.7.2"}),
        "versions",
        "error",
        r"'jax>=0.8,<0.13'",
        r"pip install 'jax>=0.8",
    ),
    "torch of the next major": (changed(versions=VERSIONS | {"torch": "3.0.0"}), "versions", "error", "'torch>=2.8,<3'", "pip install"),
    "optax is missing": (changed(versions=VERSIONS | {"optax": None}), "versions", "error", "'optax>=0.2.5,<0.3'", "pip install"),
    "torch2jax is missing": (changed(versions=VERSIONS | {"torch2jax": None}), "versions", "warning", "module_function", "pip install"),
    "jax of the next minor": (
        changed(versions=VERSIONS | {"jax": "0.13.0.dev20261130", "jaxlib": "0.13.0"}),
        "versions",
        "error",
        r"'jaxlib>=0.8,<0.13'",
        "pip install",
    ),
    "not installed": (changed(requirements={}), "versions", "note", "runs from a folder", "pip install -e"),
    "jaxlib ahead": (changed(versions=VERSIONS | {"jaxlib": "0.11.0"}), "versions", "error", "newer than jax 0.10.2", "jax==0.11.0"),
    "no GPU for jax": (
        changed(ON_GPU, plugins=(), jax_devices=(("cpu", 1),)),
        "devices",
        "error",
        "cannot be updated",
        r"maskbridge\[cuda12\]",
    ),
    "CUDA 13 of jax": (
        changed(ON_GPU, plugins=("jax-cuda13-plugin",)),
        "CUDA",
        "warning",
        "torch is built for CUDA 12.6, jax has jax-cuda13-plugin: libraries of two versions",
        r"^pip uninstall jax-cuda13-plugin jax-cuda13-pjrt, and then pip install 'maskbridge\[cuda12\]'$",
    ),
    "CUDA 12 of jax": (
        changed(ON_GPU, torch_cuda="13.2"),
        "CUDA",
        "warning",
        "torch is built for CUDA 13.2, jax has jax-cuda12-plugin: ",
        r"^pip uninstall jax-cuda12-plugin jax-cuda12-pjrt, and then pip install 'maskbridge\[cuda13\]'$",
    ),
    "both of jax": (
        changed(ON_GPU, plugins=("jax-cuda12-plugin", "jax-cuda13-plugin")),
        "CUDA",
        "warning",
        "jax has jax-cuda12-plugin and jax-cuda13-plugin: ",
        r"uninstall jax-cuda13-plugin jax-cuda13-pjrt, .*\[cuda12\]",
    ),
    "CUDA 11 of torch": (
        changed(ON_GPU, torch_cuda="11.8"),
        "CUDA",
        "warning",
        "for CUDA 11.8",
        r"torch built for CUDA 12 or 13, .*cuda13",
    ),
    "cuDNN of torch came first": (
        changed(ON_GPU, jax_devices=(("cpu", 1),)),
        "devices",
        "error",
        "cannot be updated",
        "import jax before torch",
    ),
    "no plugin, not started": (changed(ON_GPU, plugins=(), jax_devices=None), "devices", "error", "no plugin", r"maskbridge\[cuda12\]"),
    "jax kept off": (changed(ON_GPU, env={"JAX_PLATFORMS": "cpu"}), "devices", "warning", "JAX_PLATFORMS=cpu keeps jax off", "unset"),
    "other numbers": (changed(ON_GPU, torch_gpus=1), "devices", "warning", "torch sees 1 GPUs, jax has 2 gpu", "CUDA_VISIBLE_DEVICES"),
    "no CPU for jax": (changed(ON_GPU, env={"JAX_PLATFORMS": "cuda"}), "devices", "note", "leaves out the CPU", "JAX_PLATFORMS=cuda,cpu"),
    "no GPU for torch": (changed(ON_GPU, torch_gpus=0, torch_cuda=None), "devices", "warning", "where no tensor is", "JAX_PLATFORMS=cpu"),
    "jax does not start": (
        changed(env={"JAX_PLATFORMS": "cuda"}, start_error="AssertionError"),
        "devices",
        "error",
        r"the CPU alone, jax does not start \(JAX_PLATFORMS=cuda\): AssertionError",
        r"^unset JAX_PLATFORMS, or pip install 'maskbridge\[cuda\]'",
    ),
    "jax does not start by itself": (
        changed(ON_GPU, jax_devices=None, start_error="no"),
        "devices",
        "error",
        "start: no",
        "JAX_PLATFORMS=cpu",
    ),
    "not started": (changed(ON_GPU, jax_devices=None), "devices", "note", "jax has not started", r"doctor\(start=True\)"),
    "a rank that sees all": (
        changed(ON_GPU, env=RANK),
        "visible devices",
        "warning",
        "each of 2 processes",
        r"JAX_CUDA_VISIBLE_DEVICES=\$LOCAL_RANK",
    ),
    "a rank that sees two": (
        changed(ON_GPU, env=RANK | {"CUDA_VISIBLE_DEVICES": "0,1"}),
        "visible devices",
        "warning",
        "LOCAL_RANK=1",
        "PREALLOCATE",
    ),
    "75% of the GPU": (changed(ON_GPU, without=["XLA_PYTHON_CLIENT_PREALLOCATE"]), "preallocation", "warning", "75%", "PREALLOCATE=false"),
    "x64": (changed(x64=True), "x64", "note", "makes float64", "not needed"),
    "another jaxlib": (
        changed(ON_GPU, without=["XLA_FLAGS"], fuses_outputs=False),
        "XLA flags",
        "warning",
        "jaxlib does not know",
        "0.8 to 0.12",
    ),
    "flag too late": (
        changed(ON_GPU, fuses_outputs=False, has_per_program_flag=False),
        "XLA flags",
        "warning",
        "jax started without it",
        "import bridge before",
    ),
    "jax came first": (
        changed(ON_GPU, without=["XLA_FLAGS"], fuses_outputs=False, has_per_program_flag=False),
        "XLA flags",
        "warning",
        "before bridge was imported",
        "first",
    ),
    "opted out": (
        changed(env={"MASKBRIDGE_XLA_FLAGS": "0"}, without=["XLA_FLAGS"]),
        "XLA flags",
        "note",
        "MASKBRIDGE_XLA_FLAGS=0",
        "unset",
    ),
    "own options": (
        changed(env={"XLA_FLAGS": "--xla_backend_extra_options=a"}, has_per_program_flag=False),
        "XLA flags",
        "note",
        "your own options",
        FUSION_FLAG,
    ),
    "alignment": (changed(misaligned_sizes=(3, 100)), "alignment", "warning", "tensors of 3, 100 floats", "copy=None"),
    "public import": (changed(ON_GPU, has_fast_import=False), "fast paths", "note", "^import by jax's public call", "private names"),
    "public both ways": (
        changed(ON_GPU, has_fast_import=False, has_fast_export=False),
        "fast paths",
        "note",
        "import and export by",
        "report",
    ),
    "one stream": (changed(has_streams=False), "execution streams", "note", "one after the other", "a jaxlib between"),
    "nobody counts holders": (changed(has_use_count=False), "write-back", "warning", "updated by a copy", "torch between"),
    "forked": (changed(forked=True), "processes", "error", "was forked after jax", "forkserver"),
    "fork": (changed(start_method="fork"), "processes", "note", "once jax has started", "multiprocessing_context"),
    "fork, and jax runs": (changed(ON_GPU, start_method="fork"), "processes", "note", "jax runs here", "forkserver"),
    "spinning threads": (changed(without=["OMP_WAIT_POLICY"]), "threads", "note", "spin", "GOMP_SPINCOUNT=10000"),
    "too many threads": (changed(torch_threads=16), "threads", "warning", "16 threads of torch on 8 cores", "set_num_threads"),
    "no such log": (
        changed(env={"MASKBRIDGE_LOGS": "plan,plam"}),
        "logs",
        "warning",
        "names 'plam', which is no log",
        "^MASKBRIDGE_LOGS=plan,jaxpr,hlo,recompiles,memory, or some of them$",
    ),
    "no cache": (changed(cache_dir=None), "compilation cache", "note", "compiles anew", "JAX_COMPILATION_CACHE_DIR"),
    "cache not writable": (
        changed(cache_dir="/c", cache_writable=False),
        "compilation cache",
        "warning",
        "/c cannot be written",
        "another folder",
    ),
}


@pytest.mark.parametrize("facts", [HEALTHY, ON_GPU], ids=["CPU", "GPU"])
def test_machine_without_problems_gets_no_findings(facts):
    report = diagnose(facts)
    assert report.exit_code == 0
    assert {row["level"] for row in report.rows} == {"ok"}
    assert not any(row["fix"] for row in report.rows)
    assert "nothing stands in the way: 0 errors, 0 warnings, 0 notes" in str(report)


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_is_found_alone_and_with_its_fix(name):
    facts, check, level, found, fix = PROBLEMS[name]
    report = diagnose(facts)
    rows = [row for row in report.rows if row["level"] != "ok"]
    assert [(row["check"], row["level"]) for row in rows] == [(check, level)]
    assert re.search(found, rows[0]["found"]), rows
    assert re.search(fix, rows[0]["fix"]), rows
    assert report.exit_code == (level == "error")
    assert rows[0]["found"] in str(report)
    assert f"-> {rows[0]['fix']}" in str(report)


def test_similar_but_correct_settings_give_no_findings():
    for facts in (
        changed(ON_GPU, env=RANK | {"CUDA_VISIBLE_DEVICES": "1"}, torch_gpus=1, jax_devices=(("gpu", 1),)),
        changed(ON_GPU, env=RANK | {"JAX_CUDA_VISIBLE_DEVICES": "1"}),
        changed(env=RANK),
        changed(ON_GPU, env={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}, without=["XLA_PYTHON_CLIENT_PREALLOCATE"]),
        changed(versions=VERSIONS | {"jax": "0.8.0", "jaxlib": "0.8.0", "torch": "2.8.0", "numpy": "2.0.0"}),
        changed(versions=VERSIONS | {"torch": "2.14.0a0+git123"}),
        changed(versions=VERSIONS | {"jax": "0.12.0", "jaxlib": "0.12.0", "torch": "2.15.0"}),
        changed(ON_GPU, torch_cuda="13.2", plugins=("jax-cuda13-plugin",)),
        changed(torch_cuda="12.6", plugins=("jax-cuda13-plugin",), env={"JAX_PLATFORMS": "cpu"}),
        changed(torch_cuda="13.2"),
        changed(env={"GOMP_SPINCOUNT": "0"}, without=["OMP_WAIT_POLICY"]),
        changed(env={"GOMP_SPINCOUNT": "10000"}, without=["OMP_WAIT_POLICY"]),
        changed(openmp_can_pause=True, without=["OMP_WAIT_POLICY"]),
        changed(env={"MASKBRIDGE_LOGS": "plan, hlo"}),
    ):
        assert {row["level"] for row in diagnose(facts).rows} == {"ok"}, facts


def test_logs_and_explain_are_named():
    (row,) = [row for row in diagnose(HEALTHY).rows if row["check"] == "logs"]
    assert "MASKBRIDGE_LOGS=plan,jaxpr,hlo,recompiles,memory logs what" in row["found"]
    assert "optimizer.explain() prints" in row["found"]
    (row,) = [row for row in diagnose(changed(env={"MASKBRIDGE_LOGS": "hlo"})).rows if row["check"] == "logs"]
    assert "MASKBRIDGE_LOGS=hlo is set" in row["found"]


@pytest.mark.parametrize("separator", ["-", "_"])
def test_version_bounds_are_read_from_the_metadata(monkeypatch, separator):
    extras = [f'{text}; extra == "{name}"' for name, texts in PROJECT["optional-dependencies"].items() for text in texts]
    listed = [text.replace("ml_dtypes", f"ml{separator}dtypes") for text in PROJECT["dependencies"]]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [*listed, *extras])
    facts = read_environment()
    assert {name: set(text.split(",")) for name, text in facts.requirements.items()} == {
        name: set(text.split(",")) for name, text in REQUIREMENTS.items()
    }
    assert facts.versions.keys() == REQUIREMENTS.keys()
    assert bridge.doctor().exit_code == 0


def test_folder_that_is_not_installed_has_no_bounds(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    report = bridge.doctor()
    assert report.rows[0] | {"found": ""} == {"check": "versions", "level": "note", "found": "", "fix": "pip install -e THAT_FOLDER"}
    assert report.exit_code == 0


PLUGINS = [("12.8", "jax-cuda13-plugin", "cuda12"), ("13.0", "jax-cuda12-plugin", "cuda13")]


@pytest.mark.parametrize(("torch_cuda", "plugin", "advice"), PLUGINS)
def test_plugin_of_jax_for_another_cuda_is_found_in_the_metadata(monkeypatch, torch_cuda, plugin, advice):
    installed = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.0" if name == plugin else installed(name))
    monkeypatch.setattr("torch.version.cuda", torch_cuda)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (row,) = [row for row in bridge.doctor().rows if row["check"] == "CUDA"]
    assert row["level"] == "warning"
    assert row["fix"].startswith(f"pip uninstall {plugin} ")
    assert row["fix"].endswith(f"pip install 'maskbridge[{advice}]'")
    assert advice in PROJECT["optional-dependencies"]


def test_this_process_has_no_problems():
    facts = read_environment()
    assert facts.has_use_count
    assert facts.misaligned_sizes == ()
    assert bridge.doctor().exit_code == 0


def run(code, **env):
    kept = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "MASKBRIDGE_XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    }
    command = [sys.executable, "-W", "error", *code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=kept | env, check=False)


def test_doctor_starts_and_changes_nothing():
    done = run(["-c", """
import os, jax, torch, bridge
from bridge._compat.jax import client_started
before = dict(os.environ), {name: value for name, value in jax.config.values.items()}
report = bridge.doctor()
assert not client_started() and not torch.cuda.is_initialized()
assert before == (dict(os.environ), {name: value for name, value in jax.config.values.items()})
assert "chosen when jax starts" in str(report) and "each update asks" in str(report)
report = bridge.doctor(start=True)
assert client_started()
rows = {row["check"]: row for row in report.rows}
assert rows["devices"]["found"].endswith("jax has 1 cpu"), rows["devices"]
"""])  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
def test_late_flag_is_detected_in_a_compiled_program():
    """Simulate a jaxlib without per-program requests by a hook that jax does not know."""
    late = "import jax; jax.local_devices(); {}; import bridge; from bridge._compat import jax as names"
    late += "; from bridge._xla import multi_output_fusion as fusion"
    late += "; bridge.environment.has_per_program_flag = fusion.has_per_program_flag = names.has_per_program_flag = lambda: False"
    late += "; print(bridge.doctor())"
    done = run(["-c", late.format("import os; os.environ['MASKBRIDGE_XLA_FLAGS'] = '1'")])
    assert "jax had started before bridge was imported" in done.stdout
    done = run(["-c", late.format(f"import os; os.environ['XLA_FLAGS'] = '--xla_backend_extra_options={FUSION_FLAG}'")])
    assert "jax started without it" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_process_is_detected():
    code = """
import os, warnings, jax, bridge
jax.local_devices()
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    os._exit(10 + bridge.doctor().exit_code)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bridge.doctor().exit_code)
"""
    assert run(["-c", code]).stdout.split() == ["11", "0"]


def test_command_prints_the_report_and_returns_its_exit_code(tmp_path):
    (tmp_path / "file").write_text("no folder")
    done = run(["-m", "bridge"], OMP_NUM_THREADS="1", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert done.returncode == 0, done.stderr
    assert "jax has 1 cpu" in done.stdout
    assert "1 threads of torch" in done.stdout
    assert "cache cannot be written to" in done.stdout
    assert "nothing stands in the way" in done.stdout


def test_failing_start_of_jax_is_reported_with_other_findings():
    done = run(["-m", "bridge", "--start"], JAX_PLATFORMS="nowhere")
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"error +devices +torch sees .*jax does not start \(JAX_PLATFORMS=nowhere\): .*nowhere", done.stdout), done.stdout
    assert "-> unset JAX_PLATFORMS" in done.stdout
    checks = {row["check"] for row in bridge.doctor().rows}
    assert all(re.search(f"^[a-z]+ +{check} ", done.stdout, re.MULTILINE) for check in checks), done.stdout


def test_error_without_text_is_named_by_its_type(monkeypatch):
    def fails():
        raise AssertionError

    monkeypatch.setattr("jax.local_devices", fails)
    report = bridge.doctor(start=True)
    (row,) = [row for row in report.rows if row["check"] == "devices"]
    assert (row["level"], report.exit_code) == ("error", 1)
    assert row["found"].endswith(": AssertionError")


@pytest.mark.slow
def test_exit_code_is_one_if_something_does_not_work(tmp_path):
    # The first package that importlib.metadata finds under this name, as if an older optax were installed.
    folder = tmp_path / "optax-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.1.0\n")
    done = run(["-m", "bridge"], PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"not in the supported range: 'optax[<>]\S+'", done.stdout)
    assert "something does not work: 1 error" in done.stdout
    assert run(["-m", "bridge", "--begin"]).returncode == 2
