"""THE compiled update: (params, grads, state, hyperparams) -> (params, state), one XLA program per set of live leaves.

Parameters and state are donated and come back at their own addresses; gradients are only read. Every number that a
user may change between steps is an element of one traced float64 vector, so no value of it recompiles. Programs are
shared by all optimizers of the process: what identifies one is the static `Plan`, never an optimizer or a name.
"""

from __future__ import annotations

import functools
import itertools
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

from .dlpack import wait_for, x64
from .masks import path_name
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
class Row:
    """A rule with its static options, and the names of the hyperparams that are traced (with the length of tuples, else 0)."""

    factory: Callable[..., Any]
    statics: tuple[tuple[str, Any], ...]
    traced: tuple[tuple[str, int], ...]

    @property
    def width(self) -> int:
        return sum(max(length, 1) for _, length in self.traced)

    def transformation(self, values: Any) -> Any:
        """The optax transformation with `values`, a sequence of `width` scalars, for its traced hyperparams."""
        hyperparams, at = {}, 0
        for name, length in self.traced:
            hyperparams[name] = tuple(values[at + i] for i in range(length)) if length else values[at]
            at += max(length, 1)
        return self.factory(**dict(self.statics), **hyperparams)


@dataclass(frozen=True)
class Leaf:
    """What the program must know of one live leaf: its row of hyperparams, its arrays, and which way its result goes."""

    row: int
    shape: tuple[int, ...]
    dtype: str
    state: tuple[tuple[tuple[int, ...], str], ...]
    inplace: bool
    elements: bool


@dataclass(frozen=True)
class Plan:
    """All that is static about one update, and so the key of its program."""

    rows: tuple[Row, ...]
    leaves: tuple[Leaf, ...]
    clip: bool
    device: Any


class Program:
    """One compiled update. `apply` runs it; `bytes_accessed` is the compiler's own count."""

    def __init__(self, plan: Plan) -> None:
        global _compilations
        self.plan = plan
        with x64(), jax.disable_jit(False):
            function = jax.jit(functools.partial(_update, plan), donate_argnums=(0, 2))
            self._compiled = function.lower(*_abstract(plan)).compile()
        _compilations += 1

    def apply(
        self, params: list[Memory], state: list[Memory], kept: list[Any], grads: list[Any], masks: list[Any], hyperparams: np.ndarray
    ) -> tuple[list[jax.Array], bool]:
        """Run the update and wait for it, so that torch may write to the gradients again.

        Args:
          params: the memories of the in-place leaves, in plan order; their arrays are donated and replaced.
          state: the memories of the state of every leaf, in plan order; likewise.
          kept: the arrays of the other leaves; only read.
          grads: one array per leaf, of the leaf's shape and dtype.
          masks: a boolean array per leaf with `elements`.
          hyperparams: float64 (ONES + 1 + sum of row widths): ONES times 1.0, the norm bound, then the rows.

        Returns:
          New values for `kept`, in memory of their own, and whether a memory came to lie elsewhere (`storage.settle`).
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
                new_params, new_state, new_kept, token = self._compiled(*arrays, grads, masks, hyperparams)
            moved = settle(itertools.chain(params, state), itertools.chain(new_params, new_state))
            # All results of one execution become ready together. Without this wait the call may still be reading the
            # gradients while torch zeroes them: seen with large operands, never with small ones.
            wait_for(token)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for handler, number, frame in arrived:
            handler(number, frame)
        return new_kept, moved

    @property
    def bytes_accessed(self) -> float:
        return _bytes_accessed(self._compiled)


_programs: dict[Plan, Program] = {}


def program(plan: Plan) -> Program:
    """The program of a plan, compiled when the plan is first seen in this process."""
    found = _programs.get(plan)
    if found is None:
        found = _programs[plan] = Program(plan)
    return found


def traces() -> int:
    """How often an update has been traced in this process."""
    return _traces


def compilations() -> int:
    """How many programs have been compiled in this process."""
    return _compilations


def init_state(row: Row, values: Sequence[float], param: jax.Array) -> list[jax.Array]:
    """State arrays of one leaf, as the rule begins: parameter-like ones in the parameter's dtype, on its device."""
    shaped = state_fields(row).values()
    with x64(), jax.transfer_guard("allow"), jax.default_device(next(iter(param.devices()))):
        arrays = jax.tree.leaves(row.transformation([np.float64(v) for v in values]).init(_lift(param)))
        return [_lower(a, param.dtype) if is_shaped else a for a, is_shaped in zip(arrays, shaped, strict=True)]


