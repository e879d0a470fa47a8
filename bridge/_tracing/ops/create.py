"""Torch functions that create tensors or change their dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._tracing.context import no_autograd_graph_error
from bridge._tracing.op_registry import Op, add_ops, as_arrays, functions_named, op
from bridge._tracing.promotion import jax_dtype, promote, torch_dtype
from bridge._tracing.tensor import as_array

# A new constant of at most this many elements is computed while tracing, so that torch code may branch on its values.
MAX_EAGER_ELEMENTS = 4096


def parse_sizes(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Return sizes, given as numbers or as one sequence, as a tuple."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    return tuple(int(n) for n in sizes)


def create_array(make: Callable[[], Any], size: int) -> Any:
    """Return a new array. The values of a small one are known while tracing."""
    if size > MAX_EAGER_ELEMENTS:
        return make()
    with jax.ensure_compile_time_eval():
        return make()


def _full_array(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
    return create_array(
        lambda: jnp.full(shape, value, dtype), int(np.prod(shape)) if not isinstance(value, jax.Array) else MAX_EAGER_ELEMENTS + 1
    )


def _register_filled() -> None:
    for name, value in {"zeros": 0, "ones": 1, "empty": 0}.items():

        def make(*size: Any, dtype: Any = None, value: int = value, **_: Any) -> Any:
            return _full_array(parse_sizes(_.get("size") or size), value, jax_dtype(dtype or torch.get_default_dtype()))

        def like(input: Any, *, dtype: Any = None, value: int = value, **_: Any) -> Any:
            return _full_array(input.shape, value, jax_dtype(dtype) if dtype else _dtype_of(input))

        def new(input: Any, *size: Any, dtype: Any = None, value: int = value, **_: Any) -> Any:
            return _full_array(parse_sizes(_.get("size") or size), value, jax_dtype(dtype) if dtype else _dtype_of(input))

        for func, handler in ((name, make), (f"{name}_like", like), (f"new_{name}", new)):
            register_factory(func, handler)

    register_factory("empty_strided", lambda size, stride, *, dtype=None, **_: make(size, dtype=dtype, value=0))
    register_factory("empty_permuted", lambda size, physical_layout, *, dtype=None, **_: make(size, dtype=dtype, value=0))
    register_factory("new_empty_strided", lambda input, size, stride, *, dtype=None, **_: new(input, size, dtype=dtype, value=0))


def _dtype_of(x: Any) -> Any:
    return jax_dtype(x.dtype) if isinstance(x, torch.Tensor) else x.dtype


def register_factory(name: str, handler: Any) -> None:
    """Register a function that may have no traced argument."""
    op(name, always=True)(handler)


_register_filled()


@op("full", always=True)
def full(size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Return a tensor filled with one value."""
    if dtype is None:
        dtype = torch_dtype(fill_value) if isinstance(fill_value, jax.Array) else torch.tensor(fill_value).dtype
    return _full_array(tuple(size), fill_value, jax_dtype(dtype))


@op("full_like", always=True)
def full_like(input: jax.Array, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Return one value in the shape of `input`."""
    return _full_array(input.shape, fill_value, jax_dtype(dtype) if dtype else input.dtype)


@op("new_full", always=True)
def new_full(input: jax.Array, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Return a tensor filled with one value, in the dtype of `input`."""
    return _full_array(tuple(size), fill_value, jax_dtype(dtype) if dtype else input.dtype)


@op("tensor", "as_tensor", "asarray", "scalar_tensor", always=True, raw=True)
def tensor(data: Any, dtype: Any = None, **_: Any) -> Any:
    """Return an array of numbers, arrays, or lists of them. A NumPy scalar keeps its dtype."""
    values = as_arrays(data)
    if isinstance(values, jax.Array):
        return values if dtype is None else values.astype(jax_dtype(dtype))
    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(values)):
        stacked = jnp.asarray(values) if not isinstance(data, list | tuple) else jnp.stack([tensor(x) for x in data])
        return stacked if dtype is None else stacked.astype(jax_dtype(dtype))
    with torch.DisableTorchFunction():
        host = torch.as_tensor(data, dtype=dtype)
        wanted = jax_dtype(host.dtype)
        host = host.float() if host.dtype is torch.bfloat16 else host
    return create_array(lambda: jnp.asarray(host.numpy(), wanted), host.numel())


