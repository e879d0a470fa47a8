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

from bridge._compiler import leaf_update, policy, separability
from bridge._compiler.apply_transform import UpdateArrays
from bridge._compiler.spec import NO_AUX_STATE, AuxState, ExtraArgsSpec, LeafSpec, StateField, TransformSpec, UpdateSpec
from bridge._compiler.state_layout import state_layout
from bridge._memory.adoption import bucket_row_length
from bridge._names import Path, tree_paths
from bridge._process import gc_paused
from torch_api._rules.optimizer_spec import OptimizerSpec
from torch_api._rules.types import ParamGroup

from . import buckets
from .leaf_specs import global_leaf_spec, rejects_missing_leaves, rule_leaf_spec
from .param_groups import check_parameter_fits, check_types, group_reader, hashable_value
from .record import ParamRecord
from .sharding import describe_sharding

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
    transform: TransformSpec
    has_lr: bool


class SortKey(NamedTuple):
    """The sort key of parameters in a program. Sorted by it, equal sets of shapes give equal programs.

    transform_id: equal for equal transformations; -1 for a parameter without one. row: the row in the table.
    """

    device: str
    transform_id: int
    dtype: str
    gradient_dtype: str
    buffer_shape: tuple[int]
    is_masked: bool
    has_memory: bool
    row: int


