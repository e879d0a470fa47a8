"""Each bad input raises the error in docs/errors.md and changes nothing, and each `raise` of the packages is provoked by one."""

import ast
import copy
import functools
import os
import re
from pathlib import Path

import bad_inputs
import bad_inputs_jax
import bad_inputs_modules
import bad_inputs_train
import jax
import optax
import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("bridge", "maskbridge", "torch_api")
PAGE = ROOT / "docs" / "errors.md"
TABLE = bad_inputs.TABLE | bad_inputs_jax.TABLE | bad_inputs_modules.TABLE | bad_inputs_train.TABLE
CASES = {f"{section}: {bad.given}": bad for section, rows in TABLE.items() for bad in rows}
# Error texts quote jax, optax and torch: the page has those of one set of versions.
NEWEST = torch.__version__.startswith("2.13.") and jax.__version__ == "0.10.2" and optax.__version__ == "0.2.8"

# `raise` statements that no entry reaches: (file, start of the text with braces for filled-in values) -> why.
OUT_OF_REACH = {
    ("bridge/_interop/dlpack.py", "jax sees {}, but a tensor is on {}:{}."): "needs a GPU that torch sees and jax does not",
    ("bridge/_interop/dlpack.py", "jax has no CPU device, but"): "needs a process without jax's CPU: tests/contract/test_flags_of_jax.py",
    ("bridge/_interop/dlpack.py", "{} is sharded over {} devices"): "needs several devices",
    (
        "bridge/_flax_optim/optimizer.py",
        "ReplicatedOptimizer: the gradients do not vary over {}.",
    ): "needs several devices: tests/bridge/_flax_optim/test_optimizer.py",
    (
        "torch_api/_params/hyperparam_table.py",
        "{}: {}, but this transformation is not elementwise",
    ): "needs several processes: tests/torch_api/test_distributed.py",
    ("torch_api/transformation_of.py", "{}: {}, and a process holds a part"): "needs a process group: tests/torch_api/test_optax_state.py",
    ("bridge/_interop/dlpack.py", "unaligned"): "caught two lines below, and said again with the tensor's name",
    (
        "torch_api/_params/record.py",
        "{}: parameter {} has a gradient, but",
    ): "its bytes cannot be compared: tests/contract/test_freed_storages.py",
    ("torch_api/optimizer.py", "search.error"): "what the user's own closure raised",
    ("bridge/_runtime/transaction.py", "error"): "what a signal handler raised: tests/contract/test_signals.py",
    ("torch_api/optimizer.py", "ValueError(name)"): "caught below, where check_group says what is wrong",
    ("torch_api/_rules/betas.py", "KeyError(key)"): "what a dict raises for a key that it has not",
    ("torch_api/_params/selectors.py", "pickle.PicklingError("): "caught below: the pickle of the optimizer then has a note instead",
    ("bridge/_compat/torch2jax.py", "module_function and JaxTrainStep trace torch code"): "tests/contract/test_without_torch2jax.py",
    ("bridge/_compat/torch2jax.py", "torch2jax {} has no {}, by which"): "needs another torch2jax: tests/bridge/_compat/test_compat.py",
    ("bridge/_tracing/ops/recurrent.py", "lengths decide shapes"): "said again by torch_calls, with the function's name",
    (
        "bridge/_compat/jax.py",
        "a program has called what it was only loaded with",
    ): "no program calls it: tests/bridge/_xla/test_inline_execution.py",
} | {
    (f"{package}/_own_packages.py", "`import {}` finds"): "needs a foreign package: tests/contract/test_maskbridge_package.py"
    for package in PACKAGES
}


def state_of(net, made):
    """Return the bytes of all parameters, and of an optimizer also its state and groups."""
    params = list(net.parameters())
    state, groups = {}, []
    if isinstance(made, torch.optim.Optimizer):
        params += bad_inputs.params_of(made)
        groups = [{k: copy.copy(v) for k, v in group.items() if k != "params"} for group in made.param_groups]
        state = {i: {k: copy.deepcopy(v) for k, v in fields.items()} for i, fields in enumerate(map(made.state.get, params)) if fields}
    return [(p.data_ptr(), p.detach().clone().numpy(force=True).tobytes()) for p in params], state, groups


def provoke(bad):
    """Make the bad call; return the exception and the state of parameters and optimizer before and after."""
    net = bad_inputs.model()
    made = net if bad.make is None else bad.make(net)
    before = state_of(net, made)
    try:
        bad.call(made)
    except Exception as error:  # noqa: BLE001 - its type is on the page
        return error, before, state_of(net, made)
    raise AssertionError(f"{bad.given}: nothing was raised")


