"""The equations of a jaxpr, for tests that look for some of them."""

from bridge._ir.queries import jaxprs_in_params


def operations(jaxpr):
    """All equations, those of a function that is called more than once but once."""
    programs, seen = [jaxpr], {id(jaxpr)}
    for program in programs:
        for eqn in program.eqns:
            yield eqn
            new = [body for body in jaxprs_in_params(eqn) if id(body) not in seen]
            seen.update(map(id, new))
            programs += new
