"""Traced programs as data: trace, inline, slice, evaluate and rewrite a jaxpr."""

# jax declares many of its functions in part only, and modules of ours share names that begin with an underscore.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnusedFunction=false

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from .classify import _KEEPS_THE_NUMBER, ELEMENTWISE, REDUCTIONS, RESHAPING, body_of
from .queries import branches_to_select, is_late, properties_of
from .types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, PyTree, Var, aval_of, open_jaxpr

Value = TypeVar("Value")

_BODIES = ("jaxpr", "call_jaxpr")
_CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"})
_LOOPS = frozenset({"scan"})


def throughout(jaxpr: Jaxpr, rewrite: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    """`rewrite` of a program, behind that of those within it; each once, however often it is called."""
    known: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def visited(program: Jaxpr) -> Jaxpr:
        if id(program) not in known:
            eqns = [_inside(eqn, visited) for eqn in program.eqns]
            known[id(program)] = program, rewrite(replaced(program, eqns))
        return known[id(program)][1]

    return visited(jaxpr)


def replaced(jaxpr: Jaxpr, eqns: list[Eqn]) -> Jaxpr:
    """The program of these operations; itself where they are its own."""
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _inside(eqn: Eqn, rewrite: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """The operation with each program within it rewritten; itself where that changes none."""
    for key, body in bodies(eqn, _CALLS | _LOOPS):
        new = rewrite(body)
        if new is not body:
            given = eqn.params[key]
            eqn = eqn.replace(params=eqn.params | {key: ClosedJaxpr(new, given.consts) if hasattr(given, "consts") else new})
    return eqn


def bodies(eqn: Eqn, names: frozenset[str] = _CALLS) -> list[tuple[str, Jaxpr]]:
    """The programs within an operation, by parameter, whose arguments are the operation's."""
    keys = [key for key in _BODIES if key in eqn.params] if eqn.primitive.name in names else []
    return [(key, getattr(eqn.params[key], "jaxpr", eqn.params[key])) for key in keys]


def is_plain(eqn: Eqn) -> bool:
    """Whether another operation may stand for this one: it reads no literal and says nothing of how its result is shared out."""
    return eqn.params.get("out_sharding") is None and not any(isinstance(v, Literal) for v in eqn.invars)


def instead(eqn: Eqn, invars: Sequence[Atom], function: Callable[..., jax.Array]) -> Eqn:
    """A call of another function in the place of an operation."""
    like = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in invars]
    (call,) = jax.make_jaxpr(jax.jit(function))(*like).jaxpr.eqns
    return call.replace(invars=list(invars), outvars=eqn.outvars, source_info=eqn.source_info)


_PLAIN = ELEMENTWISE | RESHAPING | REDUCTIONS  # one result, and no parameter that is a program
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _each(eqn: Eqn) -> bool:
    return True


def inlined(jaxpr: Jaxpr, consts: Sequence[Array], wanted: Callable[[Eqn], bool] = _each) -> ClosedJaxpr:
    """A traced program with the bodies of the functions that it calls in place of the calls, closed; of those calls that are `wanted`."""
    arguments = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in jaxpr.invars]

    def run(*inputs: jax.Array) -> list[Array]:
        return _run(jaxpr, consts, inputs, wanted)

    return jax.make_jaxpr(run)(*arguments)


