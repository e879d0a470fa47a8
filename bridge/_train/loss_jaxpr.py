"""The traced loss of a train step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from bridge._compiler.spec import LeafSpec
from bridge._ir.queries import properties_of, reachable_inputs
from bridge._process import default_settings
from bridge._tracing.jax_calls import rules_in_32_bits


class HasShape(Protocol):
    """An array, or an object that describes one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


class LossJaxpr:
    """A loss traced to a jaxpr: (params, buffers, batch, seed) -> (loss, aux, buffers), where all but the seed and the loss are lists.

    function: the loss, traced with 64-bit types enabled.
    params, buffers: shapes and dtypes of the module's tensors by name; `function` takes lists in this order.
    batch: arrays, or other objects with a shape and a dtype.
    uses_32bit_jax: whether JAX code inside the loss sees 32-bit types nevertheless.

    params_reached: the parameters that the loss may have a gradient of.
    changed_buffers: the buffers that the loss changes.
    uses_seed: whether the results depend on the seed.
    """

    def __init__(
        self,
        function: Callable[..., object],
        params: Mapping[str, LeafSpec],
        buffers: Mapping[str, LeafSpec],
        batch: Sequence[HasShape],
        uses_32bit_jax: bool = False,
    ) -> None:
        self.function = function
        self.params, self.buffers = dict(params), dict(buffers)
        self.batch = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batch]
        given = [[jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs.values()] for specs in (params, buffers)]
        seed = jax.ShapeDtypeStruct((), np.int64)
        with default_settings():
            traced = jax.make_jaxpr(function, return_shape=True)(*given, self.batch, seed)
        closed, (_, aux, _) = traced
        closed = closed.replace(jaxpr=rules_in_32_bits(closed.jaxpr)) if uses_32bit_jax else closed
        self.num_aux, self.uses_32bit_jax = len(aux), uses_32bit_jax
        jaxpr = closed.jaxpr
        self.has_callback = properties_of(jaxpr).has_callback
        count = len(self.params)
        self.params_reached = frozenset(np.array(list(self.params))[sorted(i for i in reachable_inputs(jaxpr, [0]) if i < count)].tolist())
        own, new = jaxpr.invars[count : count + len(self.buffers)], jaxpr.outvars[1 + self.num_aux :]
        self.changed_buffers = tuple(name for name, before, after in zip(self.buffers, own, new, strict=True) if before is not after)
        self.uses_seed = len(jaxpr.invars) - 1 in reachable_inputs(jaxpr, range(len(jaxpr.outvars)), through_nondifferentiable=True)
        self._evaluate = jaxpr_as_fun(closed)
        self.jaxpr = closed

    def __call__(
        self, params: Sequence[jax.Array], buffers: Sequence[jax.Array], batch: Sequence[jax.Array], seed: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        loss, *rest = self._evaluate(*params, *buffers, *batch, seed)
        return loss, rest[: self.num_aux], rest[self.num_aux :]
