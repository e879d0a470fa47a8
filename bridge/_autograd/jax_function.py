"""`jax_function`, which makes a differentiable torch function of a JAX function."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import CodeType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import numpy as np
import torch
from jax.core import Tracer
from jax.typing import ArrayLike

from bridge import _process
from bridge._compat.python import code_of
from bridge._compat.types import Device, PyTreeDef
from bridge._interop.containers import path_to_instance
from bridge._interop.dlpack import dense_order, device_of, to_jax
from bridge._interop.dtypes import is_64bit, keeps_64bit, numpy_dtype, to_32bit
from bridge._interop.tensor_storage import first_unreadable, why_unreadable
from bridge._ir.types import PyTree
from bridge._names import path_name
from bridge._process import disable_torch_compile
from bridge._process import x64 as scope
from bridge._tracing.context import context
from bridge._tracing.tensor import TracedTensor, as_array, as_traced
from bridge._warnings import CompilationWarning, stack_level

from .autograd_functions import call_traced, is_transformed, record_call, residual_forward
from .fast_signature import fast_signature, is_dense
from .traced_function import ArgumentSpec, CompiledCall, ExecutionTarget, ForwardWithResiduals, TracedFunction

_MAX_PROGRAMS = 512  # of one function; the oldest is dropped
_config: Any = jax.config
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result", covariant=True)


class _UnknownResult:
    """The result of a function without a known result type, for the first overload: such a function matches every overload."""


@overload
def jax_function(fn: Callable[_Arguments, _UnknownResult], *, x64: bool | None = None) -> JaxFunction[_Arguments, PyTree]: ...
@overload
def jax_function(fn: Callable[_Arguments, jax.Array], *, x64: bool | None = None) -> JaxFunction[_Arguments, torch.Tensor]: ...
@overload
def jax_function(fn: Callable[_Arguments, PyTree], *, x64: bool | None = None) -> JaxFunction[_Arguments, PyTree]: ...
def jax_function(fn: Callable[..., PyTree], *, x64: bool | None = None) -> JaxFunction[..., PyTree]:
    """Return a JAX function as a torch function of tensors and pytrees. It is differentiable to any order.

    The function compiles once for each signature: the tree, shapes, dtypes, device, dimension order in memory, static leaves, and jax's
    settings of matrix product precision, promotion and x64. Gradients of another set of arguments compile another program.

    Args:
      fn: a pure function of arrays. It may use `jax.grad`, `lax.scan`, `custom_vjp` and so on. It runs once for each signature, when it is
        traced; values that it closes over are fixed then.
      x64: whether jax keeps 64-bit types in a program. None: yes if an argument is a 64-bit tensor or jax array, otherwise as jax's flag
        says. Where they are kept, `jnp.ones(3)` in the program is float64 too, as under `jax.enable_x64`. True: always. False: 64-bit
        tensors are converted to 32 bits, as jax does with its flag off. Use False for int64 class labels among float32 tensors.

    Returns:
      A function with `fn`'s arguments. They are pytrees of:
        tensors: dynamic. Floating-point and complex tensors are differentiable, integers and booleans are not.
        jax arrays (random keys too), NumPy arrays, Python floats and complex numbers: dynamic, not differentiable. jax's rules give
          the dtype of NumPy arrays. Another value of a float needs no new program.
        ints, bools, strings, functions and other hashable objects: static, part of the signature.
      It returns the tree that `fn` returns, with tensors for arrays and numbers. Random keys stay jax arrays.
      Editors show the arguments of `fn`, but type checkers accept any others too, because a caller has tensors where an annotation of `fn`
      says `jax.Array`.

    Warnings: the ninth signature of one function emits a `torch_api.CompilationWarning`. So does the ninth function that is made from the
    same code after the others were dropped.

    Memory: tensors in any order of dimensions are read in place. A tensor that is unaligned, has gaps or overlaps itself is copied on its
    device. An unaligned `torch.nn.Parameter` on the CPU (a weight from a file) that is the only owner of its storage is moved once instead.
    Outputs are new memory that torch aliases without a copy, also where `fn` returns an argument. On the CPU the call has read its
    arguments when it returns, so they may change; on a GPU torch's stream waits.

    Residuals: `save_for_backward` holds them, so hooks see them, and torch raises its error if a needed tensor was changed. The backward
    rematerializes residuals that a few elementwise operations compute from the arguments, up to 4096 elements in total. Nothing is saved
    under `torch.no_grad` or if no tensor requires grad. With `create_graph=True` the backward computes the forward again from the
    arguments, and is differentiable in the same way.

    Transformations: `torch.func` (grad, vjp, jvp, vmap and combinations) and forward mode work if jax can transform `fn`. Under vmap all
    examples share a random key. torch's old vmap (`is_grads_batched`, `vectorize=True`) is an error. Under autocast the function computes
    in the dtypes of its arguments, like `torch.amp.custom_fwd` without `cast_inputs`. `torch.compile` breaks its graph at the call. In
    `module_function` and `JaxTrainStep`, `fn` becomes a part of their program and follows their 64-bit settings.

    Threads may share the function. It can be pickled if `fn` can, without its programs.

    Raises:
      TypeError: an argument is a tracer (call `fn` itself inside jax), not hashable, or an object that holds tensors and is no pytree;
        an output is no array.
      ValueError: tensors are on several devices, are sparse or meta, or their storage was freed.
      RuntimeError: the process was forked after jax started; jax does not see the tensors' device.
      FloatingPointError: a result or a residual has NaN under `jax_debug_nans`, or infinity under `jax_debug_infs`.
      Exception: any error that `fn` raises.

    Sources: https://docs.jax.dev/en/latest/_autosummary/jax.vjp.html, https://docs.pytorch.org/docs/stable/notes/extending.func.html.

    Example:
      >>> import bridge, jax.numpy as jnp, torch
      >>> norm = bridge.jax_function(lambda x, axis: jnp.sqrt((x**2).sum(axis)))
      >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
      >>> norm(x, 0).backward()
      >>> x.grad
      tensor([0.6000, 0.8000])
    """
    return JaxFunction(fn, x64)


_WARN_AT_SIGNATURES = 9  # the number of signatures that triggers a warning: a loop may need a new one in each call
_functions_by_code: weakref.WeakKeyDictionary[CodeType, _FunctionsOfCode] = weakref.WeakKeyDictionary()


class _FunctionsOfCode:
    """The functions of one code object that have compiled a program: how many were created, and which still exist."""

    def __init__(self) -> None:
        self.created_count = 0
        self.live_functions: weakref.WeakSet[JaxFunction[..., PyTree]] = weakref.WeakSet()
        self.has_warned = False


def _warn_if_recompiling(function: JaxFunction[..., PyTree], names: Sequence[str]) -> None:
    """Warn at the ninth signature of a function, and at the ninth function that is made from one code object and dropped."""
    if function.programs == _WARN_AT_SIGNATURES:
        how = _describe_difference(list(function._by_signature), names)
        warnings.warn(
            f"{function._title} has compiled {_WARN_AT_SIGNATURES} programs, one for each signature, which differ {how}. Pass numbers "
            "that change as tensors or floats, pad tensors to a few shapes, and create functions that you pass once, outside of the "
            "loop.",
            CompilationWarning,
            stacklevel=stack_level(),
        )
    code = _underlying_code(function._fn)
    if code is None:
        return
    of_code = _functions_by_code.setdefault(code, _FunctionsOfCode())
    if function in of_code.live_functions:
        return
    of_code.created_count += 1
    of_code.live_functions.add(function)
    if not of_code.has_warned and of_code.created_count - len(of_code.live_functions) >= _WARN_AT_SIGNATURES - 1:
        of_code.has_warned = True
        warnings.warn(
            f"{function._title} was made anew {_WARN_AT_SIGNATURES} times or more from one function, and each compiled its own program. "
            "Make it once, outside of the loop, and pass values that change as arguments.",
            CompilationWarning,
            stacklevel=stack_level(),
        )


def _describe_difference(keys: Sequence[tuple[Any, ...]], names: Sequence[str]) -> str:
    """Return a phrase that names the arguments in which signatures with the last one's tree differ."""
    same = [key[1] for key in keys if key[0] == keys[-1][0] and len(key[1]) == len(names)]
    if len(same) < 2:
        return "by the trees of the arguments"
    differ = [name for name, *entries in zip(names, *same, strict=True) if any(entry != entries[0] for entry in entries)]
    listed = ", ".join(repr(name) for name in differ[:3])
    return f"in value, shape or dtype of the arguments {listed}" if differ else "by settings of jax"


