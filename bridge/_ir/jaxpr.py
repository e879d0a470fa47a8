"""Trace, inline, slice, evaluate and rewrite jaxprs."""

# jax declares many of its functions in part only, and modules of this project share names that begin with an underscore.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnusedFunction=false

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from .classify import ELEMENTWISE, REDUCTIONS, RESHAPING, UNIFORM_PRESERVING, called_jaxpr
from .queries import branches_to_select, must_inline, properties_of
from .types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, PyTree, Var, aval_of, open_jaxpr

Value = TypeVar("Value")

_BODY_PARAMS = ("jaxpr", "call_jaxpr")
_CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"})
_LOOPS = frozenset({"scan"})


def rewrite_bottom_up(jaxpr: Jaxpr, rewrite: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    """Apply `rewrite` to the jaxprs within a jaxpr, then to the jaxpr itself. A jaxpr that several equations call is rewritten once."""
    known: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def visited(program: Jaxpr) -> Jaxpr:
        if id(program) not in known:
            eqns = [_rewrite_bodies(eqn, visited) for eqn in program.eqns]
            known[id(program)] = program, rewrite(with_eqns(program, eqns))
        return known[id(program)][1]

    return visited(jaxpr)


def with_eqns(jaxpr: Jaxpr, eqns: list[Eqn]) -> Jaxpr:
    """Return the jaxpr with these equations, or the same object where the equations are its own."""
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _rewrite_bodies(eqn: Eqn, rewrite: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """Rewrite each jaxpr that an equation calls or loops over. Return the same equation where none changes."""
    for key, body in jaxpr_params(eqn, _CALLS | _LOOPS):
        new = rewrite(body)
        if new is not body:
            given = eqn.params[key]
            eqn = eqn.replace(params=eqn.params | {key: ClosedJaxpr(new, given.consts) if hasattr(given, "consts") else new})
    return eqn


def jaxpr_params(eqn: Eqn, primitives: frozenset[str] = _CALLS) -> list[tuple[str, Jaxpr]]:
    """Return the jaxprs that an equation calls, each with the name of its parameter. Their inputs are the equation's."""
    keys = [key for key in _BODY_PARAMS if key in eqn.params] if eqn.primitive.name in primitives else []
    return [(key, getattr(eqn.params[key], "jaxpr", eqn.params[key])) for key in keys]


def is_replaceable(eqn: Eqn) -> bool:
    """Return whether another equation may replace this one: it reads no literal and prescribes no sharding of its result."""
    return eqn.params.get("out_sharding") is None and not any(isinstance(v, Literal) for v in eqn.invars)


def replace_eqn(eqn: Eqn, invars: Sequence[Atom], function: Callable[..., jax.Array]) -> Eqn:
    """Return an equation that calls `function` on `invars` and defines the outputs of `eqn`."""
    like = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in invars]
    (call,) = jax.make_jaxpr(jax.jit(function))(*like).jaxpr.eqns
    return call.replace(invars=list(invars), outvars=eqn.outvars, source_info=eqn.source_info)


_BINDABLE = ELEMENTWISE | RESHAPING | REDUCTIONS  # one result, and no jaxpr among the parameters
OBJECT_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _always(eqn: Eqn) -> bool:
    return True


def inline_calls(jaxpr: Jaxpr, consts: Sequence[Array], should_inline: Callable[[Eqn], bool] = _always) -> ClosedJaxpr:
    """Inline the calls for which `should_inline` holds, and close the jaxpr over its constants."""
    arguments = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in jaxpr.invars]

    def run(*inputs: jax.Array) -> list[Array]:
        return _eval_jaxpr(jaxpr, consts, inputs, should_inline)

    return jax.make_jaxpr(run)(*arguments)


