"""Contract tests and the support files that they import use public names of the project only.

pytest loads conftest.py, and no test imports it. Its fixtures decide how code is compiled for the selected tests and not what a test
sees, so they may patch private modules.
"""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import bridge
import bridge.matrix_rules
import bridge.rules
import maskbridge
import torch_api

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]
CONTRACT = sorted((TESTS / "contract").rglob("*.py"))
PUBLIC = {
    "bridge": bridge,
    "bridge.matrix_rules": bridge.matrix_rules,
    "bridge.rules": bridge.rules,
    "maskbridge": maskbridge,
    "torch_api": torch_api,
}
DOTTED = re.compile(r"(bridge|torch_api)(\.\w+)+")  # not maskbridge.plan and the like, which are loggers
# The only support file of contract tests that may read private modules: it counts bytes and executables with the thresholds of 2 cores.
EXEMPT = TESTS / "support" / "cost_probe.py"


def is_public(module, name):
    """Return whether a name of a public module is for users."""
    if f"{module}.{name}" in PUBLIC or re.fullmatch(r"__\w+__", name):
        return True
    names = getattr(PUBLIC[module], "__all__", None)
    return name in names if names else not name.startswith("_") and not inspect.ismodule(getattr(PUBLIC[module], name, None))


def private_part(dotted):
    """Return the shortest private prefix of a dotted name; None if the whole name is public."""
    module, *names = dotted.split(".")
    for name in names:
        if not is_public(module, name):
            return f"{module}.{name}"
        module = f"{module}.{name}"
        if module not in PUBLIC:
            return None
    return None


def imported(tree):
    """Yield (line, module, name or None, bound name) for each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None, alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, node.module or "", alias.name, alias.asname or alias.name


def is_ours(dotted):
    return dotted.split(".")[0] in ("bridge", "maskbridge", "torch_api")


def dotted_name(node, bound):
    """Return the dotted name of an expression of names and attributes, given what names are bound to; None for other expressions."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        inner = dotted_name(node.value, bound)
        return inner and f"{inner}.{node.attr}"
    if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):  # getattr, monkeypatch.setattr
        inner, name = dotted_name(node.args[0], bound), node.args[1].value
        return inner and isinstance(name, str) and f"{inner}.{name}"
    return None


def programs_in(tree):
    """Yield the parsed programs that a file holds as text, to run in other processes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\bimport\b", node.value):
            try:
                yield ast.parse(textwrap.dedent(node.value))
            except SyntaxError:
                continue


def names_of_ours(tree):
    """Yield (line, dotted name) for each name of the project that a tree reads."""
    bound = {}
    for line, module, name, alias in imported(tree):
        if is_ours(module):
            if name != "*":
                yield line, module if name is None else f"{module}.{name}"
            whole = alias != module.split(".")[0] or name is not None
            bound[alias] = module.split(".")[0] if not whole else module if name is None else f"{module}.{name}"
    for node in ast.walk(tree):
        dotted = dotted_name(node, bound) if isinstance(node, ast.Attribute | ast.Call) else None
        if dotted:
            yield node.lineno, dotted
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            yield node.lineno, node.value
    for program in programs_in(tree):
        yield from names_of_ours(program)


def found_in(folders, dotted):
    """Return the file of a module in one of the folders; None if it is elsewhere."""
    files = [folder / f"{dotted.replace('.', '/')}.py" for folder in folders]
    return next((file for file in files if file.exists()), None)


def private_names(path, folders=(TESTS / "support", TESTS), seen=None):
    """Yield the private names of the project that a file reads, also through imported files of `folders`."""
    seen = {EXEMPT} if seen is None else seen
    if path in seen:
        return
    seen.add(path)
    tree = ast.parse(path.read_text())
    for line, dotted in names_of_ours(tree):
        if private_part(dotted):
            yield f"{path.name}:{line}: {private_part(dotted)}"
    for _, module, name, _ in imported(tree):
        for dotted in filter(None, (module, name and f"{module}.{name}".lstrip("."))):
            file = found_in((path.parent, *folders), dotted)
            if file is not None:
                yield from private_names(file, folders, seen)


@pytest.mark.parametrize("path", CONTRACT, ids=lambda path: path.stem)
def test_contract_tests_read_public_names_only(path):
    assert sorted(set(private_names(path))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import bridge.flags", "bridge.flags"),
        ("import bridge.flags as f", "bridge.flags"),
        ("from bridge import flags", "bridge.flags"),
        ("from bridge.flags import of_update", "bridge.flags"),
        ("from torch_api.optimizer import OptaxOptimizer", "torch_api.optimizer"),
        ("import bridge as b\nb.programs.programs([])", "bridge.programs"),
        ("import bridge\ndef test(monkeypatch):\n    monkeypatch.setattr(bridge, 'programs', None)", "bridge.programs"),
        ("import bridge\ngetattr(bridge, '_flags')", "bridge._flags"),
        ("import importlib\nimportlib.import_module('torch_api.packs')", "torch_api.packs"),
        ("from bridge import rules\nrules._private", "bridge.rules._private"),
        ("from bridge.matrix_rules import _private", "bridge.matrix_rules._private"),
        ("from bridge.rules import jnp", "bridge.rules.jnp"),
        ("PROGRAM = '''\n    import torch_api\n    torch_api.cache.Cache('x')\n'''", "torch_api.cache"),
    ],
)
def test_private_name_is_found(tmp_path, text, found):
    (tmp_path / "support.py").write_text(text)
    assert {each.split(": ")[1] for each in private_names(tmp_path / "support.py")} == {found}
    (tmp_path / "test_it.py").write_text("import torch_api\n\n\ndef test():\n    from support import helper\n")
    assert {each.split(": ")[1] for each in private_names(tmp_path / "test_it.py")} == {found}


@pytest.mark.parametrize(
    "text",
    [
        "import bridge, torch_api\nbridge.__file__\ntorch_api.MaskedAdamW([]).report()\nbridge.rules.adam\n",
        "from bridge import module_tree\nfrom bridge.rules import adam\nfrom torch_api import JaxTrainStep as Step\n",
        "import bridge.matrix_rules as m\nm.muon\nimport jax, torch\ntorch.nn.Linear\n'bridge.Adam'\n'import nothing'\n",
    ],
)
def test_public_names_are_accepted(tmp_path, text):
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert list(private_names(path)) == []


def test_exempt_file_reads_private_names():
    tree = ast.parse(EXEMPT.read_text())
    assert any(private_part(dotted) for _, dotted in names_of_ours(tree))
