"""Select which cases of a long list a run takes."""

import pytest


def sampled(cases, names=()):
    """Return the cases as parameters; every second one is marked `nightly`. `names`: their ids."""
    ids = list(names) or [None] * len(cases)
    return [pytest.param(case, marks=[pytest.mark.nightly] * (nth % 2), id=ids[nth]) for nth, case in enumerate(cases)]


def sampled_tuples(cases):
    """Return cases of several parameters as `sampled` does."""
    return [pytest.param(*case, marks=[pytest.mark.nightly] * (nth % 2)) for nth, case in enumerate(cases)]
