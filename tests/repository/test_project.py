"""The project itself: import contracts, silent import, metadata."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PACKAGES = ("bridge", "maskbridge", "torch_api")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_imports_follow_the_layers():
    """The contracts are in `[tool.importlinter]` of pyproject.toml."""
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Private names of other packages. Only `bridge/_compat` may use them, so that a release that moves one breaks one file.
PRIVATE = re.compile(r"\b_src\b|\b(from|import) jaxlib\b|\bjaxlib\.\w|\bxla_client\b|\btorch\._C\b|\b__code__\b")
FOREIGN = ("torch", "jax", "jaxlib", "optax")


def without_prose(tree):
    """Return the code of a file without comments and docstrings."""
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [x for x in node.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))] or [ast.Pass()]
    return ast.unparse(tree)


def private_names(tree):
    """Yield private names that are imported from other packages or read from their modules."""
    plain = [a for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    roots = {a.asname or a.name.split(".")[0] for a in plain if a.name.split(".")[0] in FOREIGN}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in FOREIGN:
            roots |= {a.asname or a.name for a in node.names if a.name[0].islower()}
            yield from (f"{node.module}.{a.name}" for a in node.names if "._" in f"{node.module}.{a.name}")
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and isinstance(node.args[-1], ast.Constant):
            name = ".".join(
                str(getattr(x, "value", ast.unparse(x))) if isinstance(x, ast.Constant) else ast.unparse(x) for x in node.args[:2]
            )
        if re.fullmatch(r"[\w.]+\._[a-zA-Z]\w*", name) and name.split(".")[0] in roots:
            yield name


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name != "_compat"], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_private_names_occur_only_in_compat(path):
    tree = ast.parse(path.read_text())
    assert sorted(private_names(tree)) == []
    assert [line for line in without_prose(tree).splitlines() if PRIVATE.search(line)] == []


def test_private_names_are_found_in_every_form():
    found = "import torch\nfrom torch import nn\ntorch._foreach_add_(x)\nnn.modules.batchnorm._BatchNorm\ngetattr(torch, '_x', None)"
    assert sorted(private_names(ast.parse(found))) == ["nn.modules.batchnorm._BatchNorm", "torch._foreach_add_", "torch._x"]
    assert list(private_names(ast.parse("from torch.autograd import _profiler_enabled"))) == ["torch.autograd._profiler_enabled"]
    for line in (
        "from jax._src import core",
        "import jaxlib",
        "jaxlib.x",
        "f.__code__",
        "getattr(f, '__code__')",
        "torch._C.x",
        "lib.xla_client",
    ):
        assert PRIVATE.search(without_prose(ast.parse(line))), line
    assert not PRIVATE.search(without_prose(ast.parse('"""torch._C"""\nx = 1  # jaxlib.x\nprint("this jaxlib does not know it")')))


EXECUTING_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "pickle.load", "pickle.loads", "os.system", "os.popen"}
EXECUTING_MODULES = {"cloudpickle", "dill", "http", "joblib", "marshal", "shelve", "socket", "subprocess", "urllib"}


def executing_names(tree):
    """Yield what unpickles, evaluates text, starts programs or opens connections."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in EXECUTING_CALLS:
            yield ast.unparse(node.func)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in EXECUTING_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {*EXECUTING_MODULES, "pickle"} and not node.level:
            yield node.module


def test_packages_execute_what_the_security_page_says():
    """SECURITY.md says that nothing is unpickled or evaluated, and that no program is started."""
    assert [(path.relative_to(ROOT).as_posix(), name) for path in FILES for name in executing_names(ast.parse(path.read_text()))] == []
    found = "import subprocess\nfrom pickle import loads\npickle.loads(x)\neval('x')\nmodule.eval()\nre.compile('x')"
    assert sorted(executing_names(ast.parse(found))) == ["eval", "pickle", "pickle.loads", "subprocess"]


# How often the word `Any` may occur in the code, imports and docstrings included. A change that removes some lowers the number here;
# nothing raises it.
MOST_ANY = {"outside the operators of traced code": 450, "in them": 1560}


@pytest.mark.parametrize("part", MOST_ANY)
def test_number_of_any_does_not_grow(part):
    operators = ROOT / "bridge" / "_tracing" / "ops"
    files = [path for path in FILES if (operators in path.parents) is (part == "in them")]
    count = sum(len(re.findall(r"\bAny\b", path.read_text())) for path in files)
    assert count <= MOST_ANY[part], f"`Any` occurs {count} times here, at most {MOST_ANY[part]} are allowed: name the class instead."


