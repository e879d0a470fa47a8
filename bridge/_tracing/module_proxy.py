"""A module's double: its classes, methods, attributes and hooks around traced values, made anew for each trace."""

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

from bridge._compat.jax import ends_before, trace_state
from bridge._compat.python import with_code_of
from bridge._compat.torch import BATCH_NORMS, global_forward_pre_hooks

from .context import TRACE
from .originals import UNNAMED, Belongings, slots_of
from .patches import while_tracing
from .tensor import Traced, as_array, as_traced

_T = TypeVar("_T")
_R = TypeVar("_R")
COPIED = (dict, OrderedDict, list, tuple, set, frozenset)
_MANY = 1000  # elements of a container that are looked at for what a function refers to
_BUILT_IN = (BuiltinMethodType, MethodWrapperType)  # such as `append` of a list and `__setitem__` of a dict
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device)  # what refers to nothing


class StandIn:
    """The double of a module, `root`, with arrays in the place of parameters and buffers.

    Copied are the modules themselves, the plain containers in their attributes and the functions that close over one of these, at each
    trace, so that it is what the module is then and nothing that torch code writes is left behind in the module. No tensor is copied.

    doubles, tensors: as of `Trace`.
    """

    def __init__(self, module: nn.Module, params: Mapping[str, jax.Array], buffers: Mapping[str, jax.Array], train: bool | None):
        self._names = {id(m): name for name, m in module.named_modules()}
        _refuse_backward_hooks(module)
        self._known: dict[int, Traced] = {}
        self._module_itself, self._place, self._belongings = module, "", Belongings()
        self._kept: dict[int, tuple[object, Any]] = {}  # id -> (the original, its double); the original, so that its id stays its own
        self._params = {name: Traced(params[name], parameter=p) for name, p in module.named_parameters()}
        self._known |= {id(p): self._params[name] for name, p in module.named_parameters()}
        self._buffers = {name: (buffers[name], *self._owner(module, name)) for name, _ in module.named_buffers()}
        for name, b in module.named_buffers():
            self._known[id(b)] = Traced(buffers[name])
        self._values = dict(buffers)  # of buffers, as they were when jax began to trace the function that runs now
        self.root: nn.Module = self._double(module)
        if train is not None:
            self.root.train(train)
        self.doubles = {key: double for key, (m, double) in self._kept.items() if isinstance(m, nn.Module)}
        self.tensors = self._known

    @staticmethod
    def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return module.get_submodule(path), key

    def restore_original(self) -> list[str]:
        """Take what belongs to the trace out of the original; the attributes whose container the double has a copy of."""
        return self._belongings.restore()

    def refuse_written(self) -> None:
        """Raise an error where a new value would be lost without a word: a parameter's, or the first of a buffer that was None."""
        written = [name for name, given in self._params.items() if given.written]
        if written:
            raise ValueError(
                f"forward writes into the parameter {written[0]!r} (of {len(written)} such), and only buffers have new values when it "
                "returns. Register what forward changes as a buffer (register_buffer), or write into it outside of the traced call."
            )
        doubled = [(m, double) for m, double in self._kept.values() if isinstance(m, nn.Module)]
        unset = [(m, double._buffers.get(key), key) for m, double in doubled for key, b in m._buffers.items() if b is None]
        given = [f"{self._names.get(id(m), '?')}.{key}".lstrip(".") for m, now, key in unset if now is not None]
        if given:
            raise ValueError(
                f"forward gives the buffer {given[0]!r} its first value, and what one compiled program returns is settled before: it "
                "would be lost. Register it with a tensor of its shape and dtype, not with None."
            )

    def buffers(self) -> Iterator[tuple[str, Traced | jax.Array]]:
        """Name and present value of each buffer that the module has."""
        for name, (given, owner, key) in self._buffers.items():
            now = self._double(owner)._buffers.get(key)
            yield name, given if now is None else now

    @property
    def has_buffers(self) -> bool:
        """Whether there is anything that a call may write into."""
        return bool(self._buffers)

    def refuse_lost(self, module: str | None = None) -> None:
        """Raise where a buffer, of this submodule alone, has a value that ends with a function which jax traces within ours.

        Not where new values are dropped, because nobody gave any.
        """
        if TRACE.home is None or (module is not None and trace_state() == TRACE.home):
            return
        own = [name for name in self._buffers if module is None or name.rpartition(".")[0] == module]
        now = {name: as_array(tensor) for name, tensor in self.buffers()} if own else {}
        lost = [name for name in own if now[name] is not self._values[name] and ends_before(now[name], TRACE.home)]
        if lost:
            raise ValueError(
                f"the buffer {lost[0]!r}{f' ({len(lost)} such)' if len(lost) > 1 else ''} is written inside a function that jax transforms "
                "(lax.scan, cond, map, vmap, a custom derivative), and its new value would be lost there. Call the module outside of it or "
                "in eval mode, or write bridge.module_function with buffers= in it. jax.checkpoint and jax.jit carry buffers: call them as "
                "jax.checkpoint and jax.jit in the code that is traced."
            )

    def carried(
        self, transform: Callable[..., Any], function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """`transform(function)(*args, **kwargs)`; what `function` writes into buffers is among the results of what jax transforms."""
        bound: dict[str, Any] = {name: self._double(owner)._buffers.get(key) for name, (_, owner, key) in self._buffers.items()}
        before = {name: as_array(tensor) for name, tensor in self.buffers()}
        rebound: set[str] = set()

        @functools.wraps(function, updated=())
        def run(*args: object, **kwargs: object) -> tuple[Any, dict[str, jax.Array]]:
            home, values = TRACE.home, self._values
            TRACE.home, self._values = None if home is None else trace_state(), before
            try:
                out = function(*args, **kwargs)
                self.refuse_lost()
                now = {name: as_array(tensor) for name, tensor in self.buffers()}
                return out, {name: value for name, value in now.items() if value is not before[name]}
            finally:
                TRACE.home, self._values = home, values
                for name, (_, owner, key) in self._buffers.items():
                    ours = self._double(owner)._buffers
                    if ours.get(key) is not bound[name]:
                        rebound.add(name)
                        ours[key] = bound[name]
                    elif isinstance(bound[name], Traced):
                        bound[name].put_back(before[name])

        out, new = transform(run)(*args, **kwargs)
        for name, value in new.items():
            _, owner, key = self._buffers[name]
            if name in rebound:
                self._double(owner)._buffers[key] = Traced(value)
            else:
                bound[name].value = value
        return out

    def _double(self, x: Any) -> Any:
        if type(x) in weakref.ProxyTypes:
            return x
        if isinstance(x, torch.Tensor):
            return self._known.get(id(x), x)
        if isinstance(x, nn.Module):
            return self._once(x, self._module)
        if type(x) in COPIED:
            return self._once(x, self._container)
        if isinstance(x, MethodType) and isinstance(x.__self__, nn.Module):
            return MethodType(x.__func__, self._double(x.__self__))
        if type(x) is functools.partial:
            return functools.partial(self._double(x.func), *map(self._double, x.args), **self._double(x.keywords))
        if isinstance(x, FunctionType):
            return self._once(x, self._function) if self._refers(x) else x
        if isinstance(x, _BUILT_IN):
            return getattr(self._double(x.__self__), x.__name__) if self._refers(x) else x
        if not isinstance(x, _PLAIN):
            self._belongings.shared(x.__self__ if isinstance(x, MethodType) else x)
        return x

    def _once(self, x: _T, make: Callable[[_T], _R]) -> _R:
        if id(x) not in self._kept:
            made = make(x)
            self._kept.setdefault(id(x), (x, made))
        return self._kept[id(x)][1]

    def _container(self, x: Any) -> Any:
        if isinstance(x, tuple | frozenset):
            return type(x)(self._double(y) if isinstance(x, tuple) or isinstance(y, nn.Module) else y for y in x)
        empty = type(x)()
        self._kept[id(x)] = x, empty
        self._belongings.copied(x, self._place)
        if isinstance(x, dict):
            empty.update((self._double(k) if isinstance(k, nn.Module) else k, self._double(v)) for k, v in x.items())
        elif isinstance(x, list):
            empty.extend(map(self._double, x))
        else:
            empty.update(self._double(k) if isinstance(k, nn.Module) else k for k in x)
        if id(x) not in self._own:  # others may read the one that a function closes over, and would miss what is written
            self._belongings.copied(empty, self._place)
        return empty

    def _function(self, f: FunctionType) -> FunctionType:
        """A function that closes over the module, or over a container in its attributes, as one that closes over the double's."""
        cells = tuple(self._once(cell, self._cell) if self._refers(cell) else cell for cell in f.__closure__ or ())
        defaults = None if f.__defaults__ is None else tuple(map(self._referred, f.__defaults__))
        double = with_code_of(f, f.__globals__, defaults, cells)
        double.__kwdefaults__ = {name: self._referred(x) for name, x in (f.__kwdefaults__ or {}).items()} or None
        double.__qualname__, double.__doc__, double.__module__ = f.__qualname__, f.__doc__, f.__module__
        vars(double).update(vars(f))
        return double

    def _cell(self, cell: CellType) -> CellType:
        double = CellType()
        self._kept[id(cell)] = cell, double  # before its content, which may be a function that closes over it
        double.cell_contents = self._referred(cell.cell_contents)
        return double

    def _referred(self, x: object) -> Any:
        """What a function refers to: the double's where it is the module's, else as it is."""
        return self._double(x) if self._refers(x) else x

    def _refers(self, x: object) -> bool:
        """Whether it is of the module (a submodule, a tensor, a container in an attribute), or refers to such a thing or holds it."""
        pending, seen = [x], set()
        while pending:
            x = pending.pop()
            if id(x) in seen or type(x) in weakref.ProxyTypes or isinstance(x, _PLAIN):
                continue
            seen.add(id(x))
            if isinstance(x, torch.Tensor):
                found = id(x) in self._known
            else:
                found = isinstance(x, nn.Module | dict | list | set) and id(x) in self._own
            if found:
                return True
            parts = _parts(x)
            if type(x) in COPIED and any(isinstance(y, torch.Tensor) and id(y) not in self._known for y in parts):
                continue  # where results are kept: code that is given no double may read it, so it stays the one that it is
            pending += parts
        return False

    @functools.cached_property
    def _own(self) -> dict[int, object]:
        """The modules and containers that are reached from the module by attributes."""
        found: dict[int, object] = {}
        pending: list[Any] = [self._module_itself]
        while pending:
            x = pending.pop()
            if id(x) in found or type(x) in weakref.ProxyTypes or isinstance(x, _PLAIN):
                continue
            if isinstance(x, nn.Module) or type(x) in COPIED:
                if type(x) not in (tuple, frozenset):
                    found[id(x)] = x
                pending += vars(x).values() if isinstance(x, nn.Module) else x.values() if isinstance(x, dict) else x
            elif isinstance(x, functools.partial):
                pending += _parts(x)
        return found

    def _module(self, m: nn.Module) -> nn.Module:
        double = object.__new__(type(m))
        self._kept[id(m)] = m, double
        self._belongings.copied(m.__dict__, self._names.get(id(m)) or type(m).__name__)
        self._belongings.classes(type(m))
        for key, value in (slots_of(m) or {}).items():
            object.__setattr__(double, key, self._double(value))
        for key, value in m.__dict__.items():
            place, self._place = self._place, f"{self._names.get(id(m), UNNAMED)}.{key}".lstrip(".")
            double.__dict__[key] = self._double(value)
            self._place = place
        double.__dict__["_compiled_call_impl"] = None  # module.compile() has made one for eager torch
        own = self._double(m.__dict__["forward"]) if "forward" in m.__dict__ else None
        double.__dict__["forward"] = _Forward(double, self._names.get(id(m), UNNAMED), own)
        return double


def _parts(x: Any) -> Iterable[object]:
    """What a function refers to, or what a plain container holds."""
    if type(x) in COPIED:
        return () if len(x) > _MANY else (*x.keys(), *x.values()) if isinstance(x, dict) else tuple(x)
    if isinstance(x, FunctionType):
        return (*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    if isinstance(x, CellType):
        try:
            return (x.cell_contents,)
        except ValueError:  # nothing yet
            return ()
    if isinstance(x, MethodType):
        return x.__self__, x.__func__
    if isinstance(x, _BUILT_IN):
        return (x.__self__,)
    return (x.func, *x.args, *x.keywords.values()) if isinstance(x, functools.partial) else ()


class _Forward:
    """The `forward` of a double, or of a copy that its code makes of it, which says where it is: for errors."""

    def __init__(self, double: nn.Module, name: str, own: Callable[..., Any] | None) -> None:
        self.double, self.name, self.own = double, name, own
        functools.update_wrapper(self, type(double).forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        before, kind = TRACE.path, type(self.double).__name__
        TRACE.path = (*before, (self.name, kind))
        args, kwargs = as_traced((args, kwargs))  # what jax's functions returned in between
        try:
            out = _adapted(self.double, self.own)(*args, **kwargs)
            if TRACE.stand_in is not None:
                TRACE.stand_in.refuse_lost(self.name)
            return out
        except Exception as error:
            if not any(note.startswith("While jax traced") for note in getattr(error, "__notes__", ())):
                error.add_note(f"While jax traced {self.name!r} ({kind}).")
            raise
        finally:
            TRACE.path = before


def _copied(module: nn.Module) -> nn.Module:
    """copy.copy of a module; of a double with a `forward` of its own."""
    reduced: Any = module.__reduce_ex__(4)
    make, args, state = reduced[:3]
    copy = make(*args)
    copy.__setstate__(state)
    forward = module.__dict__.get("forward")
    if isinstance(forward, _Forward):
        copy.__dict__["forward"] = _Forward(copy, forward.name, forward.own)
    return copy


while_tracing(nn.Module, "__copy__", _copied)


def _refuse_backward_hooks(module: nn.Module) -> None:
    """Raise for a hook on gradients of a module, which torch hangs on its graph, and for a tracker that sets one for each module."""
    tracker = getattr(sys.modules.get("torch.utils.module_tracker"), "ModuleTracker", ())
    hooks = global_forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), tracker) for hook in hooks):
        raise NotImplementedError(
            "FlopCounterMode or another user of torch's ModuleTracker is active: it sets hooks on gradients, which belong to torch's "
            "graph, and counts operators of torch, which a traced program does not call. Leave its context before the first call, and "
            "count the eager module."
        )
    for name, m in module.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            raise NotImplementedError(
                f"{name or 'the module itself'!r} ({type(m).__name__}) has a backward hook, which belongs to torch's graph, and there is "
                "none for values that jax traces. Remove it (the handle's remove()), or change the gradient in forward, by a "
                "torch.autograd.Function."
            )


