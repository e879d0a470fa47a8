"""The tensor that torch code gets while jax traces it: torch's methods, views and in-place writes over a jax value."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.core import Tracer

from bridge._compat.torch import make_subclass
from bridge._compat.torch2jax import is_torchish, torchish_class
from bridge._interop.dlpack import to_jax
from bridge._interop.dtypes import canonicalize_dtype
from bridge._ir.types import PyTree
from bridge._process import x64

from .context import context, current_module_path, data_dependent_error, no_autograd_graph_error
from .functionalization import scatter_through_view, write_without_grad
from .promotion import torch_dtype

Tensor: Any = torch.Tensor  # Any, because attributes of torch.Tensor are properties here
# Packages that get a NumPy dtype from `x.dtype`: jax reads it from every object with `__jax_array__` and cannot use a torch.dtype.
JAX_PACKAGES = ("jax", "numpy", "optax", "chex", "flax", "equinox", "ml_dtypes")
# The modules in which torch checks the arguments of distributions. Checks of unknown values pass.
ARGUMENT_CHECK_MODULES = tuple(f"torch.distributions.{name}" for name in ("distribution", "constraints", "uniform"))


# The errors that jax raises when Python code needs the value of a tracer.
CONCRETIZATION_ERRORS = jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError

_T = TypeVar("_T")


class GradFnPlaceholder:
    """The `grad_fn` of a traced tensor that requires grad. It only exists: each attribute raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise no_autograd_graph_error(f"grad_fn.{name} belongs")


class ViewSpec(NamedTuple):
    """How a view is computed from its base.

    `handler`: the implementation over arrays; `args`, `kwargs`: its arguments after the base's array; `output_index`: the position of the
    view among its results, None where it has one result; `func`: the torch function.
    """

    handler: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output_index: int | None
    func: Callable[..., Any]


