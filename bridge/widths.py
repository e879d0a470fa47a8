"""Types of 64 bits, which jax keeps only where it is told to, and the types of 32 that it has for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.core import Tracer

_NARROW = {torch.float64: torch.float32, torch.int64: torch.int32, torch.complex128: torch.complex64}


def is_wide(x: Any) -> bool:
    """Whether a tensor or an array has 64 bits an element, 128 of complex ones."""
    return str(x.dtype).removeprefix("torch.") in ("float64", "int64", "uint64", "complex128")


def keeps(asked: bool | None, flag: bool, given: Iterable[Any]) -> bool:
    """Whether a program keeps 64 bits: as `asked`, or where jax's flag says so or something that it is given has them."""
    return asked if asked is not None else flag or any(map(is_wide, given))


def narrow(leaf: Any) -> Any:
    """Of 64 bits, 32."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(_NARROW.get(leaf.dtype, leaf.dtype))
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and is_wide(leaf):
        return leaf.astype(str(leaf.dtype).replace("64", "32").replace("128", "64"))
    return leaf


def canonical(x: Any) -> Any:
    """An array as jit would take it: 64 bits only where x64 is on."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
