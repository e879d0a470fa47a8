"""Properties of a jaxpr that decide how it is compiled and called, and which of its inputs reach which outputs.

One walk over the equations gives all properties. They are kept as long as the jaxpr, so a jaxpr that several others call, or that several
passes ask about, is walked once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from .classify import ELEMENTWISE, RESHAPING, called_jaxpr, is_fusible
from .types import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, aval_of, open_jaxpr

if TYPE_CHECKING:
    from jax.typing import DTypeLike

SMALL_PRODUCT = 2**16  # elements of the smallest side or result of a matrix product that counts as large
_SIMPLE = ELEMENTWISE | RESHAPING  # without a jaxpr among the parameters
_LOOPS = frozenset({"scan", "while"})
_REDUCTIONS = "reduce", "scatter", "select_and"
_BARRIERS = frozenset({"optimization_barrier", "checkpoint", "remat2"})  # jax.checkpoint lowers to a barrier
_GROUP_COUNTS = "feature_group_count", "batch_group_count"


class Properties(NamedTuple):
    """Properties of a jaxpr and of the jaxprs within its equations: calls, loops, branches, the functions of reductions.

    Elements count as often as an equation runs: a jaxpr that two equations call counts twice.

    has_callback: there is a callback to Python, such as `jax.debug.print`.
    draws_by_batch: random numbers come from a generator that gives other numbers under `jax.vmap`: any but jax's default one.
    has_grouped_convolution: there is a convolution of more than one group.
    has_large_product: a matrix product has more than `SMALL_PRODUCT` elements in each operand and in its result, for each batch index.
    has_barrier: there is an optimization barrier, also one that `jax.checkpoint` adds.
    has_barrier_in_loop, has_barrier_in_reduction: there is one in a loop, or in the function of a reduction or a scatter.
    has_call_to_inline: `must_inline` holds for an equation. Loops and branches are not searched.
    is_elementwise: there are no effects, and each equation is elementwise, a reshape or a broadcast.
    op_count: the number of elements that all equations compute; infinite where there is a loop.
    materialized_elements: the number of elements that XLA may store between its loops: all operands and results of equations that are
      not fusible. Infinite where there is a loop or a branch.
    used_inputs: for each input whether an output depends on it.
    """

    has_callback: bool = False
    draws_by_batch: bool = False
    has_grouped_convolution: bool = False
    has_large_product: bool = False
    has_barrier: bool = False
    has_barrier_in_loop: bool = False
    has_barrier_in_reduction: bool = False
    has_call_to_inline: bool = False
    is_elementwise: bool = False
    op_count: float = 0.0
    materialized_elements: float = 0.0
    used_inputs: tuple[bool, ...] = ()


# Properties that a jaxpr inherits from the jaxprs within it.
_INHERITED = Properties._fields[: Properties._fields.index("has_call_to_inline")]
_properties: WeakKeyDictionary[Jaxpr, Properties] = WeakKeyDictionary()


def properties_of(jaxpr: Jaxpr | ClosedJaxpr) -> Properties:
    """Return the properties of a jaxpr, closed or open."""
    opened = open_jaxpr(jaxpr)
    known = _properties.get(opened)
    if known is None:
        known = _properties[opened] = _compute_properties(opened)
    return known


def _compute_properties(jaxpr: Jaxpr) -> Properties:
    """Compute all properties in one walk over the equations, from last to first."""
    true_properties: set[str] = set()  # the names of properties that hold
    used, stored = set(_variables(jaxpr.outvars)), set[Var]()
    op_count, materialized, is_elementwise = 0.0, 0.0, not jaxpr.effects
    for eqn in reversed(jaxpr.eqns):
        read = eqn.invars
        op_count += max(map(_size, eqn.outvars), default=0)
        if eqn.primitive.name not in _SIMPLE:
            called = None if (body := called_jaxpr(eqn)) is None else properties_of(body)
            within = list(map(properties_of, jaxprs_in_params(eqn)))
            true_properties.update(_properties_from_eqn(eqn, within))
            op_count += math.inf if eqn.primitive.name in _LOOPS else sum(each.op_count for each in within)
            if called is not None:
                is_elementwise = is_elementwise and called.is_elementwise
                materialized += called.materialized_elements
                read = list(compress(read, called.used_inputs))
            else:
                is_elementwise = is_elementwise and branches_to_select(eqn) is not None
                if not is_fusible(eqn):
                    materialized += math.inf if within else 0.0
                    stored.update(_variables((*eqn.invars, *eqn.outvars)))
        if not used.isdisjoint(eqn.outvars):
            used.update(_variables(read))
    materialized += sum(map(_size, stored))
    return Properties(
        **dict.fromkeys(true_properties, True),
        is_elementwise=is_elementwise,
        op_count=op_count,
        materialized_elements=materialized,
        used_inputs=tuple(v in used for v in jaxpr.invars),
    )


def _properties_from_eqn(eqn: Eqn, within: Sequence[Properties]) -> Iterator[str]:
    """Yield the names of the properties that hold because of one equation or of the jaxprs within it."""
    name = eqn.primitive.name
    for each in within:
        yield from (inherited for inherited in _INHERITED if getattr(each, inherited))
    if "callback" in name or name == "debug_print":
        yield "has_callback"
    if name == "rng_bit_generator" or any(_draws_by_batch(getattr(v.aval, "dtype", None)) for v in (*eqn.invars, *eqn.outvars)):
        yield "draws_by_batch"
    if any(eqn.params.get(count, 1) > 1 for count in _GROUP_COUNTS):
        yield "has_grouped_convolution"
    if name == "dot_general" and _is_large(eqn):
        yield "has_large_product"
    if name in _BARRIERS:
        yield "has_barrier"
    if any(each.has_barrier for each in within):
        if name in _LOOPS:
            yield "has_barrier_in_loop"
        if name.startswith(_REDUCTIONS):
            yield "has_barrier_in_reduction"
    if must_inline(eqn):
        yield "has_call_to_inline"


def jaxprs_in_params(eqn: Eqn) -> list[Jaxpr]:
    """Return the jaxprs among the parameters of an equation, as open jaxprs."""
    values: list[object] = []
    for value in eqn.params.values():
        values += cast(Sequence[object], value) if isinstance(value, tuple | list) else [value]
    return [cast(Jaxpr, body) for x in values if hasattr(body := getattr(x, "jaxpr", x), "eqns")]


def branches_to_select(eqn: Eqn) -> Sequence[ClosedJaxpr] | None:
    """Return the branches of a `cond` that may all be evaluated, so that a select takes the place of the `cond`; else None.

    This holds where all branches are elementwise: XLA runs a branch as a computation of its own, which stores its operands and results.
    Where the index is a constant, return only that branch.
    """
    if eqn.primitive.name != "cond":
        return None
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    index = eqn.invars[0]
    if isinstance(index, Literal):
        branches = (branches[min(max(int(index.val), 0), len(branches) - 1)],)
    return branches if len(branches) == 1 or all(properties_of(branch).is_elementwise for branch in branches) else None


def must_inline(eqn: Eqn) -> bool:
    """Return whether an equation must be inlined before passes see the jaxpr.

    This holds for a `cond` with `branches_to_select`, for a call that contains one, and for a call that jax inlines only when it lowers
    the jaxpr. jax 0.11 traces optax's bias correction as such a call, one for all leaves.
    """
    if getattr(eqn.params.get("inline"), "name", "") == "JAX_LATE" or branches_to_select(eqn) is not None:
        return True
    body = called_jaxpr(eqn)
    return body is not None and properties_of(body).has_call_to_inline


@functools.cache
def _draws_by_batch(dtype: DTypeLike | None) -> bool:
    """Return whether a dtype is that of PRNG keys of a generator other than jax's default one."""
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and str(dtype) != "key<fry>"


