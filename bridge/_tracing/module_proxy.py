"""The proxy of a module: its class, methods, attributes and hooks around traced values. Each trace makes a new one."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, CellType, FunctionType, MethodType, MethodWrapperType
from typing import Any, TypeVar

import jax
import torch
from torch import nn

from bridge._compat.jax import is_from_inner_trace, trace_state
from bridge._compat.python import with_code_of
from bridge._compat.torch import BATCH_NORMS, global_forward_pre_hooks

from .context import context
from .originals import UNNAMED, AttributeSnapshot, slot_values
from .patches import patch_while_tracing
from .tensor import TracedTensor, as_array, as_traced

_T = TypeVar("_T")
_R = TypeVar("_R")
COPIED_TYPES = (dict, OrderedDict, list, tuple, set, frozenset)
_MAX_ELEMENTS = 1000  # a larger container is not searched for references to the module
_BUILT_IN = (BuiltinMethodType, MethodWrapperType)  # such as `append` of a list and `__setitem__` of a dict
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device)  # refer to no module


class ModuleProxy:
    """The proxy of a module, with traced tensors in place of parameters and buffers.

    Each trace copies the modules, the plain containers in their attributes, and the functions that close over a module or such a container.
    So the proxy has the module's present state, and nothing that torch code writes stays in the module. No tensor is copied.

    root: the proxy of the module itself; `proxies`, `traced_tensors`: the values of `TraceContext` of these names.
    """

    def __init__(self, module: nn.Module, params: Mapping[str, jax.Array], buffers: Mapping[str, jax.Array], train: bool | None):
        self._names = {id(m): name for name, m in module.named_modules()}
        _refuse_backward_hooks(module)
        self._traced_by_id: dict[int, TracedTensor] = {}
        self._module, self._attribute_path, self._snapshot = module, "", AttributeSnapshot()
        self._proxies_by_id: dict[int, tuple[object, Any]] = {}  # id -> (original, proxy); holding the original keeps its id in use
        self._params = {name: TracedTensor(params[name], parameter=p) for name, p in module.named_parameters()}
        self._traced_by_id |= {id(p): self._params[name] for name, p in module.named_parameters()}
        self._buffers = {name: (buffers[name], *self._parent_and_key(module, name)) for name, _ in module.named_buffers()}
        for name, b in module.named_buffers():
            self._traced_by_id[id(b)] = TracedTensor(buffers[name])
        self._initial_buffers = dict(buffers)  # buffer values at the start of the function that jax traces now
        self.root: nn.Module = self._proxy(module)
        if train is not None:
            self.root.train(train)
        self.proxies = {key: proxy for key, (m, proxy) in self._proxies_by_id.items() if isinstance(m, nn.Module)}
        self.traced_tensors = self._traced_by_id

    @staticmethod
    def _parent_and_key(module: nn.Module, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return module.get_submodule(path), key

    def restore_original(self) -> list[str]:
        """Remove traced values from the original. Return the paths of containers that held one and of which the proxy has a copy."""
        return self._snapshot.restore()

    def refuse_lost_writes(self) -> None:
        """Raise an error if a new value would be lost: that of a parameter, or the first value of a buffer that was None."""
        written = [name for name, given in self._params.items() if given.is_written]
        if written:
            raise ValueError(
                f"forward writes into the parameter {written[0]!r} (of {len(written)} such), but a traced call returns new values of "
                "buffers only. Register it as a buffer (register_buffer), or write into it outside of the traced call."
            )
        modules_and_proxies = [(m, proxy) for m, proxy in self._proxies_by_id.values() if isinstance(m, nn.Module)]
        unset = [(m, proxy._buffers.get(key), key) for m, proxy in modules_and_proxies for key, b in m._buffers.items() if b is None]
        given = [f"{self._names.get(id(m), '?')}.{key}".lstrip(".") for m, now, key in unset if now is not None]
        if given:
            raise ValueError(
                f"forward gives the buffer {given[0]!r} its first value, but a compiled program returns only buffers that had a value "
                "before: the new value would be lost. Register it with a tensor of its shape and dtype, not with None."
            )

    def buffers(self) -> Iterator[tuple[str, TracedTensor | jax.Array]]:
        """Yield the name and the present value of each buffer of the module."""
        for name, (given, owner, key) in self._buffers.items():
            now = self._proxy(owner)._buffers.get(key)
            yield name, given if now is None else now

    @property
    def has_buffers(self) -> bool:
        """Whether the module has buffers."""
        return bool(self._buffers)

    def refuse_lost_buffers(self, module: str | None = None) -> None:
        """Raise an error if a buffer's new value cannot leave the function that jax traces inside the trace.

        Args:
          module: check the buffers of this submodule alone; None: all.

        It does nothing if the caller passed no buffers, because new values are dropped then.
        """
        if context.buffer_trace_state is None or (module is not None and trace_state() == context.buffer_trace_state):
            return
        own = [name for name in self._buffers if module is None or name.rpartition(".")[0] == module]
        now = {name: as_array(tensor) for name, tensor in self.buffers()} if own else {}
        lost = [
            name
            for name in own
            if now[name] is not self._initial_buffers[name] and is_from_inner_trace(now[name], context.buffer_trace_state)
        ]
        if lost:
            raise ValueError(
                f"the buffer {lost[0]!r}{f' ({len(lost)} such)' if len(lost) > 1 else ''} is written inside a function that jax transforms "
                "(lax.scan, cond, map, vmap, a custom derivative), and its new value would be lost there. Call the module outside of it or "
                "in eval mode, or write bridge.module_function with buffers= in it. jax.checkpoint and jax.jit carry buffers: call them as "
                "jax.checkpoint and jax.jit in the code that is traced."
            )

    def carry_buffers(
        self, transform: Callable[..., Any], function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """Return `transform(function)(*args, **kwargs)`. The transformed function returns new buffer values among its results."""
        bound: dict[str, Any] = {name: self._proxy(owner)._buffers.get(key) for name, (_, owner, key) in self._buffers.items()}
        before = {name: as_array(tensor) for name, tensor in self.buffers()}
        rebound: set[str] = set()

        @functools.wraps(function, updated=())
        def run(*args: object, **kwargs: object) -> tuple[Any, dict[str, jax.Array]]:
            home, values = context.buffer_trace_state, self._initial_buffers
            context.buffer_trace_state, self._initial_buffers = None if home is None else trace_state(), before
            try:
                out = function(*args, **kwargs)
                self.refuse_lost_buffers()
                now = {name: as_array(tensor) for name, tensor in self.buffers()}
                return out, {name: value for name, value in now.items() if value is not before[name]}
            finally:
                context.buffer_trace_state, self._initial_buffers = home, values
                for name, (_, owner, key) in self._buffers.items():
                    ours = self._proxy(owner)._buffers
                    if ours.get(key) is not bound[name]:
                        rebound.add(name)
                        ours[key] = bound[name]
                    elif isinstance(bound[name], TracedTensor):
                        bound[name].restore_value(before[name])

        out, new = transform(run)(*args, **kwargs)
        for name, value in new.items():
            _, owner, key = self._buffers[name]
            if name in rebound:
                self._proxy(owner)._buffers[key] = TracedTensor(value)
            else:
                bound[name].value = value
        return out

    def _proxy(self, x: Any) -> Any:
        if type(x) in weakref.ProxyTypes:
            return x
        if isinstance(x, torch.Tensor):
            return self._traced_by_id.get(id(x), x)
        if isinstance(x, nn.Module):
            return self._get_or_make(x, self._proxy_module)
        if type(x) in COPIED_TYPES:
            return self._get_or_make(x, self._proxy_container)
        if isinstance(x, MethodType) and isinstance(x.__self__, nn.Module):
            return MethodType(x.__func__, self._proxy(x.__self__))
        if type(x) is functools.partial:
            return functools.partial(self._proxy(x.func), *map(self._proxy, x.args), **self._proxy(x.keywords))
        if isinstance(x, FunctionType):
            return self._get_or_make(x, self._proxy_function) if self._refers_to_module(x) else x
        if isinstance(x, _BUILT_IN):
            return getattr(self._proxy(x.__self__), x.__name__) if self._refers_to_module(x) else x
        if not isinstance(x, _PLAIN):
            self._snapshot.record_shared(x.__self__ if isinstance(x, MethodType) else x)
        return x

    def _get_or_make(self, x: _T, make: Callable[[_T], _R]) -> _R:
        if id(x) not in self._proxies_by_id:
            made = make(x)
            self._proxies_by_id.setdefault(id(x), (x, made))
        return self._proxies_by_id[id(x)][1]

    def _proxy_container(self, x: Any) -> Any:
        if isinstance(x, tuple | frozenset):
            return type(x)(self._proxy(y) if isinstance(x, tuple) or isinstance(y, nn.Module) else y for y in x)
        empty = type(x)()
        self._proxies_by_id[id(x)] = x, empty
        self._snapshot.record_copied(x, self._attribute_path)
        if isinstance(x, dict):
            empty.update((self._proxy(k) if isinstance(k, nn.Module) else k, self._proxy(v)) for k, v in x.items())
        elif isinstance(x, list):
            empty.extend(map(self._proxy, x))
        else:
            empty.update(self._proxy(k) if isinstance(k, nn.Module) else k for k in x)
        if id(x) not in self._owned_by_module:  # other code may read the original, and would miss what traced code writes into the copy
            self._snapshot.record_copied(empty, self._attribute_path)
        return empty

    def _proxy_function(self, f: FunctionType) -> FunctionType:
        """Return a copy of a function that closes over the module or a container in its attributes. The copy closes over the proxy's."""
        cells = tuple(self._get_or_make(cell, self._proxy_cell) if self._refers_to_module(cell) else cell for cell in f.__closure__ or ())
        defaults = None if f.__defaults__ is None else tuple(map(self._proxy_if_referring, f.__defaults__))
        proxy = with_code_of(f, f.__globals__, defaults, cells)
        proxy.__kwdefaults__ = {name: self._proxy_if_referring(x) for name, x in (f.__kwdefaults__ or {}).items()} or None
        proxy.__qualname__, proxy.__doc__, proxy.__module__ = f.__qualname__, f.__doc__, f.__module__
        vars(proxy).update(vars(f))
        return proxy

    def _proxy_cell(self, cell: CellType) -> CellType:
        proxy = CellType()
        self._proxies_by_id[id(cell)] = cell, proxy  # before its content, because that may be a function that closes over this cell
        proxy.cell_contents = self._proxy_if_referring(cell.cell_contents)
        return proxy

    def _proxy_if_referring(self, x: object) -> Any:
        """Return the proxy of an object that refers to the module; other objects unchanged."""
        return self._proxy(x) if self._refers_to_module(x) else x

    def _refers_to_module(self, x: object) -> bool:
        """Whether `x` is, holds or refers to a part of the module: a submodule, a tensor, or a container in an attribute."""
        pending, seen = [x], set()
        while pending:
            x = pending.pop()
            if id(x) in seen or type(x) in weakref.ProxyTypes or isinstance(x, _PLAIN):
                continue
            seen.add(id(x))
            if isinstance(x, torch.Tensor):
                found = id(x) in self._traced_by_id
            else:
                found = isinstance(x, nn.Module | dict | list | set) and id(x) in self._owned_by_module
            if found:
                return True
            parts = _referents(x)
            if type(x) in COPIED_TYPES and any(isinstance(y, torch.Tensor) and id(y) not in self._traced_by_id for y in parts):
                continue  # it stores results; code that has no proxy may read it, so it is not copied
            pending += parts
        return False

    @functools.cached_property
    def _owned_by_module(self) -> dict[int, object]:
        """The modules and containers that attributes of the module reach, by id."""
        found: dict[int, object] = {}
        pending: list[Any] = [self._module]
        while pending:
            x = pending.pop()
            if id(x) in found or type(x) in weakref.ProxyTypes or isinstance(x, _PLAIN):
                continue
            if isinstance(x, nn.Module) or type(x) in COPIED_TYPES:
                if type(x) not in (tuple, frozenset):
                    found[id(x)] = x
                pending += vars(x).values() if isinstance(x, nn.Module) else x.values() if isinstance(x, dict) else x
            elif isinstance(x, functools.partial):
                pending += _referents(x)
        return found

    def _proxy_module(self, m: nn.Module) -> nn.Module:
        proxy = object.__new__(type(m))
        self._proxies_by_id[id(m)] = m, proxy
        self._snapshot.record_copied(m.__dict__, self._names.get(id(m)) or type(m).__name__)
        self._snapshot.record_class(type(m))
        for key, value in (slot_values(m) or {}).items():
            object.__setattr__(proxy, key, self._proxy(value))
        for key, value in m.__dict__.items():
            place, self._attribute_path = self._attribute_path, f"{self._names.get(id(m), UNNAMED)}.{key}".lstrip(".")
            proxy.__dict__[key] = self._proxy(value)
            self._attribute_path = place
        proxy.__dict__["_compiled_call_impl"] = None  # module.compile() sets one, for eager torch
        own = self._proxy(m.__dict__["forward"]) if "forward" in m.__dict__ else None
        proxy.__dict__["forward"] = _ProxyForward(proxy, self._names.get(id(m), UNNAMED), own)
        return proxy


