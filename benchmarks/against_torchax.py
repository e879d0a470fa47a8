"""Compare our tracing with torchax's on the operators of torch's database, their gradients and whole models: what is right, what refused.

    make torchax    # in an environment of its own; writes benchmarks/torchax.json and docs/torchax.md

Each side runs in its own processes, on the same samples, in programs compiled by `jax.jit`, and its results are compared with eager
torch's. torchax runs in what its documentation calls accuracy mode: with 64-bit types, and with torch's dtypes. No time is measured here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "torchax.json"
PAGE = ROOT / "docs" / "torchax.md"
SIDES = "maskbridge", "torchax"
SAMPLES = 3  # for each operator
PACKAGES = "torch", "jax", "torchax", "transformers", "diffusers"
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "clients")]  # for operator_runs and test_models


def torchax_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of jax arrays from torch code, by torchax."""
    import jax
    import torch
    from torch.utils import _pytree as pytree

    env: Any = import_module("torchax").default_env()

    def as_constant(tensor: torch.Tensor) -> Any:
        with jax.ensure_compile_time_eval():
            return env.j2t_iso(env.t2j_copy(tensor))

    def run(*arrays: Any) -> Any:
        with env, env.override_property(prng=jax.random.key(0)):
            out = env.to_xla(function(*env.j2t_iso(list(arrays)), constant=as_constant))
        return env.t2j_iso(pytree.tree_leaves(out))  # jax does not take torch's named tuples apart

    return run


def torchax_refusal(name: str, error: Exception) -> str | None:
    """Classify an error of torchax, as `operator_runs.refusal` does for ours; None for a plain failure."""
    import jax

    if type(error).__name__ == "OperatorNotFound" or isinstance(error, NotImplementedError):
        return "refused"
    return "by value" if isinstance(error, jax.errors.ConcretizationTypeError) else None


def operators(side: str) -> dict[str, dict[str, Any]]:
    """For each operator: how many samples had which result, and the first error of each kind."""
    from tqdm import tqdm

    from bridge._process import x64

    runs, table = import_module("operator_runs"), import_module("operator_table")
    found = {}
    ours = side == "maskbridge"
    as_jax = runs.ours if ours else lambda case: torchax_function(case.function)
    refusal = runs.refusal if ours else torchax_refusal
    with x64():
        for name, op in tqdm(sorted(runs.database().items())):
            came = runs.outcome(name, op, "float32", SAMPLES, table.DRAWN, table.VALUES, as_jax, refusal)
            if came.counts["compared"] or came.counts["refused"] or came.counts["by value"] or came.counts["other"] or came.wrong:
                found[name] = {"counts": dict(came.counts), "wrong": came.wrong}
    return found


def models(side: str) -> dict[str, str]:
    """For each model: "right", or how its output, loss or gradients differ from eager torch's, or the error."""
    import torch

    cases = import_module("test_models")
    found = {}
    for name, (inputs, config) in cases.CASES.items():
        torch.manual_seed(0)
        batch = inputs()
        expected = cases.slopes(name, config, batch)
        try:
            model = cases.made(name, config)
            trained = {name for name, p in model.named_parameters() if p.requires_grad}
            loss, grads = of_model(side, model, batch)
            found[name] = difference(loss, {name: grads[name] for name in trained}, expected)
        except Exception as error:  # noqa: BLE001 - reports any error of either side
            found[name] = one_line(error)
    return found


