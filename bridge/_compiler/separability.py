"""What a transformation must see of other leaves: nothing, their values, or their shapes; decided from its traced program."""

# Modules of ours share names that begin with an underscore.
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
    """For each leaf how it may be put before the transformation by itself; None if all must be evaluated together.

    Args:
      row: a row of the transformation.
      skeleton: the paths of all parameters.
      specs: the leaves, in their own shapes.
      extra: the further arguments.

    Raises:
      Whatever the transformation raises for these leaves.
    """
    together = _together(Problem(row, specs, skeleton), extra)
    properties = properties_of(together.jaxpr)
    if properties.has_callback or properties.draws_by_batch:
        return None  # two Python functions cannot be told apart by what they are called; and equal leaves are evaluated as one batch
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
        found.append(chosen[key])  # equal programs: the first leaf's place in the tree serves for all
    return tuple(found)


def fails(problem: Problem, extra: Extra) -> bool:
    """Return whether `init` or `update` raises for these leaves of those of the skeleton, evaluated together."""
    try:
        _Program(problem._replace(row=problem.row.together(0)), extra)
    except Exception:  # noqa: BLE001 - user code may raise anything
        return True
    return False


@functools.lru_cache(64)
def kinds(problem: Problem, extra: Extra) -> tuple[int | None, ...]:
    """Of leaves that are updated together a number: equal for those of equal state whose elements are updated alike, each by itself.

    So they may lie side by side in one buffer, where they are of one size. None for a leaf that is looked at otherwise than by numbers
    that all of it gives.

    Args:
      problem: the transformation and its leaves.
      extra: the further arguments.
    """
    program = _together(problem, extra)
    return program.kinds() or (None,) * len(problem.specs)


def in_parts(row: Row, skeleton: tuple[Path, ...], spec: Spec, extra: Extra, sizes: Iterable[int] = ()) -> bool:
    """Whether a part of such a leaf is updated as within the whole: each element by itself, in a program that knows no size.

    Args:
      row, skeleton, extra: as in `views`.
      spec: the leaf as `views` gave it.
      sizes: those that will be taken for each other. Equations of ours know none; a transformation may branch on one, so its program
        is looked at for each of these.
    """
    if row.unit is not None or not spec.flat:
        return False
    dtype = spec.dtype if row.scaled else _REAL.get(spec.dtype, spec.dtype)  # torch's equations see complex leaves as pairs
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
    """The program for so many elements, with its shapes in numbers."""
    program = _flat(row, skeleton, path, dtype, extra, size)
    return None if program is None else program.text(0, marked=False)


_ANY = 4099  # a prime, which no other array's size is


def _flat(row: Row, skeleton: tuple[Path, ...], path: Path | None, dtype: str, extra: Extra, size: int) -> _Program | None:
    try:
        return _Program(Problem(row, (Spec(path, (size,), dtype),), skeleton), extra)
    except Exception:  # noqa: BLE001 - user code that does not take a leaf of another size may raise anything
        return None


def traced_names(
    row_of: Callable[[frozenset[str]], Row], candidates: frozenset[str], skeleton: tuple[Path, ...], specs: tuple[Spec, ...], extra: Extra
) -> frozenset[str]:
    """The hyperparams among `candidates` that the transformation takes as traced numbers: all, or those that it takes one by one.

    Args:
      row_of: from the names of the traced hyperparams to the row.
      candidates, skeleton, specs, extra: as in `views`.

    Raises:
      Whatever the transformation raises with numbers that are not traced.
    """

    def takes(names: frozenset[str]) -> bool:
        try:
            views(row_of(names), skeleton, specs, extra)
        except Exception:  # noqa: BLE001 - code that looks at the value of a number may raise anything when it has none
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


# Programs that somebody holds, and the last one. Of a thousand leaves one is tens of megabytes.
_alive: weakref.WeakValueDictionary[tuple[Problem, Extra], _Program] = weakref.WeakValueDictionary()
_last: list[_Program] = []


def _together(problem: Problem, extra: Extra) -> _Program:
    key = problem._replace(row=problem.row.together(0)), extra
    program = _alive.get(key) or _Program(*key)
    _alive[key], _last[:] = program, [program]
    return program


def _held(problem: Problem, extra: Extra) -> _Program | None:
    """The program of leaves together, if they were looked at and somebody holds it."""
    return _alive.get((problem._replace(row=problem.row.together(0)), extra))


def given_up() -> list[_Program]:
    """What was looked at last, which is kept here no longer: whoever holds it spares `flat_of` a trace."""
    held, _last[:] = _last[:], []
    return held


def flat_of(problem: Problem, extra: Extra) -> Flat | None:
    """The update of leaves together, in flat arrays, if it was looked at and somebody holds it.

    As `evaluate_buffers` takes and gives them: a pytree (arrays, values, multipliers, arrays among the further arguments). A further
    argument that is no array may mean another thing where it is traced next: `train_program.VALUE_FN` is the loss of the program around it.
    """
    if any(isinstance(x, Same) for x in extra.leaves):
        return None
    program = _held(problem, extra)
    return None if program is None else program.flat


def begun(problem: Problem, extra: Extra) -> Arrays[np.generic] | None:
    """Of each field of the state of leaves together the one number that all its elements begin with, in its type.

    None where there is no such number for one of them, or the leaves were not looked at, or nobody holds what was seen.
    """
    program = _held(problem, extra)
    return None if program is None else program.begun()
