"""The table of jax implementations of torch functions, and the dispatch of a torch function on traced tensors.

A function that the user registered with `torch2jax.implements` comes first, then the table here. A torch function that is written in
Python runs on traced values. A function with known values runs in torch. All others raise an error that names them. torch2jax's own
table is neither read nor changed.
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
from bridge._compat.torch import OVERLOAD_PACKET, PRIVATE_NAMESPACES, SPECIAL, mutates_arguments
from bridge._compat.torch2jax import is_torchish, user_implementation
from bridge._interop.dlpack import to_torch
from bridge._process import x64

from .context import context, current_module_path, data_dependent_error
from .functionalization import write_without_grad
from .tensor import CONCRETIZATION_ERRORS, DETACH_FUNCTIONS, TracedTensor, ViewSpec, as_array

TorchFunction: TypeAlias = Callable[..., Any]  # a function or method, or the `__get__` or `__set__` of an attribute
TORCH_NAMESPACES: dict[str, object] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": F,
    **PRIVATE_NAMESPACES,
}


# The functions that a meta tensor can answer: attributes and strides.
_META = "__get__ stride element_size get_device storage_offset dim_order is_same_size has_names is_contiguous is_signed"
METADATA_NAMES = frozenset(_META.split())

# Functions in which torch promotes no dtype. Arguments of the products must have one dtype; of the others, the floating-point arguments.
_PRODUCTS = (
    "linear bilinear matmul mm bmm mv dot vdot inner tensordot __matmul__ __rmatmul__ addmm addmv addbmm baddbmm linalg_matmul "
    "linalg_vecdot linalg_solve conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu lerp cdist"
)
_FLOATS = "scaled_dot_product_attention binary_cross_entropy nll_loss scatter index_put"
SAME_DTYPE_KINDS: dict[str, type[np.generic]] = {
    **dict.fromkeys(_PRODUCTS.split(), jnp.number),
    **dict.fromkeys(_FLOATS.split(), jnp.inexact),
}


# Other names of an argument: NumPy's, which torch accepts too, or the name in a function that shares its implementation.
ARGUMENT_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other", "y": "other"} | {
    "axis0": "dim0", "axis1": "dim1", "train": "training", "element": "elements", "test_element": "test_elements",
    "indices": "indices_or_sections", "sections": "indices_or_sections", "tensor_indices_or_sections": "indices_or_sections",
}  # fmt: skip

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class Op(NamedTuple):
    """An implementation over arrays.

    `same_dtype_kind`: the NumPy kind of the arguments that must have one dtype; None: torch promotes.
    `always`: runs also where no argument is traced, for functions that make tensors or draw numbers.
    `views`: torch's result shares memory with the first argument.
    `raw`: takes the traced tensors themselves, and may write into them.
    `inplace`: writes its result into the first argument.
    """

    handler: Callable[..., Any]
    signature: inspect.Signature | None
    always: bool = False
    views: bool = False
    raw: bool = False
    inplace: bool = False
    same_dtype_kind: type[np.generic] | None = None


OPS: dict[TorchFunction, Op] = {}
# Functions that may draw random numbers. They use the call's keys for plain tensors too.
_POOLS = (f"fractional_max_pool{n}d{form}" for n in (2, 3) for form in ("", "_with_indices"))
_DROPS = "dropout native_dropout feature_dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
DRAWING_FUNCTIONS = frozenset(
    [*_POOLS, *_DROPS.split(), "rrelu", "gumbel_softmax", "scaled_dot_product_attention", "multi_head_attention_forward"]
)
DATA_DEPENDENT_SHAPES = frozenset({"unique", "_pack_padded_sequence"})  # the result's shape depends on values, but torch has no tag for it


def functions_named(name: str) -> list[TorchFunction]:
    """Return the functions and methods of this name in all namespaces of torch, torch.special included."""
    found = [getattr(space, name, None) for space in TORCH_NAMESPACES.values()] + [getattr(SPECIAL, f"special_{name}", None)]
    return [f for f in found if callable(f)]


def add_ops(entries: Mapping[TorchFunction, Op]) -> None:
    """Add implementations to the table.

    Raises:
      ValueError: a function is in the table already. The order of imports would decide between the two implementations.
    """
    twice = next((func for func in entries if func in OPS), None)
    if twice is not None:
        raise ValueError(
            f"{_import_path(twice)} has two implementations, {_where_defined(OPS[twice])} and {_where_defined(entries[twice])}. "
            "Register each function once."
        )
    OPS.update(entries)


def _where_defined(entry: Op) -> str:
    return f"{getattr(entry.handler, '__module__', '')}.{getattr(entry.handler, '__qualname__', repr(entry.handler))}"


def op(*names: str, always: bool = False, views: bool = False, raw: bool = False) -> Callable[[_Handler], _Handler]:
    """Return a decorator that registers an implementation for all torch functions of these names.

    The implementation also serves the in-place form of each name, unless it is `always`, `views` or `raw` (fields of `Op`).
    """

    def register(handler: _Handler) -> _Handler:
        try:
            signature = inspect.signature(handler)
        except ValueError:  # a jax function without a signature
            signature = None
        entry = Op(
            handler,
            signature,
            always,
            views,
            raw,
            same_dtype_kind=next((SAME_DTYPE_KINDS[name] for name in names if name in SAME_DTYPE_KINDS), None),
        )
        entries = {func: entry for name in names for func in functions_named(name)}
        if not (always or views or raw):
            stems = [_inplace_name(name) for name in names if not name.startswith("__r")]
            entries |= {func: entry._replace(inplace=True) for stem in stems for func in functions_named(stem)}
        add_ops(entries)
        return handler

    return register


def _inplace_name(name: str) -> str:
    return name.removesuffix("__").replace("__", "__i", 1) + "__" if name.startswith("__") else f"{name}_"


def builtin_op(*names: str, always: bool = False) -> Callable[[_Handler], _Handler]:
    """Return a decorator that registers an implementation for the C++ functions of these names.

    A Python function of the same name in torch.nn.functional, which calls the C++ function, stays as it is.
    """

    def register(handler: _Handler) -> _Handler:
        entry = Op(handler, inspect.signature(handler), always)
        add_ops({func: entry for name in names for func in functions_named(name) if not isinstance(func, FunctionType)})
        return handler

    return register


def iter_leaves(x: Any) -> Iterator[Any]:
    """Yield the leaves of the containers that torch functions take."""
    if type(x) in (tuple, list) or (isinstance(x, tuple) and type(x) is not torch.Size):
        for y in x:
            yield from iter_leaves(y)
    elif type(x) is dict:
        yield from iter_leaves(list(x.values()))
    elif type(x) is slice:
        yield from (x.start, x.stop, x.step)
    else:
        yield x


def as_arrays(x: Any) -> Any:
    """Return the containers with traced tensors and torch tensors as arrays."""
    if type(x) is list:
        return list(map(as_arrays, x))
    if isinstance(x, tuple):  # torch.return_types too, and torch.Size
        return tuple(map(as_arrays, x))
    if type(x) is dict:
        return {k: as_arrays(v) for k, v in x.items()}
    return as_array(x)


def is_traced(x: object) -> bool:
    """Whether `x` is a jax array or a traced tensor."""
    return isinstance(x, jax.Array | TracedTensor) or is_torchish(x)


def wrap_result(out: Any) -> Any:
    """Return a result with its arrays as traced tensors. They have no gradient under `torch.no_grad`."""
    if isinstance(out, jax.Array | np.ndarray):
        return TracedTensor(out if torch.is_grad_enabled() else jax.lax.stop_gradient(out))
    if type(out) is TracedTensor:
        return out
    if is_torchish(out):
        return wrap_result(out.value)
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*map(wrap_result, out))
    if isinstance(out, tuple | list) and type(out) is not torch.Size:
        return type(out)(map(wrap_result, out))
    return out


def is_autocast_enabled() -> bool:
    """Whether torch.autocast is on."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def dispatch(func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function on traced tensors. The result requires grad where torch's result would, because code may read the flag."""
    if context.traced_tensors and any(id(x) in context.traced_tensors for x in iter_leaves((args, dict(kwargs)))):
        return _dispatch_replaced(func, _replace_module_tensors(args), _replace_module_tensors(dict(kwargs)))
    out = _call_op(func, args, kwargs)
    if func not in DETACH_FUNCTIONS:
        propagate_requires_grad(args[:1] if out is None else out, (args, kwargs))  # `x[i] = y` returns nothing
    return out


