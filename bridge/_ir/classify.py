"""Classify the equations of a jaxpr: elementwise, reduction, reshape, broadcast, or call of another jaxpr."""

from __future__ import annotations

from .types import ClosedJaxpr, Eqn, Jaxpr, aval_of

# fmt: off
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge",
    "gt", "igamma", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pow", "real", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})
# fmt: on
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
RESHAPING = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
_CONCATENATIONS = frozenset({"concatenate", "stack"})  # with one operand they only change its shape
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def called_jaxpr(eqn: Eqn) -> Jaxpr | ClosedJaxpr | None:
    """Return the jaxpr that an equation calls, or None where it calls none."""
    return eqn.params.get(_CALLS.get(eqn.primitive.name, ""))


def is_reshape(eqn: Eqn) -> bool:
    """Return whether the result has all elements of the first operand, in the same order. Its shape may differ."""
    turned = eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None
    return eqn.primitive.name in RESHAPING and not turned and aval_of(eqn.invars[0]).size == aval_of(eqn.outvars[0]).size


def is_broadcast(eqn: Eqn, size: int) -> bool:
    """Return whether an equation broadcasts a scalar to an array of `size` elements."""
    return eqn.primitive.name == "broadcast_in_dim" and (aval_of(eqn.invars[0]).size, aval_of(eqn.outvars[0]).size) == (1, size)


def is_fusible(eqn: Eqn) -> bool:
    """Return whether XLA computes an equation within the loop of its consumer and stores no result for it.

    This holds where each element of the result is computed from at most one element of each operand.
    """
    name = eqn.primitive.name
    return name in ELEMENTWISE or name in RESHAPING or (name in _CONCATENATIONS and len(eqn.invars) == 1)


def is_full_reduction(eqn: Eqn, size: int) -> bool:
    """Return whether an equation reduces all `size` elements of an array to a scalar, in any order."""
    return eqn.primitive.name in REDUCTIONS and (aval_of(eqn.invars[0]).size, aval_of(eqn.outvars[0]).size) == (size, 1)


def is_elementwise(eqn: Eqn, size: int) -> bool:
    """Return whether an equation is elementwise on arrays of `size` elements and scalars."""
    return eqn.primitive.name in ELEMENTWISE and {aval_of(v).size for v in (*eqn.invars, *eqn.outvars)} <= {1, size}


# Primitives that turn an array of equal elements into another one.
UNIFORM_PRESERVING = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"})
