"""`betas` of the groups of a transformation that calls its momenta b1 and b2: the name that torch's optimizers and schedulers use.

OneCycleLR and CyclicLR write `group["betas"]` or `group["momentum"]`, and look in the defaults which of them there is.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Self

from .types import Hyperparams, MutableParamGroup, ParamGroup
from .validators import is_sequence

BETAS = "betas"
_FAMILIES = ("b1", "b2", "b3"), ("beta1", "beta2", "beta3"), ("beta",)


def named_by(hyperparams: Hyperparams, extended: bool = False) -> tuple[str, ...]:
    """The hyperparams that `betas` stands for, in order; none where the transformation has `betas` or `momentum` itself.

    `extended`: `betas` may also stand for `momentum`, beside groups that have no such key.
    """
    if BETAS in hyperparams:
        return ()
    if "momentum" in hyperparams:
        return ("momentum",) if extended else ()
    for family in _FAMILIES:
        if family[0] in hyperparams:
            return tuple(name for name in family if name in hyperparams)
    return ()


def spread(owner: str, given: Hyperparams, names: tuple[str, ...]) -> MutableParamGroup:
    """The arguments or the group with `betas` as the hyperparams that it stands for.

    Raises:
      ValueError: `betas` has another length.
      TypeError: one of the hyperparams is given beside it.
    """
    if BETAS not in given or not names:
        return dict(given)
    for name in names:
        if name in given:
            raise TypeError(f"{owner}: both betas and {name} are given; expected one of them.")
    rest = {key: value for key, value in given.items() if key != BETAS}
    return rest | _each(owner, given[BETAS], names)


def _each(owner: str, betas: object, names: tuple[str, ...]) -> dict[str, object]:
    if not is_sequence(betas) or len(betas) != len(names):
        raise ValueError(f"{owner}: betas is {betas!r}; expected {len(names)} numbers, for {', '.join(names)}.")
    return dict(zip(names, betas, strict=True))


class Group(dict[str, Any]):
    """A param group, or the defaults, in which `betas` is another name of b1 and b2: it reads and writes them, and is no entry.

    Without names for it, `betas` is empty, and what is written to it is dropped: the group of parameters that nobody trains.
    """

    __slots__ = ("_names",)

    def __init__(self, group: ParamGroup, names: tuple[str, ...]) -> None:
        super().__init__(group)
        self._names = names

    def __missing__(self, key: str) -> Any:
        if key != BETAS:
            raise KeyError(key)
        return tuple(self[name] for name in self._names) or (0.0, 0.0)  # where nobody trains, schedulers and monitors still ask

    def __contains__(self, key: object) -> bool:
        return key == BETAS or super().__contains__(key)

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is get

    def setdefault(self, key: str, default: object = None) -> Any:
        return self[key] if key == BETAS else super().setdefault(key, default)

    def __setitem__(self, key: str, value: object) -> None:
        if key != BETAS:
            super().__setitem__(key, value)
        elif self._names:  # else nobody trains the group
            super().update(_each("param group", value, self._names))
            super().pop(BETAS, None)  # written by `dict.update`

    def update(self, *others: Any, **values: object) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Of a class that torch.load takes with weights_only=True. The optimizer that is made of a copy has groups of this one again.
        return OrderedDict, (), None, None, iter(self.items())


def take_betas(group: MutableParamGroup, names: tuple[str, ...]) -> None:
    """Take `betas` out of a group that has it as an entry, and write it to the hyperparams that it stands for.

    So has a plain group, which was put in by hand or saved, and one that was written to by `dict.update`.
    """
    if names and dict.__contains__(group, BETAS):
        group.update(_each("param group", group[BETAS], names))
        del group[BETAS]
