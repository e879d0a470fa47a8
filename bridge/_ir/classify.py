"""Classes of primitives: elementwise ones, reductions, and those that only reshape."""

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
_JOINS = frozenset({"concatenate", "stack"})  # of a single operand they give it another shape
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def body_of(eqn: Eqn) -> Jaxpr | ClosedJaxpr | None:
    """The function that an operation calls; None of one that calls none."""
    return eqn.params.get(_CALLS.get(eqn.primitive.name, ""))


def keeps_elements(eqn: Eqn) -> bool:
    """Whether the result has the elements of the first operand, in their order: as large as it, but maybe of another shape."""
    turned = eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None
    return eqn.primitive.name in RESHAPING and not turned and aval_of(eqn.invars[0]).size == aval_of(eqn.outvars[0]).size


def spreads(eqn: Eqn, size: int) -> bool:
    """Whether one number becomes all elements of a leaf."""
    return eqn.primitive.name == "broadcast_in_dim" and (aval_of(eqn.invars[0]).size, aval_of(eqn.outvars[0]).size) == (1, size)


def fuses(eqn: Eqn) -> bool:
    """Whether each element of the result is computed from one of each operand, or is one of them: XLA does that in whatever reads it."""
    name = eqn.primitive.name
    return name in ELEMENTWISE or name in RESHAPING or (name in _JOINS and len(eqn.invars) == 1)


def reduces(eqn: Eqn, size: int) -> bool:
    """Whether all elements of a leaf become one number, whatever their order."""
    return eqn.primitive.name in REDUCTIONS and (aval_of(eqn.invars[0]).size, aval_of(eqn.outvars[0]).size) == (size, 1)


def elementwise(eqn: Eqn, size: int) -> bool:
    """Whether each element of the result is computed from that element of leaves, and from single numbers."""
    return eqn.primitive.name in ELEMENTWISE and {aval_of(v).size for v in (*eqn.invars, *eqn.outvars)} <= {1, size}


_KEEPS_THE_NUMBER = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"})
