"""How often a rule is evaluated in an update, asked of the compiler."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from . import loops
from .flags import of_barriers, of_counting
from .fusion import compiled
from .leaf_update import ONES, Passes, leaf_update, parted, repeatable
from .precision import NOTHING
from .problem import NO_EXTRA, Extra, Problem, buffer_shape, layout
from .queries import Properties
from .whole import traced

_chosen: dict[Any, Passes] = {}
ONCE = Passes(1, beside=False)


def chosen(
    problem: Problem, elements: bool, scalars: tuple[bool, bool], extra: Extra, device: Any, large: bool = False, fused: bool = True
) -> Passes:
    """How many evaluations of the rule move the fewest bytes; `scalars`: whether gradients are multiplied, and updates may be skipped;
    `large`: whether it matters that results of several types are written without a copy.

    Asked of the compiler, on one small flat leaf, once for each rule and dtype: of torch's equations with nothing kept beside
    them in float32, and in complex, because what is fused is the same in all real types. A leaf that must keep its shape is
    evaluated once, because operations across its elements store their results anyway.
    """
    spec, kept = problem.specs[0], problem.row.kept != NOTHING
    if not spec.flat or extra.leaves:
        return ONCE
    own_type = problem.row.scaled or kept or spec.dtype.startswith("complex")
    dtype = spec.dtype if own_type else "float32"
    small = problem._replace(specs=(spec._replace(shape=(4096,), dtype=dtype),))
    by_type = large and fused and device.platform == "cpu" and not spec.whole and len(set(_results(small))) > 1 and loops.stay()
    key = (small, elements, scalars, device.platform, fused, by_type)
    if key not in _chosen:
        try:
            fields = layout(small).own[0]
            ways = {Passes(n, False) for n in (1, 2, 1 + len(repeatable(fields, False)))}
            ways |= {Passes(n, True) for n in (2, 1 + len(repeatable(fields, True)))} if kept else set()
            if problem.row.kept.master_weights:  # a parameter is its master rounded, so both come from one evaluation
                ways = {way for way in ways if way.beside or way.evaluations == 1}
            ways |= {way._replace(stored=n) for way in ways for n in (1, 2) if spec.whole and way.evaluations < 3}
            most = lambda way: min(len(repeatable(fields, way.beside)), ONES)  # noqa: E731
            ways = {way for way in ways if way.evaluations == 1 or way.evaluations <= 1 + most(way)}
            ways |= {way._replace(by_type=True) for way in ways if by_type}
            least = _fewest_bytes(small)
            counts: dict[Passes, float] = {}
            probe = functools.cache(functools.partial(_probe, small, elements, scalars, device))
            order = sorted(ways)
            apart = next((way for way in order if not _shares(probe(way).jaxpr.jaxpr)), order[0])  # hardly any other is better
            for way in dict.fromkeys([apart, *order]):
                options = of_counting(device) | (of_barriers(Properties()) if way.by_type else {})
                program = compiled(probe(way).lower(), fused, options)
                counts[way] = bytes_accessed(program) - (loops.held(program) if way.by_type else 0.0)
                if counts[way] < 1.01 * least:  # the scalars
                    break
        except (TypeError, ValueError):  # it takes the leaf in no other size: a constant for each element
            counts = {ONCE: 0.0}
        _chosen[key] = min(counts, key=lambda way: (counts[way], way))
    return _chosen[key]


def _shares(jaxpr: Any) -> bool:
    """Whether two of the results need one array that is neither an argument nor made of scalars."""
    size = max(v.aval.size for v in jaxpr.invars)
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if any(u.aval.size == size for u in eqn.invars)}
    seen: set[Any] = set()
    for result in dict.fromkeys(v for v in jaxpr.outvars if v.aval.size == size):
        own: set[Any] = set()
        todo = [result]
        while todo:
            v = todo.pop()
            if not isinstance(v, Literal) and v in made and v not in own:
                own.add(v)
                todo += made[v].invars
        if own & seen:
            return True
        seen |= own
    return False


def _fewest_bytes(problem: Problem) -> float:
    """The parameter and its arrays of state read and written once, the gradient read once."""
    sizes = [jnp.dtype(kind).itemsize for kind in _results(problem)]
    return math.prod(problem.specs[0].shape) * (2.0 * sum(sizes) + sizes[0])


def _results(problem: Problem) -> list[str]:
    """The types of the parameter and of its arrays of state."""
    return [problem.specs[0].dtype, *(field.dtype for field in layout(problem).own[0] if field.shape is None)]


def _probe(problem: Problem, elements: bool, scalars: tuple[bool, bool], device: Any, passes: Passes) -> Any:
    """The traced update of one small leaf, donated as in a program."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = lambda shape, kind: jax.ShapeDtypeStruct(shape, kind, sharding=sharding)  # noqa: E731
    spec = problem.specs[0]
    p = array(spec.shape, spec.dtype)
    state = [array(buffer_shape(field, spec), field.dtype) for field in layout(problem).own[0]]
    mask = array(p.shape, np.bool_) if elements else None
    values, ones = (jax.ShapeDtypeStruct((n,), np.float64) for n in (problem.row.width, ONES))
    scale, skip = (jax.ShapeDtypeStruct((), kind) if given else None for given, kind in zip(scalars, (np.float64, np.bool_), strict=True))
    update = leaf_update(problem, passes, NO_EXTRA)

    def donated(p: Any, state: Any, g: Any, mask: Any, values: Any, ones: Any, scale: Any, skip: Any) -> Any:
        inputs = *parted(problem, p, state, g, mask, values), (ones, scale, skip, [])
        opened, _ = traced(update, *inputs)  # as `split` takes it
        return jaxpr_as_fun(opened)(*jax.tree.leaves(inputs))

    return jax.jit(donated, donate_argnums=(0, 1)).trace(p, state, p, mask, values, ones, scale, skip)


def bytes_accessed(compiled: Any) -> float:
    """Bytes that one call of a compiled program moves, by the compiler's count."""
    return float(compiled.cost_analysis().get("bytes accessed", 0.0))  # absent where nothing is computed
