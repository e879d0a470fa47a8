"""The table of hyperparameters: which transformation and which row of numbers each parameter has, and the `LeafSpec` of each parameter."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import NamedTuple

import numpy as np
import torch

from bridge._compiler import leaf_update, separability
from bridge._compiler.apply_transform import Arrays
from bridge._compiler.spec import NOTHING, Extra, Field, Kept, Problem, Row, Spec
from bridge._compiler.state_layout import layout
from bridge._memory.adoption import pack_width
from bridge._names import Path, tree_paths
from bridge._process import uncollected
from torch_api._rules.optimizer_spec import Rule
from torch_api._rules.types import ParamGroup

from . import buckets
from .leaf_specs import _prunes, _spec, _whole
from .param_groups import check_parameter_fits, check_types, fixed, group_reader
from .record import Leaf
from .sharding import described

_is_none = partial(is_, None)


@dataclass(frozen=True, slots=True)
class HyperparamRow:
    """One row of the table: the source of the numbers of some parameters.

    group: the param group. decays: whether its `weight_decay` applies to these parameters. lr_scale: the factor of their lr.
    transform: the transformation with its static options. has_lr: whether `lr` is a hyperparameter of it; else it multiplies the update.
    """

    group: ParamGroup
    decays: bool
    lr_scale: float
    row: Row
    has_lr: bool


class SortKey(NamedTuple):
    """The sort key of parameters in a program. Sorted by it, equal sets of shapes give equal programs.

    transform_id: equal for equal transformations; -1 for a parameter without one. row: the row in the table.
    """

    device: str
    kind: int
    dtype: str
    gradient_dtype: str
    buffer_shape: tuple[int]
    is_masked: bool
    has_memory: bool
    row: int


class Rows:
    """The hyperparameters of the trainable parameters: one row for each combination of group, decay and lr_scale.

    Construction sets `hyperparam_row` and `spec` of each record.

    rows: the `HyperparamRow`s. transforms: the transformation of each.
    row_offsets: where each row starts in the vector of hyperparameters that a program reads. vector_length: its length.
    recompile_keys: group, name and function of each value whose change selects another program; None: the value itself.
    all_paths: the tree path of each parameter.
    joint_sets: for each joint set its `UpdateSpec`, and the position of each record, by id, in that.
    joint_initial_state: for each joint set the one number that fills each field at first; None if a field has no such number.

    Args:
      cls_name: class name for errors.
      leaves: the records of all parameters, in the order of the groups.
      is_trainable: whether a parameter may be trained now. Transformations do not see the others.
      groups: the param groups.
      spec_of_group: the `OptimizerSpec` of a group.
      extra_args: the extra arguments of the last step.
      aux_state: the auxiliary state of every parameter.
    """

    @uncollected()
    def __init__(
        self,
        owner: str,
        leaves: Sequence[Leaf],
        active: Callable[[Leaf], bool],
        groups: Sequence[ParamGroup],
        rule_of: Callable[[ParamGroup], Rule],
        extra: Extra,
        kept: Kept,
    ) -> None:
        self._owner, self._extra, self._kept = owner, extra, kept
        self._leaves, self._is_active = leaves, active
        self.skeleton = tree_paths([leaf.name for leaf in leaves])
        self.units: dict[int, tuple[Problem, dict[int, int]]] = {}
        self.begun: dict[int, Arrays | None] = {}
        self.looked_at: list[object] = []  # saves the first programs a trace; released then, because traces are large
        # By id of each record of a joint set that may be in a bucket: its class. Parameters of one class have the same update.
        self._alike: dict[int, int | None] = {}
        rules = [rule_of(group) for group in groups]
        for group, rule in zip(groups, rules, strict=True):
            check_types(owner, group, rule)  # the user may have edited it
        trained = [(leaf, path) for leaf, path in zip(leaves, self.skeleton, strict=True) if active(leaf) and leaf.param.requires_grad]
        keys = {key: i for i, key in enumerate(dict.fromkeys(_key(leaf) for leaf, _ in trained))}
        together: dict[Hashable, list[tuple[Leaf, Path]]] = {}
        for leaf in leaves:
            leaf.spec = None
        for leaf, path in trained:
            leaf.row = keys[_key(leaf)]
            rule = rules[leaf.group]
            together.setdefault((id(rule), None if rule.ready else leaf.group), []).append((leaf, path))
        row_of: dict[int, Row] = {}
        for number, own in enumerate(together.values()):
            group = own[0][0].group
            try:
                row = self._seen(number, [leaf for leaf, _ in own], [path for _, path in own], rules[group], groups[group])
            except Exception as error:
                if rules[group].scaled:
                    self._explain(group_reader(rules[group], ())(groups[group]), [leaf for leaf, _ in own], error)
                raise
            finally:
                looked_at = separability.given_up()
            self.looked_at += looked_at if number in self.units else []
            row_of |= dict.fromkeys((leaf.group for leaf, _ in own), replace(row, kept=kept))
        self.rows = [HyperparamRow(groups[g], decays, scale, row_of[g], "lr" in rules[g].hyperparams) for g, decays, scale in keys]
        self.static = tuple(row.row for row in self.rows)
        first: dict[Row, int] = {}
        self._kinds = [first.setdefault(row, i) for i, row in enumerate(self.static)]
        # The length of the vector is rounded up, so that programs serve other numbers of rows too.
        *self.offsets, end = itertools.accumulate((row.width for row in self.static), initial=leaf_update.ONES + 1)
        self.width = 1 << max(end - 1, 31).bit_length()
        self.watched = [
            (groups[g], name, _decisive(rules[g], name, name in dict(row.traced)))
            for g, row in row_of.items()
            for name in rules[g].hyperparams
            if rules[g].scaled or name in rules[g].structural or name not in dict(row.traced)
        ]

    def _seen(self, number: int, leaves: list[Leaf], paths: list[Path], rule: Rule, group: ParamGroup) -> Row:
        """Trace one transformation, set the `spec` of its records, and return its `TransformSpec`.

        Args:
          joint_set: the number of the joint set, if the transformation must see these parameters together.
        """
        for leaf in leaves:
            check_parameter_fits(rule, leaf.name, leaf.param)
        if not rule.scaled:
            row = group_reader(rule, rule.traceable)(group)
            for leaf in leaves:
                leaf.spec = self._local(leaf, _spec(rule, leaf), row)
            return row
        specs = tuple(_whole(leaf, path) for leaf, path in zip(leaves, paths, strict=True))
        read = lambda names: group_reader(rule, names)(group)  # noqa: E731
        pruned = _prunes(read(()), specs[0], self.skeleton)
        read = lambda names: replace(group_reader(rule, names)(group), pruned=pruned)  # noqa: E731
        layout(Problem(read(()).together(number), specs, self.skeleton))  # raises the errors of `init`
        known = True
        try:
            row = read(separability.traced_names(read, rule.traceable, self.skeleton, specs, self._extra))
            views = separability.views(row, self.skeleton, specs, self._extra)
        except Exception:
            if self._extra.leaves or not rule.takes_extra:
                raise
            row, views = read(rule.traceable), None  # it may need arguments of `step`; any other error is raised by the first step
            known = False
        decays = {bool(leaf.decay.value) for leaf in leaves}
        if views is None:
            row = row.together(number)
            self.units[number] = (
                Problem(replace(row, kept=self._kept), specs, self.skeleton),
                {id(leaf): i for i, leaf in enumerate(leaves)},
            )
            self._alike |= self._alike_of(leaves, self.units[number][0]) if known else {}
            self.begun[number] = separability.begun(self.units[number][0], self._extra)
        if len(decays) > 1 and (views is None or "weight_decay" not in dict(row.traced)):
            raise ValueError(
                f"{self._owner}: decay_mask needs a transformation that updates each parameter separately and takes weight_decay as a "
                "traced number; this one does not. Use its own mask argument, or use PartitionedOptimizer with a label for the rest."
            )
        if group.get("wd_scale", 1.0) != 1.0 and "weight_decay" not in dict(row.traced):
            raise ValueError(f"{self._owner}: wd_scale needs a weight_decay that the transformation takes as a traced number.")
        for leaf, spec in zip(leaves, specs if views is None else views, strict=True):
            leaf.spec = self._local(leaf, spec, row)
        return row

    @contextlib.contextmanager
    def explaining(self, live: Sequence[Leaf]) -> Iterator[None]:
        """Explain an error of a transformation that fails because it does not see all parameters.

        Args:
          with_grad: the records that are to be updated.
        """
        try:
            yield
        except Exception as error:
            for problem, positions in self.units.values():
                self._explain(problem.row, [leaf for leaf in live if id(leaf) in positions], error)
            raise

    def _explain(self, row: Row, present: Sequence[Leaf], error: Exception) -> None:
        """Raise an error with the names of the missing parameters if the transformation fails without them but not with all."""
        here = set(map(id, present))
        absent = [leaf for leaf in self._leaves if id(leaf) not in here]
        plain = [(leaf, path) for leaf, path in zip(self._leaves, self.skeleton, strict=True) if id(leaf) in here or _is_plain(leaf.param)]
        specs = {id(leaf): _whole(leaf, path) for leaf, path in plain}
        some = Problem(row, tuple(spec for key, spec in specs.items() if key in here), self.skeleton)
        if not present or not absent or not separability.fails(some, self._extra):
            return
        if separability.fails(some._replace(specs=tuple(specs.values())), self._extra):
            return
        first, *_ = str(error).splitlines() or [""]
        named = ", ".join(f"{leaf.name!r} ({self._absence(leaf)})" for leaf in absent[:3])
        raise ValueError(
            f"{self._owner}: the transformation fails because it sees None in place of parameters that are not updated: {named}"
            f"{' and more' if len(absent) > 3 else ''}. Nothing was updated. A transformation that closes over a tree of all parameters "
            "must skip them: jax.tree.map(lambda g, a: None if g is None else ..., updates, tree, is_leaf=lambda x: x is None). "
            f"Or train all parameters, and give each a gradient. The error was {type(error).__name__}: {first}"
        ) from error

    def _absence(self, leaf: Leaf) -> str:
        """Return why the transformation does not see a parameter."""
        if not leaf.param.requires_grad:
            return "frozen: requires_grad=False"
        if not self._is_active(leaf):
            return f"frozen: {leaf.rule}"
        return "without a gradient" if leaf.param.grad is None else "of another transformation"

    def _local(self, leaf: Leaf, spec: Spec, row: Row) -> Spec:
        """Return the spec of the local part of a sharded parameter, and any other spec as it is.

        Raises:
          ValueError: the parameter is sharded, but the transformation is not elementwise.
        """
        if leaf.layout is None or not leaf.layout.sharded:
            return spec
        if row.unit is None and separability.in_parts(row, self.skeleton, spec, self._extra, (leaf.param.numel(), *leaf.buffer_shape)):
            return spec._replace(shape=leaf.buffer_shape, order=None)
        raise ValueError(
            f"{self._owner}: {described(leaf.param, leaf.name)}, but this transformation is not elementwise, and a process holds only a "
            "part of it. Use an elementwise transformation for it (Adam, SGD, Lion; PartitionedOptimizer can give it another than "
            "the rest), do not shard it (fully_shard's ignored_params), or clip by torch.nn.utils.clip_grad_norm_ before step()."
        )

    def cut(self, hyperparams: np.ndarray) -> list[tuple[float, ...]]:
        """Split the vector of hyperparameters of one step into the numbers of each row."""
        flat = iter(hyperparams[leaf_update.ONES + 1 :].tolist())
        return [tuple(itertools.islice(flat, row.width)) for row in self.static]

    def sort_key(self, leaf: Leaf) -> SortKey:
        """Return the sort key of a parameter. Programs then depend on the set of shapes, not on the parameters."""
        kind = -1 if leaf.spec is None else self._kinds[leaf.row]
        dtype, gradient_dtype = str(leaf.dtype), str(leaf.gradient_dtype)
        has = leaf.elements is not None, leaf.memory is not None
        return SortKey(str(leaf.device), kind, dtype, gradient_dtype, leaf.buffer_shape, *has, leaf.row)

    def pack_key(self, leaf: Leaf) -> buckets.Key | None:
        """Return the bucket key of a parameter, equal for parameters that may be rows of one bucket; None for one that may not.

        A row may be longer than its parameter. It must have the same length if the transformation reduces over the parameter, and if
        the gradient is neither gathered nor padded.
        """
        row, size = self.static[leaf.row], leaf.shape.numel()
        if row.unit is not None:
            kind = self._alike.get(id(leaf))
            return None if kind is None else buckets.Key((self._kinds[leaf.row], leaf.dtype, leaf.gradient_dtype, leaf.device, size, kind))
        assert leaf.spec is not None
        if leaf.layout is not None or leaf.elements is not None or leaf.spec.path is not None:
            return None
        width, whole, gathered = pack_width(leaf.dtype, size), leaf.spec.whole, buckets.is_gathered(leaf)
        addressed = self.is_addressed(leaf)
        padded = buckets.is_padded(leaf) and not whole and not self._extra.leaves
        if not size or not (gathered or addressed or padded or leaf.device.type in buckets.SINGLY_ON):
            return None
        if (whole or not gathered) and not padded and (width != size or self._extra.leaves):
            return None
        if not whole and not separability.in_parts(replace(row, kept=NOTHING), self.skeleton, leaf.spec, self._extra, (size, width)):
            return None
        return buckets.Key((self._kinds[leaf.row], leaf.dtype, leaf.gradient_dtype, leaf.device, width, whole), addressed)

    def is_addressed(self, leaf: Leaf) -> bool:
        """Return whether the gradient may be read by address in a bucket: the update is elementwise and the row needs no padding."""
        assert leaf.spec is not None
        fits = pack_width(leaf.dtype, leaf.shape.numel()) == leaf.shape.numel() and not self._extra.leaves
        return (
            fits and self.static[leaf.row].unit is None and buckets.is_addressed(leaf) and not leaf.spec.whole and self._is_of_parts(leaf)
        )

    def _alike_of(self, leaves: Sequence[Leaf], problem: Problem) -> dict[int, int | None]:
        """Return the bucket class of each parameter of a joint set that may be in a bucket, by id of the record.

        Parameters of one class have the same update once the values that depend on all parameters are known.
        """
        if any(leaf.device.type != "cpu" for leaf in leaves) or any(spec.order is not None for spec in problem.specs):
            return {}  # the program then evaluates all in their own shapes
        kind_of = lambda leaf: (leaf.dtype, leaf.shape.numel())  # noqa: E731
        small = [
            leaf for leaf in leaves if leaf.layout is None and leaf.elements is None and buckets.is_gathered(leaf) and leaf.shape.numel()
        ]
        small = [leaf for leaf in small if pack_width(leaf.dtype, leaf.shape.numel()) == leaf.shape.numel()]
        count = Counter(map(kind_of, small))
        enough = {id(leaf) for leaf in small if count[kind_of(leaf)] >= buckets.FEWEST}
        if not enough:
            return {}
        kinds = separability.kinds(problem, self._extra)
        return {id(leaf): kind for leaf, kind in zip(leaves, kinds, strict=True) if id(leaf) in enough}

    def _is_of_parts(self, leaf: Leaf) -> bool:
        """Return whether the state is scalars and arrays of the parameter's shape, and all dtypes are in `ADDRESSED_DTYPES`."""
        assert leaf.spec is not None
        fields = self.fields(leaf)[0]
        kinds = {field.dtype for field in fields if field.shape is None} | {leaf.spec.dtype}
        return kinds <= buckets.ADDRESSED_TYPES and all(field.shape in (None, ()) for field in fields)

    def fields(self, leaf: Leaf) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        """Return the fields of a parameter's own state, and of the state that it shares with the other parameters of its joint set."""
        unit = self.static[leaf.row].unit
        if unit is None:
            return layout(self.problem(leaf)).own[0], ()
        problem, positions = self.units[unit]
        plan = layout(problem)
        return plan.own[positions[id(leaf)]], plan.shared

    def state_fields(self, leaf: Leaf, group: ParamGroup, rule: Rule) -> dict[str, Field] | None:
        """Return the fields that the state_dict of a parameter in such a group has, by name.

        The `index` of a shared field is -1, and its shape is not reliable: it may depend on how many parameters there are (optax.flatten).

        Returns:
          None for a parameter that cannot be trained, or a frozen one of an optax transformation.
        """
        if leaf.spec is None and (rule.scaled or not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)):
            return None
        if not rule.scaled:
            row = replace(group_reader(rule, ())(group), kept=self._kept)
            own, shared = layout(Problem(row, (_spec(rule, leaf),))).own[0], ()
        else:
            row = self.static[leaf.row]
            read = replace(group_reader(rule, dict(row.traced))(group), unit=row.unit, pruned=row.pruned, kept=self._kept)
            own, shared = self.fields(leaf) if row.unit is not None else (layout(self.problem(leaf)._replace(row=read)).own[0], ())
        fields = [*own, *(field._replace(position=-1) for field in shared)]
        return {field.name: field for field in fields if field.name not in rule.hidden}

    def frozen_fields(self, leaf: Leaf, group: ParamGroup, rule: Rule) -> dict[str, Field]:
        """Return the fields that a frozen parameter would have if its transformation saw no other; empty if it fails then."""
        path = self.skeleton[[id(other) for other in self._leaves].index(id(leaf))]
        try:
            row = replace(group_reader(rule, ())(group), kept=self._kept).together(0)
            plan = layout(Problem(row, (_whole(leaf, path),), self.skeleton))
        except Exception:  # noqa: BLE001 - the transformation may need other parameters too
            return {}
        fields = [*plan.own[0], *(field._replace(position=-1) for field in plan.shared)]
        return {field.name: field for field in fields if field.name not in rule.hidden}

    def shared_shapes(self, chosen: Collection[int]) -> Iterator[tuple[list[Leaf], dict[str, set[tuple[int, ...]]]]]:
        """Yield for each joint set its chosen records, and the possible shapes of each field of shared state.

        A shape may be the one for all parameters of the joint set or for the chosen ones.

        Args:
          chosen: the ids of records.
        """
        for problem, positions in self.units.values():
            leaves = [leaf for leaf in self._leaves if id(leaf) in positions and id(leaf) in chosen]
            if leaves:
                some = problem._replace(specs=tuple(problem.specs[positions[id(leaf)]] for leaf in leaves))
                shapes: dict[str, set[tuple[int, ...]]] = {}
                for field in (*layout(problem).shared, *layout(some).shared):
                    shapes.setdefault(field.name, set()).add(tuple(field.shape or ()))
                yield leaves, shapes

    def problem(self, leaf: Leaf) -> Problem:
        """Return the `UpdateSpec` of a parameter outside joint sets."""
        assert leaf.spec is not None
        return Problem(self.static[leaf.row], (leaf.spec,), () if leaf.spec.path is None else self.skeleton)


def _decisive(rule: Rule, name: str, is_traced: bool) -> Callable[[object], object] | None:
    """Return a function of a hyperparameter's value whose result selects the program; None if the value itself does."""
    if is_traced and rule.scaled:
        return _is_none
    if name not in rule.whole:
        return bool
    return fixed if isinstance(rule.hyperparams[name], tuple | list) else None


def _is_plain(param: torch.Tensor) -> bool:
    return param.layout is torch.strided and (param.is_floating_point() or param.is_complex()) and not param.is_meta


def _key(leaf: Leaf) -> tuple[int, bool, float]:
    return leaf.group, bool(leaf.decay.value), leaf.lr_scale
