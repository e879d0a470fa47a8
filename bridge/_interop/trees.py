"""The public functions that convert pytrees and modules between torch and jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import jax
import numpy as np
import torch
from jax.tree_util import KeyPath

from bridge import _process
from bridge._ir.types import PyTree
from bridge._names import check_nested_dict, did_you_mean, nest, path_name, tied_names, unnest

from . import dlpack
from .containers import path_to_instance


def module_tree(module: torch.nn.Module, copy: bool | None = False) -> dict[str, Any]:
    """Return the module's parameters as a nested dict of `jax.Array`s over the same memory.

    A tied parameter appears once, under its first name, as in `module.named_parameters()`. `tied_names` lists the other names.
    Call it again after every write by torch: jax may have cached the values that it read before.

    Args:
      module: The module.
      copy: As in `to_jax`. False: raise an error for a parameter that jax cannot view, for example one loaded from a file at an address
        that is not aligned to 64 bytes. None: copy such a parameter. True: copy all parameters.

    Returns:
      A nested dict: 'head.weight' is at `tree["head"]["weight"]`. Each array aliases its parameter, unless it was copied.

    Raises:
      ValueError: jax cannot view a parameter without a copy, and copy is False. The text names the parameter.

    Example:
      >>> import bridge, torch
      >>> tree = bridge.module_tree(torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1)}))
      >>> tree["head"]["weight"].shape
      (1, 2)
    """
    return nest(dlpack.to_jax({name: p.detach() for name, p in module.named_parameters()}, copy=copy).items())


def module_buffers(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's buffers as a nested dict of `jax.Array`s, including buffers that `state_dict` leaves out.

    Each array aliases its buffer. A buffer that jax cannot view (an expanded tensor, or a part of another) is copied. Call it again after
    every write by torch.

    Args:
      module: The module.

    Example:
      >>> import bridge, torch
      >>> bridge.module_buffers(torch.nn.BatchNorm1d(2))["running_mean"]
      Array([0., 0.], dtype=float32)
    """
    return nest(dlpack.to_jax({name: b.detach() for name, b in module.named_buffers()}, copy=None).items())


def write_buffers(module: torch.nn.Module, buffers: Mapping[str, Any]) -> None:
    """Write a nested dict of arrays, as `module_function` returns it, into the module's buffers, in place.

    Values are converted to the dtype of their buffer. Nothing is written unless all values fit.

    Args:
      module: The module.
      buffers: A nested dict with one array for each buffer of the module.

    Raises:
      TypeError: buffers is no dict.
      ValueError: A name is missing, is no buffer of the module, or has another shape.

    Example:
      >>> import bridge, jax.numpy as jnp, torch
      >>> norm = torch.nn.BatchNorm1d(2)
      >>> bridge.write_buffers(norm, bridge.module_buffers(norm) | {"running_mean": jnp.ones(2)})
      >>> norm.running_mean
      tensor([1., 1.])
    """
    new, module_buffers_by_name = (
        unnest(check_nested_dict(buffers, "write_buffers: buffers", "module_buffers")),
        dict(module.named_buffers()),
    )
    if new.keys() != module_buffers_by_name.keys():
        wrong = sorted(new.keys() ^ module_buffers_by_name.keys())
        raise ValueError(
            f"write_buffers: {wrong[0]!r} is {'missing' if wrong[0] in module_buffers_by_name else 'no buffer of the module'} "
            f"({len(wrong)} such)."
        )
    for name, buffer in module_buffers_by_name.items():
        if tuple(new[name].shape) != tuple(buffer.shape):
            raise ValueError(f"write_buffers: {name!r} has shape {tuple(new[name].shape)}; expected {tuple(buffer.shape)}.")
    with torch.no_grad():
        for name, buffer in module_buffers_by_name.items():
            buffer.copy_(dlpack.to_torch(new[name].block_until_ready(), copy=None))


@overload
def to_jax(tree: torch.Tensor, copy: bool | None = False) -> jax.Array: ...
@overload
def to_jax(tree: PyTree, copy: bool | None = False) -> PyTree: ...
def to_jax(tree: PyTree, copy: bool | None = False) -> PyTree:
    """View torch tensors as jax arrays, on the same device and over the same memory.

    Args:
      tree: A tensor, or any pytree that holds tensors (dicts and lists with None in them, a state_dict, an Equinox module, a
        registered dataclass, a named result of torch such as `torch.max(x, 1)`). Leaves of other types come back unchanged. An
        `nn.Module`, alone or in the tree, becomes the nested dict of its detached parameters, as by `module_tree`. Its buffers are
        left out: `module_buffers` returns them.
      copy: False: zero-copy or an error. None: zero-copy where possible, else a copy on the same device. True: a copy.

    Returns:
      `jax.Array`s of the same shape and dtype. 64-bit types stay 64-bit, whatever jax's global flag says. An array that was not copied
      aliases its tensor and keeps it alive.

    Raises:
      ValueError: A tensor requires grad, is sparse, on the meta device, a lazy conjugate or negative, strided or expanded, or not
        aligned to 64 bytes. The text names the leaf and the remedy.
      TypeError: Tensors are in a container or object that is no pytree to jax (deque, namespace, UserDict, distribution). They would
        stay torch tensors without notice.
      RuntimeError: jax does not see the device of a tensor.

    Example:
      >>> import bridge, torch
      >>> bridge.to_jax({"w": torch.ones(2)}, copy=None)
      {'w': Array([1., 1.], dtype=float32)}
    """
    return dlpack.to_jax(tree if isinstance(tree, torch.Tensor) else _expand_modules("to_jax", tree, torch.Tensor), copy)


