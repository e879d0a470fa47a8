"""Let `betas`, torch's name, stand for the hyperparameters b1 and b2 of an optax transformation in param groups.

OneCycleLR and CyclicLR write `group["betas"]` or `group["momentum"]`, whichever is in the optimizer's defaults.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Self

from .types import Hyperparams, MutableParamGroup, ParamGroup
from .validators import is_sequence

BETAS = "betas"
_FAMILIES = ("b1", "b2", "b3"), ("beta1", "beta2", "beta3"), ("beta",)


def hyperparams_of_betas(hyperparams: Hyperparams, include_momentum: bool = False) -> tuple[str, ...]:
    """Return the hyperparameters that `betas` stands for, in order; none if the transformation has `betas` or `momentum` itself.

    Args:
      hyperparams: the hyperparameters of the transformation.
      include_momentum: whether `betas` may also stand for `momentum`, because other groups have no `momentum`.
    """
    if BETAS in hyperparams:
        return ()
    if "momentum" in hyperparams:
        return ("momentum",) if include_momentum else ()
    for family in _FAMILIES:
        if family[0] in hyperparams:
            return tuple(name for name in family if name in hyperparams)
    return ()


def expand_betas(cls_name: str, values: Hyperparams, names: tuple[str, ...]) -> MutableParamGroup:
    """Return arguments or a group with `betas` replaced by the hyperparameters that it stands for.

    Raises:
      ValueError: `betas` has the wrong length.
      TypeError: `betas` and one of the hyperparameters are both given.
    """
    if BETAS not in values or not names:
        return dict(values)
    for name in names:
        if name in values:
            raise TypeError(f"{cls_name}: both betas and {name} are given; expected one of them.")
    rest = {key: value for key, value in values.items() if key != BETAS}
    return rest | _values_by_name(cls_name, values[BETAS], names)


def _values_by_name(cls_name: str, betas: object, names: tuple[str, ...]) -> dict[str, object]:
    if not is_sequence(betas) or len(betas) != len(names):
        raise ValueError(f"{cls_name}: betas is {betas!r}; expected {len(names)} numbers, for {', '.join(names)}.")
    return dict(zip(names, betas, strict=True))


class BetasGroup(dict[str, Any]):
    """A param group, or the defaults, in which `betas` is an alias of b1 and b2. It reads and writes them, and is not stored itself.

    With no names, `betas` reads (0.0, 0.0) and writes to it are ignored: a group of parameters that no transformation trains.
    """

    __slots__ = ("_names",)

    def __init__(self, group: ParamGroup, names: tuple[str, ...]) -> None:
        super().__init__(group)
        self._names = names

    def __missing__(self, key: str) -> Any:
        if key != BETAS:
            raise KeyError(key)
        return tuple(self[name] for name in self._names) or (0.0, 0.0)  # schedulers and monitors read frozen groups too

    def __contains__(self, key: object) -> bool:
        return key == BETAS or super().__contains__(key)

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is get

    def setdefault(self, key: str, default: object = None) -> Any:
        return self[key] if key == BETAS else super().setdefault(key, default)

    def __setitem__(self, key: str, value: object) -> None:
        if key != BETAS:
            super().__setitem__(key, value)
        elif self._names:  # else no transformation trains the group
            super().update(_values_by_name("param group", value, self._names))
            super().pop(BETAS, None)  # an entry that `dict.update` wrote

    def update(self, *others: Any, **values: object) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # torch.load with weights_only=True accepts OrderedDict. The optimizer turns the groups of a copy into this class again.
        return OrderedDict, (), None, None, iter(self.items())


def expand_betas_entry(group: MutableParamGroup, names: tuple[str, ...]) -> None:
    """Remove a stored `betas` entry from a group, and write it to the hyperparameters that it stands for.

    A group has such an entry if it is a plain dict, saved or added by the user, or if `dict.update` wrote to it.
    """
    if names and dict.__contains__(group, BETAS):
        group.update(_values_by_name("param group", group[BETAS], names))
        del group[BETAS]