def _replace_module_tensors(x: Any) -> Any:
    """Return the containers with the original module's parameters and buffers replaced by their traced tensors.

    Traced code may refer to an original tensor by a name of its own, where the module's proxy cannot replace it.
    """
    if type(x) in (tuple, list) or (isinstance(x, tuple) and type(x) is not torch.Size):
        return type(x)(*map(_replace_module_tensors, x)) if hasattr(x, "_fields") else type(x)(map(_replace_module_tensors, x))
    if type(x) is dict:
        return {k: _replace_module_tensors(v) for k, v in x.items()}
    if type(x) is slice:
        return slice(*map(_replace_module_tensors, (x.start, x.stop, x.step)))
    return context.traced_tensors.get(id(x), x)


def _dispatch_replaced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function after its arguments were replaced. Methods that `TracedTensor` defines in Python are looked up there."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(args[0], func.__self__.__name__)
    if name == "__set__":
        return setattr(args[0], func.__self__.__name__, args[1])
    if name in vars(TracedTensor) and getattr(torch.Tensor, name, None) is func:
        return getattr(args[0], name)(*args[1:], **kwargs)
    return dispatch(func, args, kwargs)


def propagate_requires_grad(results: object, inputs: object) -> None:
    """Mark results as requiring grad if an input requires grad."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in iter_leaves(inputs) if type(x) is TracedTensor):
        for x in iter_leaves(results):
            if type(x) is TracedTensor:
                x.mark_requires_grad()


def _call_op(func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if context.jax_x64 is False and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        with x64():
            return _call_op(func, args, kwargs)
    if jax.config.jax_numpy_rank_promotion != "allow":  # pyright: ignore[reportAttributeAccessIssue]
        with jax.numpy_rank_promotion("allow"):
            return _call_op(func, args, kwargs)
    if is_autocast_enabled() and not context.autocast_at_entry:
        raise RuntimeError(
            f"torch.autocast is entered {current_module_path()}, but its casts happen in torch's dispatcher, which a traced program does "
            "not use. Pass enabled=False to it; for half precision use module.to(torch.bfloat16)."
        )
    theirs = user_implementation(func)
    if theirs is not None:
        return wrap_result(theirs(*args, **kwargs))
    found = OPS.get(func)
    if found is not None and found.always:
        return _run_handler(found, func, args, kwargs)
    if (
        not any(map(is_traced, iter_leaves((args, dict(kwargs)))))
        and getattr(func, "__name__", "").removesuffix("_") not in DRAWING_FUNCTIONS
    ):
        return func(*args, **kwargs)
    if found is not None:
        return _run_handler(found, func, args, kwargs)
    if getattr(func, "__name__", "") in METADATA_NAMES:
        with torch.DisableTorchFunction():
            return func(*(x.as_meta_tensor() if isinstance(x, TracedTensor) else x for x in args), **kwargs)
    body = _without_override_check(func)
    if body is None:
        return _evaluate_in_torch(func, args, kwargs)
    with TracingMode():
        return body(*args, **kwargs)


def _evaluate_in_torch(func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a function without an implementation in torch, if jax knows all values while it traces (the indices of a fixed mask)."""
    unknown = _first_tracer(args, kwargs)
    if unknown is not None and (func.__name__ in DATA_DEPENDENT_SHAPES or _has_tag(func, torch.Tag.dynamic_output_shape)):
        raise data_dependent_error(_import_path(func), unknown)
    if unknown is not None or "out" in kwargs or _mutates_input(func) or _has_tag(func, torch.Tag.nondeterministic_seeded):
        raise unsupported_op_error(func)

    def plain(x: Any) -> Any:
        if type(x) in (tuple, list):
            return type(x)(map(plain, x))
        return to_torch(x.value, copy=True) if is_torchish(x) else x

    def traced(x: Any) -> Any:
        return type(x)(map(traced, x)) if isinstance(x, tuple | list) else wrap_result(as_array(x))

    with jax.ensure_compile_time_eval():
        return traced(func(*plain(args), **{name: plain(x) for name, x in kwargs.items()}))


