"""Names <-> nested dict pytrees of a module or of named parameters, and selectors resolved over either."""

from __future__ import annotations

from typing import Any

import jax
import torch

from ._names import nest, path_name
from .masks import Kind, Leaves, column


def resolve_mask(spec: Any, params: Any) -> Any:
    """Resolve a mask spec to a pytree of bools (or boolean arrays of the leaf's shape), True = optimized.

    Args:
      spec: any form of the README's "Selectors".
      params: a pytree of arrays or tensors, whose key paths joined by dots are the names; or an `nn.Module`.

    Returns:
      A pytree of the structure of `params`; for a module a dict by parameter name.

    Raises:
      ValueError, TypeError: as `bridge.masks.column`.
    """
    return _resolve(spec, params, "mask")


def resolve_labels(spec: Any, params: Any) -> Any:
    """Resolve a label spec to a pytree of labels; as `resolve_mask`, but a leaf that no rule names is a ValueError."""
    return _resolve(spec, params, "labels")


def _resolve(spec: Any, params: Any, kind: Kind) -> Any:
    if isinstance(params, torch.nn.Module):
        named = dict(params.named_parameters())
        leaves = Leaves(list(named), list(named.values()), lambda: nest(named.items()))
        return {name: d.value for name, d in zip(named, column(spec, leaves, kind), strict=True)}
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = Leaves([path_name(path) for path, _ in with_paths], [leaf for _, leaf in with_paths], lambda: params)
    return treedef.unflatten([d.value for d in column(spec, leaves, kind)])
