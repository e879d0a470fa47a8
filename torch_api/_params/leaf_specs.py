"""How a transformation sees each parameter."""

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
    """Whether the transformation can begin with a part of the parameters only if the others are not even None."""

    def begins(row: Row) -> bool:
        try:
            layout(Problem(row.together(0), (spec,), skeleton))
        except Exception:  # noqa: BLE001 - whatever it is, it is raised again for all parameters together
            return False
        return True

    return not begins(row) and begins(replace(row, pruned=True))


def _spec(rule: Rule, leaf: Leaf) -> Spec:
    """A leaf before an equation of ours: flat, unless the equation needs its matrices."""
    dtype = str(numpy_dtype(leaf.dtype))
    matrix = rule.shaped and len(leaf.shape) > 1
    return Spec(None, tuple(leaf.shape), dtype, _order(leaf)) if matrix else Spec(None, leaf.buffer_shape, dtype)


def _whole(leaf: Leaf, path: Path) -> Spec:
    """The leaf in the shape that the transformation would see it in, had one process all of it."""
    sharded = leaf.layout is not None and leaf.layout.sharded
    return Spec(path, tuple(leaf.param.shape), str(numpy_dtype(leaf.dtype)), None if sharded else _order(leaf))


def _order(leaf: Leaf) -> tuple[int, ...] | None:
    order = dense_order(leaf.local)
    return None if order is None or order == tuple(range(len(order))) else order
