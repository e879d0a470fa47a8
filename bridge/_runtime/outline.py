"""Outlining: parts of a program that are equal are compiled once, and the program becomes a sequence of calls."""

# Not strict: most values here are results of functions that jax declares in part.
# pyright: standard

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias, cast

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from bridge._compat.types import Device, PyTreeDef
from bridge._compiler.chunking import fixed_size_chunks
from bridge._ir.classify import called_jaxpr
from bridge._ir.fingerprint import aval_text, params_text
from bridge._ir.jaxpr import backward_slice, is_outlined, literal_value
from bridge._ir.types import Atom, ClosedJaxpr, Eqn, Literal, PyTree, Var, aval_of
from bridge._xla import streams
from bridge._xla.compile import CompilerOptions, LazyExecutable

Abstract: TypeAlias = jax.ShapeDtypeStruct | np.ndarray
# Of parts that are alike: the function, which operands are constants, the first operand of each variable, what replaces which operand.
_Kind: TypeAlias = tuple[int, tuple[bool, ...], tuple[int, ...], tuple[tuple[int, int], ...]]


class _How(NamedTuple):
    """The CPU that pieces are for, and the compiler options."""

    device: Device
    options: CompilerOptions

    def piece(self, function: Callable[..., list[jax.Array]], arguments: tuple[Sequence[Abstract], ...]) -> LazyExecutable:
        """Of lists (donated arrays, arrays, tokens, constants) to one, tokens last."""
        return LazyExecutable(jax.jit(function, donate_argnums=(0,), keep_unused=True).lower(*arguments), self.options)

    def like(self, variables: Iterable[Atom]) -> list[jax.ShapeDtypeStruct]:
        """What these variables are."""
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        avals = map(aval_of, variables)
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type) for aval in avals]


class _Call(NamedTuple):
    """One call of a piece: the places of what it is given, and constants."""

    piece: LazyExecutable
    donated: list[int]
    read: list[int]
    tokens: list[int]
    constants: list[np.ndarray]


class Pieces:
    """What a program was cut into: to be called as the compiled one would be, its donated arguments replaced as there.

    Args:
      calls: of pieces, in their order. Places are those of values: the program's flat arguments, then what one call after the other gives.
      results: the places of the flat results, then of one token for each call that gives some.
      structure: of the results; the last is a list of one token.
    """

    def __init__(self, calls: Sequence[_Call], results: Sequence[int], structure: PyTreeDef) -> None:
        self._calls, self._results, self._structure = calls, results, structure

    @property
    def pieces(self) -> list[LazyExecutable]:
        """Each once; all must be compiled before a call."""
        return list(dict.fromkeys(call.piece for call in self._calls))

    def as_text(self) -> str:
        """The compiled programs of all calls, one after the other."""
        return "\n".join(call.piece.compiled.as_text() for call in self._calls)

    def cost_analysis(self) -> dict[str, float]:
        """The compiler's count of bytes, of all calls together."""
        return {"bytes accessed": sum(call.piece.compiled.cost_analysis().get("bytes accessed", 0.0) for call in self._calls)}

    def __call__(self, *arguments: PyTree) -> PyTree:
        """The results as the program gives them, with a token for each call that has some."""
        values = jax.tree.leaves(arguments)
        before, *orders = streams.stream_ids()
        try:
            for n, (piece, donated, read, tokens, constants) in enumerate(self._calls):
                if tokens:  # the one that it takes is there when all is known: so it may be in an order of its own
                    streams.set_stream(orders[n % len(orders)])
                given = (list(map(values.__getitem__, at)) for at in (donated, read, tokens))
                values += piece.compiled(*given, constants)
        finally:
            streams.set_stream(before)
        results, count = list(map(values.__getitem__, self._results)), self._structure.num_leaves
        *others, token = self._structure.unflatten(results[:count])
        return *others, token + results[count:]


def cut(closed: ClosedJaxpr, structure: PyTreeDef, donated: int, device: Device, options: CompilerOptions) -> Pieces | None:
    """The pieces of a program that calls parts; None where it calls none, or has effects, whose order is that of one program.

    Args:
      closed: the traced program.
      structure: of its results, as of `Pieces`.
      donated: so many of its flat arguments are, each for the flat result of its place.
      device: the CPU that it is for.
      options: the compiler's.
    """
    jaxpr, how = closed.jaxpr, _How(device, options)
    if closed.effects or not any(map(is_outlined, jaxpr.eqns)):
        return None
    early, late = _sorted(closed, donated)
    made = _Calls(jaxpr.invars)
    for kind, eqns in _tiled(early):
        made.add(kind.piece(eqns, None, how), [], kind.read(eqns), kind.results(eqns), [], kind.constants(eqns))
    done = {v for kind in late for eqn in kind.eqns for v in eqn.outvars}
    own = [i for i, v in enumerate(jaxpr.outvars) if isinstance(v, Literal) or v not in done]
    start = made.size
    _add_others(made, closed, own, donated, late, how)
    places = dict(zip(own, range(start, made.size), strict=False))
    tokens = [places.pop(len(jaxpr.outvars) - 1)]
    for kind, eqns in _tiled(late):
        piece = kind.piece(eqns, jaxpr.outvars[-1], how)
        made.add(piece, kind.donated(eqns), kind.read(eqns), kind.results(eqns), tokens[:1], kind.constants(eqns))
        tokens.append(made.size - 1)
    results = [places[i] if i in places else made.at[v] for i, v in enumerate(jaxpr.outvars[:-1])]
    return Pieces(made.calls, results + tokens, structure)