class TracedTensor(Tensor):
    """A jax value under torch's interface.

    It is a real tensor on the meta device with the value's shape and dtype, so that torch's C code can inspect it. A write replaces the
    value. A view knows its base and its `ViewSpec`, so that a write to one is seen by the other, as in torch. jax functions accept it
    through `__jax_array__` and as a pytree. Once anything is traced, its class is also a subclass of torch2jax's `Torchish`.
    """

    def __new__(cls, value: jax.Array | np.ndarray, *_: object, **__: object) -> TracedTensor:
        with torch.DisableTorchFunction():
            return make_subclass(cls, torch.empty(value.shape, dtype=torch_dtype(value), device="meta"))

    def __init__(self, value: Any, base: TracedTensor | None = None, view: ViewSpec | None = None, parameter: torch.Tensor | None = None):
        self._value = value
        self._base_, self._view_spec = base, view
        self._write_count = 0
        self._previous_data: list[TracedTensor] = []  # one tensor for each assignment to `data`: the value that it had before
        self._base_data_index = len(base._previous_data) if base is not None else 0
        self._base_stamp_seen = base._total_writes() if base is not None else 0
        self._is_param = parameter is not None
        self._wants_grad = parameter is not None and parameter.requires_grad

    @property
    def value(self) -> Any:
        base = self._current_base()
        if base is not None and self._base_stamp_seen != base._total_writes() and self._aliases_base():
            self._value, self._base_stamp_seen = self._apply_view(base.value), base._total_writes()
        return self._value

    @value.setter
    def value(self, new: jax.Array) -> None:
        base = self._current_base()
        if base is not None and self._aliases_base():
            written = self._scatter_into_base(base.value, new)
            base.value = write_without_grad(base.value, written) if cast(ViewSpec, self._view_spec).func in DETACH_FUNCTIONS else written
            self._base_stamp_seen = base._total_writes()
        self._value = new
        self._write_count += 1

    def restore_value(self, value: jax.Array) -> None:
        """Restore an earlier value. Views of this tensor see it too."""
        self._value = value
        self._write_count += 1

    @property
    def is_written(self) -> bool:
        """Whether code has written into this tensor or through a view of it."""
        return self._write_count > 0

    def _current_base(self) -> TracedTensor | None:
        """Return the base of this view. If the base's `data` was replaced since, return the tensor with the base's former value."""
        base = self._base_
        if base is not None and self._base_data_index < len(base._previous_data):
            self._base_, self._base_data_index = base._previous_data[self._base_data_index], 0
        return self._base_

    def _total_writes(self) -> int:
        base = self._current_base()
        return self._write_count + (base._total_writes() if base is not None else 0)

    def _apply_view(self, array: jax.Array) -> jax.Array:
        view = cast(ViewSpec, self._view_spec)
        out = view.handler(array, *view.args, **view.kwargs)
        return out if view.output_index is None else out[view.output_index]

    def _scatter_into_base(self, array: jax.Array, new: jax.Array) -> jax.Array:
        """Return the base's array with `new` written through this view."""
        return scatter_through_view(self._apply_view, array, new)

    def _aliases_base(self) -> bool:
        """Whether torch would have made a view here and not a copy. `reshape`, for example, decides by strides."""
        return self._torch_layout()[1]

    def _torch_layout(self) -> tuple[torch.Tensor, bool]:
        """Return a meta tensor with torch's strides for this tensor, and whether torch would share the base's memory."""
        base = self._current_base()
        if base is None:
            return _meta_tensor(self._value), False
        view = cast(ViewSpec, self._view_spec)
        with torch.DisableTorchFunction():
            base = base._torch_layout()[0]
            try:
                out = view.func(base, *(_meta_tensor(x) if isinstance(x, jax.Array) else x for x in view.args), **view.kwargs)
            except (TypeError, RuntimeError):  # an index whose values decide the shape; torch copies there
                return _meta_tensor(self._value), False
            out = out if view.output_index is None else out[view.output_index]
            same = out.untyped_storage() is base.untyped_storage()
            return (out, True) if same else (torch.empty_like(out), False)

    def as_meta_tensor(self) -> torch.Tensor:
        """Return a meta tensor with the strides that this tensor would have in torch."""
        return self._torch_layout()[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __jax_array__(self) -> jax.Array:
        """Return the value for jax code, with 32 bits where jax keeps no 64-bit types."""
        if context.jax_x64 is not False:
            return self.value
        with x64():
            value = self.value
        return canonicalize_dtype(value)

    def jax(self) -> Array:
        """Return the value, like torchax's tensors. Libraries look for this method to learn that jax traces, and then read no values."""
        return self.__jax_array__()

    @property
    def dtype(self) -> torch.dtype | np.dtype:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in JAX_PACKAGES:
            return self.value.dtype
        return torch_dtype(self.value)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.value.shape)

    @property
    def size(self) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in JAX_PACKAGES:
            return self.value.size
        return lambda dim=None: self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def device(self) -> torch.device:
        return context.device

    @property
    def data(self) -> TracedTensor:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        """Share the memory of `new`, and keep the derivative. Existing views of this tensor keep the former memory."""
        old = self.value
        before = TracedTensor(old, self._base_, self._view_spec)
        before._write_count, before._base_data_index, before._base_stamp_seen = (
            self._write_count,
            self._base_data_index,
            self._base_stamp_seen,
        )
        self._previous_data.append(before)
        self._base_ = self._view_spec = None
        new = before if new is self else new
        if type(new) is TracedTensor:
            kept = lambda array: write_without_grad(old, array) if array.dtype == old.dtype else array  # noqa: E731
            self._base_, self._view_spec, self._base_data_index = new, ViewSpec(kept, (), {}, None, torch.detach), len(new._previous_data)
        self._value, self._write_count = write_without_grad(old, as_array(new)), self._write_count + 1
        self._base_stamp_seen = new._total_writes() if type(new) is TracedTensor else 0

    grad = property(lambda self: None)
    requires_grad = property(lambda self: self._wants_grad, lambda self, wanted: None)
    is_leaf = property(lambda self: self._is_param or not self._wants_grad)
    grad_fn = property(lambda self: None if self.is_leaf else GradFnPlaceholder())

    def mark_requires_grad(self) -> None:
        """Set `requires_grad` if the dtype allows it. torch does so for results of an input that requires grad."""
        self._wants_grad |= torch_dtype(self.value).is_floating_point or torch_dtype(self.value).is_complex

    is_meta = is_cuda = False
    is_cpu = True
    T = property(lambda self: _dispatch(torch.t if self.ndim == 2 else torch.permute, (self, *_reverse(self)), {}))
    mT = property(lambda self: _dispatch(torch.transpose, (self, -1, -2), {}))  # noqa: N815 - torch's name
    H = property(lambda self: self.mH)
    mH = property(lambda self: self.mT.conj())  # noqa: N815 - torch's name
    real = property(lambda self: _dispatch(torch.real, (self,), {}))
    imag = property(lambda self: _dispatch(torch.imag, (self,), {}))
    itemsize = property(lambda self: self.value.dtype.itemsize)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that jax arrays have and torch tensors do not, for jax code."""
        if name.startswith("_") or "_value" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def dim(self) -> int:
        return self.ndim

    ndimension = dim

    def is_signed(self) -> bool:
        return torch_dtype(self.value).is_signed

    def numel(self) -> int:
        return self.value.size

    nelement = numel

    def requires_grad_(self, requires_grad: bool = True) -> TracedTensor:
        self._wants_grad = requires_grad if not self._is_param else self._wants_grad
        return self

    def item(self) -> bool | int | float | complex:
        return self._read_concrete("item()", lambda x: x.item())

    def tolist(self) -> Any:
        return self._read_concrete("tolist()", lambda x: x.tolist(), any_size=True)

    def numpy(self, *_: object, **__: object) -> np.ndarray:
        return self._read_concrete("numpy()", np.array, any_size=True)

    def _read_concrete(self, what: str, ask: Callable[[jax.Array], _T], any_size: bool = False) -> _T:
        """Return `ask(value)`, or raise an error that names `what` if jax does not know the value while it traces."""
        try:
            return ask(self.value if any_size else self._as_scalar())
        except CONCRETIZATION_ERRORS:
            raise data_dependent_error(what, self.value) from None

    def _as_scalar(self) -> jax.Array:
        """Return the value; as a scalar if the tensor has one element."""
        if self.value.size != 1 or not self.value.ndim:
            return self.value
        with nullcontext() if isinstance(self.value, Tracer) else jax.ensure_compile_time_eval():
            return self.value.reshape(())

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[TracedTensor]:
        return iter(_dispatch(torch.unbind, (self,), {}))

    def __bool__(self) -> bool:
        if isinstance(self.value, Tracer) and sys._getframe(1).f_globals.get("__name__") in ARGUMENT_CHECK_MODULES:
            return True
        return self._read_concrete("`if` or bool()", bool)

    def __int__(self) -> int:
        return self._read_concrete("int()", int)

    def __float__(self) -> float:
        return self._read_concrete("float()", float)

    def __index__(self) -> int:
        return self._read_concrete("A size or an index of Python", operator.index)

    def __contains__(self, x: Any) -> bool:
        return bool((self == x).any())

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Traced({self._value!r})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Raise an error: traced values have no autograd graph, for backward or for hooks."""
        raise no_autograd_graph_error("backward, retain_grad and hooks of a tensor belong")

    retain_grad = register_hook = register_post_accumulate_grad_hook = backward

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedTensor:
        return memo.setdefault(
            id(self), self._copy_grad_flags(TracedTensor(jax.lax.stop_gradient(self.value) if self.is_leaf else self.value))
        )

    def __copy__(self) -> TracedTensor:
        return self._copy_grad_flags(self.detach())  # shares memory with this tensor

    def _copy_grad_flags(self, copy: TracedTensor) -> TracedTensor:
        """Return `copy` with this tensor's flags: whether it is a parameter, and whether it requires grad."""
        copy._is_param, copy._wants_grad = self._is_param, self._wants_grad
        return copy


