"""Static descriptions of leaves, state and further arguments."""

# jax declares many of its functions in part only.
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

MASTER = "master_param"  # float32, of a half parameter: what the update is added to
AVERAGE = "ema_param"  # exponential moving average of the trained weights
KEY = "rounding_key"  # two words of the next stochastic rounding: of the parameter, and a count
BESIDE = frozenset({MASTER, AVERAGE, KEY})

HALF = frozenset({"float16", "bfloat16"})


class Kept(NamedTuple):
    """What a row keeps beside the state of its transformation.

    `state_dtype`: the type of a parameter's floating arrays of state, None as the transformation has it.
    """

    state_dtype: str | None = None
    master_weights: bool = False
    stochastic_rounding: bool = False
    average: bool = False

    def fields(self, dtype: str) -> list[tuple[str, tuple[int, ...] | None, str]]:
        """Name, shape (None: the parameter's) and dtype of each array kept beside a parameter of this dtype."""
        half = dtype in HALF
        wide = "float32" if half else dtype
        fields: list[tuple[str, tuple[int, ...] | None, str]] = []
        if self.master_weights and half:
            fields.append((MASTER, None, wide))
        if self.stochastic_rounding and half:
            fields.append((KEY, (2,), "int32"))  # the bits of uint32, which torch cannot unpickle
        if self.average:
            fields.append((AVERAGE, None, wide))
        return fields


NOTHING = Kept()
Signature = tuple[tuple[int, ...], str]  # of an array: shape and dtype
GRADIENTS = object()  # stands for the tree of gradients among the extra arguments


class Same:
    """A value that is equal only to itself: a key for what cannot be hashed, or is not to be compared."""

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
    """A transformation's factory with its static options, and the names of the traced hyperparams (with the length of tuples, else 0).

    `scaled`: an optax transformation, whose update is multiplied by one more traced number, the row's last. Rows with
    one `unit` are evaluated together, as one transformation over all their leaves; with None each leaf is by itself.
    `pruned`: the transformation cannot have None where a leaf takes no part (GaLore); the tree then has no such place.
    `kept`: what is kept beside the transformation's state; with an average, its decay is a traced number after all others
    but the multiplier.
    `shaped`, `typed`: as of the `Rule`.
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
        """The decay of the average, among the row's numbers."""
        return values[self.width - 1 - self.scaled] if self.kept.average else None

    def together(self, unit: int | None) -> Row:
        return replace(self, unit=unit)

    def transformation(self, values: Sequence[ArrayLike | Scalar] | Array, dtype: str | None = None) -> optax.GradientTransformation:
        """The optax transformation with `values`, a sequence of `width` scalars, for its traced hyperparams, on leaves kept in `dtype`."""
        hyperparams: dict[str, object] = {"dtype": dtype} if self.typed else {}
        at = 0
        for name, length in self.traced:
            hyperparams[name] = tuple(values[at + i] for i in range(length)) if length else values[at]
            at += max(length, 1)
        return self.factory(**dict(self.statics), **hyperparams)


class Spec(NamedTuple):
    """A leaf as its transformation sees it.

    `path` is its place in the tree of parameters, None where it is the whole tree; `shape` its own, or the flat one of
    its buffer; `order` permutes the dimensions of `shape` to those of the buffer (None: as they are). `whole`: the
    transformation looks at all elements of the flat leaf together, whatever their order; else it takes each by itself
    if the leaf is flat and `path` is None.
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
    """One array of the state: `shape` None where it is the leaf's own; `key` the kind of random key that its bits are.

    `dtype` is the type that it is kept in, `arithmetic` that in which the transformation computes with it: of half
    parameters float32, but bfloat16 where the transformation asked for that. `position` is its place among the leaves of
    the transformation's state; None where it is kept beside that. `asked`: the user has asked for this dtype.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    position: int | None
    key: Hashable = None
    arithmetic: str = ""
    asked: bool = False


class Layout(NamedTuple):
    """The state of a transformation over some leaves: what belongs to each of them, and what to all."""

    structure: PyTreeDef
    own: tuple[tuple[Field, ...], ...]
    shared: tuple[Field, ...]


class Extra(NamedTuple):
    """Further arguments of the transformations: their tree, and for each leaf its array's signature, or what is no array."""

    tree: PyTreeDef
    leaves: tuple[Signature | Same, ...]

    def restored(self, arrays: Sequence[jax.Array]) -> dict[str, PyTree]:
        """The arguments by name, with these arrays."""
        rest = iter(arrays)
        return self.tree.unflatten([x.value if isinstance(x, Same) else next(rest) for x in self.leaves])


NO_EXTRA = Extra(jax.tree.structure({}), ())


class Problem(NamedTuple):
    """A transformation and the leaves that it is put before; `skeleton` has the paths of all parameters, dead or alive."""

    row: Row
    specs: tuple[Spec, ...]
    skeleton: tuple[Path, ...] = ()

    def tree(self, leaves: Sequence[object]) -> PyTree:
        """The leaves as the transformation's params: the nested dict of all paths, None where there is no leaf."""
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
        """The inverse of `tree`."""
        return [tree if spec.path is None else functools.reduce(lambda node, part: node[part], spec.path, tree) for spec in self.specs]

    @property
    def wide(self) -> bool:
        return any(spec.dtype in ("float64", "complex128") for spec in self.specs)

    @contextmanager
    def types(self) -> Generator[None]:
        """The context that gives the transformation the types it would have in pure JAX, and jax's default promotion."""
        with x64(not self.row.scaled or self.wide), default_promotion():
            yield

    def scalars(self, values: jax.Array) -> list[Scalar] | jax.Array:
        """The row's numbers, float64 0-d arrays, as the transformation takes them."""
        return [Scalar(values[i], np.float64 if self.wide else np.float32) for i in range(self.row.width)] if self.row.scaled else values


def looks_across(problem: Problem) -> bool:
    """Whether the transformation may look from one element of a leaf to another."""
    spec = problem.specs[0]
    return spec.path is not None or spec.whole or problem.row.shaped


def lift(x: jax.Array, row: Row) -> jax.Array:
    """An array in the type that the arithmetic runs in; complex as real pairs for torch's equations only."""
    return x if row.scaled and jnp.issubdtype(x.dtype, jnp.complexfloating) else real(x)


def lower(x: jax.Array, dtype: DTypeLike, row: Row) -> jax.Array:
    """Back from `lift`: one rounding."""
    if jnp.issubdtype(dtype, jnp.complexfloating) and not row.scaled:
        return jax.lax.complex(x[..., 0], x[..., 1])
    return x.astype(dtype)


def unflatten(buffer: jax.Array, spec: Spec) -> jax.Array:
    """A flat buffer in the leaf's shape."""
    if spec.order is None:
        return buffer.reshape(spec.shape)
    return buffer.reshape([spec.shape[d] for d in spec.order]).transpose(np.argsort(spec.order))


def flatten(x: jax.Array, spec: Spec) -> jax.Array:
    """The inverse of `unflatten`."""
    return jnp.reshape(x if spec.order is None else x.transpose(spec.order), -1)  # a constant of the program is a number alone


def buffer_shape(field: Field, spec: Spec | None = None) -> tuple[int, ...]:
    """The shape of the buffer that holds a field of state: flat, or () for one that is 0-d and not like the leaf."""
    shape = field.shape if field.shape is not None or spec is None else spec.shape
    return () if field.shape == () else (math.prod(shape or ()),)
