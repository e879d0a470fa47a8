"""The `LeafSpec` of a parameter: its shape, dtype, path and order of dimensions as a transformation sees them."""

from __future__ import annotations

from dataclasses import replace

from bridge._compiler.spec import Problem, Row, Spec
from bridge._compiler.state_layout import layout
from bridge._interop.dlpack import dense_order
from bridge._interop.dtypes import numpy_dtype
from bridge._names import Path
from torch_api._rules.optimizer_spec import Rule

from .record import Leaf


def _prunes(row: Row, spec: Spec, skeleton: tuple[Path, ...]) -> bool:
    """Return whether `init` fails with None in place of missing parameters, but works if they are left out of the tree."""

    def begins(row: Row) -> bool:
        try:
            layout(Problem(row.together(0), (spec,), skeleton))
        except Exception:  # noqa: BLE001 - `init` of all parameters raises it again
            return False
        return True

    return not begins(row) and begins(replace(row, pruned=True))


def _spec(rule: Rule, leaf: Leaf) -> Spec:
    """Return the spec for one of this package's equations: flat, unless the equation needs the shape of matrices."""
    dtype = str(numpy_dtype(leaf.dtype))
    matrix = rule.shaped and len(leaf.shape) > 1
    return Spec(None, tuple(leaf.shape), dtype, _order(leaf)) if matrix else Spec(None, leaf.buffer_shape, dtype)


def _whole(leaf: Leaf, path: Path) -> Spec:
    """Return the spec for an optax transformation: path and global shape, also of a sharded parameter."""
    sharded = leaf.layout is not None and leaf.layout.sharded
    return Spec(path, tuple(leaf.param.shape), str(numpy_dtype(leaf.dtype)), None if sharded else _order(leaf))


def _order(leaf: Leaf) -> tuple[int, ...] | None:
    order = dense_order(leaf.local)
    return None if order is None or order == tuple(range(len(order))) else order
