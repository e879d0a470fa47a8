"""The equations and the text of a jaxpr, for tests that look for some of them."""

import re

import jax
import pytest

from bridge._ir.queries import jaxprs_in_params

# Parameters that have the value which they have nearly everywhere.
_USUAL = re.compile(r"\b(weak_type|dimensions|sharding|out_sharding|strides|fill_value|indices_are_sorted|unique_indices)=(None|False) ?")


def operations(jaxpr):
    """All equations, those of a function that is called more than once but once."""
    programs, seen = [jaxpr], {id(jaxpr)}
    for program in programs:
        for eqn in program.eqns:
            yield eqn
            new = [body for body in jaxprs_in_params(eqn) if id(body) not in seen]
            seen.update(map(id, new))
            programs += new


def printed(jaxpr):
    """The text of a jaxpr, without parameters that have their usual value; skips the test where jax names variables in another way."""
    if jax.__version_info__[:2] != (0, 10):
        pytest.skip("the expected text is that of jax 0.10")
    lines = (line.rstrip() for line in re.sub(r"\s+\]", "]", _USUAL.sub("", str(jaxpr))).splitlines())
    return "\n".join(filter(None, lines))
