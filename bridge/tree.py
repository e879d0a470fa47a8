"""Names <-> nested dict pytrees of a module or of named parameters, and selectors resolved over either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import torch

from ._names import mapping, nest, path_name, unnest
from .dlpack import to_jax, to_torch
from .masks import Kind, Leaves, column


def module_tree(module: torch.nn.Module, copy: bool | None = False) -> dict[str, Any]:
    """The module's parameters as a nested dict of `jax.Array`s over the same memory (no copy).

    `copy` is that of `to_jax`: False: an error for a parameter that jax cannot see as it lies, such as one from a file that begins at no
    multiple of 64 bytes. None: a copy of that parameter. True: a copy of all.

    A tied parameter appears once, under its first name, as in `module.named_parameters()`; `tied_names` says which.
    Import afresh after every torch write: jax may have cached what it read before.

    Raises:
      ValueError: a parameter cannot be seen by jax without a copy, and copy is False; the text names it.
    """
    return nest(to_jax({name: p.detach() for name, p in module.named_parameters()}, copy=copy).items())


def module_buffers(module: torch.nn.Module) -> dict[str, Any]:
    """The module's buffers as `module_tree` has the parameters, those left out of `state_dict` too.

    No copy, but of a buffer that jax cannot see as it lies (expanded, or a part of another). Import afresh after a torch write.
    """
    return nest(to_jax({name: b.detach() for name, b in module.named_buffers()}, copy=None).items())


def write_buffers(module: torch.nn.Module, buffers: Mapping[str, Any]) -> None:
    """Write a nested dict of arrays, as `module_function` gives it, into the module's buffers: in place, converted to their dtype.

    All is checked before anything is written.

    Raises:
      TypeError: buffers is no dict.
      ValueError: a name that the module has not, one that is missing, or another shape.
    """
    new, own = unnest(mapping(buffers, "write_buffers: buffers", "module_buffers")), dict(module.named_buffers())
    if new.keys() != own.keys():
        wrong = sorted(new.keys() ^ own.keys())
        raise ValueError(
            f"write_buffers: {wrong[0]!r} is {'missing' if wrong[0] in own else 'no buffer of the module'} ({len(wrong)} such)."
        )
    for name, buffer in own.items():
        if tuple(new[name].shape) != tuple(buffer.shape):
            raise ValueError(f"write_buffers: {name!r} has shape {tuple(new[name].shape)}; expected {tuple(buffer.shape)}.")
    with torch.no_grad():
        for name, buffer in own.items():
            buffer.copy_(to_torch(new[name].block_until_ready(), copy=None))


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
