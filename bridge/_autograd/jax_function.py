"""`jax_function`, which makes a differentiable torch function of a JAX function."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.core import Tracer
from jax.typing import ArrayLike

from bridge import _process
from bridge._compat.python import code_of
from bridge._compat.types import Device, PyTreeDef
from bridge._interop.containers import holds
from bridge._interop.dlpack import dense_order, device_of, to_jax
from bridge._interop.dtypes import is_wide, keeps, narrow, numpy_dtype
from bridge._interop.tensor_storage import first_short, shortage
from bridge._ir.types import PyTree
from bridge._names import path_name
from bridge._process import not_traced
from bridge._process import x64 as scope
from bridge._tracing.context import TRACE
from bridge._tracing.tensor import Traced, as_array, as_traced
from bridge._warnings import CompilationWarning, stack_level

from .autograd_functions import _apply, _record, _recording, _transformed
from .fast_signature import is_dense, plain
from .traced_function import Call, Place, Program, Recording, Spec

_PROGRAMS_KEPT = 512  # of one function; the oldest is dropped
_config: Any = jax.config


def jax_function(fn: Callable[..., PyTree], *, x64: bool | None = None) -> JaxFunction:
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
    """
    return JaxFunction(fn, x64)


_MANY = 9  # the number of signatures that triggers a warning: a loop may need a new one in each call
_compiled: weakref.WeakKeyDictionary[CodeType, _Compiled] = weakref.WeakKeyDictionary()


class _Compiled:
    """The functions of one code object that have compiled a program: how many were created, and which still exist."""

    def __init__(self) -> None:
        self.made = 0
        self.functions: weakref.WeakSet[JaxFunction] = weakref.WeakSet()
        self.was_said = False


def _count(function: JaxFunction, names: Sequence[str]) -> None:
    """Warn at the ninth signature of a function, and at the ninth function that is made from one code object and dropped."""
    if function.programs == _MANY:
        how = _difference(list(function._known), names)
        warnings.warn(
            f"{function._title} has compiled {_MANY} programs, one for each signature, which differ {how}. Pass numbers that change "
            "as tensors or floats, pad tensors to a few shapes, and create functions that you pass once, outside of the loop.",
            CompilationWarning,
            stacklevel=stack_level(),
        )
    code = _code(function._fn)
    if code is None:
        return
    of_code = _compiled.setdefault(code, _Compiled())
    if function in of_code.functions:
        return
    of_code.made += 1
    of_code.functions.add(function)
    if not of_code.was_said and of_code.made - len(of_code.functions) >= _MANY - 1:
        of_code.was_said = True
        warnings.warn(
            f"{function._title} was made anew {_MANY} times or more from one function, and each compiled its own program. Make it "
            "once, outside of the loop, and pass values that change as arguments.",
            CompilationWarning,
            stacklevel=stack_level(),
        )


def _difference(keys: Sequence[tuple[Any, ...]], names: Sequence[str]) -> str:
    """Return a phrase that names the arguments in which signatures with the last one's tree differ."""
    same = [key[1] for key in keys if key[0] == keys[-1][0] and len(key[1]) == len(names)]
    if len(same) < 2:
        return "by the trees of the arguments"
    differ = [name for name, *entries in zip(names, *same, strict=True) if any(entry != entries[0] for entry in entries)]
    listed = ", ".join(repr(name) for name in differ[:3])
    return f"in value, shape or dtype of the arguments {listed}" if differ else "by settings of jax"


def _code(fn: Callable[..., object]) -> CodeType | None:
    """Return the code object of a function under partial applications and transformations; None for other callables."""
    for _ in range(20):
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", getattr(fn, "__wrapped__", None))
        if inner is None:
            break
        fn = inner
    return code_of(fn)


class _ProgramCall(NamedTuple):
    """A program, the tree of its outputs, and its arguments: the tensors, and the other arrays and numbers."""

    program: Program
    out_tree: PyTreeDef
    tensors: list[torch.Tensor]
    others: list[ArrayLike]


