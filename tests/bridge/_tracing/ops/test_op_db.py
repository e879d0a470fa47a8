"""Traced torch code matches eager torch on torch's operator database: values, dtypes, shapes and gradients.

For float32, some samples of each operator are compared; for the other kinds of samples, a random part of the operators. Tests marked
`nightly` compare every operator with each kind of samples. `operator_table` lists what is refused or differs, with the reason.
MASKBRIDGE_TEST_SAMPLES compares more samples per operator, and MASKBRIDGE_TEST_SEED selects other operators. MASKBRIDGE_TEST_OPERATOR
compares only one operator, by its name in the database:

    MASKBRIDGE_TEST_OPERATOR=special.i0e .venv/bin/python -m pytest tests/bridge/_tracing/ops/test_op_db.py
"""

import difflib
import os
import random
from pathlib import Path

import jax
import pytest
import torch
from operator_runs import KINDS, database, outcome
from operator_table import BY_VALUE, BY_VALUE_OF, COMPLEX_RESULTS, DRAWN, IN_PART, KNOWN, REFUSED, REFUSED_OF, VALUES
from sampling import sampled

from bridge._process import x64
from bridge._tracing import op_registry

SAMPLES = int(os.environ.get("MASKBRIDGE_TEST_SAMPLES", "3"))
SEED = int(os.environ.get("MASKBRIDGE_TEST_SEED", "0"))
DTYPES = [kind for kind in KINDS if kind not in ("extremal", "complex results")]
CHOSEN = 40  # operators of each kind in the random part
OPERATOR = os.environ.get("MASKBRIDGE_TEST_OPERATOR")
PARTS = 1 if OPERATOR else 24
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.skipif(VERSION < (2, 11), reason="an older database has other samples")]


def check_operator(name):
    """Raise an error if torch's database has no operator of this name."""
    names = sorted({name for kind in KINDS for name in database(KINDS[kind])})
    if name not in names:
        near = [other for other in names if other.endswith(f".{name}")] or difflib.get_close_matches(name, names)
        raise ValueError(
            f"MASKBRIDGE_TEST_OPERATOR is {name!r}; expected an operator of torch's database"
            f"{', perhaps ' + ' or '.join(map(repr, near)) if near else ''}. docs/operators.md lists them."
        )


if OPERATOR:
    check_operator(OPERATOR)


def chosen(names):
    """Return the operators to compare. Skip the test if MASKBRIDGE_TEST_OPERATOR is not among them."""
    if OPERATOR and OPERATOR not in names:
        pytest.skip(f"the database has no such samples of {OPERATOR}")
    return [OPERATOR] if OPERATOR else names


def outcomes(names, kind, limit, through_complex=True):
    entries = database(KINDS[kind])
    with x64():
        return {name: outcome(name, entries[name], kind, limit, DRAWN, VALUES, through_complex=through_complex) for name in names}


def population(kind):
    if kind == "complex results":
        return COMPLEX_RESULTS
    return sorted(name for name, op in database(KINDS[kind]).items() if kind != "extremal" or op.reference_inputs_func is not None)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("part", sampled(range(PARTS)))
@pytest.mark.filterwarnings("ignore")
def test_every_operator_matches_torch_or_is_refused_by_name(part):
    names = chosen(population("float32")[part::PARTS])
    found = outcomes(names, "float32", SAMPLES, through_complex=False)
    known = KNOWN["extremal"] if VERSION >= (2, 14) else {}  # the database of torch 2.14 has such values among the ordinary ones
    assert {name: of.wrong for name, of in found.items() if of.wrong and name not in known} == {}
    refused = {name for name, of in found.items() if of.counts["refused"]}
    if VERSION == (2, 13):
        assert refused - set(IN_PART) == set(REFUSED) & set(names)
    assert {name for name, of in found.items() if of.counts["by value"]} == BY_VALUE & set(names)
    assert OPERATOR or sum(of.counts["compared"] for of in found.values()) > len(names)


@pytest.mark.skipif(VERSION != (2, 13), reason="the table is for torch 2.13")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("kind", sampled([kind for kind in KINDS if kind != "float32"]))
@pytest.mark.filterwarnings("ignore")
def test_random_operators_match_torch_on_each_kind_of_samples(kind):
    names = population(kind)
    names = chosen(names if OPERATOR else sorted(random.Random(f"{SEED} {kind}").sample(names, min(CHOSEN, len(names)))))
    found = outcomes(names, kind, 2)
    assert {name: of.wrong for name, of in found.items() if of.wrong and name not in KNOWN[kind]} == {}
    assert {name for name, of in found.items() if of.counts["refused"]} <= {*REFUSED, *REFUSED_OF[kind], *IN_PART}
    assert OPERATOR or sum(of.counts["compared"] for of in found.values()) > len(names) / 2


