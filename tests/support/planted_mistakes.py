"""Plant one mistake at a time in the main function of a module, and check whether `make check` catches it.

    make mistakes                                              # prints a line for each mistake; takes long
    python tests/support/planted_mistakes.py bridge/_names.py    # only the mistakes of these modules

Each mistake is planted in a copy of the tree. The quick tests run up to the first failure, first those of the module's package; then
lint and types run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENOUGH = 21  # mistakes that must be caught
NO_TESTS = 5  # pytest's exit code if it selects no test

# (file, text that occurs once in it, replacement)
MISTAKES = [
    ("bridge/_names.py", 'return ".".join(str(getattr(key, "key"', 'return "_".join(str(getattr(key, "key"'),
    ("bridge/_process.py", "    return enable_x64(on)\n", "    return enable_x64(not on)\n"),
    ("bridge/_compat/lookup.py", "for end in range(len(parts) - 1, 0, -1))", "for end in range(1))"),
    ("bridge/_ir/queries.py", "for eqn in reversed(jaxpr.eqns):\n        read", "for eqn in jaxpr.eqns:\n        read"),
    ("bridge/_interop/dlpack.py", "key=lambda d: (-strides[d], sizes[d] == 1)", "key=lambda d: (strides[d], sizes[d] == 1)"),
    (
        "bridge/_xla/streams.py",
        "return _copy_program(len(scalars), device)(scalars), [",
        "return -scalars, [",
    ),
    ("bridge/_memory/adoption.py", "return -(-elements // unit) * unit", "return -(-elements // unit) * unit + 1"),
    ("bridge/_memory/scalar_vectors.py", "else np.array(positions)\n", "else np.array(positions[::-1])\n"),
    ("bridge/_transforms/masking.py", "np.logical_not(value)", "np.logical_and(value, True)"),
    (
        "bridge/rules/elementwise.py",
        "denominator = jnp.sqrt(v_max) * cast(1 / ",
        "denominator = jnp.sqrt(v_max) * cast(1 * ",
    ),
    ("bridge/_tracing/promotion.py", "_meta_tensor_of(torch.result_type(x, y), x.ndim)", "_meta_tensor_of(torch.result_type(x, y), 0)"),
    ("bridge/_tracing/ops/scatter.py", "at.add if accumulate else at.set", "at.set if accumulate else at.add"),
    ("bridge/_flax_optim/optimizer.py", "(new_params), OptimizerState(state.step + 1,", "(new_params), OptimizerState(state.step + 2,"),
    ("bridge/_compiler/leaf_update.py", "return jnp.where(mask, new[0], old[0]), state", "return jnp.where(mask, old[0], new[0]), state"),
    ("bridge/_compiler/passes/operand_limit.py", "jax.lax.div(np.ones((), divisor.dtype), divisor)", "divisor"),
    ("bridge/_runtime/in_flight.py", "            buffer.array = array\n", "            buffer.array = buffer.array\n"),
    ("bridge/_autograd/residuals.py", 'known |= {id(v): ("input", i)', 'known |= {id(v): ("input", 0)'),
    ("bridge/_train/loss_jaxpr.py", "through_nondifferentiable=True)", "through_nondifferentiable=False)"),
    ("bridge/_train/passes/float32_sums.py", "jnp.sum(x, axes, jnp.float32)", "jnp.sum(x, axes, dtype)"),
    ("torch_api/_params/hyperparam_table.py", "initial=leaf_update.ONES + 1)", "initial=leaf_update.ONES)"),
    ("torch_api/_rules/from_optax.py", '{"lr": 1.0, **hyperparams}', '{"lr": -1.0, **hyperparams}'),
    ("torch_api/_step/grad_scaler.py", "((grad_scale, 1.0), (found_inf, 0.0))", "((grad_scale, 1.0), (found_inf, 1.0))"),
    ("torch_api/_train/batch.py", "self.arrays.append(real(x))", "self.arrays.append(real(-x))"),
    ("torch_api/presets.py", "    return param.ndim >= 2\n", "    return param.ndim >= 1\n"),
]


def caught(folder: Path, package: str) -> str:
    """Return which step of `make check` catches a mistake in a package of a copied tree; '' if none does."""
    env = os.environ | {"PYTHONPATH": str(folder)}
    quick = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", "-m", "quick and not slow"]
    own = Path("tests", package)
    for name, command in (
        ("tests of the package", [*quick, str(own if (folder / own).exists() else own.parent)]),
        ("tests", quick),
        ("lint", [sys.executable, "-m", "ruff", "check", "."]),
        ("types", [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]),
    ):
        if subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False).returncode not in (0, NO_TESTS):
            return name
    return ""


def main() -> int:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    found = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in tracked:
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            (folder / each).write_bytes((ROOT / each).read_bytes())
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # ruff reads .gitignore only inside a repository
        chosen = [mistake for mistake in MISTAKES if mistake[0] in (sys.argv[1:] or [mistake[0]])]
        for path, right, wrong in chosen:
            text = (ROOT / path).read_text()
            (folder / path).write_text(text.replace(right, wrong))
            start = time.perf_counter()
            by = caught(folder, str(Path(path).parent))
            print(f"{path}: {'caught by ' + by if by else 'NOT CAUGHT'} in {time.perf_counter() - start:.0f} s", flush=True)
            found += bool(by)
            (folder / path).write_text(text)
    print(f"{found} of {len(chosen)} mistakes caught")
    return int(found < min(ENOUGH, len(chosen)))


if __name__ == "__main__":
    raise SystemExit(main())