class JaxFunction:
    """The torch function that `jax_function` returns. `programs` is the number of signatures with a compiled program."""

    def __init__(self, fn: Callable[..., PyTree], x64: bool | None = None) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._x64 = fn, x64
        self._title = f"jax_function({getattr(fn, '__name__', type(fn).__name__)})"
        self._known: dict[tuple[Any, ...], tuple[Program, PyTreeDef]] = {}
        self._quick: dict[Hashable, tuple[Call, Recording | None, PyTreeDef]] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[object, ...]:
        return JaxFunction, (self._fn, self._x64)

    def __repr__(self) -> str:
        return f"<{self._title}: {self.programs} programs>"

    @property
    def programs(self) -> int:
        return len(self._known)

    @not_traced
    def __call__(self, *args: object, **kwargs: object) -> PyTree:
        if _process._forked or TRACE.dispatch is not None or _transformed():
            return self._any(args, kwargs)
        tree, given = None, None if kwargs else plain(args)
        if given is None:
            leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
            given = plain(leaves)
            if given is None:
                return self._any(args, kwargs)
        described, tensors, addresses, others, _ = given
        config = _config
        settings = config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion
        key = (tree, torch.is_grad_enabled(), settings, *described)
        known = self._quick.get(key) or self._remember(key, args, kwargs, tensors)
        if known is None:
            return self._any(args, kwargs)
        call, recording, out_tree = known
        found = call.at(addresses, others)
        return out_tree.unflatten(found if recording is None else _record(recording, found, others, *tensors))

    def _remember(
        self, key: Hashable, args: Sequence[object], kwargs: Mapping[str, object], tensors: Sequence[torch.Tensor]
    ) -> tuple[Call, Recording | None, PyTreeDef] | None:
        """Store and return the compiled call for arguments with this fast signature; None if they need the general path each time."""
        if not all(map(is_dense, tensors)) or (self._x64 is False and any(map(is_wide, tensors))):
            return None
        found = self._found(args, kwargs, False)
        program = found.program
        recording = _recording(program, tensors)
        call = program.plain() if recording is None else recording.forward
        if not call.reads_addresses or not program.outs:
            return None
        if len(self._quick) >= _PROGRAMS_KEPT:
            self._quick.clear()
        self._quick[key] = call, recording, found.out_tree
        return self._quick[key]

    def _any(self, args: Sequence[object], kwargs: Mapping[str, object]) -> PyTree:
        """Call the function by the general path, which accepts all arguments and transformations."""
        if _process._forked:
            raise RuntimeError(
                f"{self._title}: this process was forked after jax had started, and jax hangs in a forked process. "
                "Start it with 'spawn' (DataLoader: multiprocessing_context='spawn')."
            )
        if TRACE.dispatch is not None:
            return self._traced(args, kwargs)
        transformed = _transformed()
        program, out_tree, tensors, others = self._found(args, kwargs, transformed)
        if others:
            others = [_settled(x, program.place) for x in others]
        return out_tree.unflatten(_apply(program, others, tensors, transformed))

    def _refuse_short(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
            if isinstance(leaf, torch.Tensor) and (why := shortage(leaf)):
                raise ValueError(
                    f"{self._title}: argument {path_name(path[1:])!r} of shape {tuple(leaf.shape)} cannot be read: {why}. "
                    "Pass a tensor whose storage holds all its elements."
                )

    def _found(self, args: Sequence[object], kwargs: Mapping[str, object], transformed: bool) -> _ProgramCall:
        """Return the program for these arguments, and the arguments in the form in which it is called."""
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if first_short([x for x in leaves if isinstance(x, torch.Tensor)]) is not None:
            self._refuse_short(args, kwargs)
        if self._x64 is False:
            leaves = list(map(narrow, leaves))
        signature, tensors, others = _described(leaves, transformed)
        settings = _config.jax_enable_x64, _config.jax_default_matmul_precision, _config.jax_numpy_dtype_promotion
        key = (tree, tuple(signature), *settings)
        try:
            known = self._known.get(key)
        except TypeError:  # a static leaf is not hashable; the check below names it
            known = None
        program, out_tree = known or self._program(key, leaves, args, kwargs, transformed)
        return _ProgramCall(program, out_tree, tensors, others)

    def _traced(self, args: Sequence[object], kwargs: Mapping[str, object]) -> PyTree:
        """Call `fn` on traced values, as a part of the program that `module_function` or `JaxTrainStep` traces."""
        args, kwargs = jax.tree.map(as_array, (args, kwargs), is_leaf=lambda x: isinstance(x, Traced))
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        flag = _config.jax_enable_x64 if TRACE.x64 is None else TRACE.x64
        with scope(keeps(self._x64, flag, arrays)):  # a train step keeps 64-bit types with any flag
            outs, tree = _outputs(self._title, self._fn(*args, **kwargs))
            return as_traced(tree.unflatten([jax.numpy.asarray(x) if not isinstance(x, jax.Array) else x for x in outs]))

    def _program(
        self, key: tuple[Any, ...], leaves: Sequence[Any], args: Sequence[object], kwargs: Mapping[str, object], transformed: bool
    ) -> tuple[Program, PyTreeDef]:
        """Check the arguments, and trace `fn` for their signature."""
        named = [(path_name(path[1:]), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]]
        for name, leaf in named:
            self._check(name, leaf)
        place = self._place(named)
        for name, leaf in named:
            if isinstance(leaf, torch.Tensor) and (leaf.is_meta or leaf.layout is not torch.strided):
                to_jax({f"{self._title}: {name}": leaf.detach()})
        with self._lock:
            if key not in self._known:
                kinds = list(map(_kind, leaves))
                tensors = [jax.ShapeDtypeStruct(tuple(x.shape), numpy_dtype(x.dtype)) for x in leaves if isinstance(x, torch.Tensor)]
                others = [_abstract(_settled(x, place)) for x, kind in zip(leaves, kinds, strict=True) if kind == "other"]
                orders = [None if transformed else _order(x) for x in leaves if isinstance(x, torch.Tensor)]
                flat = _Flat(self._title, self._fn, key[0], leaves, kinds)
                program = Program(flat, tensors, others, place, orders)
                while len(self._known) >= _PROGRAMS_KEPT:
                    del self._known[next(iter(self._known))]
                    self._quick.clear()
                self._known[key] = program, flat.out_tree
                _count(self, [name for name, _ in named])
            return self._known[key]

    def _check(self, name: str, leaf: object) -> None:
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"{self._title}: argument {name!r} is a tracer ({leaf.aval}); expected a tensor. Inside jax's jit, grad or vmap call the "
                "JAX function itself, which is its `__wrapped__`."
            )
        if _kind(leaf) == "static":
            try:
                hash(leaf)
            except TypeError:
                raise TypeError(
                    f"{self._title}: argument {name!r} is a {type(leaf).__name__}, which is not hashable; expected a tensor, an array, "
                    "a number, or a hashable object. Register its type as a pytree, or close over it."
                ) from None
            place = holds(leaf, torch.Tensor)
            if place is not None:
                raise TypeError(
                    f"{self._title}: argument {name!r} is a {type(leaf).__name__} that holds a tensor at {place!r}, but is no jax pytree: "
                    "the tensor's values would be constants of the program. Pass its tensors, or register its type as a pytree."
                )

    def _place(self, named: Sequence[tuple[str, object]]) -> Place:
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
        return Place(device, keeps(self._x64, _config.jax_enable_x64, [*(x for _, x in tensors), *arrays]))


