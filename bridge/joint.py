"""The update of leaves that one transformation must see together, as a global norm makes it: first what looks across elements.

XLA would store what lies between, and run its loops over each leaf in the leaf's own shape, in which no result can lie where its
argument did. Here the traced update is written for flat leaves and cut in two: what must be known before, evaluated once, and the
rest of each leaf, which takes each element by itself and is evaluated as often as XLA needs to write all results in one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from .evaluate import Arrays
from .leaf_update import unless
from .problem import times
from .split import Alike, for_each
from .whole import (
    REDUCTIONS,
    apply,
    body_of,
    elementwise,
    keeps_elements,
    kind_text,
    literal,
    params_text,
    slice_of,
    slices,
    source,
    spreads,
)


class Old(NamedTuple):
    """What a leaf was: its flat array, its arrays and numbers of state, which of those have its shape, and its mask of elements or None."""

    param: Any
    state: Sequence[Any]
    shaped: Sequence[bool]
    mask: Any


def updated(function: Callable[[Any], Arrays], inputs: Any, old: Sequence[Old], ones: Any, skip: Any, fused: bool) -> Arrays:
    """The function's arrays, flat: where a mask is False, or all is skipped, the old ones; its shared state as it comes.

    Args:
      function: of `inputs`, a pytree of flat arrays and numbers.
      inputs: what it takes.
      old: the leaves.
      ones: traced 1.0s.
      skip: whether to keep everything, or None.
      fused: whether XLA is asked to write several results from one loop.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    closed, result = jax.make_jaxpr(function, return_shape=True)(shapes)
    if closed.effects:  # a callback is called once
        return settled(function(inputs), old, skip)
    given, structure = jax.tree.leaves(inputs), jax.tree.structure(result)
    flat = jax.make_jaxpr(lambda *arguments: _flat(closed.jaxpr, closed.consts, arguments))(*jax.tree.leaves(shapes))
    jaxpr, outvars, known = flat.jaxpr, flat.jaxpr.outvars, _known(flat.jaxpr)
    behind, is_known = slices(jaxpr.eqns), set(known)
    places: Arrays = structure.unflatten(range(structure.num_leaves))
    leaves = []
    for leaf, p, own in zip(old, places.params, places.own, strict=True):
        shaped = [(p, leaf.param), *((at, x) for at, x, like in zip(own, leaf.state, leaf.shaped, strict=True) if like)]
        rest = _Leaf.of(behind, is_known, [(at, outvars[at]) for at, _ in shaped], leaf.param.size, fused)
        leaves.append((rest, dict(shaped), leaf.mask))
    apart = {at for leaf, _, _ in leaves for at in leaf.places}

    once = {at: v for at, v in enumerate(outvars) if at not in apart}
    before = list(dict.fromkeys([*known, *(v for v in once.values() if not isinstance(v, Literal))]))
    first = ClosedJaxpr(jaxpr.replace(outvars=before, eqns=behind(before)), flat.consts)
    values = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*given, *flat.consts), strict=True))
    values |= zip(before, jaxpr_as_fun(first)(*given), strict=True)
    results: list[Any] = [None] * structure.num_leaves
    for at, v in once.items():
        results[at] = jnp.asarray(literal(v)) if isinstance(v, Literal) else values[v]
    results = jax.tree.leaves(settled(structure.unflatten(results), old, skip), is_leaf=lambda x: x is None)

    kinds: dict[Any, list[tuple[_Leaf, Any]]] = {}
    for leaf, arrays, mask in leaves:
        if leaf.places:
            read = [arrays[at] for at in leaf.places], [values[v] for v in leaf.arrays], mask
            kinds.setdefault((leaf.key, read[0][0].size, mask is None), []).append((leaf, read))
    alike = [
        Alike(
            members[0][0].function,
            [read for _, read in members],
            [[values[v] for v in leaf.numbers] for leaf, _ in members],
            family=("joint", key, masked),
        )
        for (key, _, masked), members in kinds.items()
    ]
    for members, found in zip(kinds.values(), for_each(alike, (ones, skip)), strict=True):
        for (leaf, _), arrays in zip(members, found, strict=True):
            for at, x in zip(leaf.places, arrays, strict=True):
                results[at] = x
    return structure.unflatten(results)


def settled(new: Arrays, old: Sequence[Old], skip: Any) -> Arrays:
    """The new parameters and state where they are to be taken, those that are there."""

    def one(mask: Any, after: Any, before: Any) -> Any:
        return after if after is None else unless(skip, after if mask is None else jnp.where(mask, after, before), before)

    params = [one(leaf.mask, p, leaf.param) for leaf, p in zip(old, new.params, strict=True)]
    own = [
        [one(leaf.mask if like else None, *each) for like, *each in zip(leaf.shaped, state, leaf.state, strict=True)]
        for leaf, state in zip(old, new.own, strict=True)
    ]
    return new._replace(params=params, own=own)