def _underlying_code(fn: Callable[..., object]) -> CodeType | None:
    """Return the code object of a function under partial applications and transformations; None for other callables."""
    for _ in range(20):
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", getattr(fn, "__wrapped__", None))
        if inner is None:
            break
        fn = inner
    return code_of(fn)


class _BoundCall(NamedTuple):
    """A program, the tree of its outputs, and its arguments: the tensors, and the other arrays and numbers."""

    program: TracedFunction
    out_tree: PyTreeDef
    tensors: list[torch.Tensor]
    others: list[ArrayLike]


class JaxFunction(Generic[_Arguments, _Result]):
    """The torch function that `jax_function` returns. `programs` is the number of signatures with a compiled program."""

    def __init__(self, fn: Callable[..., PyTree], x64: bool | None = None) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._x64 = fn, x64
        self._title = f"jax_function({getattr(fn, '__name__', type(fn).__name__)})"
        self._by_signature: dict[tuple[Any, ...], tuple[TracedFunction, PyTreeDef]] = {}
        self._by_fast_signature: dict[Hashable, tuple[CompiledCall, ForwardWithResiduals | None, PyTreeDef]] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[object, ...]:
        return JaxFunction, (self._fn, self._x64)

    def __repr__(self) -> str:
        return f"<{self._title}: {self.programs} programs>"

    @property
    def programs(self) -> int:
        return len(self._by_signature)

    @overload
    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result: ...
    @overload
    def __call__(self, *args: object, **kwargs: object) -> _Result: ...
    @disable_torch_compile
    def __call__(self, *args: object, **kwargs: object) -> PyTree:
        if _process._forked or context.dispatch is not None or is_transformed():
            return self._call_any(args, kwargs)
        tree, given = None, None if kwargs else fast_signature(args)
        if given is None:
            leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
            given = fast_signature(leaves)
            if given is None:
                return self._call_any(args, kwargs)
        described, tensors, others, _ = given
        config = _config
        settings = config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion
        key = (tree, torch.is_grad_enabled(), settings, *described)
        known = self._by_fast_signature.get(key) or self._add_fast_signature(key, args, kwargs, tensors)
        if known is None:
            return self._call_any(args, kwargs)
        call, recording, out_tree = known
        found = call.call_with_views(tensors, others)
        return out_tree.unflatten(found if recording is None else record_call(recording, found, others, *tensors))

    def _add_fast_signature(
        self, key: Hashable, args: Sequence[object], kwargs: Mapping[str, object], tensors: Sequence[torch.Tensor]
    ) -> tuple[CompiledCall, ForwardWithResiduals | None, PyTreeDef] | None:
        """Store and return the compiled call for arguments with this fast signature; None if they need the general path each time."""
        if not all(map(is_dense, tensors)) or (self._x64 is False and any(map(is_64bit, tensors))):
            return None
        found = self._bind(args, kwargs, False)
        program = found.program
        recording = residual_forward(program, tensors)
        call = program.forward_call() if recording is None else recording.forward
        if not call.takes_views or not program.out_specs:
            return None
        if len(self._by_fast_signature) >= _MAX_PROGRAMS:
            self._by_fast_signature.clear()
        self._by_fast_signature[key] = call, recording, found.out_tree
        return self._by_fast_signature[key]

    def _call_any(self, args: Sequence[object], kwargs: Mapping[str, object]) -> PyTree:
        """Call the function by the general path, which accepts all arguments and transformations."""
        if _process._forked:
            raise RuntimeError(
                f"{self._title}: this process was forked after jax had started, and jax hangs in a forked process. "
                "Start it with 'spawn' (DataLoader: multiprocessing_context='spawn')."
            )
        if context.dispatch is not None:
            return self._inline(args, kwargs)
        transformed = is_transformed()
        program, out_tree, tensors, others = self._bind(args, kwargs, transformed)
        if others:
            others = [_move_to_target(x, program.target) for x in others]
        return out_tree.unflatten(call_traced(program, others, tensors, transformed))

    def _refuse_short_storage(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
            if isinstance(leaf, torch.Tensor) and (why := why_unreadable(leaf)):
                raise ValueError(
                    f"{self._title}: argument {path_name(path[1:])!r} of shape {tuple(leaf.shape)} cannot be read: {why}. "
                    "Pass a tensor whose storage holds all its elements."
                )

    def _bind(self, args: Sequence[object], kwargs: Mapping[str, object], transformed: bool) -> _BoundCall:
        """Return the program for these arguments, and the arguments in the form in which it is called."""
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if first_unreadable([x for x in leaves if isinstance(x, torch.Tensor)]) is not None:
            self._refuse_short_storage(args, kwargs)
        if self._x64 is False:
            leaves = list(map(to_32bit, leaves))
        signature, tensors, others = _describe_leaves(leaves, transformed)
        settings = _config.jax_enable_x64, _config.jax_default_matmul_precision, _config.jax_numpy_dtype_promotion
        key = (tree, tuple(signature), *settings)
        try:
            known = self._by_signature.get(key)
        except TypeError:  # a static leaf is not hashable; the check below names it
            known = None
        program, out_tree = known or self._trace(key, leaves, args, kwargs, transformed)
        return _BoundCall(program, out_tree, tensors, others)

    def _inline(self, args: Sequence[object], kwargs: Mapping[str, object]) -> PyTree:
        """Call `fn` on traced values, as a part of the program that `module_function` or `JaxTrainStep` traces."""
        args, kwargs = jax.tree.map(as_array, (args, kwargs), is_leaf=lambda x: isinstance(x, TracedTensor))
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        flag = _config.jax_enable_x64 if context.jax_x64 is None else context.jax_x64
        with scope(keeps_64bit(self._x64, flag, arrays)):  # a train step keeps 64-bit types with any flag
            outs, tree = _flatten_outputs(self._title, self._fn(*args, **kwargs))
            return as_traced(tree.unflatten([jax.numpy.asarray(x) if not isinstance(x, jax.Array) else x for x in outs]))

    def _trace(
        self, key: tuple[Any, ...], leaves: Sequence[Any], args: Sequence[object], kwargs: Mapping[str, object], transformed: bool
    ) -> tuple[TracedFunction, PyTreeDef]:
        """Check the arguments, and trace `fn` for their signature."""
        named = [(path_name(path[1:]), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]]
        for name, leaf in named:
            self._check(name, leaf)
        place = self._execution_target(named)
        for name, leaf in named:
            if isinstance(leaf, torch.Tensor) and (leaf.is_meta or leaf.layout is not torch.strided):
                to_jax({f"{self._title}: {name}": leaf.detach()})
        with self._lock:
            if key not in self._by_signature:
                kinds = list(map(_leaf_kind, leaves))
                tensors = [jax.ShapeDtypeStruct(tuple(x.shape), numpy_dtype(x.dtype)) for x in leaves if isinstance(x, torch.Tensor)]
                others = [_abstract(_move_to_target(x, place)) for x, kind in zip(leaves, kinds, strict=True) if kind == "other"]
                orders = [None if transformed else _dim_order(x) for x in leaves if isinstance(x, torch.Tensor)]
                flat = _FlatFunction(self._title, self._fn, key[0], leaves, kinds)
                program = TracedFunction(flat, tensors, others, place, orders)
                while len(self._by_signature) >= _MAX_PROGRAMS:
                    del self._by_signature[next(iter(self._by_signature))]
                    self._by_fast_signature.clear()
                self._by_signature[key] = program, flat.out_tree
                _warn_if_recompiling(self, [name for name, _ in named])
            return self._by_signature[key]

    def _check(self, name: str, leaf: object) -> None:
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"{self._title}: argument {name!r} is a tracer ({leaf.aval}); expected a tensor. Inside jax's jit, grad or vmap call the "
                "JAX function itself, which is its `__wrapped__`."
            )
        if _leaf_kind(leaf) == "static":
            try:
                hash(leaf)
            except TypeError:
                raise TypeError(
                    f"{self._title}: argument {name!r} is a {type(leaf).__name__}, which is not hashable; expected a tensor, an array, "
                    "a number, or a hashable object. Register its type as a pytree, or close over it."
                ) from None
            place = path_to_instance(leaf, torch.Tensor)
            if place is not None:
                raise TypeError(
                    f"{self._title}: argument {name!r} is a {type(leaf).__name__} that holds a tensor at {place!r}, but is no jax pytree: "
                    "the tensor's values would be constants of the program. Pass its tensors, or register its type as a pytree."
                )

    def _execution_target(self, named: Sequence[tuple[str, object]]) -> ExecutionTarget:
        """Return the device of the tensors, else of the jax arrays, else jax's default; and whether 64-bit types are kept."""
        tensors = [(name, x) for name, x in named if isinstance(x, torch.Tensor)]
        arrays = [x for _, x in named if isinstance(x, jax.Array)]
        for name, x in tensors:
            if x.device != tensors[0][1].device:
                raise ValueError(
                    f"{self._title}: argument {tensors[0][0]!r} is on {tensors[0][1].device}, but {name!r} on {x.device}; expected one "
                    "device. Move one of them with .to()."
                )
        device = device_of(tensors[0][1]) if tensors else _first_device(arrays)
        return ExecutionTarget(device, keeps_64bit(self._x64, _config.jax_enable_x64, [*(x for _, x in tensors), *arrays]))


