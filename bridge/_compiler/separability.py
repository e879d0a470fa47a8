"""Separability analysis: which leaves a transformation can update on their own, and which elementwise, decided from its trace."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable

import numpy as np

from bridge._ir.queries import properties_of
from bridge._names import Path

from .apply_transform import UpdateArrays
from .passes.flatten import FlatProgram
from .spec import ById, ExtraArgsSpec, LeafSpec, TransformSpec, UpdateSpec
from .state_layout import state_layout
from .traced_update import REAL_DTYPES, TracedUpdate


@functools.lru_cache(256)
def separable_specs(
    transform: TransformSpec, all_paths: tuple[Path, ...], specs: tuple[LeafSpec, ...], extra: ExtraArgsSpec
) -> tuple[LeafSpec, ...] | None:
    """Return the spec with which each leaf can be updated on its own; None if all leaves must be updated together.

    Args:
      transform: the transformation.
      all_paths: the paths of all parameters.
      specs: the leaves, in their own shapes.
      extra: the extra arguments.

    Raises:
      Exception: any error that the transformation raises for these leaves.
    """
    together = _trace_jointly(UpdateSpec(transform, specs, all_paths), extra)
    properties = properties_of(together.jaxpr)
    if properties.has_callback or properties.draws_by_batch:
        return None  # the text does not tell two Python functions apart, and a batch of equal leaves would draw other random numbers
    if not all(map(together.can_be_per_leaf, state_layout(together.update_spec).shared_fields)):
        return None
    chosen: dict[tuple[object, ...], LeafSpec] = {}
    found: list[LeafSpec] = []
    for index, spec in enumerate(specs):
        text = together.leaf_text(index)
        if text is None:
            return None
        key = (text, spec.shape, spec.dtype, spec.dim_order)
        if key not in chosen:
            view = _smallest_separable_spec(transform, all_paths, spec, extra, together, index)
            if view is None:
                return None
            chosen[key] = view
        found.append(chosen[key])  # leaves with equal programs take the path of the first
    return tuple(found)


def raises_when_traced(update_spec: UpdateSpec, extra: ExtraArgsSpec) -> bool:
    """Return whether `init` or `update` raises an error for these leaves, evaluated together."""
    try:
        TracedUpdate(update_spec._replace(transform=update_spec.transform.with_joint_set(0)), extra)
    except Exception:  # noqa: BLE001 - user code may raise anything
        return True
    return False


@functools.lru_cache(64)
def bucket_classes(update_spec: UpdateSpec, extra: ExtraArgsSpec) -> tuple[int | None, ...]:
    """Return the bucket class of each leaf of a joint set; None for a leaf that cannot be in a bucket.

    Leaves of one class have equal state fields and the same elementwise equations, so leaves of equal size may share a bucket. Other
    leaves, and other elements of the same leaf, take part only through scalars.

    Args:
      update_spec: the transformation and its leaves.
      extra: the extra arguments.
    """
    program = _trace_jointly(update_spec, extra)
    return program.bucket_classes() or (None,) * len(update_spec.specs)


def is_size_independent(
    transform: TransformSpec, all_paths: tuple[Path, ...], spec: LeafSpec, extra: ExtraArgsSpec, sizes: Iterable[int] = ()
) -> bool:
    """Return whether the update of a leaf is elementwise and does not depend on the size of the leaf.

    Then a part of the leaf is updated exactly as within the whole leaf.

    Args:
      transform, all_paths, extra: as in `separable_specs`.
      spec: the spec of the leaf from `separable_specs`.
      sizes: sizes that must have equal programs. torch's equations depend on no size. An optax transformation may branch on the size,
        so its programs for these sizes are compared.
    """
    if transform.joint_set is not None or not spec.is_flat:
        return False
    dtype = (
        spec.dtype if transform.is_optax else REAL_DTYPES.get(spec.dtype, spec.dtype)
    )  # torch's equations see complex leaves as pairs of reals
    leaf = transform, () if spec.path is None else all_paths, spec.path, dtype, extra
    sizes = [size for size in sizes if size] if transform.is_optax else []

    def as_any(size: int) -> str:
        return (_sized_text(*leaf, _PRIME_SIZE) or "").replace(str(_PRIME_SIZE), str(size))

    return _is_size_free(*leaf) and all(_sized_text(*leaf, size) == as_any(size) for size in sizes)


@functools.lru_cache(256)
def _is_size_free(row: TransformSpec, skeleton: tuple[Path, ...], path: Path | None, dtype: str, extra: ExtraArgsSpec) -> bool:
    programs = [_trace_flat_leaf(row, skeleton, path, dtype, extra, size) for size in (4096, _PRIME_SIZE)]
    if None in programs or not all(program.is_elementwise for program in programs if program is not None):
        return False
    return len({program.leaf_text(0) for program in programs if program is not None}) == 1


@functools.lru_cache(1024)
def _sized_text(
    row: TransformSpec, skeleton: tuple[Path, ...], path: Path | None, dtype: str, extra: ExtraArgsSpec, size: int
) -> str | None:
    """Return the program for a leaf of this size, with its shapes as numbers."""
    program = _trace_flat_leaf(row, skeleton, path, dtype, extra, size)
    return None if program is None else program.leaf_text(0, marked=False)


_PRIME_SIZE = 4099  # a prime, so that no other array has this size


def _trace_flat_leaf(
    row: TransformSpec, skeleton: tuple[Path, ...], path: Path | None, dtype: str, extra: ExtraArgsSpec, size: int
) -> TracedUpdate | None:
    try:
        return TracedUpdate(UpdateSpec(row, (LeafSpec(path, (size,), dtype),), skeleton), extra)
    except Exception:  # noqa: BLE001 - user code that does not take a leaf of another size may raise anything
        return None


def traceable_hyperparams(
    transform_of: Callable[[frozenset[str]], TransformSpec],
    candidates: frozenset[str],
    all_paths: tuple[Path, ...],
    specs: tuple[LeafSpec, ...],
    extra: ExtraArgsSpec,
) -> frozenset[str]:
    """Return the hyperparams among `candidates` that the transformation accepts as traced scalars.

    These are all candidates, or all that the transformation accepts one at a time. If it does not accept these together, there are none.

    Args:
      transform_of: from the names of the traced hyperparams to the transformation.
      candidates: the names of the hyperparams that may be traced.
      all_paths, specs, extra: as in `separable_specs`.

    Raises:
      Exception: any error that the transformation raises with scalars that are not traced.
    """

    def takes(names: frozenset[str]) -> bool:
        try:
            separable_specs(transform_of(names), all_paths, specs, extra)
        except Exception:  # noqa: BLE001 - code that reads the value of a traced scalar may raise anything
            return False
        return True

    if takes(candidates):
        return candidates
    separable_specs(transform_of(frozenset()), all_paths, specs, extra)
    traceable = frozenset(name for name in candidates if takes(frozenset((name,))))
    return traceable if takes(traceable) else frozenset()


def _smallest_separable_spec(
    row: TransformSpec, skeleton: tuple[Path, ...], spec: LeafSpec, extra: ExtraArgsSpec, together: TracedUpdate, index: int
) -> LeafSpec | None:
    flat, text = (math.prod(spec.shape),), together.leaf_text(index)
    shapeless = functools.cache(lambda: together.shape_free_text(index))
    for view in (LeafSpec(None, flat, spec.dtype), LeafSpec(spec.path, flat, spec.dtype), spec):
        try:
            alone = TracedUpdate(UpdateSpec(row.with_joint_set(None), (view,), () if view.path is None else skeleton), extra)
        except Exception:  # noqa: BLE001 - user code that does not take a leaf in this way may raise anything
            continue
        if alone.leaf_text(0) == text and (view is spec or alone.is_elementwise):
            return view
        if view is not spec and shapeless() is not None and alone.shape_free_text(0) == shapeless():
            return view._replace(reduces_over_leaf=True)
    return None


# The traces that callers hold, and the last one. A trace of many leaves is large, so no other is kept.
_live_traces: weakref.WeakValueDictionary[tuple[UpdateSpec, ExtraArgsSpec], TracedUpdate] = weakref.WeakValueDictionary()
_last_trace: list[TracedUpdate] = []


def _trace_jointly(update_spec: UpdateSpec, extra: ExtraArgsSpec) -> TracedUpdate:
    key = update_spec._replace(transform=update_spec.transform.with_joint_set(0)), extra
    program = _live_traces.get(key) or TracedUpdate(*key)
    _live_traces[key], _last_trace[:] = program, [program]
    return program


def _held_trace(update_spec: UpdateSpec, extra: ExtraArgsSpec) -> TracedUpdate | None:
    """Return the trace of these leaves together, if a caller holds one."""
    return _live_traces.get((update_spec._replace(transform=update_spec.transform.with_joint_set(0)), extra))


def release_last_trace() -> list[TracedUpdate]:
    """Return the last trace and release it here. `flat_program` uses the trace while the caller holds it."""
    held, _last_trace[:] = _last_trace[:], []
    return held


def flat_program(update_spec: UpdateSpec, extra: ExtraArgsSpec) -> FlatProgram | None:
    """Return the update of these leaves together for flat arrays; None if no caller holds its trace, or if it calls back into Python.

    Inputs and results are those of `evaluate_buffers`: (arrays, values, multipliers, arrays among the extra arguments). It is also None
    if an extra argument is no array, because such an argument may have another meaning in the next trace: `LOSS_OF_PARAMS` of
    `bridge._train.train_program` is the loss of the program that is being traced.
    """
    if any(isinstance(x, ById) for x in extra.leaves):
        return None
    program = _held_trace(update_spec, extra)
    return None if program is None else program.flat_program


def initial_scalars(update_spec: UpdateSpec, extra: ExtraArgsSpec) -> UpdateArrays[np.generic] | None:
    """Return for each state field of these leaves together the initial value that all its elements have, as a scalar of its dtype.

    Return None if a field has no such value, or if no caller holds the trace.
    """
    program = _held_trace(update_spec, extra)
    return None if program is None else program.initial_scalars()
