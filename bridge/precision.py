"""What is kept of a parameter beside its transformation's state, and how results become a half type.

Each is an array field of the parameter's state, by the name given here.
"""

from __future__ import annotations

from typing import NamedTuple

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