def _first_tracer(args: object, kwargs: Mapping[str, object]) -> Tracer | None:
    """Return the first argument whose value jax does not know, scalars before other arrays: users expect a scalar to be known."""
    unknown = [x for x in map(as_array, iter_leaves((args, dict(kwargs)))) if isinstance(x, Tracer)]
    return min(unknown, key=lambda x: bool(x.shape), default=None)


def _aten_overloads(func: TorchFunction) -> dict[str, Any]:
    packet: Any = getattr(torch.ops.aten, func.__name__, None)
    return {name: getattr(packet, name) for name in packet.overloads()} if isinstance(packet, OVERLOAD_PACKET) else {}


def _has_tag(func: TorchFunction, tag: torch.Tag) -> bool:
    """Whether one of the function's overloads has this tag, such as "draws random numbers" or "values decide the shape"."""
    return any(tag in form.tags for form in _aten_overloads(func).values())


def _mutates_input(func: TorchFunction) -> bool:
    """Whether the function writes into its arguments. The overloads that write into `out` do not count."""
    return func.__name__.endswith("_") or any(mutates_arguments(form) for name, form in _aten_overloads(func).items() if "out" not in name)


def _import_path(func: TorchFunction) -> str:
    """Return the path from which a function can be imported. For some functions torch's own name is a class that cannot be imported."""
    plain, theirs = getattr(func, "__name__", ""), torch.overrides.resolve_name(func) or getattr(func, "__qualname__", "")
    with suppress(AttributeError):
        if functools.reduce(getattr, theirs.split(".")[1:], torch) is func and theirs.startswith("torch."):
            return theirs
    found = next((f"{path}.{plain}" for path, space in TORCH_NAMESPACES.items() if getattr(space, plain, None) is func), None)
    if found is None and "_VariableFunctions" in theirs and hasattr(torch, plain):
        return f"torch.{plain}"  # a Python function that calls `func`
    return found or (f"torch.ops.{theirs}" if theirs.startswith("aten.") else theirs) or repr(func)