@functools.cache
def register_as_torchish() -> type:
    """Make `TracedTensor` a subclass of torch2jax's value class and return that class. Operators registered there check for it."""
    kind = torchish_class()
    TracedTensor.__bases__ = (torch.Tensor, kind)
    return kind


def _meta_tensor(array: jax.Array) -> torch.Tensor:
    return torch.empty(array.shape, dtype=torch_dtype(array), device="meta")


DETACH_FUNCTIONS = frozenset({torch.detach, torch.Tensor.detach})


def _reverse(x: TracedTensor) -> tuple[()] | tuple[tuple[int, ...]]:
    return () if x.ndim == 2 else (tuple(range(x.ndim))[::-1],)


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if context.dispatch is None:
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} was called on a traced tensor after its trace had ended. Something keeps it, "
            f"such as an attribute or a list. Return it from the function instead."
        )
    return context.dispatch(func, args, kwargs)


def _dunder(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def called(self: TracedTensor, *args: object) -> Any:
        return _dispatch(method, (self, *args), {})

    called.__name__ = name
    return called


_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
for _name in [
    *(f"__{x}__" for x in _BINARY + ["lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert", "getitem", "setitem"]),
    *(f"__r{x}__" for x in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]),
    *(f"__i{x}__" for x in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]),
]:
    if hasattr(torch.Tensor, _name):
        setattr(TracedTensor, _name, _dunder(_name))

