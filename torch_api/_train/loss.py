"""A loss of a torch module as a pure JAX function of the module's tensors, for one kind of batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compat.torch import version
from bridge._compat.types import PyTreeDef
from bridge._compiler.spec import Spec
from bridge._interop.containers import holds
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.types import PyTree
from bridge._names import nest, unnest
from bridge._tracing.module_function import traced_call
from bridge._train import loss_jaxpr
from bridge._warnings import stack_level

from .batch import OWNER, Batch
from .draws import Draws
from .module_guard import Watch


class TracedLoss:
    """`loss_fn(module, *batch)` as a function of arrays.

    It maps (params, buffers, batch, seed) to the loss, a list of the arrays in aux, and a list of the new buffers.
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[..., PyTree], has_aux: bool, watch: Watch, items: Batch) -> None:
        self._module, self._loss_fn, self._has_aux, self._items = module, loss_fn, has_aux, items
        self._names = list(watch.params), list(watch.buffers)
        given = [*(numpy_dtype(p.dtype) for p in watch.params.values()), *(x.dtype for x in items.arrays)]
        wide = any(dtype in (np.float64, np.complex128) for dtype in given)
        self.keeps_64_bits: bool = wide or jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self._tree: PyTreeDef | None = None
        self._outside: list[torch.Tensor] = []
        self._versions: list[object] = []
        self._leaves: list[object] = []

    def __call__(
        self, params: Sequence[jax.Array], buffers: Sequence[jax.Array], batch: Sequence[jax.Array], seed: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        own_params, own_buffers = (nest(zip(names, x, strict=True)) for names, x in zip(self._names, (params, buffers), strict=True))
        constants: dict[int, tuple[torch.Tensor, jax.Array]] = {}
        given = self._module, self._loss_fn, own_params, own_buffers, self._items.rebuilt(batch)
        result, after = traced_call(*given, rng=jax.random.key(seed), x64=self.keeps_64_bits, constants=constants)
        self._outside = [tensor for tensor, _ in constants.values() if not tensor.is_inference()]
        self._versions = list(map(version, self._outside))
        loss, aux = self._parted(result)
        flat, self._tree = jax.tree.flatten(aux)
        for x in flat:
            if not isinstance(x, jax.Array) and holds(x, jax.Array) is not None:
                raise TypeError(
                    f"{OWNER}: loss_fn returns a {type(x).__name__} in aux, which holds arrays and is no pytree to jax. Return a dict of "
                    "the arrays in it."
                )
        self._leaves = [_TRACED if isinstance(x, jax.Array) else x for x in flat]
        after = unnest(after)
        return _checked(loss), [x for x in flat if isinstance(x, jax.Array)], [after[name] for name in self._names[1]]

    def stale(self) -> bool:
        """Return whether a captured tensor was written to after tracing. The trace has its value as a constant."""
        return list(map(version, self._outside)) != self._versions

    def _parted(self, result: PyTree) -> tuple[object, PyTree]:
        if not self._has_aux:
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{OWNER}: has_aux is True, so loss_fn must return (loss, aux), but it returned a {type(result).__name__}.")
        return result

    def restored(self, arrays: Sequence[torch.Tensor]) -> PyTree:
        """Return aux with these arrays. Its other leaves have their values of tracing time."""
        assert self._tree is not None
        rest = iter(arrays)
        return self._tree.unflatten([next(rest) if x is _TRACED else x for x in self._leaves])


_TRACED = object()


class TracedForward(loss_jaxpr.Forward):
    """The jaxpr of a module's loss."""

    function: TracedLoss  # pyright: ignore[reportIncompatibleVariableOverride]


def _checked(loss: object) -> jax.Array:
    what = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, jax.Array) else f"a {type(loss).__name__}"
    if not isinstance(loss, jax.Array) or loss.size != 1 or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"{OWNER}: loss_fn must return a real scalar, but returned {what}. Reduce it by mean() or sum(); with more than the loss to "
            "return, give has_aux=True and return (loss, aux)."
        )
    return loss.reshape(())


def traced_loss(module: torch.nn.Module, loss_fn: Callable[..., PyTree], has_aux: bool, watch: Watch, items: Batch) -> TracedForward:
    """Trace the loss for this kind of batch. The module is not changed."""
    specs = [
        {name: Spec(None, tuple(t.shape), str(numpy_dtype(t.dtype))) for name, t in part.items()} for part in (watch.params, watch.buffers)
    ]
    function, draws = TracedLoss(module, loss_fn, has_aux, watch, items), Draws(module, loss_fn)
    forward = TracedForward(function, specs[0], specs[1], items.arrays, narrow=not function.keeps_64_bits)
    sources = draws.sources()
    if sources:
        warnings.warn(
            f"{OWNER}: the loss draws by {' and by '.join(sources)} while it is traced, so the number is a constant of every later call. "
            "Draw by torch.rand, torch.randperm or torch.distributions, or outside of the loss and pass the number in the batch.",
            stacklevel=stack_level(),
        )
    return forward
