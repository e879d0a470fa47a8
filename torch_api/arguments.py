"""Further arguments of a step, and a torch closure as a JAX function for transformations that search along a line."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge._compiler.spec import NO_EXTRA, Extra, Same
from bridge._interop.dlpack import to_jax, with_memory
from bridge._interop.tensor_storage import shortage
from bridge._names import Path, path_name, unnest

from ._params.record import Leaf

_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64, torch.int64: torch.int32}
_NARROW_NUMPY = {np.dtype(wide): np.dtype(narrow) for wide, narrow in (("f8", "f4"), ("c16", "c8"), ("i8", "i4"))}


def are_wide(leaves: Iterable[Leaf]) -> bool:
    """Whether all parameters of floats have 64 bits; frozen ones may be of other kinds."""
    floats = [leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point or leaf.dtype.is_complex]
    return all(dtype in (torch.float64, torch.complex128) for dtype in floats)


class Arguments:
    """The keyword arguments of one step, ready for the compiled program.

    Tensors and numbers become arrays, of 32 bits unless all parameters have 64, as in pure JAX; what is neither stays as it
    is and is known by identity. A dict by the names of all parameters, dotted or nested, becomes the nested dict of the
    live ones.
    """

    def __init__(self, given: Mapping[str, Any], leaves: Sequence[Leaf], skeleton: Sequence[Path]) -> None:
        self._paths = {".".join(path): path for path in skeleton}
        self._names = {id(leaf): ".".join(path) for leaf, path in zip(leaves, skeleton, strict=True)}
        self._wide = are_wide(leaves)
        self._given = {name: self._by_parameter(name, value) for name, value in given.items()}
        self.names = tuple(sorted(given))

    def _by_parameter(self, argument: str, value: Any) -> Any:
        flat = unnest(value) if isinstance(value, Mapping) else {}
        whole = flat and flat.keys() == self._paths.keys()
        return _ByParameter(argument, flat) if whole else jax.tree.map(functools.partial(self._array, argument), value)

    def of(self, leaves: Sequence[Leaf]) -> tuple[Extra, list[Any]]:
        """The arguments for these live leaves: what is static about them, and the arrays."""
        alive = {self._names[id(leaf)] for leaf in leaves}
        tree = {name: self._nested(value, alive) if isinstance(value, _ByParameter) else value for name, value in self._given.items()}
        flat, structure = jax.tree.flatten(tree)
        arrays = [x for x in flat if not isinstance(x, Same)]
        signature = tuple(x if isinstance(x, Same) else (tuple(x.shape), str(x.dtype)) for x in flat)
        return (Extra(structure, signature), arrays) if tree else (NO_EXTRA, [])

    def _nested(self, value: _ByParameter, alive: set[str]) -> dict[str, Any]:
        root: dict[str, Any] = {}
        for name, path in self._paths.items():
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self._array(f"{value.argument}[{name!r}]", value.by_name[name]) if name in alive else None
        return root

    def _array(self, argument: str, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if why := shortage(x):
                raise ValueError(f"step: the argument {argument} cannot be read: {why}. Nothing was updated: pass a tensor that is whole.")
            narrow = None if self._wide else _NARROW.get(x.dtype)
            return to_jax(x.detach() if narrow is None else x.detach().to(narrow), copy=None)
        if not isinstance(x, bool | int | float | np.ndarray | np.generic | jax.Array):
            return x if isinstance(x, Same) else Same(x)
        if isinstance(x, jax.Array):
            return x
        array = np.asarray(x)
        return array if self._wide else array.astype(_NARROW_NUMPY.get(array.dtype, array.dtype))


class _ByParameter:
    def __init__(self, argument: str, by_name: dict[str, Any]) -> None:
        self.argument, self.by_name = argument, by_name


class Closure:
    """A torch closure during one step, as the differentiable JAX function `value_fn` of the nested dict of the live parameters.

    The compiled update calls back into torch: each parameter looks at the trial values while the closure runs. Only the
    first derivative exists. Programs know a closure by a number, so they serve any, and hold none.
    """

    def __init__(self, closure: Callable[[], Any], leaves: Sequence[Leaf], skeleton: Sequence[Path]) -> None:
        self._closure = closure
        self._leaves = {".".join(path): leaf for leaf, path in zip(leaves, skeleton, strict=True)}
        self.error: BaseException | None = None
        self._token = next(_tokens)
        _closures[self._token] = self

    @property
    def value_fn(self) -> Any:
        return jax.tree_util.Partial(_value, np.int32(self._token))

    def run(self, params: Any) -> tuple[np.ndarray, Any]:
        """On the host: value and gradient at the trial values; what the closure raises is kept for `step` to raise, and reads as NaN."""
        flat, structure = jax.tree_util.tree_flatten_with_path(params)
        trial = [(self._leaves[path_name(path)].param, torch.from_numpy(np.array(x))) for path, x in flat]
        kept = [(p, p.data, p.grad) for p, _ in trial]
        try:
            for p, x in trial:
                p.data, p.grad = x.to(p.device, p.dtype).view_as(p), None
            with torch.enable_grad():
                loss = self._closure()
            grads = [torch.zeros_like(p) if p.grad is None else with_memory(p.grad.detach()).clone() for p, _ in trial]
        except BaseException as error:  # noqa: BLE001 - it would be lost among the threads of XLA
            self.error = error
            loss, grads = torch.nan, [torch.full_like(p, torch.nan) for p, _ in trial]
        finally:
            for p, data, grad in kept:
                p.data, p.grad = data, grad
        value = np.asarray(loss.item() if isinstance(loss, torch.Tensor) else loss, _loss_type(params))
        arrays = [g.to("cpu", torch.from_numpy(np.empty(0, x.dtype)).dtype).numpy() for g, (_, x) in zip(grads, flat, strict=True)]
        return value, structure.unflatten(arrays)


_tokens = itertools.count()
_closures: weakref.WeakValueDictionary[int, Closure] = weakref.WeakValueDictionary()


def _loss_type(params: Any) -> Any:
    """The type of a loss of these parameters, as a JAX function would give it."""
    return np.float64 if any(x.dtype in (np.float64, np.complex128) for x in jax.tree.leaves(params)) else np.float32


def _value(token: Any, params: Any, **_: Any) -> Any:
    return _differentiable(token, params)


def _value_and_grad(token: Any, params: Any) -> tuple[Any, Any]:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (np.zeros((), _loss_type(params)), params))

    def call(number: Any, coded: Any) -> Any:
        trial = jax.tree.map(_decoded, coded, like[1])
        return jax.tree.map(_words, _closures[int(number)].run(trial))

    # jax converts what goes in and comes out by the x64 flag of whichever thread runs the callback, so 64 bits go as words.
    coded = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(_reals(x), np.uint32) if _is_wide(x) else x, params)
    results = jax.pure_callback(call, jax.tree.map(_coded, like), token, coded)
    return jax.tree.map(lambda x, to: _joined(jax.lax.bitcast_convert_type(x, np.float64), to) if _is_wide(to) else x, results, like)


def _is_wide(x: Any) -> bool:
    return x.dtype in (np.float64, np.complex128)


def _reals(x: Any) -> Any:
    return jax.numpy.stack([x.real, x.imag], -1) if x.dtype == np.complex128 else x


def _joined(x: Any, like: Any) -> Any:
    return jax.lax.complex(x[..., 0], x[..., 1]) if like.dtype == np.complex128 else x


def _coded(like: Any) -> Any:
    """What stands for such an array while it crosses."""
    words = {np.dtype(np.float64): (2,), np.dtype(np.complex128): (2, 2)}.get(like.dtype)
    return like if words is None else jax.ShapeDtypeStruct((*like.shape, *words), np.uint32)


def _words(x: np.ndarray) -> np.ndarray:
    """An array of the host as it crosses."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint32).reshape(_coded(x).shape) if _is_wide(x) else x


def _decoded(x: Any, like: Any) -> np.ndarray:
    """The array of the host that has crossed."""
    return np.ascontiguousarray(x).reshape(-1).view(like.dtype).reshape(like.shape) if _is_wide(like) else np.asarray(x)


_differentiable = jax.custom_vjp(lambda token, params: _value_and_grad(token, params)[0])
_differentiable.defvjp(_value_and_grad, lambda grads, cotangent: (None, jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads)))
