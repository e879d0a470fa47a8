"""What a transformation is put before, and what state it keeps of it: all that is known without a number.

A transformation of torch's equations (`bridge.rules`) sees each leaf alone, as a flat array, with float64 scalars. Any
other optax transformation sees what it would see in pure JAX: the nested dict of parameters in their own shapes (None
where a leaf takes no part), scalars that behave like Python floats, and 32-bit types unless a leaf has 64. How little
of that a leaf needs is found by `bridge.analysis`.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._ir.numerics import is_key, real
from ._names import Path, path_name
from ._process import default_promotion, x64
from .precision import BESIDE, NOTHING, Kept
from .scalars import Scalar

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

    def __deepcopy__(self, memo: Any) -> Same:
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

    factory: Callable[..., Any]
    statics: tuple[tuple[str, Any], ...]
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

    def decay(self, values: Any) -> Any:
        """The decay of the average, among the row's numbers."""
        return values[self.width - 1 - self.scaled] if self.kept.average else None

    def together(self, unit: int | None) -> Row:
        return replace(self, unit=unit)

    def transformation(self, values: Any, dtype: str | None = None) -> Any:
        """The optax transformation with `values`, a sequence of `width` scalars, for its traced hyperparams, on leaves kept in `dtype`."""
        hyperparams: dict[str, Any] = {"dtype": dtype} if self.typed else {}
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
    key: Any = None
    arithmetic: str = ""
    asked: bool = False


class Layout(NamedTuple):
    """The state of a transformation over some leaves: what belongs to each of them, and what to all."""

    structure: Any
    own: tuple[tuple[Field, ...], ...]
    shared: tuple[Field, ...]


class Extra(NamedTuple):
    """Further arguments of the transformations: their tree, and for each leaf its array's signature, or what is no array."""

    tree: Any
    leaves: tuple[Signature | Same, ...]

    def restored(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, with these arrays."""
        rest = iter(arrays)
        return self.tree.unflatten([x.value if isinstance(x, Same) else next(rest) for x in self.leaves])


NO_EXTRA = Extra(jax.tree.structure({}), ())


class Problem(NamedTuple):
    """A transformation and the leaves that it is put before; `skeleton` has the paths of all parameters, dead or alive."""

    row: Row
    specs: tuple[Spec, ...]
    skeleton: tuple[Path, ...] = ()

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The leaves as the transformation's params: the nested dict of all paths, None where there is no leaf."""
        if self.specs[0].path is None:
            return leaves[0]
        given: dict[Any, Any] = dict(zip((spec.path for spec in self.specs), leaves, strict=True))
        root: dict[str, Any] = {}
        for path in list(given) if self.row.pruned else self.skeleton:
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = given.get(path)
        return root

    def leaves(self, tree: Any) -> list[Any]:
        """The inverse of `tree`."""
        return [tree if spec.path is None else functools.reduce(lambda node, part: node[part], spec.path, tree) for spec in self.specs]

    @property
    def wide(self) -> bool:
        return any(spec.dtype in ("float64", "complex128") for spec in self.specs)

    @contextmanager
    def types(self) -> Iterator[None]:
        """The context that gives the transformation the types it would have in pure JAX, and jax's default promotion."""
        with x64(not self.row.scaled or self.wide), default_promotion():
            yield

    def scalars(self, values: Any) -> list[Any]:
        """The row's numbers, float64 0-d arrays, as the transformation takes them."""
        return [Scalar(values[i], np.float64 if self.wide else np.float32) for i in range(self.row.width)] if self.row.scaled else values


def looks_across(problem: Problem) -> bool:
    """Whether the transformation may look from one element of a leaf to another."""
    spec = problem.specs[0]
    return spec.path is not None or spec.whole or problem.row.shaped


def lift(x: Any, row: Row) -> Any:
    """An array in the type that the arithmetic runs in; complex as real pairs for torch's equations only."""
    return x if row.scaled and jnp.issubdtype(x.dtype, jnp.complexfloating) else real(x)


def lower(x: Any, dtype: Any, row: Row) -> Any:
    """Back from `lift`: one rounding."""
    if jnp.issubdtype(dtype, jnp.complexfloating) and not row.scaled:
        return jax.lax.complex(x[..., 0], x[..., 1])
    return x.astype(dtype)


def unflatten(buffer: Any, spec: Spec) -> Any:
    """A flat buffer in the leaf's shape."""
    if spec.order is None:
        return buffer.reshape(spec.shape)
    return buffer.reshape([spec.shape[d] for d in spec.order]).transpose(np.argsort(spec.order))


def flatten(x: Any, spec: Spec) -> Any:
    """The inverse of `unflatten`."""
    return jnp.reshape(x if spec.order is None else x.transpose(spec.order), -1)  # a constant of the program is a number alone


def buffer_shape(field: Field, spec: Spec | None = None) -> tuple[int, ...]:
    """The shape of the buffer that holds a field of state: flat, or () for one that is 0-d and not like the leaf."""
    shape = field.shape if field.shape is not None or spec is None else spec.shape
    return () if field.shape == () else (math.prod(shape or ()),)


# ------------------------------------------------------------------ the state


@functools.lru_cache(4096)
def layout(problem: Problem) -> Layout:
    """What state the transformation keeps for these leaves, from a trace of its `init`."""
    row, specs = problem.row, problem.specs
    keys: list[Any] = []

    def init(values: Any, leaves: list[Any]) -> Any:
        with problem.types():
            state = row.transformation(problem.scalars(values), specs[0].dtype).init(problem.tree(leaves))
            keys[:] = [jax.random.key_impl(x) if is_key(x) else None for x in jax.tree.leaves(state)]
            return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else jnp.asarray(x), state)

    with x64():
        avals = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
        wide = jax.eval_shape(lambda leaves: [lift(x, row) for x in leaves], avals)
        computed = jax.eval_shape(init, jax.ShapeDtypeStruct((row.width,), np.float64), wide)
        kept = jax.eval_shape(init, jax.ShapeDtypeStruct((row.width,), np.float64), avals) if row.scaled else computed
    own: list[list[Field]] = [[] for _ in specs]
    shared: list[Field] = []
    flat, structure = jax.tree_util.tree_flatten_with_path(computed)
    owner_of = owners([path for path, _ in flat], [nested(spec.path) for spec in specs])
    for position, ((path, leaf), stored, key) in enumerate(zip(flat, jax.tree.leaves(kept), keys, strict=True)):
        owner, name = owner_of(path)
        alike = owner is not None and leaf.shape == wide[owner].shape
        like_it = owner is not None and not row.scaled and leaf.ndim > 0  # of one array for each leaf, whatever its shape
        # A number is kept as it is computed: of half parameters in float32, since bfloat16 has no 0.999, and a decay of 1 gives NaN.
        dtype = specs[owner].dtype if owner is not None and like_it else str(stored.dtype if leaf.ndim or alike else leaf.dtype)
        may_be_asked = owner is not None and (alike or leaf.ndim > 0) and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        asked = may_be_asked and row.kept.state_dtype is not None
        dtype = str(row.kept.state_dtype) if asked else dtype
        field = Field(name, None if alike else tuple(leaf.shape), dtype, position, key, str(leaf.dtype), asked)
        (shared if owner is None else own[owner]).append(field)
    taken = {tail for fields in own for field in fields for tail in tails(field.name)}
    shared = _short_names(shared, taken | BESIDE)
    own = [_short_names(fields, {field.name for field in shared} | BESIDE) for fields in own]
    if row.unit is None:
        own, shared = [sorted(own[0] + shared, key=attrgetter("position"))], []
    for fields, spec in zip(own, specs, strict=True):
        fields += [Field(name, shape, dtype, None, arithmetic=dtype) for name, shape, dtype in row.kept.fields(spec.dtype)]
    return Layout(structure, tuple(map(tuple, own)), tuple(shared))


