"""The engine: torch's param groups in, one compiled update per device, results in the parameters' own memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from bridge import masks, step, storage, tree
from bridge.dlpack import device_of, operands
from bridge.rules import Rule

from . import checkpoint, groups, report
from .plan import Launch, Leaf, allocate_state, bad_gradient, describe, sort_key

_memory = attrgetter("memory")
_address = torch.Tensor.data_ptr
_NO_STATE: dict[str, Any] = {}
# Sets of live leaves whose launch is at hand; an older one is put together again from its compiled program.
_LAUNCHES_KEPT = 64


class OptaxOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose update is one compiled JAX program over the parameters' own memory.

    Args:
      params: all that torch.optim takes: tensors, (name, tensor) pairs, or dict groups of either. Patterns need names.
      tx: a `bridge.rules.Rule`.
      mask: which parameters are optimized, True = optimized; any selector of the README. False leaves a parameter's
        bits alone for good: no state, no decay, gradient not read, left out of the norm.
      decay_mask: which parameters decay, True = with the group's `weight_decay`; any selector.
      max_grad_norm: bound on the global norm of the gradients that this step reads, over all groups; None for no
        bound. As `torch.nn.utils.clip_grad_norm_` before the step, but the gradients are not written to.
      writeback: "inplace" moves each parameter that owns its storage into jax-owned memory, once; "copy" leaves all
        where they are and copies results into them. Both keep the tensors' identity; `report()` shows which and why.
      **hyperparams: the rule's hyperparams; each number lives in `param_groups` and may change at any step at no cost.

    The step waits for its results. Parameters with `requires_grad=False` are frozen even with a stale `.grad`
    (torch.optim would still update them); a parameter whose `.grad` is None keeps value, state and step count.

    Raises:
      ValueError, TypeError: empty or duplicate parameters, unknown arguments or group keys, values out of range, a
        selector that fits nothing. Nothing has been changed then.
    """

    def __init__(
        self,
        params: Any,
        tx: Rule,
        *,
        mask: Any = None,
        decay_mask: Any = None,
        max_grad_norm: float | None = None,
        writeback: str = "inplace",
        **hyperparams: Any,
    ) -> None:
        owner = type(self).__name__
        if not isinstance(tx, Rule):
            raise TypeError(f"{owner}: tx is {tx!r}; expected a rule such as bridge.rules.ADAM.")
        if writeback not in ("inplace", "copy"):
            raise ValueError(f"{owner}: writeback is {writeback!r}; expected 'inplace' or 'copy'.")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"{owner}: max_grad_norm is {max_grad_norm}; expected a positive number, or None for no bound.")
        self.hyperparams = groups.hyperparam_defaults(tx)
        groups.check_keywords(
            owner, hyperparams, self.hyperparams.keys() | groups.TORCH_OPTIONS | {"mask", "decay_mask", "max_grad_norm", "writeback"}
        )
        defaults = self.hyperparams | hyperparams
        groups.check_group(owner, defaults, self.hyperparams)
        self._rule, self._writeback, self.max_grad_norm = tx, writeback, max_grad_norm
        self._selectors = [s if _asks_each(s) else None for s in (mask, decay_mask)]
        self._leaves: list[Leaf] = []
        self._constructed = False
        super().__init__(groups.listed(owner, params), defaults)
        self._resolve(self._leaves, mask, decay_mask)
        self._constructed = True
        self._place()

    # ------------------------------------------------------------------ groups and columns

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; its `mask` key, any selector, speaks about the group's own parameters.

        Selectors given to the constructor spoke about the parameters of that time; those that are functions of
        (name, param) are asked about the new ones too.

        Raises:
          ValueError, TypeError: as the constructor; the optimizer is then as before.
        """
        owner = type(self).__name__
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            groups.check_group(owner, self.defaults | param_group, self.hyperparams)
        before = len(self.param_groups)
        mask = param_group.pop("mask", None) if isinstance(param_group, dict) else None
        super().add_param_group(groups.without_duplicates(owner, param_group))
        try:
            leaves = self._new_leaves(self.param_groups[-1])
            for leaf, decision in zip(leaves, masks.column(mask, self._described(leaves), "mask"), strict=True):
                leaf.decide(decision._replace(rule=f"group {before} {decision.rule}") if mask is not None else decision)
            if self._constructed:
                self._resolve(leaves, *self._selectors)
        except BaseException:
            del self.param_groups[before:]
            raise
        self._leaves += leaves
        if self._constructed:
            self._place()

    def _new_leaves(self, group: dict[str, Any]) -> list[Leaf]:
        leaves = []
        for name, p in zip(groups.names(group, len(self._leaves)), group["params"], strict=True):
            groups.check_parameter(type(self).__name__, name, p)
            leaves.append(Leaf(name, p, len(self.param_groups) - 1))
            leaves[-1].label = group.get("label")
        return leaves

    def names(self) -> list[str]:
        """A name for each parameter, in the order of the groups: its own, or where there are none its position."""
        start, names = 0, []
        for group in self.param_groups:
            names += groups.names(group, start)
            start += len(group["params"])
        return names

    def _follow_groups(self) -> None:
        """Take over what was done to `param_groups` by hand: parameters replaced, moved, removed, groups exchanged.

        A parameter that takes the name of one that is gone takes its mask and decay too.
        """
        known = {id(leaf.param): leaf for leaf in self._leaves}
        params = [(index, p) for index, group in enumerate(self.param_groups) for p in group["params"]]
        present = {id(p) for _, p in params}
        gone = {leaf.name: leaf for leaf in self._leaves if id(leaf.param) not in present}
        leaves = []
        for name, (index, p) in zip(self.names(), params, strict=True):
            leaf = known.get(id(p))
            if leaf is None:
                groups.check_parameter(type(self).__name__, name, p)
                leaf = Leaf.restored(name, p, index, gone[name].decided) if name in gone else Leaf(name, p, index)
            leaf.group = index
            leaves.append(leaf)
        self._leaves = leaves

    def _described(self, leaves: list[Leaf]) -> masks.Leaves:
        named = all("param_names" in group for group in self.param_groups)
        names = [leaf.name for leaf in leaves]
        return masks.Leaves(names, [leaf.param for leaf in leaves], lambda: tree.nest((x.name, x.param) for x in leaves), named)

    def _resolve(self, leaves: list[Leaf], mask: Any, decay_mask: Any) -> None:
        described = self._described(leaves)
        trained = masks.column(mask, described, "mask")
        decays = masks.column(decay_mask, described, "decay_mask")
        if decay_mask is not None and "weight_decay" not in self.defaults:
            raise ValueError(f"{type(self).__name__}: decay_mask is given, but this rule has no weight_decay.")
        for leaf, is_trained, decay in zip(leaves, trained, decays, strict=True):
            leaf.decide(is_trained)
            leaf.decay = decay

    def _place(self) -> None:
        """Give each leaf its row of hyperparams and its memory, and forget the launches that knew otherwise."""
        self._read_row, self._options = groups.group_reader(self._rule, self.hyperparams)
        self._signature = self._group_signature()
        self._follow_groups()
        keys = dict.fromkeys((leaf.group, bool(leaf.decay.value)) for leaf in self._leaves)
        self._rows = [(self.param_groups[g], decays, self._read_row(self.param_groups[g])) for g, decays in keys]
        index = {key: i for i, key in enumerate(keys)}
        self._active: list[Leaf] = []
        for leaf in self._leaves:
            leaf.row, leaf.state = index[leaf.group, bool(leaf.decay.value)], None
            if leaf.trained and self.param_groups[leaf.group].get("trainable", True):
                self._active.append(leaf)
        for leaf in self._active:
            device_of(leaf.param)  # raises before the first parameter is moved
        for leaf in self._active:
            if leaf.param.requires_grad:
                self._place_leaf(leaf)
        self._active.sort(key=sort_key)
        self._launches: dict[tuple[int, ...], list[Launch]] = {}

    def _place_leaf(self, leaf: Leaf) -> None:
        with torch.inference_mode(False):  # else the parameter would become an inference tensor
            leaf.place(self._writeback)
        twin = next((x for x in self._active if leaf.memory is not None and x.memory is leaf.memory and x is not leaf), None)
        if twin is not None:
            raise ValueError(
                f"{type(self).__name__}: parameters {twin.name!r} and {leaf.name!r} look into the same memory. Tie them by one "
                "Parameter object, or give each memory of its own: param.data = param.data.clone()."
            )

    def _new_launches(self, live: tuple[int, ...]) -> list[Launch]:
        """Launches for a set of live leaves not seen since the last change, with state for leaves that have none yet."""
        leaves = [self._active[i] for i in live]
        values = self._row_values()
        on_device = [list(part) for _, part in itertools.groupby(leaves, key=attrgetter("device"))]
        if len(on_device) > 1 and self.max_grad_norm is not None:
            raise ValueError(
                f"{type(self).__name__}: max_grad_norm needs one norm over all parameters, but they lie on "
                f"{', '.join(str(part[0].device) for part in on_device)}. Clip with torch.nn.utils.clip_grad_norm_ instead."
            )
        programs = [self._program(part) for part in on_device]
        storage.return_freed()
        taken = {memory for leaf in self._active for memory in leaf.state or ()}
        for leaf in leaves:
            if leaf.state is None:
                row = self._rows[leaf.row][2]
                saved = self.state.get(leaf.param, {})
                with torch.inference_mode(False):
                    views = allocate_state(leaf, self._rule, row, values[leaf.row], saved, taken)
                if views:
                    self.state[leaf.param] = views | {key: value for key, value in saved.items() if key not in views}
        ends = list(itertools.accumulate(map(len, on_device)))
        launches = [Launch(part, slice(end - len(part), end), p) for part, end, p in zip(on_device, ends, programs, strict=True)]
        if len(self._launches) == _LAUNCHES_KEPT:
            del self._launches[next(iter(self._launches))]
        self._launches[live] = launches
        return launches

    def _program(self, leaves: list[Leaf]) -> step.Program:
        rows = tuple(row for _, _, row in self._rows)
        described = tuple(describe(leaf, rows[leaf.row], self._rule.hidden, self.state.get(leaf.param, {})) for leaf in leaves)
        return step.program(step.Plan(rows, described, self.max_grad_norm is not None, device_of(leaves[0].param)))

    def set_trainable(self, selector: Any, trainable: bool, *, keep_state: bool = True) -> None:
        """Train or freeze the selected parameters from the next step on, whatever the mask said of them.

        Args:
          selector: any selector of the README but arrays; only parameters that it picks change. A mask of elements is
            lifted by True.
          trainable: True to train, False to freeze.
          keep_state: when freezing, keep the moments and step count for later, or drop them.
        """
        picked = masks.column(selector, self._described(self._leaves), "decay_mask")  # bools only
        for leaf, decision in zip(self._leaves, picked, strict=True):
            if decision.value:
                leaf.trained, leaf.rule = trainable, f"set_trainable {decision.rule}"
                leaf.elements = None if trainable else leaf.elements
                if not trainable and not keep_state:
                    self.state.pop(leaf.param, None)
        for index, group in enumerate(self.param_groups):
            group[groups.TRAINABLE_PARAMS] = [leaf.trained for leaf in self._leaves if leaf.group == index]
        self._place()

    def _group_signature(self) -> list[Any]:
        """What decides which parameters there are and which program runs; a change of it is followed at the next step."""
        signature: list[Any] = [self.max_grad_norm is None]
        for group in self.param_groups:
            signature += (id(group), group.get("trainable", True), *map(id, group["params"]))
            for name in self._options:
                signature.append(bool(group[name]))  # on or off, or for a structural number whether it is 0
        return signature

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every trained parameter that has a gradient.

        Args:
          closure: reevaluates the model with gradients enabled and returns the loss.

        Returns:
          The closure's loss, or None.

        Raises:
          ValueError: a gradient is sparse, or of another shape, dtype or device than its parameter; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live, grads = self._live()
        if not live:
            return loss
        launches = self._launches.get(live)
        for launch in launches or ():
            if list(map(_address, launch.views)) != launch.seen:
                self._place()  # the data of a state tensor was replaced by hand: go on from what is there
                launches = None
                break
        if launches is None:
            launches = self._new_launches(live)
        hyperparams = self._hyperparams()
        for launch in launches:
            params = list(map(_memory, launch.inplace))
            kept = operands(launch.kept, launch.kept_order) if launch.kept else []
            gradients = operands(grads[launch.part], launch.order)
            try:
                copies, moved = launch.program.apply(params, launch.state, kept, gradients, launch.masks, hyperparams)
            except BaseException as error:
                self._salvage(launch, error)
                raise
            if moved:
                self._follow_results(launch)
            if copies:
                storage.write_back(launch.kept, copies, launch.kept_order)
            torch.autograd.graph.increment_version(launch.params)
        return loss

    def _live(self) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        """The active leaves that have a gradient now, and the gradients; every one is checked before any is used."""
        if self._group_signature() != self._signature:
            self._place()
        live: list[int] = []
        grads: list[torch.Tensor] = []
        state = self.state
        for i, leaf in enumerate(self._active):
            p = leaf.param
            g = p.grad
            if g is None or not p.requires_grad:
                continue
            if (p.data_ptr() != leaf.address or p.stride() != leaf.strides or p.shape != leaf.shape) and self._placed_anew(leaf):
                return self._live()
            if g.is_sparse or g.shape != leaf.shape or g.dtype is not leaf.dtype or g.device != leaf.device:
                raise ValueError(bad_gradient(type(self).__name__, leaf, g))
            if leaf.fields and leaf.state is not None and not all(map(is_, map((state.get(p) or _NO_STATE).get, leaf.fields), leaf.views)):
                self._place()  # the state was replaced or cleared by hand: go on from what is there
                return self._live()
            live.append(i)
            grads.append(g)
        return tuple(live), grads

    def _placed_anew(self, leaf: Leaf) -> bool:
        """Follow a parameter whose `data` was replaced; True if launches were made for something else and are gone."""
        before = leaf.signature
        self._place_leaf(leaf)
        if before is None or before == leaf.signature:
            return False
        self._place()
        return True

    def _follow_results(self, launch: Launch) -> None:
        for leaf in launch.leaves:
            leaf.follow()
        self._launches.clear()

    def _salvage(self, launch: Launch, error: BaseException) -> None:
        """After a call that failed with its donated arguments gone: no tensor may go on looking at freed memory."""
        lost = [leaf.name for leaf in launch.leaves if leaf.salvage()]
        if lost:
            error.add_note(f"The update failed half-way; parameters and state of {lost} are lost and hold NaN. Load a checkpoint.")
            self._launches.clear()
            for leaf in self._leaves:
                leaf.state = None

    def _hyperparams(self) -> np.ndarray:
        """Every traced number of this step, read from the groups: what a scheduler wrote is what the step uses."""
        values = [1.0] * step.ONES
        values.append(self.max_grad_norm or 0.0)
        try:
            for group, decays, row in self._rows:
                for name, length in row.traced:
                    value = group[name]
                    if name == "lr":
                        values.append(float(value) * group.get("lr_scale", 1.0))
                    elif name == "weight_decay":
                        values.append(float(value) * group.get("wd_scale", 1.0) if decays else 0.0)
                    elif length:
                        values.extend(map(float, value))
                    else:
                        values.append(float(value))
        except (TypeError, ValueError):
            for group in self.param_groups:  # says which value of which key was no number
                groups.check_group(type(self).__name__, group, self.hyperparams, allowed=group)
            raise
        return np.array(values)

    def _row_values(self) -> list[tuple[float, ...]]:
        """The same numbers, cut into rows."""
        flat = iter(self._hyperparams()[step.ONES + 1 :].tolist())
        return [tuple(itertools.islice(flat, row.width)) for _, _, row in self._rows]

    # ------------------------------------------------------------------ checkpoints, copies, reports

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of the torch optimizer that it stands for.

        As torch's, and: parameters are matched by name where both sides have names; state keeps a wider type than its
        parameter's; group flags that the saved groups lack stay as they are; tensors are copied, never shared.

        Raises:
          ValueError: other groups, parameters, state fields or shapes; parameters and state are then as before.
        """
        handle = self.register_load_state_dict_pre_hook(checkpoint.prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy; the copy asks selectors about groups added later only if they can be pickled by name."""
        selectors = [s if getattr(s, "__qualname__", "<").isidentifier() else None for s in self._selectors]
        own = {key: self.__dict__[key] for key in ("_rule", "hyperparams", "_writeback", "max_grad_norm")}
        decided = [(leaf.name, leaf.group, leaf.decided) for leaf in self._leaves]
        return super().__getstate__() | own | {"_selectors": selectors, "_decided": decided}

    def __setstate__(self, state: dict[str, Any]) -> None:
        decided = state.pop("_decided", None)
        super().__setstate__(state)
        if decided is not None:
            params = [p for group in self.param_groups for p in group["params"]]
            self._leaves = [Leaf.restored(name, p, group, columns) for p, (name, group, columns) in zip(params, decided, strict=True)]
            self._constructed = True
        checkpoint.unwrap(self.state)
        for index, group in enumerate(self.param_groups):
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            if groups.TRAINABLE_PARAMS in group:
                mine = [leaf for leaf in self._leaves if leaf.group == index]
                for leaf, trained in zip(mine, group[groups.TRAINABLE_PARAMS], strict=True):
                    leaf.trained = trained
        self._place()

    def state_fields(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """The state fields that a parameter of such a group has, and whether each has the parameter's shape."""
        row = self._read_row(group)
        return {name: shaped for name, shaped in step.state_fields(row).items() if name not in self._rule.hidden}

    def bytes_accessed(self) -> float:
        """Bytes that one step moves by the compiler's count, for the set of live leaves that was seen last."""
        return sum(launch.program.bytes_accessed for launch in next(reversed(self._launches.values()), []))

    def report(self) -> report.Report:
        """One line per parameter: shape, dtype, label, trained or frozen and by which rule, lr, decay, state, write-back.

        Returns:
          A `Report`: text when printed, a table in a notebook, and `rows` for programs.
        """
        return report.Report(type(self).__name__, self._leaves, self.param_groups, self.state)

    def __str__(self) -> str:
        return str(self.report())


def _asks_each(selector: Any) -> bool:
    """Whether a selector is a function of (name, param), and so has an answer for parameters added later."""
    return isinstance(selector, FunctionType | partial | MethodType) and masks.required_arguments(selector) == 2
