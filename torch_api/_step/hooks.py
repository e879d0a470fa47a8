"""Who observes every step of every optimizer: the hooks of all optimizers, and torch's profilers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bridge._compat.torch import step_observers


class GlobalHooks(NamedTuple):
    """The process-wide observers of a step.

    pre_hooks, post_hooks: the hooks of all optimizers.
    is_any_thread_profiled: whether some thread has a profiler.
    is_this_thread_profiled: whether a profiler records the calling thread.

    An `ExecutionTraceObserver` and the annotations of a CUDA memory history do not count unless a profiler runs: their records then have no
    mark around a step.
    """

    pre_hooks: Mapping[int, Callable[..., object]]
    post_hooks: Mapping[int, Callable[..., object]]
    is_any_thread_profiled: Callable[[], bool]
    is_this_thread_profiled: Callable[[], bool]


GLOBAL_HOOKS = GlobalHooks(*step_observers())
