"""What happens when torch code that jax traces calls a torch function: the table of implementations and the order of search.

A function is looked for among those that the user registered with `torch2jax.implements`, then in the table here; one that is
written in Python runs as it stands, on traced values; any other is an error that names it. torch2jax's own table is not asked,
and is left as it is, for those who use torch2jax beside this.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.core import Tracer
from torch.overrides import TorchFunctionMode

from bridge._compat.python import with_code_of
from bridge._compat.torch import BENEATH, OVERLOADS, SPECIAL, writes
from bridge._compat.torch2jax import is_torchish, registered
from bridge._interop.dlpack import to_torch
from bridge._process import x64

from .context import TRACE, value_needed, where_now
from .functionalization import unnoticed
from .tensor import DETACHING, NOT_KNOWN, Traced, View, as_array

TorchFunction: TypeAlias = Callable[..., Any]  # a function or method of torch, or the `__get__` or `__set__` of an attribute
SPACES: dict[str, object] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": F,
    **BENEATH,
}


# What a tensor without memory can tell of itself: attributes, and how torch would lay it out.
_META = "__get__ stride element_size get_device storage_offset dim_order is_same_size has_names is_contiguous is_signed"
META = frozenset(_META.split())

# Where torch promotes no type: numbers that it multiplies must have one dtype, elsewhere those with a fraction.
_PRODUCTS = (
    "linear bilinear matmul mm bmm mv dot vdot inner tensordot __matmul__ __rmatmul__ addmm addmv addbmm baddbmm linalg_matmul "
    "linalg_vecdot linalg_solve conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu lerp cdist"
)
_FLOATS = "scaled_dot_product_attention binary_cross_entropy nll_loss scatter index_put"
ONE_TYPE: dict[str, type[np.generic]] = {**dict.fromkeys(_PRODUCTS.split(), jnp.number), **dict.fromkeys(_FLOATS.split(), jnp.inexact)}


# An argument by another name: numpy's, which torch takes too, or that of a function which shares its implementation with others.
OTHER_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other", "y": "other"} | {
    "axis0": "dim0", "axis1": "dim1", "train": "training", "element": "elements", "test_element": "test_elements",
    "indices": "indices_or_sections", "sections": "indices_or_sections", "tensor_indices_or_sections": "indices_or_sections",
}  # fmt: skip

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class Op(NamedTuple):
    """An implementation over arrays.

    `one_type`: which arguments must have one dtype, by what numpy calls their kind; None: torch promotes.
    `always`: also where no argument is traced (what makes tensors or draws numbers). `views`: torch's result shares memory.
    `raw`: it takes traced tensors themselves, and may write into them.
    """

    handler: Callable[..., Any]
    signature: inspect.Signature | None
    always: bool = False
    views: bool = False
    raw: bool = False
    inplace: bool = False
    one_type: type[np.generic] | None = None


OPS: dict[TorchFunction, Op] = {}
# What draws where it is told to, from a tensor's shape: by the call's keys for plain tensors too.
_POOLS = (f"fractional_max_pool{n}d{form}" for n in (2, 3) for form in ("", "_with_indices"))
_DROPS = "dropout native_dropout feature_dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
DRAW = frozenset([*_POOLS, *_DROPS.split(), "rrelu", "gumbel_softmax", "scaled_dot_product_attention", "multi_head_attention_forward"])
BY_VALUES = frozenset({"unique", "_pack_padded_sequence"})  # how large the result is depends on values, and torch does not say so


def functions_named(name: str) -> list[TorchFunction]:
    """The torch functions and methods of this name, in each place where torch has it; also as one of torch.special."""
    found = [getattr(space, name, None) for space in SPACES.values()] + [getattr(SPECIAL, f"special_{name}", None)]
    return [f for f in found if callable(f)]


def add_ops(entries: Mapping[TorchFunction, Op]) -> None:
    """Add implementations to the table.

    Raises:
      ValueError: one of the functions is in the table already; which of the two stayed would depend on the order of imports.
    """
    twice = next((func for func in entries if func in OPS), None)
    if twice is not None:
        raise ValueError(
            f"{_importable(twice)} has two implementations, {_where_defined(OPS[twice])} and {_where_defined(entries[twice])}. "
            "Register each function once."
        )
    OPS.update(entries)


def _where_defined(entry: Op) -> str:
    return f"{getattr(entry.handler, '__module__', '')}.{getattr(entry.handler, '__qualname__', repr(entry.handler))}"


def op(*names: str, always: bool = False, views: bool = False, raw: bool = False) -> Callable[[_Handler], _Handler]:
    """Register an implementation for all torch functions of these names.

    It serves the in-place form of each too, unless it makes a tensor or a view or takes traced tensors themselves.
    """

    def register(handler: _Handler) -> _Handler:
        try:
            signature = inspect.signature(handler)
        except ValueError:  # a function of jax without one
            signature = None
        entry = Op(handler, signature, always, views, raw, one_type=next((ONE_TYPE[name] for name in names if name in ONE_TYPE), None))
        entries = {func: entry for name in names for func in functions_named(name)}
        if not (always or views or raw):
            stems = [_inplace_name(name) for name in names if not name.startswith("__r")]
            entries |= {func: entry._replace(inplace=True) for stem in stems for func in functions_named(stem)}
        add_ops(entries)
        return handler

    return register


def _inplace_name(name: str) -> str:
    return name.removesuffix("__").replace("__", "__i", 1) + "__" if name.startswith("__") else f"{name}_"


def primitive(*names: str, always: bool = False) -> Callable[[_Handler], _Handler]:
    """Register an implementation for what torch has in C++ alone: torch.nn.functional's Python of that name, which calls it, stays."""

    def register(handler: _Handler) -> _Handler:
        entry = Op(handler, inspect.signature(handler), always)
        add_ops({func: entry for name in names for func in functions_named(name) if not isinstance(func, FunctionType)})
        return handler

    return register