# ------------------------------------------------------------------ the program of flat leaves


def _flat(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The results of a program, those of more than one element flat, with all that takes each element by itself written for flat arrays.

    The bodies of the functions that it calls stand in place of the calls.
    """
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    numbers: dict[Any, Any] = {}
    read = lambda v: literal(v) if isinstance(v, Literal) else values[v]  # noqa: E731

    def named(v: Any) -> Any:
        # A constant is a number as others are, which a loop reads from its row: where each was a value of its own, XLA wrote the
        # parameter from another loop than the state (clip and AdamW: 60 bytes, not 32). What is 0 or 1 may lead it to leave something out.
        x = literal(v)
        if not jnp.issubdtype(x.dtype, jnp.inexact) or x in (0, 1):
            return x
        key = x.dtype, x.tobytes()
        if key not in numbers:
            numbers[key] = jax.lax.optimization_barrier(x)
        return numbers[key]

    def shaped(v: Any) -> Any:
        x = read(v)
        return x if x.shape == v.aval.shape else x.reshape(v.aval.shape)

    def flat(v: Any) -> Any:
        large, x = v.aval.size != 1, named(v) if isinstance(v, Literal) else values[v]
        return x if x.ndim == large else x.reshape(-1 if large else ())

    for eqn in jaxpr.eqns:
        out: Any = eqn.outvars[0].aval if eqn.outvars else None
        body = body_of(eqn)
        if body is not None:
            found = _flat(getattr(body, "jaxpr", body), getattr(body, "consts", ()), list(map(read, eqn.invars)))
        elif out is None or out.size < 2:
            found = _number(jaxpr, eqn, flat, shaped)
        elif keeps_elements(eqn):
            found = [read(eqn.invars[0])]
        elif spreads(eqn, out.size):
            found = [jnp.broadcast_to(flat(eqn.invars[0]), (out.size,))]
        elif elementwise(eqn, out.size):
            found = [eqn.primitive.bind(*map(flat, eqn.invars), **eqn.params)]
        else:
            found = apply(jaxpr, eqn, list(map(shaped, eqn.invars)))
        values |= zip(eqn.outvars, found, strict=True)
    return [flat(v) if v.aval.size > 1 else shaped(v) for v in jaxpr.outvars]


def _number(jaxpr: Any, eqn: Any, flat: Callable[[Any], Any], shaped: Callable[[Any], Any]) -> list[Any]:
    """The results of an operation that gives a number, or nothing: of a sum over all elements from the flat array."""
    if eqn.outvars and eqn.primitive.name in REDUCTIONS and eqn.invars[0].aval.size > 1:
        (found,) = apply(jaxpr, eqn.replace(params=eqn.params | {"axes": (0,)}), [flat(eqn.invars[0])])
        return [found.reshape(eqn.outvars[0].aval.shape)]
    return apply(jaxpr, eqn, list(map(shaped, eqn.invars)))


def _by_element(eqn: Any) -> bool:
    size = eqn.outvars[0].aval.size if eqn.outvars else 1
    return size > 1 and (elementwise(eqn, size) or spreads(eqn, size) or keeps_elements(eqn))


def _known(jaxpr: Any) -> list[Any]:
    """What is evaluated once: numbers, what looks across elements, and what that is taken of, where results need it again."""
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    hard = [v for eqn in jaxpr.eqns if not _by_element(eqn) for v in eqn.outvars]
    rest = slice_of(jaxpr.eqns, results, hard)
    needed = {*results, *_read(rest)}
    own = {v for eqn in rest for v in eqn.outvars}
    sums = [eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name in REDUCTIONS and eqn.invars[0].aval.size > 1]
    is_array = lambda v: v.aval.size > 1 and not (v in made and spreads(made[v], v.aval.size))  # noqa: E731
    stored = [root for v in sums if (root := source(v, made, _by_element, is_array)) in own and root not in results]
    others = [eqn for eqn in jaxpr.eqns if not _by_element(eqn) and eqn.primitive.name not in REDUCTIONS]
    stored += [v for v in _read(others) if v in own]  # an operation that is no loop over elements has its arrays stored anyway
    return list(dict.fromkeys([*(v for v in hard if v in needed), *stored]))


def _read(eqns: Iterable[Any]) -> list[Any]:
    """What operations read, each once."""
    return list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)))


# ------------------------------------------------------------------ the rest of a leaf


class _Leaf(NamedTuple):
    """The rest of a leaf: a function of arrays of its size and of numbers, which takes each element by itself.

    places: of the results that it gives. function: as of `Alike`, of (old arrays, `arrays`, mask) and `numbers`. key: equal where the
    function is the same but for the size.
    """

    places: list[int]
    function: Callable[..., Any]
    arrays: list[Any]
    numbers: list[Any]
    key: Any

    @staticmethod
    def of(behind: Callable[..., Any], known: set[Any], outputs: Sequence[tuple[int, Any]], size: int, fused: bool) -> _Leaf:
        """That of a leaf of so many elements with these results; without places where that cannot be."""
        rest = behind([v for _, v in outputs], known)
        made = {v for eqn in rest for v in eqn.outvars}
        outputs = [(at, v) for at, v in outputs if not isinstance(v, Literal) and v in made]
        results = [v for _, v in outputs]
        given = [v for v in _read(rest) if v not in made]
        arrays, numbers = ([v for v in given if (v.aval.size > 1) is large] for large in (True, False))
        if {v.aval.size for v in (*made, *arrays)} != {size}:
            return _Leaf([], _evaluated([], [], [], [], []), [], [], None)
        apart = fused and size >= _LARGE and not any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in arrays)
        groups = _groups(rest, results) if apart else [list(range(len(results)))]
        like = (size,)
        names = {v: f"{kind}{i}" for kind, column in (("a", arrays), ("n", numbers)) for i, v in enumerate(column)}
        lines = [kind_text(v.aval, like) for v in (*arrays, *numbers)]
        for n, eqn in enumerate(rest):
            operands = [f"{v.val}:{kind_text(v.aval, like)}" if isinstance(v, Literal) else names[v] for v in eqn.invars]
            lines.append(f"{eqn.primitive.name}[{params_text(eqn.params, like)}] {operands} -> {kind_text(eqn.outvars[0].aval, like)}")
            names |= {v: f"%{n}.{i}" for i, v in enumerate(eqn.outvars)}
        key = *lines, *(names[v] for v in results), str(groups)
        evaluated = _evaluated(rest, results, arrays, numbers, groups)
        return _Leaf([at for at, _ in outputs], evaluated, arrays, numbers, key)


def _groups(rest: Sequence[Any], results: Sequence[Any]) -> list[list[int]]:
    """Which results are evaluated together: those that share nothing which is computed from arrays, the parameter last."""
    groups: list[tuple[set[Any], list[int]]] = []
    for i in (*range(1, len(results)), 0):
        own = {v for eqn in slice_of(rest, [results[i]]) if not spreads(eqn, eqn.outvars[0].aval.size) for v in eqn.outvars}
        free = next((group for group in groups if own.isdisjoint(group[0])), None)
        if free is None and len(groups) < _EVALUATIONS:
            groups.append(free := (set(), []))
        taken, members = groups[-1] if free is None else free
        taken.update(own)
        members.append(i)
    return [members for _, members in groups]


_LARGE = 1 << 14  # elements; fewer are evaluated once, since each evaluation is compiled: 300 small leaves took 10 s at first, then 7
_EVALUATIONS = 4  # the first as it is, each other times a traced 1.0 of its own


def _evaluated(
    rest: Sequence[Any], results: Sequence[Any], arrays: Sequence[Any], numbers: Sequence[Any], groups: Sequence[list[int]]
) -> Callable[..., Any]:
    """The function of a leaf: see `_Leaf`."""
    parts = [(group, slice_of(rest, [results[i] for i in group])) for group in groups]

    def leaf(given: Any, known: Any, common: Any) -> list[Any]:
        (old, read, mask), (ones, skip) = given, common
        new: list[Any] = [None] * len(old)
        for nth, (group, eqns) in enumerate(parts):
            values = _run(
                eqns, dict(zip(arrays, read, strict=True)), dict(zip(numbers, known, strict=True)), ones[nth - 1] if nth else None
            )
            for i in group:
                new[i] = values[results[i]] if mask is None else jnp.where(mask, values[results[i]], old[i])
        return unless(skip, new, old)

    return leaf


def _run(eqns: Sequence[Any], arrays: dict[Any, Any], numbers: dict[Any, Any], factor: Any) -> dict[Any, Any]:
    """All that these operations give, from arrays times a factor, so that nothing is shared with another evaluation: see `leaf_update`.

    But a choice hands on the bits of an array as they are, and a half type is multiplied once it is wide: the product of a number
    too small to be normal may be 0.
    """
    values: dict[Any, Any] = {}
    half = [v for v in arrays if jnp.issubdtype(v.aval.dtype, jnp.floating) and jnp.finfo(v.aval.dtype).bits < 32]

    def read(v: Any, as_it_is: bool) -> Any:
        if isinstance(v, Literal):
            return literal(v)
        if v in arrays:
            return arrays[v] if as_it_is or v in half else times(arrays[v], factor)
        return numbers[v] if v in numbers else values[v]

    for eqn in eqns:
        chooses = eqn.primitive.name == "select_n"
        found = eqn.primitive.bind(*(read(v, chooses) for v in eqn.invars), **eqn.params)
        widens = eqn.primitive.name == "convert_element_type" and eqn.invars[0] in half
        values[eqn.outvars[0]] = times(found, factor) if widens else found
    return values
