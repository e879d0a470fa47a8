"""A JAX function as a differentiable torch function."""

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

_PROGRAMS_KEPT = 512  # of one function; the oldest goes
_config: Any = jax.config


def jax_function(fn: Callable[..., PyTree], *, x64: bool | None = None) -> JaxFunction:
    """A JAX function as a torch function of tensors and pytrees, differentiable to any order, compiled once per signature.

    Args:
      fn: a pure function of arrays; `jax.grad`, `lax.scan`, `custom_vjp` and so on may stand in it. It runs once for each
        signature, traced: what it closes over is fixed then.
      x64: None: jax keeps 64-bit types in a program that is given a tensor or a jax array of 64 bits (within it `jnp.ones(3)`
        is then float64 too, as under `jax.enable_x64`), and otherwise does as its flag says. True: it keeps them in all.
        False: tensors of 64 bits are converted to 32, as jax does by itself: for class labels in int64 among float32.

    Returns:
      A function of `fn`'s arguments, any pytrees of:
        tensors: dynamic. Those of real and complex numbers are differentiable, integers and booleans are not.
        jax arrays (random keys too) and numpy arrays, Python floats and complex numbers: dynamic, not differentiable.
          numpy arrays become what jax makes of them. Floats change without a new program.
        ints, bools, strings, functions, all else that is hashable: static, part of the signature.
      It returns the tree that `fn` returns, with tensors for arrays and numbers; random keys stay jax arrays.

    The ninth signature of one function warns (`torch_api.CompilationWarning`), and so does the ninth function that is made of one code
    after the others are gone.

    The signature is the tree, shapes, dtypes, device, dimension order in memory, static leaves, and of jax's settings the
    precision of matrix products, promotion and x64. Gradients of another set of arguments compile another program.

    Memory: arguments are read where they lie, in any order of dimensions; what starts unaligned, has gaps or overlaps is
    copied on its device. An unaligned `torch.nn.Parameter` on the CPU (a weight from a file) that owns its storage alone is moved once,
    instead. Outputs are new memory that torch sees without a copy, also where `fn` hands an argument through.
    When the call returns on the CPU, it has read its arguments, so they may change; on a GPU torch's stream waits. Residuals
    are kept by `save_for_backward` (hooks see them; torch's error is raised if a tensor that is needed changed meanwhile),
    but for those that a few elementwise operations make of the arguments, 4096 elements in all, which the backward makes anew;
    nothing is kept under `torch.no_grad` or where no tensor requires grad. With `create_graph=True` the backward computes anew from
    the arguments and is itself such a function.

    `torch.func` (grad, vjp, jvp, vmap, and combinations) and forward mode work where jax can transform `fn`; under vmap a random
    key is the same for all. torch's old vmap (`is_grads_batched`, `vectorize=True`) is an error. Under autocast it computes in the
    types that it is given, like `torch.amp.custom_fwd` without `cast_inputs`. Threads may share it. torch.compile breaks its graph
    here. It can be pickled if `fn` can; programs stay behind. Within `module_function` and `JaxTrainStep` `fn` becomes a part of
    their program, with their types of 64 bits.

    Raises:
      TypeError: an argument is a tracer (call `fn` itself inside jax), not hashable, or an object that holds tensors and is no pytree;
        an output is no array.
      ValueError: tensors lie on several devices, are sparse or meta, or their storage was freed.
      RuntimeError: in a process forked after jax started; jax does not see the tensors' device.
      FloatingPointError: a result, or what is kept for a backward, has NaN under `jax_debug_nans`, or infinity under `jax_debug_infs`.
      And whatever `fn` raises.

    Sources: https://docs.jax.dev/en/latest/_autosummary/jax.vjp.html, https://docs.pytorch.org/docs/stable/notes/extending.func.html.
    """
    return JaxFunction(fn, x64)


_MANY = 9  # so many signatures are one for each call of some loops: that is said
_compiled: weakref.WeakKeyDictionary[CodeType, _Compiled] = weakref.WeakKeyDictionary()


class _Compiled:
    """The functions with one code that have compiled a program: how many there were in all, and those that still exist."""

    def __init__(self) -> None:
        self.made = 0
        self.functions: weakref.WeakSet[JaxFunction] = weakref.WeakSet()
        self.was_said = False


def _count(function: JaxFunction, names: Sequence[str]) -> None:
    """Warn where a function compiles for the ninth signature, or where it is the ninth that is made of one code and soon dropped."""
    if function.programs == _MANY:
        how = _difference(list(function._known), names)
        warnings.warn(
            f"{function._title} has compiled {_MANY} programs, one for each signature, which differ {how}. Pass numbers that change "
            "as tensors or floats, pad tensors to a few shapes, and pass functions that are made once.",
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
            f"{function._title} was made anew {_MANY} times or more from one function, and each compiled a program of its own. Make it "
            "once, outside of the loop, and pass what changes as an argument.",
            CompilationWarning,
            stacklevel=stack_level(),
        )


