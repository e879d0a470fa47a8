"""Programs in which a leaf has no shape: each element by itself, and sums over all of them.

Of such a program every array as large as the leaf is known by its elements in row-major order, and every array of one
element by that element. Reshaping them does nothing then, so what is left can be compared between a leaf and its flat
buffer, operation by operation; and either serves in the other's place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

# fmt: off
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge",
    "gt", "igamma", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pow", "real", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})
# fmt: on
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
_RESHAPING = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
_JOINS = frozenset({"concatenate", "stack"})  # of a single operand they give it another shape
_KEEPS_THE_NUMBER = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"})
_PLAIN = ELEMENTWISE | _RESHAPING | REDUCTIONS  # one result, and no parameter that is a program
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def _each(eqn: Any) -> bool:
    return True


def inlined(jaxpr: Any, consts: Sequence[Any], wanted: Callable[[Any], bool] = _each) -> Any:
    """A traced program with the bodies of the functions that it calls in place of the calls, closed; of those calls that are `wanted`."""
    arguments = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: _run(jaxpr, consts, inputs, wanted))(*arguments)


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """As jax.make_jaxpr(function, return_shape=True)(*arguments), but for what `_is_opened`."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return inlined(closed.jaxpr, closed.consts, _is_opened) if any(map(_is_opened, closed.jaxpr.eqns)) else closed, result


def _is_opened(eqn: Any) -> bool:
    """Whether something else stands in an operation's place: what is `beside` each other, and functions that are jitted to be inlined."""
    body = body_of(eqn)
    return _is_late(eqn) or beside(eqn) is not None or (body is not None and any(map(_is_opened, getattr(body, "jaxpr", body).eqns)))


def _is_late(eqn: Any) -> bool:
    """Whether jax keeps a call until it lowers the program: jax 0.11 does so with optax's bias correction, one of all leaves."""
    return getattr(eqn.params.get("inline"), "name", "") == "JAX_LATE"


def beside(eqn: Any) -> Any:
    """The branches of a conditional that may all be evaluated, one result chosen: they take each element by itself.

    XLA runs a branch as a program of its own, which stores what it is given and what it gives: optax.MultiSteps(optax.adam(...), k) moved
    68 bytes a float32 parameter, not 36. Of an index that is a constant that branch alone. None of another operation.
    """
    if eqn.primitive.name != "cond":
        return None
    branches, index = eqn.params["branches"], eqn.invars[0]
    if isinstance(index, Literal):
        branches = (branches[min(max(int(index.val), 0), len(branches) - 1)],)
    return branches if len(branches) == 1 or all(_by_elements(branch.jaxpr) for branch in branches) else None


def _by_elements(jaxpr: Any) -> bool:
    """Whether a program has no effects, and only operations on elements and on numbers by themselves, in whatever shape."""
    if jaxpr.effects:
        return False
    for eqn in jaxpr.eqns:
        body = body_of(eqn)
        simple = eqn.primitive.name in ELEMENTWISE | _RESHAPING if body is None else _by_elements(getattr(body, "jaxpr", body))
        if not simple and beside(eqn) is None:
            return False
    return True


def chosen(index: Any, results: Sequence[Sequence[Any]]) -> list[Any]:
    """Of the results of branches `beside` each other those of one."""
    if len(results) == 1:
        return list(results[0])
    which = jax.lax.clamp(np.int32(0), index, np.int32(len(results) - 1))
    return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]


def _run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], wanted: Callable[[Any], bool] = _each) -> list[Any]:
    read = in_turn(jaxpr.eqns, at_start(jaxpr, consts, inputs), lambda eqn, operands: apply(jaxpr, eqn, operands, wanted))
    return list(map(read, jaxpr.outvars))


def at_start(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, Any]:
    """The values of a program before its first operation."""
    return dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))


def in_turn(eqns: Iterable[Any], values: dict[Any, Any], found: Callable[[Any, list[Any]], Iterable[Any]]) -> Callable[[Any], Any]:
    """Operations one after the other, what is `found` for each from its operands among the values from then on; what reads those."""
    read = lambda v: literal(v) if isinstance(v, Literal) else values[v]  # noqa: E731
    for eqn in eqns:
        values |= zip(eqn.outvars, found(eqn, list(map(read, eqn.invars))), strict=True)
    return read


def body_of(eqn: Any) -> Any:
    """The function that an operation calls; None of one that calls none."""
    return eqn.params.get(_CALLS.get(eqn.primitive.name, ""))


