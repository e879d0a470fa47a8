import os

# Before jax starts: tests run on the CPU unless they are told otherwise, and every implicit promotion is an error.
os.environ.setdefault("JAX_PLATFORMS", "" if os.environ.get("MASKBRIDGE_TEST_GPU") else "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

import jax
import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def standard_promotion():
    """As optax's users run: optax itself is not clean under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def pytest_terminal_summary(terminalreporter):
    """How many configurations and errors of torch's optimizer database passed, also when xdist's workers ran them."""
    counts = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, kind in getattr(report, "user_properties", ()):
                if name == "optim_db" and report.when == "call":
                    counts.setdefault(kind, {"passed": 0, "failed": 0})[outcome] += 1
    for kind, n in counts.items():
        terminalreporter.write_line(f"optim_db: {n['passed']} of {n['passed'] + n['failed']} {kind} inputs as in torch.optim")
