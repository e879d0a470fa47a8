"""The JAX side of maskbridge, and the way between torch and jax."""

from . import rules
from .dlpack import to_jax, to_torch
from .step import compilations, traces
from .tree import module_tree, resolve_labels, resolve_mask, tied_names

__all__ = [
    "compilations",
    "module_tree",
    "resolve_labels",
    "resolve_mask",
    "rules",
    "tied_names",
    "to_jax",
    "to_torch",
    "traces",
]