class _Calls:
    """Calls that are put together: of each variable the place, and how many places there are."""

    def __init__(self, arguments: Sequence[Var]) -> None:
        self.calls: list[_Call] = []
        self.at: dict[Atom, int] = {v: i for i, v in enumerate(arguments)}
        self.size = len(arguments)

    def add(
        self,
        piece: LazyExecutable,
        donated: Sequence[Atom],
        read: Sequence[Atom],
        gives: Sequence[Atom],
        tokens: list[int],
        constants: list[np.ndarray],
    ) -> None:
        """Call a piece with what these variables are; it gives others, and a token for each of `tokens`."""
        self.calls.append(_Call(piece, [self.at[v] for v in donated], [self.at[v] for v in read], tokens, constants))
        # What was there before stays the one to be read, and donated: a result may be an argument as it was.
        self.at |= {v: self.size + n for n, v in enumerate(gives) if not isinstance(v, Literal) and v not in self.at}
        self.size += len(gives) + len(tokens)


def _add_others(made: _Calls, closed: ClosedJaxpr, results: Sequence[int], donated: int, late: Sequence[_Alike], how: _How) -> None:
    """Call all that is no part, for these flat results and what later parts read."""
    jaxpr = closed.jaxpr
    later = dict.fromkeys(v for kind in late for eqn in kind.eqns for v in kind.read([eqn]) if v not in made.at)
    outvars = [*(jaxpr.outvars[i] for i in results), *later]
    eqns = backward_slice(jaxpr.eqns, outvars, cast(dict[Var, int], made.at))
    own = dict.fromkeys(jaxpr.invars[i] for i in results if i < donated)
    needed = {v for v in chain(outvars, *(eqn.invars for eqn in eqns)) if not isinstance(v, Literal)}
    read = [v for v in made.at if v in needed and v not in own]
    function = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(invars=[*own, *read], outvars=outvars, eqns=eqns), closed.consts))
    piece = how.piece(lambda own, read, *_: function(*own, *read), (how.like(own), how.like(read), [], []))
    made.add(piece, list(own), read, outvars, [], [])


# ------------------------------------------------------------------ parts that are alike


def _sorted(closed: ClosedJaxpr, donated: int) -> tuple[list[_Alike], list[_Alike]]:
    """The parts that need nothing but arguments of the program, and those that give its results, by their function.

    The latter come after all others: one that reads what others replace is none of them, nor one that does not read what it replaces.
    A part that is neither, or reads an array that is a constant, stays in the program between.
    """
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    argument = {v: i for i, v in enumerate(jaxpr.invars)}
    result = {v: i for i, v in enumerate(jaxpr.outvars) if not isinstance(v, Literal)}
    needed = Counter(v for v in chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)) if not isinstance(v, Literal))
    early: dict[_Kind, list[Eqn]] = {}
    late: dict[_Kind, list[Eqn]] = {}
    for eqn in filter(is_outlined, jaxpr.eqns):
        fixed = tuple(isinstance(v, Literal) or v in constants for v in eqn.invars)
        if any(is_fixed and aval_of(v).size > 1 for is_fixed, v in zip(fixed, eqn.invars, strict=True)):
            continue  # it would be handed over at each call
        first = tuple(i if fixed[i] else eqn.invars.index(v) for i, v in enumerate(eqn.invars))
        given = [(i, v) for i, v in enumerate(eqn.invars) if not fixed[i] and first[i] == i]
        if all(v in result and needed[v] == 1 for v in eqn.outvars):
            replaces = {jaxpr.invars[result[v]]: n for n, v in enumerate(eqn.outvars) if result[v] < donated}
            replaced = tuple((i, replaces[v]) for i, v in given if v in replaces)
            others = [v for _, v in given if v not in replaces]
            if len(replaced) == len(replaces) and all(argument.get(v, donated) >= donated for v in others):
                late.setdefault((id(called_jaxpr(eqn)), fixed, first, replaced), []).append(eqn)
        elif all(v in argument for _, v in given):
            early.setdefault((id(called_jaxpr(eqn)), fixed, first, ()), []).append(eqn)

    def alike(kinds: dict[_Kind, list[Eqn]]) -> list[_Alike]:
        return [_Alike(eqns, fixed, first, replaced, constants) for (_, fixed, first, replaced), eqns in kinds.items()]

    return alike(early), alike(late)


