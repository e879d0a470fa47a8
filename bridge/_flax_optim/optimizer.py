"""flax.optim's interface on pytrees: an `OptimizerDef` updates one parameter, and an `Optimizer` holds a target and its state.

A subclass of a few lines is a new optimizer; `bridge._flax_optim.definitions` has flax's own.

>>> class SignumHyperParams(NamedTuple):
...     learning_rate: float
...     beta: float
>>> class Signum(OptimizerDef):
...     def __init__(self, learning_rate, beta=0.9):
...         super().__init__(SignumHyperParams(learning_rate, beta))
...     def init_param_state(self, param):
...         return jnp.zeros_like(param)
...     def apply_param_gradient(self, step, hyper_params, param, state, grad):
...         state = hyper_params.beta * state + (1 - hyper_params.beta) * grad
...         return param - hyper_params.learning_rate * jnp.sign(state), state
>>> optimizer = Signum(learning_rate=0.25).create({"head": jnp.array([1.0, 2.0])})
>>> optimizer = optimizer.apply_gradient({"head": jnp.array([3.0, -3.0])})
>>> optimizer.target["head"].tolist(), int(optimizer.state.step)
([0.75, 2.25], 1)

Every definition is an optax transformation too: it has `init` and `update`, and can be used in `optax.chain` or wherever optax takes
a transformation. The behavior follows https://github.com/google/flax/tree/v0.3.6/flax/optim; flax need not be installed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from bridge._compat.types import Device, PyTreeDef
from bridge._interop.flax_serialization import register_with_flax
from bridge._ir.types import PyTree
from bridge._names import path_name
from bridge._transforms.selectors import NamedLeaves, resolve_selector

from .fields import (
    cast_hyper_params,
    check_gradients,
    compute_dtype_of,
    field_values,
    flatten_like_params,
    from_nested_dict,
    to_nested_dict,
    with_fields,
)


class OptimizerState(NamedTuple):
    """The state of an `Optimizer`.

    Args:
      step: the int32 count of updates.
      param_states: the parameters' tree with a state for each leaf.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> bridge.Momentum(learning_rate=0.1).create({"w": jnp.ones(1)}).state
      OptimizerState(step=Array(0, dtype=int32), param_states={'w': MomentumParamState(momentum=Array([0.], dtype=float32))})
    """

    step: jax.Array
    param_states: PyTree

    def replace(self, **changes: Any) -> OptimizerState:
        return self._replace(**changes)


class OptimizerDef:
    """The definition of an optimizer. A subclass has `init_param_state` and `apply_param_gradient`; the module shows an example.

    Args:
      hyper_params: any object with attributes: a NamedTuple, a dataclass, a flax struct. Python numbers and arrays may
        be overridden at each call and may be traced. Values that decide the structure (bools, None) stay Python values.

    Floating arrays and traced hyper params are cast to the parameter's dtype for `apply_param_gradient`. float16 and bfloat16
    parameters are passed as float32, with their gradient and state, and the results are rounded once. All else is passed
    unchanged.

    Raises:
      NotImplementedError: from `create` and `apply_gradient`, if the subclass lacks the method that they call.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> definition = bridge.Adam(learning_rate=0.1)
      >>> definition
      Adam(learning_rate=0.1, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0)
      >>> optimizer = definition.create({"w": jnp.ones(2)})
      >>> int(optimizer.apply_gradient({"w": jnp.ones(2)}, learning_rate=0.5).state.step)
      1
    """

    def __init__(self, hyper_params: Any) -> None:
        self.hyper_params = hyper_params

    def init_param_state(self, param: ArrayLike) -> PyTree:
        """Return the state of one parameter before the first update: any pytree, `()` for none."""
        raise NotImplementedError(f"{type(self).__name__} does not define init_param_state(param).")

    def apply_param_gradient(
        self, step: ArrayLike, hyper_params: Any, param: ArrayLike, state: PyTree, grad: ArrayLike
    ) -> tuple[jax.Array, PyTree]:
        """Return (new_param, new_state) of one parameter. `step` counts the updates before this one, from 0."""
        raise NotImplementedError(f"{type(self).__name__} does not define apply_param_gradient(step, hyper_params, param, state, grad).")

    def create(self, target: PyTree, focus: object = None) -> Optimizer:
        """Make an `Optimizer` for a pytree of arrays. `focus` is a selector: other leaves have no state and are not changed."""
        register_with_flax(Optimizer, Optimizer.state_dict, Optimizer.restore_state)
        optimizer_def = self if focus is None else MultiOptimizer((focus, self))
        return Optimizer(optimizer_def, optimizer_def.init_state(target), target)

    def init_state(self, params: PyTree) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(self.init_param_state, params))

    def apply_gradient(self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree) -> tuple[PyTree, OptimizerState]:
        """Return (new_params, new_state) for a tree of gradients.

        Raises:
          ValueError: `grads` or the state has another structure, or a gradient is None or has another shape. The text names the leaf.
        """
        check_gradients(type(self).__name__, params, grads)
        leaves, treedef = jax.tree.flatten(params)
        columns = leaves, flatten_like_params(treedef, state.param_states, "the state"), treedef.flatten_up_to(grads)
        results = [self._apply_leaf(state.step, hyper_params, *each) for each in zip(*columns, strict=True)]
        new_params, new_states = zip(*results, strict=True) if results else ((), ())
        return treedef.unflatten(new_params), OptimizerState(state.step + 1, treedef.unflatten(new_states))

    def _apply_leaf(self, step: ArrayLike, hyper_params: Any, param: ArrayLike, state: PyTree, grad: ArrayLike) -> tuple[jax.Array, PyTree]:
        dtype = getattr(param, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return self.apply_param_gradient(step, hyper_params, param, state, grad)
        wide = compute_dtype_of(dtype)
        hyper_params = cast_hyper_params(hyper_params, jnp.finfo(wide).dtype)
        if wide == dtype:
            return self.apply_param_gradient(step, hyper_params, param, state, grad)
        lifted = jax.tree.map(lambda x: x.astype(wide) if getattr(x, "dtype", None) == dtype else x, (param, state, grad))
        new_param, new_state = self.apply_param_gradient(step, hyper_params, *lifted)
        return new_param.astype(dtype), jax.tree.map(lambda new, old: jnp.asarray(new, getattr(old, "dtype", None)), new_state, state)

    def init(self, params: PyTree) -> OptimizerState:
        """Return the initial state, as `init_state` does. This is optax's `init`."""
        return self.init_state(params)

    def update(self, grads: PyTree, state: OptimizerState, params: PyTree = None, **extra_args: object) -> tuple[PyTree, OptimizerState]:
        """Return the updates to add to `params`, and the new state. This is optax's `update`; extra args are ignored.

        Raises:
          ValueError: `params` is None (optax's text), or as `apply_gradient`.
        """
        if params is None:
            raise ValueError(
                "You are using a transformation that requires the current value of parameters, but you are not passing `params` when "
                "calling `update`."
            )
        new_params, new_state = self.apply_gradient(self.hyper_params, params, state, grads)
        return jax.tree.map(_difference, new_params, params), new_state

    def update_hyper_params(self, **overrides: Any) -> Any:
        """Return the hyper params with some replaced. `Optimizer.apply_gradient` does this at each call.

        Args:
          **overrides: new values by name, `lr` for `learning_rate`; `hyper_params=` replaces all of them first.

        Raises:
          TypeError: an unknown name; the text lists the known ones. Or both `lr` and `learning_rate`.
        """
        given = overrides.pop("hyper_params", None)
        return with_fields(type(self).__name__, self.hyper_params if given is None else given, overrides)

    def with_hyper_params(self, **overrides: Any) -> Self:
        """Return a definition of the same class with these hyper params, named as in `update_hyper_params`. Values may be traced."""
        new = copy.copy(self)
        new.hyper_params = self.update_hyper_params(**overrides)
        return new

    def hyper_param_values(self) -> dict[str, Any]:
        """Return the hyper params by name, as `with_hyper_params` takes them."""
        return field_values(self.hyper_params)

    def state_dict(self, target: PyTree, state: OptimizerState) -> dict[str, Any]:
        """Return {'target': ..., 'state': ...} as nested dicts with string keys, in flax's layout. Arrays are not copied."""
        return to_nested_dict({"target": target, "state": state})

    def restore_state(self, target: PyTree, state: OptimizerState, state_dict: Mapping[str, Any]) -> tuple[PyTree, OptimizerState]:
        """Return (target, state) with the values of a `state_dict`. Its structure, shapes and dtypes must be those of the arguments.

        Raises:
          ValueError: an entry is missing, not known, or of another shape or dtype. The text names it.
        """
        values = from_nested_dict({"target": target, "state": state}, state_dict)
        return values["target"], values["state"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.hyper_param_values().items())})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A target and its state under an `OptimizerDef`. It is a pytree whose definition is static, so jit takes and returns it.

    `OptimizerDef.create(target)` makes one. Numbers given to `apply_gradient` may change without compilation where they are
    arguments of the jitted function. Another definition compiles again.

    Args:
      optimizer_def: the definition.
      state: the `OptimizerState`.
      target: the pytree of parameters.

    Example:
      >>> import bridge, jax, jax.numpy as jnp
      >>> optimizer = bridge.GradientDescent(learning_rate=0.5).create({"w": jnp.ones(2)})
      >>> step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
      >>> step(optimizer, {"w": jnp.ones(2)}).target["w"]
      Array([0.5, 0.5], dtype=float32)
    """

    optimizer_def: OptimizerDef = dataclasses.field(metadata={"static": True})
    state: OptimizerState
    target: PyTree

    def apply_gradient(self, grads: PyTree, **hyper_param_overrides: Any) -> Optimizer:
        """Return the optimizer after one update. Overrides are as in `OptimizerDef.update_hyper_params`, for this update only."""
        register_with_flax(Optimizer, Optimizer.state_dict, Optimizer.restore_state)
        hyper_params = self.optimizer_def.update_hyper_params(**hyper_param_overrides)
        target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads)
        return self.replace(target=target, state=state)

    def replace(self, **changes: Any) -> Optimizer:
        return dataclasses.replace(self, **changes)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer_def.state_dict(self.target, self.state)

    def restore_state(self, state_dict: Mapping[str, Any]) -> Optimizer:
        """Return the optimizer with the values of a `state_dict`. Raise as `OptimizerDef.restore_state` does."""
        target, state = self.optimizer_def.restore_state(self.target, self.state, state_dict)
        return self.replace(target=target, state=state)

    def replicate(self, devices: Sequence[Device] | None = None, axis_name: str = "batch") -> Optimizer:
        """Return a copy for each device, stacked along a new first axis, whose `apply_gradient` averages the gradients.

        Call `apply_gradient` inside `jax.pmap(..., axis_name=axis_name)`, where each replica has its own copy. Or call it inside
        `shard_map` over an axis of that name, with the spec `PartitionSpec(axis_name)` for the optimizer. The first axis of its arrays
        then has length 1.

        Args:
          devices: default `jax.local_devices()`.
          axis_name: the mapped axis over which gradients are averaged.
        """
        devices = list(jax.local_devices() if devices is None else devices)
        return jax.tree.map(_make_replicate(devices, axis_name), self).replace(
            optimizer_def=ReplicatedOptimizer(self.optimizer_def, devices, axis_name)
        )

    def unreplicate(self) -> Optimizer:
        """Return the first device's copy, with the definition from before `replicate`."""
        if not isinstance(self.optimizer_def, ReplicatedOptimizer):
            raise ValueError("unreplicate: this optimizer is not replicated. Call replicate() first.")
        return _first_copy(self, self.optimizer_def.devices).replace(optimizer_def=self.optimizer_def.optimizer_def)


