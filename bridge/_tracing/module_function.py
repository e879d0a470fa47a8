"""`module_function`, which makes a pure JAX function of an `nn.Module`, and `traced_call`, which runs torch code with a module's proxy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.tree_util import DictKey, KeyPath
from torch import nn

from bridge._compat.jax import trace_state
from bridge._compat.torch2jax import rng_keys_from
from bridge._interop.containers import path_to_instance, with_values
from bridge._interop.dlpack import to_jax
from bridge._interop.dtypes import canonicalize_dtype
from bridge._ir.types import PyTree
from bridge._names import check_nested_dict, did_you_mean, nest, path_name, tied_names, unnest
from bridge._process import disable_torch_compile_if_imported
from bridge._process import x64 as scope

from . import jax_calls
from .autograd_function import trace_scope
from .context import RngKeySource, context
from .module_proxy import ModuleProxy
from .op_registry import dispatch, is_autocast_enabled, is_traced
from .ops import (
    bags,
    create,
    distances,
    elementwise,
    fourier,
    index,
    layers,
    linalg,
    losses,
    margins,
    native,
    order,
    pools,
    products,
    quantize,
    random,
    recurrent,
    reductions,
    resize,
    sampling,
    scatter,
    shapes,
    special,
    views,
    windows,
)
from .originals import without_redirects
from .patches import redirect_to_proxies
from .tensor import TracedTensor, as_array, as_traced, register_as_torchish

OP_TABLES = (
    elementwise,
    order,
    reductions,
    create,
    random,
    shapes,
    views,
    scatter,
    index,
    layers,
    native,
    distances,
    bags,
    windows,
    pools,
    quantize,
    resize,
    sampling,
    losses,
    margins,
    linalg,
    products,
    fourier,
    special,
    recurrent,
    jax_calls,
)  # imported because they register operators
RNG_KEYS = RngKeySource()


def module_function(module: nn.Module) -> Callable[..., PyTree]:
    """Return the module as a pure JAX function. A call does not change the module.

        fn = module_function(module)
        fn(params, *inputs, rng=None, train=None, **keywords) -> output
        fn(params, *inputs, buffers=buffers, rng=None, train=None, **keywords) -> (output, new_buffers)

    `fn` works under `jit`, `grad`, `vmap` and `jax.checkpoint`. An ensemble is a `vmap` over params. Torch code in `fn` may branch on
    shapes, types and flags, but not on values.

    Args:
      module: the module; `fn` reads its attributes and flags at each call.

    Returns:
      The function `fn`. Tensors in its output are jax arrays, and a mapping of another type is a dict. Its arguments:
        params: a tree with the structure of `module_tree(module)`. Leaves are arrays or tracers with the module's shapes, of any dtype.
        *inputs, **keywords: pytrees of arrays. Numbers, strings and None are passed unchanged.
        buffers: a tree with the structure of `module_buffers(module)`. Without it, `fn` reads the module's buffers at the call and drops
          new values. `jit` reads them once, when it traces, so pass buffers that change. `write_buffers(module, new_buffers)` writes new
          values into the module.
        rng: a key of `jax.random`, needed only if something is drawn. The n-th draw of a call folds n into the key. So layers draw
          different numbers, and a call with the same key draws the same numbers. They are not torch's.
        train: True and False are `module.train()` and `module.eval()` for this call. None takes the module's flags.

    Differences from torch: float64 parameters need jax's x64. A `torch.autocast` around the call has no effect; inside the module it is an
    error. An embedding returns NaN for an index that is out of range.

    Raises:
      TypeError: `module` is no `nn.Module`; an input is a torch tensor; rng is no key; the output is an object that holds tensors.
      ValueError: names or shapes of params or buffers are not the module's; something is drawn without rng.
      NotImplementedError: a torch operation has no implementation. The message names the operation and the submodule that calls it.

    Example:
      >>> import bridge, jax, jax.numpy as jnp, torch
      >>> model = torch.nn.Linear(2, 1)
      >>> fn = bridge.module_function(model)
      >>> loss = lambda params, x: fn(params, x).sum()
      >>> jax.grad(loss)(bridge.module_tree(model, copy=None), jnp.ones((1, 2)))["weight"]
      Array([[1., 1.]], dtype=float32)
    """
    _check_module(module)

    @disable_torch_compile_if_imported
    def fn(
        params: Mapping[str, Any],
        *inputs: PyTree,
        buffers: Mapping[str, Any] | None = None,
        rng: jax.Array | None = None,
        train: bool | None = None,
        **keywords: PyTree,
    ) -> PyTree:
        out, new = traced_call(module, _call_module, params, buffers, inputs, keywords, rng=rng, train=train)
        return out if buffers is None else (out, new)

    fn.__name__ = fn.__qualname__ = f"module_function({type(module).__name__})"
    return fn


def _call_module(model: nn.Module, *args: object, **kwargs: object) -> Any:
    return model(*args, **kwargs)


def traced_call(
    module: nn.Module,
    function: Callable[..., PyTree],
    params: Mapping[str, Any],
    buffers: Mapping[str, Any] | None,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None = None,
    *,
    rng: jax.Array | None = None,
    train: bool | None = None,
    x64: bool | None = None,
    constants: dict[int, tuple[torch.Tensor, jax.Array]] | None = None,
) -> tuple[PyTree, dict[str, Any]]:
    """Run `function(model, *args, **kwargs)`, where `model` is the module's proxy with these `params` and `buffers`.

    The proxy has the module's class, methods, attributes and hooks. Writes to it do not reach the module.

    Args:
      args, kwargs: their arrays arrive as traced tensors, which torch functions, methods, operators and jax functions accept.
      rng, train: as in `module_function`; so are the errors.
      x64: jax's x64 flag for jax code in the function; torch functions then keep 64-bit types. None: the present flag for both.
      constants: a dict that collects the torch tensors from outside (`TraceContext.constants`).

    Returns:
      The function's result with jax arrays for tensors, and the nested dict of new buffer values.
    """
    with without_redirects():
        param_arrays = _leaves_by_name(module, params, "params", dict(module.named_parameters()))
        if buffers is None:
            buffer_arrays = {name: canonicalize_dtype(to_jax(b.detach(), copy=True)) for name, b in module.named_buffers()}
        else:
            buffer_arrays = _leaves_by_name(module, buffers, "buffers", dict(module.named_buffers()))
    _check_key(rng)
    register_as_torchish()
    with rng_keys_from(RNG_KEYS), _module_trace(module, rng, x64, {} if constants is None else constants):
        context.buffer_trace_state = None if buffers is None else trace_state()
        context.module_proxy = proxy = ModuleProxy(module, param_arrays, buffer_arrays, train)
        inputs, keywords = _trace_inputs((tuple(args), dict(kwargs or {})))
        context.proxies, context.traced_tensors = proxy.proxies, proxy.traced_tensors
        try:
            with redirect_to_proxies(proxy.proxies), nullcontext() if x64 is None else scope(x64):
                out = function(proxy.root, *inputs, **keywords)
        finally:
            context.proxies, context.traced_tensors = {}, {}
            lost_writes = proxy.restore_original()
        if lost_writes:
            raise ValueError(
                f"Traced code writes into {lost_writes[0]!r} of the original {type(module).__name__}, but the module that jax traces has "
                "a copy of it: the value would be lost. Refer to it through the module: self, or the module argument of a hook."
            )
        proxy.refuse_lost_writes()
        proxy.refuse_lost_buffers()
        given_buffers = {} if buffers is None else unnest(check_nested_dict(buffers, "module_function: buffers", "module_buffers"))
        return to_jax_outputs(out), nest(
            (name, _restore_dtype(as_array(buffer), given_buffers.get(name))) for name, buffer in proxy.buffers()
        )


def _restore_dtype(new: jax.Array, original: jax.Array | np.ndarray | None) -> jax.Array:
    """Return a new buffer value with the dtype of the buffer that was passed, if jax has reduced it to 32 bits."""
    if original is None or new.dtype == original.dtype or new.dtype != jax.dtypes.canonicalize_dtype(original.dtype):
        return new
    with scope():
        return new.astype(original.dtype)


def _module_trace(
    module: nn.Module, rng: jax.Array | None, x64: bool | None, constants: dict[int, tuple[torch.Tensor, jax.Array]]
) -> AbstractContextManager[None]:
    """Return the context of a new trace of this module's code."""
    first = next(module.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    values = {"rng": rng, "constants": constants, "autocast_at_entry": is_autocast_enabled(), "jax_x64": x64, "dispatch": dispatch}
    ranks: str = jax.config.jax_numpy_rank_promotion  # pyright: ignore[reportAttributeAccessIssue]
    values |= {"jax_rank_promotion": ranks, "module_proxy": None, "buffer_trace_state": trace_state()}
    return trace_scope(module_path=(), device=device, draw_count=0, proxies={}, traced_tensors={}, in_module_call=False, **values)


def _trace_inputs(tree: PyTree, path: KeyPath = ()) -> PyTree:
    """Return a tree of inputs with traced tensors for arrays. `path` is the tree's path in the arguments."""
    return jax.tree_util.tree_map_with_path(lambda inner, x: _trace_input((*path, *inner), x), tree)


def _trace_input(path: KeyPath, x: object) -> PyTree:
    if isinstance(x, torch.Tensor):
        raise TypeError(
            f"module_function: input {path_name(path[1:])} is a torch tensor of shape {tuple(x.shape)}; expected a jax array. "
            f"Pass bridge.to_jax(x), which copies nothing."
        )
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return as_traced(canonicalize_dtype(x))
    if isinstance(x, Mapping):
        return with_values(x, {key: _trace_inputs(value, (*path, DictKey(key))) for key, value in x.items()})
    return x


def to_jax_outputs(out: PyTree, place: str = "") -> PyTree:
    """Return a result of torch code with jax arrays for tensors. A mapping of another type becomes a dict.

    Dataclasses and namespaces are copied, with jax arrays for their tensors.

    Raises:
      TypeError: an object of another type that is no jax pytree holds tensors.
    """

    def leaf(path: KeyPath, x: object) -> PyTree:
        here = ".".join(filter(None, (place, path_name(path))))
        if is_traced(x) or isinstance(x, torch.Tensor):
            return as_array(x)
        if isinstance(x, Mapping):
            return to_jax_outputs(dict(x), here)
        if isinstance(x, tuple):
            return tuple(to_jax_outputs(y, f"{here}.{i}".lstrip(".")) for i, y in enumerate(x))
        if isinstance(x, nn.Module) or path_to_instance(x, (torch.Tensor, register_as_torchish())) is None:
            return x
        if isinstance(x, SimpleNamespace) or (dataclasses.is_dataclass(x) and not isinstance(x, type)):
            return _fields_to_jax(x, here)
        raise TypeError(
            f"{f'Output {here!r}' if here else 'The output'} of the traced code is a {type(x).__name__}, which holds tensors and is no "
            "pytree to jax. Return a dict of the tensors in it."
        )

    return jax.tree_util.tree_map_with_path(leaf, out, is_leaf=lambda x: type(x) is TracedTensor)


def _fields_to_jax(x: Any, place: str) -> Any:
    """Return a copy of a dataclass or namespace with jax arrays for its tensors."""
    names = [field.name for field in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else list(vars(x))
    new = copy.copy(x)
    for name in names:
        if hasattr(x, name):
            object.__setattr__(new, name, to_jax_outputs(getattr(x, name), f"{place}.{name}".lstrip(".")))
    return new


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module_function: got {type(module).__name__}; expected an nn.Module. For a function of tensors use torch2jax.t2j."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("module_function: a ScriptModule's code is not Python and cannot be traced. Pass the module it was made from.")


def _check_key(rng: jax.Array | None) -> None:
    dtype = getattr(rng, "dtype", None)
    if rng is not None and (
        dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and rng.shape == (2,)))
    ):
        raise TypeError(f"module_function: rng is {rng!r}; expected a key, such as jax.random.key(0).")