def _adapted(double: Any, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """The double's forward; another where torch's own asks for a value that is not known while tracing."""
    if "_orig_mod" in double._modules:  # torch.compile(module): what it compiled is for eager torch
        return lambda *args, **kwargs: double._modules["_orig_mod"](*args, **kwargs)
    if isinstance(double, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return lambda *args, **kwargs: double.module(*args, **kwargs)
    run = own or MethodType(type(double).forward, double)
    if isinstance(double, BATCH_NORMS) and double.momentum is None:
        return functools.partial(_cumulative, double, run)
    if isinstance(double, nn.TransformerEncoder | nn.TransformerDecoder):
        return functools.partial(_not_detected, run, inspect.signature(run))
    return run


def _cumulative(double: Any, run: Callable[..., _R], *args: object, **kwargs: object) -> _R:
    """Batch norm with momentum=None weighs the n-th batch by 1/n; torch makes a Python number of n."""
    if double.training and double.num_batches_tracked is not None:
        double.momentum = 1 / (double.num_batches_tracked + 1)
    try:
        return run(*args, **kwargs)
    finally:
        double.momentum = None


def _not_detected(run: Callable[..., _R], signature: inspect.Signature, *args: object, **kwargs: object) -> _R:
    """Transformers compare a mask with the causal one to skip work, if not told; the mask itself gives the same result."""
    bound = signature.bind(*args, **kwargs)
    for name in ("is_causal", "tgt_is_causal"):
        if name in signature.parameters and bound.arguments.get(name) is None:
            bound.arguments[name] = False
    return run(*bound.args, **bound.kwargs)