class ReplicatedOptimizer(OptimizerDef):
    """A definition that first averages the gradients over a mapped axis. `Optimizer.replicate` makes it."""

    def __init__(self, optimizer_def: OptimizerDef, devices: Sequence[Device] | None = None, axis_name: str = "batch") -> None:
        super().__init__(optimizer_def.hyper_params)
        self.optimizer_def, self.axis_name = optimizer_def, axis_name
        self.devices = list(jax.local_devices() if devices is None else devices)

    def init_state(self, params: PyTree) -> OptimizerState:
        return self.optimizer_def.init_state(params)

    def apply_gradient(self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree) -> tuple[PyTree, OptimizerState]:
        """Apply the wrapped definition to the gradients averaged over `axis_name`.

        Raises:
          ValueError: inside `shard_map`, where neither a parameter nor its gradient varies over the axis. jax has already summed the
            gradients of the replicas then, and their average would be the sum.
        """
        if self.axis_name in _varying_axes(jax.lax.axis_index(self.axis_name)):
            leaves, treedef = jax.tree.flatten(params)
            for param, grad in zip(leaves, flatten_like_params(treedef, grads, "grads"), strict=True):
                if grad is not None and self.axis_name not in _varying_axes(param) | _varying_axes(grad):
                    raise ValueError(
                        f"ReplicatedOptimizer: the gradients do not vary over {self.axis_name!r}. shard_map sums the gradients of "
                        "parameters that enter with PartitionSpec(), so their mean would be the sum. Pass the optimizer with "
                        f"PartitionSpec({self.axis_name!r}), or call shard_map with check_vma=False."
                    )
        return self.optimizer_def.apply_gradient(hyper_params, params, state, jax.lax.pmean(grads, self.axis_name))

    def update_hyper_params(self, **overrides: Any) -> Any:
        return self.optimizer_def.update_hyper_params(**overrides)

    def with_hyper_params(self, **overrides: Any) -> ReplicatedOptimizer:
        return ReplicatedOptimizer(self.optimizer_def.with_hyper_params(**overrides), self.devices, self.axis_name)

    def hyper_param_values(self) -> dict[str, Any]:
        return self.optimizer_def.hyper_param_values()

    def state_dict(self, target: PyTree, state: OptimizerState) -> dict[str, Any]:
        """Return the state dict of the first device's copy."""
        return self.optimizer_def.state_dict(*_first_copy((target, state), self.devices))

    def restore_state(self, target: PyTree, state: OptimizerState, state_dict: Mapping[str, Any]) -> tuple[PyTree, OptimizerState]:
        """Return target and state with the values for every device's copy."""
        one_target, one_state = _first_copy((target, state), self.devices)
        values = self.optimizer_def.restore_state(one_target, one_state, state_dict)
        return jax.tree.map(_make_replicate(self.devices, self.axis_name), values)