def text_of(raised):
    """Return the text of a `raise` with braces for filled-in values, or its expression if it has no text."""
    for node in ast.walk(raised):
        if isinstance(node, ast.JoinedStr):
            return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
    return ast.unparse(raised)


@functools.cache
def raises():
    """Yield (file, first line, last line, text) for each `raise` with an exception in the packages."""
    return [
        (path.relative_to(ROOT).as_posix(), node.lineno, node.end_lineno, text_of(node.exc))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and node.exc is not None
    ]


def excused(file, text):
    return [key for key in OUT_OF_REACH if key[0] == file and text.startswith(key[1])]


def raised_at(error):
    """Return (file, line) in the packages where an error was raised; None if other code raised it."""
    at = None
    trace = error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        ours = any(path.is_relative_to(ROOT / package) for package in PACKAGES)
        at = (path.relative_to(ROOT).as_posix(), trace.tb_lineno) if ours else None
        trace = trace.tb_next
    return at


@pytest.fixture(scope="module", autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def provoked():
    """Return a function from a name to the result of `provoke`, which runs each entry once."""
    known = {}

    def result(name):
        if name not in known:
            known[name] = provoke(CASES[name])
        return known[name]

    return result


@pytest.mark.parametrize("name", CASES)
def test_bad_input_raises_our_own_error_and_changes_nothing(name, provoked):
    error, before, after = provoked(name)
    at = raised_at(error)
    assert at is not None, f"foreign code raised {error!r}"
    assert at in {(file, line) for file, first, last, _ in raises() for line in range(first, last + 1)}, (at, error)
    assert [value for _, value in before[0]] == [value for _, value in after[0]]
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
    assert after[2] == before[2]
    if CASES[name].make is None:
        assert before[0] == after[0], "a parameter was moved by a construction that failed"


def test_comparison_detects_changes_and_foreign_errors():
    for change in (lambda opt: opt.step(), lambda opt: opt.param_groups[0].update(lr=0.5)):
        error, before, after = provoke(bad_inputs.Bad("late", lambda opt, change=change: (change(opt), [].pop()), bad_inputs.stepped()))
        assert raised_at(error) is None
        assert before[0] != after[0] or before[2] != after[2]


def test_every_raise_is_provoked(provoked):
    """A new `raise` needs an entry in one of tests/support/bad_inputs*.py, or a reason in OUT_OF_REACH."""
    reached = {raised_at(provoked(name)[0]) for name in CASES}
    found = [(file, first, text, any((file, line) in reached for line in range(first, last + 1))) for file, first, last, text in raises()]
    missing = [f"{file}:{first}: {text}" for file, first, text, hit in found if not hit and not excused(file, text)]
    assert not missing, "\n".join(["raised by no entry:", *missing])
    needless = set(OUT_OF_REACH) - {key for file, _, text, hit in found if not hit for key in excused(file, text)}
    assert not needless, f"gone, or reached by an entry: {needless}"


HEAD = """# Error messages

Each message, with the input that causes it. Names, shapes and lists of known names are those of an example. An error changes nothing:
parameters and state are as before the call. [Troubleshooting](troubleshooting.md) has the cases that people meet most.

`make docs` writes this page. `tests/repository/test_errors.py` provokes each error and compares its text. Left out are errors that need
several devices, and what jax adds about the traced function.
"""


def cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


def code(text):
    ticks = "``" if "`" in text else "`"
    return f"{ticks} {cell(text)} {ticks}" if "`" in text else f"`{cell(text)}`"


def page(provoked):
    lines = [HEAD]
    for section, rows in TABLE.items():
        lines += [f"## {section}\n", "| given | error | text |", "| --- | --- | --- |"]
        for bad in rows:
            error = provoked(f"{section}: {bad.given}")[0]
            text = str(error).partition("The error occurred while tracing")[0].strip()
            lines.append(f"| {cell(bad.given)} | {type(error).__name__} | {code(text)} |")
        lines.append("")
    return "\n".join(lines)


@pytest.mark.skipif(not NEWEST, reason="the page has the texts of the newest versions")
def test_page_lists_each_error(provoked):
    text = page(provoked)
    if os.environ.get("MASKBRIDGE_WRITE_DOCS"):
        PAGE.write_text(text)
    written, found = PAGE.read_text().splitlines(), text.splitlines()
    assert [line for line in found if line not in written] == [], "run `make docs`"
    assert written == found, "run `make docs`"


def test_no_error_shows_an_address_or_a_path():
    assert not re.search(r"0x[0-9a-f]{6,}", PAGE.read_text())
    assert not re.search(r" at /|\.py:\d", PAGE.read_text())


def test_no_input_is_listed_twice():
    assert len(CASES) == sum(map(len, TABLE.values()))