def leaves(x: Any) -> Iterator[Any]:
    """What lies in the containers that torch functions take."""
    if type(x) in (tuple, list) or (isinstance(x, tuple) and type(x) is not torch.Size):
        for y in x:
            yield from leaves(y)
    elif type(x) is dict:
        yield from leaves(list(x.values()))
    elif type(x) is slice:
        yield from (x.start, x.stop, x.step)
    else:
        yield x


def arrays(x: Any) -> Any:
    """The same containers with arrays for traced tensors and constants."""
    if type(x) is list:
        return list(map(arrays, x))
    if isinstance(x, tuple):  # torch.return_types too, and torch.Size
        return tuple(map(arrays, x))
    if type(x) is dict:
        return {k: arrays(v) for k, v in x.items()}
    return as_array(x)


def is_traced(x: object) -> bool:
    """A value that jax computes with, not torch."""
    return isinstance(x, jax.Array | Traced) or is_torchish(x)


def wrapped(out: Any) -> Any:
    """Arrays of a result as traced tensors; without a gradient under `torch.no_grad`."""
    if isinstance(out, jax.Array | np.ndarray):
        return Traced(out if torch.is_grad_enabled() else jax.lax.stop_gradient(out))
    if type(out) is Traced:
        return out
    if is_torchish(out):
        return wrapped(out.value)
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*map(wrapped, out))
    if isinstance(out, tuple | list) and type(out) is not torch.Size:
        return type(out)(map(wrapped, out))
    return out


def autocasts() -> bool:
    """Whether torch.autocast is on."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def dispatch(func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function on traced tensors. What it returns requires grad where torch's result would: code may ask."""
    if TRACE.tensors and any(id(x) in TRACE.tensors for x in leaves((args, dict(kwargs)))):
        return _of_the_module(func, _replaced(args), _replaced(dict(kwargs)))
    out = _called(func, args, kwargs)
    if func not in DETACHING:
        follow(args[:1] if out is None else out, (args, kwargs))  # `x[i] = y` returns nothing
    return out


def _replaced(x: Any) -> Any:
    """The same containers with the traced values in the place of the traced module's own parameters and buffers.

    A function may hold one of these tensors under a name of its own, which no double of the module changes.
    """
    if type(x) in (tuple, list) or (isinstance(x, tuple) and type(x) is not torch.Size):
        return type(x)(*map(_replaced, x)) if hasattr(x, "_fields") else type(x)(map(_replaced, x))
    if type(x) is dict:
        return {k: _replaced(v) for k, v in x.items()}
    if type(x) is slice:
        return slice(*map(_replaced, (x.start, x.stop, x.step)))
    return TRACE.tensors.get(id(x), x)


