"""Which compiled programs an optimizer has used, and why it needed one more."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bridge._compiler import chunking
from bridge._compiler import plan as update
from bridge._compiler.spec import Extra
from bridge._runtime import cache, executable
from bridge._warnings import CompilationWarning, stack_level

# After so many sets of live leaves with programs of their own, programs serve any.
_SETS = 3


class CacheInfo(NamedTuple):
    """What the steps of an optimizer found ready.

    hits: steps whose set of live parameters was at hand. misses: those for which it was put together. programs: compiled
    programs that this optimizer has used. compilations: those of them that were compiled for it. One of
    many equal parameters that are seen together is compiled in pieces, which others may share, and counts as one.
    """

    hits: int
    misses: int
    programs: int
    compilations: int


class Situation(NamedTuple):
    """What decides which programs a step runs: names and signature of live parameters, those of a loop together; what all share."""

    leaves: Sequence[tuple[Sequence[str], update.Leaf]]
    clip: bool
    scaled: bool
    checked: bool
    extra: Extra


class Cache:
    """The programs of one optimizer."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.hits = self.misses = self._compilations = self._sets = 0
        self._programs: set[executable.Program] = set()
        self._last: Situation | None = None

    @property
    def info(self) -> CacheInfo:
        return CacheInfo(self.hits, self.misses, len(self._programs), self._compilations)

    @property
    def restless(self) -> bool:
        """Whether sets of live leaves change so often that programs should serve any."""
        return self._sets > _SETS

    def programs(self, plans: Sequence[update.Plan]) -> list[executable.Program]:
        """The programs of these plans."""
        before = cache.compilations()
        found = cache.programs(plans)
        self._compilations += cache.compilations() - before
        self._sets += any(_of_one_set(p.plan) for p in set(found) - self._programs)
        self._programs.update(found)
        return found

    def note(self, situation: Situation, compiled: int) -> None:
        """Warn if a step that is not the first had to compile."""
        last, self._last = self._last, situation
        self.misses += 1
        if compiled and last is not None:
            what = "a program" if compiled == 1 else f"{compiled} programs"
            warnings.warn(
                f"{self._owner}.step compiled {what} more: {_cause(last, situation)}", CompilationWarning, stacklevel=stack_level()
            )


def _of_one_set(plan: update.Plan) -> bool:
    """Whether a program is hardly of use to other sets of live leaves: of several kinds, or for a number of equal ones that no tile has."""
    return len(set(plan.leaves)) > 1 or len(plan.leaves) not in chunking.sizes()


def _cause(before: Situation, now: Situation) -> str:
    causes = []
    if before.clip != now.clip:
        causes.append(f"max_grad_norm is {'set' if now.clip else 'None'} now")
    if before.scaled != now.scaled:
        causes.append(f"the gradients are {'' if now.scaled else 'no longer '}those of a scaled loss")
    elif before.checked != now.checked:
        causes.append(f"{'GradScaler' if now.checked else 'the program itself'} looks whether gradients are finite now")
    if before.extra != now.extra:
        causes.append("the further arguments of step are others, or have other shapes or types")
    old, new = ({name: leaf for names, leaf in at.leaves for name in names} for at in (before, now))
    changed = [(name, what) for name in old.keys() & new.keys() for what in _changes(old[name], new[name])]
    for what in dict.fromkeys(what for _, what in sorted(changed)):
        causes.append(f"{what} of {few_names(sorted(name for name, other in changed if other == what))}")
    causes += [f"{few_names(sorted(new.keys() - old.keys()))} take part now"] if new.keys() - old.keys() else []
    causes += [f"{few_names(sorted(old.keys() - new.keys()))} do not, frozen or without gradient"] if old.keys() - new.keys() else []
    return "; ".join(causes) or "nothing that a program is known to depend on has changed"


def _changes(before: update.Leaf, now: update.Leaf) -> Iterable[str]:
    """What is different about one parameter."""
    if before.row != now.row:
        old, new = dict(before.row.statics), dict(now.row.statics)
        names = [name for name in new if name in old and old[name] != new[name]]
        yield from (f"{name} is {new[name]!r}, was {old[name]!r}," for name in names)
        if not names:
            yield "the hyperparameters that are in use, or what is kept beside the state, are others"
    if before.spec.dtype != now.spec.dtype:
        yield f"the dtype is {now.spec.dtype}, was {before.spec.dtype},"
    elif before.spec != now.spec:
        yield "the shape is another"
    if before.gradient_dtype != now.gradient_dtype:
        yield f"the dtype of the gradient is {now.gradient_dtype}, was {before.gradient_dtype},"
    if before.inplace != now.inplace:
        yield "the way of writing back is another"
    if [dtype for _, dtype in before.state] != [dtype for _, dtype in now.state]:
        yield "the dtype of the state is another"
    if before.elements != now.elements:
        yield "the mask of elements is another"


def few_names(names: Sequence[str]) -> str:
    """Names for a text: the first three, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
