import os

# Set before a client is imported: clients must not use the network or a GPU.
os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU"), "1")

import pytest


@pytest.fixture(autouse=True)
def _promotion(standard_promotion):
    """Use standard promotion, as users of the clients do: optax itself fails under strict promotion."""