def of_model(side: str, model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients, computed by one compiled program."""
    import jax
    import numpy as np
    import torch

    import bridge
    from bridge._names import unnest

    loss_of = import_module("test_models").loss_of
    given = {name: bridge.to_jax(x, copy=True) for name, x in batch.items()}
    if side == "maskbridge":

        class Loss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, batch: Any) -> Any:
                return loss_of(self.model, batch)

        module = Loss()
        pure = bridge.module_function(module)
        params = bridge.module_tree(module)
        loss, grads = jax.jit(jax.value_and_grad(lambda p: pure(p, given)))(params)
        return float(loss), {name.removeprefix("model."): np.asarray(x) for name, x in unnest(grads).items()}

    env: Any = import_module("torchax").default_env()
    params = env.t2j_copy(dict(model.named_parameters()))
    buffers = env.t2j_copy(dict(model.named_buffers()))

    def loss_by(params: Any, buffers: Any, given: Any) -> Any:
        with env:
            state, batch = env.j2t_iso(({**params, **buffers}, given))

            class Bound:
                """The model with this state: a call goes to `torch.func.functional_call`."""

                def __call__(self, *args: Any, **kwargs: Any) -> Any:
                    return torch.func.functional_call(model, state, args, kwargs)

            loss = loss_of(Bound(), batch)
        return env.t2j_iso(loss)

    loss, grads = jax.jit(jax.value_and_grad(loss_by))(params, buffers, given)
    return float(loss), {name: np.asarray(x) for name, x in grads.items()}


def difference(loss: float, grads: dict[str, Any], expected: Any) -> str:
    import numpy as np

    theirs, slopes = expected
    scale = max(float(slope.abs().max()) for slope in slopes.values())
    worst = max((float(np.abs(slope - slopes[name].numpy()).max()) / scale, name) for name, slope in grads.items())
    if abs(loss - theirs) > 1e-4 * max(1.0, abs(theirs)):
        return f"the loss is {loss:.6g}, torch's {theirs:.6g}"
    return "right" if worst[0] < 1e-4 else f"the gradient of {worst[1]} differs by {worst[0]:.1e} of the largest"


def one_line(error: BaseException) -> str:
    """The error as one line, with the folders removed from file paths."""
    text = re.sub(r"(?<=\s)/\S*/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:160]}"


def run_side(side: str, path: Path) -> None:
    """Run all models and operators on one side, and write the results to `path`."""
    warnings.simplefilter("ignore")
    import jax

    if side == "torchax":
        import_module("torchax").enable_accuracy_mode()
        device: Any = import_module("torchax.device_module")
        device.set_rng_state = lambda *_, **__: None  # torch's samples for dropout call it
    else:
        jax.config.update("jax_default_matmul_precision", "highest")
    path.write_text(json.dumps({"models": models(side), "operators": operators(side)}))


def imported(stable: Path | None) -> str | None:
    """Return the error of `import torchax` for the stable release: "" if there is none, None if that release is not installed."""
    if stable is None:
        return None
    env = os.environ | {"PYTHONPATH": str(stable)}
    done = subprocess.run([sys.executable, "-c", "import torchax"], capture_output=True, text=True, env=env, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def version_at(stable: Path) -> str:
    (found,) = importlib.metadata.distributions(name="torchax", path=[str(stable)])
    return found.version


def state_of(entry: dict[str, Any] | None) -> str:
    """Sum up the results of an operator in one word."""
    if entry is None:
        return "nothing to compare"
    counts, wrong = Counter(entry["counts"]), entry["wrong"]
    if not wrong and not (counts["refused"] or counts["other"] or counts["by value"]):
        return "right"
    text = wrong.get("forward", "")
    if text and not text.startswith("MismatchError"):
        return "another error"
    if wrong:
        return "wrong value, shape or dtype" if text else "wrong gradient"
    return "refused in part" if counts["compared"] else "refused"


def table_of(results: dict[str, Any], what: Callable[[dict[str, Any] | None], str], names: list[str]) -> list[str]:
    rows = {side: Counter(what(results[side]["operators"].get(name)) for name in names) for side in SIDES}
    states = sorted({state for counts in rows.values() for state in counts}, key=lambda s: (-max(rows[side][s] for side in SIDES), s))
    return [
        f"| of {len(names)} operators | {' | '.join(SIDES)} |",
        "| --- | --- | --- |",
        *(f"| {state} | {' | '.join(str(rows[side][state]) for side in SIDES)} |" for state in states),
    ]


def page(results: dict[str, Any]) -> str:
    versions, stable = results["versions"], results["stable"]
    names = sorted(set(results["maskbridge"]["operators"]) | set(results["torchax"]["operators"]))
    states = {side: {name: state_of(results[side]["operators"].get(name)) for name in names} for side in SIDES}
    right = {side: sum(text == "right" for text in results[side]["models"].values()) for side in SIDES}
    lines = [
        "# Own tracing and torchax",
        "",
        "Written by `make torchax` (`benchmarks/against_torchax.py`), in an environment of its own (`requirements/torchax.txt`).",
        f"Measured on {results['machine']}, {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "Nothing here is a time: each side runs torch code on values of jax in a program of `jax.jit`, and is compared with eager torch.",
        "torchax is in its accuracy mode (64 bits, torch's dtypes, full precision of products).",
        "",
        "## Why torch code is traced by our own table",
        "",
        f"The stable release of torchax, {stable['version']}, cannot be imported with torch {versions['torch']}: `{stable['error']}`."
        if stable["error"]
        else f"The stable release of torchax, {stable['version']}, can be imported with torch {versions['torch']}.",
        f"The table below is of its pre-release {versions['torchax']}. Importing torchax also renames torch's spare backend to `jax` and",
        "switches the fast path of attention off for the whole process, which this package must not do.",
        "",
        "Both sides are near each other on what they implement. What torchax has and this package has not (Bessel functions, some",
        "orthogonal polynomials) can be registered by `torch2jax.implements` ([modules.md](modules.md)).",
        "",
        "## Operators",
        "",
        f"Operators of torch's own test database with samples in float32, at most some {SAMPLES} samples each: values, shapes, dtypes and",
        "gradients (`tests/support/operator_runs.py`). An operator is right if all its samples are.",
        "",
        *table_of(results, state_of, names),
        "",
        '"Another error" is an error from inside that does not name what is refused; torchax\'s `OperatorNotFound` counts as refused.',
        "",
        "## Models",
        "",
        f"Loss and gradients of all parameters to a relative 1e-4: maskbridge {right['maskbridge']} of "
        f"{len(results['maskbridge']['models'])}, torchax {right['torchax']} of {len(results['torchax']['models'])}.",
        "",
        "| model | maskbridge | torchax |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {cell(results['maskbridge']['models'][name])} | {cell(text)} |"
            for name, text in results["torchax"]["models"].items()
        ),
        "",
        "## What differs",
        "",
        "Operators on which the two sides differ.",
        "",
        "| maskbridge | torchax | operators |",
        "| --- | --- | --- |",
    ]
    pairs: dict[tuple[str, str], list[str]] = {}
    for name in names:
        pair = states["maskbridge"][name], states["torchax"][name]
        if pair[0] != pair[1]:
            pairs.setdefault(pair, []).append(name)
    lines += [f"| {a} | {b} | {' '.join(found)} |" for (a, b), found in sorted(pairs.items(), key=lambda item: -len(item[1]))]
    return "\n".join([*lines, ""])


def cell(text: str) -> str:
    return text if text == "right" else f"`{text.replace('|', chr(92) + '|').replace('`', chr(39))}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--stable", type=Path, help="a folder into which the stable torchax is installed")
    parser.add_argument("--report", action="store_true", help="only write the page from the results")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    if given.side:
        run_side(given.side, given.json)
        return
    if not given.report:
        from common import machine

        results: dict[str, Any] = {
            "machine": machine("cpu"),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "stable": {"version": version_at(given.stable) if given.stable else None, "error": imported(given.stable)},
        }
        for side in SIDES:
            path = given.json.with_suffix(f".{side}.json")
            subprocess.run([sys.executable, __file__, "--side", side, "--json", str(path)], check=True)
            results[side] = json.loads(path.read_text())
            path.unlink()
        given.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    given.page.write_text(page(json.loads(given.json.read_text())))


if __name__ == "__main__":
    main()
