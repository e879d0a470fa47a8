"""Traced hyperparams that behave like the Python floats that optax expects.

optax works out `1 - b2` in Python, in double precision, and lets the result meet an array in the array's own type. A
traced float32 loses five digits of `1 - 0.999`; a traced float64 turns every float32 array that it meets into float64.
A `Scalar` does neither: among scalars it is float64, and on meeting an array it becomes one of the arrays' type.
"""

# jax declares many of its functions in part only, and the operators of `Scalar` are functions outside of the class.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from bridge._process import x64

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike


class Scalar:
    """A traced float64 number with a Python float's manners; `dtype` is the type in which it meets arrays."""

    __slots__ = ("_dtype", "_value")
    __array_ufunc__ = None  # numpy scalars on the left leave the operation to us
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: jax.Array, dtype: DTypeLike) -> None:
        self._value, self._dtype = value, dtype

    def __jax_array__(self) -> jax.Array:
        return self._value.astype(self._dtype)

    # What needs the number itself raises jax's error about traced values; such a hyperparam is then made static.
    def __bool__(self) -> bool:
        return bool(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __int__(self) -> int:
        return int(self._value)

    def __neg__(self) -> Scalar:
        return Scalar(-self._value, self._dtype)

    def __repr__(self) -> str:
        return f"Scalar({self._value})"


def _binary(
    function: Callable[[ArrayLike, ArrayLike], jax.Array], swapped: bool = False
) -> Callable[[Scalar, ArrayLike | Scalar], jax.Array | Scalar]:
    def method(self: Scalar, other: ArrayLike | Scalar) -> jax.Array | Scalar:
        if not isinstance(other, int | float | Scalar):
            mine = self.__jax_array__()
            return function(other, mine) if swapped else function(mine, other)
        with x64():
            theirs = other._value if isinstance(other, Scalar) else np.float64(other)
            result = function(theirs, self._value) if swapped else function(self._value, theirs)
            return result if result.dtype == bool else Scalar(result, self._dtype)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Scalar, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(Scalar, f"__r{_name}__", _binary(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Scalar, f"__{_name}__", _binary(getattr(operator, _name)))

# A pytree, so that it may be an argument of the small jitted functions that optax is made of.
jax.tree_util.register_pytree_node(Scalar, lambda s: ((s._value,), s._dtype), lambda dtype, children: Scalar(children[0], dtype))
