"""Static descriptions of transformations, leaves, state and extra arguments, which the whole compiler shares."""

# jax annotates many of its functions only partially.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

from bridge._compat.types import PyTreeDef
from bridge._ir.numerics import real_view
from bridge._ir.types import Array, PyTree
from bridge._names import Path
from bridge._process import default_promotion, x64

from .hyperparams import TracedHyperparam

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike

MASTER_PARAM = "master_param"  # float32 copy of a half-precision parameter, to which the update is added
EMA_PARAM = "ema_param"  # exponential moving average of the trained weights
ROUNDING_KEY = "rounding_key"  # key of the next stochastic rounding, two words: one of the parameter, one a count
AUX_FIELDS = frozenset({MASTER_PARAM, EMA_PARAM, ROUNDING_KEY})

HALF_DTYPES = frozenset({"float16", "bfloat16"})


class AuxState(NamedTuple):
    """The auxiliary state of a parameter: arrays that are kept in addition to the state of its transformation.

    state_dtype: the dtype of the floating-point state arrays; None keeps the transformation's dtypes.
    average: whether an exponential moving average of the weights is kept.
    """

    state_dtype: str | None = None
    master_weights: bool = False
    stochastic_rounding: bool = False
    average: bool = False

    def fields(self, dtype: str) -> list[tuple[str, tuple[int, ...] | None, str]]:
        """Return name, shape (None: the parameter's) and dtype of each auxiliary array of a parameter of this dtype."""
        half = dtype in HALF_DTYPES
        wide = "float32" if half else dtype
        fields: list[tuple[str, tuple[int, ...] | None, str]] = []
        if self.master_weights and half:
            fields.append((MASTER_PARAM, None, wide))
        if self.stochastic_rounding and half:
            fields.append((ROUNDING_KEY, (2,), "int32"))  # the bits of a uint32, because torch cannot unpickle uint32
        if self.average:
            fields.append((EMA_PARAM, None, wide))
        return fields


NO_AUX_STATE = AuxState()
Signature = tuple[tuple[int, ...], str]  # shape and dtype of an array
GRADS_PLACEHOLDER = object()  # placeholder for the tree of gradients among the extra arguments


class ById:
    """A hashable wrapper that compares its value by identity, for values that cannot be hashed or must not be compared."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __deepcopy__(self, memo: object) -> ById:
        return self


@dataclass(frozen=True)
class TransformSpec:
    """A transformation factory with its static options and the names of its traced hyperparams.

    static_hyperparams: the name and the value of each static option.
    traced_hyperparams: the name of each traced hyperparam, with the length of a tuple, or 0 for a scalar.
    is_optax: whether it is an optax transformation. Its update is multiplied by one more traced scalar, the last of the row.
    joint_set: leaves with the same number are updated together, by one evaluation; None updates each leaf on its own.
    omits_inactive_leaves: leave inactive leaves out of the tree instead of putting None there; some transformations (GaLore) cannot
      handle None.
    aux_state: the auxiliary state. The decay of an average is one more traced scalar, behind all others but the multiplier.
    needs_shape, takes_dtype: as in `OptimizerSpec`.
    """

    factory: Callable[..., optax.GradientTransformation]
    static_hyperparams: tuple[tuple[str, Hashable], ...]
    traced_hyperparams: tuple[tuple[str, int], ...]
    is_optax: bool = False
    joint_set: int | None = None
    omits_inactive_leaves: bool = False
    aux_state: AuxState = NO_AUX_STATE
    needs_shape: bool = False
    takes_dtype: bool = False

    @property
    def num_scalars(self) -> int:
        return sum(max(length, 1) for _, length in self.traced_hyperparams) + self.aux_state.average + self.is_optax

    def ema_decay(self, values: jax.Array) -> jax.Array | None:
        """Return the decay of the average from the scalars of the row; None without an average."""
        return values[self.num_scalars - 1 - self.is_optax] if self.aux_state.average else None

    def with_joint_set(self, joint_set: int | None) -> TransformSpec:
        return replace(self, joint_set=joint_set)

    def build(self, values: Sequence[ArrayLike | TracedHyperparam] | Array, dtype: str | None = None) -> optax.GradientTransformation:
        """Return the transformation for leaves stored in `dtype`, with `num_scalars` scalars as values of its traced hyperparams."""
        hyperparams: dict[str, object] = {"dtype": dtype} if self.takes_dtype else {}
        at = 0
        for name, length in self.traced_hyperparams:
            hyperparams[name] = tuple(values[at + i] for i in range(length)) if length else values[at]
            at += max(length, 1)
        return self.factory(**dict(self.static_hyperparams), **hyperparams)


class LeafSpec(NamedTuple):
    """A leaf as its transformation sees it.

    path: its path in the tree of parameters; None if the leaf is the whole tree.
    shape: the leaf's own shape, or the flat shape of its buffer.
    dim_order: permutes the dimensions of `shape` to those of the buffer; None keeps their order.
    reduces_over_leaf: whether the transformation combines all elements of the flat leaf, in any order. If it does not, and the leaf
      is flat and has no path, the transformation is elementwise.
    """

    path: Path | None
    shape: tuple[int, ...]
    dtype: str
    dim_order: tuple[int, ...] | None = None
    reduces_over_leaf: bool = False

    @property
    def is_flat(self) -> bool:
        return len(self.shape) == 1 and self.dim_order is None


class StateField(NamedTuple):
    """One array of state.

    shape: None if it is the leaf's own shape.
    dtype: the dtype in which it is stored.
    state_index: its index among the leaves of the transformation's state; None for auxiliary state.
    key_impl: the implementation of the random key whose bits it holds; None if it is no random key.
    compute_dtype: the dtype in which the transformation computes with it. For half-precision parameters this is float32, or bfloat16
      if the transformation asks for it.
    dtype_requested: whether the user asked for this dtype.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    state_index: int | None
    key_impl: Hashable = None
    compute_dtype: str = ""
    dtype_requested: bool = False