def unsupported_op_error(func: TorchFunction, why: str = "") -> NotImplementedError:
    """Return the error for a function that has no implementation, or none for these arguments."""
    name = _import_path(func)
    if getattr(func, "namespace", "") == "prims":
        return NotImplementedError(
            f"torch.vmap, torch.func or TorchScript runs {current_module_path()} and calls {name}, below the functions that jax can "
            "replace. Use jax.vmap, jax.grad or jax.jacrev of functions of jnp.asarray(x) there, and the Python code of a scripted "
            "function."
        )
    return NotImplementedError(
        f"{name} has no implementation in jax, and is called {current_module_path()}{why}. Register one with "
        f"torch2jax.implements({name}), use other operations in that submodule's forward, or ask for it in an issue."
    )


def _run_handler(entry: Op, func: TorchFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    kwargs = dict(kwargs)
    if kwargs.get("generator") is not None:
        raise ValueError(
            f"{getattr(func, '__name__', func)} is given a generator {current_module_path()}, but a traced program draws with jax keys, "
            "not with torch's generators. Leave it out, or draw the numbers outside and pass them in."
        )
    out = kwargs.pop("out", None)
    inplace = entry.inplace
    if entry.signature is not None:
        names = entry.signature.parameters
        kwargs = {name if name in names else ARGUMENT_ALIASES.get(name, name): x for name, x in kwargs.items()}
        try:
            bound = entry.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise unsupported_op_error(func, f" with arguments for which it has none ({error})") from error
        if "inplace" in names:
            inplace |= bool(bound.arguments.pop("inplace", False))
        if "inplace" in names or entry.views or not args:  # a view needs its base as the first argument
            args, kwargs = bound.args, bound.kwargs
    if entry.same_dtype_kind is not None:
        _refuse_mixed_dtypes(entry.same_dtype_kind, func, args, kwargs)
    if entry.raw:
        with _eager_if_concrete(entry, as_arrays(args), as_arrays(kwargs)):
            return wrap_result(entry.handler(*args, **kwargs))
    if entry.views and isinstance(args[0], TracedTensor):
        with _name_op_in_error(func, args, kwargs):
            return make_view(entry, func, args, kwargs)
    array_args, array_kwargs = as_arrays(args), as_arrays(kwargs)
    with _eager_if_concrete(entry, array_args, array_kwargs), _name_op_in_error(func, array_args, array_kwargs):
        result = entry.handler(*array_args, **array_kwargs)
    target = args[0] if inplace else out
    if target is None:
        return wrap_result(result)
    return _write_in_place(target, result, func)


@contextmanager
def _name_op_in_error(func: TorchFunction, args: object, kwargs: Mapping[str, object]) -> Iterator[None]:
    """Name the torch function in the error of an implementation that needs values which jax does not know."""
    try:
        yield
    except CONCRETIZATION_ERRORS as error:
        unknown = _first_tracer(args, kwargs)
        raise error if unknown is None else data_dependent_error(_import_path(func), unknown) from error


def _refuse_mixed_dtypes(kind: type[np.generic], func: TorchFunction, args: object, kwargs: object) -> None:
    types = dict.fromkeys(
        x.dtype for x in iter_leaves(as_arrays((args, kwargs))) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, kind)
    )
    if len(types) > 1:
        raise RuntimeError(  # a TypeError in an operator would become NotImplemented
            f"{getattr(func, '__name__', func)} is given tensors of {' and '.join(map(str, types))} {current_module_path()}, but torch "
            "expects one dtype. Convert one with .to(dtype): the batch to the model's dtype, or the model to the batch's."
        )


