"""Traced hyperparams with the type promotion of Python floats, for optax transformations.

optax computes `1 - b2` in Python in double precision, and the result takes the dtype of the array that it is combined with.
A traced float32 loses digits of `1 - 0.999`. A traced float64 promotes every float32 array to float64. A `TracedHyperparam` is
float64 in arithmetic with scalars, and takes a given dtype in arithmetic with arrays.
"""

# jax annotates many of its functions only partially, and the operators of `TracedHyperparam` are functions outside the class.
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


class TracedHyperparam:
    """A traced float64 scalar that promotes as a Python float does; arithmetic with arrays converts it to `dtype`."""

    __slots__ = ("_dtype", "_value")
    __array_ufunc__ = None  # a NumPy scalar on the left then calls the reflected operator
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: jax.Array, dtype: DTypeLike) -> None:
        self._value, self._dtype = value, dtype

    def __jax_array__(self) -> jax.Array:
        return self._value.astype(self._dtype)

    # Conversion to a Python value raises jax's error about traced values. The caller then makes the hyperparam static.
    def __bool__(self) -> bool:
        return bool(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __int__(self) -> int:
        return int(self._value)

    def __neg__(self) -> TracedHyperparam:
        return TracedHyperparam(-self._value, self._dtype)

    def __repr__(self) -> str:
        return f"Scalar({self._value})"


def _binary(
    function: Callable[[ArrayLike, ArrayLike], jax.Array], swapped: bool = False
) -> Callable[[TracedHyperparam, ArrayLike | TracedHyperparam], jax.Array | TracedHyperparam]:
    def method(self: TracedHyperparam, other: ArrayLike | TracedHyperparam) -> jax.Array | TracedHyperparam:
        if not isinstance(other, int | float | TracedHyperparam):
            mine = self.__jax_array__()
            return function(other, mine) if swapped else function(mine, other)
        with x64():
            theirs = other._value if isinstance(other, TracedHyperparam) else np.float64(other)
            result = function(theirs, self._value) if swapped else function(self._value, theirs)
            return result if result.dtype == bool else TracedHyperparam(result, self._dtype)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(TracedHyperparam, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(TracedHyperparam, f"__r{_name}__", _binary(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(TracedHyperparam, f"__{_name}__", _binary(getattr(operator, _name)))

# A pytree, because optax passes hyperparams to jitted functions.
jax.tree_util.register_pytree_node(
    TracedHyperparam, lambda s: ((s._value,), s._dtype), lambda dtype, children: TracedHyperparam(children[0], dtype)
)