class ModelParamTraversal:
    """Selects parameters by a function (path, param) -> bool, with paths like '/head/weight'.

    It is a selector too (docs/selectors.md): called with the dotted name 'head.weight', it returns the value of the function for
    '/head/weight'.

    Args:
      filter_fn: the function.

    Raises:
      TypeError: filter_fn is no function.

    Example:
      >>> import bridge
      >>> biases = bridge.ModelParamTraversal(lambda path, param: path.endswith("bias"))
      >>> list(biases.iterate({"head": {"weight": 1.0, "bias": 2.0}}))
      [2.0]
    """

    def __init__(self, filter_fn: Callable[[str, Any], object]) -> None:
        if not callable(filter_fn):
            raise TypeError(f"ModelParamTraversal: expected a function (path, param) -> bool, got {filter_fn!r}.")
        self.filter_fn = filter_fn

    def __call__(self, name: str, param: object) -> bool:
        return bool(self.filter_fn("/" + name.replace(".", "/"), param))

    def iterate(self, inputs: PyTree) -> Iterator[Any]:
        """Yield the selected leaves of a tree."""
        yield from (leaf for path, leaf in jax.tree_util.tree_leaves_with_path(inputs) if self(path_name(path), leaf))

    def update(self, fn: Callable[[Any], Any], inputs: PyTree) -> PyTree:
        """Return the tree with `fn` applied to the selected leaves."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: fn(leaf) if self(path_name(path), leaf) else leaf, inputs)


class _TraversalSelector:
    """A selector of the leaves that a traversal of `flax.traverse_util` visits."""

    def __init__(self, traversal: Any) -> None:
        self._traversal = traversal

    def __call__(self, params: PyTree) -> PyTree:
        chosen = object()
        return jax.tree.map(lambda x: x is chosen, self._traversal.update(lambda _: chosen, params))


def _as_selector(traversal: object) -> object:
    is_of_flax = not callable(traversal) and callable(getattr(traversal, "iterate", None)) and callable(getattr(traversal, "update", None))
    return _TraversalSelector(traversal) if is_of_flax else traversal


class MultiOptimizer(OptimizerDef):
    """Several definitions, each for the leaves that a selector picks.

    Args:
      *traversals_and_optimizers: pairs of a `ModelParamTraversal`, or any selector (docs/selectors.md) on dotted names, and a definition.

    A leaf of no pair has the state None and is not changed, and its gradient is not read. `init_state` raises a ValueError
    for a leaf of two pairs, with the leaf and the pairs in the text, and for a pattern that matches nothing.

    Hyper params are a list with one entry for each pair. An override by plain name (`learning_rate`) applies to all pairs. An
    override with the pair's number (`**{"1.learning_rate": 0.1}`) applies to one pair and takes precedence.

    Differs from flax: selectors are accepted too; selectors and traversals receive parameters only, never gradients or state; and
    definitions that wrap others (`WeightNorm`, `MultiOptimizer`) may be used in a pair, and receive the leaves under their own names.

    Raises:
      TypeError: there is no pair, or a pair has no definition.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> kernels = bridge.ModelParamTraversal(lambda path, param: "kernel" in path)
      >>> definition = bridge.MultiOptimizer((kernels, bridge.GradientDescent(0.5)), ("*.bias", bridge.GradientDescent(0.25)))
      >>> tree = {"head": {"kernel": jnp.ones(1), "bias": jnp.ones(1)}}
      >>> hyper_params = [definition.hyper_params[0].replace(learning_rate=1.0), None]
      >>> definition.create(tree).apply_gradient(tree, hyper_params=hyper_params).target["head"]
      {'bias': Array([0.75], dtype=float32), 'kernel': Array([0.], dtype=float32)}
    """

    def __init__(self, *traversals_and_optimizers: tuple[object, OptimizerDef]) -> None:
        if not traversals_and_optimizers:
            raise TypeError("MultiOptimizer: expected pairs of (selector, OptimizerDef), got none.")
        for pair in traversals_and_optimizers:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], OptimizerDef):
                raise TypeError(f"MultiOptimizer: expected pairs of (selector, OptimizerDef), got {pair!r}.")
        self.traversals = tuple(_as_selector(traversal) for traversal, _ in traversals_and_optimizers)
        self.sub_optimizers = tuple(optimizer for _, optimizer in traversals_and_optimizers)
        super().__init__([optimizer.hyper_params for optimizer in self.sub_optimizers])

    def init_state(self, params: PyTree) -> OptimizerState:
        leaves, treedef = jax.tree.flatten(params)
        owners = self._pair_of_each_leaf(params, strict=True)
        states: list[PyTree] = [None] * len(leaves)
        for index, optimizer in enumerate(self.sub_optimizers):
            state = optimizer.init_state(_select_pair(treedef, leaves, owners, index))
            _write_pair(states, treedef.flatten_up_to(state.param_states), owners, index)
        return OptimizerState(
            jnp.zeros((), jnp.int32), treedef.unflatten([_mark_selected(*each) for each in zip(states, owners, strict=True)])
        )

    def apply_gradient(self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree) -> tuple[PyTree, OptimizerState]:
        paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        leaves = [leaf for _, leaf in paths]
        states, given = flatten_like_params(treedef, state.param_states, "the state"), flatten_like_params(treedef, grads, "grads")
        owners = self._pair_of_each_leaf(params, strict=False)
        for (path, _), param_state, owner in zip(paths, states, owners, strict=True):
            if param_state is not None and owner is None:
                raise ValueError(
                    f"MultiOptimizer: {path_name(path)!r} has a state but no selector names it. Create the optimizer for these parameters."
                )
        new_leaves, new_states = list(leaves), [None] * len(leaves)
        for index, (optimizer, own) in enumerate(zip(self.sub_optimizers, self._hyper_params_by_pair(hyper_params), strict=True)):
            held, held_states, held_grads = (_select_pair(treedef, values, owners, index) for values in (leaves, states, given))
            some, some_states = optimizer.apply_gradient(own, held, OptimizerState(state.step, held_states), held_grads)
            _write_pair(new_leaves, treedef.flatten_up_to(some), owners, index)
            _write_pair(new_states, treedef.flatten_up_to(some_states.param_states), owners, index)
        new_states = [_mark_selected(*each) for each in zip(new_states, owners, strict=True)]
        return treedef.unflatten(new_leaves), OptimizerState(state.step + 1, treedef.unflatten(new_states))

    def update_hyper_params(self, **overrides: Any) -> list[Any]:
        return [optimizer.update_hyper_params(**own) for optimizer, own in self._overrides_by_pair(overrides)]

    def with_hyper_params(self, **overrides: Any) -> Self:
        new = copy.copy(self)
        new.sub_optimizers = tuple(optimizer.with_hyper_params(**own) for optimizer, own in self._overrides_by_pair(overrides))
        new.hyper_params = [optimizer.hyper_params for optimizer in new.sub_optimizers]
        return new

    def hyper_param_values(self) -> dict[str, Any]:
        """Return the hyper params by pair and name: {'0.learning_rate': 0.01, ...}."""
        each = enumerate(self.sub_optimizers)
        return {f"{index}.{name}": value for index, optimizer in each for name, value in optimizer.hyper_param_values().items()}

    def _overrides_by_pair(self, overrides: dict[str, Any]) -> Iterator[tuple[OptimizerDef, dict[str, Any]]]:
        """Yield each definition with its overrides, by the names that it knows."""
        each = self._hyper_params_by_pair(overrides.pop("hyper_params", self.hyper_params))
        for name in overrides:
            if "." in name and name.partition(".")[0] not in map(str, range(len(each))):
                raise TypeError(f"MultiOptimizer has no hyper param {name!r}. Known: {', '.join(self.hyper_param_values())}.")
        common = {name: value for name, value in overrides.items() if "." not in name}
        for index, (optimizer, own) in enumerate(zip(self.sub_optimizers, each, strict=True)):
            special = {name.removeprefix(f"{index}."): value for name, value in overrides.items() if name.startswith(f"{index}.")}
            yield optimizer, {"hyper_params": own} | common | special

    def _hyper_params_by_pair(self, hyper_params: Any) -> list[Any]:
        """Return one entry for each pair, with the pair's own hyper params in place of None."""
        count = len(self.sub_optimizers)
        if not isinstance(hyper_params, list | tuple) or hasattr(hyper_params, "_fields") or len(hyper_params) != count:
            raise ValueError(
                f"MultiOptimizer: hyper_params must be a list of {count} entries (None keeps a pair's own), got {hyper_params!r}."
            )
        return [mine if given is None else given for given, mine in zip(hyper_params, self.hyper_params, strict=True)]

    def _pair_of_each_leaf(self, params: PyTree, strict: bool) -> list[int | None]:
        """Return for each leaf the index of its pair. Unless `strict`, a pattern may match no leaf (no gradient, masked out)."""
        paths = jax.tree_util.tree_leaves_with_path(params)
        leaves = NamedLeaves([path_name(path) for path, _ in paths], [leaf for _, leaf in paths], lambda: params)
        owners: list[tuple[int, str] | None] = [None] * len(paths)
        for index, traversal in enumerate(self.traversals):
            try:
                decisions = resolve_selector(traversal, leaves)
            except ValueError:
                if strict:
                    raise
                continue
            for at, (value, rule) in enumerate(decisions):
                if not isinstance(value, bool):
                    raise TypeError(f"MultiOptimizer: {leaves.names[at]!r} got an array from {rule}; a pair owns whole leaves.")
                if value:
                    self._check_only_pair(leaves.names[at], owners[at], (index, rule))
                    owners[at] = (index, rule)
        return [None if owner is None else owner[0] for owner in owners]

    def _check_only_pair(self, name: str, *owners: tuple[int, str] | None) -> None:
        if None not in owners:
            both = " and ".join(f"{index} ({type(self.sub_optimizers[index]).__name__}, by {rule})" for index, rule in filter(None, owners))
            raise ValueError(f"Multiple optimizers match the same leaves: {name!r} belongs to pairs {both}. Narrow one of the selectors.")