def nested(path: Path | None) -> tuple[Any, ...]:
    """A path in a nested dict as a key path of jax."""
    return tuple(map(jax.tree_util.DictKey, path or ()))


def owners(paths: Sequence[tuple[Any, ...]], leaves: Sequence[tuple[Any, ...]]) -> Callable[[tuple[Any, ...]], tuple[int | None, str]]:
    """How to tell from a path in the state which leaf it belongs to, and what it is called without the leaf's own path.

    A leaf's path stands at the end (the longest such counts), or, where the state keeps several arrays a leaf (SM3),
    before the end; then all leaves must be found in that place, and below them no tree of parameters (as below the
    labels of a partition, which may be called as parameters are).
    """
    index = {path: i for i, path in enumerate(leaves)}
    heads = {path[:n] for path in paths for n in range(len(path) + 1)}

    def at_the_end(path: tuple[Any, ...]) -> int | None:
        return next((start for start in range(len(path) + (not leaves[0])) if path[start:] in index), None)

    @functools.cache
    def holds_arrays(head: tuple[Any, ...]) -> bool:
        below = [path for path in paths for leaf in leaves if path[: len(head) + len(leaf)] == head + leaf]
        return all(head + leaf in heads for leaf in leaves) and all(at_the_end(path) is None for path in below)

    def owner(path: tuple[Any, ...]) -> tuple[int | None, str]:
        start = at_the_end(path)
        if start is not None:
            return index[path[start:]], path_name(path[:start])
        for end in range(len(path) - 1, 0, -1):
            for start in range(end):
                if path[start:end] in index and holds_arrays(path[:start]):
                    return index[path[start:end]], path_name(path[:start] + path[end:])
        return None, path_name(path)

    return owner


def tails(name: str) -> list[str]:
    """The ends of a dotted name, from the last part to the whole."""
    return [name.split(".", n)[-1] for n in range(name.count("."), -1, -1)]


def _short_names(fields: list[Field], taken: set[str]) -> list[Field]:
    """Each field by the shortest tail of its dotted name that is its own and not `taken`: 'nu', not '0.nu'."""
    ends = collections.Counter(tail for field in fields for tail in tails(field.name))
    free = lambda tail: ends[tail] == 1 and tail not in taken and not tail[:1].isdigit()  # noqa: E731
    return [f._replace(name=next(filter(free, tails(f.name)), f.name or "state")) for f in fields]