def apply(jaxpr: Any, eqn: Any, operands: Sequence[Any], wanted: Callable[[Any], bool] = _each) -> list[Any]:
    """The results of one operation of a program, whatever the shapes there are; of a call that is `wanted`, those of its body."""
    branches = beside(eqn) if wanted(eqn) else None
    if branches is not None:
        return chosen(operands[0], [_run(each.jaxpr, each.consts, operands[1:], wanted) for each in branches])
    body = body_of(eqn) if wanted(eqn) else None
    if body is not None:
        return _run(getattr(body, "jaxpr", body), getattr(body, "consts", ()), operands, wanted)
    if eqn.primitive.name in _PLAIN:
        return bound(eqn, *(v.val if isinstance(v, Literal) else x for v, x in zip(eqn.invars, operands, strict=True)))
    given = [(v, x) for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)]
    alone = jaxpr.replace(constvars=[], invars=[v for v, _ in given], outvars=eqn.outvars, eqns=[eqn])
    return jaxpr_as_fun(ClosedJaxpr(alone, []))(*(x for _, x in given))


def bound(eqn: Any, *operands: Any) -> list[Any]:
    """The results of an operation that has no program among its parameters."""
    found = eqn.primitive.bind(*operands, **eqn.params)
    return list(found) if eqn.primitive.multiple_results else [found]


def literal(var: Any) -> Any:
    """The value of a literal in its type."""
    return np.asarray(var.val, var.aval.dtype)


def slice_of(eqns: Sequence[Any], wanted: Iterable[Any], given: Iterable[Any] = ()) -> list[Any]:
    """The operations, in order, that the `wanted` variables need where those of `given` are there."""
    return slices(eqns)(wanted, set(given))


def slices(eqns: Sequence[Any]) -> Callable[..., list[Any]]:
    """`slice_of` these operations, made ready to be asked for many times, with `given` a set."""
    made = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    def behind(wanted: Iterable[Any], given: Any = frozenset()) -> list[Any]:
        todo, found = [v for v in wanted if not isinstance(v, Literal)], set()
        while todo:
            v = todo.pop()
            i = None if v in given else made.get(v)
            if i is not None and i not in found:
                found.add(i)
                todo += [u for u in eqns[i].invars if not isinstance(u, Literal)]
        return [eqns[i] for i in sorted(found)]

    return behind


def source(var: Any, made: Mapping[Any, Any], by_element: Callable[[Any], bool], is_array: Callable[[Any], bool]) -> Any:
    """What an array is computed from alone, by itself or with numbers: the array that is worth storing."""
    while var in made and by_element(made[var]):
        arrays = {v for v in made[var].invars if not isinstance(v, Literal) and is_array(v)}
        if len(arrays) != 1:
            break
        (var,) = arrays
    return var


