"""Which cases of a long list each run takes."""

import pytest


def sampled(cases):
    """Every second case for each run, the others for `make nightly`."""
    return [pytest.param(case, marks=[pytest.mark.nightly] * (nth % 2)) for nth, case in enumerate(cases)]