@op("new_tensor", always=True, raw=True)
def new_tensor(input: Any, data: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Return `tensor(data)` in the dtype of `input`."""
    return tensor(data, dtype or input.dtype)


@op("new", always=True, raw=True)
def new(input: Any, *size: Any, **_: Any) -> Any:
    """Return a tensor of these sizes, or of these numbers, in the dtype of `input`."""
    if len(size) == 1 and isinstance(size[0], list | tuple) and type(size[0]) is not torch.Size:
        return tensor(size[0], input.dtype)
    return _full_array(parse_sizes(_.get("size") or size or (0,)), 0, jax_dtype(input.dtype))


@op("arange", always=True)
def arange(start: Any = 0, end: Any = None, step: Any = 1, *, dtype: Any = None, **_: Any) -> Any:
    """Return numbers from `start` to `end` (exclusive) in steps."""
    if end is None:
        start, end = 0, start
    if dtype is None:
        dtype = torch.get_default_dtype() if any(isinstance(x, float) for x in (start, end, step)) else torch.int64
    start, end, step = (x.item() if hasattr(x, "item") else x for x in (start, end, step))
    n = max(0, int(np.ceil((end - start) / step)))
    return create_array(lambda: jnp.arange(start, end, step, dtype=jax_dtype(dtype)), n)


@op("linspace", always=True)
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, **_: Any) -> Any:
    """Return `steps` equally spaced numbers."""
    return create_array(lambda: _evenly_spaced(start, end, steps, jax_dtype(dtype or torch.get_default_dtype()), lambda x: x), steps)


@op("logspace", always=True)
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, **_: Any) -> Any:
    """Return powers of `base` at equally spaced exponents."""
    power = lambda x: jnp.power(jnp.asarray(base, x.dtype), x)  # noqa: E731
    return create_array(lambda: _evenly_spaced(start, end, steps, jax_dtype(dtype or torch.get_default_dtype()), power), steps)


def _evenly_spaced(start: Any, end: Any, steps: int, dtype: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to equally spaced numbers. Integers are counted from the nearer end in a wider dtype and truncated, as in torch."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return function(jnp.linspace(start, end, steps, dtype=dtype))
    wide = jax_dtype(torch.float64)
    start, end = (jnp.asarray(x).astype(dtype).astype(wide) for x in (start, end))
    places, step = jnp.arange(steps, dtype=wide), (end - start) / max(steps - 1, 1)
    return function(jnp.where(places < max(steps // 2, 1), start + step * places, end - step * (steps - 1 - places))).astype(dtype)


@op("eye", always=True)
def eye(n: int, m: int | None = None, *, dtype: Any = None, **_: Any) -> Any:
    """Return the identity matrix."""
    return create_array(lambda: jnp.eye(n, m, dtype=jax_dtype(dtype or torch.get_default_dtype())), n * (m or n))


@op("fill")
def fill(input: jax.Array, value: Any) -> jax.Array:
    """Return one value in the shape and dtype of `input`."""
    return jnp.full(input.shape, value, input.dtype)


def _copy_values(input: Any, src: Any, non_blocking: bool = False) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(src, input.dtype), input.shape)


add_ops(dict.fromkeys(functions_named("zero_"), Op(lambda input: jnp.zeros(input.shape, input.dtype), None, inplace=True)))
add_ops({torch.Tensor.copy_: Op(_copy_values, None, inplace=True)})


@op("type", raw=True)
def type_(input: Any, dtype: Any = None, **_: Any) -> Any:
    """Return `input` in another dtype, or torch's name of its dtype."""
    if dtype is None:
        with torch.DisableTorchFunction():
            return torch.empty(0, dtype=input.dtype).type()
    return to(input, dtype if isinstance(dtype, torch.dtype) else torch.empty(0).type(dtype).dtype)


@op("to", raw=True)
def to(input: Any, *args: Any, dtype: Any = None, copy: bool = False, **_: Any) -> Any:
    """Return `input` in another dtype. Devices are ignored: jax places the arrays."""
    for x in args:
        if isinstance(x, torch.dtype):
            dtype = x
        elif isinstance(x, torch.Tensor):
            dtype = x.dtype
    if (dtype is None or dtype == input.dtype) and not copy:
        return input
    return input.value.astype(jax_dtype(dtype or input.dtype)) if dtype else jnp.array(input.value)


def _register_casts() -> None:
    names = ["float", "double", "half", "bfloat16", "long", "int", "short", "char", "byte", "bool", "cfloat", "cdouble"]
    dtypes = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"]
    for name, dtype in zip(names, map(torch.__dict__.get, dtypes), strict=True):
        add_ops({getattr(torch.Tensor, name): Op(lambda x, dtype=dtype, **_: to(x, dtype), None, raw=True)})
    for name in ("cpu", "cuda", "requires_grad_", "pin_memory", "coalesce", "dequantize"):
        add_ops({getattr(torch.Tensor, name): Op(lambda x, *_, **__: x, None, raw=True)})


_register_casts()


@op("type_as", raw=True)
def type_as(input: Any, other: Any) -> Any:
    """Return `input` in the dtype of `other`."""
    return to(input, other)


@op("clone")
def clone(input: Any, **_: Any) -> Any:
    """Return the same values. The result shares no memory with `input`."""
    return input


@op("is_floating_point", raw=True)
def is_floating_point(input: Any) -> bool:
    """Return whether the dtype is a real floating dtype."""
    return torch_dtype(as_array(input)).is_floating_point


@op("is_complex", raw=True)
def is_complex(input: Any) -> bool:
    """Return whether the dtype is complex."""
    return torch_dtype(as_array(input)).is_complex


def _refuse_autograd_grad(*_: Any, **__: Any) -> Any:
    raise no_autograd_graph_error("torch.autograd.grad belongs")


# torch's encoder asks whether it may drop padding. torch does so only without gradients; here the answer is always no.
op("_nested_tensor_from_mask_left_aligned")(lambda t, mask: False)
add_ops(
    {
        torch.autograd.grad: Op(_refuse_autograd_grad, None, raw=True),
        torch.numel: Op(lambda x: as_array(x).size, None, raw=True),
        torch.is_nonzero: Op(lambda x: bool(as_array(x)), None, raw=True),
        torch.result_type: Op(lambda a, b: torch_dtype(promote(*as_arrays((a, b)))[0]), None, raw=True),
        torch.Tensor.is_shared: Op(lambda x: True, None, raw=True),
    }
)
for _name in ("is_conj", "is_neg", "is_inference"):
    add_ops(dict.fromkeys(functions_named(_name), Op(lambda x: False, None, raw=True)))


@op("conj")
def conj(input: Any) -> Any:
    """Return the complex conjugate."""
    return jnp.conj(input) if jnp.iscomplexobj(input) else input
