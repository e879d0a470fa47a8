"""Equations and text of jaxprs, for tests that search them."""

import re

import jax
import pytest

from bridge._ir.queries import jaxprs_in_params

# Parameters of equations that have their default value almost everywhere.
_USUAL = re.compile(r"\b(weak_type|dimensions|sharding|out_sharding|strides|fill_value|indices_are_sorted|unique_indices)=(None|False) ?")


def operations(jaxpr):
    """Yield all equations; equations of a shared function are yielded once."""
    programs, seen = [jaxpr], {id(jaxpr)}
    for program in programs:
        for eqn in program.eqns:
            yield eqn
            new = [body for body in jaxprs_in_params(eqn) if id(body) not in seen]
            seen.update(map(id, new))
            programs += new


def printed(jaxpr):
    """Return the jaxpr's text without default parameters; skip the test under jax versions that name variables differently."""
    if jax.__version_info__[:2] != (0, 10):
        pytest.skip("the expected text is that of jax 0.10")
    lines = (line.rstrip() for line in re.sub(r"\s+\]", "]", _USUAL.sub("", str(jaxpr))).splitlines())
    return "\n".join(filter(None, lines))
