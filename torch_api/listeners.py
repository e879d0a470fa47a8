"""Who hears of a step beside the hooks of its optimizer: the hooks of all optimizers, and torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.autograd import profiler
from torch.optim import Optimizer


class Listeners(NamedTuple):
    """Who is told before each step and after it.

    before, after: the hooks of all optimizers.
    noted: where torch notes, as `_is_profiler_enabled`, that some thread has a profiler.
    profiled: whether one hears this thread.
    """

    before: Mapping[int, Callable[..., Any]]
    after: Mapping[int, Callable[..., Any]]
    noted: Any
    profiled: Callable[[], bool]


def _found() -> Listeners:
    """torch's own, by names that are private; where it has them not, somebody hears each step.

    Not among them are an `ExecutionTraceObserver` and the annotations of a CUDA memory history, without a profiler: their records then have
    no mark around a step.
    """
    try:
        from torch.autograd import _profiler_enabled
        from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

        known = Optimizer.__annotations__.keys() >= {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
        if known and isinstance(profiler._is_profiler_enabled, bool) and isinstance(_profiler_enabled(), bool):
            return Listeners(_global_optimizer_pre_hooks, _global_optimizer_post_hooks, profiler, _profiler_enabled)
    except (ImportError, AttributeError, TypeError):
        pass
    return Listeners({}, {}, SimpleNamespace(_is_profiler_enabled=True), bool)


FOUND = _found()