@functools.cache
def state_fields(row: Row) -> dict[str, bool]:
    """The state arrays of one leaf by the transformation's own names, in order; True where one has the parameter's shape."""
    like = jax.ShapeDtypeStruct((3, 5), np.float32)  # a shape that no count or flag has
    with x64():
        state = jax.eval_shape(row.transformation((0.0,) * row.width).init, like)
    return {path_name(path): leaf.shape == like.shape for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


@functools.cache
def state_signature(row: Row, shape: tuple[int, ...], dtype: str) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of what `init_state` gives, without the arrays."""
    transformation = row.transformation((0.0,) * row.width)
    with x64():
        state = jax.eval_shape(lambda x: transformation.init(_lift(x)), jax.ShapeDtypeStruct(shape, dtype))
    pairs = zip(jax.tree.leaves(state), state_fields(row).values(), strict=True)
    return tuple((shape, dtype) if shaped else (a.shape, str(a.dtype)) for a, shaped in pairs)


def _update(
    plan: Plan, params: list[Any], kept: list[Any], state: list[Any], grads: list[Any], masks: list[Any], hyperparams: Any
) -> tuple[list[Any], list[Any], list[Any], Any]:
    global _traces
    _traces += 1
    ones, rows = hyperparams[:ONES], _split(hyperparams, plan.rows)
    donated, read, given, states = iter(params), iter(kept), iter(masks), iter(state)
    leaf_masks = [next(given) if leaf.elements else None for leaf in plan.leaves]
    scale = _clip_scale(grads, leaf_masks, hyperparams[ONES]) if plan.clip else None
    new_params: list[Any] = []
    new_kept: list[Any] = []
    new_state: list[Any] = []
    for leaf, g, mask in zip(plan.leaves, grads, leaf_masks, strict=True):
        row = plan.rows[leaf.row]
        p = next(donated) if leaf.inplace else next(read)
        own = [next(states) for _ in leaf.state]
        update = _leaf_update(row, _passes(row, leaf.dtype, leaf.elements, plan.clip, plan.device))
        new_p, new_own = update(p, own, g, mask, rows[leaf.row], ones, scale)
        (new_params if leaf.inplace else new_kept).append(new_p)
        new_state.extend(new_own)
    # jax gives each result the first donated buffer of its type that is left: so the results that donate come first, in
    # the order of their arguments, and those without a buffer of their own last.
    return new_params, new_state, new_kept, ones[0].astype(jnp.float32)


@functools.cache
def _leaf_update(row: Row, passes: int) -> Callable[..., Any]:
    """The update of one leaf, traced once for all leaves of equal signature."""

    def leaf(p: Any, state: list[Any], g: Any, mask: Any, values: Any, ones: Any, scale: Any) -> tuple[Any, list[Any]]:
        transformation = row.transformation(values)
        structure = jax.tree.structure(jax.eval_shape(transformation.init, _lift(p)))

        def evaluate(factor: Any) -> tuple[Any, list[Any]]:
            wide_p, wide_g, *wide_state = [_times(_lift(x), factor) for x in (p, g, *state)]
            wide_g = wide_g if scale is None else _times(wide_g, scale)
            updates, new = transformation.update(wide_g, structure.unflatten(wide_state), wide_p)
            return wide_p + updates, jax.tree.leaves(new)

        # With every result a function of the same loads, XLA writes them from one loop, but only if no intermediate is
        # shared between them. So results come from evaluations of their own, on inputs times traced 1.0s, which
        # nothing can fold together; the arithmetic that this repeats is free beside the memory traffic.
        new_p, new_state = evaluate(None)
        if passes > 1:
            new_p, _ = evaluate(ones[0])
        for nth, position in enumerate(i for i, old in enumerate(state) if old.shape == p.shape):
            if 1 <= nth <= passes - 2:
                new_state[position] = evaluate(ones[nth])[1][position]
        new_p = _lower(new_p, p.dtype)
        new_state = [_lower(new, old.dtype) for new, old in zip(new_state, state, strict=True)]
        if mask is not None:
            new_p = jnp.where(mask, new_p, p)
            new_state = [jnp.where(mask, new, old) if old.shape == p.shape else new for new, old in zip(new_state, state, strict=True)]
        return new_p, new_state

    return jax.jit(leaf)


def _lift(x: Any) -> Any:
    """An array in the type that the arithmetic runs in: half types as float32, complex as its (..., 2) real view."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32:
        return x.astype(jnp.float32)
    return x


def _lower(x: Any, dtype: Any) -> Any:
    """Back from `_lift`: one rounding."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(x[..., 0], x[..., 1])
    return x.astype(dtype)


def _times(x: Any, factor: Any) -> Any:
    if factor is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x * factor.astype(x.dtype)


def _clip_scale(grads: Sequence[Any], masks: Sequence[Any], bound: Any) -> Any:
    """The factor that brings the global norm of the trained gradients down to the bound, as torch's clip_grad_norm_.

    One scalar, so that no clipped gradient is ever stored; a norm of NaN or infinity gives what torch's gives.
    """
    squares = []
    for g, mask in zip(grads, masks, strict=True):
        wide = _lift(g) if mask is None else _lift(jnp.where(mask, g, jnp.zeros_like(g)))
        squares.append(jnp.sum(wide * wide).astype(jnp.float64))
    norm = jnp.sqrt(functools.reduce(jnp.add, squares))
    return jnp.minimum(bound / (norm + 1e-6), 1.0)


def _split(hyperparams: Any, rows: Sequence[Row]) -> list[Any]:
    at, out = ONES + 1, []
    for row in rows:
        out.append(hyperparams[at : at + row.width])
        at += row.width
    return out


def _abstract(plan: Plan) -> tuple[Any, ...]:
    sharding = jax.sharding.SingleDeviceSharding(plan.device)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
    params = [array(leaf.shape, leaf.dtype) for leaf in plan.leaves if leaf.inplace]
    kept = [array(leaf.shape, leaf.dtype) for leaf in plan.leaves if not leaf.inplace]
    state = [array(*signature) for leaf in plan.leaves for signature in leaf.state]
    grads = [array(leaf.shape, leaf.dtype) for leaf in plan.leaves]
    masks = [array(leaf.shape, np.bool_) for leaf in plan.leaves if leaf.elements]
    width = ONES + 1 + sum(row.width for row in plan.rows)
    return params, kept, state, grads, masks, jax.ShapeDtypeStruct((width,), np.float64)


_chosen_passes: dict[Any, int] = {}


def _passes(row: Row, dtype: str, elements: bool, clip: bool, device: Any) -> int:
    """How many evaluations of the rule move the fewest bytes: one, a second for the parameter, or one for each result.

    Asked of the compiler, on one small leaf, once for each rule and dtype.
    """
    key = (row, dtype, elements, clip, device.platform)
    if key not in _chosen_passes:
        results = min(1 + sum(state_fields(row).values()), ONES)
        counts = {n: _bytes_accessed(_probe(row, dtype, elements, clip, device, n)) for n in sorted({1, min(2, results), results})}
        _chosen_passes[key] = min(counts, key=lambda n: (counts[n], n))
    return _chosen_passes[key]


def _probe(row: Row, dtype: str, elements: bool, clip: bool, device: Any, passes: int) -> Any:
    """The compiled update of one leaf of 4096 elements, donated as in a program."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = lambda shape, kind: jax.ShapeDtypeStruct(shape, kind, sharding=sharding)  # noqa: E731
    p = array((4096,), dtype)
    state = [array(*signature) for signature in state_signature(row, p.shape, dtype)]
    mask = array(p.shape, np.bool_) if elements else None
    values, ones = (jax.ShapeDtypeStruct((n,), np.float64) for n in (row.width, ONES))
    scale = jax.ShapeDtypeStruct((), np.float64) if clip else None
    function = jax.jit(_leaf_update(row, passes), donate_argnums=(0, 1))
    return function.lower(p, state, p, mask, values, ones, scale).compile()


def _bytes_accessed(compiled: Any) -> float:
    return float(compiled.cost_analysis()["bytes accessed"])