def test_files_and_names_in_contributing_exist():
    spans = re.findall(r"`([^`\n]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    folders = ("benchmarks", "bridge", "docs", "examples", "maskbridge", "tests", "tools", "torch_api")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".json", ".ipynb")]
    files += ROOT.glob("*.py")
    paths = [span for span in spans if re.fullmatch(r"[\w./]+", span) and span.split("/")[0] in folders and "/" in span]
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [span for span in spans if re.fullmatch(r"\w+\.py", span) and span not in {path.name for path in files}] == []
    words = set().union(*(re.findall(r"\w+", path.read_text()) for path in files if path.suffix == ".py"))
    named = [span for span in spans if re.fullmatch(r"\w+(\.\w+)*", span) and not re.search(r"\.(py|md|toml)$|\.f$|_f$", span)]
    assert len(named) > 50
    assert sorted({part for span in named for part in span.split(".")} - words) == []


def test_train_steps_read_no_private_attribute_of_an_optimizer():
    """`torch_api/_step/optimizer_access.py` and `transaction.py` have what they need."""
    found = [
        path
        for path in FILES
        if path.parent.name == "_train" and re.search(r"\boptimizer\._[a-z]", without_prose(ast.parse(path.read_text())))
    ]
    assert found == []


def test_each_package_of_tests_has_quick_tests():
    """Every folder that mirrors a package has quick tests; `torch_api/_rules` and `torch_api/_train` are tested through optimizers."""
    for folder in {path.parent for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name not in ("clients", "_train")}:
        assert any("pytest.mark.quick" in path.read_text() for path in folder.glob("test_*.py")), folder


def test_init_files_only_re_export():
    for path in FILES:
        for node in ast.parse(path.read_text()).body if path.stem == "__init__" else ():
            lists_names = isinstance(node, ast.FunctionDef) and node.name == "__dir__"
            assert lists_names or isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign), ast.dump(node)
            assert not path.parent.name.startswith("_") or isinstance(node, ast.Expr), f"{path} re-exports names that modules may have"


def test_each_package_refuses_foreign_ones_by_the_same_file():
    """None of them may import the check from a package that may be foreign."""
    texts = {(ROOT / package / "_own_packages.py").read_text() for package in PACKAGES}
    assert len(texts) == 1
    for package in PACKAGES:
        names = sorted({"bridge", "torch_api"} - {package})
        called = f"_refuse_foreign({', '.join(map(repr, names))})".replace("'", '"')
        code = (ROOT / package / "__init__.py").read_text()
        assert 0 < code.index(called) < re.search(r"^from (?!\._own_packages)", code, re.MULTILINE).start()


@pytest.mark.slow
def test_import_is_silent_and_changes_nothing():
    code = """
import os, warnings
warnings.simplefilter("error")
import jax, torch
before = dict(os.environ)
options = jax._src.compiler.get_compile_options
configured = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_platforms", "jax_default_device")}
grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
import bridge, maskbridge, torch_api
from jax._src.xla_bridge import backends_are_initialized
assert not backends_are_initialized(), "the import started a jax client"
assert jax._src.compiler.get_compile_options is options
assert configured == {name: getattr(jax.config, name) for name in configured}
assert (grad, dtype) == (torch.is_grad_enabled(), torch.get_default_dtype())
changed = {k for k in os.environ.keys() | before.keys() if os.environ.get(k) != before.get(k)}
print(sorted(changed))
"""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "MASKBRIDGE_XLA_FLAGS")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "[]")


def test_package_is_typed_and_its_metadata_is_complete():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "maskbridge"
    names = {re.split(r"[<>=\[]", d)[0] for d in project["dependencies"]}
    assert {"jax", "jaxlib", "optax", "torch", "torch2jax", "numpy", "packaging"} <= names
    assert all(re.search(r">=.*<|>=", d) for d in project["dependencies"])
    extras = project["optional-dependencies"]
    assert (extras["cuda"], extras["cuda12"], extras["cuda13"]) == (["maskbridge[cuda13]"], ["jax[cuda12]"], ["jax[cuda13]"])
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)
    oldest = (ROOT / "requirements" / "oldest.txt").read_text()
    for dependency in project["dependencies"]:
        name, lower = re.match(r"([\w-]+).*?>=([\d.]+)", dependency).groups()
        assert re.search(rf"^{name}=={re.escape(lower)}(\.0)*$", oldest, flags=re.MULTILINE), f"{name} {lower} is not in oldest.txt"


def pins(file):
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements" / file).read_text(), re.MULTILINE))


def test_each_supported_python_is_in_the_matrix_with_pins_in_range():
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    jobs = re.findall(r'\{ python: "(\S+)"(, may-fail: true)? \}', workflow)
    assert [python for python, may_fail in jobs if not may_fail] == supported
    noxfile = (ROOT / "noxfile.py").read_text()
    assert re.search(r"options\.sessions = (.*)", noxfile)[1] == str([f"quick-{python}" for python in supported]).replace("'", '"')
    file_of = ast.literal_eval(re.search(r"^PINS = (\{[^}]*\})", noxfile, re.MULTILINE)[1])
    assert list(file_of) == [python for python, _ in jobs]
    required = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    used = {file: pins(file) for file in file_of.values()}
    for file, versions in used.items():
        assert [name for name, specifier in required.items() if versions[name] not in specifier] == [], file
        assert versions.keys() == pins("constraints.txt").keys()
    page = (ROOT / "docs" / "versions.md").read_text()
    for python, may_fail in jobs:
        row = f"| {python} | {used[file_of[python]]['jax']} | {used[file_of[python]]['torch']} |"
        assert (row in page) is not bool(may_fail), row


def test_only_one_package_takes_memory_by_address():
    """Another package would have to check the storage and hold it, as `bridge._memory` does. The probes of DLPack compare two addresses."""
    takes = re.compile(r"\b(from_address|memmove|memset|frombuffer|__array_interface__|__cuda_array_interface__|unsafe_buffer_pointer)\b")
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in FILES
        if path.parent.name != "_memory"
        for name in takes.findall(path.read_text())
    }
    assert found == {("bridge/_interop/dlpack.py", "unsafe_buffer_pointer"), ("bridge/_runtime/execute.py", "frombuffer")}