@pytest.mark.nightly
@pytest.mark.skipif(VERSION != (2, 13), reason="the table is for torch 2.13")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "complex results"])
@pytest.mark.filterwarnings("ignore")
def test_every_operator_matches_torch_or_the_table_on_each_kind_of_samples(kind, part):
    names = chosen(sorted(database(KINDS[kind]))[part::PARTS])
    found = outcomes(names, kind, SAMPLES * (2 if kind == "extremal" else 1))  # operators have few extremal samples
    known = KNOWN[kind].keys() & set(names)
    assert {name: of.wrong for name, of in found.items() if of.wrong and name not in known} == {}
    assert {name for name in known if KNOWN[kind][name][0] not in found[name].wrong} == set(), "these match torch now: remove them"
    tried = {name for name, of in found.items() if of.counts.keys() - {"skipped"}}
    by_value = BY_VALUE | BY_VALUE_OF.get(kind, set())
    assert {name for name, of in found.items() if of.counts["by value"]} == by_value & tried
    refused = {name for name, of in found.items() if of.counts["refused"] and not of.counts["compared"]}
    assert refused == {*REFUSED, *REFUSED_OF[kind]} & tried


def test_error_for_an_unknown_operator_names_similar_ones():
    check_operator("special.i0e")
    with pytest.raises(ValueError, match=r"is 'i0e'; expected an operator of torch's database, perhaps 'special.i0e'"):
        check_operator("i0e")


def test_comparison_detects_a_wrong_operator(monkeypatch):
    cosine = op_registry.OPS[torch.cos]
    monkeypatch.setitem(op_registry.OPS, torch.cos, cosine._replace(handler=lambda x: 1.01 * jax.numpy.cos(x)))
    with x64():
        for kind in ("float32", "complex64"):
            assert "Mismatched elements" in outcome("cos", database(KINDS[kind])["cos"], kind).wrong["forward"]
        monkeypatch.undo()
        assert outcome("cos", database()["cos"]).wrong == {}


# ------------------------------------------------------------------ the page

PAGE = Path(__file__).parents[4] / "docs" / "operators.md"
HEAD = f"""# Operators of traced torch code

`module_function` and `JaxTrainStep` trace these operators of torch. Any other operator is an error that names it and the module that
calls it.

- *forward*, *gradient*: the dtypes ({", ".join(DTYPES)}) in which a program of `jax.jit`
  agrees with eager torch {torch.__version__.partition("+")[0]}, in value, shape, dtype and gradient; "-" where there is none.
- The last column says what is refused, what differs, and why. Without a note on "extremal" inputs an operator agrees for infinities, NaN,
  large numbers and negative zeros too.

`make docs` writes the table. `tests/bridge/_tracing/ops/test_op_db.py` runs each operator on the samples of torch's own database of
operators; `tests/support/operator_table.py` has the notes.

| operator | forward | gradient | refused or different, and why |
| --- | --- | --- | --- |
"""


def notes_of(name):
    if name in REFUSED:
        return [f"refused: {REFUSED[name]}"]
    notes = [f"refused in part: {IN_PART[name]}"] if name in IN_PART else []
    notes += ["refused under jit: values decide the result's shape"] if name in BY_VALUE else []
    notes += ["its numbers are jax's: only shape and dtype are compared"] if name in DRAWN else []
    notes += [f"gradient: {VALUES[name]}"] if name in VALUES else []
    notes += [f"{kind}: refused under jit where values decide the result's shape" for kind in KINDS if name in BY_VALUE_OF.get(kind, ())]
    notes += [f"{kind}: refused, {REFUSED_OF[kind][name]}" for kind in KINDS if name in REFUSED_OF[kind]]
    return notes + [f"{kind}: {part}, {why}" for kind in KINDS for part, why in [KNOWN[kind].get(name, ("", ""))] if part]


def row(name):
    agrees, slopes = [], []
    for kind in DTYPES:
        op = database(KINDS[kind]).get(name)
        part = "" if op is None else KNOWN[kind].get(name, ("both",))[0]
        if op is None or part == "forward" or name in BY_VALUE or name in REFUSED or any(name in of for of in REFUSED_OF.values()):
            continue
        agrees.append(kind)
        has_slope = op.supports_autograd and KINDS[kind] in op.supported_backward_dtypes("cpu")
        slopes += [kind] if has_slope and part != "gradient" and name not in (*DRAWN, *VALUES) else []
    return f"| {name} | {', '.join(agrees) or '-'} | {', '.join(slopes) or '-'} | {'; '.join(notes_of(name))} |\n"


@pytest.mark.skipif(VERSION != (2, 13), reason="the page is for torch 2.13")
def test_the_page_has_each_operator():
    names = sorted({name for kind in DTYPES for name in database(KINDS[kind])})
    text = HEAD + "".join(map(row, names))
    if os.environ.get("MASKBRIDGE_WRITE_DOCS"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run `make docs`"