class _FlatFunction:
    """`fn` as a function of its dynamic leaves, tensors first, that returns a list of arrays.

    out_tree: the tree of the outputs; set by the first call.
    """

    out_tree: PyTreeDef

    def __init__(self, title: str, fn: Callable[..., PyTree], tree: PyTreeDef, leaves: Sequence[object], kinds: Sequence[str]) -> None:
        self._title, self._fn, self._tree = title, fn, tree
        self._static = {i: leaf for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)) if kind == "static"}
        self._dynamic_positions = [i for wanted in ("tensor", "other") for i, kind in enumerate(kinds) if kind == wanted]

    def __call__(self, *arrays: jax.Array) -> list[ArrayLike]:
        leaves = self._static | dict(zip(self._dynamic_positions, arrays, strict=True))
        args, kwargs = self._tree.unflatten([leaves[i] for i in range(len(leaves))])
        outs, self.out_tree = _flatten_outputs(self._title, self._fn(*args, **kwargs))
        return outs


def _flatten_outputs(title: str, result: PyTree) -> tuple[list[ArrayLike], PyTreeDef]:
    """Return the leaves of a result and their tree. Raise an error if a leaf cannot become a tensor."""
    outs, tree = jax.tree_util.tree_flatten_with_path(result)
    for path, out in outs:
        if not isinstance(out, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            place = f"output {path_name(path)!r}" if path else "the output"
            raise TypeError(
                f"{title}: {place} is a {type(out).__name__}; expected arrays, numbers or None. "
                "Leave it out, or compute it in jax from the arguments."
            )
    return [out for _, out in outs], tree


def _describe_leaves(leaves: Sequence[Any], transformed: bool) -> tuple[list[Hashable], list[torch.Tensor], list[ArrayLike]]:
    """Return the signature of the leaves, the tensors among them, and the other arrays and numbers."""
    signature, tensors, others = [], [], []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            signature.append((leaf.shape, leaf.dtype, leaf.device, None if transformed else _dim_order(leaf)))
            continue
        kind = _leaf_kind(leaf)
        if kind == "static":
            signature.append((type(leaf), leaf))
            continue
        others.append(leaf)
        shape = None if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic) else (leaf.shape, leaf.dtype)
        signature.append((type(leaf), shape, getattr(leaf, "weak_type", False)))
    return signature, tensors, others


def _dim_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in which the tensor is contiguous; None if it is row-major, or needs a copy."""
    return None if tensor.layout is not torch.strided or tensor.is_contiguous() else dense_order(tensor)


def _leaf_kind(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    return "other" if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | complex) else "static"


def _first_device(arrays: Sequence[jax.Array]) -> Device:
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):  # also within a jax trace
        return next(iter((arrays or [jax.numpy.zeros(())])[0].devices()))


def _move_to_target(leaf: ArrayLike, place: ExecutionTarget) -> jax.Array | complex:
    """Return a leaf that is no tensor on the program's device. NumPy arrays are copied, because the caller may change them."""
    if isinstance(leaf, np.ndarray | np.generic):
        with scope(place.keeps_64bit), jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return jax.device_put(np.array(leaf), place.device)
    if isinstance(leaf, jax.Array) and leaf.devices() != {place.device}:
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return jax.device_put(leaf, place.device)
    return leaf


def _abstract(leaf: jax.Array | complex) -> ArgumentSpec:
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False)) if isinstance(leaf, jax.Array) else leaf
    )