class HyperparamTable:
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

    @gc_paused()
    def __init__(
        self,
        cls_name: str,
        leaves: Sequence[ParamRecord],
        is_trainable: Callable[[ParamRecord], bool],
        groups: Sequence[ParamGroup],
        spec_of_group: Callable[[ParamGroup], OptimizerSpec],
        extra_args: ExtraArgsSpec,
        aux_state: AuxState,
    ) -> None:
        self._cls_name, self._extra_args, self._aux_state = cls_name, extra_args, aux_state
        self._leaves, self._is_trainable = leaves, is_trainable
        self.all_paths = tree_paths([leaf.name for leaf in leaves])
        self.joint_sets: dict[int, tuple[UpdateSpec, dict[int, int]]] = {}
        self.joint_initial_state: dict[int, UpdateArrays | None] = {}
        self.held_trace: list[object] = []  # saves the first programs a trace; released then, because traces are large
        # By id of each record of a joint set that may be in a bucket: its class. Parameters of one class have the same update.
        self._bucket_classes: dict[int, int | None] = {}
        rules = [spec_of_group(group) for group in groups]
        for group, rule in zip(groups, rules, strict=True):
            check_types(cls_name, group, rule)  # the user may have edited it
        trained = [
            (leaf, path) for leaf, path in zip(leaves, self.all_paths, strict=True) if is_trainable(leaf) and leaf.param.requires_grad
        ]
        for leaf in leaves:
            leaf.spec = None
        keys = {key: i for i, key in enumerate(dict.fromkeys(_row_key(leaf) for leaf, _ in trained))}
        for leaf, _ in trained:
            leaf.hyperparam_row = keys[_row_key(leaf)]
        transforms = self._trace_transforms(trained, rules, groups)
        self.rows = [HyperparamRow(groups[g], decays, scale, transforms[g], "lr" in rules[g].hyperparams) for g, decays, scale in keys]
        self.transforms = tuple(row.transform for row in self.rows)
        first: dict[TransformSpec, int] = {}
        self._transform_ids = [first.setdefault(row, i) for i, row in enumerate(self.transforms)]
        # The length of the vector is rounded up, so that programs serve other numbers of rows too.
        *self.row_offsets, end = itertools.accumulate((row.num_scalars for row in self.transforms), initial=leaf_update.ONES + 1)
        self.vector_length = 1 << max(end - 1, 31).bit_length()
        self.recompile_keys = [
            (groups[g], name, _recompile_key_of(rules[g], name, name in dict(transform.traced_hyperparams)))
            for g, transform in transforms.items()
            for name in rules[g].hyperparams
            if rules[g].is_optax or name in rules[g].optional_hyperparams or name not in dict(transform.traced_hyperparams)
        ]

    def _trace_transforms(
        self, trained: Sequence[tuple[ParamRecord, Path]], rules: Sequence[OptimizerSpec], groups: Sequence[ParamGroup]
    ) -> dict[int, TransformSpec]:
        """Trace each transformation once, set the `spec` of its records, and return the transformation of each group.

        Args:
          trained: the records of the parameters that transformations see, with their paths.
          rules: the `OptimizerSpec` of each group.
          groups: the param groups.
        """
        by_transform: dict[Hashable, list[tuple[ParamRecord, Path]]] = {}
        for leaf, path in trained:
            rule = rules[leaf.group_index]
            by_transform.setdefault((id(rule), None if rule.is_instance else leaf.group_index), []).append((leaf, path))
        transforms: dict[int, TransformSpec] = {}
        for number, own in enumerate(by_transform.values()):
            leaves, paths = [leaf for leaf, _ in own], [path for _, path in own]
            group = leaves[0].group_index
            try:
                transform = self._trace_transform(number, leaves, paths, rules[group], groups[group])
            except Exception as error:
                if rules[group].is_optax:
                    self._raise_for_missing_leaves(group_reader(rules[group], ())(groups[group]), leaves, error)
                raise
            finally:
                trace = separability.release_last_trace()
            self.held_trace += trace if number in self.joint_sets else []
            transforms |= dict.fromkeys((leaf.group_index for leaf in leaves), replace(transform, aux_state=self._aux_state))
        return transforms

    def _trace_transform(
        self, joint_set: int, leaves: list[ParamRecord], paths: list[Path], optimizer_spec: OptimizerSpec, group: ParamGroup
    ) -> TransformSpec:
        """Trace one transformation, set the `spec` of its records, and return its `TransformSpec`.

        Args:
          joint_set: the number of the joint set, if the transformation must see these parameters together.
        """
        for leaf in leaves:
            check_parameter_fits(optimizer_spec, leaf.name, leaf.param)
        if not optimizer_spec.is_optax:
            row = group_reader(optimizer_spec, optimizer_spec.traceable_hyperparams)(group)
            for leaf in leaves:
                leaf.spec = self._local_spec(leaf, rule_leaf_spec(optimizer_spec, leaf), row)
            return row
        specs = tuple(global_leaf_spec(leaf, path) for leaf, path in zip(leaves, paths, strict=True))
        read = lambda names: group_reader(optimizer_spec, names)(group)  # noqa: E731
        pruned = rejects_missing_leaves(read(()), specs[0], self.all_paths)
        read = lambda names: replace(group_reader(optimizer_spec, names)(group), omits_inactive_leaves=pruned)  # noqa: E731
        state_layout(UpdateSpec(read(()).with_joint_set(joint_set), specs, self.all_paths))  # raises the errors of `init`
        known = True
        try:
            row = read(
                separability.traceable_hyperparams(read, optimizer_spec.traceable_hyperparams, self.all_paths, specs, self._extra_args)
            )
            views = separability.separable_specs(row, self.all_paths, specs, self._extra_args)
        except Exception:
            if self._extra_args.leaves or not optimizer_spec.takes_extra_args:
                raise
            # It may need arguments of `step`; the first step raises any other error.
            row, views, known = read(optimizer_spec.traceable_hyperparams), None, False
        decays = {bool(leaf.decay.value) for leaf in leaves}
        if views is None:
            row = row.with_joint_set(joint_set)
            self.joint_sets[joint_set] = (
                UpdateSpec(replace(row, aux_state=self._aux_state), specs, self.all_paths),
                {id(leaf): i for i, leaf in enumerate(leaves)},
            )
            self._bucket_classes |= self._classify_for_buckets(leaves, self.joint_sets[joint_set][0]) if known else {}
            self.joint_initial_state[joint_set] = separability.initial_scalars(self.joint_sets[joint_set][0], self._extra_args)
        if len(decays) > 1 and (views is None or "weight_decay" not in dict(row.traced_hyperparams)):
            raise ValueError(
                f"{self._cls_name}: decay_mask needs a transformation that updates each parameter separately and takes weight_decay as a "
                "traced number; this one does not. Use its own mask argument if it has one, or a PartitionedOptimizer with a label, and so "
                "with state of its own, for the parameters without decay."
            )
        if group.get("wd_scale", 1.0) != 1.0 and "weight_decay" not in dict(row.traced_hyperparams):
            raise ValueError(f"{self._cls_name}: wd_scale needs a weight_decay that the transformation takes as a traced number.")
        for leaf, spec in zip(leaves, specs if views is None else views, strict=True):
            leaf.spec = self._local_spec(leaf, spec, row)
        return row

    @contextlib.contextmanager
    def explain_missing_leaves(self, with_grad: Sequence[ParamRecord]) -> Iterator[None]:
        """Explain an error of a transformation that fails because it does not see all parameters.

        Args:
          with_grad: the records that are to be updated.
        """
        try:
            yield
        except Exception as error:
            for problem, positions in self.joint_sets.values():
                self._raise_for_missing_leaves(problem.transform, [leaf for leaf in with_grad if id(leaf) in positions], error)
            raise

    def _raise_for_missing_leaves(self, row: TransformSpec, present: Sequence[ParamRecord], error: Exception) -> None:
        """Raise an error with the names of the missing parameters if the transformation fails without them but not with all."""
        here = set(map(id, present))
        absent = [leaf for leaf in self._leaves if id(leaf) not in here]
        plain = [
            (leaf, path) for leaf, path in zip(self._leaves, self.all_paths, strict=True) if id(leaf) in here or _is_dense_float(leaf.param)
        ]
        specs = {id(leaf): global_leaf_spec(leaf, path) for leaf, path in plain}
        some = UpdateSpec(row, tuple(spec for key, spec in specs.items() if key in here), self.all_paths)
        if not present or not absent or not separability.raises_when_traced(some, self._extra_args):
            return
        if separability.raises_when_traced(some._replace(specs=tuple(specs.values())), self._extra_args):
            return
        first, *_ = str(error).splitlines() or [""]
        named = ", ".join(f"{leaf.name!r} ({self._why_missing(leaf)})" for leaf in absent[:3])
        raise ValueError(
            f"{self._cls_name}: the transformation fails because it sees None in place of parameters that are not updated: {named}"
            f"{' and more' if len(absent) > 3 else ''}. Nothing was updated. A transformation that closes over a tree of all parameters "
            "must skip them: jax.tree.map(lambda g, a: None if g is None else ..., updates, tree, is_leaf=lambda x: x is None). "
            f"Or train all parameters, and give each a gradient. The error was {type(error).__name__}: {first}"
        ) from error

    def _why_missing(self, leaf: ParamRecord) -> str:
        """Return why the transformation does not see a parameter."""
        if not leaf.param.requires_grad:
            return "frozen: requires_grad=False"
        if not self._is_trainable(leaf):
            return f"frozen: {leaf.decided_by}"
        return "without a gradient" if leaf.param.grad is None else "of another transformation"

    def _local_spec(self, leaf: ParamRecord, spec: LeafSpec, row: TransformSpec) -> LeafSpec:
        """Return the spec of the local part of a sharded parameter, and any other spec as it is.

        Raises:
          ValueError: the parameter is sharded, but the transformation is not elementwise.
        """
        if leaf.dtensor_layout is None or not leaf.dtensor_layout.is_sharded:
            return spec
        if row.joint_set is None and separability.is_size_independent(
            row, self.all_paths, spec, self._extra_args, (leaf.param.numel(), *leaf.buffer_shape)
        ):
            return spec._replace(shape=leaf.buffer_shape, dim_order=None)
        raise ValueError(
            f"{self._cls_name}: {describe_sharding(leaf.param, leaf.name)}, but this transformation is not elementwise, and a process "
            "holds only a part of it. Use an elementwise transformation for it (Adam, SGD, Lion; PartitionedOptimizer can give it "
            "another than the rest), do not shard it (fully_shard's ignored_params), or clip the global norm by max_grad_norm."
        )

    def values_by_row(self, hyperparams: np.ndarray) -> list[tuple[float, ...]]:
        """Split the vector of hyperparameters of one step into the numbers of each row."""
        flat = iter(hyperparams[leaf_update.ONES + 1 :].tolist())
        return [tuple(itertools.islice(flat, row.num_scalars)) for row in self.transforms]

    def canonical_order(self, leaf: ParamRecord) -> SortKey:
        """Return the sort key of a parameter. Programs then depend on the set of shapes, not on the parameters."""
        kind = -1 if leaf.spec is None else self._transform_ids[leaf.hyperparam_row]
        dtype, gradient_dtype = str(leaf.dtype), str(leaf.grad_dtype)
        has = leaf.element_mask is not None, leaf.jax_buffer is not None
        return SortKey(str(leaf.device), kind, dtype, gradient_dtype, leaf.buffer_shape, *has, leaf.hyperparam_row)

    def bucket_key(self, leaf: ParamRecord) -> buckets.BucketKey | None:
        """Return the bucket key of a parameter, equal for parameters that may be rows of one bucket; None for one that may not.

        A row may be longer than its parameter. It must have the same length if the transformation reduces over the parameter, and if
        the gradient is neither gathered nor padded.
        """
        row, size = self.transforms[leaf.hyperparam_row], leaf.shape.numel()
        if row.joint_set is not None:
            kind = self._bucket_classes.get(id(leaf))
            return (
                None
                if kind is None
                else buckets.BucketKey((self._transform_ids[leaf.hyperparam_row], leaf.dtype, leaf.grad_dtype, leaf.device, size, kind))
            )
        assert leaf.spec is not None
        if leaf.dtensor_layout is not None or leaf.element_mask is not None or leaf.spec.path is not None:
            return None
        width, reduces_over_leaf, gathered = bucket_row_length(leaf.dtype, size), leaf.spec.reduces_over_leaf, buckets.is_gathered(leaf)
        addressed = self.may_address_grad(leaf)
        padded = buckets.is_padded(leaf) and not reduces_over_leaf and not self._extra_args.leaves
        if not size or not (gathered or addressed or padded or leaf.device.type in policy.BUCKETING.grads_as_arguments_on):
            return None
        if (reduces_over_leaf or not gathered) and not padded and (width != size or self._extra_args.leaves):
            return None
        if not reduces_over_leaf and not separability.is_size_independent(
            replace(row, aux_state=NO_AUX_STATE), self.all_paths, leaf.spec, self._extra_args, (size, width)
        ):
            return None
        return buckets.BucketKey(
            (self._transform_ids[leaf.hyperparam_row], leaf.dtype, leaf.grad_dtype, leaf.device, width, reduces_over_leaf), addressed
        )

    def may_address_grad(self, leaf: ParamRecord) -> bool:
        """Return whether the gradient may be read by address in a bucket: the update is elementwise and the row needs no padding."""
        assert leaf.spec is not None
        fits = bucket_row_length(leaf.dtype, leaf.shape.numel()) == leaf.shape.numel() and not self._extra_args.leaves
        return (
            fits
            and self.transforms[leaf.hyperparam_row].joint_set is None
            and buckets.is_addressed(leaf)
            and not leaf.spec.reduces_over_leaf
            and self._is_elementwise_state(leaf)
        )

    def _classify_for_buckets(self, leaves: Sequence[ParamRecord], problem: UpdateSpec) -> dict[int, int | None]:
        """Return the bucket class of each parameter of a joint set that may be in a bucket, by id of the record.

        Parameters of one class have the same update once the values that depend on all parameters are known.
        """
        if any(leaf.device.type != "cpu" for leaf in leaves) or any(spec.dim_order is not None for spec in problem.specs):
            return {}  # the program then evaluates all in their own shapes
        kind_of = lambda leaf: (leaf.dtype, leaf.shape.numel())  # noqa: E731
        small = [
            leaf
            for leaf in leaves
            if leaf.dtensor_layout is None and leaf.element_mask is None and buckets.is_gathered(leaf) and leaf.shape.numel()
        ]
        small = [leaf for leaf in small if bucket_row_length(leaf.dtype, leaf.shape.numel()) == leaf.shape.numel()]
        count = Counter(map(kind_of, small))
        enough = {id(leaf) for leaf in small if count[kind_of(leaf)] >= policy.BUCKETING.min_gathered_rows}
        if not enough:
            return {}
        kinds = separability.bucket_classes(problem, self._extra_args)
        return {id(leaf): kind for leaf, kind in zip(leaves, kinds, strict=True) if id(leaf) in enough}

    def _is_elementwise_state(self, leaf: ParamRecord) -> bool:
        """Return whether the state is scalars and arrays of the parameter's shape, and all dtypes may be read by address."""
        assert leaf.spec is not None
        fields = self.fields(leaf)[0]
        kinds = {field.dtype for field in fields if field.shape is None} | {leaf.spec.dtype}
        return kinds <= policy.BUCKETING.addressed_dtypes and all(field.shape in (None, ()) for field in fields)

    def fields(self, leaf: ParamRecord) -> tuple[tuple[StateField, ...], tuple[StateField, ...]]:
        """Return the fields of a parameter's own state, and of the state that it shares with the other parameters of its joint set."""
        joint_set = self.transforms[leaf.hyperparam_row].joint_set
        if joint_set is None:
            return state_layout(self.problem(leaf)).leaf_fields[0], ()
        problem, positions = self.joint_sets[joint_set]
        plan = state_layout(problem)
        return plan.leaf_fields[positions[id(leaf)]], plan.shared_fields

    def state_fields(self, leaf: ParamRecord, group: ParamGroup, optimizer_spec: OptimizerSpec) -> dict[str, StateField] | None:
        """Return the fields that the state_dict of a parameter in such a group has, by name.

        The `index` of a shared field is -1, and its shape is not reliable: it may depend on how many parameters there are (optax.flatten).

        Returns:
          None for a parameter that cannot be trained, or a frozen one of an optax transformation.
        """
        if leaf.spec is None and (optimizer_spec.is_optax or not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)):
            return None
        if not optimizer_spec.is_optax:
            row = replace(group_reader(optimizer_spec, ())(group), aux_state=self._aux_state)
            own, shared = state_layout(UpdateSpec(row, (rule_leaf_spec(optimizer_spec, leaf),))).leaf_fields[0], ()
        else:
            row = self.transforms[leaf.hyperparam_row]
            read = replace(
                group_reader(optimizer_spec, dict(row.traced_hyperparams))(group),
                joint_set=row.joint_set,
                omits_inactive_leaves=row.omits_inactive_leaves,
                aux_state=self._aux_state,
            )
            own, shared = (
                self.fields(leaf)
                if row.joint_set is not None
                else (state_layout(self.problem(leaf)._replace(transform=read)).leaf_fields[0], ())
            )
        fields = [*own, *(field._replace(state_index=-1) for field in shared)]
        return {field.name: field for field in fields if field.name not in optimizer_spec.hidden_state}

    def frozen_fields(self, leaf: ParamRecord, group: ParamGroup, optimizer_spec: OptimizerSpec) -> dict[str, StateField]:
        """Return the fields that a frozen parameter would have if its transformation saw no other; empty if it fails then."""
        path = self.all_paths[[id(other) for other in self._leaves].index(id(leaf))]
        try:
            row = replace(group_reader(optimizer_spec, ())(group), aux_state=self._aux_state).with_joint_set(0)
            plan = state_layout(UpdateSpec(row, (global_leaf_spec(leaf, path),), self.all_paths))
        except Exception:  # noqa: BLE001 - the transformation may need other parameters too
            return {}
        fields = [*plan.leaf_fields[0], *(field._replace(state_index=-1) for field in plan.shared_fields)]
        return {field.name: field for field in fields if field.name not in optimizer_spec.hidden_state}

    def shared_shapes(self, chosen: Collection[int]) -> Iterator[tuple[list[ParamRecord], dict[str, set[tuple[int, ...]]]]]:
        """Yield for each joint set its chosen records, and the possible shapes of each field of shared state.

        A shape may be the one for all parameters of the joint set or for the chosen ones.

        Args:
          chosen: the ids of records.
        """
        for problem, positions in self.joint_sets.values():
            leaves = [leaf for leaf in self._leaves if id(leaf) in positions and id(leaf) in chosen]
            if leaves:
                some = problem._replace(specs=tuple(problem.specs[positions[id(leaf)]] for leaf in leaves))
                shapes: dict[str, set[tuple[int, ...]]] = {}
                for field in (*state_layout(problem).shared_fields, *state_layout(some).shared_fields):
                    shapes.setdefault(field.name, set()).add(tuple(field.shape or ()))
                yield leaves, shapes

    def problem(self, leaf: ParamRecord) -> UpdateSpec:
        """Return the `UpdateSpec` of a parameter outside joint sets."""
        assert leaf.spec is not None
        return UpdateSpec(self.transforms[leaf.hyperparam_row], (leaf.spec,), () if leaf.spec.path is None else self.all_paths)


def _recompile_key_of(optimizer_spec: OptimizerSpec, name: str, is_traced: bool) -> Callable[[object], object] | None:
    """Return a function of a hyperparameter's value whose result selects the program; None if the value itself does."""
    if is_traced and optimizer_spec.is_optax:
        return _is_none
    if name not in optimizer_spec.static_by_value:
        return bool
    return hashable_value if isinstance(optimizer_spec.hyperparams[name], tuple | list) else None


def _is_dense_float(param: torch.Tensor) -> bool:
    return param.layout is torch.strided and (param.is_floating_point() or param.is_complex()) and not param.is_meta


def _row_key(leaf: ParamRecord) -> tuple[int, bool, float]:
    return leaf.group_index, bool(leaf.decay.value), leaf.lr_scale