def _tiled(kinds: Iterable[_Alike]) -> Iterator[tuple[_Alike, Sequence[Eqn]]]:
    """Of each kind its calls, so many at a time as one piece makes."""
    for kind in kinds:
        yield from ((kind, eqns) for eqns in fixed_size_chunks(kind.eqns))


_tiles: weakref.WeakValueDictionary[tuple[Hashable, ...], LazyExecutable] = weakref.WeakValueDictionary()


class _Alike:
    """Calls of one function, whose operands come from the like.

    Args:
      eqns: the calls.
      fixed: of each operand whether it is a literal or one of the `constants`.
      first: of each operand the first that is the same variable.
      replaced: each operand that is donated, with the result that takes its place.
      constants: the values of variables.
    """

    def __init__(
        self,
        eqns: Sequence[Eqn],
        fixed: Sequence[bool],
        first: Sequence[int],
        replaced: Sequence[tuple[int, int]],
        constants: dict[Atom, object],
    ) -> None:
        self.eqns, self._constants, self._first = eqns, constants, first
        self._donated, self._replacing = (tuple(pair[n] for pair in replaced) for n in (0, 1))
        self._fixed = tuple(i for i, is_fixed in enumerate(fixed) if is_fixed)
        others = [i for i, n in enumerate(first) if n == i and not fixed[i] and i not in self._donated]
        self._shared = tuple(i for i in others if all(eqn.invars[i] is eqns[0].invars[i] for eqn in eqns))
        self._own = tuple(i for i in others if i not in self._shared)
        self._further = tuple(i for i in range(len(eqns[0].outvars)) if i not in self._replacing)

    def donated(self, eqns: Sequence[Eqn]) -> list[Atom]:
        """What these calls are given in whose place they give results."""
        return [eqn.invars[i] for eqn in eqns for i in self._donated]

    def read(self, eqns: Sequence[Eqn]) -> list[Atom]:
        """What else they are given."""
        return [*(eqns[0].invars[i] for i in self._shared), *(eqn.invars[i] for eqn in eqns for i in self._own)]

    def constants(self, eqns: Sequence[Eqn]) -> list[np.ndarray]:
        """Of each operand that is constant those of all these calls."""
        value = lambda v: literal_value(v) if isinstance(v, Literal) else np.asarray(self._constants[v])  # noqa: E731
        return [np.stack([value(eqn.invars[i]) for eqn in eqns]) for i in self._fixed]

    def results(self, eqns: Sequence[Eqn]) -> list[Var]:
        """What they give, first what replaces what is donated, in its order."""
        return [eqn.outvars[i] for which in (self._replacing, self._further) for eqn in eqns for i in which]

    def piece(self, eqns: Sequence[Eqn], token: Atom | None, how: _How) -> LazyExecutable:
        """That of as many calls, the same for equal ones in this process; with a `token`, a variable, it takes one and gives one."""
        body = cast(ClosedJaxpr, called_jaxpr(eqns[0]))
        count, first, fixed, shared, own, donated, replacing, further = (
            len(eqns), self._first, self._fixed, self._shared, self._own, self._donated, self._replacing, self._further
        )  # fmt: skip
        kinds = tuple(aval_text(aval_of(v)) for v in (*body.jaxpr.constvars, *body.jaxpr.invars))
        key = (
            params_text({"body": body}),
            kinds,
            count,
            first,
            fixed,
            shared,
            donated,
            replacing,
            token is None,
            how.device,
            str(how.options),
        )
        found = _tiles.get(key)
        if found is not None:
            return found
        function = jaxpr_as_fun(body)

        def tile(arrays: list[jax.Array], read: list[jax.Array], tokens: list[jax.Array], constants: list[jax.Array]) -> list[jax.Array]:
            taken, each = iter(arrays), iter(read[len(shared) :])
            given = [
                dict(zip(fixed, (column[n] for column in constants), strict=True))
                | dict(zip(shared, read[: len(shared)], strict=True))
                | {i: next(taken) for i in donated}
                | {i: next(each) for i in own}
                for n in range(count)
            ]
            results = [function(*(operands[i] for i in first)) for operands in given]
            return [x[i] for which in (replacing, further) for x in results for i in which] + [token + 0 for token in tokens]

        tokens = how.like([] if token is None else [token])
        _tiles[key] = found = how.piece(tile, (how.like(self.donated(eqns)), how.like(self.read(eqns)), tokens, self.constants(eqns)))
        return found
