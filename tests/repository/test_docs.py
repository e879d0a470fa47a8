"""Every new line of docs/migrating.md runs, the warnings of docs/interop.md are true, and docs/drop_in.md lists options and classes."""

import inspect
import os
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch

import bridge
import torch_api
from torch_api import optax_optimizers, torch_optimizers

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "migrating.md"
pytestmark = [pytest.mark.quick, pytest.mark.slow]


def new_lines():
    rows = [line.split(" | ", 1)[1] for line in PAGE.read_text().split("\n") if line.startswith("| ") and not line.startswith("| ---")]
    code = [snippet for row in rows for snippet in re.findall(r"`([^`]+)`", row)]
    return [snippet for snippet in code if "torch_api" in snippet or "bridge" in snippet or "opt" in snippet]


@pytest.fixture
def names(tmp_path):
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
    opt = torch_api.MaskedAdamW(model.named_parameters(), mask="head.*")

    def closure():
        for p in model.parameters():
            p.grad = None
        loss = model["head"](model["encoder"](torch.ones(2, 4))).square().sum()
        loss.backward()
        return loss

    file = tmp_path / "state.pt"
    torch.save(opt.state_dict(), file)
    given = {"model": model, "opt": opt, "closure": closure, "loss": closure().detach(), "file": file}
    return given | {
        "tree": jax.tree.map(lambda x: x + 0, bridge.module_tree(model)),
        "torch": torch,
        "optax": optax,
        "bridge": bridge,
        "torch_api": torch_api,
    }


def test_page_has_new_lines():
    assert len(new_lines()) > 30


@pytest.mark.parametrize("line", new_lines())
def test_new_line_runs(line, names):
    if line.endswith(".py"):
        assert (PAGE.parent.parent / line).exists()
        return
    with jax.numpy_dtype_promotion("standard"):
        exec(line, names)


# ------------------------------------------------------------------ docs/interop.md

INTEROP = (DOCS / "interop.md").read_text()


def test_files_named_in_the_interop_page_exist_and_its_drawing_is_xml():
    from xml.etree import ElementTree

    for link in re.findall(r"\]\(([^)#]+)\)", INTEROP):
        assert link.startswith("http") or (DOCS / link).exists(), link
    root = ElementTree.parse(DOCS / "memory.svg").getroot()
    words = " ".join("".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text"))
    for word in ("Parameter", "donated", "gradients", "waits"):
        assert word in words


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="tests asynchronous dispatch on the CPU")
def test_call_returns_before_reading_its_arguments_unless_one_waits():
    product = jax.jit(lambda m: (m @ m).sum())
    n = 1500
    product(bridge.to_jax(torch.ones(n, n))).block_until_ready()
    stale = False
    for wait in [True] * 3 + [False] * 200:  # on a busy machine the call may have ended before torch writes
        m = torch.ones(n, n)
        out = product(bridge.to_jax(m))
        if wait:
            out.block_until_ready()
        m.zero_()
        wrong = abs(float(out) - n**3) > 1e-3 * n**3
        assert not (wait and wrong)
        stale = bool(wrong)
        if stale:
            break
    assert stale, "jax itself waits now: the page may say so"


def test_imported_array_is_not_donated():
    t = torch.zeros(1000)
    a = bridge.to_jax(t)
    result = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)(a)
    assert a.is_deleted()
    assert result.unsafe_buffer_pointer() != t.data_ptr()
    assert not t.any()


def test_array_aliased_by_torch_is_not_donated():
    x = jnp.zeros(1000)
    t = bridge.to_torch(x)
    result = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)(x)
    assert result.unsafe_buffer_pointer() != t.data_ptr()
    assert not t.any()


def test_write_by_torch_into_an_array_changes_the_array():
    x = jnp.zeros(1000)
    bridge.to_torch(x)[0] = 3.0
    assert float(x[0]) == 3.0


def test_to_jax_keeps_64_bit_types_unlike_jnp(standard_promotion):
    assert jnp.asarray(np.zeros(2)).dtype == jnp.float32
    wide = bridge.to_jax(torch.zeros(2, dtype=torch.float64))
    assert str(wide.dtype) == "float64"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some jax warn, some do not
        assert (wide + 1).dtype == jnp.float32


def test_torch_shares_a_loaded_state_and_maskbridge_copies_it():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    first, second, ours = torch.optim.Adam([p]), torch.optim.Adam([p]), torch_api.MaskedAdam([p])
    first.step()
    second.load_state_dict(first.state_dict())
    ours.load_state_dict(first.state_dict())
    place = first.state[p]["exp_avg"].data_ptr()
    assert second.state[p]["exp_avg"].data_ptr() == place
    assert ours.state[p]["exp_avg"].data_ptr() != place


def test_parameter_with_a_view_is_not_moved():
    p = torch.nn.Parameter(torch.ones(300, 300))
    view = p.detach()
    opt = torch_api.MaskedAdam([p])
    assert p.data_ptr() == view.data_ptr()
    assert opt.report().rows[0]["write-back"].startswith("copy")


@pytest.mark.parametrize("cls", [torch_api.OptaxOptimizer, torch_api.MaskedAdamW, torch_api.MaskedLion, torch_api.PartitionedOptimizer])
def test_page_of_drop_in_classes_has_each_option_and_its_default(cls):
    section = (DOCS / "drop_in.md").read_text().partition("## Options")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \| .+ \|$", section, flags=re.MULTILINE))
    known = inspect.signature(torch_api.OptaxOptimizer.__init__).parameters
    expected = {name: repr(p.default) for name, p in known.items() if p.kind is p.KEYWORD_ONLY}
    assert list(listed.items()) == list(expected.items())
    own = inspect.signature(cls.__init__).parameters
    assert {name: repr(p.default) for name, p in own.items() if name in listed} == expected


def test_page_of_drop_in_classes_lists_each_class():
    """`make docs` writes the table from the modules, so a new class needs no line of documentation."""
    rows = ["| counterpart in | classes |", "| --- | --- |"]
    for library, module in (("torch.optim", torch_optimizers), ("optax", optax_optimizers)):
        classes = [name for name in sorted(torch_api.__all__) if getattr(torch_api, name).__module__ == module.__name__]
        rows.append(f"| {library} | {', '.join(f'`{name}`' for name in classes)} |")
    path = DOCS / "drop_in.md"
    head, _, tail = re.split(r"(?<=`make docs` -->\n)(.*?)(?=\n<!-- end -->)", path.read_text(), maxsplit=1, flags=re.DOTALL)
    text = head + "\n".join(rows) + tail
    if os.environ.get("MASKBRIDGE_WRITE_DOCS"):
        path.write_text(text)
    assert path.read_text() == text, "run `make docs`"
