"""Select which cases of a long list a run takes."""

import pytest


def sampled(cases):
    """Return the cases as parameters; every second one is marked `nightly`."""
    return [pytest.param(case, marks=[pytest.mark.nightly] * (nth % 2)) for nth, case in enumerate(cases)]
