"""The layout of a transformation's state: the fields of each leaf, with the names that `optimizer.state` shows."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np

from bridge._compat.types import PyTreeDef
from bridge._ir.numerics import is_prng_key
from bridge._ir.types import KeyPath, PyTree
from bridge._names import Path, path_name
from bridge._process import x64

from .spec import AUX_FIELDS, StateField, StateLayout, UpdateSpec, to_compute_dtype

if TYPE_CHECKING:
    from jax.typing import ArrayLike


@functools.lru_cache(4096)
def state_layout(update_spec: UpdateSpec) -> StateLayout:
    """Return the layout of the transformation's state for these leaves, from a trace of its `init`."""
    row, specs = update_spec.transform, update_spec.specs
    keys: list[Hashable] = []

    def init(values: jax.Array, leaves: list[jax.Array]) -> PyTree:
        with update_spec.dtype_context():
            state = row.build(update_spec.as_hyperparams(values), specs[0].dtype).init(update_spec.to_tree(leaves))
            keys[:] = [jax.random.key_impl(x) if is_prng_key(x) else None for x in jax.tree.leaves(state)]
            return jax.tree.map(_as_array, state)

    def lifted(leaves: list[jax.Array]) -> list[jax.Array]:
        return [to_compute_dtype(x, row) for x in leaves]

    with x64():
        avals = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
        wide: list[jax.ShapeDtypeStruct] = jax.eval_shape(lifted, avals)
        computed = jax.eval_shape(init, jax.ShapeDtypeStruct((row.num_scalars,), np.float64), wide)
        kept = jax.eval_shape(init, jax.ShapeDtypeStruct((row.num_scalars,), np.float64), avals) if row.is_optax else computed
    own: list[list[StateField]] = [[] for _ in specs]
    shared: list[StateField] = []
    leaves, structure = cast(tuple[list[tuple[KeyPath, jax.ShapeDtypeStruct]], PyTreeDef], jax.tree_util.tree_flatten_with_path(computed))
    find_leaf = leaf_finder([path for path, _ in leaves], [to_key_path(spec.path) for spec in specs])
    for position, ((path, leaf), stored, key) in enumerate(zip(leaves, jax.tree.leaves(kept), keys, strict=True)):
        leaf_index, name = find_leaf(path)
        alike = leaf_index is not None and leaf.shape == wide[leaf_index].shape
        like_it = leaf_index is not None and not row.is_optax and leaf.ndim > 0  # one array for each leaf, of any shape
        # A scalar keeps its compute dtype, float32 for half-precision parameters: bfloat16 rounds 0.999 to 1, and a decay of 1 gives NaN.
        dtype = specs[leaf_index].dtype if leaf_index is not None and like_it else str(stored.dtype if leaf.ndim or alike else leaf.dtype)
        may_be_asked = leaf_index is not None and (alike or leaf.ndim > 0) and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        asked = may_be_asked and row.aux_state.state_dtype is not None
        dtype = str(row.aux_state.state_dtype) if asked else dtype
        field = StateField(name, None if alike else tuple(leaf.shape), dtype, position, key, str(leaf.dtype), asked)
        (shared if leaf_index is None else own[leaf_index]).append(field)
    taken = {tail for fields in own for field in fields for tail in name_suffixes(field.name)}
    shared = _shorten_names(shared, taken | AUX_FIELDS)
    own = [_shorten_names(fields, {field.name for field in shared} | AUX_FIELDS) for fields in own]
    if row.joint_set is None:
        own, shared = [sorted(own[0] + shared, key=attrgetter("state_index"))], []
    for fields, spec in zip(own, specs, strict=True):
        fields += [StateField(name, shape, dtype, None, compute_dtype=dtype) for name, shape, dtype in row.aux_state.fields(spec.dtype)]
    return StateLayout(structure, tuple(map(tuple, own)), tuple(shared))


def _as_array(x: ArrayLike) -> jax.Array:
    return jax.random.key_data(x) if is_prng_key(x) else jnp.asarray(x)


def to_key_path(path: Path | None) -> KeyPath:
    """Return a path in a nested dict as a key path of jax."""
    return tuple(map(jax.tree_util.DictKey, path or ()))


def leaf_finder(paths: Sequence[KeyPath], leaves: Sequence[KeyPath]) -> Callable[[KeyPath], tuple[int | None, str]]:
    """Return a function that takes a path in the state and returns its leaf (None: shared) and its name without the leaf's path.

    The path of a leaf stands at the end of the state's path; the longest match counts. If the state has several arrays for each leaf
    (SM3), the path of the leaf stands before the end. Then all leaves must occur in that place, and no tree of parameters below them:
    the labels of a partition may have the names of parameters.
    """
    index = {path: i for i, path in enumerate(leaves)}
    heads = {path[:n] for path in paths for n in range(len(path) + 1)}

    def at_the_end(path: KeyPath) -> int | None:
        return next((start for start in range(len(path) + (not leaves[0])) if path[start:] in index), None)

    @functools.cache
    def holds_arrays(head: KeyPath) -> bool:
        below = [path for path in paths for leaf in leaves if path[: len(head) + len(leaf)] == head + leaf]
        return all(head + leaf in heads for leaf in leaves) and all(at_the_end(path) is None for path in below)

    def find_leaf(path: KeyPath) -> tuple[int | None, str]:
        start = at_the_end(path)
        if start is not None:
            return index[path[start:]], path_name(path[:start])
        for end in range(len(path) - 1, 0, -1):
            for start in range(end):
                if path[start:end] in index and holds_arrays(path[:start]):
                    return index[path[start:end]], path_name(path[:start] + path[end:])
        return None, path_name(path)

    return find_leaf


def name_suffixes(name: str) -> list[str]:
    """Return the suffixes of a dotted name, from its last part to the whole name."""
    return [name.split(".", n)[-1] for n in range(name.count("."), -1, -1)]


def _shorten_names(fields: list[StateField], taken: set[str]) -> list[StateField]:
    """Rename each field to the shortest unique suffix of its dotted name that is not in `taken`: 'nu', not '0.nu'."""
    ends = collections.Counter(tail for field in fields for tail in name_suffixes(field.name))

    def free(tail: str) -> bool:
        return ends[tail] == 1 and tail not in taken and not tail[:1].isdigit()

    return [f._replace(name=next(filter(free, name_suffixes(f.name)), f.name or "state")) for f in fields]