# jax functions get the array of a traced tensor, because not all of them accept another type.
jax.tree_util.register_pytree_node(TracedTensor, lambda x: ((x.__jax_array__(),), None), lambda _, children: children[0])  # pyright: ignore[reportArgumentType]


def as_traced(tree: PyTree) -> PyTree:
    """Return the pytree with each array as a traced tensor. Random keys stay as they are."""

    def leaf(x: object) -> object:
        return TracedTensor(x) if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, TracedTensor))


def as_array(x: Any) -> Any:
    """Return the jax value of a traced tensor, a torch tensor as a constant, a NumPy scalar as a Python number; others unchanged."""
    if type(x) is TracedTensor or is_torchish(x):
        return x.value
    if isinstance(x, torch.Tensor):
        return capture_constant(x)
    return x.item() if isinstance(x, np.generic) else x  # a Python number, as which torch treats it in promotion


def capture_constant(tensor: torch.Tensor) -> jax.Array:
    """Return a copy of a torch tensor that is no parameter, buffer or input. Each tensor is copied once in a trace.

    Raises:
      ValueError: the tensor requires grad, because no gradient would reach it; or it is on the meta device.
    """
    if tensor.is_meta:
        raise ValueError(
            f"A torch tensor of shape {tuple(tensor.shape)} without memory (on the meta device) was met {current_module_path()}. If the "
            "model was built on that device, call to_empty() first. torch.vmap and torch.func also make such tensors from traced "
            "values: use jax.vmap, jax.grad or jax.jacrev there, of functions of jnp.asarray(x)."
        )
    if tensor.requires_grad:
        raise ValueError(
            f"A torch tensor of shape {tuple(tensor.shape)} that requires grad was met {current_module_path()}, and it is no parameter "
            "of this module: no gradient could reach it. Register it in the module, pass it as an input, or detach() it."
        )
    known = context.constants if context.constants is not None else {}
    if id(tensor) not in known:
        with torch.DisableTorchFunction(), jax.ensure_compile_time_eval():
            array = to_jax(tensor.detach().clone(), copy=None)
            known[id(tensor)] = tensor, array.astype(jax.dtypes.canonicalize_dtype(array.dtype))  # the tensor keeps its id in use
    return known[id(tensor)][1]