def traced(function: Callable[..., PyTree], *arguments: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """As jax.make_jaxpr(function, return_shape=True)(*arguments), but for what `is_late`."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return inlined(closed.jaxpr, closed.consts, is_late) if properties_of(closed).has_late_call else closed, result


def chosen(index: Array, results: Sequence[Sequence[Array]]) -> list[Array]:
    """Of the results of branches `beside` each other those of one."""
    if len(results) == 1:
        return list(results[0])
    which = jax.lax.clamp(np.int32(0), index, np.int32(len(results) - 1))
    return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]


def _run(jaxpr: Jaxpr, consts: Sequence[Array], inputs: Sequence[Array], wanted: Callable[[Eqn], bool] = _each) -> list[Array]:
    read = in_turn(jaxpr.eqns, at_start(jaxpr, consts, inputs), lambda eqn, operands: apply(jaxpr, eqn, operands, wanted))
    return list(map(read, jaxpr.outvars))


def at_start(jaxpr: Jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> dict[Var, Value]:
    """The values of a program before its first operation."""
    return dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))


def in_turn(
    eqns: Iterable[Eqn], values: dict[Var, Value], found: Callable[[Eqn, list[Value | np.ndarray]], Iterable[Value]]
) -> Callable[[Atom], Value | np.ndarray]:
    """Operations one after the other, what is `found` for each from its operands among the values from then on; what reads those."""

    def read(v: Atom) -> Value | np.ndarray:
        return literal(v) if isinstance(v, Literal) else values[v]

    for eqn in eqns:
        values |= zip(eqn.outvars, found(eqn, list(map(read, eqn.invars))), strict=True)
    return read


def apply(jaxpr: Jaxpr, eqn: Eqn, operands: Sequence[Array], wanted: Callable[[Eqn], bool] = _each) -> list[Array]:
    """The results of one operation of a program, whatever the shapes there are; of a call that is `wanted`, those of its body."""
    branches = branches_to_select(eqn) if wanted(eqn) else None
    if branches is not None:
        return chosen(operands[0], [_run(each.jaxpr, each.consts, operands[1:], wanted) for each in branches])
    body = body_of(eqn) if wanted(eqn) else None
    if body is not None:
        return _run(open_jaxpr(body), getattr(body, "consts", ()), operands, wanted)
    if eqn.primitive.name in _PLAIN:
        return bound(eqn, *(v.val if isinstance(v, Literal) else x for v, x in zip(eqn.invars, operands, strict=True)))
    given = [(v, x) for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)]
    alone = jaxpr.replace(constvars=[], invars=[v for v, _ in given], outvars=eqn.outvars, eqns=[eqn])
    function = cast(Callable[..., list[Array]], jaxpr_as_fun(ClosedJaxpr(alone, [])))
    return function(*(x for _, x in given))


def bound(eqn: Eqn, *operands: Array) -> list[Array]:
    """The results of an operation that has no program among its parameters."""
    found = cast(PyTree, eqn.primitive.bind(*operands, **eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def literal(var: Literal) -> np.ndarray:
    """The value of a literal in its type."""
    return np.asarray(var.val, aval_of(var).dtype)


def slice_of(eqns: Sequence[Eqn], wanted: Iterable[Atom], given: Iterable[Var] = ()) -> list[Eqn]:
    """The operations, in order, that the `wanted` variables need where those of `given` are there."""
    return slices(eqns)(wanted, set(given))


class Slices(Protocol):
    """A function as of `slices`."""

    def __call__(self, wanted: Iterable[Atom], given: Container[Var] = frozenset()) -> list[Eqn]: ...


def slices(eqns: Sequence[Eqn]) -> Slices:
    """`slice_of` these operations, made ready to be asked for many times, with `given` a set."""
    made = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    def behind(wanted: Iterable[Atom], given: Container[Var] = frozenset()) -> list[Eqn]:
        todo, found = [v for v in wanted if not isinstance(v, Literal)], set[int]()
        while todo:
            v = todo.pop()
            i = None if v in given else made.get(v)
            if i is not None and i not in found:
                found.add(i)
                todo += [u for u in eqns[i].invars if not isinstance(u, Literal)]
        return [eqns[i] for i in sorted(found)]

    return behind


def source(var: Atom, made: Mapping[Var, Eqn], by_element: Callable[[Eqn], bool], is_array: Callable[[Var], bool]) -> Atom:
    """What an array is computed from alone, by itself or with numbers: the array that is worth storing."""
    while isinstance(var, Var) and var in made and by_element(made[var]):
        arrays = {v for v in made[var].invars if not isinstance(v, Literal) and is_array(v)}
        if len(arrays) != 1:
            break
        (var,) = arrays
    return var


def numbers_of(jaxpr: Jaxpr) -> Callable[[Atom], np.generic | None]:
    """For a variable the one number that all its elements are, in its type; None where there is no such number."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def number(var: Atom) -> np.generic | None:
        if isinstance(var, Literal):
            return cast(np.generic, literal(var)[()]) if np.ndim(var.val) == 0 else None
        eqn = made.get(var)
        source = number(eqn.invars[0]) if eqn is not None and eqn.primitive.name in _KEEPS_THE_NUMBER else None
        return None if source is None else cast(np.generic, np.asarray(source).astype(aval_of(var).dtype)[()])

    return number


_NAME = "maskbridge_part"


def part(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The function, traced once; each call of it stays one in the program. What differs from call to call are its arguments."""

    def maskbridge_part(*arguments: PyTree) -> PyTree:
        return function(*arguments)

    return jax.jit(maskbridge_part)


def _is_part(eqn: Eqn) -> bool:
    return eqn.params.get("name") == _NAME and body_of(eqn) is not None
