"""THE compiled update: (params, grads, state, hyperparams) -> (params, state), one XLA program per set of live leaves.

Parameters and state are donated and come back at their own addresses; gradients are only read. Every number that a
user may change between steps is an element of one traced float64 vector, so no value of it recompiles. Programs are
shared by all optimizers of the process: what identifies one is the static `Plan`, never an optimizer or a name.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .analysis import calls_back
from .dlpack import wait_for, x64
from .evaluate import Arrays, evaluate_buffers
from .precision import NOTHING
from .problem import NO_EXTRA, Extra, Field, Path, Problem, Row, Same, Signature, Spec, buffer_shape, layout, real, times
from .storage import Memory, settle

FUSION_FLAG = "xla_cpu_use_multi_output_fusion"

# Traced 1.0s at the head of the hyperparams, one for each evaluation of a rule that must not be merged with the others.
ONES = 4

_HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGALRM] if hasattr(signal, "SIGALRM") else []))
_array = attrgetter("array")
_traces = 0
_compilations = 0
_forked = False


def request_fusion() -> bool:
    """Ask XLA's CPU compiler to write several results from one loop; True if the request can still be heard.

    XLA reads the environment when jax starts its CPU client, so this acts only before that, only where the user has
    set no `--xla_backend_extra_options` of their own, and not with MASKBRIDGE_XLA_FLAGS=0. Without it every update is
    as correct, and Adam moves 40 bytes a parameter instead of 28.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("MASKBRIDGE_XLA_FLAGS") == "0" or "xla_backend_extra_options" in flags or _client_started():
        return FUSION_FLAG in flags
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_extra_options={FUSION_FLAG}".strip()
    return True


