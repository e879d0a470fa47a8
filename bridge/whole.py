"""Programs in which a leaf has no shape: each element by itself, and sums over all of them.

Of such a program every array as large as the leaf is known by its elements in row-major order, and every array of one
element by that element. Reshaping them does nothing then, so what is left can be compared between a leaf and its flat
buffer, operation by operation; and either serves in the other's place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from .classify import ELEMENTWISE, REDUCTIONS, RESHAPING, body_of, elementwise, keeps_elements, reduces, spreads
from .queries import branches_to_select, is_late, properties_of

_KEEPS_THE_NUMBER = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"})
_PLAIN = ELEMENTWISE | RESHAPING | REDUCTIONS  # one result, and no parameter that is a program
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _each(eqn: Any) -> bool:
    return True


def inlined(jaxpr: Any, consts: Sequence[Any], wanted: Callable[[Any], bool] = _each) -> Any:
    """A traced program with the bodies of the functions that it calls in place of the calls, closed; of those calls that are `wanted`."""
    arguments = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: _run(jaxpr, consts, inputs, wanted))(*arguments)


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """As jax.make_jaxpr(function, return_shape=True)(*arguments), but for what `is_late`."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return inlined(closed.jaxpr, closed.consts, is_late) if properties_of(closed).has_late_call else closed, result


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


def apply(jaxpr: Any, eqn: Any, operands: Sequence[Any], wanted: Callable[[Any], bool] = _each) -> list[Any]:
    """The results of one operation of a program, whatever the shapes there are; of a call that is `wanted`, those of its body."""
    branches = branches_to_select(eqn) if wanted(eqn) else None
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
