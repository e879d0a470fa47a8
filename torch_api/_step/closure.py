"""A torch closure as a JAX function that a compiled update calls, for line searches."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, SupportsFloat, TypeAlias

import jax
import numpy as np
import torch

from bridge._interop.dlpack import with_dense_storage
from bridge._ir.types import PyTree
from bridge._names import Path, path_name
from torch_api._params.record import ParamRecord

_HasDtype: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def raise_for_closure(cls_name: str, closure: object) -> NoReturn:
    """Raise TypeError for an argument of `step` that is no function, such as the loss."""
    given = "the loss" if isinstance(closure, torch.Tensor | SupportsFloat) else f"a {type(closure).__name__}"
    raise TypeError(
        f"{cls_name}.step: the argument is {given}; expected none, or a closure: a function that computes the loss and its gradients. "
        "Call loss.backward(), then step(). A transformation that reads the loss takes it by keyword: step(value=loss)."
    )


class Closure:
    """A torch closure during one step, as the differentiable JAX function `value_fn` of the nested dict of parameters with a gradient.

    The compiled update calls back into torch. While the closure runs, each parameter holds the trial values. Only the first derivative
    exists. An executable refers to a closure by a number, so it serves any closure and keeps none alive.
    """

    def __init__(
        self, closure: Callable[[], torch.Tensor | SupportsFloat], leaves: Sequence[ParamRecord], all_paths: Sequence[Path]
    ) -> None:
        self._closure = closure
        self._leaves = {".".join(path): leaf for leaf, path in zip(leaves, all_paths, strict=True)}
        self.error: BaseException | None = None
        self._token = next(_tokens)
        _closures[self._token] = self

    @property
    def value_fn(self) -> jax.tree_util.Partial:
        return jax.tree_util.Partial(_value, np.int32(self._token))

    def run(self, params: PyTree) -> tuple[np.ndarray, PyTree]:
        """Return value and gradient at the trial values, on the host.

        An exception of the closure is kept in `error`, for `step` to raise. The value and the gradients are NaN then.
        """
        flat, structure = jax.tree_util.tree_flatten_with_path(params)
        trial = [(self._leaves[path_name(path)].param, torch.from_numpy(np.array(x))) for path, x in flat]
        kept = [(p, p.data, p.grad) for p, _ in trial]
        try:
            for p, x in trial:
                p.data, p.grad = x.to(p.device, p.dtype).view_as(p), None
            with torch.enable_grad():
                loss = self._closure()
            grads = [torch.zeros_like(p) if p.grad is None else with_dense_storage(p.grad.detach()).clone() for p, _ in trial]
        except BaseException as error:  # noqa: BLE001 - XLA's threads would lose it
            self.error = error
            loss, grads = torch.nan, [torch.full_like(p, torch.nan) for p, _ in trial]
        finally:
            for p, data, grad in kept:
                p.data, p.grad = data, grad
        value = np.asarray(loss.item() if isinstance(loss, torch.Tensor) else loss, _loss_dtype(params))
        arrays = [g.to("cpu", torch.from_numpy(np.empty(0, x.dtype)).dtype).numpy() for g, (_, x) in zip(grads, flat, strict=True)]
        return value, structure.unflatten(arrays)


_tokens = itertools.count()
_closures: weakref.WeakValueDictionary[int, Closure] = weakref.WeakValueDictionary()


def _loss_dtype(params: PyTree) -> type[np.floating]:
    """Return the dtype that a JAX loss of these parameters has."""
    return np.float64 if any(x.dtype in (np.float64, np.complex128) for x in jax.tree.leaves(params)) else np.float32


def _value(token: jax.typing.ArrayLike, params: PyTree, **_: object) -> jax.Array:
    return _differentiable(token, params)


def _value_and_grad(token: jax.typing.ArrayLike, params: PyTree) -> tuple[jax.Array, PyTree]:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (np.zeros((), _loss_dtype(params)), params))

    def call(number: jax.Array, coded: PyTree) -> tuple[np.ndarray, PyTree]:
        trial = jax.tree.map(_from_words, coded, like[1])
        return jax.tree.map(_to_words, _closures[int(number)].run(trial))

    # jax converts arguments and results by the x64 flag of the thread that runs the callback. So 64-bit values are passed as 32-bit words.
    coded = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(_split_complex(x), np.uint32) if _is_64bit(x) else x, params)
    results = jax.pure_callback(call, jax.tree.map(_word_shape, like), token, coded)
    return jax.tree.map(lambda x, to: _join_complex(jax.lax.bitcast_convert_type(x, np.float64), to) if _is_64bit(to) else x, results, like)


def _is_64bit(x: _HasDtype) -> bool:
    return x.dtype in (np.float64, np.complex128)


def _split_complex(x: jax.Array) -> jax.Array:
    return jax.numpy.stack([x.real, x.imag], -1) if x.dtype == np.complex128 else x


def _join_complex(x: jax.Array, like: _HasDtype) -> jax.Array:
    return jax.lax.complex(x[..., 0], x[..., 1]) if like.dtype == np.complex128 else x


def _word_shape(like: jax.ShapeDtypeStruct | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
    """Return the shape and dtype of the 32-bit words of an array; an array without 64-bit values is returned as it is."""
    words = {np.dtype(np.float64): (2,), np.dtype(np.complex128): (2, 2)}.get(like.dtype)
    return like if words is None else jax.ShapeDtypeStruct((*like.shape, *words), np.uint32)


def _to_words(x: np.ndarray) -> np.ndarray:
    """Return a host array as 32-bit words."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint32).reshape(_word_shape(x).shape) if _is_64bit(x) else x


def _from_words(x: jax.typing.ArrayLike, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the host array that 32-bit words stand for."""
    return np.ascontiguousarray(x).reshape(-1).view(like.dtype).reshape(like.shape) if _is_64bit(like) else np.asarray(x)


_differentiable = jax.custom_vjp(lambda token, params: _value_and_grad(token, params)[0])
_differentiable.defvjp(_value_and_grad, lambda grads, cotangent: (None, jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads)))