def _leaves_by_name(module: nn.Module, tree: object, what: str, known: Mapping[str, torch.Tensor]) -> dict[str, jax.Array]:
    """Return the leaves of a tree by name. Raise an error if names or shapes are not the module's."""
    flat = unnest(check_nested_dict(tree, f"module_function: {what}", "module_tree" if what == "params" else "module_buffers"))
    for name in flat:
        if name not in known:
            first = tied_names(module).get(name)
            also = f" It is tied to {first!r}; pass it there, once." if first else f" {did_you_mean(name, known)}"
            raise ValueError(f"module_function: {what} has {name!r}, which {type(module).__name__} does not have.{also}")
    missing = [name for name in known if name not in flat]
    if missing:
        raise ValueError(f"module_function: {what} lacks {missing[0]!r} ({len(missing)} missing); the module has {len(known)}.")
    return {name: _checked_leaf(name, flat[name], what, tensor) for name, tensor in known.items()}


def _checked_leaf(name: str, leaf: Any, what: str, tensor: torch.Tensor) -> jax.Array:
    if isinstance(leaf, torch.Tensor):
        raise TypeError(f"module_function: {what} has a torch tensor at {name!r}; expected a jax array. Pass bridge.to_jax({what}).")
    if not hasattr(leaf, "shape"):
        raise TypeError(f"module_function: {what} has {type(leaf).__name__} at {name!r}; expected an array of shape {tuple(tensor.shape)}.")
    if tuple(leaf.shape) != tuple(tensor.shape):
        raise ValueError(
            f"module_function: {what} has shape {tuple(leaf.shape)} at {name!r}; expected {tuple(tensor.shape)}. "
            f"For several sets of parameters at once use jax.vmap over params."
        )
    if tensor.dtype in (torch.float64, torch.complex128) and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"module_function: {name!r} is {tensor.dtype}, and jax's x64 is off. Call within jax.enable_x64(True), or use float()."
        )
    return canonicalize_dtype(leaf)
