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

from .apply_transform import Arrays
from .passes.flatten import Flat
from .spec import Extra, Problem, Row, Same, Spec
from .state_layout import layout
from .traced_update import _REAL, _Program


@functools.lru_cache(256)
def views(row: Row, skeleton: tuple[Path, ...], specs: tuple[Spec, ...], extra: Extra) -> tuple[Spec, ...] | None:
    """Return the spec with which each leaf can be updated on its own; None if all leaves must be updated together.

    Args:
      transform: the transformation.
      all_paths: the paths of all parameters.
      specs: the leaves, in their own shapes.
      extra: the extra arguments.

    Raises:
      Exception: any error that the transformation raises for these leaves.
    """
    together = _together(Problem(row, specs, skeleton), extra)
    properties = properties_of(together.jaxpr)
    if properties.has_callback or properties.draws_by_batch:
        return None  # the text does not tell two Python functions apart, and a batch of equal leaves would draw other random numbers
    if not all(map(together.may_be_each_leafs_own, layout(together.problem).shared)):
        return None
    chosen: dict[tuple[object, ...], Spec] = {}
    found: list[Spec] = []
    for index, spec in enumerate(specs):
        text = together.text(index)
        if text is None:
            return None
        key = (text, spec.shape, spec.dtype, spec.order)
        if key not in chosen:
            view = _smallest_view(row, skeleton, spec, extra, together, index)
            if view is None:
                return None
            chosen[key] = view
        found.append(chosen[key])  # leaves with equal programs take the path of the first
    return tuple(found)


def fails(problem: Problem, extra: Extra) -> bool:
    """Return whether `init` or `update` raises an error for these leaves, evaluated together."""
    try:
        _Program(problem._replace(row=problem.row.together(0)), extra)
    except Exception:  # noqa: BLE001 - user code may raise anything
        return True
    return False


@functools.lru_cache(64)
def kinds(problem: Problem, extra: Extra) -> tuple[int | None, ...]:
    """Return the bucket class of each leaf of a joint set; None for a leaf that cannot be in a bucket.

    Leaves of one class have equal state fields and the same elementwise equations, so leaves of equal size may share a bucket. Other
    leaves, and other elements of the same leaf, take part only through scalars.

    Args:
      update_spec: the transformation and its leaves.
      extra: the extra arguments.
    """
    program = _together(problem, extra)
    return program.kinds() or (None,) * len(problem.specs)


def in_parts(row: Row, skeleton: tuple[Path, ...], spec: Spec, extra: Extra, sizes: Iterable[int] = ()) -> bool:
    """Return whether the update of a leaf is elementwise and does not depend on the size of the leaf.

    Then a part of the leaf is updated exactly as within the whole leaf.

    Args:
      transform, all_paths, extra: as in `separable_specs`.
      spec: the spec of the leaf from `separable_specs`.
      sizes: sizes that must have equal programs. torch's equations depend on no size. An optax transformation may branch on the size,
        so its programs for these sizes are compared.
    """
    if row.unit is not None or not spec.flat:
        return False
    dtype = spec.dtype if row.scaled else _REAL.get(spec.dtype, spec.dtype)  # torch's equations see complex leaves as pairs of reals
    leaf = row, () if spec.path is None else skeleton, spec.path, dtype, extra
    sizes = [size for size in sizes if size] if row.scaled else []

    def as_any(size: int) -> str:
        return (_in_numbers(*leaf, _ANY) or "").replace(str(_ANY), str(size))

    return _knows_no_size(*leaf) and all(_in_numbers(*leaf, size) == as_any(size) for size in sizes)


@functools.lru_cache(256)
def _knows_no_size(row: Row, skeleton: tuple[Path, ...], path: Path | None, dtype: str, extra: Extra) -> bool:
    programs = [_flat(row, skeleton, path, dtype, extra, size) for size in (4096, _ANY)]
    if None in programs or not all(program.elementwise for program in programs if program is not None):
        return False
    return len({program.text(0) for program in programs if program is not None}) == 1