def _is_large(eqn: Eqn) -> bool:
    _, (batch, _) = eqn.params["dimension_numbers"]
    each = math.prod(aval_of(eqn.invars[0]).shape[i] for i in batch) or 1
    return min(aval_of(v).size for v in (*eqn.invars, *eqn.outvars)) > SMALL_PRODUCT * each


def _variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    return (v for v in atoms if not isinstance(v, Literal))


def _size(v: Atom) -> int:
    return getattr(v.aval, "size", 0)  # a token has none


# Primitives any output of which may depend on any input: through an earlier iteration, or through a custom derivative rule.
_OUTPUTS_NEED_ALL_INPUTS = frozenset({"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


def reachable_inputs(jaxpr: Jaxpr, outputs: Iterable[int], through_nondifferentiable: bool = False) -> set[int]:
    """Return the positions of the inputs that the given outputs depend on.

    Follow only floating and complex variables and no `stop_gradient`, unless `through_nondifferentiable` is set.
    """
    known: dict[tuple[int, tuple[int, ...]], set[int]] = {}  # by called jaxpr and its outputs

    def inexact(v: Var) -> bool:
        return through_nondifferentiable or jnp.issubdtype(aval_of(v).dtype, jnp.inexact)

    def reach(jaxpr: Jaxpr, outputs: tuple[int, ...]) -> set[int]:
        wanted = {v for v in _variables(jaxpr.outvars[i] for i in outputs) if inexact(v)}
        for eqn in reversed(jaxpr.eqns):
            hits = tuple(i for i, v in enumerate(eqn.outvars) if v in wanted)
            if not hits or (eqn.primitive.name == "stop_gradient" and not through_nondifferentiable):
                continue
            called = next((eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params), None)
            body = getattr(called, "jaxpr", called)
            inner: Iterable[int] = range(len(eqn.invars))
            sizes = len(eqn.invars), len(eqn.outvars)
            if (
                isinstance(body, Jaxpr)
                and (len(body.invars), len(body.outvars)) == sizes
                and eqn.primitive.name not in _OUTPUTS_NEED_ALL_INPUTS
            ):
                if (id(body), hits) not in known:
                    known[id(body), hits] = reach(body, hits)
                inner = known[id(body), hits]
            wanted |= {v for v in _variables(map(eqn.invars.__getitem__, inner)) if inexact(v)}
        return {i for i, v in enumerate(jaxpr.invars) if v in wanted}

    return reach(jaxpr, tuple(outputs))