def _of_the_module(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function whose arguments were the module's own tensors: what `Traced` defines in Python is found there."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(args[0], func.__self__.__name__)
    if name == "__set__":
        return setattr(args[0], func.__self__.__name__, args[1])
    if name in vars(Traced) and getattr(torch.Tensor, name, None) is func:
        return getattr(args[0], name)(*args[1:], **kwargs)
    return dispatch(func, args, kwargs)


def follow(results: object, given: object) -> None:
    """Have results require grad if what they were computed of does."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves(given) if type(x) is Traced):
        for x in leaves(results):
            if type(x) is Traced:
                x.follow()


def _called(func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if TRACE.x64 is False and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        with x64():
            return _called(func, args, kwargs)
    if jax.config.jax_numpy_rank_promotion != "allow":  # pyright: ignore[reportAttributeAccessIssue]
        with jax.numpy_rank_promotion("allow"):
            return _called(func, args, kwargs)
    if autocasts() and not TRACE.autocast:
        raise RuntimeError(
            f"torch.autocast is entered {where_now()}, and its casts happen in torch's dispatcher, which no traced program passes through. "
            "Give it enabled=False; for half precision use module.to(torch.bfloat16)."
        )
    theirs = registered(func)
    if theirs is not None:
        return wrapped(theirs(*args, **kwargs))
    found = OPS.get(func)
    if found is not None and found.always:
        return _run(found, func, args, kwargs)
    if not any(map(is_traced, leaves((args, dict(kwargs))))) and getattr(func, "__name__", "").removesuffix("_") not in DRAW:
        return func(*args, **kwargs)
    if found is not None:
        return _run(found, func, args, kwargs)
    if getattr(func, "__name__", "") in META:
        with torch.DisableTorchFunction():
            return func(*(x.laid_out() if isinstance(x, Traced) else x for x in args), **kwargs)
    body = _body(func)
    if body is None:
        return _by_torch(func, args, kwargs)
    with Mode():
        return body(*args, **kwargs)


def _by_torch(func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What torch itself makes of values that are all known while jax traces, where there is no implementation: indices of a fixed mask."""
    unknown = _unknown(args, kwargs)
    if unknown is not None and (func.__name__ in BY_VALUES or _tagged(func, torch.Tag.dynamic_output_shape)):
        raise value_needed(_importable(func), unknown)
    if unknown is not None or "out" in kwargs or _writes(func) or _tagged(func, torch.Tag.nondeterministic_seeded):
        raise unsupported(func)

    def plain(x: Any) -> Any:
        if type(x) in (tuple, list):
            return type(x)(map(plain, x))
        return to_torch(x.value, copy=True) if is_torchish(x) else x

    def traced(x: Any) -> Any:
        return type(x)(map(traced, x)) if isinstance(x, tuple | list) else wrapped(as_array(x))

    with jax.ensure_compile_time_eval():
        return traced(func(*plain(args), **{name: plain(x) for name, x in kwargs.items()}))


def _unknown(args: object, kwargs: Mapping[str, object]) -> Tracer | None:
    """The first among the arguments whose values jax does not know; a number before tensors, for it is what nobody expects."""
    unknown = [x for x in map(as_array, leaves((args, dict(kwargs)))) if isinstance(x, Tracer)]
    return min(unknown, key=lambda x: bool(x.shape), default=None)


def _forms(func: TorchFunction) -> dict[str, Any]:
    packet: Any = getattr(torch.ops.aten, func.__name__, None)
    return {name: getattr(packet, name) for name in packet.overloads()} if isinstance(packet, OVERLOADS) else {}


def _tagged(func: TorchFunction, tag: torch.Tag) -> bool:
    """Whether torch says this of the function: that it draws from its generator, or that values decide the shape."""
    return any(tag in form.tags for form in _forms(func).values())


def _writes(func: TorchFunction) -> bool:
    """Whether the function changes what it is given; each has a form that writes into `out`."""
    return func.__name__.endswith("_") or any(writes(form) for name, form in _forms(func).items() if "out" not in name)


def _importable(func: TorchFunction) -> str:
    """Where a function can be imported from; torch's own names for some are those of classes that nobody can."""
    plain, theirs = getattr(func, "__name__", ""), torch.overrides.resolve_name(func) or getattr(func, "__qualname__", "")
    with suppress(AttributeError):
        if functools.reduce(getattr, theirs.split(".")[1:], torch) is func and theirs.startswith("torch."):
            return theirs
    found = next((f"{path}.{plain}" for path, space in SPACES.items() if getattr(space, plain, None) is func), None)
    if found is None and "_VariableFunctions" in theirs and hasattr(torch, plain):
        return f"torch.{plain}"  # which is written in Python, and calls this one
    return found or (f"torch.ops.{theirs}" if theirs.startswith("aten.") else theirs) or repr(func)


def unsupported(func: TorchFunction, why: str = "") -> NotImplementedError:
    """The error for a function without an implementation, or not for these arguments."""
    name = _importable(func)
    if getattr(func, "namespace", "") == "prims":
        return NotImplementedError(
            f"torch.vmap, torch.func or TorchScript is at work {where_now()}, beneath the functions that jax can stand in for ({name} was "
            "met). Use jax.vmap, jax.grad or jax.jacrev there, of functions of jnp.asarray(x), and a scripted function's own Python."
        )
    return NotImplementedError(
        f"{name} has no implementation in jax, and is called {where_now()}{why}. Give one with "
        f"torch2jax.implements({name}), replace that submodule's forward by other operations, or ask for it in an issue."
    )


def _run(found: Op, func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    kwargs = dict(kwargs)
    if kwargs.get("generator") is not None:
        raise ValueError(
            f"{getattr(func, '__name__', func)} is given a generator {where_now()}, but a traced program draws from its key, not from "
            "torch's generators. Leave it out, or make the numbers outside and pass them in."
        )
    out = kwargs.pop("out", None)
    inplace = found.inplace
    if found.signature is not None:
        names = found.signature.parameters
        kwargs = {name if name in names else OTHER_NAMES.get(name, name): x for name, x in kwargs.items()}
        try:
            bound = found.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise unsupported(func, f" with arguments for which it has none ({error})") from error
        if "inplace" in names:
            inplace |= bool(bound.arguments.pop("inplace", False))
        if "inplace" in names or found.views or not args:  # a view asks for its base in the first place, and torch by place
            args, kwargs = bound.args, bound.kwargs
    if found.one_type is not None:
        _refuse_two_types(found.one_type, func, args, kwargs)
    if found.raw:
        with _known_values(found, arrays(args), arrays(kwargs)):
            return wrapped(found.handler(*args, **kwargs))
    if found.views and isinstance(args[0], Traced):
        with _naming_what_asks(func, args, kwargs):
            return viewed(found, func, args, kwargs)
    given, named = arrays(args), arrays(kwargs)
    with _known_values(found, given, named), _naming_what_asks(func, given, named):
        result = found.handler(*given, **named)
    target = args[0] if inplace else out
    if target is None:
        return wrapped(result)
    return _write(target, result, func)


@contextmanager
def _naming_what_asks(func: TorchFunction, args: object, kwargs: Mapping[str, object]) -> Iterator[None]:
    """Where an implementation asks for values that jax does not know, the error names the torch function."""
    try:
        yield
    except NOT_KNOWN as error:
        unknown = _unknown(args, kwargs)
        raise error if unknown is None else value_needed(_importable(func), unknown) from error


def _refuse_two_types(kind: type[np.generic], func: TorchFunction, args: object, kwargs: object) -> None:
    types = dict.fromkeys(x.dtype for x in leaves(arrays((args, kwargs))) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, kind))
    if len(types) > 1:
        raise RuntimeError(  # a TypeError in an operator would become NotImplemented
            f"{getattr(func, '__name__', func)} is given tensors of {' and '.join(map(str, types))} {where_now()}, and torch takes one "
            "dtype there. Convert one with .to(dtype): the batch to the model's dtype, or the model to the batch's."
        )


def _known_values(found: Op, args: object, kwargs: object) -> AbstractContextManager[object]:
    """Where all values are known, so are the results, while jax traces too: torch code may branch on them."""
    values = [x for x in leaves((args, kwargs)) if isinstance(x, jax.Array)]
    known = values and not found.always and not any(isinstance(x, Tracer) for x in values)
    return jax.ensure_compile_time_eval() if known else nullcontext()


def viewed(found: Op, func: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result as a view of the first argument: a write into either reaches the other."""
    base, rest, kwargs = args[0], arrays(args[1:]), arrays(kwargs)
    with _known_values(found, (base.value, *rest), kwargs):
        result = found.handler(base.value, *rest, **kwargs)
    if isinstance(result, tuple | list):
        return type(result)(Traced(x, base, View(found.handler, rest, kwargs, i, func)) for i, x in enumerate(result))
    return Traced(result, base, View(found.handler, rest, kwargs, None, func))


def _write(target: Any, result: Any, func: TorchFunction) -> Any:
    """Give a traced tensor a new value, as torch writes in place: its shape and dtype stay."""
    if isinstance(target, tuple | list):
        return type(target)(_write(t, r, func) for t, r in zip(target, result, strict=True))
    if not isinstance(target, Traced):
        raise ValueError(
            f"{getattr(func, '__name__', func)} writes a traced value into a plain torch tensor {where_now()}. "
            f"Register that tensor as a buffer, or make it inside forward."
        )
    if result.shape != target.value.shape:
        raise ValueError(
            f"{getattr(func, '__name__', func)}: a result of shape {tuple(result.shape)} cannot be written into a tensor of shape "
            f"{tuple(target.shape)} ({where_now()})."
        )
    result = result.astype(target.value.dtype)
    target.value = result if torch.is_grad_enabled() else unnoticed(target.value, result)
    return target


def _never(*_: object, **__: object) -> bool:
    return False


@functools.cache
def _body(func: TorchFunction) -> Callable[..., Any] | None:
    """A function that torch has in Python, without its first question whether somebody overrides it; None for others.

    Its own globals are read, not changed. What it calls is overridden as ever.
    """
    if not isinstance(func, FunctionType):
        return None
    asks = {name: _never for name in func.__globals__ if name.startswith("has_torch_function")}
    if not asks:
        return None
    body = with_code_of(func, {**func.__globals__, **asks}, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


class Mode(TorchFunctionMode):
    """While it is active on this thread, torch functions are those of `dispatch`."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})