@functools.lru_cache(1024)
def _in_numbers(row: Row, skeleton: tuple[Path, ...], path: Path | None, dtype: str, extra: Extra, size: int) -> str | None:
    """Return the program for a leaf of this size, with its shapes as numbers."""
    program = _flat(row, skeleton, path, dtype, extra, size)
    return None if program is None else program.text(0, marked=False)


_ANY = 4099  # a prime, so that no other array has this size


def _flat(row: Row, skeleton: tuple[Path, ...], path: Path | None, dtype: str, extra: Extra, size: int) -> _Program | None:
    try:
        return _Program(Problem(row, (Spec(path, (size,), dtype),), skeleton), extra)
    except Exception:  # noqa: BLE001 - user code that does not take a leaf of another size may raise anything
        return None


def traced_names(
    row_of: Callable[[frozenset[str]], Row], candidates: frozenset[str], skeleton: tuple[Path, ...], specs: tuple[Spec, ...], extra: Extra
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
            views(row_of(names), skeleton, specs, extra)
        except Exception:  # noqa: BLE001 - code that reads the value of a traced scalar may raise anything
            return False
        return True

    if takes(candidates):
        return candidates
    views(row_of(frozenset()), skeleton, specs, extra)
    singly = frozenset(name for name in candidates if takes(frozenset((name,))))
    return singly if takes(singly) else frozenset()


def _smallest_view(row: Row, skeleton: tuple[Path, ...], spec: Spec, extra: Extra, together: _Program, index: int) -> Spec | None:
    flat, text = (math.prod(spec.shape),), together.text(index)
    shapeless = functools.cache(lambda: together.shapeless(index))
    for view in (Spec(None, flat, spec.dtype), Spec(spec.path, flat, spec.dtype), spec):
        try:
            alone = _Program(Problem(row.together(None), (view,), () if view.path is None else skeleton), extra)
        except Exception:  # noqa: BLE001 - user code that does not take a leaf in this way may raise anything
            continue
        if alone.text(0) == text and (view is spec or alone.elementwise):
            return view
        if view is not spec and shapeless() is not None and alone.shapeless(0) == shapeless():
            return view._replace(whole=True)
    return None


# The traces that callers hold, and the last one. A trace of many leaves is large, so no other is kept.
_alive: weakref.WeakValueDictionary[tuple[Problem, Extra], _Program] = weakref.WeakValueDictionary()
_last: list[_Program] = []


def _together(problem: Problem, extra: Extra) -> _Program:
    key = problem._replace(row=problem.row.together(0)), extra
    program = _alive.get(key) or _Program(*key)
    _alive[key], _last[:] = program, [program]
    return program


def _held(problem: Problem, extra: Extra) -> _Program | None:
    """Return the trace of these leaves together, if a caller holds one."""
    return _alive.get((problem._replace(row=problem.row.together(0)), extra))


def given_up() -> list[_Program]:
    """Return the last trace and release it here. `flat_program` uses the trace while the caller holds it."""
    held, _last[:] = _last[:], []
    return held


def flat_of(problem: Problem, extra: Extra) -> Flat | None:
    """Return the update of these leaves together for flat arrays; None if no caller holds its trace, or if it calls back into Python.

    Inputs and results are those of `evaluate_buffers`: (arrays, values, multipliers, arrays among the extra arguments). It is also None
    if an extra argument is no array, because such an argument may have another meaning in the next trace: `LOSS_OF_PARAMS` of
    `bridge._train.train_program` is the loss of the program that is being traced.
    """
    if any(isinstance(x, Same) for x in extra.leaves):
        return None
    program = _held(problem, extra)
    return None if program is None else program.flat


def begun(problem: Problem, extra: Extra) -> Arrays[np.generic] | None:
    """Return for each state field of these leaves together the initial value that all its elements have, as a scalar of its dtype.

    Return None if a field has no such value, or if no caller holds the trace.
    """
    program = _held(problem, extra)
    return None if program is None else program.begun()
