"""Cost of one step by the compiler's count; the only support file of contract tests that reads private modules."""

import dataclasses
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pytest

import bridge
import torch_api
from bridge import _process
from bridge._compiler import policy
from bridge._runtime import cache, executable, streaming_stats
from bridge._train import train_program
from bridge._xla import multi_output_fusion

CORES = 2
_ON_ONE_CORE = (1 << 17) * CORES // (CORES - 1)


class Cost(NamedTuple):
    """Cost of one step; traces and compilations are those of the first."""

    bytes_per_element: int
    executables: int
    traces: int
    compilations: int


def not_comparable() -> str | None:
    """Return why counts of this process cannot be compared with those of others; None if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"costs are counted on Linux x86_64, this is {sys.platform} {platform.machine()}"
    if not multi_output_fusion.is_fusion_enabled():
        return "the environment turns off loops with several results"
    return None


@contextmanager
def fixed_environment() -> Iterator[None]:
    """Set all thresholds to those of a machine with 2 cores, and hide every executable that this process has compiled.

    Compile without LLVM's optimizations. That halves the time and changes no count, because XLA fuses loops before LLVM runs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_process, "CORES", CORES)
        patch.setattr(policy, "BUCKETING", dataclasses.replace(policy.BUCKETING, max_gathered_elements=_ON_ONE_CORE))
        on_one_core = {"cores": CORES, "single_core_elements": _ON_ONE_CORE, "single_core_operations": 40 * _ON_ONE_CORE}
        patch.setattr(policy, "THREADING", dataclasses.replace(policy.THREADING, **on_one_core))
        patch.setattr(cache, "_programs", WeakValueDictionary())
        patch.setattr(cache, "_lru", {})
        for module, name in ((executable, "update_options"), (streaming_stats, "update_options"), (train_program, "train_options")):
            patch.setattr(module, name, _without_llvm(getattr(module, name)))
        yield


def _without_llvm(options: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return compiler options that skip LLVM's optimizations."""
    return lambda *arguments: options(*arguments) | {"xla_backend_optimization_level": 0}


def cost(step: Callable[[], Any], stepper: Any, elements: int) -> tuple[Cost, int]:
    """Take two steps; return the cost and the number of traces and compilations that the second step adds.

    Args:
      step: one step.
      stepper: the optimizer or `JaxTrainStep` that `step` calls.
      elements: how many elements are trained.
    """
    before = bridge.traces(), bridge.compilations()
    step()
    first = bridge.traces(), bridge.compilations()
    step()
    second = bridge.traces(), bridge.compilations()
    traces, compilations = (now - then for now, then in zip(first, before, strict=True))
    found = Cost(round(bytes_accessed(stepper) / elements), len(executables(stepper)), traces, compilations)
    return found, sum(second) - sum(first)


def bytes_accessed(stepper: Any) -> float:
    """Return the bytes that one step moves, by the compiler's count."""
    if isinstance(stepper, torch_api.JaxTrainStep):
        return sum(program.bytes_accessed for program in stepper._programs.values())
    return stepper.bytes_accessed()


def executables(stepper: Any) -> set[int]:
    """Return the identities of the executables that a step calls."""
    if isinstance(stepper, torch_api.JaxTrainStep):
        return {id(program.call) for program in stepper._programs.values()}
    found = []
    for launch in stepper._launch_cache.last_used:
        program = launch.executable
        pieces = program._outlined.pieces if program._outlined is not None else [program]
        found += pieces
    for stage in (step.stats_stage for step in stepper._launch_cache.last_steps):
        if stage is not None:
            found += [*filter(None, stage.executables), *(stage.streaming._per_dtype if stage.streaming is not None else ())]
    return set(map(id, found))
