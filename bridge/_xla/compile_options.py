"""The compiler options of updates and of training steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import jax
import numpy as np

from bridge._compat.types import Device
from bridge._ir.queries import Properties

from .compile import CompilerOptions

# XLA's options for the order in which a CPU program runs its operations. A jaxlib that knows the first one ignores the second.
_SCHEDULER_OPTIONS = (
    ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),
    ("xla_cpu_enable_concurrency_optimized_scheduler", False),
)


# The vector width in bits that LLVM prefers. XLA's default is 256. CPUs with narrower vectors ignore it.
_VECTOR_WIDTH = "xla_cpu_prefer_vector_width", 512


def update_options(device: Device) -> CompilerOptions:
    """Return the compiler options of an update: on a CPU, the widest vectors, and the schedule that needs the least memory.

    XLA's default schedule starts all leaves before it ends one, so that all intermediate values exist at once. The C library gives large
    memory back to the system after each call, and the next call pays a page fault for each page. The vectors matter where memory is fast:
    then an update also waits for its arithmetic. A schedule or width that the user sets in XLA_FLAGS stays.
    """
    if device.platform != "cpu":
        return {}
    set_by_user = os.environ.get("XLA_FLAGS", "")
    orders = () if any(option in set_by_user for option, _ in _SCHEDULER_OPTIONS) else _SCHEDULER_OPTIONS
    widths = () if _VECTOR_WIDTH[0] in set_by_user else (_VECTOR_WIDTH,)
    return dict(known for options in (orders, widths) for known in _first_supported(options))


def _first_supported(options: Sequence[tuple[str, str | bool | int]]) -> list[tuple[str, str | bool | int]]:
    """Return the first of these compiler options that this jaxlib takes, in a list; [] if it takes none."""
    return next(([(option, value)] for option, value in options if _is_supported(option, value)), [])


# XLA's option for the operations that its CPU compiler passes to the YNN library: all but convolutions, or reductions alone.
LIBRARY_OPTION = "xla_cpu_experimental_ynn_fusion_type"
_NO_CONVOLUTIONS, _REDUCTIONS_ONLY = "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", "LIBRARY_FUSION_TYPE_REDUCE"

# XLA's option that turns off compiler passes, and the names of three: the one that removes barriers, the one that outlines small loops as
# functions, and the one that divides loops among cores. A pass that this XLA does not have is ignored.
_PASSES_OPTION, _BARRIER_REMOVAL, _SMALL_LOOP_OUTLINING = "xla_disable_hlo_passes", "cse_barrier_expander", "small-while-loop-hoisting"
_LOOP_PARALLELIZATION = "cpu-parallel-task-assigner"


def train_options(device: Device, properties: Properties) -> CompilerOptions:
    """Return the compiler options of a training step: on a CPU, barriers stay, and XLA chooses who computes convolutions and products.

    Barriers: XLA's CPU compiler removes them before fusion unless that pass is off. `bridge._tracing.materialize` and
    `bridge._compiler.passes.loop_order` say what they are for.

    Convolutions: jaxlib 0.10.2 passes them to a library that runs small ones on one core, where XLA's own use all cores. So they stay with
    XLA, except in a program with grouped convolutions, which the library computes faster.

    Matrix products: the library computes large ones faster than XLA, and small ones slower. It gets them if the program has a large one.

    A jaxlib without these options, and a user who sets them in XLA_FLAGS, keep what they have.
    """
    if device.platform != "cpu":
        return {}
    library = _NO_CONVOLUTIONS if properties.has_large_product else _REDUCTIONS_ONLY
    return keep_barriers(properties) | ({} if properties.has_grouped_convolution else _unless_set(LIBRARY_OPTION, library))


def keep_barriers(properties: Properties) -> CompilerOptions:
    """Return the compiler options with which the barriers of a CPU program stay, if they can.

    If a loop has barriers, small loops must not be outlined as functions: jaxlib 0.10.2 knows no barrier there and crashes (shape.h:843,
    "Check failed") or refuses ("Unhandled opcode"). If the computation of a reduction has barriers, no barrier stays: XLA would crash
    (computation_partitioner.cc:269).
    """
    left_out = f"{_BARRIER_REMOVAL},{_SMALL_LOOP_OUTLINING}" if properties.has_barrier_in_loop else _BARRIER_REMOVAL
    return {} if properties.has_barrier_in_reduction else _unless_set(_PASSES_OPTION, left_out)


def single_threaded(options: CompilerOptions) -> CompilerOptions:
    """Return compiler options of a CPU program with which none of its loops is divided among cores."""
    if _PASSES_OPTION in os.environ.get("XLA_FLAGS", ""):
        return options
    left_out = ",".join(filter(None, (options.get(_PASSES_OPTION), _LOOP_PARALLELIZATION)))
    return options | _unless_set(_PASSES_OPTION, left_out)


def xla_schedule(options: CompilerOptions) -> CompilerOptions:
    """Return the options of an update without a schedule, for a program whose loops store almost nothing between them.

    XLA's default schedule starts with the scalars and the small buckets, and the one that saves memory ends with them.
    """
    return {option: value for option, value in options.items() if option not in dict(_SCHEDULER_OPTIONS)}


def _unless_set(option: str, value: str | bool | int) -> CompilerOptions:
    """Return a compiler option if this jaxlib takes it and the user has not set it in XLA_FLAGS; else {}."""
    return {} if option in os.environ.get("XLA_FLAGS", "") or not _is_supported(option, value) else {option: value}


@functools.cache
def _is_supported(option: str, value: str | bool | int) -> bool:
    """Return whether this jaxlib takes a compiler option, by compiling a program of one operation with it."""
    try:
        options: CompilerOptions = {option: value}
        _trivial_program().compile(compiler_options=options)
    except RuntimeError:
        return False
    return True


@functools.cache
def _trivial_program() -> jax.stages.Lowered:
    return jax.jit(lambda x: x).lower(np.float32(0))  # float32, so that the program does not depend on the thread's x64 setting