def _referents(x: Any) -> Iterable[object]:
    """Return the objects that a function or partial refers to, or that a plain container holds."""
    if type(x) in COPIED_TYPES:
        return () if len(x) > _MAX_ELEMENTS else (*x.keys(), *x.values()) if isinstance(x, dict) else tuple(x)
    if isinstance(x, FunctionType):
        return (*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    if isinstance(x, CellType):
        try:
            return (x.cell_contents,)
        except ValueError:  # the cell is empty
            return ()
    if isinstance(x, MethodType):
        return x.__self__, x.__func__
    if isinstance(x, _BUILT_IN):
        return (x.__self__,)
    return (x.func, *x.args, *x.keywords.values()) if isinstance(x, functools.partial) else ()


class _ProxyForward:
    """The `forward` of a proxy, or of a copy of it. It records the submodule's name during a call, for errors."""

    def __init__(self, proxy: nn.Module, name: str, instance_forward: Callable[..., Any] | None) -> None:
        self.proxy, self.name, self.instance_forward = proxy, name, instance_forward
        functools.update_wrapper(self, type(proxy).forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        before, kind = context.module_path, type(self.proxy).__name__
        context.module_path = (*before, (self.name, kind))
        args, kwargs = as_traced((args, kwargs))  # jax functions may have returned arrays
        try:
            out = _traceable_forward(self.proxy, self.instance_forward)(*args, **kwargs)
            if context.module_proxy is not None:
                context.module_proxy.refuse_lost_buffers(self.name)
            return out
        except Exception as error:
            if not any(note.startswith("While jax traced") for note in getattr(error, "__notes__", ())):
                error.add_note(f"While jax traced {self.name!r} ({kind}).")
            raise
        finally:
            context.module_path = before


def _copy_module(module: nn.Module) -> nn.Module:
    """Copy a module as `copy.copy` does; the copy of a proxy gets its own `_ProxyForward`."""
    reduced: Any = module.__reduce_ex__(4)
    make, args, state = reduced[:3]
    copy = make(*args)
    copy.__setstate__(state)
    forward = module.__dict__.get("forward")
    if isinstance(forward, _ProxyForward):
        copy.__dict__["forward"] = _ProxyForward(copy, forward.name, forward.instance_forward)
    return copy


patch_while_tracing(nn.Module, "__copy__", _copy_module)


def _refuse_backward_hooks(module: nn.Module) -> None:
    """Raise an error if a module has a backward hook, or if a ModuleTracker is active, which sets a hook on each module."""
    tracker = getattr(sys.modules.get("torch.utils.module_tracker"), "ModuleTracker", ())
    hooks = global_forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), tracker) for hook in hooks):
        raise NotImplementedError(
            "FlopCounterMode or another user of torch's ModuleTracker is active. It sets backward hooks, which belong to torch's graph, "
            "and counts torch operators, which a traced program does not call. Leave its context before the first call, and count the "
            "eager module."
        )
    for name, m in module.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            raise NotImplementedError(
                f"{name or 'the module itself'!r} ({type(m).__name__}) has a backward hook, which belongs to torch's graph, and there is "
                "none for values that jax traces. Remove it (the handle's remove()), or change the gradient in forward with a "
                "torch.autograd.Function."
            )


