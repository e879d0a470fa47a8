"""Every optimizer and wrapper of optax and optax.contrib on torch parameters: numbers, resumption, and the table of docs/optimizers.md."""

import functools
import inspect
import io
import os
from pathlib import Path

import numpy as np
import optax
import optax.contrib
import pytest
import torch
import zoo
from oracles import CLOSE
from sampling import sampled

import bridge
import torch_api

TABLE = Path(__file__).parents[2] / "docs" / "optimizers.md"
NAMES = sorted(zoo.ENTRIES)
WITH_FACTORY = [name for name in NAMES if zoo.ENTRIES[name].factory is not None]
pytestmark = [
    pytest.mark.unoptimized,
    pytest.mark.long,
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*will be removed.*", "ignore:.*required in optax.*", "ignore:.*deprecat.*"),
]


def values(params):
    return {name: p.detach().clone().numpy() for name, p in params.items()}  # a NumPy view of p would pin its memory


@functools.cache
def run(name):
    """Return (tx, optimizer, our values, values of pure JAX, start)."""
    entry = zoo.ENTRIES[name]
    tx, params, grads = entry.make(), zoo.start(entry.dtype), zoo.gradients(entry.dtype)
    begun = values(params)
    reference = zoo.in_pure_jax(tx, entry, zoo.start(entry.dtype), grads)
    optimizer = zoo.by_maskbridge(tx, entry, params, grads)
    return tx, optimizer, values(params), reference, begun


def assert_equal_to_1e_6(ours, reference, begun):
    assert max(np.abs(ours[name] - reference[name]).max() for name in ours) <= CLOSE
    assert zoo.movement_error(ours, reference, begun) <= 3 * CLOSE


@pytest.mark.parametrize("name", sampled(NAMES, every=2))
def test_twenty_steps_match_pure_jax(name):
    _, _, ours, reference, begun = run(name)
    if optax.__version__ != "0.2.8" and not all(np.isfinite(value).all() for value in reference.values()):
        pytest.skip("this optax itself gives NaN")
    assert_equal_to_1e_6(ours, reference, begun)


@pytest.mark.parametrize("name", ["optax.adam", "optax.lamb", "optax.clip_by_global_norm", "optax.contrib.muon", "optax.MultiSteps"])
def test_comparison_detects_a_step_size_off_by_a_ten_thousandth(name):
    tx, _, _, reference, begun = run(name)
    params = zoo.start()
    zoo.by_maskbridge(tx, zoo.ENTRIES[name], params, zoo.gradients(), lr=1.0001)
    with pytest.raises(AssertionError):
        assert_equal_to_1e_6(values(params), reference, begun)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITH_FACTORY)
def test_factory_with_traced_hyperparams_matches_and_compiles_once(name):
    entry = zoo.ENTRIES[name]
    _, _, _, reference, begun = run(name)
    params = zoo.start(entry.dtype)
    optimizer = zoo.by_maskbridge(entry.factory, entry, params, zoo.gradients(entry.dtype), **entry.hyperparams)
    assert_equal_to_1e_6(values(params), reference, begun)
    compiled, traced = bridge.compilations(), bridge.traces()
    for key in zoo.traced(optimizer):
        value = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = tuple(v * 1.01 for v in value) if isinstance(value, tuple) else value * 1.01
    before = values(params)
    zoo.advance(optimizer, entry, params, zoo.gradients(entry.dtype, 1), first=zoo.STEPS)
    assert (bridge.compilations(), bridge.traces()) == (compiled, traced)
    assert name == "optax.lbfgs" or any((values(params)[n] != before[n]).any() for n in params)  # its step may be too short


