"""Every section of the benchmark runs and writes its results. No test asserts a time."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))

# Sections that take minutes: `make test-bench` runs them, `make test` does not.
MINUTES = pytest.mark.skipif("MASKBRIDGE_BENCH" not in os.environ, reason="make test-bench runs it")


def run(name, *arguments):
    """Run a script with jax's own promotion, as users do, but without LLVM's optimizations; return what it prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUMPY_DTYPE_PROMOTION": "standard", "XLA_FLAGS": flags}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measured(path, *sections, also=()):
    printed = run("step", "--quick", "--rounds", 2, "--json", path, *also, "--sections", *sections)
    found = json.loads(path.read_text())
    assert list(found) == list(sections)
    for section in found.values():
        about = section["environment"]
        assert about["quick"]
        assert {"python", "torch", "jax", "optax"} <= about["versions"].keys()
        assert str(ROOT) not in json.dumps(section)
    return found, printed


def check_rows(rows, expected):
    assert expected <= rows.keys()
    for row in rows.values():
        assert row["median ms"] > 0
        low, high = row["ratio quartiles"]
        assert 0 < low <= row["ratio"] <= high


SIDES = {"maskbridge", "torch fused"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Measure once the sections that need few programs and no other process."""
    path = tmp_path_factory.mktemp("results") / "cpu-test.json"
    return path, *measured(path, "subsets", "growth", "dlpack", "functions")


def test_growth_section_has_all_curves(results):
    growth = results[1]["growth"]
    for key in ("by leaves", "by size"):
        assert len(growth[key]) == 2
        for point in growth[key]:
            check_rows(point["rows"], SIDES | {"torch foreach", "optax in pure JAX"})
    assert growth["copy bytes per second"] > 0


def test_subsets_count_programs(results):
    subsets = results[1]["subsets"]
    assert subsets["steps"] == 5
    assert subsets["programs compiled"] >= subsets["programs compiled in the second half"] >= 0
    assert subsets["median ms"].keys() == SIDES


def test_each_conversion_has_its_microseconds(results):
    assert all(value > 0 for value in results[1]["dlpack"]["microseconds per call"].values())


def test_each_kind_of_function_call_has_its_microseconds(results):
    calls = results[1]["functions"]["microseconds per call"]
    assert {"program alone", "jax_function", "jax_function, no_grad", "jax_function, recording"} <= calls.keys()
    assert all(value > 0 for value in calls.values())


def test_quick_runs_print_that_their_figures_mean_nothing(results):
    assert results[2].count("these figures mean nothing") == 4


def test_section_is_written_without_changing_others(results, tmp_path):
    path = tmp_path / "again.json"
    path.write_text(json.dumps({"large": {"kept": True}}))
    run("step", "--quick", "--rounds", 2, "--json", path, "--sections", "dlpack")
    assert json.loads(path.read_text())["large"] == {"kept": True}
    assert "dlpack" in json.loads(path.read_text())


PAGES = ["docs/performance/figures.md", "docs/performance/index.md", "benchmarks/README.md"]


@pytest.fixture
def pages(tmp_path):
    """Copies of the pages that the report writes, below a root of their own."""
    copies = {name: tmp_path / "root" / name for name in PAGES}
    for name, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / name).read_text())
    return tmp_path / "root", copies


def test_report_is_written_between_the_markers_only(results, pages):
    root, copies = pages
    before = {name: (ROOT / name).read_text().split("<!-- figures")[0] for name in copies}
    run("report", "--results", results[0].parent, "--root", root)
    once = {name: copy.read_text() for name, copy in copies.items()}
    run("report", "--results", results[0].parent, "--root", root)
    assert {name: copy.read_text() for name, copy in copies.items()} == once
    assert all(text.startswith(before[name]) for name, text in once.items())
    figures, overview, goals = once.values()
    assert "### Growth" in figures
    assert "| torch fused |" in figures
    assert "None yet" in overview
    assert "| jax_function, recording" in goals


def test_figures_of_the_pages_are_those_of_the_results(pages):
    root, copies = pages
    run("report", "--root", root)
    assert {name: copy.read_text() for name, copy in copies.items()} == {name: (ROOT / name).read_text() for name in copies}


def overview_rows():
    """Return the rows of the table of the overview, as text."""
    table = (ROOT / "docs/performance/index.md").read_text().split("<!-- figures")[1].split("<!-- end")[0]
    return [line for line in table.splitlines() if line.startswith("| ")][2:]  # behind the header and its rule


def test_readme_has_the_rows_of_the_overview():
    readme = (ROOT / "README.md").read_text().splitlines()
    assert len(overview_rows()) == 8
    assert [line for line in overview_rows() if line not in readme] == []


def test_picture_of_the_overview_shows_the_times_of_its_table():
    picture = (ROOT / "docs/images/step_times.svg").read_text()
    for line in overview_rows():
        title, *times, _ = [cell.strip() for cell in line.split("|")[1:-1]]
        assert f">{title}<" in picture
        assert all(f">{time}<" in picture for time in times if time != "-"), title


def test_page_about_torchax_is_that_of_its_results(tmp_path):
    run("against_torchax", "--report", "--page", tmp_path / "torchax.md")
    assert (tmp_path / "torchax.md").read_text() == (FOLDER.parent / "docs" / "torchax.md").read_text()


def test_growth_is_drawn(results, tmp_path):
    pytest.importorskip("matplotlib")
    run("plots", "--results", results[0].parent, "--images", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cpu-test-growth.png"]
    assert (tmp_path / "cpu-test-growth.png").read_bytes().startswith(b"\x89PNG")


def test_overview_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run("plots", "--images", tmp_path)
    assert (tmp_path / "step_times.svg").read_text().startswith("<?xml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_run_without_a_gpu_measures_nothing_and_says_so(tmp_path):
    assert "Nothing measured: torch sees no CUDA device" in run("step", "--device", "cuda", "--json", tmp_path / "none.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bound_measures_only_our_candidates_and_torchs(tmp_path):
    path = tmp_path / "bound.json"
    found, printed = measured(path, "large", also=["--bound"])
    (table,) = found["large"]["tables"]
    assert table["rows"].keys() == {"torch fused", "maskbridge", "maskbridge, copying"}
    assert "bytes" not in found["large"]
    assert "--bound" in printed
    assert "| large, GPT-2 small: maskbridge | 1.000 |" in run("bound", "--before", path, "--after", path)


def test_bound_has_a_baseline_for_each_unfused_optimizer(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    candidates, common = importlib.import_module("candidates"), importlib.import_module("common")
    found = {name: common.of_bound(*candidates.unfused(name, bound=True)[:2]) for name in ("Adamax", "Lion", "LAMB")}
    assert {name: baseline for name, (_, baseline) in found.items()} == {
        "Adamax": "torch default",
        "Lion": "torch fused, as many bytes",
        "LAMB": "torch fused, AdamW",
    }
    assert {name: list(makers) for name, (makers, _) in found.items()} == {
        "Adamax": ["torch default", "maskbridge"],
        "Lion": ["torch fused, as many bytes", "maskbridge"],
        "LAMB": ["torch fused, AdamW", "maskbridge"],
    }


def written_ratios(path, **ratios):
    """Write a results file with one section whose rows have these ratios to torch."""
    rows = {"torch fused": {"ratio": 1.0, "median ms": 1.0}} | {f"maskbridge, {name}": {"ratio": x} for name, x in ratios.items()}
    path.write_text(json.dumps({"small": {"tables": [{"title": "tiny", "rows": rows}]}}))
    return path


@pytest.mark.parametrize(
    ("after", "again", "word", "status"),
    [
        ([1.0, 1.01, 1.02], [1.0, 1.0, 1.0], "", 0),
        ([1.05, 1.06, 1.07], [1.0, 1.0, 1.0], "slower", 0),
        ([1.05, 1.06, 1.07], [0.9, 1.0, 1.2], "", 0),  # the same spread as without a change
        ([0.98, 1.06, 1.07, 0.97, 1.07], [1.0] * 5, "", 0),  # the lower quartile is below 1
        ([1.09, 1.1, 1.11], [1.0, 1.0, 1.0], "too slow", 1),
    ],
)
def test_verdict_of_the_bound(tmp_path, after, again, word, status):
    files = {
        name: [written_ratios(tmp_path / f"{name}{i}.json", a=0.5 * x, b=0.5, c=0.5, d=0.5) for i, x in enumerate(values)]
        for name, values in {"before": [1.0] * len(after), "after": after, "again": again}.items()
    }
    command = [str(each) for name, paths in files.items() for each in (f"--{name}", *paths)]
    done = subprocess.run([sys.executable, str(FOLDER / "bound.py"), *command], capture_output=True, text=True, check=False)
    (row,) = [line for line in done.stdout.splitlines() if "small, tiny: maskbridge, a |" in line]
    assert row.split("|")[-2].strip() == word
    assert (done.returncode, "The bound is met." in done.stdout) == (status, status == 0), done.stderr


def test_bound_applies_to_the_mean_of_a_section(tmp_path):
    before = written_ratios(tmp_path / "before.json", a=0.5, b=0.5)
    after = written_ratios(tmp_path / "after.json", a=0.53, b=0.51)
    command = [sys.executable, str(FOLDER / "bound.py"), "--before", str(before), "--after", str(after)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Above the bound: small: the geometric mean 1.040 is above 1.03" in done.stdout


# ------------------------------------------------------------------ the rest


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Measure the sections with tables of one step in one process, so that they share programs."""
    return measured(tmp_path_factory.mktemp("tables") / "tables.json", "large", "small", "middle", "tail", "loop", "unfused", "types")


@pytest.mark.nightly
@pytest.mark.slow
def test_tables_have_all_candidates(tables):
    found, printed = tables
    everyone = SIDES | {"torch default", "torch foreach", "optax in pure JAX", "maskbridge, copying"}
    for table in (*found["large"]["tables"], *found["small"]["tables"]):
        check_rows(table["rows"], everyone)
        for name, package in {"TorchOpt": "torchopt", "pytorch_optimizer StableAdamW": "pytorch_optimizer"}.items():
            assert (name in table["rows"]) == (importlib.util.find_spec(package) is not None)
            assert (name in table["rows"]) != (name in table["missing"])
        assert table["missing"].keys() >= {"HeavyBall", "torch compiled"}
    counted = {row["optimizer"]: row for row in found["large"]["bytes"]}
    assert {"Adam", "AdamW", "NAdam", "SGD, momentum", "RMSprop", "Lion", "AdamW, clip"} <= counted.keys()
    assert [counted[name]["fewest"] for name in ("AdamW", "Lion", "AdamW, clip")] == [28, 20, 32]
    assert "Not measured: " in printed


@pytest.mark.nightly
@pytest.mark.slow
def test_tails_and_loops_have_all_rows(tables):
    found, _ = tables
    for table in (*found["tail"]["tables"], *found["loop"]["tables"]):
        check_rows(table["rows"], {"maskbridge", table["baseline"]})
    assert len(found["tail"]["tables"]) == 5
    assert len(found["loop"]["tables"]) == 2
    for table in found["loop"]["tables"]:
        assert table["apart"].keys() == {"maskbridge", "torch fused"}
        assert all(min(runs["median ms"]) > 0 for runs in table["apart"].values())


@pytest.mark.slow
@MINUTES
def test_pipelines_have_all_rows(tmp_path):
    found, printed = measured(tmp_path / "pipelines.json", "pipelines", also=["--compiled"])
    for table in found["pipelines"]["tables"]:
        check_rows(table["rows"], {"maskbridge", "maskbridge, eager backward", "torch fused", "torch compiled"})
        assert table["missing"] == {}
    assert "digits job" in printed
    assert "character model" in printed


@pytest.mark.nightly
@pytest.mark.slow
def test_unfused_tables_have_a_fused_baseline_where_possible(tables):
    found, printed = tables
    names = [table["title"].split(",")[0] for table in found["unfused"]["tables"]]
    assert names == ["NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax", "Lion", "LAMB", "Adafactor", "Muon"]
    for table in found["unfused"]["tables"]:
        assert table["rows"]["maskbridge"]["median ms"] > 0
        assert "ratio" in table["rows"]["maskbridge"] or table["missing"]
    fused = [name for name, table in zip(names, found["unfused"]["tables"], strict=True) if "torch fused, as many bytes" in table["rows"]]
    assert fused == ["NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax", "Lion"]
    assert "| Muon |" in printed


@pytest.mark.nightly
@pytest.mark.slow
def test_tables_of_other_dtypes_have_all_rows(tables):
    found, _ = tables
    for table in found["types"]["tables"]:
        check_rows(table["rows"], SIDES | {"torch default"})
    rows = {name for table in found["types"]["tables"] for name in table["rows"]}
    assert {"maskbridge, state in bfloat16", "maskbridge, master weights"} <= rows


@pytest.mark.slow
@MINUTES
def test_fresh_processes_have_all_rows(tmp_path):
    found, _ = measured(tmp_path / "fresh.json", "first", "memory")
    for starts in found["first"]["sets"]:
        assert {*SIDES, "maskbridge, second start"} <= starts["starts"].keys()
    memory = found["memory"]
    rows = memory["peak"]["rows"]
    assert rows["maskbridge"]["state bytes"] == rows["torch fused"]["state bytes"]
    assert list(memory["endurance"]["rows"]["maskbridge"]["resident MiB after steps"]) == ["10", "20", "30", "40"]
    left = memory["leftovers"]["rows"]["maskbridge"]
    assert left["before"]["jax arrays"] == left["parameters deleted"]["jax arrays"] == 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno - (ast.get_docstring(node, clean=False) or "").count("\n") <= 60, node.name
