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
from bridge._compiler.spec import LeafSpec
from bridge._interop.containers import path_to_instance
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.types import PyTree
from bridge._names import nest, unnest
from bridge._tracing.module_function import traced_call
from bridge._train import loss_jaxpr
from bridge._warnings import stack_level

from .batch import CLS_NAME, Batch
from .draws import GeneratorStates
from .module_guard import ModuleGuard


class TracedLoss:
    """`loss_fn(module, *batch)` as a function of arrays.

    It maps (params, buffers, batch, seed) to the loss, a list of the arrays in aux, and a list of the new buffers.

    batch_signature, module_signature: the signatures for which it is traced.
    """

    def __init__(
        self, module: torch.nn.Module, loss_fn: Callable[..., PyTree], has_aux: bool, module_guard: ModuleGuard, batch: Batch
    ) -> None:
        self._module, self._loss_fn, self._has_aux, self._batch = module, loss_fn, has_aux, batch
        self._names = list(module_guard.params), list(module_guard.buffers)
        self.batch_signature, self.module_signature = batch.signature, module_guard.signature
        given = [*(numpy_dtype(p.dtype) for p in module_guard.params.values()), *(x.dtype for x in batch.arrays)]
        wide = any(dtype in (np.float64, np.complex128) for dtype in given)
        self.keeps_64_bits: bool = wide or jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self._aux_tree: PyTreeDef | None = None
        self._captured_tensors: list[torch.Tensor] = []
        self._versions: list[object] = []
        self._aux_leaves: list[object] = []

    def __call__(
        self, params: Sequence[jax.Array], buffers: Sequence[jax.Array], batch: Sequence[jax.Array], seed: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        own_params, own_buffers = (nest(zip(names, x, strict=True)) for names, x in zip(self._names, (params, buffers), strict=True))
        constants: dict[int, tuple[torch.Tensor, jax.Array]] = {}
        given = self._module, self._loss_fn, own_params, own_buffers, self._batch.unflatten(batch)
        result, after = traced_call(*given, rng=jax.random.key(seed), x64=self.keeps_64_bits, constants=constants)
        self._captured_tensors = [tensor for tensor, _ in constants.values() if not tensor.is_inference()]
        self._versions = list(map(version, self._captured_tensors))
        loss, aux = self._split_aux(result)
        flat, self._aux_tree = jax.tree.flatten(aux)
        for x in flat:
            if not isinstance(x, jax.Array) and path_to_instance(x, jax.Array) is not None:
                raise TypeError(
                    f"{CLS_NAME}: loss_fn returns a {type(x).__name__} in aux, which holds arrays and is no pytree to jax. Return a dict "
                    "of the arrays in it."
                )
        self._aux_leaves = [_IS_ARRAY if isinstance(x, jax.Array) else x for x in flat]
        after = unnest(after)
        return _check_loss(loss), [x for x in flat if isinstance(x, jax.Array)], [after[name] for name in self._names[1]]

    def is_stale(self) -> bool:
        """Return whether a captured tensor was written to after tracing. The trace has its value as a constant."""
        return list(map(version, self._captured_tensors)) != self._versions

    def _split_aux(self, result: PyTree) -> tuple[object, PyTree]:
        if not self._has_aux:
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{CLS_NAME}: has_aux is True, so loss_fn must return (loss, aux), but it returned a {type(result).__name__}.")
        return result

    def rebuild_aux(self, arrays: Sequence[torch.Tensor]) -> PyTree:
        """Return aux with these arrays. Its other leaves have their values of tracing time."""
        assert self._aux_tree is not None
        rest = iter(arrays)
        return self._aux_tree.unflatten([next(rest) if x is _IS_ARRAY else x for x in self._aux_leaves])


_IS_ARRAY = object()


class ModuleLossJaxpr(loss_jaxpr.LossJaxpr):
    """The jaxpr of a module's loss."""

    function: TracedLoss  # pyright: ignore[reportIncompatibleVariableOverride]


def _check_loss(loss: object) -> jax.Array:
    what = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, jax.Array) else f"a {type(loss).__name__}"
    if not isinstance(loss, jax.Array) or loss.size != 1 or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"{CLS_NAME}: loss_fn must return a real scalar, but returned {what}. Reduce it by mean() or sum(); with more than the loss to "
            "return, give has_aux=True and return (loss, aux)."
        )
    return loss.reshape(())


def trace_loss(
    module: torch.nn.Module, loss_fn: Callable[..., PyTree], has_aux: bool, module_guard: ModuleGuard, batch: Batch
) -> ModuleLossJaxpr:
    """Trace the loss for this kind of batch. The module is not changed."""
    specs = [
        {name: LeafSpec(None, tuple(t.shape), str(numpy_dtype(t.dtype))) for name, t in part.items()}
        for part in (module_guard.params, module_guard.buffers)
    ]
    function, draws = TracedLoss(module, loss_fn, has_aux, module_guard, batch), GeneratorStates(module, loss_fn)
    forward = ModuleLossJaxpr(function, specs[0], specs[1], batch.arrays, uses_32bit_jax=not function.keeps_64_bits)
    sources = draws.changed_generators()
    if sources:
        warnings.warn(
            f"{CLS_NAME}: the loss draws by {' and by '.join(sources)} while it is traced, so the number is a constant of every later "
            "call. Draw by torch.rand, torch.randperm or torch.distributions, or outside of the loss and pass the number in the batch.",
            stacklevel=stack_level(),
        )
    return forward