def _client_started() -> bool:
    """Whether jax has a client; a jax that no longer tells is taken to have none, and the flag then does nothing."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()


def _after_fork() -> None:
    global _forked
    _forked = _client_started()


request_fusion()
os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Leaf:
    """What the program must know of one live leaf: its row of hyperparams, its arrays, and which way its result goes."""

    row: int
    spec: Spec
    state: tuple[Signature, ...]
    inplace: bool
    elements: bool

    @property
    def buffer(self) -> Signature:
        return (math.prod(self.spec.shape),), self.spec.dtype


@dataclass(frozen=True)
class Plan:
    """All that is static about one update, and so the key of its program.

    `shared` has the state that belongs to no leaf, for each unit of the rows in ascending order. `scaled`: the gradients
    are those of a scaled loss, and the update is skipped where one is not finite.
    """

    rows: tuple[Row, ...]
    leaves: tuple[Leaf, ...]
    clip: bool
    device: Any
    skeleton: tuple[Path, ...] = ()
    shared: tuple[tuple[Signature, ...], ...] = ()
    extra: Extra = NO_EXTRA
    scaled: bool = False

    def problem(self, leaf: Leaf) -> Problem:
        """A leaf that is updated by itself."""
        return Problem(self.rows[leaf.row], (leaf.spec,), () if leaf.spec.path is None else self.skeleton)

    @property
    def units(self) -> list[tuple[Problem, list[int]]]:
        """Each transformation that is evaluated over several leaves together, with the positions of its leaves."""
        positions: dict[int, list[int]] = {}
        for position, leaf in enumerate(self.leaves):
            unit = self.rows[leaf.row].unit
            if unit is not None:
                positions.setdefault(unit, []).append(position)
        problems = [
            Problem(self.rows[self.leaves[at[0]].row], tuple(self.leaves[i].spec for i in at), self.skeleton)
            for _, at in sorted(positions.items())
        ]
        return list(zip(problems, [at for _, at in sorted(positions.items())], strict=True))


class Program:
    """One compiled update. `apply` runs it; `bytes_accessed` is the compiler's own count.

    `calls_back`: it calls Python while it runs, which may fail half-way (a line search, a debugging print).
    """

    def __init__(self, plan: Plan) -> None:
        global _compilations
        self.plan = plan
        with x64(), jax.disable_jit(False):
            traced = jax.jit(functools.partial(_update, plan), donate_argnums=(0, 2)).trace(*_abstract(plan))
            self.calls_back = calls_back(traced.jaxpr.jaxpr)
            self._compiled = traced.lower().compile()
        _compilations += 1

    def apply(
        self,
        params: list[Memory],
        state: list[Memory],
        kept: list[Any],
        grads: list[Any],
        masks: list[Any],
        hyperparams: np.ndarray,
        extra: Sequence[Any] = (),
        scaling: Sequence[Any] = (),
    ) -> tuple[list[jax.Array], bool, list[jax.Array]]:
        """Run the update and wait for it, so that torch may write to the gradients again.

        Args:
          params: the memories of the in-place leaves, in plan order; their arrays are donated and replaced.
          state: the memories of the state of every leaf, in plan order, then of the shared state; likewise.
          kept: the arrays of the other leaves; only read.
          grads: one array per leaf, of the leaf's shape and dtype.
          masks: a boolean array per leaf with `elements`.
          hyperparams: float64 (ONES + 1 + sum of row widths): ONES times 1.0, the norm bound, then the rows.
          extra: the arrays among the further arguments, in the order of the plan's `extra`.
          scaling: of a `scaled` plan the loss scale and the count of infinities found, float32, and the count of skipped
            updates, int32; all of shape (1,).

        Returns:
          New values for `kept`, in memory of their own, whether a memory came to lie elsewhere (`storage.settle`), and of a
          `scaled` plan the new count of skipped updates.
        """
        if _forked:
            raise RuntimeError("this process was forked after jax had started, and jax hangs in such a child. Start it with 'spawn'.")
        # From the donation until the results are with their memories nothing else holds the bytes that torch looks at: an
        # exception raised in between by a signal handler would free them. So handlers wait until all is in place.
        arrived: list[tuple[Any, Any, Any]] = []
        handlers: dict[int, Any] = {}
        for number in _HELD_SIGNALS if threading.current_thread() is threading.main_thread() else ():
            handler = signal.getsignal(number)
            if callable(handler):  # only one written in Python can raise
                handlers[number] = handler
                signal.signal(number, lambda n, frame, handler=handler: arrived.append((handler, n, frame)))
        try:
            with x64(), jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False), jax.transfer_guard("allow"):
                arrays = list(map(_array, params)), kept, list(map(_array, state))
                new_params, new_state, new_kept, skipped, token = self._compiled(
                    *arrays, grads, masks, hyperparams, list(extra), list(scaling)
                )
            moved = settle(itertools.chain(params, state), itertools.chain(new_params, new_state))
            # All results of one execution become ready together. Without this wait the call may still be reading the
            # gradients while torch zeroes them: seen with large operands, never with small ones.
            wait_for(token)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for handler, number, frame in arrived:
            handler(number, frame)
        return new_kept, moved, skipped

    @property
    def bytes_accessed(self) -> float:
        return _bytes_accessed(self._compiled)


_PROGRAMS_KEPT = 256  # beyond these, one lives as long as an optimizer uses it
_programs: dict[Plan, Program] = {}
_programs_lock = threading.Lock()


def program(plan: Plan) -> Program:
    """The program of a plan, compiled when the plan is first seen in this process."""
    with _programs_lock:
        found = _programs.pop(plan, None) or Program(plan)
        _programs[plan] = found  # the last to go
        while len(_programs) > _PROGRAMS_KEPT:
            del _programs[next(iter(_programs))]
    return found


def traces() -> int:
    """How often an update has been traced in this process."""
    return _traces


def compilations() -> int:
    """How many programs have been compiled in this process."""
    return _compilations


def _update(
    plan: Plan,
    params: list[Any],
    kept: list[Any],
    state: list[Any],
    grads: list[Any],
    masks: list[Any],
    hyperparams: Any,
    extra: list[Any],
    scaling: list[Any],
) -> tuple[list[Any], list[Any], list[Any], list[Any], Any]:
    global _traces
    _traces += 1
    ones, rows = hyperparams[:ONES], _split(hyperparams, plan.rows)
    donated, read, given, states = iter(params), iter(kept), iter(masks), iter(state)
    leaf_masks = [next(given) if leaf.elements else None for leaf in plan.leaves]
    old_params = [next(donated) if leaf.inplace else next(read) for leaf in plan.leaves]
    own = [[next(states) for _ in leaf.state] for leaf in plan.leaves]
    scale, skip, skipped = _unscaled(grads, leaf_masks, *scaling) if plan.scaled else (None, None, [])
    scale = _clip_scale(grads, leaf_masks, hyperparams[ONES], scale) if plan.clip else scale
    results: list[Any] = [None] * len(plan.leaves)
    for position, leaf in enumerate(plan.leaves):
        if plan.rows[leaf.row].unit is None:
            problem = plan.problem(leaf)
            update = _leaf_update(problem, _passes(problem, leaf.elements, plan.clip, plan.extra, plan.device), plan.extra)
            arrays = old_params[position], own[position], grads[position], leaf_masks[position]
            results[position] = update(*arrays, rows[leaf.row], ones, scale, skip, extra)
    new_shared: list[Any] = []
    for (problem, at), signatures in zip(plan.units, plan.shared, strict=True):
        shared = [next(states) for _ in signatures]
        multipliers = [rows[plan.leaves[i].row][-1] for i in at]
        p, state_of, g, m = ([column[i] for i in at] for column in (old_params, own, grads, leaf_masks))
        further = plan.extra.restored(extra)
        new = _unit_update(problem, p, state_of, g, m, shared, rows[plan.leaves[at[0]].row], multipliers, scale, further)
        new_shared += _unless(skip, new.shared, shared)
        for i, result in zip(at, zip(new.params, new.own, strict=True), strict=True):
            results[i] = _unless(skip, result, (old_params[i], own[i]))
    # jax gives each result the first donated buffer of its type that is left: so the results that donate come first, in
    # the order of their arguments, and those without a buffer of their own last.
    new_params = [p for leaf, (p, _) in zip(plan.leaves, results, strict=True) if leaf.inplace]
    new_kept = [p for leaf, (p, _) in zip(plan.leaves, results, strict=True) if not leaf.inplace]
    return new_params, [x for _, fields in results for x in fields] + new_shared, new_kept, skipped, ones[0].astype(jnp.float32)


@functools.lru_cache(4 * _PROGRAMS_KEPT)
def _leaf_update(problem: Problem, passes: int, extra: Extra) -> Callable[..., Any]:
    """The update of one leaf, traced once for all leaves of equal signature."""
    fields = layout(problem).own[0]

    def leaf(
        p: Any, state: list[Any], g: Any, mask: Any, values: Any, ones: Any, scale: Any, skip: Any, arrays: list[Any]
    ) -> tuple[Any, list[Any]]:
        def result(factor: Any) -> tuple[Any, list[Any]]:
            before = Arrays([_kept_in(mask, p, problem)], [_kept_in(mask, g, problem)], [state], [])
            new = evaluate_buffers(problem, before, values, [values[-1]], scale, factor, extra.restored(arrays))
            return new.params[0], list(new.own[0])

        # With every result a function of the same loads, XLA writes them from one loop, but only if no intermediate is
        # shared between them. So results come from evaluations of their own, on inputs times traced 1.0s, which
        # nothing can fold together; the arithmetic that this repeats is free beside the memory traffic.
        new_p, new_state = result(None)
        if passes > 1:
            new_p, _ = result(ones[0])
        for nth, position in enumerate(i for i, field in enumerate(fields) if field.shape is None):
            if 1 <= nth <= passes - 2:
                new_state[position] = result(ones[nth])[1][position]
        new = (new_p, new_state) if mask is None else _masked(mask, fields, (p, state), (new_p, new_state))
        return _unless(skip, new, (p, state))

    return jax.jit(leaf)


def _unit_update(
    problem: Problem,
    params: list[Any],
    own: list[Any],
    grads: list[Any],
    masks: list[Any],
    shared: list[Any],
    values: Any,
    multipliers: list[Any],
    scale: Any,
    extra: dict[str, Any],
) -> Arrays:
    """The update of leaves that one transformation must see together."""
    seen = [[_kept_in(mask, x, problem) for mask, x in zip(masks, column, strict=True)] for column in (params, grads)]
    new = evaluate_buffers(problem, Arrays(seen[0], seen[1], own, shared), values, multipliers, scale, None, extra)
    kept = [
        after if mask is None else _masked(mask, fields, before, after)
        for mask, fields, before, after in zip(
            masks, layout(problem).own, zip(params, own, strict=True), zip(new.params, new.own, strict=True), strict=True
        )
    ]
    return new._replace(params=[p for p, _ in kept], own=[state for _, state in kept])


def _kept_in(mask: Any, x: Any, problem: Problem) -> Any:
    """The array with 0 where the mask is False, if the transformation may look from one element to another."""
    return x if mask is None or (problem.specs[0].path is None and not problem.row.shaped) else jnp.where(mask, x, jnp.zeros_like(x))


def _masked(mask: Any, fields: Sequence[Field], old: tuple[Any, Any], new: tuple[Any, Any]) -> tuple[Any, list[Any]]:
    """The new values where the mask is True, the old where it is False."""
    state = [
        jnp.where(mask, after, before) if field.shape is None else after
        for field, before, after in zip(fields, old[1], new[1], strict=True)
    ]
    return jnp.where(mask, new[0], old[0]), state


def _unless(skip: Any, new: Any, old: Any) -> Any:
    """The new values, or all old ones where the update is skipped."""
    return new if skip is None else jax.tree.map(lambda after, before: jnp.where(skip, before, after), new, old)


def _unscaled(grads: Sequence[Any], masks: Sequence[Any], loss_scale: Any, found: Any, skipped: Any) -> tuple[Any, Any, list[Any]]:
    """The factor that undoes the loss scale, whether to skip the update, and the count of skipped ones with this."""
    # 0 * g is 0 where g is finite and else NaN, and the sum is one reading of g: the predicates of `isfinite` would be stored.
    zeros = [g * jnp.zeros((), g.dtype) for g in grads]
    finite = [
        jnp.isfinite(jnp.sum(z if mask is None else jnp.where(mask, z, jnp.zeros_like(z)))) for z, mask in zip(zeros, masks, strict=True)
    ]
    skip = (found[0] > 0) | ~functools.reduce(jnp.logical_and, finite)
    return 1 / loss_scale[0].astype(jnp.float64), skip, [skipped + skip.astype(skipped.dtype)]


def _clip_scale(grads: Sequence[Any], masks: Sequence[Any], bound: Any, scale: Any) -> Any:
    """The factor that brings the global norm of the trained gradients, times `scale`, down to the bound, as torch's clip_grad_norm_.

    One scalar, so that no clipped gradient is ever stored; a norm of NaN or infinity gives what torch's gives.
    """
    squares = []
    for g, mask in zip(grads, masks, strict=True):
        wide = times(real(g) if mask is None else real(jnp.where(mask, g, jnp.zeros_like(g))), scale)
        squares.append(jnp.sum(wide * wide).astype(jnp.float64))
    norm = jnp.sqrt(functools.reduce(jnp.add, squares))
    factor = jnp.minimum(bound / (norm + 1e-6), 1.0)
    return factor if scale is None else factor * scale


def _split(hyperparams: Any, rows: Sequence[Row]) -> list[Any]:
    at, out = ONES + 1, []
    for row in rows:
        out.append(hyperparams[at : at + row.width])
        at += row.width
    return out


def _abstract(plan: Plan) -> tuple[Any, ...]:
    sharding = jax.sharding.SingleDeviceSharding(plan.device)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
    params = [array(*leaf.buffer) for leaf in plan.leaves if leaf.inplace]
    kept = [array(*leaf.buffer) for leaf in plan.leaves if not leaf.inplace]
    state = [array(*s) for signatures in (*(leaf.state for leaf in plan.leaves), *plan.shared) for s in signatures]
    grads = [array(*leaf.buffer) for leaf in plan.leaves]
    masks = [array(leaf.buffer[0], np.bool_) for leaf in plan.leaves if leaf.elements]
    width = ONES + 1 + sum(row.width for row in plan.rows)
    extra = [array(*s) for s in plan.extra.leaves if not isinstance(s, Same)]
    scaling = [array((1,), dtype) for dtype in (np.float32, np.float32, np.int32)] if plan.scaled else []
    return params, kept, state, grads, masks, jax.ShapeDtypeStruct((width,), np.float64), extra, scaling


_chosen_passes: dict[Any, int] = {}


def _passes(problem: Problem, elements: bool, clip: bool, extra: Extra, device: Any) -> int:
    """How many evaluations of the rule move the fewest bytes: one, a second for the parameter, or one for each result.

    Asked of the compiler, on one small flat leaf, once for each rule and dtype: of torch's equations with nothing kept beside
    them in float32, and in complex, because what is fused is the same in all real types. A leaf that must keep its shape is
    evaluated once, because operations across its elements store their results anyway.
    """
    spec = problem.specs[0]
    if not spec.flat or extra.leaves:
        return 1
    own_type = problem.row.scaled or problem.row.kept != NOTHING or spec.dtype.startswith("complex")
    dtype = spec.dtype if own_type else "float32"
    small = problem._replace(specs=(spec._replace(shape=(4096,), dtype=dtype),))
    key = (small, elements, clip, device.platform)
    if key not in _chosen_passes:
        try:
            results = min(1 + sum(field.shape is None for field in layout(small).own[0]), ONES)
            counts = {n: _bytes_accessed(_probe(small, elements, clip, device, n)) for n in sorted({1, min(2, results), results})}
        except (TypeError, ValueError):  # it takes the leaf in no other size: a constant for each element
            counts = {1: 0.0}
        _chosen_passes[key] = min(counts, key=lambda n: (counts[n], n))
    return _chosen_passes[key]


def _probe(problem: Problem, elements: bool, clip: bool, device: Any, passes: int) -> Any:
    """The compiled update of one small leaf, donated as in a program."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = lambda shape, kind: jax.ShapeDtypeStruct(shape, kind, sharding=sharding)  # noqa: E731
    spec = problem.specs[0]
    p = array(spec.shape, spec.dtype)
    state = [array(buffer_shape(field, spec), field.dtype) for field in layout(problem).own[0]]
    mask = array(p.shape, np.bool_) if elements else None
    values, ones = (jax.ShapeDtypeStruct((n,), np.float64) for n in (problem.row.width, ONES))
    scale = jax.ShapeDtypeStruct((), np.float64) if clip else None
    function = jax.jit(_leaf_update(problem, passes, NO_EXTRA), donate_argnums=(0, 1))
    return function.lower(p, state, p, mask, values, ones, scale, None, []).compile()


def _bytes_accessed(compiled: Any) -> float:
    return float(compiled.cost_analysis().get("bytes accessed", 0.0))  # absent where nothing is computed
