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
