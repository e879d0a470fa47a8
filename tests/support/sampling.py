"""Select which cases of a long list a run takes."""

import pytest


def sampled(cases, names=()):
    """Return the cases as parameters; some are marked `nightly`. `names`: their ids.

    Every second case runs always, and of a list of more than eight every third one.
    """
    ids = list(names) or [None] * len(cases)
    return [pytest.param(case, marks=marks, id=name) for case, marks, name in zip(cases, _marks(len(cases)), ids, strict=True)]


def sampled_tuples(cases):
    """Return cases of several parameters as `sampled` does."""
    return [pytest.param(*case, marks=marks) for case, marks in zip(cases, _marks(len(cases)), strict=True)]


def _marks(count):
    every = 3 if count > 8 else 2
    return [[pytest.mark.nightly] * (nth % every > 0) for nth in range(count)]
