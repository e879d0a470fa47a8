"""Who hears of a step beside the hooks of its optimizer: the hooks of all optimizers, and torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bridge._compat.torch import heard


class Listeners(NamedTuple):
    """Who is told before each step and after it.

    before, after: the hooks of all optimizers.
    noted: whether some thread has a profiler.
    profiled: whether one hears this thread.

    Not among them are an `ExecutionTraceObserver` and the annotations of a CUDA memory history, without a profiler: their records then have
    no mark around a step.
    """

    before: Mapping[int, Callable[..., object]]
    after: Mapping[int, Callable[..., object]]
    noted: Callable[[], bool]
    profiled: Callable[[], bool]


FOUND = Listeners(*heard())
