"""Why a train step compiled another program: what differs from the program before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torch_api._step.recompile_reasons import FIRST_STEP, LastCompilation, RecompileInputs, few_names, list_reasons, log_compilation

from .batch import BatchSignature, describe_kind
from .module_guard import ModuleSignature, plain_value


class CompileInputs(NamedTuple):
    """What decides which program a call needs.

    batch, module: the signatures for which the loss was traced.
    update: what the update depends on.
    updates: whether the call updates, or only adds up gradients.
    """

    batch: BatchSignature
    module: ModuleSignature
    update: RecompileInputs
    updates: bool


class CompiledPrograms:
    """The compilations of one train step. last: the call that compiled last."""

    def __init__(self) -> None:
        self.last: LastCompilation | None = None
        self._last_inputs: CompileInputs | None = None

    def record(self, subject: str, call: int, inputs: CompileInputs) -> None:
        """Note and log that a call has compiled a program.

        Args:
          subject: the first words of the log.
          call: the number of the call.
          inputs: what decided which program the call needs.
        """
        before, self._last_inputs = self._last_inputs, inputs
        reasons = [FIRST_STEP] if before is None else list(_list_changes(before, inputs))
        reasons = reasons or ["a tensor that loss_fn reads from outside was written to, or tensors of the module are in other memory"]
        self.last = LastCompilation(call, 1, "; ".join(reasons))
        log_compilation(subject, self.last)


def _list_changes(before: CompileInputs, now: CompileInputs) -> Iterator[str]:
    yield from _list_batch_changes(before.batch, now.batch)
    yield from _list_module_changes(before.module, now.module)
    if before.updates != now.updates:
        yield "the call updates, after one that only added up gradients" if now.updates else "the call only adds up gradients"
    yield from list_reasons(before.update, now.update)


def _list_batch_changes(before: BatchSignature, now: BatchSignature) -> Iterator[str]:
    (old_tree, old_kinds), (new_tree, new_kinds) = before, now
    if old_tree != new_tree:
        yield "the batch has another structure"
        return
    for i, (old, new) in enumerate(zip(old_kinds, new_kinds, strict=True)):
        if old != new:
            yield f"item {i} of the batch is {describe_kind(new)}, was {describe_kind(old)}"


def _list_module_changes(before: ModuleSignature, now: ModuleSignature) -> Iterator[str]:
    if before.modules != now.modules:
        yield "the module has other submodules"
        return
    names = [[name for name, _ in each.attributes] for each in (before, now)]
    if names[0] != names[1]:
        yield "the modules have other attributes"
    else:
        pairs = zip(before.attributes, now.attributes, strict=True)
        changes = Counter(f"{name} is {plain_value(new)!r}, was {plain_value(old)!r}" for (name, old), (_, new) in pairs if old != new)
        yield from (f"{text}, in {count} module{'' if count == 1 else 's'}" for text, count in changes.items())
    if before.hooks != now.hooks:
        yield "the modules have other forward hooks"
    old_tensors = {name: kind for name, *kind in before.tensors}
    changed = [name for name, *kind in now.tensors if old_tensors.get(name) != kind]
    if changed:
        yield f"the shape or dtype of {few_names(changed)} has changed"
