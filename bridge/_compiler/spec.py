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
from bridge._ir.numerics import real
from bridge._ir.types import Array, PyTree
from bridge._names import Path
from bridge._process import default_promotion, x64

from .hyperparams import Scalar

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike

MASTER = "master_param"  # float32 copy of a half-precision parameter, to which the update is added
AVERAGE = "ema_param"  # exponential moving average of the trained weights
KEY = "rounding_key"  # key of the next stochastic rounding, two words: one of the parameter, one a count
BESIDE = frozenset({MASTER, AVERAGE, KEY})

HALF = frozenset({"float16", "bfloat16"})


class Kept(NamedTuple):
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
        half = dtype in HALF
        wide = "float32" if half else dtype
        fields: list[tuple[str, tuple[int, ...] | None, str]] = []
        if self.master_weights and half:
            fields.append((MASTER, None, wide))
        if self.stochastic_rounding and half:
            fields.append((KEY, (2,), "int32"))  # the bits of a uint32, because torch cannot unpickle uint32
        if self.average:
            fields.append((AVERAGE, None, wide))
        return fields


NOTHING = Kept()
Signature = tuple[tuple[int, ...], str]  # shape and dtype of an array
GRADIENTS = object()  # placeholder for the tree of gradients among the extra arguments


class Same:
    """A hashable wrapper that compares its value by identity, for values that cannot be hashed or must not be compared."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __deepcopy__(self, memo: object) -> Same:
        return self


@dataclass(frozen=True)
class Row:
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
    statics: tuple[tuple[str, Hashable], ...]
    traced: tuple[tuple[str, int], ...]
    scaled: bool = False
    unit: int | None = None
    pruned: bool = False
    kept: Kept = NOTHING
    shaped: bool = False
    typed: bool = False

    @property
    def width(self) -> int:
        return sum(max(length, 1) for _, length in self.traced) + self.kept.average + self.scaled

    def decay(self, values: jax.Array) -> jax.Array | None:
        """Return the decay of the average from the scalars of the row; None without an average."""
        return values[self.width - 1 - self.scaled] if self.kept.average else None

    def together(self, unit: int | None) -> Row:
        return replace(self, unit=unit)

    def transformation(self, values: Sequence[ArrayLike | Scalar] | Array, dtype: str | None = None) -> optax.GradientTransformation:
        """Return the transformation for leaves stored in `dtype`, with `num_scalars` scalars as values of its traced hyperparams."""
        hyperparams: dict[str, object] = {"dtype": dtype} if self.typed else {}
        at = 0
        for name, length in self.traced:
            hyperparams[name] = tuple(values[at + i] for i in range(length)) if length else values[at]
            at += max(length, 1)
        return self.factory(**dict(self.statics), **hyperparams)


class Spec(NamedTuple):
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
    order: tuple[int, ...] | None = None
    whole: bool = False

    @property
    def flat(self) -> bool:
        return len(self.shape) == 1 and self.order is None


class Field(NamedTuple):
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
    position: int | None
    key: Hashable = None
    arithmetic: str = ""
    asked: bool = False


class Layout(NamedTuple):
    """The state of a transformation over some leaves: its tree structure, the fields of each leaf, and the fields that all leaves share."""

    structure: PyTreeDef
    own: tuple[tuple[Field, ...], ...]
    shared: tuple[Field, ...]


class Extra(NamedTuple):
    """The extra arguments of an update: their tree, and for each leaf the signature of an array, or a value that is no array."""

    tree: PyTreeDef
    leaves: tuple[Signature | Same, ...]

    def restored(self, arrays: Sequence[jax.Array]) -> dict[str, PyTree]:
        """Return the extra arguments by name, with these arrays."""
        rest = iter(arrays)
        return self.tree.unflatten([x.value if isinstance(x, Same) else next(rest) for x in self.leaves])


NO_EXTRA = Extra(jax.tree.structure({}), ())


class Problem(NamedTuple):
    """A transformation and the leaves that it updates.

    all_paths: the paths of all parameters, also of those that are not updated.
    """

    row: Row
    specs: tuple[Spec, ...]
    skeleton: tuple[Path, ...] = ()

    def tree(self, leaves: Sequence[object]) -> PyTree:
        """Return the leaves as the transformation's params: one leaf, or a nested dict of all paths with None for absent leaves."""
        if self.specs[0].path is None:
            return leaves[0]
        given: dict[Path, object] = dict(zip((spec.path or () for spec in self.specs), leaves, strict=True))
        root: dict[str, PyTree] = {}
        for path in list(given) if self.row.pruned else self.skeleton:
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = given.get(path)
        return root

    def leaves(self, tree: PyTree) -> list[PyTree]:
        """Return the leaves of a tree that `to_tree` made."""
        return [tree if spec.path is None else functools.reduce(lambda node, part: node[part], spec.path, tree) for spec in self.specs]

    @property
    def wide(self) -> bool:
        return any(spec.dtype in ("float64", "complex128") for spec in self.specs)

    @contextmanager
    def types(self) -> Generator[None]:
        """Set the 64-bit mode that the transformation would have in pure JAX, and jax's default type promotion."""
        with x64(not self.row.scaled or self.wide), default_promotion():
            yield

    def scalars(self, values: jax.Array) -> list[Scalar] | jax.Array:
        """Return the transformation's scalars, a float64 array, in the form that the transformation takes."""
        return [Scalar(values[i], np.float64 if self.wide else np.float32) for i in range(self.row.width)] if self.row.scaled else values


def looks_across(problem: Problem) -> bool:
    """Return whether the transformation may combine different elements of a leaf."""
    spec = problem.specs[0]
    return spec.path is not None or spec.whole or problem.row.shaped


def lift(x: jax.Array, row: Row) -> jax.Array:
    """Return an array in the dtype of the arithmetic. torch's equations take a complex array as pairs of reals."""
    return x if row.scaled and jnp.issubdtype(x.dtype, jnp.complexfloating) else real(x)


def lower(x: jax.Array, dtype: DTypeLike, row: Row) -> jax.Array:
    """Return an array in its storage dtype, with one rounding: the inverse of `to_compute_dtype`."""
    if jnp.issubdtype(dtype, jnp.complexfloating) and not row.scaled:
        return jax.lax.complex(x[..., 0], x[..., 1])
    return x.astype(dtype)


def unflatten(buffer: jax.Array, spec: Spec) -> jax.Array:
    """Return a flat buffer in the leaf's shape."""
    if spec.order is None:
        return buffer.reshape(spec.shape)
    return buffer.reshape([spec.shape[d] for d in spec.order]).transpose(np.argsort(spec.order))


def flatten(x: jax.Array, spec: Spec) -> jax.Array:
    """Return a leaf as a flat buffer: the inverse of `unflatten`."""
    return jnp.reshape(x if spec.order is None else x.transpose(spec.order), -1)  # not `x.reshape`: a constant result may be a plain number


def buffer_shape(field: Field, spec: Spec | None = None) -> tuple[int, ...]:
    """Return the shape of the buffer of a state field: flat, or () if the field's own shape is ()."""
    shape = field.shape if field.shape is not None or spec is None else spec.shape
    return () if field.shape == () else (math.prod(shape or ()),)