def _difference(new: ArrayLike, old: ArrayLike) -> jax.Array:
    """Return the update from old to new: -0.0, which changes no bit when added, where they are equal (infinities too)."""
    old = jnp.asarray(old)
    new = jnp.asarray(new).astype(old.dtype)
    return jnp.where(new == old, jnp.full_like(old, -0.0), new - old)


def _select_pair(treedef: PyTreeDef, values: Sequence[PyTree], owners: Sequence[int | None], index: int) -> PyTree:
    """Return the tree with None for leaves of other pairs, so that the leaves of this pair keep their names."""
    return treedef.unflatten([value if owner == index else None for value, owner in zip(values, owners, strict=True)])


def _write_pair(into: list[PyTree], values: Sequence[PyTree], owners: Sequence[int | None], index: int) -> None:
    into[:] = [new if owner == index else old for old, new, owner in zip(into, values, owners, strict=True)]


def _mark_selected(state: PyTree, owner: int | None) -> PyTree:
    """Return the state of a leaf, with () in place of None for a leaf of a pair: None means a leaf of no pair."""
    return () if state is None and owner is not None else state


def _varying_axes(x: ArrayLike) -> frozenset[Hashable]:
    """Return the mapped axes over which a value may differ; none where jax does not track it (pmap, check_vma=False)."""
    kind = jax.typeof(x)
    return getattr(kind, "vma", None) or getattr(getattr(kind, "mat", None), "varying", frozenset())


def _make_replicate(devices: Sequence[Device], axis_name: str) -> Callable[[ArrayLike], jax.Array]:
    sharding = NamedSharding(Mesh(np.array(devices), (axis_name,)), PartitionSpec(axis_name))

    def stacked(x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        copies = [jax.device_put(x[None], device) for device in devices]
        return jax.make_array_from_single_device_arrays((len(devices), *x.shape), sharding, copies)

    return stacked


def _first_copy(tree: PyTree, devices: Sequence[Device]) -> PyTree:
    return jax.tree.map(lambda x: jax.device_put(x[0], devices[0]), tree)
