"""Selectors: which parameters a mask, a label or a learning rate scale applies to."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np
import torch
from jax.core import Tracer

from bridge._interop.tensor_storage import why_unreadable
from bridge._ir.types import PyTree
from bridge._names import did_you_mean, nest, path_name, without_wrappers

Selector: TypeAlias = (
    bool
    | np.bool_
    | str
    | re.Pattern[str]
    | torch.nn.Module
    | torch.Tensor
    | np.ndarray
    | jax.Array
    | Mapping[Any, Any]
    | Iterable[Any]
    | Callable[..., Any]
    | None
)
"""Which parameters an argument applies to, in any form of docs/selectors.md: globs, patterns, functions, modules, trees, lists of rules.

Pytrees of other classes than dicts, lists and tuples are allowed too; they have no type here.
"""
UncheckedSelector: TypeAlias = Any  # what a user gave as a `Selector`, before its form is known
SelectorKind = Literal["mask", "decay_mask", "labels", "labels_or_none", "lr_scale"]


class Decision(NamedTuple):
    """The value that a selector gives one leaf (a bool, a label or a boolean array of the leaf's shape), and the rule that decided it."""

    value: Any
    rule: str


class NamedLeaves(NamedTuple):
    """The leaves that a selector is resolved for, in the order of the result.

    names: dotted names.
    params: the leaves themselves.
    tree: builds the nested pytree of the leaves, for selectors that are trees or functions of the tree.
    has_names: False where the caller had no names, and `names` are only positions.
    resolved_count: the selector was resolved before for so many of the first leaves. Only the others get a decision, and a pattern need
      not match any leaf.
    by_argument_name: whether a function of one argument gets the leaf's name or the tree by the name of its argument. If not, it
      gets the tree, as in optax.
    """

    names: Sequence[str]
    params: Sequence[object]
    tree: Callable[[], PyTree]
    has_names: bool = True
    resolved_count: int = 0
    by_argument_name: bool = False


class _Unmatched:
    def __repr__(self) -> str:
        return "nothing"


_UNMATCHED = _Unmatched()
_PASS_NAMES = "Pass model.named_parameters() instead of model.parameters()."


def resolve_selector(spec: UncheckedSelector, leaves: NamedLeaves, kind: SelectorKind = "mask", title: str | None = None) -> list[Decision]:
    """Resolve a selector on the host, once, to one `Decision` for each leaf after the first `resolved_count`.

    Args:
      spec: any form of docs/selectors.md.
      leaves: names, parameters and tree.
      kind: the values to expect. "labels": a hashable label for every leaf. "labels_or_none": the same, with None for a leaf that no
        rule matches. "mask" and "decay_mask": bools, for "mask" also boolean arrays of the leaf's shape, and False for a leaf that no
        rule matches. "lr_scale": numbers, and 1 for a leaf that no rule matches.
      title: the name of the selector in rules and errors; its kind if None.

    Raises:
      ValueError: a pattern, key, module or parameter matches no leaf; a tree has another structure; a leaf has no label; a value has
        the wrong shape. The text names the cause, what was expected, and the nearest names.
      TypeError: the selector or a value has an unknown form.
    """
    title = kind.removesuffix("_or_none") if title is None else title
    decisions = _resolve(spec, leaves, kind, title)
    new = list(zip(decisions, leaves.names, leaves.params, strict=True))[leaves.resolved_count :]
    return [_validate(decision, name, param, kind, title) for decision, name, param in new]


def snapshot_selector(spec: UncheckedSelector) -> UncheckedSelector:
    """Copy a selector so that it can be resolved again: later changes of its dicts and lists have no effect, and iterators become lists."""
    if type(spec) is dict:
        return {key: snapshot_selector(value) for key, value in spec.items()}
    if type(spec) in (list, tuple):
        return type(spec)(map(snapshot_selector, spec))
    return list(spec) if isinstance(spec, Iterator) else spec


def reads_names(spec: UncheckedSelector) -> bool:
    """Return whether a selector may depend on names. Values for all leaves, modules and parameters do not."""
    if type(spec) in (list, tuple, set):
        pairs = all(isinstance(item, tuple) and len(item) == 2 for item in spec)
        return any(not isinstance(item[1], torch.nn.Parameter) and reads_names(item[0]) if pairs else reads_names(item) for item in spec)
    return not (spec is None or isinstance(spec, bool | np.bool_ | numbers.Real | torch.nn.Module) or _is_array(spec))


def _validate(decision: Decision, name: str, param: Any, kind: SelectorKind, title: str) -> Decision:
    """Return the decision with its value in the type of its kind, or raise an error that names leaf and rule."""
    value, rule = decision
    if kind in ("labels", "labels_or_none"):
        if value is _UNMATCHED or value is None:
            if kind == "labels_or_none":
                return Decision(None, rule)
            raise ValueError(f"labels: no rule gives {name!r} a label ({rule}). Add a rule for it, or ('*', label) last.")
        if _is_array(value) or not isinstance(value, Hashable):
            raise TypeError(f"labels: {name!r} got {value!r} from {rule}; a label is a string or another hashable value.")
        return decision
    if kind == "lr_scale":
        if value is _UNMATCHED:
            return Decision(1.0, rule)
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= float(value) < math.inf:
            raise ValueError(f"lr_scale: {name!r} got {value!r} from {rule}; expected a number that is not negative.")
        return Decision(float(value), rule)
    if value is _UNMATCHED:
        return Decision(False, rule)
    if isinstance(value, bool | np.bool_):
        return Decision(bool(value), rule)
    if kind == "mask" and _is_array(value):
        return _validate_elements(value, rule, name, tuple(np.shape(param)))
    raise TypeError(
        f"{title}: {name!r} got {value!r} ({type(value).__name__}) from {rule}; expected True or False"
        + (" or a bool tensor of the parameter's shape." if kind == "mask" else ".")
    )


def _validate_elements(value: Any, rule: str, name: str, shape: tuple[int, ...]) -> Decision:
    if isinstance(value, Tracer):
        raise TypeError(f"mask: the value for {name!r} is traced ({value}). A mask is decided on the host, outside jit.")
    dtype = _dtype(value)
    if dtype != "bool" or tuple(value.shape) != shape:
        raise ValueError(
            f"mask: {name!r} got an array of shape {tuple(value.shape)} and dtype {dtype} from {rule}; expected shape "
            f"{shape} and dtype bool. For rows, expand a (rows, 1) mask to the full shape."
        )
    if hasattr(value, "full_tensor"):  # a DTensor: every process needs the whole mask
        value = value.full_tensor()
    if isinstance(value, torch.Tensor) and (why := why_unreadable(value)):
        raise ValueError(f"mask: the tensor for {name!r} from {rule} cannot be read: {why}. Give a mask whose storage is whole.")
    array = value.detach().cpu().clone().numpy() if isinstance(value, torch.Tensor) else np.array(value)
    # Arrays that are all True or all False become bools: no array is stored then, and False allocates no state.
    return Decision(bool(array.flat[0]) if array.size and array.all() == array.any() else array, rule)


def _resolve(spec: UncheckedSelector, leaves: NamedLeaves, kind: SelectorKind, where: str) -> list[Decision]:
    """Resolve a selector by its form. The order of the checks matters: an Equinox module is both a callable and a pytree."""
    if spec is None:
        value = True if kind in ("mask", "decay_mask") else _UNMATCHED
        return [Decision(value, f"{where}=None")] * len(leaves.names)
    if isinstance(spec, bool | np.bool_) or _is_array(spec) or (kind == "lr_scale" and isinstance(spec, numbers.Real)):
        return [Decision(spec, f"{where}={spec}" if not _is_array(spec) else f"{where} array")] * len(leaves.names)
    if isinstance(spec, str | re.Pattern):
        return _decide_by_index(_match_pattern(spec, leaves, where), leaves, f"{where} {_format_pattern(spec)}")
    if isinstance(spec, torch.nn.Module):
        rule = f"{where} {type(spec).__name__} module"
        return _decide_by_index(_match_params(spec.parameters(), leaves, rule), leaves, rule)
    if isinstance(spec, Mapping):
        if any(item is None or _is_pytree_node(item) for item in spec.values()) and _is_prefix(spec, leaves):
            return _by_tree(spec, leaves, where)  # with lists or None below, which only jax tells from values
        return _by_prefix(spec, leaves, where)
    if (isinstance(spec, Iterable) and not _is_pytree_node(spec)) or type(spec) in (list, tuple, set):
        return _by_sequence(spec, leaves, kind, where)
    if _is_pytree_node(spec) and not (callable(spec) and _is_function_pytree(jax.tree.leaves(spec))):
        return _by_tree(spec, leaves, f"{where} {type(spec).__name__}")
    if callable(spec):
        return _by_call(spec, leaves, kind, where)
    raise TypeError(
        f"{where}: cannot read a selector of type {type(spec).__name__}: {spec!r}. Expected None, a bool, a glob or a "
        "list of globs, a re.Pattern, a callable, a list of (selector, value), a dict by prefix, a module, parameters, "
        "or a pytree of values."
    )


def _decide_by_index(hits: set[int], leaves: NamedLeaves, rule: str) -> list[Decision]:
    return [Decision(True, rule) if i in hits else Decision(_UNMATCHED, f"not {rule}") for i in range(len(leaves.names))]


def _match_pattern(pattern: str | re.Pattern[str], leaves: NamedLeaves, where: str) -> set[int]:
    """Return the indices of names that match a glob (whole name, case-sensitive) or a regex (`search`), with or without wrappers.

    Raise a ValueError where none matches.
    """
    if not leaves.has_names:
        raise ValueError(f"{where}: the pattern {_format_pattern(pattern)} needs parameter names. {_PASS_NAMES}")
    matches = pattern.search if isinstance(pattern, re.Pattern) else functools.partial(fnmatch.fnmatchcase, pat=pattern)
    hits = {i for names in (leaves.names, without_wrappers(leaves.names)) for i, name in enumerate(names) if matches(name)}
    if not (hits or leaves.resolved_count):
        text = pattern if isinstance(pattern, str) else pattern.pattern
        raise ValueError(
            f"{where}: the pattern {_format_pattern(pattern)} matches none of {len(leaves.names)} parameters. "
            f"{did_you_mean(text, leaves.names)}"
        )
    return hits


def _match_params(params: Iterable[object], leaves: NamedLeaves, rule: str) -> set[int]:
    """Return the indices of leaves that are among these objects. A module may hold frozen parameters too, but not only those."""
    index = {id(param): i for i, param in enumerate(leaves.params)}
    given = list(params)
    hits = {index[id(param)] for param in given if id(param) in index}
    if not (hits or leaves.resolved_count):
        raise ValueError(f"{rule}: none of its {len(given)} parameters is among the {len(leaves.names)} optimized here.")
    return hits


def _by_sequence(spec: Iterable[Any], leaves: NamedLeaves, kind: SelectorKind, where: str) -> list[Decision]:
    """Resolve a list of patterns, of parameters or (name, parameter) pairs, or of (selector, value) pairs where the first match wins."""
    items = list(spec)
    if not items:
        raise ValueError(f"{where}: an empty list selects nothing. Use False to freeze all, None to take all.")
    if all(isinstance(item, torch.Tensor) and item.dtype != torch.bool for item in items):
        rule = f"{where} parameters"
        foreign = [tuple(p.shape) for p in items if not any(p is q for q in leaves.params)]
        if foreign and not leaves.resolved_count:
            raise ValueError(f"{rule}: {len(foreign)} of {len(items)} (first: shape {foreign[0]}) are not optimized here.")
        return _decide_by_index(_match_params(items, leaves, rule), leaves, rule)
    pairs = all(isinstance(item, tuple) and len(item) == 2 for item in items)
    if all(isinstance(item, bool | np.bool_) or _is_array(item) for item in jax.tree.leaves(items)) and (
        not pairs or _is_prefix(spec, leaves)
    ):
        return _by_tree(spec, leaves, where)  # as [(True, False), ...] over [(w, b), ...]: a list of bools is never a list of selectors
    if pairs:
        if all(isinstance(item[1], torch.nn.Parameter) for item in items):
            return _by_sequence([param for _, param in items], leaves, kind, where)
        return _first_match(items, leaves, kind, where)
    if all(isinstance(item, str | re.Pattern | torch.nn.Module) for item in items):
        return _first_match([(item, True) for item in items], leaves, kind, where)
    has_labels = kind in ("labels", "labels_or_none")
    values = (bool, np.bool_, str) if has_labels else (bool, np.bool_)  # no other kind has values that are strings
    if all(_is_pytree_node(item) or isinstance(item, values) for item in items):
        return _by_tree(spec, leaves, where)
    raise TypeError(
        f"{where}: a list holds patterns, parameters, or (selector, value) pairs, not a mix; got "
        + ", ".join(sorted({type(item).__name__ for item in items}))
        + "."
    )


def _first_match(pairs: Sequence[tuple[UncheckedSelector, object]], leaves: NamedLeaves, kind: SelectorKind, where: str) -> list[Decision]:
    decided = [Decision(_UNMATCHED, f"no rule of {where}")] * len(leaves.names)
    for position, (selector, value) in enumerate(pairs):
        rule = f"{where}[{position}]"
        if isinstance(selector, Mapping) or (_is_pytree_node(selector) and not isinstance(selector, list | tuple)):
            raise TypeError(f"{rule}: {type(selector).__name__} cannot select in a list of (selector, value); use a pattern or a callable.")
        for i, picked in enumerate(_resolve(selector, leaves, "mask", rule)):
            if picked.value is not _UNMATCHED and not isinstance(picked.value, bool | np.bool_):
                raise TypeError(
                    f"{rule}: {leaves.names[i]!r} got {picked.value!r} from {picked.rule}; expected True or False from a selector."
                )
            if decided[i].value is _UNMATCHED and picked.value is not _UNMATCHED and picked.value:
                decided[i] = Decision(value, picked.rule)
    return decided


def _by_prefix(spec: Mapping[Any, object], leaves: NamedLeaves, where: str) -> list[Decision]:
    """Resolve a dict by module-path prefix, nested or dotted. The longest matching key wins, and '' matches every leaf.

    A dict that holds dicts is a tree over the parameters, and every leaf must be covered.
    """
    used: set[str] = set()
    flat = dict(_flat_items(spec, ()))
    exact = {"", *_prefixes(leaves.names)}
    plain_keys = {plain: key for plain, key in zip(without_wrappers(list(flat)), flat, strict=True) if key not in exact}
    known = plain_keys | {key: key for key in flat}
    both = zip(leaves.names, without_wrappers(leaves.names), strict=True)
    decisions = [_longest_prefix(flat, known, names, used, where) for names in both]
    idle = [key for key in flat if key not in used]
    if idle and not leaves.resolved_count:
        known = did_you_mean(idle[0], _prefixes(leaves.names)) if leaves.has_names else _PASS_NAMES
        raise ValueError(f"{where}: the key {idle[0]!r} is no parameter or module of these parameters. {known}")
    if any(isinstance(value, Mapping) for value in spec.values()):
        missing = [name for name, d in zip(leaves.names, decisions, strict=True) if d.value is _UNMATCHED]
        if missing:
            raise ValueError(
                f"{where}: the tree has no entry for {missing[0]!r} ({len(missing)} of {len(leaves.names)} leaves are "
                "missing). Expected the nested dict of the parameters, or a prefix of it."
            )
    return decisions


def _flat_items(spec: Mapping[Any, object], path: tuple[str, ...]) -> Iterable[tuple[str, object]]:
    for key, value in spec.items():
        here = (*path, str(key)) if str(key) else path
        if isinstance(value, Mapping) and value:
            yield from _flat_items(value, here)
        else:
            yield ".".join(here), _UNMATCHED if isinstance(value, Mapping) else value


def _longest_prefix(flat: dict[str, object], known: dict[str, str], names: tuple[str, str], used: set[str], where: str) -> Decision:
    """Return the value of the longest key that is a prefix of a name, with or without wrappers.

    Args:
      flat: values by key.
      known: the key of each form of a key.
      names: the name with and without wrappers.
      used: receives the keys that match.
      where: the name of the selector in the rule.
    """
    prefixes = [parts[:n] for parts in (name.split(".") for name in dict.fromkeys(names)) for n in range(len(parts) + 1)]
    matching = [known[prefix] for prefix in map(".".join, sorted(prefixes, key=len, reverse=True)) if prefix in known]
    used.update(matching)
    if matching:
        return Decision(flat[matching[0]], f"{where}[{matching[0]!r}]")
    return Decision(_UNMATCHED, f"no key of {where}")


def _prefixes(names: Sequence[str]) -> set[str]:
    return {".".join(parts[:n]) for name in names for parts in [name.split(".")] for n in range(1, len(parts) + 1)}


def _broadcast_prefix(spec: PyTree, tree: PyTree) -> PyTree:
    """Broadcast a prefix tree of values to the full tree. Raise a ValueError where it is no prefix."""
    values: list[object] = []
    jax.tree.map(lambda value, part: values.extend([value] * len(jax.tree.leaves(part))), spec, tree, is_leaf=_is_value)
    return jax.tree.unflatten(jax.tree.structure(tree), values)


def _is_value(x: object) -> bool:
    return x is None or _is_array(x)


def _is_prefix(spec: PyTree, leaves: NamedLeaves) -> bool:
    try:
        _broadcast_prefix(spec, leaves.tree())
    except ValueError:
        return False
    return True


def _by_tree(spec: PyTree, leaves: NamedLeaves, where: str) -> list[Decision]:
    """Resolve a pytree of values over the parameters' tree, or a prefix of it."""
    tree = leaves.tree()
    try:
        full = _broadcast_prefix(spec, tree)
    except ValueError as error:
        named = _by_attributes(spec, leaves)
        if named is not None:
            return _by_prefix(named, leaves, where)
        raise ValueError(
            f"{where}: the tree does not fit the parameters. Given: {jax.tree.structure(spec, is_leaf=_is_value)}. Expected this "
            f"structure or a prefix of it: {jax.tree.structure(tree)}. First difference: {' '.join(str(error).split())[:300]}"
        ) from error
    values = {path_name(path): v for path, v in jax.tree_util.tree_flatten_with_path(full, is_leaf=_is_value)[0]}
    return [Decision(values[name], f"{where}[{name!r}]") for name in leaves.names]


def _by_attributes(spec: PyTree, leaves: NamedLeaves) -> dict[str, object] | None:
    """Return a tree of other nodes (an Equinox module) as a dict by name, or None where its names do not cover the parameters."""
    flat = jax.tree_util.tree_flatten_with_path(spec, is_leaf=_is_value)[0]
    named = {path_name(path): value for path, value in flat if not callable(value)}
    names = without_wrappers(leaves.names)
    prefixes = _prefixes([*leaves.names, *names])
    fits = all(name in prefixes for name in named)
    covers = all(any(name == key or name.startswith(f"{key}.") for key in named) for name in names)
    return named if fits and covers else None


def _by_call(spec: Callable[..., object], leaves: NamedLeaves, kind: SelectorKind, where: str) -> list[Decision]:
    """Resolve a function: (name, param) -> value or (name) -> value for each leaf, or (tree) -> tree."""
    title = getattr(getattr(spec, "func", spec), "__name__", type(spec).__name__)  # a functools.partial has no name; its function has
    gets = _expected_arguments(spec, title, leaves, where)
    if gets == "tree":
        answer = spec(leaves.tree())
        if answer is None or (callable(answer) and not _is_pytree_node(answer)):
            raise TypeError(f"{where}: {title}(tree) returned {answer!r}; expected a pytree of values over the parameters.")
        return _resolve(answer, leaves, kind, f"{where} {title}()")
    rule = f"{where} {title}()"
    pairs = list(zip(leaves.names, leaves.params, strict=True))[leaves.resolved_count :]
    new = [Decision(spec(name) if gets == "name" else spec(name, param), rule) for name, param in pairs]
    return [Decision(_UNMATCHED, rule)] * leaves.resolved_count + new


_FORMS = (
    "(name, param) or (tree) or (name). A single argument gets the parameter's name if it is annotated str or called name, n or path, and "
    "the pytree of parameters if it is called tree, params or updates."
)


def _expected_arguments(function: Callable[..., object], title: str, leaves: NamedLeaves, where: str) -> Literal["name", "tree", "both"]:
    """Return what a selector function expects: the name and the parameter, only the name, or the pytree of all parameters."""
    try:
        arity = required_arguments(function)
    except ValueError as error:  # some builtins have no signature
        raise TypeError(f"{where}: the arguments of {title} cannot be read. Wrap it in a lambda of {_FORMS}") from error
    if arity == 2:
        return "both"
    if arity != 1:
        forms = _FORMS if leaves.by_argument_name else "(name, param) or (tree)."
        raise TypeError(f"{where}: {title} takes {arity} arguments; expected {forms}")
    if not leaves.by_argument_name:
        return "tree"
    parameters = inspect.signature(function).parameters.values()
    argument = next(p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if argument.annotation in (str, "str") or argument.name in ("name", "n", "path"):
        return "name"
    if argument.name in ("tree", "params", "updates"):
        return "tree"
    raise TypeError(f"{where}: {title} takes one argument, {argument.name!r}, which says neither name nor pytree; expected {_FORMS}")


def required_arguments(function: Callable[..., object]) -> int:
    """Count the required arguments of a selector function. 2 means (name, param); 1 means (tree), or (name) by the argument's name."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) and len(positional) < 2:
        return 2
    return sum(p.default is p.empty for p in positional)


def _is_array(value: object) -> TypeGuard[torch.Tensor | np.ndarray | jax.Array]:
    return isinstance(value, torch.Tensor | np.ndarray | jax.Array)


def _dtype(array: torch.Tensor | np.ndarray | jax.Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def _is_function_pytree(leaves: list[object]) -> bool:
    """Return whether a callable pytree with these leaves is a function and not a mask: it holds callables, or no leaf."""
    return not leaves or any(callable(leaf) for leaf in leaves)


def _is_pytree_node(value: object) -> bool:
    return value is not None and not jax.tree_util.all_leaves([value])


def _format_pattern(pattern: str | re.Pattern[str]) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"re {pattern.pattern!r}"


def resolve_mask(spec: UncheckedSelector, params: PyTree) -> PyTree:
    """Resolve a mask selector to a pytree of bools (or boolean arrays of the leaf's shape), True = optimized.

    Args:
      spec: any form of docs/selectors.md.
      params: a pytree of arrays or tensors, whose key paths joined by dots are the names; or an `nn.Module`.

    Returns:
      A pytree of the structure of `params`; for a module a dict by parameter name.

    Raises:
      ValueError: a pattern, key, module or parameter matches no leaf; a tree has another structure; a value has the wrong shape.
        The text names the cause, what was expected, and the nearest names.
      TypeError: the selector or a value has an unknown form.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> bridge.resolve_mask("*.weight", {"head": {"weight": jnp.ones(1), "bias": jnp.ones(1)}})
      {'head': {'bias': False, 'weight': True}}
    """
    return _resolve_tree(spec, params, "mask")


def resolve_labels(spec: UncheckedSelector, params: PyTree) -> PyTree:
    """Resolve a label selector to a pytree of labels.

    Args:
      spec: any form of docs/selectors.md.
      params: as for `resolve_mask`.

    Returns:
      As `resolve_mask`, with labels.

    Raises:
      ValueError, TypeError: as `resolve_mask`; and a ValueError for a leaf that no rule matches.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> bridge.resolve_labels([("*.bias", "b"), ("*", "a")], {"head": {"weight": jnp.ones(1), "bias": jnp.ones(1)}})
      {'head': {'bias': 'b', 'weight': 'a'}}
    """
    return _resolve_tree(spec, params, "labels")


def _resolve_tree(spec: UncheckedSelector, params: PyTree, kind: SelectorKind) -> PyTree:
    if isinstance(params, torch.nn.Module):
        named = dict(params.named_parameters())
        leaves = NamedLeaves(list(named), list(named.values()), lambda: nest(named.items()))
        return {name: d.value for name, d in zip(named, resolve_selector(spec, leaves, kind), strict=True)}
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = NamedLeaves([path_name(path) for path, _ in with_paths], [leaf for _, leaf in with_paths], lambda: params)
    return treedef.unflatten([d.value for d in resolve_selector(spec, leaves, kind)])