def _difference(keys: Sequence[tuple[Any, ...]], names: Sequence[str]) -> str:
    """Which arguments differ between signatures that have the tree of the last one."""
    same = [key[1] for key in keys if key[0] == keys[-1][0] and len(key[1]) == len(names)]
    if len(same) < 2:
        return "by the trees of the arguments"
    differ = [name for name, *entries in zip(names, *same, strict=True) if any(entry != entries[0] for entry in entries)]
    listed = ", ".join(repr(name) for name in differ[:3])
    return f"in value, shape or dtype of the arguments {listed}" if differ else "by settings of jax"


def _code(fn: Callable[..., object]) -> CodeType | None:
    """The code that a function was made of, beneath partial applications and transformations; None for other callables."""
    for _ in range(20):
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", getattr(fn, "__wrapped__", None))
        if inner is None:
            break
        fn = inner
    return code_of(fn)


class _ProgramCall(NamedTuple):
    """A program, the tree of its outputs, and the arguments that it is called with: tensors, and the other arrays and numbers."""

    program: Program
    out_tree: PyTreeDef
    tensors: list[torch.Tensor]
    others: list[ArrayLike]


class JaxFunction:
    """What `jax_function` returns; `programs` counts the signatures that it keeps."""

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
        """What the plain arguments with this key need; None if they must go the general way each time."""
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
        """A call with whatever arguments, under whatever transformation."""
        if _process._forked:
            raise RuntimeError(
                f"{self._title}: this process was forked after jax had started, and jax hangs in such a child. "
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
                    "Pass a tensor whose storage is whole."
                )

    def _found(self, args: Sequence[object], kwargs: Mapping[str, object], transformed: bool) -> _ProgramCall:
        """The program for these arguments, and what it is called with."""
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
        except TypeError:  # a static leaf without a hash, which is named below
            known = None
        program, out_tree = known or self._program(key, leaves, args, kwargs, transformed)
        return _ProgramCall(program, out_tree, tensors, others)

    def _traced(self, args: Sequence[object], kwargs: Mapping[str, object]) -> PyTree:
        """Within torch code that jax traces (`module_function`, `JaxTrainStep`): `fn` of the arrays is a part of that program."""
        args, kwargs = jax.tree.map(as_array, (args, kwargs), is_leaf=lambda x: isinstance(x, Traced))
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        flag = _config.jax_enable_x64 if TRACE.x64 is None else TRACE.x64
        with scope(keeps(self._x64, flag, arrays)):  # a train step itself keeps 64 bits, whatever the flag says
            outs, tree = _outputs(self._title, self._fn(*args, **kwargs))
            return as_traced(tree.unflatten([jax.numpy.asarray(x) if not isinstance(x, jax.Array) else x for x in outs]))

    def _program(
        self, key: tuple[Any, ...], leaves: Sequence[Any], args: Sequence[object], kwargs: Mapping[str, object], transformed: bool
    ) -> tuple[Program, PyTreeDef]:
        """Check what is given, and trace `fn` for it."""
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
                f"{self._title}: argument {name!r} is a tracer ({leaf.aval}); expected a tensor. Inside jit, grad or vmap of jax call "
                "the function itself, which is its `__wrapped__`."
            )
        if _kind(leaf) == "static":
            try:
                hash(leaf)
            except TypeError:
                raise TypeError(
                    f"{self._title}: argument {name!r} is a {type(leaf).__name__}, which has no hash; expected a tensor, an array, a "
                    "number, or something hashable. Register its type as a pytree, or close over it."
                ) from None
            place = holds(leaf, torch.Tensor)
            if place is not None:
                raise TypeError(
                    f"{self._title}: argument {name!r} is a {type(leaf).__name__} that holds a tensor at {place!r}, and it is no pytree to "
                    "jax: the tensor's values would be constants of the program. Pass its tensors, or register its type as a pytree."
                )

    def _place(self, named: Sequence[tuple[str, object]]) -> Place:
        """The device of the tensors, else of the jax arrays, else jax's own; and whether types of 64 bits are there to keep."""
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
    """`fn` of the arrays among its leaves, tensors first, to the arrays among its outputs.

    out_tree: the tree of the outputs, once it was called.
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
    """What a function returned, as leaves, each of which can be a tensor, and their tree."""
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
    """What of each leaf belongs to the signature; the tensors; the other arrays and numbers."""
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
    """The order of dimensions in which the memory is contiguous; None where it is as it is, or needs a copy."""
    return None if tensor.layout is not torch.strided or tensor.is_contiguous() else dense_order(tensor)


def _kind(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    return "other" if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | complex) else "static"


def _first_device(arrays: Sequence[jax.Array]) -> Device:
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):  # also in a function that jax traces
        return next(iter((arrays or [jax.numpy.zeros(())])[0].devices()))


def _settled(leaf: ArrayLike, place: Place) -> jax.Array | complex:
    """A leaf that is no tensor, where the program runs, and such that nobody changes it."""
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