def trace_to_jaxpr(function: Callable[..., PyTree], *arguments: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """Trace as `jax.make_jaxpr(function, return_shape=True)(*arguments)`, with every equation inlined for which `must_inline` holds."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return inline_calls(closed.jaxpr, closed.consts, must_inline) if properties_of(closed).has_call_to_inline else closed, result


def select_branch(index: Array, results: Sequence[Sequence[Array]]) -> list[Array]:
    """Select the results of branch `index` from the results of all branches. The index is clamped, as in `jax.lax.switch`."""
    if len(results) == 1:
        return list(results[0])
    which = jax.lax.clamp(np.int32(0), index, np.int32(len(results) - 1))
    return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]


def _eval_jaxpr(
    jaxpr: Jaxpr, consts: Sequence[Array], inputs: Sequence[Array], should_inline: Callable[[Eqn], bool] = _always
) -> list[Array]:
    read = eval_eqns(jaxpr.eqns, initial_env(jaxpr, consts, inputs), lambda eqn, operands: eval_eqn(jaxpr, eqn, operands, should_inline))
    return list(map(read, jaxpr.outvars))


def initial_env(jaxpr: Jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> dict[Var, Value]:
    """Return the values of the constants and inputs by variable, from which the evaluation of a jaxpr begins."""
    return dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))


def eval_eqns(
    eqns: Iterable[Eqn], env: dict[Var, Value], evaluate: Callable[[Eqn, list[Value | np.ndarray]], Iterable[Value]]
) -> Callable[[Atom], Value | np.ndarray]:
    """Evaluate equations in order with an interpreter, and return a function that reads the value of a variable or literal.

    Args:
      eqns: the equations.
      env: the values of variables; results are added.
      evaluate: from an equation and the values of its operands to the values of its outputs.
    """

    def read(v: Atom) -> Value | np.ndarray:
        return literal_value(v) if isinstance(v, Literal) else env[v]

    for eqn in eqns:
        env |= zip(eqn.outvars, evaluate(eqn, list(map(read, eqn.invars))), strict=True)
    return read


def eval_eqn(jaxpr: Jaxpr, eqn: Eqn, operands: Sequence[Array], should_inline: Callable[[Eqn], bool] = _always) -> list[Array]:
    """Return the results of one equation. Operands may have other shapes than in the jaxpr. Inline it if `should_inline` holds."""
    branches = branches_to_select(eqn) if should_inline(eqn) else None
    if branches is not None:
        return select_branch(operands[0], [_eval_jaxpr(each.jaxpr, each.consts, operands[1:], should_inline) for each in branches])
    body = called_jaxpr(eqn) if should_inline(eqn) else None
    if body is not None:
        return _eval_jaxpr(open_jaxpr(body), getattr(body, "consts", ()), operands, should_inline)
    if eqn.primitive.name in _BINDABLE:
        return bind(eqn, *(v.val if isinstance(v, Literal) else x for v, x in zip(eqn.invars, operands, strict=True)))
    given = [(v, x) for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)]
    alone = jaxpr.replace(constvars=[], invars=[v for v, _ in given], outvars=eqn.outvars, eqns=[eqn])
    function = cast(Callable[..., list[Array]], jaxpr_as_fun(ClosedJaxpr(alone, [])))
    return function(*(x for _, x in given))


def bind(eqn: Eqn, *operands: Array) -> list[Array]:
    """Bind the primitive of an equation that has no jaxpr among its parameters, and return the results as a list."""
    found = cast(PyTree, eqn.primitive.bind(*operands, **eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def literal_value(var: Literal) -> np.ndarray:
    """Return the value of a literal in its dtype."""
    return np.asarray(var.val, aval_of(var).dtype)


def backward_slice(eqns: Sequence[Eqn], outputs: Iterable[Atom], available: Iterable[Var] = ()) -> list[Eqn]:
    """Return the equations, in order, that compute the variables `outputs` from the variables `available` and the inputs."""
    return make_slicer(eqns)(outputs, set(available))


class Slicer(Protocol):
    """The type of the functions that `make_slicer` returns."""

    def __call__(self, outputs: Iterable[Atom], available: Container[Var] = frozenset()) -> list[Eqn]: ...


def make_slicer(eqns: Sequence[Eqn]) -> Slicer:
    """Return a function like `backward_slice` for these equations. Their index is built once; `available` is a set."""
    defining_eqns = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    def slice_to(outputs: Iterable[Atom], available: Container[Var] = frozenset()) -> list[Eqn]:
        todo, found = [v for v in outputs if not isinstance(v, Literal)], set[int]()
        while todo:
            v = todo.pop()
            i = None if v in available else defining_eqns.get(v)
            if i is not None and i not in found:
                found.add(i)
                todo += [u for u in eqns[i].invars if not isinstance(u, Literal)]
        return [eqns[i] for i in sorted(found)]

    return slice_to


def producer(var: Atom, defining_eqns: Mapping[Var, Eqn], is_elementwise: Callable[[Eqn], bool], is_array: Callable[[Var], bool]) -> Atom:
    """Return the array that `var` is computed from by equations that read one array each, and scalars.

    To store this array is enough: `var` can be computed again from it.
    """
    while isinstance(var, Var) and var in defining_eqns and is_elementwise(defining_eqns[var]):
        arrays = {v for v in defining_eqns[var].invars if not isinstance(v, Literal) and is_array(v)}
        if len(arrays) != 1:
            break
        (var,) = arrays
    return var


def uniform_values(jaxpr: Jaxpr) -> Callable[[Atom], np.generic | None]:
    """Return a function from a variable to the scalar that all its elements equal, in the variable's dtype, or to None."""
    defining_eqns = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def uniform_value(var: Atom) -> np.generic | None:
        if isinstance(var, Literal):
            return cast(np.generic, literal_value(var)[()]) if np.ndim(var.val) == 0 else None
        eqn = defining_eqns.get(var)
        source = uniform_value(eqn.invars[0]) if eqn is not None and eqn.primitive.name in UNIFORM_PRESERVING else None
        return None if source is None else cast(np.generic, np.asarray(source).astype(aval_of(var).dtype)[()])

    return uniform_value


_OUTLINED_NAME = "maskbridge_part"


def outlined(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Jit a function under a name that the outliner knows. The function is traced once, and each call stays one equation.

    All that differs from call to call must be an argument.
    """

    def maskbridge_part(*arguments: PyTree) -> PyTree:
        return function(*arguments)

    return jax.jit(maskbridge_part)


def is_outlined(eqn: Eqn) -> bool:
    return eqn.params.get("name") == _OUTLINED_NAME and called_jaxpr(eqn) is not None
