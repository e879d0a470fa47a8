"""Read the learning rate and the weight decay that an optax transformation has inside it. They are read from its traced update."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.tree_util import GetAttrKey

from bridge._ir.classify import ELEMENTWISE, UNIFORM_PRESERVING
from bridge._ir.jaxpr import bind, inline_calls, literal_value, make_slicer
from bridge._ir.types import Atom, ClosedJaxpr, Eqn, KeyPath, Literal, PyTree, Var, aval_of
from bridge._names import Path
from bridge._process import default_promotion

from .optimizer_spec import OptimizerSpec
from .types import Hyperparams

# Primitives whose result has the elements of their operand.
_COPYING = frozenset({"convert_element_type", "reshape", "squeeze", "copy", "copy_p"})
_SUMS = frozenset({"add", "add_any"})


class InnerRates(NamedTuple):
    """The learning rate and the weight decay of one parameter inside a transformation. None: the traced update does not tell."""

    lr: float | None = None
    decay: float | None = None


def inner_rates(
    optimizer_spec: OptimizerSpec, hyperparams: Hyperparams, params: PyTree, state: Mapping[str, Collection[float]]
) -> dict[Path, InnerRates]:
    """Return the rates of each parameter by its path, as far as they are known.

    The learning rate is the constant with which the update is multiplied last. Hyperparameters in the state (`optax.inject_hyperparams`)
    and steps of schedules count as constants. The decay is the constant with which the parameter is multiplied, if it has no other use.

    Args:
      optimizer_spec: the spec of an optax transformation.
      hyperparams: its hyperparameters.
      params: its parameters, a nested dict of `jax.ShapeDtypeStruct`.
      state: the numbers in the optimizer's state by the names of their fields; a collection, because parameters may differ.
    """
    traced = _trace(optimizer_spec, hyperparams, params)
    if traced is None:
        return {}
    known = {var: value for name, var in traced.rates_in_state.items() if (value := traced.value_in_state(name, state)) is not None}
    program = _KnownNumbers(traced.update, known)
    return {path: program.rates(*variables) for path, variables in traced.by_path.items()}


def trailing_factor(optimizer_spec: OptimizerSpec, params: PyTree) -> float | None:
    """Return the constant with which a transformation multiplies its update last, such as -1e-3 in `optax.adam(1e-3)`, or None.

    The constant is read from the traced update. A schedule, or a learning rate in the state, is not a constant.

    Args:
      optimizer_spec: the spec of an optax transformation.
      params: its parameters, a tree of `jax.ShapeDtypeStruct`.
    """
    traced = _trace(optimizer_spec, optimizer_spec.hyperparams, params)
    if traced is None:
        return None
    program = _KnownNumbers(traced.update, {})
    factors = (program.trailing_factor(result)[0] for result in traced.update.jaxpr.outvars)
    return next((factor for factor in factors if not _is_one(factor)), None)


def _is_one(factor: float) -> bool:
    return math.isclose(abs(factor), 1.0, rel_tol=1e-6)


class _Variables(NamedTuple):
    """The variables of one parameter in a traced update."""

    result: Atom
    grad: Var
    param: Var


class _Traced(NamedTuple):
    """A traced update, and the variables in it.

    by_path: the variables of each parameter. rates_in_state: variables of the state that rates depend on, by dotted name.
    initial: the initial value of each of these, by name.
    """

    update: ClosedJaxpr
    by_path: dict[Path, _Variables]
    rates_in_state: dict[str, Var]
    initial: dict[str, np.ndarray | None]

    def value_in_state(self, name: str, state: Mapping[str, Collection[float]]) -> np.ndarray | None:
        """Return the value that a variable has now, or None. The names of fields are the ends of dotted names."""
        fields = [field for field in state if name == field or name.endswith(f".{field}")]
        if not fields:
            return self.initial[name]
        values = state[max(fields, key=len)]
        return np.asarray(next(iter(values)), aval_of(self.rates_in_state[name]).dtype) if len(values) == 1 else None


def _trace(optimizer_spec: OptimizerSpec, hyperparams: Hyperparams, params: PyTree) -> _Traced | None:
    """Trace the update of an optax transformation; None if it fails, because it needs arguments of `step` or other parameters."""

    def update(grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
        return transformation.update(grads, state, params)[0]

    params = jax.tree.map(lambda p: p.update(dtype=jnp.promote_types(p.dtype, np.float32)), params)
    plain = {name: hyperparams[name] for name in optimizer_spec.hyperparams}
    plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in plain.items()}
    try:
        with default_promotion():
            transformation = optimizer_spec.factory(**plain)
            init, state = jax.make_jaxpr(transformation.init, return_shape=True)(params)
            closed, updates = jax.make_jaxpr(update, return_shape=True)(params, state, params)
        program, init = inline_calls(closed.jaxpr, closed.consts), inline_calls(init.jaxpr, init.consts)
        leaves, fields = jax.tree_util.tree_leaves_with_path(params), jax.tree_util.tree_leaves_with_path(state)
        results = zip(jax.tree_util.tree_leaves_with_path(updates), program.jaxpr.outvars, strict=True)
        by_key_path = {path: result for (path, _), result in results}
        invars = program.jaxpr.invars
        grads, state_vars, param_vars = invars[: len(leaves)], invars[len(leaves) : -len(leaves)], invars[-len(leaves) :]
        by_path = {_names(path): _Variables(by_key_path[path], *each) for (path, _), *each in zip(leaves, grads, param_vars, strict=True)}
        chosen = set(_paths_of_rates(state))
        named = [(".".join(_names(path)), i) for i, (path, _) in enumerate(fields) if path in chosen]
        numbers = _KnownNumbers(init, {})
        return _Traced(
            program,
            by_path,
            {name: state_vars[i] for name, i in named},
            {name: numbers.value(init.jaxpr.outvars[i]) for name, i in named},
        )
    except Exception:  # noqa: BLE001 - the optimizer raises errors of the transformation itself
        return None


def _names(path: KeyPath) -> Path:
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _paths_of_rates(state: PyTree) -> Iterator[KeyPath]:
    """Yield the paths of what rates depend on in a state: the hyperparameters of `optax.inject_hyperparams`, and steps of schedules."""
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        if not {"hyperparams", "hyperparams_states"}.isdisjoint(_names(path)):
            yield path
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_schedule):
        if is_schedule(node):
            yield (*path, GetAttrKey("count"))


class _KnownNumbers:
    """What is known of the numbers in a jaxpr.

    Args:
      program: the jaxpr, without calls.
      known: the values of some of its inputs.
    """

    def __init__(self, program: ClosedJaxpr, known: Mapping[Var, np.ndarray]) -> None:
        eqns = program.jaxpr.eqns
        self._made = {result: eqn for eqn in eqns for result in eqn.outvars}
        self._slice_to = make_slicer(eqns)
        self._values: dict[Var, np.ndarray | None] = dict(known)
        for var, value in zip(program.jaxpr.constvars, program.consts, strict=True):
            self._values[var] = np.reshape(np.asarray(value), ()) if np.size(value) == 1 else None

    def rates(self, result: Atom, grad: Var, param: Var) -> InnerRates:
        """Return the rates of a parameter."""
        factor, rest = self.trailing_factor(result)
        is_known = not _is_one(factor) or self._has_no_other_factor(rest, grad)
        return InnerRates(abs(factor) if is_known else None, self._decay(result, rest, grad, param))

    def value(self, var: Atom) -> np.ndarray | None:
        """Return the scalar that all elements of a variable equal, if it is known without the arguments."""
        if isinstance(var, Literal):
            return literal_value(var) if np.ndim(var.val) == 0 else None
        if var not in self._values:
            self._values[var] = self._compute(var)
        return self._values[var]

    def _compute(self, var: Var) -> np.ndarray | None:
        eqn = self._made.get(var)
        name = "" if eqn is None else eqn.primitive.name
        if eqn is None or not (name in UNIFORM_PRESERVING or (name in ELEMENTWISE and all(aval_of(v).shape == () for v in eqn.invars))):
            return None
        operands = [self.value(v) for v in eqn.invars]
        values = [x for x in operands if x is not None]
        if len(values) < len(operands) or not values:
            return None
        if name in UNIFORM_PRESERVING:
            return values[0].astype(aval_of(var).dtype)
        return np.asarray(bind(eqn, *values)[0])

    def _number(self, var: Atom) -> float | None:
        value = self.value(var)
        if value is None or np.iscomplexobj(value):
            return None
        return float(str(value)) if value.dtype == np.float32 else float(value)  # a float32 of 0.1 is 0.1 to the reader

    def trailing_factor(self, var: Atom) -> tuple[float, Atom]:
        """Return the product of the constants with which a result is multiplied last, 1 if there are none, and what they multiply."""
        factor = 1.0
        while not isinstance(var, Literal) and var in self._made:
            name, operands = self._made[var].primitive.name, self._made[var].invars
            known = [self._number(operand) for operand in operands]
            if name == "mul" and (known[0] is None) is not (known[1] is None):
                factor *= known[0] if known[0] is not None else known[1]  # pyright: ignore[reportOperatorIssue]
                var = operands[known[0] is not None]
            elif name == "div" and known[0] is None and known[1]:
                factor /= known[1]
                var = operands[0]
            elif name == "neg" or name in _COPYING:
                var = operands[0]
            else:
                break
        return factor, var

    def _has_no_other_factor(self, var: Atom, grad: Var) -> bool:
        """Return whether an update that no constant multiplies last has none before either.

        This holds for a gradient, for a sign, and for the quotient of a sum and a root, as in Adam. A momentum or a decay may be added.
        """
        if var is grad or self._name(var) == "sign":
            return True
        if self._name(var) == "div":
            while self._name(var) == "div":
                var = self.trailing_factor(self._made[var].invars[0])[1]  # pyright: ignore[reportArgumentType]
            return var is grad or self._name(var) in _SUMS
        if self._name(var) in _SUMS:
            terms = self._made[var].invars  # pyright: ignore[reportArgumentType]
            rests = [self.trailing_factor(term)[1] for term in terms]
            others = [term for term, rest in zip(terms, rests, strict=True) if rest is grad or rest in self._made]
            return len(others) == 1 and self._has_no_other_factor(others[0], grad)
        return False

    def _name(self, var: Atom) -> str:
        """Return the name of the primitive that makes a variable; "" if it is an input or a literal."""
        return self._made[var].primitive.name if isinstance(var, Var) and var in self._made else ""

    def _decay(self, result: Atom, rest: Atom, grad: Var, param: Var) -> float | None:
        """Return the constant with which the parameter is multiplied before it is added to the gradient, or to `rest` as its last term."""
        eqns = self._slice_to([result])
        uses = _uses(eqns, param)
        if not uses:
            return 0.0
        if len(uses) > 1 or uses[0].primitive.name != "mul":
            return None
        known = [number for number in map(self._number, uses[0].invars) if number is not None]
        sums = _uses(eqns, uses[0].outvars[0])
        if len(known) != 1 or len(sums) != 1 or sums[0].primitive.name not in _SUMS:
            return None
        is_last = sums[0].outvars[0] is rest and rest is not result
        is_first = any(sums[0] is use for use in _uses(eqns, grad))
        return known[0] if known[0] >= 0 and (is_last or is_first) else None


def _uses(eqns: Collection[Eqn], var: Var) -> list[Eqn]:
    """Return the equations that use a variable, directly or in another dtype or shape."""
    same, found = {var}, list[Eqn]()
    for eqn in eqns:
        if any(not isinstance(v, Literal) and v in same for v in eqn.invars):
            if eqn.primitive.name in _COPYING:
                same.update(eqn.outvars)
            else:
                found.append(eqn)
    return found