@pytest.mark.parametrize("name", sampled(NAMES))
def test_resumed_run_equals_the_uninterrupted_one(name):
    entry = zoo.ENTRIES[name]
    tx, _, uninterrupted, _, _ = run(name)
    params, grads, half = zoo.start(entry.dtype), zoo.gradients(entry.dtype), zoo.STEPS // 2
    first = torch_api.OptaxOptimizer(params.items(), tx)
    zoo.advance(first, entry, params, grads[:half])
    file = io.BytesIO()
    torch.save({"model": params, "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    params = {n: torch.nn.Parameter(p.detach().clone()) for n, p in saved["model"].items()}
    second = torch_api.OptaxOptimizer(params.items(), tx)
    second.load_state_dict(saved["optimizer"])
    zoo.advance(second, entry, params, grads[half:], first=half)
    for n, p in params.items():
        assert p.detach().clone().numpy().tobytes() == uninterrupted[n].tobytes(), n


def test_comparison_detects_a_resume_without_state():
    entry, half = zoo.ENTRIES["optax.adam"], zoo.STEPS // 2
    tx, _, uninterrupted, _, _ = run("optax.adam")
    params, grads = zoo.start(), zoo.gradients()
    for part, first in ((grads[:half], 0), (grads[half:], half)):
        zoo.advance(torch_api.OptaxOptimizer(params.items(), tx), entry, params, part, first=first)
    assert any(values(params)[n].tobytes() != uninterrupted[n].tobytes() for n in params)


def test_every_public_transformation_is_tested_or_refused():
    known = {*zoo.ENTRIES, *zoo.REFUSED, *zoo.WITH_CLOSURE}
    for module in (optax, optax.contrib):
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith("_") or not callable(function) or inspect.isclass(function):
                continue
            try:
                annotation = str(inspect.signature(function).return_annotation)
            except ValueError:
                continue
            if "GradientTransformation" in annotation:
                assert f"{module.__name__}.{name}" in known, f"{module.__name__}.{name} is neither tested nor listed as refused"


def test_refused_transformations_raise_a_clear_error():
    params = zoo.start()
    monitor = getattr(optax, "monitor", None)
    if monitor is None:
        pytest.skip("this optax has no monitor")
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.chain(monitor({"norm": optax.global_norm}), optax.sgd(0.1)))
    before = values(params)
    with pytest.raises(ValueError, match="changes the structure of its state"):
        zoo.advance(optimizer, zoo.ENTRIES["optax.sgd"], params, zoo.gradients(steps=1))
    assert all((values(params)[n] == before[n]).all() for n in params)


def row(name):
    entry = zoo.ENTRIES[name]
    _, optimizer, _, _, _ = run(name)
    traced = ""
    if entry.factory is not None:
        traced = ", ".join(zoo.traced(torch_api.OptaxOptimizer(zoo.start(entry.dtype).items(), entry.factory, **entry.hyperparams)))
    fields = dict.fromkeys(field for state in optimizer.state.values() for field in state)
    further = "" if entry.extra is None else ", ".join(entry.extra(0, {}))
    return f"| `{name}` | {zoo.form(optimizer)} | {', '.join(fields) or '-'} | {traced or '-'} | {further or '-'} |"


HEAD = f"""# Optimizers and transformations of optax {optax.__version__}

`OptaxOptimizer` takes each of these: `torch_api.OptaxOptimizer(model.named_parameters(), optax.lion, lr=1e-4)`.

- *gets*: what one call of the transformation gets. **alone, flat**: one parameter as a flat array, with a step count of its own. **alone**:
  one parameter in its own shape. **together**: several parameters, with one state. For `optax.contrib.prodigy`, a function, these are the
  parameters of one param group, so each group has its own state, such as Prodigy's estimate. For `optax.contrib.prodigy()`, a ready
  transformation, these are the parameters of all groups. The traced program decides.
- *state*: the fields of `optimizer.state[param]`.
- *traced*: the hyperparameters that may change at any step without compiling.
- *further*: what `step` must be given.

`make docs` writes the table. `tests/torch_api/test_zoo.py` runs each transformation for {zoo.STEPS} steps on torch parameters and in pure
JAX: both agree to 1e-6, and a resumed run has the same bits as one without a break.

| transformation | gets | state | traced | further |
| --- | --- | --- | --- | --- |
"""
TAIL = """
Line searches call the loss, so `step` needs a closure (`tests/torch_api/_step/test_closure.py`): {closures}.

Refused:

| | why |
| --- | --- |
{refused}
"""


@pytest.mark.skipif(optax.__version__ != "0.2.8", reason="the table is made with the newest optax")
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_table_in_the_docs_is_up_to_date(every):
    tail = TAIL.format(
        closures=", ".join(f"`{n}`" for n in zoo.WITH_CLOSURE), refused="\n".join(f"| `{n}` | {why} |" for n, why in zoo.REFUSED.items())
    )
    if os.environ.get("MASKBRIDGE_WRITE_DOCS"):
        TABLE.write_text(HEAD + "\n".join(map(row, NAMES)) + "\n" + tail)
    page = TABLE.read_text()
    assert page.startswith(HEAD), "run `make docs`"
    assert page.endswith("\n" + tail), "run `make docs`"
    lines = page.removeprefix(HEAD).removesuffix("\n" + tail).split("\n")
    assert len(lines) == len(NAMES)
    assert lines[::every] == [row(name) for name in NAMES[::every]], "run `make docs`"
