"""Names of parameters and arguments: dotted names, key paths, nested dicts, other names, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def path_name(path: Sequence[object]) -> str:
    """Return the dotted name of a pytree key path: (DictKey('head'), GetAttrKey('weight')) -> 'head.weight'."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # of torch.compile, FSDP and activation checkpointing


def without_wrappers(names: Sequence[str]) -> list[str]:
    """Return the names without the prefixes that wrappers add.

    A leading `module` (DistributedDataParallel, DataParallel, AveragedModel) counts as a wrapper's prefix only if every name has it.
    """
    split = [[part for part in name.split(".") if part not in _WRAPPERS] for name in names]
    while split and all(len(parts) > 1 and parts[0] == "module" for parts in split):
        split = [parts[1:] for parts in split]
    return [".".join(parts) or name for parts, name in zip(split, names, strict=True)]


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest known names, or else the first known names."""
    known = sorted(set(names))
    return _suggestion(text, known) or "Known names: " + ", ".join(known[:8]) + (", ..." if len(known) > 8 else "") + "."


def did_you_mean_or_list(text: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name among few: the closest known names, then all known names."""
    known = sorted(set(names))
    return f"{_suggestion(text, known)} Known: {', '.join(known)}.".lstrip()


def _suggestion(text: str, known: Sequence[str]) -> str:
    folded = {name.casefold(): name for name in known}
    close = [folded[name] for name in difflib.get_close_matches(text.casefold(), folded, n=3, cutoff=0.5)]
    below = [f"{text}.*"] if any(name.startswith(f"{text}.") for name in known) else []
    return "Did you mean " + " or ".join(repr(name) for name in below + close) + "?" if below or close else ""


def rename_learning_rate(title: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments or a param group by name, with `learning_rate` renamed to `lr`.

    Raises:
      TypeError: both names are given. The text begins with the title.
    """
    if "learning_rate" not in values:
        return dict(values)
    if "lr" in values:
        raise TypeError(f"{title}: both lr and learning_rate are given; expected one of them.")
    return {"lr" if name == "learning_rate" else name: value for name, value in values.items()}


def accepts_learning_rate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a function or constructor take its argument `lr` also under optax's name `learning_rate`. A decorator.

    The signature shows `lr` alone. A function without `lr`, or with both, is returned as it is.
    """
    names = list(inspect.signature(function).parameters)
    if "lr" not in names or "learning_rate" in names:
        return function
    title = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if "learning_rate" not in kwargs:
            return function(*args, **kwargs)
        by_position = {"lr": None} if len(args) > names.index("lr") else {}
        return function(*args, **rename_learning_rate(title, by_position | kwargs))

    return call


Path = tuple[str, ...]


def nest(named: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Return named leaves as the nested dict that jax users know: ('head.weight', w) -> {'head': {'weight': w}}.

    Raises:
      ValueError: A name is given twice, or is both a leaf and the prefix of another name.
    """
    tree: dict[str, Any] = {}
    for name, leaf in named:
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"{name!r} is below {part!r}, which is a parameter itself; a nested dict cannot have both.")
        if last in node:
            raise ValueError(f"the name {name!r} is given twice, or is also the prefix of another; names must be unique for a tree.")
        node[last] = leaf
    return tree


def unnest(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as a flat dict by dotted name. This is the inverse of `nest`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= unnest(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_nested_dict(tree: object, what: str, source_function: str) -> Mapping[str, Any]:
    """Return the tree. Raise TypeError if it is no nested dict, and name the function of `bridge` that gives one."""
    if not isinstance(tree, Mapping):
        raise TypeError(f"{what} is {type(tree).__name__}; expected a nested dict, as bridge.{source_function}(module) gives.")
    return tree


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Return a dict from each further name of a tied parameter to its first name.

    Args:
      module: The module.

    Example:
      >>> import bridge, torch
      >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)})
      >>> model["head"].weight = model["embed"].weight
      >>> bridge.tied_names(model)
      {'head.weight': 'embed.weight'}
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known != name:
            ties[name] = known
    return ties


def tree_paths(names: Sequence[str]) -> tuple[Path, ...]:
    """Return the names as key paths of one tree.

    The tree is a nested dict. It is a flat dict if a name occurs twice or is also the prefix of another name. Two models in one optimizer
    may have parameters of the same name: the second one is then called 'weight#2'.
    """
    paths = tuple(tuple(name.split(".")) for name in names)
    unique_paths = set(paths)
    nested = all(path[:n] not in unique_paths for path in paths for n in range(1, len(path))) and len(unique_paths) == len(paths)
    occurrences: Counter[str] = Counter()
    unique = []
    for name in names:
        occurrences[name] += 1
        unique.append(name if occurrences[name] == 1 else f"{name}#{occurrences[name]}")
    return paths if nested else tuple((name,) for name in unique)