@overload
def to_torch(tree: jax.Array, copy: bool | None = False) -> torch.Tensor: ...
@overload
def to_torch(tree: PyTree, copy: bool | None = False) -> PyTree: ...
def to_torch(tree: PyTree, copy: bool | None = False) -> PyTree:
    """View jax arrays as torch tensors, on the same device and over the same memory.

    Args:
      tree: A `jax.Array`, or any pytree that holds arrays (an Equinox module, flax's params, an optax state). Leaves of other types
        come back unchanged. The tree keeps its type: an Equinox module then holds tensors.
      copy: As in `to_jax`.

    Returns:
      Tensors of the same shape and dtype. A tensor that was not copied aliases its array: a write to the tensor changes the array, and
      jax does not donate the array while the tensor lives.

    Raises:
      ValueError: The array was donated or deleted, is a tracer, is sharded over several devices, or has a dtype that torch lacks.
      TypeError: As in `to_jax`.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> bridge.to_torch({"w": jnp.ones(2)})
      {'w': tensor([1., 1.])}
    """
    return dlpack.to_torch(tree if isinstance(tree, jax.Array) else _expand_modules("to_torch", tree, jax.Array), copy)


def load_module_tree(module: torch.nn.Module, tree: Mapping[str, Any]) -> None:
    """Write a nested dict of arrays into the module's parameters, in place. This is the inverse of `module_tree`.

    Parameters stay the same objects at the same addresses. The arrays are read once and not kept.

    Args:
      module: The module.
      tree: A nested dict with a jax or numpy array for each parameter.

    Raises:
      TypeError: tree is no dict.
      ValueError: A name is missing or unknown; an array has another shape, is a tracer or was donated; or a dtype would lose digits
        (float32 for a bfloat16 parameter: cast it first). Nothing is changed then.

    Example:
      >>> import bridge, jax, torch
      >>> model = torch.nn.Linear(2, 1)
      >>> bridge.load_module_tree(model, jax.tree.map(jax.numpy.ones_like, bridge.module_tree(model, copy=True)))
      >>> model.weight.data
      tensor([[1., 1.]])
    """
    what = "load_module_tree"
    new_values = {name: x for name, x in unnest(check_nested_dict(tree, f"{what}: tree", "module_tree")).items() if x is not None}
    params, ties = dict(module.named_parameters()), tied_names(module)
    for name in new_values:
        if name not in params:
            hint = f"It is tied to {ties[name]!r}; give it once, under that name." if name in ties else did_you_mean(name, params)
            raise ValueError(f"{what}: the module has no parameter {name!r}. {hint}")
    for name, p in params.items():
        if name not in new_values:
            raise ValueError(f"{what}: the tree has no {name!r}, of shape {tuple(p.shape)}. {did_you_mean(name, new_values)}")
    with _process.x64():
        arrays = {name: jax.numpy.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for name, x in new_values.items()}
    tensors = dlpack.to_torch(arrays, copy=None)
    for name, p in params.items():
        x = tensors[name]
        if not isinstance(x, torch.Tensor) or x.shape != p.shape or torch.promote_types(x.dtype, p.dtype) != p.dtype:
            has = f"shape {tuple(x.shape)} and dtype {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)
            raise ValueError(f"{what}: {name!r} has {has}; expected an array of shape {tuple(p.shape)} and dtype {p.dtype}.")
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(tensors[name])


def _expand_modules(function_name: str, tree: PyTree, kind: type) -> PyTree:
    """Return the tree with each module replaced by the nested dict of its parameters."""

    def expand(path: KeyPath, x: object) -> object:
        if isinstance(x, torch.Tensor | jax.Array):
            return x
        if isinstance(x, torch.nn.Module) and kind is torch.Tensor:
            return nest((name, p.detach()) for name, p in x.named_parameters())
        if not isinstance(x, torch.nn.Module) and path_to_instance(x, kind) is not None:
            name = path_name(path)
            raise TypeError(
                f"{function_name}: {f'leaf {name!r}' if name else 'the tree'} is a {type(x).__name__}, which holds arrays but is no "
                "pytree to jax. Register it (jax.tree_util.register_dataclass), or give a dict of its values."
            )
        return x

    return jax.tree_util.tree_map_with_path(expand, tree)
