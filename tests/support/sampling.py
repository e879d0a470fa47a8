"""Select which cases of a long list a run takes."""

import pytest


def sampled(cases, names=(), every=None):
    """Return the cases as parameters; some are marked `nightly`. `names`: their ids.

    Each case whose number is a multiple of `every` runs always. Without it that is every second case, of a list of more than four every
    third one, and of more than twelve every fourth one.
    """
    ids = list(names) or [None] * len(cases)
    return [pytest.param(case, marks=marks, id=name) for case, marks, name in zip(cases, _marks(len(cases), every), ids, strict=True)]


def sampled_tuples(cases):
    """Return cases of several parameters as `sampled` does."""
    return [pytest.param(*case, marks=marks) for case, marks in zip(cases, _marks(len(cases)), strict=True)]


def _marks(count, every=None):
    every = every or (4 if count > 12 else 3 if count > 4 else 2)
    return [[pytest.mark.nightly] * (nth % every > 0) for nth in range(count)]
