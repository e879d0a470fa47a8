"""A pass that arranges matrix products and transposes for XLA's CPU compiler, with the same results up to the order of sums.

- The gradient of a weight contracts the first dimension of both operands. XLA materializes the left operand transposed, even if it
  is the larger one. The pass transposes the smaller one.
- The gradient of slices of a tensor is a concatenation. XLA's loop over a transposed concatenation branches at each element. The
  pass transposes the parts.
- A processor with bfloat16 products runs them only if the result is float32 and no operand is transposed on the way. Otherwise XLA
  converts both operands to float32. The pass rounds a float32 result instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from bridge._ir.jaxpr import is_replaceable, replace_eqn, rewrite_bottom_up, with_eqns
from bridge._ir.types import Atom, Eqn, Jaxpr, Literal, Var, aval_of
from bridge._tracing.materialize import barrier

_Params: TypeAlias = dict[str, Any]  # parameters of an equation
_BFLOAT16 = jnp.dtype("bfloat16")
# XLA's CPU compiler in jax 0.8 has no bfloat16 product with a float32 result for some shapes; the one in jax 0.10 has it.
_HAS_FLOAT32_RESULT = jax.__version_info__ >= (0, 10)


def arrange_matmuls(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with its products and transposes arranged; the same object if there is nothing to arrange."""
    return rewrite_bottom_up(jaxpr, _rewrite)


def _rewrite(jaxpr: Jaxpr) -> Jaxpr:
    uses: dict[Var, int] = {}
    for v in (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars):
        if not isinstance(v, Literal):
            uses[v] = uses.get(v, 0) + 1
    joined: dict[Atom, Eqn] = {
        eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "concatenate" and uses.get(eqn.outvars[0]) == 1
    }
    transposed: dict[Atom, Eqn] = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "transpose"}
    return with_eqns(jaxpr, [_arrange_eqn(eqn, joined, transposed) for eqn in jaxpr.eqns])


def _arrange_eqn(eqn: Eqn, joined: dict[Atom, Eqn], transposed: dict[Atom, Eqn]) -> Eqn:
    name = eqn.primitive.name
    if name == "dot_general" and is_replaceable(eqn):
        rounds = _HAS_FLOAT32_RESULT and all(aval_of(v).dtype == _BFLOAT16 for v in (*eqn.invars, *eqn.outvars))
        eqn = _read_untransposed(eqn, transposed) if rounds else eqn
        params = eqn.params | {"preferred_element_type": aval_of(eqn.outvars[0]).dtype}
        if _contracts_leading_dims(eqn):
            return replace_eqn(eqn, eqn.invars, lambda a, b: _transpose_smaller_side(a, b, params))
        if rounds:
            return replace_eqn(eqn, eqn.invars, lambda a, b: _product(a, b, params["dimension_numbers"], params))
    if name == "transpose" and eqn.invars[0] in joined:
        parts, order = joined[eqn.invars[0]], eqn.params["permutation"]
        return replace_eqn(eqn, parts.invars, lambda *xs: _concatenate_transposed(xs, parts.params["dimension"], order))
    return eqn


def _contracts_leading_dims(eqn: Eqn) -> bool:
    """Return whether a product contracts the first dimensions of both operands, neither of which is a vector."""
    (contracting, batch), sides = eqn.params["dimension_numbers"], list(map(aval_of, eqn.invars))
    for over, kept, side in zip(contracting, batch, sides, strict=True):
        lead = len(kept) + len(over)
        if tuple(kept) != tuple(range(len(kept))) or set(over) != set(range(len(kept), lead)) or math.prod(side.shape[lead:]) < 2:
            return False
    return math.prod(sides[0].shape[i] for i in contracting[0]) > 1


def _read_untransposed(eqn: Eqn, transposed: dict[Atom, Eqn]) -> Eqn:
    """Return a product that reads operands without batch dimensions as they were before a transpose, if the result stays the same."""
    over, batch = eqn.params["dimension_numbers"]
    sides = [*zip(eqn.invars, map(tuple, over), strict=True)]
    for at, (v, own) in enumerate(sides):
        if v in transposed and not batch[at]:
            order = transposed[v].params["permutation"]
            free = [order[i] for i in range(len(order)) if i not in own]
            if free == sorted(free):
                sides[at] = transposed[v].invars[0], tuple(order[i] for i in own)
    invars, over = zip(*sides, strict=True)
    return eqn.replace(invars=list(invars), params=eqn.params | {"dimension_numbers": (over, batch)})


def _product(left: jax.Array, right: jax.Array, dims: lax.DotDimensionNumbers, params: _Params) -> jax.Array:
    """Return the product in the requested dtype; a bfloat16 product is summed in float32."""
    dtype = params["preferred_element_type"]
    rounds = _HAS_FLOAT32_RESULT and left.dtype == right.dtype == dtype == _BFLOAT16
    return lax.dot_general(
        left, right, dims, precision=params["precision"], preferred_element_type=jnp.float32 if rounds else dtype
    ).astype(dtype)


def _transpose_smaller_side(left: jax.Array, right: jax.Array, params: _Params) -> jax.Array:
    """Return the product with the smaller operand transposed. If that swaps the operands, the result is transposed."""
    (over, over_right), (batch, _) = params["dimension_numbers"]
    lead = len(batch) + len(over)
    size = math.prod(left.shape[: len(batch)]) * math.prod(left.shape[lead:]) * math.prod(right.shape[lead:])
    swapped = right.size + size < left.size
    pairs = sorted(zip(over_right, over, strict=True)) if not swapped else sorted(zip(over, over_right, strict=True))
    small, large = (right, left) if swapped else (left, right)
    lot, rows = tuple(range(len(batch))), small.ndim - lead
    small = lax.transpose(small, (*lot, *range(lead, small.ndim), *(mine for _, mine in pairs)))
    # The barrier is on one dimension, because the matmul library ignores a transpose that only changes the layout.
    small = barrier(small.reshape(-1)).reshape(small.shape) if small.dtype == _BFLOAT16 else barrier(small)
    dims = (tuple(range(len(lot) + rows, small.ndim)), tuple(its for its, _ in pairs)), (lot, lot)
    precision = params["precision"]
    precision = precision[::-1] if swapped and isinstance(precision, tuple) else precision
    out = barrier(_product(small, large, dims, params | {"precision": precision}))
    free = range(len(lot), out.ndim)
    return lax.transpose(out, (*lot, *free[rows:], *free[:rows])) if swapped else out


def _concatenate_transposed(parts: Sequence[jax.Array], dimension: int, order: tuple[int, ...]) -> jax.Array:
    return lax.concatenate([lax.transpose(x, order) for x in parts], order.index(dimension))
