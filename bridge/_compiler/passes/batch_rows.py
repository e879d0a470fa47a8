"""A pass that computes operations common to all rows of a bucket as one batched operation, in a program that sees all rows.

XLA would compile a separate loop for each row, and run one loop after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._compiler import policy
from bridge._ir.fingerprint import params_text
from bridge._ir.jaxpr import Slicer, bind, literal_value, make_slicer, outlined
from bridge._ir.numerics import is_prng_key
from bridge._ir.types import Array, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, aval_of

from .hoist import Rest, read_by, run, sums_up
from .operand_limit import distinct_scalars


class Slot:
    """An array or a number that is one row of a pack: of `buffer`, which has one of each leaf."""

    __slots__ = ("buffer", "index")

    def __init__(self, buffer: jax.Array, index: int) -> None:
        self.buffer, self.index = buffer, index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.buffer.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.buffer.dtype


Value: TypeAlias = jax.Array | Slot


def cut(x: Value) -> jax.Array:
    """The array, one of its own where it is the row of a pack."""
    return jax.lax.index_in_dim(x.buffer, x.index, keepdims=False) if isinstance(x, Slot) else x


def pack_of(rows: Sequence[int], values: Sequence[Value | None]) -> jax.Array | None:
    """The one buffer that has each of these values in its row; None where there is none."""
    first = values[0]
    if not isinstance(first, Slot):
        return None
    own = (isinstance(x, Slot) and x.buffer is first.buffer and x.index == row for x, row in zip(values, rows, strict=True))
    return first.buffer if all(own) else None


def packed(rows: Sequence[int], values: Sequence[Value], old: jax.Array) -> jax.Array:
    """A pack with these values in these rows, and what is `old` in others."""
    buffer = pack_of(rows, values)
    if buffer is not None:
        return buffer
    given = dict(zip(rows, map(cut, values), strict=True))
    return jnp.stack([given[r] if r in given else old[r] for r in range(len(old))])


def buffers_of(arrays: Sequence[Value | None]) -> tuple[int, ...] | None:
    """Which packs of equal height these are one row of; None where they are not."""
    rows = [x for x in arrays if isinstance(x, Slot)]
    if not rows or len(rows) < len(arrays) or len({(x.index, len(x.buffer)) for x in rows}) > 1:
        return None
    return tuple(id(x.buffer) for x in rows)


# So often what is found lets more be computed: a norm of all, then an update, then its norms. Where each leaf waits for the one before
# it, the others are computed leaf by leaf.
_ROUNDS = 6
_DEPTH = 16  # operations between a number of a row and those that it is computed from


def of_packs(flat: ClosedJaxpr, needed: Sequence[Var], values: Mapping[Var, Value]) -> dict[Var, Value]:
    """What is to be known of leaves that are rows of packs, of all rows at once: sums over each, and what those are taken of.

    And the numbers that this takes. XLA would run one loop after the other, each of them as long as it takes to start it.
    """
    if not any(isinstance(x, Slot) for x in values.values()):
        return {}
    there, behind = dict(values), make_slicer(flat.jaxpr.eqns)
    eqns = behind(needed)
    apart = {*needed, *(v for eqn in eqns for v in eqn.outvars if aval_of(v).size == 1)}
    waiting: dict[Var, _Work] = {}
    for eqn in eqns:
        if len(eqn.outvars) == 1 and (sums_up(eqn) or eqn.outvars[0] in apart):
            work = _Work.of(behind, apart, eqn)
            waiting |= {} if work is None else {eqn.outvars[0]: work}
    for _ in range(_ROUNDS):
        ready = set(there)
        for eqn in eqns:
            if waiting.keys().isdisjoint(eqn.outvars) and all(isinstance(v, Literal) or v in ready for v in eqn.invars):
                ready.update(eqn.outvars)
        kinds: dict[Hashable, list[tuple[Var, _Work]]] = {}
        taken: Counter[Hashable] = Counter()
        for v, work in waiting.items():
            buffers = buffers_of([there.get(x) for x in work.rest.arrays])
            if buffers is not None and ready.issuperset(work.rest.numbers):
                row = cast(Slot, there[work.rest.arrays[0]]).index
                taken[row, work.text, buffers] += 1  # two of one row may read other numbers
                kinds.setdefault((work.text, buffers, taken[row, work.text, buffers]), []).append((v, work))
        if not kinds:
            break
        numbers = [x for members in kinds.values() for _, work in members for x in work.rest.numbers]
        there |= evaluated_once(flat, list(dict.fromkeys(numbers)), there)
        for members in kinds.values():
            there |= _side_by_side(flat, members, there)
            for v, _ in members:
                del waiting[v]
    return {v: x for v, x in there.items() if v not in values}


def of_parts(flat: ClosedJaxpr, needed: Sequence[Var], values: Mapping[Var, Value]) -> dict[Var, jax.Array]:
    """What is summed over leaves by themselves, of those that have enough equals each from one `part`."""
    behind, inputs = make_slicer(flat.jaxpr.eqns), set(flat.jaxpr.invars)
    kinds: dict[Hashable, list[tuple[Var, _Work]]] = {}
    count = 0
    for eqn in filter(sums_up, behind(needed, values.keys())):
        work = _Work.of(behind, set(), eqn)
        read = [] if work is None else [*work.rest.arrays, *work.rest.numbers]
        if work is not None and inputs.issuperset(read) and not any(isinstance(values[v], Slot) for v in read):
            kinds.setdefault((work.text, aval_of(work.rest.arrays[0]).size), []).append((eqn.outvars[0], work))
        count += 1
    found: dict[Var, jax.Array] = {}
    for members in kinds.values():
        if len(members) >= policy.CHUNKING.min_equal_leaves(count):
            (_, work), *_ = members
            function = outlined(lambda *given, work=work: work.of_row(given[: len(work.rest.arrays)], given[len(work.rest.arrays) :]))
            found |= {v: function(*(values[x] for x in (*work.rest.arrays, *work.rest.numbers))) for v, work in members}
    return found


class _Work(NamedTuple):
    """How an array, or what is summed up of one by `total`, is computed: see `Rest`. `text`: equal for the same arithmetic."""

    rest: Rest
    total: Eqn | None
    text: Hashable

    @staticmethod
    def of(behind: Slicer, known: set[Var], eqn: Eqn) -> _Work | None:
        """That of the result of an operation; None where it is neither, or computed otherwise than each element by itself."""
        total = eqn if sums_up(eqn) and aval_of(eqn.outvars[0]).size == 1 else None
        array = eqn.outvars[0] if total is None else eqn.invars[0]
        size = aval_of(array).size
        if size == 1 or isinstance(array, Literal):
            return None
        is_there = total is not None and (array in known or not behind([array]))
        rest = Rest([0], [array], [], [array], []) if is_there else Rest.of(behind, known - {array}, [(0, array)], size)
        how = None if total is None else (total.primitive, params_text(total.params))
        return None if rest is None else _Work(rest, total, (how, rest.text((size,))))

    def of_row(self, arrays: Sequence[jax.Array], numbers: Sequence[Array]) -> jax.Array:
        """It, from what the rest reads."""
        made = run(
            self.rest.eqns, dict(zip(self.rest.arrays, arrays, strict=True)), dict(zip(self.rest.numbers, numbers, strict=True)), None
        )
        x = made[self.rest.results[0]] if self.rest.eqns else arrays[0]
        return x if self.total is None else self.total.primitive.bind(x, **self.total.params)


def _side_by_side(flat: ClosedJaxpr, members: Sequence[tuple[Var, _Work]], values: Mapping[Var, Value]) -> dict[Var, Value]:
    """These variables, all computed alike of rows of one pack."""
    (_, work), rows = members[0], [cast(Slot, values[work.rest.arrays[0]]).index for _, work in members]
    buffers = [cast(Slot, values[v]).buffer for v in work.rest.arrays]
    columns = columns_of(flat, rows, [work.rest.numbers for _, work in members], values, len(buffers[0]))
    found = jax.vmap(work.of_row)(buffers, columns)
    return {v: Slot(found, row) if work.total is None else found[row] for row, (v, _) in zip(rows, members, strict=True)}


def columns_of(
    flat: ClosedJaxpr, rows: Sequence[int], numbers: Sequence[Sequence[Var]], values: Mapping[Var, Value], count: int
) -> list[Array]:
    """What these variables are in rows of a pack of so many, one column for each; in other rows whatever there is."""
    jaxpr: Jaxpr = flat.jaxpr
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    seen: dict[tuple[Var, ...], Array | None] = {}

    def column(each: Sequence[Atom], depth: int = 0) -> Array | None:
        """One column, computed as such where each row's number is computed alike from columns: of numbers XLA makes a loop for each.

        A number alone where it is that of all rows; None where they are not computed alike.
        """
        first = each[0]
        if isinstance(first, Literal):
            return (
                literal_value(first) if all(isinstance(v, Literal) and (v.val, v.aval) == (first.val, first.aval) for v in each) else None
            )
        if all(v is first for v in each):
            return cut(values[first] if first in values else evaluated_once(flat, [first], values)[first])
        variables = tuple(v for v in each if not isinstance(v, Literal))
        if depth == _DEPTH or len(variables) < len(each):
            return None
        if variables not in seen:
            seen[variables] = computed(variables, depth)
        return seen[variables]

    def computed(each: tuple[Var, ...], depth: int) -> Array | None:
        found = [values.get(v) for v in each]
        if isinstance(found[0], Slot):
            buffer = pack_of(rows, found)
            return None if buffer is None or len(buffer) != count else buffer
        eqns = [made[v] for v in each if v in made]
        if len(eqns) < len(each):
            return None
        one = eqns[0]
        if len(one.outvars) > 1 or one.effects or any(aval_of(v).size != 1 or is_prng_key(v.aval) for v in one.invars):
            return None
        if len({(eqn.primitive, params_text(eqn.params), len(eqn.invars)) for eqn in eqns}) > 1:
            return None
        columns = [column(operand, depth + 1) for operand in zip(*(eqn.invars for eqn in eqns), strict=True)]
        operands = [x for x in columns if x is not None]
        if len(operands) < len(columns):
            return None
        axes = [0 if np.ndim(x) > aval_of(v).ndim else None for x, v in zip(operands, one.invars, strict=True)]
        found = jax.vmap(partial(bind, one), in_axes=axes)(*operands) if 0 in axes else bind(one, *operands)
        return found[0]

    def whole(each: Sequence[Var]) -> Array:
        found = column(each)
        if found is None:
            own = dict(zip(rows, (cut(values[v]) for v in each), strict=True))
            return jnp.stack([own.get(row, own[rows[0]]) for row in range(count)])
        return jnp.broadcast_to(found, (count, *aval_of(each[0]).shape)) if np.ndim(found) == aval_of(each[0]).ndim else found

    return [whole(each) for each in zip(*numbers, strict=True)]


def evaluated_once(flat: ClosedJaxpr, wanted: Sequence[Var], values: Mapping[Var, Value]) -> dict[Var, jax.Array]:
    """Those of the wanted variables that are not among the values, by these."""
    jaxpr: Jaxpr = flat.jaxpr
    todo = [v for v in wanted if v not in values]
    eqns = make_slicer(jaxpr.eqns)(todo, values.keys())
    given = [v for v in read_by(eqns) if v in values]
    program = ClosedJaxpr(jaxpr.replace(constvars=[], invars=given, outvars=todo, eqns=eqns), [])
    cell = _cells(sum(len(eqn.invars) for eqn in eqns))
    found = cast(list[jax.Array], distinct_scalars(program, [cut(values[v]) for v in given], cell, reciprocals=True))
    return dict(zip(todo, found, strict=True))


def _cells(uses: int) -> Callable[[Array], jax.Array]:
    """What gives a number as one that XLA does not know to be the same, at most so many times: else it stores an array of one number that
    two sums over arrays read."""
    columns: dict[Hashable, Iterator[jax.Array]] = {}
    seen: list[Array] = []  # so that each has an identity of its own

    def cell(number: Array) -> jax.Array:
        key = (number.dtype, number.tobytes()) if isinstance(number, np.ndarray) else id(number)
        if key not in columns:
            seen.append(number)
            column = jax.lax.optimization_barrier(jnp.broadcast_to(number, (uses,)))
            columns[key] = (jax.lax.index_in_dim(column, i, keepdims=False) for i in range(uses))
        return next(columns[key])

    return cell