def _traceable_forward(proxy: Any, instance_forward: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the proxy's forward, or a replacement where torch's forward needs a value that is not known in a trace."""
    if "_orig_mod" in proxy._modules:  # torch.compile(module), whose compiled code is for eager torch
        return lambda *args, **kwargs: proxy._modules["_orig_mod"](*args, **kwargs)
    if isinstance(proxy, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return lambda *args, **kwargs: proxy.module(*args, **kwargs)
    run = instance_forward or MethodType(type(proxy).forward, proxy)
    if isinstance(proxy, BATCH_NORMS) and proxy.momentum is None:
        return functools.partial(_cumulative_batch_norm, proxy, run)
    if isinstance(proxy, nn.TransformerEncoder | nn.TransformerDecoder):
        return functools.partial(_without_causal_detection, run, inspect.signature(run))
    return run


def _cumulative_batch_norm(proxy: Any, run: Callable[..., _R], *args: object, **kwargs: object) -> _R:
    """Run a batch norm with momentum=None, which weighs the n-th batch by 1/n. torch's forward needs n as a Python number."""
    if proxy.training and proxy.num_batches_tracked is not None:
        proxy.momentum = 1 / (proxy.num_batches_tracked + 1)
    try:
        return run(*args, **kwargs)
    finally:
        proxy.momentum = None


def _without_causal_detection(run: Callable[..., _R], signature: inspect.Signature, *args: object, **kwargs: object) -> _R:
    """Run a Transformer stack with is_causal=False by default, because its detection compares mask values. The mask has the same effect."""
    bound = signature.bind(*args, **kwargs)
    for name in ("is_causal", "tgt_is_causal"):
        if name in signature.parameters and bound.arguments.get(name) is None:
            bound.arguments[name] = False
    return run(*bound.args, **bound.kwargs)
