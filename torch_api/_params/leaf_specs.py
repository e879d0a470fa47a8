"""The `LeafSpec` of a parameter: its shape, dtype, path and order of dimensions as a transformation sees them."""

from __future__ import annotations

from dataclasses import replace

from bridge._compiler.spec import LeafSpec, TransformSpec, UpdateSpec
from bridge._compiler.state_layout import state_layout
from bridge._interop.dlpack import dense_order
from bridge._interop.dtypes import numpy_dtype
from bridge._names import Path
from torch_api._rules.optimizer_spec import OptimizerSpec

from .record import ParamRecord


def rejects_missing_leaves(row: TransformSpec, spec: LeafSpec, skeleton: tuple[Path, ...]) -> bool:
    """Return whether `init` fails with None in place of missing parameters, but works if they are left out of the tree."""

    def can_init(row: TransformSpec) -> bool:
        try:
            state_layout(UpdateSpec(row.with_joint_set(0), (spec,), skeleton))
        except Exception:  # noqa: BLE001 - `init` of all parameters raises it again
            return False
        return True

    return not can_init(row) and can_init(replace(row, omits_inactive_leaves=True))


def rule_leaf_spec(optimizer_spec: OptimizerSpec, leaf: ParamRecord) -> LeafSpec:
    """Return the spec for one of this package's equations: flat, unless the equation needs the shape of matrices."""
    dtype = str(numpy_dtype(leaf.dtype))
    matrix = optimizer_spec.needs_shape and len(leaf.shape) > 1
    return LeafSpec(None, tuple(leaf.shape), dtype, _dim_order(leaf)) if matrix else LeafSpec(None, leaf.buffer_shape, dtype)


def global_leaf_spec(leaf: ParamRecord, path: Path) -> LeafSpec:
    """Return the spec for an optax transformation: path and global shape, also of a sharded parameter."""
    sharded = leaf.dtensor_layout is not None and leaf.dtensor_layout.is_sharded
    return LeafSpec(path, tuple(leaf.param.shape), str(numpy_dtype(leaf.dtype)), None if sharded else _dim_order(leaf))


def _dim_order(leaf: ParamRecord) -> tuple[int, ...] | None:
    order = dense_order(leaf.local_tensor)
    return None if order is None or order == tuple(range(len(order))) else order