def _eager_if_concrete(entry: Op, args: object, kwargs: object) -> AbstractContextManager[object]:
    """Return a context that computes at once if all values are known, so that torch code may branch on the results."""
    values = [x for x in iter_leaves((args, kwargs)) if isinstance(x, jax.Array)]
    known = values and not entry.always and not any(isinstance(x, Tracer) for x in values)
    return jax.ensure_compile_time_eval() if known else nullcontext()


def make_view(entry: Op, func: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result as a view of the first argument: a write into one reaches the other."""
    base, rest, kwargs = args[0], as_arrays(args[1:]), as_arrays(kwargs)
    with _eager_if_concrete(entry, (base.value, *rest), kwargs):
        result = entry.handler(base.value, *rest, **kwargs)
    if isinstance(result, tuple | list):
        return type(result)(TracedTensor(x, base, ViewSpec(entry.handler, rest, kwargs, i, func)) for i, x in enumerate(result))
    return TracedTensor(result, base, ViewSpec(entry.handler, rest, kwargs, None, func))


def _write_in_place(target: Any, result: Any, func: TorchFunction) -> Any:
    """Write a result into a traced tensor, which keeps its shape and dtype, as in torch."""
    if isinstance(target, tuple | list):
        return type(target)(_write_in_place(t, r, func) for t, r in zip(target, result, strict=True))
    if not isinstance(target, TracedTensor):
        raise ValueError(
            f"{getattr(func, '__name__', func)} writes a traced value into a plain torch tensor {current_module_path()}. "
            f"Register that tensor as a buffer, or make it inside forward."
        )
    if result.shape != target.value.shape:
        raise ValueError(
            f"{getattr(func, '__name__', func)}: a result of shape {tuple(result.shape)} cannot be written into a tensor of shape "
            f"{tuple(target.shape)} ({current_module_path()})."
        )
    result = result.astype(target.value.dtype)
    target.value = result if torch.is_grad_enabled() else write_without_grad(target.value, result)
    return target


def _always_false(*_: object, **__: object) -> bool:
    return False


@functools.cache
def _without_override_check(func: TorchFunction) -> Callable[..., Any] | None:
    """Return a Python function of torch without its check for `__torch_function__` overrides; None for other functions.

    The copy has its own globals; those of torch are not changed. Functions that it calls are still overridden.
    """
    if not isinstance(func, FunctionType):
        return None
    asks = {name: _always_false for name in func.__globals__ if name.startswith("has_torch_function")}
    if not asks:
        return None
    body = with_code_of(func, {**func.__globals__, **asks}, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


class TracingMode(TorchFunctionMode):
    """A torch function mode that sends the calls of this thread to `dispatch`."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})
