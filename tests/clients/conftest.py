import os

# Before a client is imported: nothing here may ask the network, or find a GPU that the tests are not about.
os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU"), "1")

import pytest


@pytest.fixture(autouse=True)
def _promotion(standard_promotion):
    """As the clients' users run: optax itself is not clean under strict promotion."""