class StateLayout(NamedTuple):
    """The state of a transformation over some leaves: its tree structure, the fields of each leaf, and the fields that all leaves share."""

    treedef: PyTreeDef
    leaf_fields: tuple[tuple[StateField, ...], ...]
    shared_fields: tuple[StateField, ...]


class ExtraArgsSpec(NamedTuple):
    """The extra arguments of an update: their tree, and for each leaf the signature of an array, or a value that is no array."""

    treedef: PyTreeDef
    leaves: tuple[Signature | ById, ...]

    def unflatten(self, arrays: Sequence[jax.Array]) -> dict[str, PyTree]:
        """Return the extra arguments by name, with these arrays."""
        rest = iter(arrays)
        return self.treedef.unflatten([x.value if isinstance(x, ById) else next(rest) for x in self.leaves])


NO_EXTRA_ARGS = ExtraArgsSpec(jax.tree.structure({}), ())


class UpdateSpec(NamedTuple):
    """A transformation and the leaves that it updates.

    all_paths: the paths of all parameters, also of those that are not updated.
    """

    transform: TransformSpec
    specs: tuple[LeafSpec, ...]
    all_paths: tuple[Path, ...] = ()

    def to_tree(self, leaves: Sequence[object]) -> PyTree:
        """Return the leaves as the transformation's params: one leaf, or a nested dict of all paths with None for absent leaves."""
        if self.specs[0].path is None:
            return leaves[0]
        given: dict[Path, object] = dict(zip((spec.path or () for spec in self.specs), leaves, strict=True))
        root: dict[str, PyTree] = {}
        for path in list(given) if self.transform.omits_inactive_leaves else self.all_paths:
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = given.get(path)
        return root

    def from_tree(self, tree: PyTree) -> list[PyTree]:
        """Return the leaves of a tree that `to_tree` made."""
        return [tree if spec.path is None else functools.reduce(lambda node, part: node[part], spec.path, tree) for spec in self.specs]

    @property
    def is_64bit(self) -> bool:
        return any(spec.dtype in ("float64", "complex128") for spec in self.specs)

    @contextmanager
    def dtype_context(self) -> Generator[None]:
        """Set the 64-bit mode that the transformation would have in pure JAX, and jax's default type promotion."""
        with x64(not self.transform.is_optax or self.is_64bit), default_promotion():
            yield

    def as_hyperparams(self, values: jax.Array) -> list[TracedHyperparam] | jax.Array:
        """Return the transformation's scalars, a float64 array, in the form that the transformation takes."""
        return (
            [TracedHyperparam(values[i], np.float64 if self.is_64bit else np.float32) for i in range(self.transform.num_scalars)]
            if self.transform.is_optax
            else values
        )


def may_cross_elements(update_spec: UpdateSpec) -> bool:
    """Return whether the transformation may combine different elements of a leaf."""
    spec = update_spec.specs[0]
    return spec.path is not None or spec.reduces_over_leaf or update_spec.transform.needs_shape


def to_compute_dtype(x: jax.Array, transform: TransformSpec) -> jax.Array:
    """Return an array in the dtype of the arithmetic. torch's equations take a complex array as pairs of reals."""
    return x if transform.is_optax and jnp.issubdtype(x.dtype, jnp.complexfloating) else real_view(x)


def to_storage_dtype(x: jax.Array, dtype: DTypeLike, transform: TransformSpec) -> jax.Array:
    """Return an array in its storage dtype, with one rounding: the inverse of `to_compute_dtype`."""
    if jnp.issubdtype(dtype, jnp.complexfloating) and not transform.is_optax:
        return jax.lax.complex(x[..., 0], x[..., 1])
    return x.astype(dtype)


def unflatten(buffer: jax.Array, spec: LeafSpec) -> jax.Array:
    """Return a flat buffer in the leaf's shape."""
    if spec.dim_order is None:
        return buffer.reshape(spec.shape)
    return buffer.reshape([spec.shape[d] for d in spec.dim_order]).transpose(np.argsort(spec.dim_order))


def flatten(x: jax.Array, spec: LeafSpec) -> jax.Array:
    """Return a leaf as a flat buffer: the inverse of `unflatten`."""
    return jnp.reshape(
        x if spec.dim_order is None else x.transpose(spec.dim_order), -1
    )  # not `x.reshape`: a constant result may be a plain number


def buffer_shape(field: StateField, spec: LeafSpec | None = None) -> tuple[int, ...]:
    """Return the shape of the buffer of a state field: flat, or () if the field's own shape is ()."""
    shape = field.shape if field.shape is not None or spec is None else spec.shape
    return () if field.shape == () else (math.prod(shape or ()),)
