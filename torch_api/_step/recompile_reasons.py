"""The executables that an optimizer has used, and the reasons why it needed another one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from bridge import _logs
from bridge._compiler import plan as update
from bridge._compiler import policy
from bridge._compiler.spec import ExtraArgsSpec
from bridge._runtime import cache, executable
from bridge._warnings import CompilationWarning, stack_level
from bridge._xla.compile import LazyExecutable

# After this many sets of gradients with executables of their own, executables are chosen so that they serve any set.
_MAX_SPECIFIC_SETS = 3
FIRST_STEP = "it is the first step"


class CacheInfo(NamedTuple):
    """Statistics of an optimizer's executables.

    Args:
      hits: the steps that ran executables which were ready for their set of gradients.
      misses: the steps that chose executables, because the set of gradients was new or a group had changed.
      programs: the executables that this optimizer has used.
      compilations: the executables among them that were compiled for this optimizer. An executable of many equal parameters counts as
        one, even if it is compiled as several subcomputations, which other optimizers may share.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedSGD([w])
      >>> for _ in range(3):
      ...     w.sum().backward()
      ...     opt.step()
      >>> info = opt.cache_info()
      >>> info.hits, info.misses, info.programs
      (2, 1, 1)
    """

    hits: int
    misses: int
    programs: int
    compilations: int


class LastCompilation(NamedTuple):
    """The last step that compiled.

    step: its number among the steps that had gradients, from 1 on. programs: how many programs it compiled. reason: why.
    """

    step: int
    programs: int
    reason: str


class RecompileInputs(NamedTuple):
    """The inputs that decide which executables a step needs: names and plans of the parameters, and the options that all of them share.

    Parameters of one bucket stand together.
    """

    leaves: Sequence[tuple[Sequence[str], update.LeafPlan]]
    clip: bool
    scaled: bool
    finite_check_done: bool
    extra: ExtraArgsSpec


class UsedExecutables:
    """The executables that one optimizer has used."""

    def __init__(self, cls_name: str) -> None:
        self._cls_name = cls_name
        self.hits = self.misses = self._compilations = self._specific_sets = 0
        self._executables: set[executable.UpdateExecutable] = set()
        self._last_inputs: RecompileInputs | None = None
        self.last_compilation: LastCompilation | None = None

    @property
    def info(self) -> CacheInfo:
        return CacheInfo(self.hits, self.misses, len(self._executables), self._compilations)

    @property
    def sets_keep_changing(self) -> bool:
        """Whether the set of gradients changes so often that executables should serve any set."""
        return self._specific_sets > _MAX_SPECIFIC_SETS

    def get_executables(
        self, plans: Sequence[update.UpdatePlan], stats_plans: Sequence[update.StatsPlan], others: Iterable[LazyExecutable]
    ) -> tuple[list[executable.UpdateExecutable], list[executable.StatsExecutable]]:
        """Return the executables of these plans; `others` are compiled with them."""
        before = cache.compilations()
        found, stats = cache.get_executables(plans, stats_plans, others, self._cls_name)
        self._compilations += cache.compilations() - before
        self._specific_sets += any(_is_specific_to_one_set(p.plan) for p in set(found) - self._executables)
        self._executables.update(found)
        return found, stats

    def record_miss(self, inputs: RecompileInputs, compilation_count: int, devices: Iterable[torch.device]) -> None:
        """Count a set of gradients that was new, log what was compiled, and warn if a step after the first one had to compile."""
        last, self._last_inputs = self._last_inputs, inputs
        self.misses += 1
        if not compilation_count:
            return
        reason = FIRST_STEP if last is None else describe_reasons(last, inputs)
        self.last_compilation = LastCompilation(self.hits + self.misses, compilation_count, reason)
        log_compilation(f"{self._cls_name} on {', '.join(sorted(map(str, devices)))}", self.last_compilation)
        if last is not None:
            what = "another program" if compilation_count == 1 else f"{compilation_count} more programs"
            warnings.warn(f"{self._cls_name}.step compiled {what}: {reason}", CompilationWarning, stacklevel=stack_level())


def log_compilation(subject: str, compilation: LastCompilation) -> None:
    """Log why a step compiled. `subject`: the first words of the message."""
    step, programs, reason = compilation
    _logs.RECOMPILES.info("%s: step %d compiled %d program%s: %s", subject, step, programs, "" if programs == 1 else "s", reason)


def _is_specific_to_one_set(plan: update.UpdatePlan) -> bool:
    """Return whether an executable hardly serves other sets of gradients: its leaves are of several kinds, or of an unusual number."""
    return len(set(plan.leaves)) > 1 or len(plan.leaves) not in policy.CHUNKING.chunk_sizes


def describe_reasons(before: RecompileInputs, now: RecompileInputs) -> str:
    """Return the differences between the inputs of two steps, as text."""
    return "; ".join(list_reasons(before, now)) or "nothing that a program is known to depend on has changed"


def list_reasons(before: RecompileInputs, now: RecompileInputs) -> list[str]:
    """Return the differences between the inputs of two steps."""
    causes: list[str] = []
    if before.clip != now.clip:
        causes.append(f"max_grad_norm is {'set' if now.clip else 'None'} now")
    if before.scaled != now.scaled:
        causes.append(f"the gradients are {'' if now.scaled else 'no longer '}those of a scaled loss")
    elif before.finite_check_done != now.finite_check_done:
        causes.append(f"{'GradScaler' if now.finite_check_done else 'the program itself'} now checks whether gradients are finite")
    if before.extra != now.extra:
        causes.append("step has other extra arguments, or arguments of other shapes or dtypes")
    old, new = ({name: leaf for names, leaf in at.leaves for name in names} for at in (before, now))
    changed = [(name, what) for name in old.keys() & new.keys() for what in _list_changes(old[name], new[name])]
    for what in dict.fromkeys(what for _, what in sorted(changed)):
        causes.append(f"{what} of {few_names(sorted(name for name, other in changed if other == what))}")
    causes += [f"it now updates {few_names(sorted(new.keys() - old.keys()))}"] if new.keys() - old.keys() else []
    causes += (
        [f"it no longer updates {few_names(sorted(old.keys() - new.keys()))} (frozen or without gradient)"]
        if old.keys() - new.keys()
        else []
    )
    return causes


def _list_changes(before: update.LeafPlan, now: update.LeafPlan) -> Iterable[str]:
    """Yield the differences between two plans of one parameter."""
    other_count = len(before.state) != len(now.state)
    if other_count:
        yield f"the number of state arrays is {len(now.state)}, was {len(before.state)},"
    if before.transform != now.transform:
        old, new = dict(before.transform.static_hyperparams), dict(now.transform.static_hyperparams)
        names = [name for name in new if name in old and old[name] != new[name]]
        yield from (f"{name} is {new[name]!r}, was {old[name]!r}," for name in names)
        if not names and not other_count:
            yield "other hyperparameters, or other state beside the transformation's,"
    if before.spec.dtype != now.spec.dtype:
        yield f"the dtype is {now.spec.dtype}, was {before.spec.dtype},"
    elif before.spec != now.spec:
        yield "another shape"
    if before.grad_dtype != now.grad_dtype:
        yield f"the dtype of the gradient is {now.grad_dtype}, was {before.grad_dtype},"
    if before.inplace != now.inplace:
        yield "another writeback"
    if not other_count and [dtype for _, dtype in before.state] != [dtype for _, dtype in now.state]:
        yield "another dtype of the state"
    if before.has_element_mask != now.has_element_mask:
        yield "another mask of elements"


def few_names(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are, as text."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