class _Flat:
    """`fn` as a function of its dynamic leaves, tensors first, that returns a list of arrays.

    out_tree: the tree of the outputs; set by the first call.
    """

    out_tree: PyTreeDef

    def __init__(self, title: str, fn: Callable[..., PyTree], tree: PyTreeDef, leaves: Sequence[object], kinds: Sequence[str]) -> None:
        self._title, self._fn, self._tree = title, fn, tree
        self._static = {i: leaf for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)) if kind == "static"}
        self._at = [i for wanted in ("tensor", "other") for i, kind in enumerate(kinds) if kind == wanted]

    def __call__(self, *arrays: jax.Array) -> list[ArrayLike]:
        leaves = self._static | dict(zip(self._at, arrays, strict=True))
        args, kwargs = self._tree.unflatten([leaves[i] for i in range(len(leaves))])
        outs, self.out_tree = _outputs(self._title, self._fn(*args, **kwargs))
        return outs


def _outputs(title: str, result: PyTree) -> tuple[list[ArrayLike], PyTreeDef]:
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


def _described(leaves: Sequence[Any], transformed: bool) -> tuple[list[Hashable], list[torch.Tensor], list[ArrayLike]]:
    """Return the signature of the leaves, the tensors among them, and the other arrays and numbers."""
    signature, tensors, others = [], [], []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            signature.append((leaf.shape, leaf.dtype, leaf.device, None if transformed else _order(leaf)))
            continue
        kind = _kind(leaf)
        if kind == "static":
            signature.append((type(leaf), leaf))
            continue
        others.append(leaf)
        shape = None if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic) else (leaf.shape, leaf.dtype)
        signature.append((type(leaf), shape, getattr(leaf, "weak_type", False)))
    return signature, tensors, others


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in which the tensor is contiguous; None if it is row-major, or needs a copy."""
    return None if tensor.layout is not torch.strided or tensor.is_contiguous() else dense_order(tensor)


def _kind(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    return "other" if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | complex) else "static"


def _first_device(arrays: Sequence[jax.Array]) -> Device:
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):  # also within a jax trace
        return next(iter((arrays or [jax.numpy.zeros(())])[0].devices()))


def _settled(leaf: ArrayLike, place: Place) -> jax.Array | complex:
    """Return a leaf that is no tensor on the program's device. NumPy arrays are copied, because the caller may change them."""
    if isinstance(leaf, np.ndarray | np.generic):
        with scope(place.wide), jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return jax.device_put(np.array(leaf), place.device)
    if isinstance(leaf, jax.Array) and leaf.devices() != {place.device}:
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return jax.device_put(leaf, place.device)
    return leaf


def _abstract(leaf: jax.Array | complex) -> Spec:
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False)) if isinstance(leaf, jax.Array) else leaf
    )