def numbers_of(jaxpr: Any) -> Callable[[Any], Any]:
    """For a variable the one number that all its elements are, in its type; None where there is no such number."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def number(var: Any) -> Any:
        if isinstance(var, Literal):
            return literal(var)[()] if np.ndim(var.val) == 0 else None
        eqn = made.get(var)
        source = number(eqn.invars[0]) if eqn is not None and eqn.primitive.name in _KEEPS_THE_NUMBER else None
        aval: Any = var.aval
        return None if source is None else np.asarray(source).astype(aval.dtype)[()]

    return number


def unread(jaxpr: Any, count: int) -> set[Any]:
    """Those of the first inputs, so many, that no result needs."""
    found: dict[int, list[bool]] = {}  # of a function that is called, for each of its inputs

    def reads(program: Any) -> list[bool]:
        if id(program) not in found:
            needed = {v for v in program.outvars if not isinstance(v, Literal)}
            for eqn in slice_of(program.eqns, program.outvars):
                body = body_of(eqn)
                read = eqn.invars if body is None else compress(eqn.invars, reads(getattr(body, "jaxpr", body)))
                needed |= {v for v in read if not isinstance(v, Literal)}
            found[id(program)] = [v in needed for v in program.invars]
        return found[id(program)]

    return {v for v, needed in zip(jaxpr.invars[:count], reads(jaxpr)[:count], strict=True) if not needed}


def keeps_elements(eqn: Any) -> bool:
    """Whether the result has the elements of the first operand, in their order: as large as it, but maybe of another shape."""
    turned = eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None
    return eqn.primitive.name in _RESHAPING and not turned and eqn.invars[0].aval.size == eqn.outvars[0].aval.size


def spreads(eqn: Any, size: int) -> bool:
    """Whether one number becomes all elements of a leaf."""
    return eqn.primitive.name == "broadcast_in_dim" and (eqn.invars[0].aval.size, eqn.outvars[0].aval.size) == (1, size)


def fuses(eqn: Any) -> bool:
    """Whether each element of the result is computed from one of each operand, or is one of them: XLA does that in whatever reads it."""
    name = eqn.primitive.name
    return name in ELEMENTWISE or name in _RESHAPING or (name in _JOINS and len(eqn.invars) == 1)


def reduces(eqn: Any, size: int) -> bool:
    """Whether all elements of a leaf become one number, whatever their order."""
    return eqn.primitive.name in REDUCTIONS and (eqn.invars[0].aval.size, eqn.outvars[0].aval.size) == (size, 1)


def elementwise(eqn: Any, size: int) -> bool:
    """Whether each element of the result is computed from that element of leaves, and from single numbers."""
    return eqn.primitive.name in ELEMENTWISE and {v.aval.size for v in (*eqn.invars, *eqn.outvars)} <= {1, size}


class Shapeless:
    """What a program computes for one leaf, without the leaf's shape.

    Args:
      closed: a program as of `inlined`.
      size: how many elements the leaf has, more than 1.
      inputs: by variable what an input is called, and whether it is as large as the leaf, element for element.
    """

    def __init__(self, closed: Any, size: int, inputs: Mapping[Any, tuple[str, bool]]) -> None:
        self._closed, self._size = closed, size
        constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        self._names = {var: (constant_text(value) + kind_text(var.aval), False) for var, value in constants} | dict(inputs)

    def text(self, results: Sequence[tuple[str, Any]]) -> str | None:
        """The results by name, after one line for each operation; None where an operation knows more than the leaf's elements."""
        names, lines = dict(self._names), []
        value = lambda v: v.val if np.ndim(v.val) == 0 else constant_text(v.val)  # noqa: E731
        read = lambda v: (f"{value(v)}:{kind_text(v.aval)}", False) if isinstance(v, Literal) else names[v]  # noqa: E731
        for eqn in slice_of(self._closed.jaxpr.eqns, [var for _, var in results]):
            operands = [read(v) for v in eqn.invars]
            line, of_leaf = self._line(eqn, operands)
            if line is None:
                return None
            if keeps_elements(eqn) and (of_leaf or eqn.outvars[0].aval.size == 1):
                names[eqn.outvars[0]] = operands[0]
                continue
            for position, out in enumerate(eqn.outvars):
                names[out] = f"%{len(lines)}.{position}", of_leaf
            lines.append(line)
        return "\n".join([*lines, *(f"{name} = {read(var)[0]}" for name, var in results)])

    def _line(self, eqn: Any, operands: Sequence[tuple[str, bool]]) -> tuple[str | None, bool]:
        """An operation without the leaf's shape, and whether its results are as large as the leaf; None where that cannot be."""
        size, of_leaf = self._size, any(large for _, large in operands)
        dtypes = [str(v.aval.dtype) for v in eqn.outvars]
        plain = f"{eqn.primitive.name} {[name for name, _ in operands]} -> {dtypes}"
        if elementwise(eqn, size) and all(large or v.aval.size == 1 for v, (_, large) in zip(eqn.invars, operands, strict=True)):
            return f"{plain} {params_text(eqn.params)}", of_leaf
        if spreads(eqn, size):
            return f"spread {plain}", True
        if of_leaf:
            if reduces(eqn, size):
                return plain, False
            return (plain if keeps_elements(eqn) else None), True
        exact = [kind_text(v.aval) for v in (*eqn.invars, *eqn.outvars)]
        return f"{plain} {params_text(eqn.params)} {exact}", False


def params_text(params: Mapping[str, Any], like: tuple[int, ...] | None = None) -> str:
    """The parameters of an operation; the shape `like` as L."""
    return ", ".join(f"{name}={_param(value, like)}" for name, value in sorted(params.items()))


def _param(value: Any, like: tuple[int, ...] | None = None) -> str:
    if isinstance(value, tuple) and value == like:
        return "L"
    if isinstance(value, tuple | list):
        return f"({', '.join(_param(v, like) for v in value)})"
    body = getattr(value, "jaxpr", value)
    if hasattr(body, "eqns"):
        names = {var: f"a{i}" for i, var in enumerate((*body.constvars, *body.invars))}
        read = lambda v: f"{v.val}:{kind_text(v.aval, like)}" if isinstance(v, Literal) else names[v]  # noqa: E731
        lines = []
        for n, eqn in enumerate(body.eqns):
            operands = ", ".join(map(read, eqn.invars))
            kinds = [kind_text(v.aval, like) for v in eqn.outvars]
            lines.append(f"{eqn.primitive.name}[{params_text(eqn.params, like)}] {operands} -> {kinds}")
            names |= {out: f"%{n}.{i}" for i, out in enumerate(eqn.outvars)}
        constants = list(map(constant_text, getattr(value, "consts", ())))
        return f"{{{constants} {'; '.join(lines)} => {', '.join(map(read, body.outvars))}}}"
    return _ADDRESS.sub("", str(value))


def kind_text(aval: Any, like: tuple[int, ...] | None = None) -> str:
    """The type of an array; the shape `like` as L."""
    shape = getattr(aval, "shape", None)
    return (
        f"{getattr(aval, 'dtype', aval)}{'L' if shape == like and shape != () else shape}{'w' if getattr(aval, 'weak_type', False) else ''}"
    )


def constant_text(value: Any) -> str:
    """All bytes of an array."""
    data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return f"const{np.asarray(data).tobytes()!r}"
